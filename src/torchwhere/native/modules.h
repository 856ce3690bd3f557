// Which module runs, without Python's share of it: the hot path of `sense/modules.py`. All of it holds the GIL.
#pragma once

#include <vector>

#include "tape.h"

namespace torchwhere {

constexpr uint64_t FIRST_MODULE_WORD = 1ull << MODULE_SHIFT;

// Ints by ints in one piece of memory: where a module is called, what was not used just before is far away, and a map that
// follows pointers waits for each of them.
class Table {
 public:
  struct Slot {
    uint64_t key;  // + 1: 0 is an empty slot
    int64_t value;
  };

  Slot* find(uint64_t key) {
    size_t at = home(key + 1);
    while (slots_[at].key != 0 && slots_[at].key != key + 1) at = (at + 1) & mask();
    return slots_[at].key == 0 ? nullptr : &slots_[at];
  }

  int64_t& operator[](uint64_t key) {
    if (Slot* found = find(key)) return found->value;
    if (++used_ * 2 > slots_.size()) grow();
    return place({key + 1, 0}).value;
  }

  // What stood behind it may have to move up: a gap ends a search.
  void erase(Slot* gone) {
    --used_;
    auto at = static_cast<size_t>(gone - slots_.data());
    slots_[at].key = 0;
    for (at = (at + 1) & mask(); slots_[at].key != 0; at = (at + 1) & mask()) {
      Slot moved = slots_[at];
      slots_[at].key = 0;
      place(moved);
    }
  }

  void zero() {
    for (Slot& slot : slots_) slot.value = 0;
  }

 private:
  size_t mask() const { return slots_.size() - 1; }
  size_t home(uint64_t key) const { return key * 0x9E3779B97F4A7C15u >> 32 & mask(); }

  Slot& place(Slot slot) {
    size_t at = home(slot.key);
    while (slots_[at].key != 0) at = (at + 1) & mask();
    return slots_[at] = slot;
  }

  void grow() {
    std::vector<Slot> before(slots_.size() * 2);
    before.swap(slots_);
    for (const Slot& slot : before)
      if (slot.key != 0) place(slot);
  }

  std::vector<Slot> slots_ = std::vector<Slot>(64);  // a power of two, at most half of it used
  size_t used_ = 0;
};

// A dict of ints, as far as `sense/modules.py` uses one: for Python and for C++ at the same time.
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

// zero(): every value is 0 from now on. The keys stay: it is the same modules that are called in the next step.
inline PyObject* words_zero(Words* self, PyObject*) {
  self->of.zero();
  Py_RETURN_NONE;
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
    {"zero", method(words_zero), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyType_Slot words_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(words_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(words_dealloc)},
    {Py_tp_methods, words_methods},
    {Py_mp_ass_subscript, reinterpret_cast<void*>(words_set)},
    {0, nullptr}};
inline PyType_Spec words_spec = {"torchwhere_native.Words", sizeof(Words), 0, Py_TPFLAGS_DEFAULT, words_slots};

// The module calls of one watch: `enter` and `leave` of every one of them, on any thread.
struct Calls {
  PyObject_HEAD
  Box* box;
  Words *bases, *calls;  // as in ModuleSense
  uint64_t recompute_bit, inherited;
  int enter_kind, exit_kind;  // 0: no events
};

// Calls(box, bases, calls, recompute_bit, inherited, enter_kind, exit_kind)
inline PyObject* calls_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *box, *bases, *calls;
  unsigned long long recompute_bit, inherited;
  int enter_kind, exit_kind;
  if (!PyArg_ParseTuple(args, "OOOKKii", &box, &bases, &calls, &recompute_bit, &inherited, &enter_kind, &exit_kind))
    return nullptr;
  auto* self = reinterpret_cast<Calls*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  Py_INCREF(box);
  Py_INCREF(bases);
  Py_INCREF(calls);
  self->box = reinterpret_cast<Box*>(box);
  self->bases = reinterpret_cast<Words*>(bases);
  self->calls = reinterpret_cast<Words*>(calls);
  self->recompute_bit = recompute_bit;
  self->inherited = inherited;
  self->enter_kind = enter_kind;
  self->exit_kind = exit_kind;
  return reinterpret_cast<PyObject*>(self);
}

inline void calls_dealloc(Calls* self) {
  Py_DECREF(self->box);
  Py_DECREF(self->bases);
  Py_DECREF(self->calls);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// The calling thread's tape, null where it has none yet, or none that can be written to any more.
inline Tape* tape_of(Calls* self) {
  bool is_ready = here.box == self->box->id && self->box->words != nullptr && here.tape->seqs.obj != nullptr;
  return is_ready ? here.tape : nullptr;
}

// The record of an enter or exit. Which call a recomputed one was in the forward is for Python to find out.
inline bool tell(Calls* self, Tape* tape, int kind, uint64_t t_ns, uint64_t word) {
  uint64_t call = word & CALL_MASK;
  if (word & self->recompute_bit) {
    PyObject* found = PyObject_CallMethod(reinterpret_cast<PyObject*>(tape), "call_of", "K", word);
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
  record.thread = static_cast<uint8_t>(tape->number);
  record.step = static_cast<uint32_t>(self->box->step);
  record.module = static_cast<uint32_t>(word >> MODULE_SHIFT);
  record.call = static_cast<uint32_t>(call);
  self->box->put(record);
  return true;
}

inline PyObject* entered(Calls* self, Tape* tape, uint64_t word, uint64_t below) {
  uint64_t t_ns = now_ns();
  note(tape, word);
  show(tape, self->box, word, t_ns);
  if (self->enter_kind && word != below && !tell(self, tape, self->enter_kind, t_ns, word)) return nullptr;
  return PyLong_FromUnsignedLongLong(below);
}

// enter(module) -> where the thread was before; None: this is not for us, but for `ModuleSense._enter_slowly`.
inline PyObject* calls_enter(Calls* self, PyObject* module) {
  Tape* tape = tape_of(self);
  if (tape == nullptr || tape->top < FIRST_MODULE_WORD) Py_RETURN_NONE;
  uint64_t below = tape->top;
  Table::Slot* found = self->bases->of.find(reinterpret_cast<uint64_t>(module));
  if (found == nullptr || found->value <= 0) Py_RETURN_NONE;
  auto word = static_cast<uint64_t>(found->value);
  word |= below & self->recompute_bit ? below & self->inherited : static_cast<uint64_t>(self->calls->of[word]++);
  return entered(self, tape, word, below);
}

// entered(word, below) -> below: what `_enter_slowly` has found.
inline PyObject* calls_entered(Calls* self, PyObject* const* args, Py_ssize_t given) {
  if (given != 2) return PyErr_Format(PyExc_TypeError, "a word and the one below, not %zd arguments", given);
  uint64_t word = PyLong_AsUnsignedLongLong(args[0]), below = PyLong_AsUnsignedLongLong(args[1]);
  if (PyErr_Occurred()) return nullptr;
  Tape* tape = tape_of(self);
  if (tape == nullptr) return PyErr_Format(PyExc_ValueError, "the box is closed");
  return entered(self, tape, word, below);
}

// leave(below): a call that began there has ended. Does nothing once the watch is over.
inline PyObject* calls_leave(Calls* self, PyObject* under) {
  uint64_t below = PyLong_AsUnsignedLongLong(under);
  if (PyErr_Occurred()) return nullptr;
  Tape* tape = tape_of(self);
  if (tape == nullptr) Py_RETURN_NONE;
  uint64_t t_ns = now_ns(), word = tape->top;
  // A wrapper and what it wraps are one call.
  bool is_told = !self->exit_kind || word == below || tell(self, tape, self->exit_kind, t_ns, word);
  if ((tape = tape_of(self)) != nullptr) {
    note(tape, below);
    show(tape, self->box, below, t_ns);
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
