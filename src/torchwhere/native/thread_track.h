// The place of a thread: the fields of the Track in `hooks/threads.py` that the hot paths use.
#pragma once

#include <algorithm>
#include <vector>

#include <ATen/SequenceNumber.h>

#include "box.h"
#include "memory.h"
#include "place_marks.h"

namespace torchwhere {

constexpr uint64_t LOG_MASK = (1u << 16) - 1;  // LOG_LENGTH - 1, as in Python (tested)

// The base class of a Track. Only its own thread writes it, with the GIL. The kernel of
// `reductions.h` reads cursor and number.
struct ThreadTrack {
  PyObject_HEAD
  unsigned long long top, count, cursor;
  uint64_t *seqs_at, *marks_at;  // the log; null while there is none
  unsigned long long number;
  PyObject* below_optimizer;  // a list: the place before each optimizer step that is running
  Py_buffer seqs, marks;      // the arrays of the log
};

// The track of the calling thread, valid for one box only: when another box is open, the track may
// have been freed.
struct CurrentTrack {
  uint64_t box = ~0ull;  // the id of the box; no box has this one
  ThreadTrack* track = nullptr;
};
inline thread_local CurrentTrack current;

// Returns the track of the calling thread; null if it has none yet, or if the box is closed.
inline ThreadTrack* track_of(const Box* box) {
  bool is_ready =
      current.box == box->id && box->words != nullptr && current.track->seqs_at != nullptr;
  return is_ready ? current.track : nullptr;
}

// The tracks that have a log, in the order in which they got it. Used only with the GIL.
inline std::vector<ThreadTrack*>& logged_tracks = *new std::vector<ThreadTrack*>;

inline void track_unready(ThreadTrack* self) {
  auto at = std::find(logged_tracks.begin(), logged_tracks.end(), self);
  if (at != logged_tracks.end()) logged_tracks.erase(at);
  self->seqs_at = self->marks_at = nullptr;
  if (self->seqs.obj != nullptr) PyBuffer_Release(&self->seqs);
  if (self->marks.obj != nullptr) PyBuffer_Release(&self->marks);
}

// use(seqs, marks): sets the arrays of the log; use(None, None) removes them.
inline PyObject* track_use(ThreadTrack* self, PyObject* args) {
  PyObject *seqs, *marks;
  if (!PyArg_ParseTuple(args, "OO", &seqs, &marks)) return nullptr;
  track_unready(self);
  if (seqs == Py_None) Py_RETURN_NONE;
  if (PyObject_GetBuffer(seqs, &self->seqs, PyBUF_WRITABLE) < 0) return nullptr;
  if (PyObject_GetBuffer(marks, &self->marks, PyBUF_WRITABLE) < 0 ||
      self->seqs.len != static_cast<Py_ssize_t>(8 * (LOG_MASK + 1)) ||
      self->marks.len != self->seqs.len) {
    track_unready(self);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the log has a wrong length");
    return nullptr;
  }
  self->seqs_at = static_cast<uint64_t*>(self->seqs.buf);
  self->marks_at = static_cast<uint64_t*>(self->marks.buf);
  logged_tracks.push_back(self);
  Py_RETURN_NONE;
}

// is_here(box): makes this the track of the calling thread, as long as that box is open.
inline PyObject* track_is_here(ThreadTrack* self, PyObject* box) {
  uint64_t id = reinterpret_cast<Box*>(box)->id;
  current = id ? CurrentTrack{id, self} : CurrentTrack{};
  Py_RETURN_NONE;
}

// Appends to the log that the thread is at `place` from now on. The log must exist.
inline void append_to_log(ThreadTrack* track, uint64_t place) {
  uint64_t at = track->count++ & LOG_MASK;
  track->seqs_at[at] = at::sequence_number::peek();
  track->marks_at[at] = place;
}

// Returns the index of the last entry at or before `seq`; -1 if `seq` is older than the log. Like
// `Track.position`.
inline int64_t position_in_log(const ThreadTrack* track, uint64_t seq) {
  auto high = static_cast<int64_t>(track->count);
  int64_t first = std::max<int64_t>(0, high - static_cast<int64_t>(LOG_MASK) - 1), low = first;
  while (low < high) {
    int64_t middle = (low + high) >> 1;
    if (track->seqs_at[static_cast<uint64_t>(middle) & LOG_MASK] <= seq)
      low = middle + 1;
    else
      high = middle;
  }
  return low > first ? low - 1 : -1;
}

// Sets the place of the thread. `mark_place` comes next.
inline void set_place(ThreadTrack* track, Box* box, uint64_t place, uint64_t t_ns) {
  leave_place(track->top, place, t_ns);
  if ((track->top ^ place) >> PASS_SHIFT & PASS_MASK)
    box->clock.move(track->cursor, place >> PASS_SHIFT & PASS_MASK, t_ns);
  track->top = place;
  uint64_t* cursor = box->words + track->cursor;
  cursor[CURSOR_PLACE] = place;
  cursor[CURSOR_TIME] = t_ns;
}

// Enters or leaves a backward: written to the log, with the line that called it.
inline void move(ThreadTrack* track, Box* box, uint64_t place, uint64_t line) {
  uint64_t t_ns = now_ns();
  set_place(track, box, place, t_ns);
  append_to_log(track, place);
  box->words[track->cursor + CURSOR_LINE] = line;
  mark_place(box, place, t_ns);
}

// move(box, place[, line]) -> True if done: changes the pass. With a line, even 0, the log gets an
// entry.
inline PyObject* track_move(ThreadTrack* self, PyObject* const* args, Py_ssize_t given) {
  if (given < 2 || given > 3)
    return PyErr_Format(PyExc_TypeError, "expected box, place and line, not %zd arguments", given);
  auto* box = reinterpret_cast<Box*>(args[0]);
  uint64_t place = PyLong_AsUnsignedLongLong(args[1]);
  uint64_t line = given == 3 ? PyLong_AsUnsignedLongLong(args[2]) : 0;
  if (PyErr_Occurred()) return nullptr;
  if (box->words == nullptr || (given == 3 && self->seqs_at == nullptr)) Py_RETURN_FALSE;
  if (given == 3) {
    move(self, box, place, line);
  } else {
    uint64_t t_ns = now_ns();
    set_place(self, box, place, t_ns);
    mark_place(box, place, t_ns);
  }
  Py_RETURN_TRUE;
}

inline void track_dealloc(ThreadTrack* self) {
  if (current.track == self) current = CurrentTrack{};
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
    {const_cast<char*>("below_optimizer"),
     T_OBJECT_EX,
     offsetof(ThreadTrack, below_optimizer),
     0,
     nullptr},
    {nullptr, 0, 0, 0, nullptr}};
inline PyType_Slot track_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(track_dealloc)},
    {Py_tp_methods, track_methods},
    {Py_tp_members, track_members},
    {0, nullptr}};
inline PyType_Spec track_spec = {
    "torchwhere_native.ThreadTrack",
    sizeof(ThreadTrack),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    track_slots};

}  // namespace torchwhere
