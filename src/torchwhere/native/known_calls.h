// Records a collective that Python issues, if Python has recorded the same call before.
//
// Calls with the same key (`call_key.h`) have the same record, except for its number, time and place.
// All of this runs with the GIL, which torch has released before it calls the op.
#pragma once

#include "call_key.h"
#include "call_place.h"
#include "reductions.h"

namespace torchwhere {

// As in `blackbox/file_format.py`.
constexpr uint8_t FLAG_LOADS = 64, FLAG_SAVES = 128;
constexpr size_t MOST_CALLS = 4096, MOST_STORAGES = 64;

struct KnownCall {
  std::vector<uint64_t> words;
  std::vector<Owned> units;  // weak references: an address in `words` may get another object
  Record record;     // all fields that repeat
  int64_t counter;   // index of the words of the stream; negative: none
  Owned numbers;     // the Count of the stream
  uint64_t label;    // the index of op and group in `CollectiveRecorder`
  int device_index;  // negative: on the CPU
  End end;
};

// The calls that Python has recorded in this watch. Used only with the GIL. Never freed: threads may
// still use it at exit.
struct KnownCalls {
  std::unordered_multimap<uint64_t, KnownCall> calls;  // by the hash of their keys
  // Objects of Python may run code when they are freed: by then the table is empty.
  void forget() { auto old_calls = std::exchange(calls, {}); }
};
inline KnownCalls& known_calls = *new KnownCalls;

// -- recording ------------------------------------------------------------------------------------

inline bool is_alive(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* object = nullptr;
  Owned alive(PyWeakref_GetRef(reference, &object) == 1 ? object : nullptr);
  return alive.get() != nullptr;
#else
  return PyWeakref_GetObject(reference) != Py_None;
#endif
}

// Returns the known call with this key; null if there is none.
inline const KnownCall* find_call(const CallKey& key, uint64_t hash) {
  auto [first, last] = known_calls.calls.equal_range(hash);
  for (auto at = first; at != last; ++at) {
    const KnownCall& call = at->second;
    bool is_same = key == call.words;
    for (const Owned& unit : call.units) is_same = is_same && is_alive(unit.get());
    if (is_same) return &call;
  }
  return nullptr;
}

inline uint8_t flags_of_part(unsigned char part) {
  uint8_t loads = part == DATA || part == EVALUATION ? FLAG_LOADS : 0;
  uint8_t saves = part == CHECKPOINT || part == EVALUATION ? FLAG_SAVES : 0;
  return loads | saves;
}

// The box in which Python has recorded a call of this thread: Python notes which threads issue
// collectives.
inline thread_local uint64_t box_of_thread = 0;

// A call that was recorded, and the mark that is due on its device, if it is on one.
struct RecordedCall {
  bool is_on_device = false;
  uint64_t t_ns = 0;
  DueMark due{};
};

// Writes the record of a known call.
inline RecordedCall write_known(Box* box, const KnownCall& call, Record record) {
  const ThreadTrack* track = current.track;
  record.flags |= flags_of_part(box->clock.part);
  record.extra = reinterpret_cast<Count*>(call.numbers.get())->next.fetch_add(1);
  Mark mark = put_collective(box, track, &record, call.counter);
  {
    std::lock_guard<std::mutex> guard(kernel.lock);
    kernel.recent[kernel.recorded++ % 3] = {record.number, record.extra, call.label};
  }
  if (call.device_index < 0) return {};
  return {true, record.t_ns, {call.end, static_cast<c10::DeviceIndex>(call.device_index), mark}};
}

// The arguments of the call that Python handles on this thread now. Null: it cannot be known.
struct CallInPython {
  const CallKey* arguments = nullptr;
  bool is_known = false;
};
inline thread_local CallInPython call_in_python;

// Records a call with the key of these arguments, to which it adds the frames meanwhile. Returns
// false if Python must record it; then `is_known` says whether Python has done that before.
inline bool record_known(CallKey* key, RecordedCall* recorded, bool* is_known) {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (thread == nullptr || box_of_thread == 0) return false;
  WithGil with_gil;
  size_t size = key->size();
  bool has_frames = add_frames(key, Owned(PyThreadState_GetFrame(thread)), false, nullptr) &&
      key->is_complete();
  const KnownCall* call = has_frames ? find_call(*key, key->hash()) : nullptr;
  key->truncate(size);
  Box* box = kernel.box.load();
  bool is_open = box != nullptr && box->id == box_of_thread && current.box == box->id &&
      box->words != nullptr && !(box->step >> 32) && !kernel.defers_to_python.load();
  *is_known = is_open && call != nullptr;
  if (!*is_known) return false;
  Record record = call->record;
  if (!set_place(&record, current.track, box)) return false;
  *recorded = write_known(box, *call, record);
  return true;
}

// -- launching ------------------------------------------------------------------------------------

inline void add_storages(std::vector<const void*>* storages, const c10::IValue& value) {
  if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) add_storages(storages, item);
  } else if (value.isTensor() && value.toTensor().has_storage()) {
    if (storages->size() < MOST_STORAGES)
      storages->push_back(value.toTensor().storage().unsafeGetStorageImpl());
  }
}

// Passes a recorded call on to torch, with marks on its device before and after it.
inline void launch_known(
    const CollectiveOp& op,
    const c10::OperatorHandle& handle,
    c10::DispatchKeySet below,
    torch::jit::Stack* stack,
    RecordedCall recorded) {
  if (!device_progress->is_on) {
    handle.redispatchBoxed(below, stack);
    return;
  }
  DueMark& due = recorded.due;
  std::vector<const void*> storages;
  if (recorded.is_on_device) {
    const c10::IValue* arguments = stack->data() + stack->size() - op.arguments;
    for (int at : op.tensors_at) add_storages(&storages, arguments[at]);
    device_progress->mark(due.index, recorded.t_ns, due.mark);
    due.mark.point = Point::DONE;
  }
  handle.redispatchBoxed(below, stack);
  bool has_work = !stack->empty() && stack->back().isObject();
  launched(due, has_work ? held_in(stack->back()) : nullptr, std::move(storages));
}

// -- functions for Python -------------------------------------------------------------------------

// Returns the key of the call that Python handles, and weak references to the objects of FSDP in it.
inline bool key_of_call(PyObject* frame, CallKey* key, std::vector<Owned>* units) {
  *key = *call_in_python.arguments;
  if (frame == Py_None) frame = nullptr;
  Py_XINCREF(frame);
  if (!add_frames(key, Owned(frame), true, units) || !key->is_complete()) return false;
  for (Owned& unit : *units) {
    unit = Owned(PyWeakref_NewRef(unit.get(), nullptr));
    if (unit.get() == nullptr) return false;
  }
  return true;
}

// learn_call(box, frame, label, numbers, counter, device_index, end, kind, flags, line, graph,
// subject, beneficiary): the extension records the next calls like this one, which Python has just
// recorded into this box. Does nothing if another watch has begun meanwhile. `frame` is the innermost
// frame, or None. The counter is -1 if there is none, the line 0 if it is that of the backward.
inline PyObject* learn_call(PyObject*, PyObject* args) {
  PyObject *box_object, *frame, *numbers;
  unsigned long long label;
  long long counter;
  int device_index, end;
  unsigned int kind, flags, line, graph, subject, beneficiary;
  if (!PyArg_ParseTuple(
          args,
          "OOKOLiiIIIIII",
          &box_object,
          &frame,
          &label,
          &numbers,
          &counter,
          &device_index,
          &end,
          &kind,
          &flags,
          &line,
          &graph,
          &subject,
          &beneficiary))
    return nullptr;
  if (call_in_python.arguments == nullptr || call_in_python.is_known) Py_RETURN_NONE;
  CallKey key;
  std::vector<Owned> units;
  auto* box = reinterpret_cast<Box*>(box_object);
  bool has_key = kernel.box.load() == box && key_of_call(frame, &key, &units);
  if (PyErr_Occurred()) return nullptr;
  if (!has_key || kernel.box.load() != box) Py_RETURN_NONE;
  box_of_thread = box->id;
  Record record{};
  record.kind = static_cast<uint8_t>(kind);
  record.flags = static_cast<uint8_t>(flags);
  record.line = line;
  record.graph = graph;
  record.subject = subject;
  record.beneficiary = beneficiary;
  Py_INCREF(numbers);
  KnownCall call{
      key.words(),
      std::move(units),
      record,
      counter,
      Owned(numbers),
      label,
      device_index,
      static_cast<End>(end)};
  uint64_t hash = key.hash();
  if (known_calls.calls.size() >= MOST_CALLS) known_calls.forget();
  auto [first, last] = known_calls.calls.equal_range(hash);
  for (auto at = first; at != last; ++at) {
    if (!(key == at->second.words)) continue;
    std::swap(at->second, call);
    Py_RETURN_NONE;
  }
  known_calls.calls.emplace(hash, std::move(call));
  Py_RETURN_NONE;
}

// forget_calls(): the name of a module or of a group has changed, or a group was freed, whose address
// another group may get. Forgets the buckets of DDP too: they have the name of their group.
inline PyObject* forget_calls(PyObject*, PyObject*) {
  known_calls.forget();
  forget_all_buckets();
  Py_RETURN_NONE;
}

}  // namespace torchwhere
