// What identifies a collective that Python issues: its op, its arguments (groups, shapes, dtypes,
// peers; not the data), and the way from the user's line to the op: the instructions of all Python
// frames in between, and the FSDP unit in them.
//
// The arguments are read without the GIL, the frames with it.
#pragma once

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "buckets.h"
#include "modules.h"
#include "owned.h"

namespace torchwhere {

constexpr size_t MOST_WORDS = 256, MOST_CODES = 1 << 16;

// -- the key and the arguments --------------------------------------------------------------------

// Numbers that identify a call: of its op, its arguments and its frames.
class CallKey {
 public:
  void add(uint64_t word) {
    if (size_ < MOST_WORDS) words_[size_] = word;
    ++size_;
  }
  void add(const void* pointer) { add(reinterpret_cast<uint64_t>(pointer)); }

  size_t size() const { return size_; }
  void truncate(size_t size) { size_ = size; }
  bool is_complete() const { return size_ <= MOST_WORDS; }

  uint64_t hash() const {
    uint64_t mixed = size_;
    for (size_t at = 0; at < size_; ++at)
      mixed = (mixed ^ words_[at]) * 0x9E3779B97F4A7C15u, mixed ^= mixed >> 29;
    return mixed;
  }

  bool operator==(const std::vector<uint64_t>& words) const {
    return words.size() == size_ && std::equal(words.begin(), words.end(), words_.begin());
  }

  std::vector<uint64_t> words() const { return {words_.begin(), words_.begin() + size_}; }

 private:
  std::array<uint64_t, MOST_WORDS> words_;
  size_t size_ = 0;
};

inline void add_tensor(CallKey& key, const at::Tensor& tensor) {
  if (!tensor.defined()) return key.add(~0ull);
  c10::Device device = tensor.device();
  auto device_type = static_cast<uint64_t>(device.type());
  auto device_index = static_cast<uint8_t>(device.index());
  auto layout = static_cast<uint64_t>(tensor.layout());
  auto dtype = static_cast<uint64_t>(tensor.scalar_type());
  c10::IntArrayRef sizes = tensor.sizes();  // raises an exception if they are symbolic
  key.add(sizes.size() << 32 | layout << 24 | device_type << 16 | device_index << 8 | dtype);
  for (int64_t size : sizes) key.add(static_cast<uint64_t>(size));
}

// Adds an argument. Returns false for a type that no collective of today has.
inline bool add_value(CallKey& key, const c10::IValue& value) {
  if (value.isTensor()) {
    add_tensor(key, value.toTensor());
  } else if (value.isList()) {
    c10::ArrayRef<c10::IValue> list = value.toListRef();
    key.add(list.size());
    for (const c10::IValue& item : list)
      if (!add_value(key, item)) return false;
  } else if (value.isInt()) {
    key.add(static_cast<uint64_t>(value.toInt()));
  } else if (value.isBool()) {
    key.add(static_cast<uint64_t>(value.toBool()));
  } else if (value.isNone()) {
    key.add(~1ull);
  } else {
    return false;
  }
  return true;
}

inline c10::intrusive_ptr_target* held_in(const c10::IValue& value) {
  return value.toObjectRef().getSlot(0).toCapsule().get();
}

// Adds the arguments of a call. Returns false if it cannot be known.
inline bool add_arguments(
    CallKey& key, const CollectiveOp& op, const torch::jit::Stack& stack) {
  key.add(&op);
  const c10::IValue* arguments = stack.data() + stack.size() - op.arguments;
  try {
    for (int at = 0; at < static_cast<int>(op.arguments); ++at) {
      const c10::IValue& value = arguments[at];
      if (at == op.group_at)
        key.add(held_in(value));
      else if (at == op.reduce_op_at)
        key.add(static_cast<uint64_t>(static_cast<c10d::ReduceOp*>(held_in(value))->op_));
      else if (!add_value(key, value))
        return false;
    }
  } catch (const std::exception&) {  // symbolic sizes, or an object of another kind
    return false;
  }
  return key.is_complete();
}

// -- frames ---------------------------------------------------------------------------------------

// What `python_stack.frame_role` says about the frames of a code object.
constexpr int64_t ENDS_WAY = 1, HOLDS_UNIT = 2, HOLDS_HANDLE = 4, IS_JOIN_HOOK = 8, UNKNOWN = -1;

// Returns a variable of a frame; null if the frame has none of this name.
inline Owned variable_of(PyFrameObject* frame, PyObject* name) {
#if PY_VERSION_HEX >= 0x030C0000
  PyObject* value = PyFrame_GetVar(frame, name);
#else
  Owned variables(PyFrame_GetLocals(frame));
  PyObject* value =
      variables.get() == nullptr ? nullptr : PyObject_GetItem(variables.get(), name);
#endif
  if (value == nullptr) PyErr_Clear();
  return Owned(value);
}

// The roles of the code objects that Python has seen in this watch. Used only with the GIL. Never
// freed: threads may still use it at exit.
struct FrameRoles {
  Table of;                  // by the address of a code object
  std::vector<Owned> codes;  // so that these addresses stay unique
  Owned function;            // `python_stack.frame_role`
  PyObject *self_name = nullptr, *handle_name = nullptr;

  void begin(PyObject* role_function) {
    if (self_name == nullptr) self_name = PyUnicode_InternFromString("self");
    if (handle_name == nullptr) handle_name = PyUnicode_InternFromString("handle");
    Py_INCREF(role_function);
    function = Owned(role_function);
  }

  void end() {
    of = Table();
    auto old_codes = std::exchange(codes, {});
    Owned old_function(std::move(function));
  }
};
inline FrameRoles& frame_roles = *new FrameRoles;

// The role of a code object. With `learns`, Python says it if it is new, which may raise an error.
inline int64_t role_of(PyCodeObject* code, bool learns) {
  auto address = reinterpret_cast<uint64_t>(code);
  if (Table::Slot* slot = frame_roles.of.find(address)) return slot->value;
  bool has_room = frame_roles.codes.size() < MOST_CODES;
  if (!learns || !has_room || frame_roles.function.get() == nullptr) return UNKNOWN;
  auto* object = reinterpret_cast<PyObject*>(code);
  Owned answer(PyObject_CallOneArg(frame_roles.function.get(), object));
  int64_t role = answer.get() == nullptr ? UNKNOWN : PyLong_AsLongLong(answer.get());
  if (PyErr_Occurred()) return UNKNOWN;
  Py_INCREF(object);
  frame_roles.codes.emplace_back(object);
  frame_roles.of[address] = role;
  return role;
}

// Adds the frames from the innermost one to that of the user's code, like `python_stack.read`. Adds
// the objects of FSDP in them, and returns these in `units` if that is given. Returns false if only
// Python can tell where the way leads, or if there was an error.
inline bool add_frames(CallKey* key, Owned frame, bool learns, std::vector<Owned>* units) {
  while (frame.get() != nullptr) {
    Owned code(PyFrame_GetCode(frame.frame()));
    int64_t role = role_of(code.code(), learns);
    if (role == UNKNOWN || role & IS_JOIN_HOOK) return false;
    key->add(code.get());
    key->add(static_cast<uint64_t>(PyFrame_GetLasti(frame.frame())));
    if (role & (HOLDS_UNIT | HOLDS_HANDLE)) {
      bool is_unit = role & HOLDS_UNIT;
      Owned unit =
          variable_of(frame.frame(), is_unit ? frame_roles.self_name : frame_roles.handle_name);
      key->add(unit.get());
      if (units != nullptr && unit.get() != nullptr) units->push_back(std::move(unit));
    }
    frame = Owned(PyFrame_GetBack(frame.frame()));
    if (role & ENDS_WAY) {
      if (frame.get() == nullptr) return true;
      Owned caller(PyFrame_GetCode(frame.frame()));
      int64_t role_of_caller = role_of(caller.code(), learns);
      return role_of_caller != UNKNOWN && !(role_of_caller & IS_JOIN_HOOK);
    }
  }
  return true;
}

}  // namespace torchwhere
