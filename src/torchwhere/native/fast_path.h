// Begins and ends backwards, optimizer steps and training steps, if nothing about them is new. Does
// the same as `hooks/backward.py`, `hooks/optimizers.py` and `Recorder.set_step`. All of this runs
// with the GIL.
//
// Each function first decides whether it can handle the case, and returns that; only then it
// writes. Otherwise it writes nothing, and Python does everything.
#pragma once

#include <torch/csrc/autograd/graph_task.h>

#include "modules.h"

namespace torchwhere {

constexpr uint64_t NO_STEP = 0xFFFFFFFF;

// How often and how long something ran: the numbers of a `PhaseNode`.
struct Sum {
  PyObject_HEAD
  unsigned long long count, total_ns, max_ns, running, begun_ns;
};

inline PyMemberDef sum_members[] = {
    {const_cast<char*>("count"), T_ULONGLONG, offsetof(Sum, count), 0, nullptr},
    {const_cast<char*>("total_ns"), T_ULONGLONG, offsetof(Sum, total_ns), 0, nullptr},
    {const_cast<char*>("max_ns"), T_ULONGLONG, offsetof(Sum, max_ns), 0, nullptr},
    {const_cast<char*>("running"), T_ULONGLONG, offsetof(Sum, running), 0, nullptr},
    {const_cast<char*>("begun_ns"), T_ULONGLONG, offsetof(Sum, begun_ns), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
inline PyType_Slot sum_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(count_dealloc)},
    {Py_tp_members, sum_members},
    {0, nullptr}};
inline PyType_Spec sum_spec = {
    "torchwhere_native.Sum", sizeof(Sum), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, sum_slots};

// A container of Python, and the size that it had when Python last looked at it.
struct Sized {
  PyObject* container;
  Py_ssize_t size;
};
constexpr Py_ssize_t MAX_CONTAINERS = 4;

struct FastPath {
  PyObject_HEAD
  Box* box;
  Counts* calls;       // as in ModuleHook
  IntMap* lines;       // leads from a frame of torchwhere to the user's line, see `line_of`
  PyObject* names;     // a dict: from the name of an optimizer's class to its id in the box
  PyObject* steppers;  // a set: the ids of the optimizers that have stepped in this step
  Sum* steps;
  uint64_t ended, under_way;  // indices of the words that hold that sum in the box
  uint64_t backward_place, optimizer_place;
  int optimizer_kind, step_end_kind, step_begin_kind;
  // Until this time Python has nothing to do between steps, if all containers keep their sizes.
  unsigned long long resting_until_ns;
  bool is_paused;            // Python handles the next backward: something may be new
  bool ends_after_backward;  // the step ends with the running backward: Python must be called then
  bool counts_steps;         // optimizers count steps, not the user
  Sized containers[MAX_CONTAINERS];
};

// FastPath(box, calls, lines, names, steppers, steps, ended, under_way, backward_place,
// optimizer_place, optimizer_kind, step_end_kind, step_begin_kind)
inline PyObject* fast_path_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *box, *calls, *lines, *names, *steppers, *steps;
  unsigned long long ended, under_way, backward_place, optimizer_place;
  int optimizer_kind, step_end_kind, step_begin_kind;
  if (!PyArg_ParseTuple(
          args,
          "OOOO!O!OKKKKiii",
          &box,
          &calls,
          &lines,
          &PyDict_Type,
          &names,
          &PySet_Type,
          &steppers,
          &steps,
          &ended,
          &under_way,
          &backward_place,
          &optimizer_place,
          &optimizer_kind,
          &step_end_kind,
          &step_begin_kind))
    return nullptr;
  auto* self = reinterpret_cast<FastPath*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  for (PyObject* object : {box, calls, lines, names, steppers, steps}) Py_INCREF(object);
  self->box = reinterpret_cast<Box*>(box);
  self->calls = reinterpret_cast<Counts*>(calls);
  self->lines = reinterpret_cast<IntMap*>(lines);
  self->names = names;
  self->steppers = steppers;
  self->steps = reinterpret_cast<Sum*>(steps);
  self->ended = ended;
  self->under_way = under_way;
  self->backward_place = backward_place;
  self->optimizer_place = optimizer_place;
  self->optimizer_kind = optimizer_kind;
  self->step_end_kind = step_end_kind;
  self->step_begin_kind = step_begin_kind;
  return reinterpret_cast<PyObject*>(self);
}

// wake(): Python handles the next step.
inline PyObject* fast_path_wake(FastPath* self, PyObject*) {
  self->resting_until_ns = 0;
  for (Sized& sized : self->containers) Py_CLEAR(sized.container);
  Py_RETURN_NONE;
}

inline void fast_path_dealloc(FastPath* self) {
  Py_DECREF(fast_path_wake(self, nullptr));
  Py_DECREF(self->box);
  Py_DECREF(self->calls);
  Py_DECREF(self->lines);
  Py_DECREF(self->names);
  Py_DECREF(self->steppers);
  Py_DECREF(self->steps);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// rest(until_ns, counts_steps, containers): Python has nothing left to do between steps. The
// extension goes from step to step by itself until that time, as long as each container keeps the
// size that it has now.
inline PyObject* fast_path_rest(FastPath* self, PyObject* args) {
  unsigned long long until;
  int counts_steps;
  PyObject* containers;
  if (!PyArg_ParseTuple(args, "KpO!", &until, &counts_steps, &PyTuple_Type, &containers))
    return nullptr;
  Py_DECREF(fast_path_wake(self, nullptr));
  Py_ssize_t given = PyTuple_GET_SIZE(containers);
  if (given > MAX_CONTAINERS)
    return PyErr_Format(
        PyExc_ValueError, "at most %zd containers, not %zd", MAX_CONTAINERS, given);
  for (Py_ssize_t at = 0; at < given; ++at) {
    PyObject* container = PyTuple_GET_ITEM(containers, at);
    Py_ssize_t size = PyObject_Size(container);
    if (size < 0) return nullptr;
    Py_INCREF(container);
    self->containers[at] = {container, size};
  }
  self->counts_steps = counts_steps;
  self->resting_until_ns = until;
  Py_RETURN_NONE;
}

// -- can the extension handle it ------------------------------------------------------------------

constexpr int SITE_SHIFT = 48;  // an address has fewer bits

// Finds the line like `python_stack.read`: goes from frame to frame until one is the user's.
// `lines` has every code object that Python has skipped on this way, by its address; the value is
// 1 if it belongs to a framework, else 0. It has the instruction that the innermost frame of a
// framework has reached, by the address of its code plus its offset; the value is a number, from
// 1. And it has every instruction of the user where a way ended, by the same kind of key, with
// that number in its upper bits. A code object is longer than its instructions, so these keys are
// unique. Returns false if the line is unknown, or if the track is no longer valid: frames are
// objects, so the garbage collector may run, and with it code that ends the watch.
inline bool line_of(FastPath* self, const ThreadTrack* track, uint32_t* line) {
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  Table::Slot* slot = nullptr;
  uint64_t site = 0;
  while (frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    auto address = reinterpret_cast<uint64_t>(code);
    uint64_t instruction = address + 1 + static_cast<uint64_t>(PyFrame_GetLasti(frame));
    Table::Slot* skipped = self->lines->of.find(address);
    bool goes_on = skipped != nullptr;
    if (!goes_on) slot = self->lines->of.find((site << SITE_SHIFT) + instruction);
    if (goes_on && site == 0 && skipped->value != 0) {
      Table::Slot* reached = self->lines->of.find(instruction);
      goes_on = reached != nullptr;
      if (goes_on) site = static_cast<uint64_t>(reached->value);
    }
    PyFrameObject* outer = goes_on ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(code);
    Py_DECREF(frame);
    frame = outer;
  }
  if (slot == nullptr || track_of(self->box) != track) return false;
  *line = static_cast<uint32_t>(slot->value);
  return true;
}

inline bool is_in_engine() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

inline bool is_resting(FastPath* self, uint64_t now) {
  bool is_same = now < self->resting_until_ns && self->box->step + 1 < NO_STEP;
  for (Sized& sized : self->containers)
    is_same =
        is_same && (sized.container == nullptr || PyObject_Size(sized.container) == sized.size);
  if (PyErr_Occurred()) PyErr_Clear();
  return is_same;
}

// Whether the thread is in exactly one optimizer step, and entered it from outside any pass.
inline bool came_from_outside(ThreadTrack* track) {
  PyObject* below = track->below_optimizer;
  return below != nullptr && PyList_GET_SIZE(below) == 1 &&
      PyLong_AsUnsignedLongLong(PyList_GET_ITEM(below, 0)) == 0;
}

// Whether only this optimizer stepped in the step before: then its step ends the current one.
inline bool is_only_stepper(FastPath* self, PyObject* optimizer) {
  if (PySet_GET_SIZE(self->steppers) != 1) return false;
  PyObject* id = PyLong_FromVoidPtr(optimizer);
  bool is_in = id != nullptr && PySet_Contains(self->steppers, id) == 1;
  Py_XDECREF(id);
  return is_in;
}

inline bool name_of(FastPath* self, PyObject* optimizer, uint32_t* entry) {
  PyObject* name = PyType_GetName(Py_TYPE(optimizer));
  PyObject* id = name == nullptr ? nullptr : PyDict_GetItemWithError(self->names, name);
  Py_XDECREF(name);
  if (id != nullptr) *entry = static_cast<uint32_t>(PyLong_AsUnsignedLong(id));
  return id != nullptr;
}

// -- records --------------------------------------------------------------------------------------

inline Record record_at(
    FastPath* self, ThreadTrack* track, int kind, uint64_t t_ns, uint32_t line) {
  Record record{};
  record.kind = static_cast<uint8_t>(kind);
  record.t_ns = t_ns;
  record.thread = static_cast<uint8_t>(track->number);
  record.step = static_cast<uint32_t>(self->box->step);
  record.line = line;
  return record;
}

inline uint64_t put(FastPath* self, ThreadTrack* track, Record record) {
  return self->box->words[track->cursor + CURSOR_RECORD] = self->box->put(record);
}

// Like `PhaseRecorder.step_begins`.
inline void add_step(FastPath* self, uint64_t now) {
  Sum* sum = self->steps;
  if (sum->running) {
    uint64_t took = now - sum->begun_ns;
    ++sum->count;
    sum->total_ns += took;
    if (took > sum->max_ns) sum->max_ns = took;
  }
  sum->running = 1;
  sum->begun_ns = now;
  uint64_t* ended = self->box->words + self->ended;
  uint64_t* under_way = self->box->words + self->under_way;
  ended[1] = sum->count;
  ended[2] = sum->total_ns;
  ended[3] = sum->max_ns;
  under_way[1] = sum->running;
  under_way[2] = sum->begun_ns;
}

// Like `Session.next_step`. The end of a step and the begin of the next one have the same place and
// time.
inline void go_to_step(
    FastPath* self, ThreadTrack* track, uint64_t step, uint32_t line, uint64_t now) {
  record_memory(self->box, track->number, track->top, now);
  put_step_times(
      self->box, track->cursor, track->top >> PASS_SHIFT & PASS_MASK, track->number, now);
  put(self, track, record_at(self, track, self->step_end_kind, now, line));
  self->box->step = step;
  self->box->words[track->cursor + CURSOR_STEP] = step;
  uint64_t begin = put(self, track, record_at(self, track, self->step_begin_kind, now, line));
  add_step(self, now);
  self->calls->forget();
  mark_step(self->box, track->top, begin, now);
}

// -- methods for Python ---------------------------------------------------------------------------

// begin_backward(args) -> the place before; None: Python must handle it. `args` are the arguments
// of the autograd engine without the first one.
inline PyObject* fast_path_begin_backward(FastPath* self, PyObject* args) {
  ThreadTrack* track = track_of(self->box);
  bool creates_graph = PyTuple_GET_SIZE(args) > 2 && PyTuple_GET_ITEM(args, 2) != Py_False;
  if (track == nullptr || creates_graph || self->is_paused || track->top == self->backward_place)
    Py_RETURN_NONE;
  uint32_t line;
  if (!line_of(self, track, &line)) Py_RETURN_NONE;
  uint64_t below = track->top;
  move(track, self->box, self->backward_place, line);
  return PyLong_FromUnsignedLongLong(below);
}

// end_backward(below) -> True if Python has more to do. Ends a backward that `begin_backward`
// began.
inline PyObject* fast_path_end_backward(FastPath* self, PyObject* below) {
  uint64_t place = PyLong_AsUnsignedLongLong(below);
  if (PyErr_Occurred()) return nullptr;
  if (ThreadTrack* track = track_of(self->box)) move(track, self->box, place, 0);
  return PyBool_FromLong(self->ends_after_backward);
}

// begin_optimizer() -> True if done.
inline PyObject* fast_path_begin_optimizer(FastPath* self, PyObject*) {
  ThreadTrack* track = track_of(self->box);
  if (track == nullptr || track->below_optimizer == nullptr) Py_RETURN_FALSE;
  PyObject* below = PyLong_FromUnsignedLongLong(track->top);
  bool is_appended = below != nullptr && PyList_Append(track->below_optimizer, below) == 0;
  Py_XDECREF(below);
  if (!is_appended) return nullptr;
  uint64_t now = now_ns();
  set_place(track, self->box, self->optimizer_place, now);
  mark_place(self->box, self->optimizer_place, now);
  Py_RETURN_TRUE;
}

// end_optimizer(optimizer) -> True if done, and the training step ended too if this ends one.
inline PyObject* fast_path_end_optimizer(FastPath* self, PyObject* optimizer) {
  ThreadTrack* track = track_of(self->box);
  uint64_t now = now_ns();
  uint32_t line, entry;
  if (track == nullptr || !is_resting(self, now) || track->top != self->optimizer_place ||
      is_in_engine() || !came_from_outside(track) ||
      (self->counts_steps && !is_only_stepper(self, optimizer)) ||
      !name_of(self, optimizer, &entry) || !line_of(self, track, &line)) {
    if (PyErr_Occurred()) PyErr_Clear();
    Py_RETURN_FALSE;
  }
  Record record = record_at(self, track, self->optimizer_kind, now, line);
  record.pass = self->optimizer_place >> PASS_SHIFT & PASS_MASK;
  record.subject = entry;
  put(self, track, record);
  if (PyList_SetSlice(track->below_optimizer, 0, 1, nullptr) < 0) return nullptr;
  set_place(track, self->box, 0, now);
  if (self->counts_steps)
    go_to_step(self, track, self->box->step + 1, line, now);  // marks the place too
  else
    mark_place(self->box, 0, now);
  Py_RETURN_TRUE;
}

// next_step(step) -> True if done: goes to a step that the user has counted.
inline PyObject* fast_path_next_step(FastPath* self, PyObject* step) {
  ThreadTrack* track = track_of(self->box);
  uint64_t number = PyLong_AsUnsignedLongLong(step), now = now_ns();
  if (PyErr_Occurred()) return nullptr;
  uint32_t line;
  bool can_do = track != nullptr && is_resting(self, now) && track->top == 0 && !is_in_engine() &&
      line_of(self, track, &line);
  if (can_do) go_to_step(self, track, number, line, now);
  return PyBool_FromLong(can_do);
}

inline PyMethodDef fast_path_methods[] = {
    {"rest", method(fast_path_rest), METH_VARARGS, nullptr},
    {"wake", method(fast_path_wake), METH_NOARGS, nullptr},
    {"begin_backward", method(fast_path_begin_backward), METH_O, nullptr},
    {"end_backward", method(fast_path_end_backward), METH_O, nullptr},
    {"begin_optimizer", method(fast_path_begin_optimizer), METH_NOARGS, nullptr},
    {"end_optimizer", method(fast_path_end_optimizer), METH_O, nullptr},
    {"next_step", method(fast_path_next_step), METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyMemberDef fast_path_members[] = {
    {const_cast<char*>("is_paused"), T_BOOL, offsetof(FastPath, is_paused), 0, nullptr},
    {const_cast<char*>("ends_after_backward"),
     T_BOOL,
     offsetof(FastPath, ends_after_backward),
     0,
     nullptr},
    {nullptr, 0, 0, 0, nullptr}};
inline PyType_Slot fast_path_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(fast_path_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(fast_path_dealloc)},
    {Py_tp_methods, fast_path_methods},
    {Py_tp_members, fast_path_members},
    {0, nullptr}};
inline PyType_Spec fast_path_spec = {
    "torchwhere_native.FastPath",
    sizeof(FastPath),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    fast_path_slots};

}  // namespace torchwhere
