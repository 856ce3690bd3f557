// Backwards, optimizer steps and training steps: how they begin and end, where nothing about that is new. What `hooks/backward.py`,
// `hooks/optimizers.py` and `Recorder.set_step` do then, without Python's share. All of it holds the GIL.
//
// Each function first finds out whether this is for it, and says so; only then it writes. What is not is done by Python, wholly.
#pragma once

#include <torch/csrc/autograd/graph_task.h>

#include "modules.h"

namespace torchwhere {

constexpr uint64_t NO_STEP = 0xFFFFFFFF;

// How often something ran and how long: the numbers of a `phases.Node`.
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
    {Py_tp_dealloc, reinterpret_cast<void*>(count_dealloc)}, {Py_tp_members, sum_members}, {0, nullptr}};
inline PyType_Spec sum_spec = {
    "torchwhere_native.Sum", sizeof(Sum), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, sum_slots};

struct Sized {
  PyObject* container;
  Py_ssize_t size;
};
constexpr Py_ssize_t MOST_SIZED = 4;

struct FastPath {
  PyObject_HEAD
  Box* box;
  Counts* calls;       // as in ModuleSense
  Words* lines;        // the way out of our own frames to the user's line, see `line_of`
  PyObject* names;     // a dict: the name of an optimizer's class to its id in the table
  PyObject* steppers;  // a set: the ids of the optimizers that have stepped in this step
  Sum* steps;
  uint64_t ended, under_way;  // where the box has that sum
  uint64_t backward_word, optimizer_word;
  int optimizer_kind, step_end_kind, step_begin_kind;
  unsigned long long resting_until;  // before that time Python need not be asked between steps, if all sizes are the same
  bool is_paused;                     // the next backward is for Python: something may be new
  bool ends_after_backward;          // Python wants to hear when a backward has ended: with it ends a step
  bool counts_steps;                 // optimizers do, not the user
  Sized looked_at[MOST_SIZED];       // what Python looks at between steps, and how much that was
};

// FastPath(box, calls, lines, names, steppers, steps, ended, under_way, backward_word, optimizer_word, *kinds)
inline PyObject* fast_path_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *box, *calls, *lines, *names, *steppers, *steps;
  unsigned long long ended, under_way, backward_word, optimizer_word;
  int optimizer_kind, step_end_kind, step_begin_kind;
  if (!PyArg_ParseTuple(
          args, "OOOO!O!OKKKKiii", &box, &calls, &lines, &PyDict_Type, &names, &PySet_Type, &steppers, &steps, &ended, &under_way,
          &backward_word, &optimizer_word, &optimizer_kind, &step_end_kind, &step_begin_kind))
    return nullptr;
  auto* self = reinterpret_cast<FastPath*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  for (PyObject* kept : {box, calls, lines, names, steppers, steps}) Py_INCREF(kept);
  self->box = reinterpret_cast<Box*>(box);
  self->calls = reinterpret_cast<Counts*>(calls);
  self->lines = reinterpret_cast<Words*>(lines);
  self->names = names;
  self->steppers = steppers;
  self->steps = reinterpret_cast<Sum*>(steps);
  self->ended = ended;
  self->under_way = under_way;
  self->backward_word = backward_word;
  self->optimizer_word = optimizer_word;
  self->optimizer_kind = optimizer_kind;
  self->step_end_kind = step_end_kind;
  self->step_begin_kind = step_begin_kind;
  return reinterpret_cast<PyObject*>(self);
}

// wake(): Python wants to be asked the next time.
inline PyObject* fast_path_wake(FastPath* self, PyObject*) {
  self->resting_until = 0;
  for (Sized& sized : self->looked_at) Py_CLEAR(sized.container);
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

// rest(until_ns, counts_steps, containers): Python has seen to all that there is to do between steps. It need not be asked again
// before that time, while each of those has the size that it has now.
inline PyObject* fast_path_rest(FastPath* self, PyObject* args) {
  unsigned long long until;
  int counts_steps;
  PyObject* containers;
  if (!PyArg_ParseTuple(args, "KpO!", &until, &counts_steps, &PyTuple_Type, &containers)) return nullptr;
  Py_DECREF(fast_path_wake(self, nullptr));
  Py_ssize_t given = PyTuple_GET_SIZE(containers);
  if (given > MOST_SIZED) return PyErr_Format(PyExc_ValueError, "at most %zd containers, not %zd", MOST_SIZED, given);
  for (Py_ssize_t at = 0; at < given; ++at) {
    PyObject* container = PyTuple_GET_ITEM(containers, at);
    Py_ssize_t size = PyObject_Size(container);
    if (size < 0) return nullptr;
    Py_INCREF(container);
    self->looked_at[at] = {container, size};
  }
  self->counts_steps = counts_steps;
  self->resting_until = until;
  Py_RETURN_NONE;
}

// -- whether it is for us --------------------------------------------------------------------------------------------

// The user's line, found as `stack.read` does. `lines` has each code that Python has seen on such a way, by its address, and each
// instruction of the user's that a way has led to, by the address of its code plus its own place: an object of code is longer than
// its instructions, so none of these is the address of another.
inline bool line_of(FastPath* self, uint32_t* line) {
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  Table::Slot* found = nullptr;
  while (frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    auto address = reinterpret_cast<uint64_t>(code);
    bool leads_out = self->lines->of.find(address) != nullptr;
    if (!leads_out) found = self->lines->of.find(address + 1 + static_cast<uint64_t>(PyFrame_GetLasti(frame)));
    PyFrameObject* outer = leads_out ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(code);
    Py_DECREF(frame);
    frame = outer;
  }
  if (found != nullptr) *line = static_cast<uint32_t>(found->value);
  return found != nullptr;
}

inline bool is_in_engine() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

inline bool is_resting(FastPath* self, uint64_t now) {
  bool is_same = now < self->resting_until && self->box->step + 1 < NO_STEP;
  for (Sized& sized : self->looked_at)
    is_same = is_same && (sized.container == nullptr || PyObject_Size(sized.container) == sized.size);
  if (PyErr_Occurred()) PyErr_Clear();
  return is_same;
}

// Whether the thread came into this optimizer step, and into no other, from outside everything.
inline bool came_from_outside(ThreadTrack* track) {
  PyObject* below = track->below_optimizer;
  return below != nullptr && PyList_GET_SIZE(below) == 1 && PyLong_AsUnsignedLongLong(PyList_GET_ITEM(below, 0)) == 0;
}

// Whether this optimizer, and no other, has stepped in the step before: then its step ends another one.
inline bool is_only_stepper(FastPath* self, PyObject* optimizer) {
  if (PySet_GET_SIZE(self->steppers) != 1) return false;
  PyObject* id = PyLong_FromVoidPtr(optimizer);
  bool is_in = id != nullptr && PySet_Contains(self->steppers, id) == 1;
  Py_XDECREF(id);
  return is_in;
}

inline bool name_of(FastPath* self, PyObject* optimizer, uint32_t* entry) {
  PyObject* name = PyType_GetName(Py_TYPE(optimizer));
  PyObject* found = name == nullptr ? nullptr : PyDict_GetItemWithError(self->names, name);
  Py_XDECREF(name);
  if (found != nullptr) *entry = static_cast<uint32_t>(PyLong_AsUnsignedLong(found));
  return found != nullptr;
}

// -- what is written -------------------------------------------------------------------------------------------------

inline Record record_at(FastPath* self, ThreadTrack* track, int kind, uint64_t t_ns, uint32_t line) {
  Record record{};
  record.kind = static_cast<uint8_t>(kind);
  record.t_ns = t_ns;
  record.thread = static_cast<uint8_t>(track->number);
  record.step = static_cast<uint32_t>(self->box->step);
  record.line = line;
  return record;
}

inline void put(FastPath* self, ThreadTrack* track, Record record) {
  self->box->words[track->cursor + CURSOR_RECORD] = self->box->put(record);
}

// As `Phases.step_begins`.
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
  uint64_t *ended = self->box->words + self->ended, *under_way = self->box->words + self->under_way;
  ended[1] = sum->count;
  ended[2] = sum->total_ns;
  ended[3] = sum->max_ns;
  under_way[1] = sum->running;
  under_way[2] = sum->begun_ns;
}

// As `Session.next_step`, at one place and one time: the end of a step is the begin of the next.
inline void go_to_step(FastPath* self, ThreadTrack* track, uint64_t step, uint32_t line, uint64_t now) {
  put(self, track, record_at(self, track, self->step_end_kind, now, line));
  self->box->step = step;
  self->box->words[track->cursor + CURSOR_STEP] = step;
  put(self, track, record_at(self, track, self->step_begin_kind, now, line));
  add_step(self, now);
  self->calls->forget();
}

// -- what Python calls -----------------------------------------------------------------------------------------------

// begin_backward(args) -> where the thread was before, None: this is for Python. The arguments of the engine, without the first.
inline PyObject* fast_path_begin_backward(FastPath* self, PyObject* args) {
  ThreadTrack* track = track_of(self->box);
  bool creates_graph = PyTuple_GET_SIZE(args) > 2 && PyTuple_GET_ITEM(args, 2) != Py_False;
  if (track == nullptr || creates_graph || self->is_paused || track->top == self->backward_word) Py_RETURN_NONE;
  uint32_t line;
  if (!line_of(self, &line)) Py_RETURN_NONE;
  uint64_t below = track->top;
  move(track, self->box, self->backward_word, line);
  return PyLong_FromUnsignedLongLong(below);
}

// end_backward(below) -> whether there is more to do, for Python: of one that began here.
inline PyObject* fast_path_end_backward(FastPath* self, PyObject* below) {
  uint64_t word = PyLong_AsUnsignedLongLong(below);
  if (PyErr_Occurred()) return nullptr;
  if (ThreadTrack* track = track_of(self->box)) move(track, self->box, word, 0);
  return PyBool_FromLong(self->ends_after_backward);
}

// begin_optimizer() -> whether it was done
inline PyObject* fast_path_begin_optimizer(FastPath* self, PyObject*) {
  ThreadTrack* track = track_of(self->box);
  if (track == nullptr || track->below_optimizer == nullptr) Py_RETURN_FALSE;
  PyObject* below = PyLong_FromUnsignedLongLong(track->top);
  bool is_kept = below != nullptr && PyList_Append(track->below_optimizer, below) == 0;
  Py_XDECREF(below);
  if (!is_kept) return nullptr;
  show(track, self->box, self->optimizer_word, now_ns());
  Py_RETURN_TRUE;
}

// end_optimizer(optimizer) -> whether it was done, and with it the end of the step, if that is one
inline PyObject* fast_path_end_optimizer(FastPath* self, PyObject* optimizer) {
  ThreadTrack* track = track_of(self->box);
  uint64_t now = now_ns();
  uint32_t line, entry;
  if (track == nullptr || !is_resting(self, now) || track->top != self->optimizer_word || is_in_engine() ||
      !came_from_outside(track) || (self->counts_steps && !is_only_stepper(self, optimizer)) ||
      !name_of(self, optimizer, &entry) || !line_of(self, &line)) {
    if (PyErr_Occurred()) PyErr_Clear();
    Py_RETURN_FALSE;
  }
  Record record = record_at(self, track, self->optimizer_kind, now, line);
  record.pass = self->optimizer_word >> PASS_SHIFT & PASS_MASK;
  record.subject = entry;
  put(self, track, record);
  if (PyList_SetSlice(track->below_optimizer, 0, 1, nullptr) < 0) return nullptr;
  show(track, self->box, 0, now);
  if (self->counts_steps) go_to_step(self, track, self->box->step + 1, line, now);
  Py_RETURN_TRUE;
}

// next_step(step) -> whether it was done: the user counts them.
inline PyObject* fast_path_next_step(FastPath* self, PyObject* step) {
  ThreadTrack* track = track_of(self->box);
  uint64_t number = PyLong_AsUnsignedLongLong(step), now = now_ns();
  if (PyErr_Occurred()) return nullptr;
  uint32_t line;
  bool is_ours = track != nullptr && is_resting(self, now) && track->top == 0 && !is_in_engine() && line_of(self, &line);
  if (is_ours) go_to_step(self, track, number, line, now);
  return PyBool_FromLong(is_ours);
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
    {const_cast<char*>("ends_after_backward"), T_BOOL, offsetof(FastPath, ends_after_backward), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
inline PyType_Slot fast_path_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(fast_path_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(fast_path_dealloc)},
    {Py_tp_methods, fast_path_methods},
    {Py_tp_members, fast_path_members},
    {0, nullptr}};
inline PyType_Spec fast_path_spec = {"torchwhere_native.FastPath", sizeof(FastPath), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, fast_path_slots};

}  // namespace torchwhere
