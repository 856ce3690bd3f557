// Which module runs, without Python's share of it: the hot path of `hooks/modules.py`. All of it holds the GIL.
#pragma once

#include <vector>

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>

#include "thread_track.h"

namespace torchwhere {

constexpr uint64_t FIRST_MODULE_WORD = 1ull << MODULE_SHIFT;

// Ints by ints. They stand in the order in which they came, and the one after the last that was found is tried first: modules are
// called in the order in which they were called first, and where one is called, whatever was not used just before is far away.
class Table {
 public:
  struct Slot {
    uint64_t key;  // + 1: 0 is one that is gone
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
    if (Slot* found = find(key)) return found->value;
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

  // What stood behind it in the index may have to move up: a gap ends a search.
  void erase(Slot* gone) {
    size_t at = look_up(gone->key);
    holes_.push_back(index_[at] - 1);
    gone->key = 0;
    index_[at] = 0;
    for (at = (at + 1) & mask(); index_[at] != 0; at = (at + 1) & mask()) {
      size_t moved = index_[at];
      index_[at] = 0;
      index_[look_up(slots_[moved - 1].key)] = moved;
    }
  }

 private:
  size_t mask() const { return index_.size() - 1; }

  // Where the index has a key (+ 1), or would.
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
  std::vector<size_t> index_ = std::vector<size_t>(64);  // where a slot is, + 1; a power of two, at most half of it used
  std::vector<size_t> holes_;
};

// A dict of ints, as far as `hooks/modules.py` uses one: for Python and for C++ at the same time.
struct Words {
  PyObject_HEAD
  Table of;
};

inline PyObject* words_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Words*>(type->tp_alloc(type, 0));
  if (self != nullptr) new (&self->of) Table();
  return reinterpret_cast<PyObject*>(self);
}

inline void words_dealloc(Words* self) {
  self->of.~Table();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// get(key, default=None); with `is_last`, pop(key, default=None)
template <bool is_last>
PyObject* words_get(Words* self, PyObject* const* args, Py_ssize_t given) {
  if (given < 1 || given > 2) return PyErr_Format(PyExc_TypeError, "a key and a default, not %zd arguments", given);
  uint64_t key = PyLong_AsUnsignedLongLong(args[0]);
  if (PyErr_Occurred()) return nullptr;
  Table::Slot* found = self->of.find(key);
  if (found == nullptr) {
    PyObject* otherwise = given == 2 ? args[1] : Py_None;
    Py_INCREF(otherwise);
    return otherwise;
  }
  PyObject* value = PyLong_FromLongLong(found->value);
  if (is_last) self->of.erase(found);
  return value;
}

inline int words_set(Words* self, PyObject* key, PyObject* value) {
  if (value == nullptr) {
    PyErr_SetString(PyExc_TypeError, "use pop");
    return -1;
  }
  uint64_t at = PyLong_AsUnsignedLongLong(key);
  if (PyErr_Occurred()) return -1;
  int64_t to = PyLong_AsLongLong(value);
  if (PyErr_Occurred()) return -1;
  self->of[at] = to;
  return 0;
}

inline PyMethodDef words_methods[] = {
    {"get", method(words_get<false>), METH_FASTCALL, nullptr},
    {"pop", method(words_get<true>), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyType_Slot words_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(words_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(words_dealloc)},
    {Py_tp_methods, words_methods},
    {Py_mp_ass_subscript, reinterpret_cast<void*>(words_set)},
    {0, nullptr}};
inline PyType_Spec words_spec = {"torchwhere_native.Words", sizeof(Words), 0, Py_TPFLAGS_DEFAULT, words_slots};

// How often each module was called in this step, by its word. The ids in words are small and in the order in which the modules came:
// no need to search.
struct Counts {
  PyObject_HEAD
  std::vector<uint64_t> of;  // by id: the step that it was counted in, as this counts them, and how often
  uint64_t step;

  uint64_t get(uint64_t word) const {
    size_t id = word >> MODULE_SHIFT;
    return id < of.size() && of[id] >> 32 == step ? of[id] & CALL_MASK : 0;
  }

  void set(uint64_t word, uint64_t count) {
    size_t id = word >> MODULE_SHIFT;
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

// get(word, default): 0 where it was not called, whatever the default.
inline PyObject* counts_get(Counts* self, PyObject* const* args, Py_ssize_t given) {
  if (given != 2) return PyErr_Format(PyExc_TypeError, "a word and 0, not %zd arguments", given);
  uint64_t word = PyLong_AsUnsignedLongLong(args[0]);
  return PyErr_Occurred() ? nullptr : PyLong_FromUnsignedLongLong(self->get(word));
}

// clear(): a step has begun.
inline PyObject* counts_clear(Counts* self, PyObject*) {
  self->forget();
  Py_RETURN_NONE;
}

inline int counts_set(Counts* self, PyObject* key, PyObject* value) {
  uint64_t word = PyLong_AsUnsignedLongLong(key), count = value == nullptr ? 0 : PyLong_AsUnsignedLongLong(value);
  if (PyErr_Occurred()) return -1;
  self->set(word, count);
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
inline PyType_Spec counts_spec = {"torchwhere_native.Counts", sizeof(Counts), 0, Py_TPFLAGS_DEFAULT, counts_slots};

// The module calls of one watch: `enter` and `leave` of every one of them, on any thread.
struct Calls {
  PyObject_HEAD
  Box* box;
  Words* bases;  // as in ModuleSense
  Counts* calls;
  uint64_t recompute_bit, inherited;
  int enter_kind, exit_kind;  // 0: no events
  uint64_t backward_pass;     // from here on, only for calls from outside any module
  PyObject* pipelining;       // the name of the module that is there when pipelines are
};

// Calls(box, bases, calls, recompute_bit, inherited, backward_pass, pipelining, enter_kind, exit_kind)
inline PyObject* calls_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *box, *bases, *calls, *pipelining;
  unsigned long long recompute_bit, inherited, backward_pass;
  int enter_kind, exit_kind;
  if (!PyArg_ParseTuple(
          args, "OOOKKKUii", &box, &bases, &calls, &recompute_bit, &inherited, &backward_pass, &pipelining, &enter_kind, &exit_kind))
    return nullptr;
  auto* self = reinterpret_cast<Calls*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  Py_INCREF(box);
  Py_INCREF(bases);
  Py_INCREF(calls);
  Py_INCREF(pipelining);
  self->box = reinterpret_cast<Box*>(box);
  self->bases = reinterpret_cast<Words*>(bases);
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

// The record of an enter or exit. Which call a recomputed one was in the forward is for Python to find out.
inline bool tell(Calls* self, ThreadTrack* track, int kind, uint64_t t_ns, uint64_t word) {
  uint64_t call = word & CALL_MASK;
  if (word & self->recompute_bit) {
    PyObject* found = PyObject_CallMethod(reinterpret_cast<PyObject*>(track), "call_of", "K", word);
    call = found == nullptr ? 0 : PyLong_AsUnsignedLongLong(found);
    Py_XDECREF(found);
    if (PyErr_Occurred()) return false;
  }
  if (self->box->words == nullptr || self->box->step >> 32) {
    PyErr_SetString(PyExc_ValueError, "the box is closed, or the step does not fit into a record");
    return false;
  }
  Record record{};
  record.kind = static_cast<uint8_t>(kind);
  record.t_ns = t_ns;
  record.pass = word >> PASS_SHIFT & PASS_MASK;
  record.thread = static_cast<uint8_t>(track->number);
  record.step = static_cast<uint32_t>(self->box->step);
  record.module = static_cast<uint32_t>(word >> MODULE_SHIFT);
  record.call = static_cast<uint32_t>(call);
  self->box->put(record);
  return true;
}

inline PyObject* entered(Calls* self, ThreadTrack* track, uint64_t word, uint64_t below) {
  uint64_t t_ns = now_ns();
  note(track, word);
  show(track, self->box, word, t_ns);
  if (self->enter_kind && word != below && !tell(self, track, self->enter_kind, t_ns, word)) return nullptr;
  return PyLong_FromUnsignedLongLong(below);
}

// Whether a call from outside any module may be no ordinary one: a recomputation, or a rehearsal. Then it is for Python.
inline bool may_be_odd(const Calls* self, uint64_t below) {
  return (below >> PASS_SHIFT & PASS_MASK) == self->backward_pass || torch::autograd::get_current_graph_task_id() != -1 ||
      c10::impl::TorchDispatchModeTLS::any_modes_set() ||
      PyDict_Contains(PyImport_GetModuleDict(), self->pipelining) != 0;  // a pipeline infers shapes by calling its module
}

// enter(module) -> where the thread was before; None: this is not for us, but for `ModuleSense._enter_slowly`.
inline PyObject* calls_enter(Calls* self, PyObject* module) {
  ThreadTrack* track = track_of(self->box);
  if (track == nullptr) Py_RETURN_NONE;
  uint64_t below = track->top;
  Table::Slot* found = self->bases->of.find(reinterpret_cast<uint64_t>(module));
  if (found == nullptr || found->value == 0) Py_RETURN_NONE;
  if (below < FIRST_MODULE_WORD && may_be_odd(self, below)) Py_RETURN_NONE;
  bool is_wrapper = found->value < 0;  // its call is that of the module inside it
  auto word = static_cast<uint64_t>(is_wrapper ? -found->value : found->value);
  if (below >= FIRST_MODULE_WORD && below & self->recompute_bit) return entered(self, track, word | (below & self->inherited), below);
  uint64_t call = self->calls->get(word);
  if (!is_wrapper) self->calls->set(word, call + 1);
  return entered(self, track, word | call, below);
}

// entered(word, below) -> below: what `_enter_slowly` has found.
inline PyObject* calls_entered(Calls* self, PyObject* const* args, Py_ssize_t given) {
  if (given != 2) return PyErr_Format(PyExc_TypeError, "a word and the one below, not %zd arguments", given);
  uint64_t word = PyLong_AsUnsignedLongLong(args[0]), below = PyLong_AsUnsignedLongLong(args[1]);
  if (PyErr_Occurred()) return nullptr;
  ThreadTrack* track = track_of(self->box);
  if (track == nullptr) return PyErr_Format(PyExc_ValueError, "the box is closed");
  return entered(self, track, word, below);
}

// leave(below): a call that began there has ended. Does nothing once the watch is over.
inline PyObject* calls_leave(Calls* self, PyObject* under) {
  uint64_t below = PyLong_AsUnsignedLongLong(under);
  if (PyErr_Occurred()) return nullptr;
  ThreadTrack* track = track_of(self->box);
  if (track == nullptr) Py_RETURN_NONE;
  uint64_t t_ns = now_ns(), word = track->top;
  // A wrapper and what it wraps are one call.
  bool is_told = !self->exit_kind || word == below || tell(self, track, self->exit_kind, t_ns, word);
  if ((track = track_of(self->box)) != nullptr) {
    note(track, below);
    show(track, self->box, below, t_ns);
  }
  if (!is_told) return nullptr;
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
inline PyType_Spec calls_spec = {"torchwhere_native.Calls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT, calls_slots};

}  // namespace torchwhere
