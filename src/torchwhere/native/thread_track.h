// Where a thread is, as C++ sees it: the part of `hooks/threads.py`'s Track that the hot paths need.
#pragma once

#include <ATen/SequenceNumber.h>

#include "box.h"

namespace torchwhere {

constexpr uint64_t LOG_MASK = (1u << 16) - 1;  // LOG_LENGTH - 1; Python checks that it is the same there

// The base class of a Track. Its own thread writes it, with the GIL; the kernel of `reductions.h` reads cursor and number.
struct ThreadTrack {
  PyObject_HEAD
  unsigned long long top, count, cursor;
  uint64_t *seqs_at, *marks_at;  // the log, once it is there; null before
  unsigned long long number;
  PyObject* below_optimizer;  // a list: where the thread was before each optimizer step that it is in
  Py_buffer seqs, marks;      // the arrays of the log
};

// The track of the calling thread, good for one box. It is never followed for another one: its track may be gone by then.
struct Here {
  uint64_t box = ~0ull;  // its id; no box has this one
  ThreadTrack* track = nullptr;
};
inline thread_local Here here;

// The calling thread's track, null where it has none yet, or none that can be written to any more.
inline ThreadTrack* track_of(const Box* box) {
  bool is_ready = here.box == box->id && box->words != nullptr && here.track->seqs_at != nullptr;
  return is_ready ? here.track : nullptr;
}

inline void track_unready(ThreadTrack* self) {
  self->seqs_at = self->marks_at = nullptr;
  if (self->seqs.obj != nullptr) PyBuffer_Release(&self->seqs);
  if (self->marks.obj != nullptr) PyBuffer_Release(&self->marks);
}

// use(seqs, marks): the log from now on; None, None: there is none.
inline PyObject* track_use(ThreadTrack* self, PyObject* args) {
  PyObject *seqs, *marks;
  if (!PyArg_ParseTuple(args, "OO", &seqs, &marks)) return nullptr;
  track_unready(self);
  if (seqs == Py_None) Py_RETURN_NONE;
  if (PyObject_GetBuffer(seqs, &self->seqs, PyBUF_WRITABLE) < 0) return nullptr;
  if (PyObject_GetBuffer(marks, &self->marks, PyBUF_WRITABLE) < 0 ||
      self->seqs.len != static_cast<Py_ssize_t>(8 * (LOG_MASK + 1)) || self->marks.len != self->seqs.len) {
    track_unready(self);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a log of another length");
    return nullptr;
  }
  self->seqs_at = static_cast<uint64_t*>(self->seqs.buf);
  self->marks_at = static_cast<uint64_t*>(self->marks.buf);
  Py_RETURN_NONE;
}

// is_here(box): this is the calling thread's track while that box is written.
inline PyObject* track_is_here(ThreadTrack* self, PyObject* box) {
  uint64_t id = reinterpret_cast<Box*>(box)->id;
  here = id ? Here{id, self} : Here{};
  Py_RETURN_NONE;
}

// From here on this thread is at `word`, which is noted in its log. The log must be there.
inline void note(ThreadTrack* track, uint64_t word) {
  uint64_t at = track->count++ & LOG_MASK;
  track->seqs_at[at] = at::sequence_number::peek();
  track->marks_at[at] = word;
}

inline void show(ThreadTrack* track, Box* box, uint64_t word, uint64_t t_ns) {
  track->top = word;
  uint64_t* cursor = box->words + track->cursor;
  cursor[CURSOR_PLACE] = word;
  cursor[CURSOR_TIME] = t_ns;
}

// Into or out of a backward: noted in the log, with the line that led there.
inline void move(ThreadTrack* track, Box* box, uint64_t word, uint64_t line) {
  show(track, box, word, now_ns());
  note(track, word);
  box->words[track->cursor + CURSOR_LINE] = line;
}

// move(box, word[, line]) -> whether that could be done: go to another pass. With a line, even 0, it is noted in the log.
inline PyObject* track_move(ThreadTrack* self, PyObject* const* args, Py_ssize_t given) {
  if (given < 2 || given > 3) return PyErr_Format(PyExc_TypeError, "a box, a word and a line, not %zd arguments", given);
  auto* box = reinterpret_cast<Box*>(args[0]);
  uint64_t word = PyLong_AsUnsignedLongLong(args[1]), line = given == 3 ? PyLong_AsUnsignedLongLong(args[2]) : 0;
  if (PyErr_Occurred()) return nullptr;
  if (box->words == nullptr || (given == 3 && self->seqs_at == nullptr)) Py_RETURN_FALSE;
  if (given == 3)
    move(self, box, word, line);
  else
    show(self, box, word, now_ns());
  Py_RETURN_TRUE;
}

inline void track_dealloc(ThreadTrack* self) {
  if (here.track == self) here = Here{};
  track_unready(self);
  Py_CLEAR(self->below_optimizer);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyMethodDef track_methods[] = {
    {"use", method(track_use), METH_VARARGS, nullptr},
    {"move", method(track_move), METH_FASTCALL, nullptr},
    {"is_here", method(track_is_here), METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyMemberDef track_members[] = {
    {const_cast<char*>("top"), T_ULONGLONG, offsetof(ThreadTrack, top), 0, nullptr},
    {const_cast<char*>("count"), T_ULONGLONG, offsetof(ThreadTrack, count), 0, nullptr},
    {const_cast<char*>("cursor"), T_ULONGLONG, offsetof(ThreadTrack, cursor), 0, nullptr},
    {const_cast<char*>("number"), T_ULONGLONG, offsetof(ThreadTrack, number), 0, nullptr},
    {const_cast<char*>("below_optimizer"), T_OBJECT_EX, offsetof(ThreadTrack, below_optimizer), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
inline PyType_Slot track_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(track_dealloc)},
    {Py_tp_methods, track_methods},
    {Py_tp_members, track_members},
    {0, nullptr}};
inline PyType_Spec track_spec = {
    "torchwhere_native.ThreadTrack", sizeof(ThreadTrack), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, track_slots};

}  // namespace torchwhere
