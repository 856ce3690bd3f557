// Records which module runs: the hot path of `hooks/modules.py`. All of this runs with the GIL.
#pragma once

#include <vector>

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>

#include "thread_track.h"

namespace torchwhere {

constexpr uint64_t FIRST_MODULE_PLACE = 1ull << MODULE_SHIFT;

// A hash map from int to int. Entries are stored in the order of insertion, and a search first
// tries the entry after the last hit: modules are called in the same order every step, so this
// entry is usually the right one, and it is in the cache.
class Table {
 public:
  struct Slot {
    uint64_t key;  // the key + 1; 0 for an erased entry
    int64_t value;
  };

  Slot* find(uint64_t key) {
    if (next_ < slots_.size() && slots_[next_].key == key + 1) return &slots_[next_++];
    size_t at = look_up(key + 1);
    if (index_[at] == 0) return nullptr;
    next_ = index_[at];
    return &slots_[next_ - 1];
  }

  int64_t& operator[](uint64_t key) {
    if (Slot* slot = find(key)) return slot->value;
    if (holes_.empty()) {
      holes_.push_back(slots_.size());
      slots_.push_back({});
    }
    size_t at = holes_.back();
    holes_.pop_back();
    slots_[at] = {key + 1, 0};
    if (slots_.size() * 2 > index_.size())
      grow();
    else
      index_[look_up(key + 1)] = at + 1;
    return slots_[at].value;
  }

  // Entries after the erased one in the index may have to move: a gap ends a search.
  void erase(Slot* slot) {
    size_t at = look_up(slot->key);
    holes_.push_back(index_[at] - 1);
    slot->key = 0;
    index_[at] = 0;
    for (at = (at + 1) & mask(); index_[at] != 0; at = (at + 1) & mask()) {
      size_t moved = index_[at];
      index_[at] = 0;
      index_[look_up(slots_[moved - 1].key)] = moved;
    }
  }

 private:
  size_t mask() const { return index_.size() - 1; }

  // Returns the position of a key (+ 1) in the index, or the free position for it.
  size_t look_up(uint64_t key) const {
    size_t at = key * 0x9E3779B97F4A7C15u >> 32 & mask();
    while (index_[at] != 0 && slots_[index_[at] - 1].key != key) at = (at + 1) & mask();
    return at;
  }

  void grow() {
    index_.assign(index_.size() * 2, 0);
    for (size_t at = 0; at < slots_.size(); ++at)
      if (slots_[at].key != 0) index_[look_up(slots_[at].key)] = at + 1;
  }

  std::vector<Slot> slots_;
  size_t next_ = 0;
  // Positions of slots + 1. The size is a power of two, and at most half of it is used.
  std::vector<size_t> index_ = std::vector<size_t>(64);
  std::vector<size_t> holes_;
};

// A dict of ints with the methods that the hooks use. Python and C++ share it.
struct IntMap {
  PyObject_HEAD
  Table of;
};

inline PyObject* int_map_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<IntMap*>(type->tp_alloc(type, 0));
  if (self != nullptr) new (&self->of) Table();
  return reinterpret_cast<PyObject*>(self);
}

inline void int_map_dealloc(IntMap* self) {
  self->of.~Table();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// get(key, default=None), or, with `removes`, pop(key, default=None)
template <bool removes>
PyObject* int_map_get(IntMap* self, PyObject* const* args, Py_ssize_t given) {
  if (given < 1 || given > 2)
    return PyErr_Format(PyExc_TypeError, "expected key and default, not %zd arguments", given);
  uint64_t key = PyLong_AsUnsignedLongLong(args[0]);
  if (PyErr_Occurred()) return nullptr;
  Table::Slot* slot = self->of.find(key);
  if (slot == nullptr) {
    PyObject* otherwise = given == 2 ? args[1] : Py_None;
    Py_INCREF(otherwise);
    return otherwise;
  }
  PyObject* value = PyLong_FromLongLong(slot->value);
  if (removes) self->of.erase(slot);
  return value;
}

inline int int_map_set(IntMap* self, PyObject* key, PyObject* value) {
  if (value == nullptr) {
    PyErr_SetString(PyExc_TypeError, "cannot delete an item; use pop");
    return -1;
  }
  uint64_t at = PyLong_AsUnsignedLongLong(key);
  if (PyErr_Occurred()) return -1;
  int64_t to = PyLong_AsLongLong(value);
  if (PyErr_Occurred()) return -1;
  self->of[at] = to;
  return 0;
}

inline PyObject* int_map_clear(IntMap* self, PyObject*) {
  self->of = Table();
  Py_RETURN_NONE;
}

inline PyMethodDef int_map_methods[] = {
    {"clear", method(int_map_clear), METH_NOARGS, nullptr},
    {"get", method(int_map_get<false>), METH_FASTCALL, nullptr},
    {"pop", method(int_map_get<true>), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyType_Slot int_map_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(int_map_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(int_map_dealloc)},
    {Py_tp_methods, int_map_methods},
    {Py_mp_ass_subscript, reinterpret_cast<void*>(int_map_set)},
    {0, nullptr}};
inline PyType_Spec int_map_spec = {
    "torchwhere_native.IntMap", sizeof(IntMap), 0, Py_TPFLAGS_DEFAULT, int_map_slots};

// How often each module was called in this step, by its packed place. Module ids are small and
// consecutive, so the id is the index and no search is needed.
struct Counts {
  PyObject_HEAD
  std::vector<uint64_t> of;  // by id: the number of the step (upper half) and the calls in it
  uint64_t step;

  uint64_t get(uint64_t place) const {
    size_t id = place >> MODULE_SHIFT;
    return id < of.size() && of[id] >> 32 == step ? of[id] & CALL_MASK : 0;
  }

  void set(uint64_t place, uint64_t count) {
    size_t id = place >> MODULE_SHIFT;
    if (id >= of.size()) of.resize(id + id / 2 + 64);
    of[id] = step << 32 | (count & CALL_MASK);
  }

  void forget() {
    step = (step + 1) & CALL_MASK;
    if (step == 0) std::fill(of.begin(), of.end(), 0), step = 1;
  }
};

inline PyObject* counts_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Counts*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  new (&self->of) std::vector<uint64_t>();
  self->step = 1;
  return reinterpret_cast<PyObject*>(self);
}

inline void counts_dealloc(Counts* self) {
  self->of.~vector();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// get(place, default): the calls in this step. The default is ignored: it is always 0.
inline PyObject* counts_get(Counts* self, PyObject* const* args, Py_ssize_t given) {
  if (given != 2)
    return PyErr_Format(PyExc_TypeError, "expected place and 0, not %zd arguments", given);
  uint64_t place = PyLong_AsUnsignedLongLong(args[0]);
  return PyErr_Occurred() ? nullptr : PyLong_FromUnsignedLongLong(self->get(place));
}

// clear(): sets all counts to 0, at the begin of a step.
inline PyObject* counts_clear(Counts* self, PyObject*) {
  self->forget();
  Py_RETURN_NONE;
}

inline int counts_set(Counts* self, PyObject* key, PyObject* value) {
  uint64_t place = PyLong_AsUnsignedLongLong(key);
  uint64_t count = value == nullptr ? 0 : PyLong_AsUnsignedLongLong(value);
  if (PyErr_Occurred()) return -1;
  self->set(place, count);
  return 0;
}

inline PyMethodDef counts_methods[] = {
    {"get", method(counts_get), METH_FASTCALL, nullptr},
    {"clear", method(counts_clear), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyType_Slot counts_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(counts_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(counts_dealloc)},
    {Py_tp_methods, counts_methods},
    {Py_mp_ass_subscript, reinterpret_cast<void*>(counts_set)},
    {0, nullptr}};
inline PyType_Spec counts_spec = {
    "torchwhere_native.Counts", sizeof(Counts), 0, Py_TPFLAGS_DEFAULT, counts_slots};

// Records `enter` and `leave` of every module call of one watch, on any thread.
struct Calls {
  PyObject_HEAD
  Box* box;
  IntMap* bases;  // places of modules without the call, as in ModuleHook
  Counts* calls;
  uint64_t recompute_bit, inherited;
  int enter_kind, exit_kind;  // 0: record no events
  // Used only for a call from outside any module:
  uint64_t backward_pass;
  PyObject* pipelining;  // the name of a module that is imported if the job uses pipelines
};

// Calls(box, bases, calls, recompute_bit, inherited, backward_pass, pipelining, enter_kind,
// exit_kind)
inline PyObject* calls_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *box, *bases, *calls, *pipelining;
  unsigned long long recompute_bit, inherited, backward_pass;
  int enter_kind, exit_kind;
  if (!PyArg_ParseTuple(
          args,
          "OOOKKKUii",
          &box,
          &bases,
          &calls,
          &recompute_bit,
          &inherited,
          &backward_pass,
          &pipelining,
          &enter_kind,
          &exit_kind))
    return nullptr;
  auto* self = reinterpret_cast<Calls*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  Py_INCREF(box);
  Py_INCREF(bases);
  Py_INCREF(calls);
  Py_INCREF(pipelining);
  self->box = reinterpret_cast<Box*>(box);
  self->bases = reinterpret_cast<IntMap*>(bases);
  self->calls = reinterpret_cast<Counts*>(calls);
  self->recompute_bit = recompute_bit;
  self->inherited = inherited;
  self->backward_pass = backward_pass;
  self->pipelining = pipelining;
  self->enter_kind = enter_kind;
  self->exit_kind = exit_kind;
  return reinterpret_cast<PyObject*>(self);
}

inline void calls_dealloc(Calls* self) {
  Py_DECREF(self->box);
  Py_DECREF(self->bases);
  Py_DECREF(self->calls);
  Py_DECREF(self->pipelining);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Writes the record of an enter or exit. In a recomputation, Python finds the call of the forward.
inline bool write_record(Calls* self, ThreadTrack* track, int kind, uint64_t t_ns, uint64_t place) {
  uint64_t call = place & CALL_MASK;
  if (place & self->recompute_bit) {
    auto* python_track = reinterpret_cast<PyObject*>(track);
    PyObject* answer = PyObject_CallMethod(python_track, "call_of", "K", place);
    call = answer == nullptr ? 0 : PyLong_AsUnsignedLongLong(answer);
    Py_XDECREF(answer);
    if (PyErr_Occurred()) return false;
  }
  if (self->box->words == nullptr || self->box->step >> 32) {
    PyErr_SetString(PyExc_ValueError, "the box is closed, or the step number is too large");
    return false;
  }
  Record record{};
  record.kind = static_cast<uint8_t>(kind);
  record.t_ns = t_ns;
  record.pass = place >> PASS_SHIFT & PASS_MASK;
  record.thread = static_cast<uint8_t>(track->number);
  record.step = static_cast<uint32_t>(self->box->step);
  record.module = static_cast<uint32_t>(place >> MODULE_SHIFT);
  record.call = static_cast<uint32_t>(call);
  self->box->put(record);
  return true;
}

inline PyObject* entered(Calls* self, ThreadTrack* track, uint64_t place, uint64_t below) {
  uint64_t t_ns = now_ns();
  append_to_log(track, place);
  set_place(track, self->box, place, t_ns);
  bool has_record = self->enter_kind && place != below;
  if (has_record && !write_record(self, track, self->enter_kind, t_ns, place)) return nullptr;
  mark_place(self->box, place, t_ns);
  return PyLong_FromUnsignedLongLong(below);
}

// Whether a call from outside any module may be a recomputation or shape inference, which Python
// handles. A pipeline infers shapes by calling its module.
inline bool needs_python(const Calls* self, uint64_t below) {
  return (below >> PASS_SHIFT & PASS_MASK) == self->backward_pass ||
      torch::autograd::get_current_graph_task_id() != -1 ||
      c10::impl::TorchDispatchModeTLS::any_modes_set() ||
      PyDict_Contains(PyImport_GetModuleDict(), self->pipelining) != 0;
}

// enter(module) -> the place before the call; None: `ModuleHook._enter_slowly` must handle it.
inline PyObject* calls_enter(Calls* self, PyObject* module) {
  ThreadTrack* track = track_of(self->box);
  if (track == nullptr) Py_RETURN_NONE;
  uint64_t below = track->top;
  Table::Slot* slot = self->bases->of.find(reinterpret_cast<uint64_t>(module));
  int64_t base = slot == nullptr ? 0 : slot->value;
  if (base == 0) Py_RETURN_NONE;
  if (below < FIRST_MODULE_PLACE && needs_python(self, below)) Py_RETURN_NONE;
  if (below < FIRST_MODULE_PLACE) {
    set_evaluation(self->box, track->cursor, evaluates(module));
    // An attribute of the module may be code, and may even end the watch.
    if (track_of(self->box) != track) Py_RETURN_NONE;
  }
  bool is_wrapper = base < 0;  // its call is that of the module inside it
  auto place = static_cast<uint64_t>(is_wrapper ? -base : base);
  if (below >= FIRST_MODULE_PLACE && below & self->recompute_bit)
    return entered(self, track, place | (below & self->inherited), below);
  uint64_t call = self->calls->get(place);
  if (!is_wrapper) self->calls->set(place, call + 1);
  return entered(self, track, place | call, below);
}

// entered(place, below) -> below: enters the place that `_enter_slowly` has found.
inline PyObject* calls_entered(Calls* self, PyObject* const* args, Py_ssize_t given) {
  if (given != 2)
    return PyErr_Format(PyExc_TypeError, "expected place and below, not %zd arguments", given);
  uint64_t place = PyLong_AsUnsignedLongLong(args[0]);
  uint64_t below = PyLong_AsUnsignedLongLong(args[1]);
  if (PyErr_Occurred()) return nullptr;
  ThreadTrack* track = track_of(self->box);
  if (track == nullptr) return PyErr_Format(PyExc_ValueError, "the box is closed");
  return entered(self, track, place, below);
}

// leave(below): ends a call that began at the place `below`. Does nothing after the watch.
inline PyObject* calls_leave(Calls* self, PyObject* under) {
  uint64_t below = PyLong_AsUnsignedLongLong(under);
  if (PyErr_Occurred()) return nullptr;
  ThreadTrack* track = track_of(self->box);
  if (track == nullptr) Py_RETURN_NONE;
  uint64_t t_ns = now_ns(), place = track->top;
  // A wrapper and the module inside it are one call, with one record.
  bool has_record = self->exit_kind && place != below;
  bool is_written = !has_record || write_record(self, track, self->exit_kind, t_ns, place);
  if ((track = track_of(self->box)) != nullptr) {
    append_to_log(track, below);
    set_place(track, self->box, below, t_ns);
    mark_place(self->box, below, t_ns);
  }
  if (!is_written) return nullptr;
  Py_RETURN_NONE;
}

inline PyMethodDef calls_methods[] = {
    {"enter", method(calls_enter), METH_O, nullptr},
    {"entered", method(calls_entered), METH_FASTCALL, nullptr},
    {"leave", method(calls_leave), METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyType_Slot calls_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(calls_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(calls_dealloc)},
    {Py_tp_methods, calls_methods},
    {0, nullptr}};
inline PyType_Spec calls_spec = {
    "torchwhere_native.Calls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT, calls_slots};

}  // namespace torchwhere
