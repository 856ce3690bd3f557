// Writes records into a box from C++: the record of `blackbox/file_format.py` with its checksum,
// and the memory map that contains the ring of records.
#pragma once

#include <Python.h>
#include <structmember.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <new>

#include "step_clock.h"

namespace torchwhere {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a box is little-endian");

struct __attribute__((packed)) Record {
  uint64_t number, t_ns;
  uint8_t kind, pass, flags, thread;
  uint32_t step, module, call, line, graph, subject, beneficiary, param;
  uint64_t extra;
  uint32_t crc;
};
static_assert(sizeof(Record) == 64, "RECORD_BYTES");

constexpr int PASS_SHIFT = 32, MODULE_SHIFT = 36;
constexpr uint64_t PASS_MASK = 0xF, CALL_MASK = 0xFFFFFFFF;
constexpr int CURSOR_PLACE = 0, CURSOR_TIME = 1, CURSOR_STEP = 2;
constexpr int CURSOR_LINE = 4, CURSOR_RECORD = 5;
constexpr uint8_t STEP_TIMES = 25;  // the kind of a record
constexpr int COUNTER_COUNT = 1, COUNTER_TIME = 2, COUNTER_RECORD = 3;

// zlib's CRC, one byte at a time. This table takes 16 cache lines. A table for eight bytes at a
// time takes 128, and the cache is cold when a record is written.
struct CrcTable {
  uint32_t of[256];
  constexpr CrcTable() : of() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t rest = byte;
      for (int bit = 0; bit < 8; ++bit) rest = rest & 1 ? rest >> 1 ^ 0xEDB88320u : rest >> 1;
      of[byte] = rest;
    }
  }
};
inline constexpr CrcTable crc_table;

inline uint32_t crc32(const void* data, size_t size) {
  uint32_t rest = ~0u;
  for (auto* at = static_cast<const uint8_t*>(data); size--; ++at)
    rest = rest >> 8 ^ crc_table.of[(rest ^ *at) & 0xFF];
  return ~rest;
}

inline uint64_t now_ns() {  // like time.monotonic_ns()
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

// One open box. Python writes to it with the GIL. The kernel of `reductions.h` writes without the
// GIL, and only while its gate is open. Every record has its own slot, so writers need no lock:
// they share only the counter that numbers the records.
struct Box {
  PyObject_HEAD
  uint64_t id;      // unique in this process; 0 in a forked child, which has no tracks of its own
  uint64_t* words;  // null after close
  char* ring;
  uint64_t capacity;
  std::atomic<uint64_t> next;
  unsigned long long step;
  // The cursor of the main thread, or 0. A thread without a line of its own uses the line there.
  unsigned long long main_cursor;
  StepClock clock;
  Py_buffer view;

  uint64_t put(Record& record) {
    record.number = next.fetch_add(1, std::memory_order_relaxed);
    record.crc = crc32(&record, offsetof(Record, crc));
    std::memcpy(ring + record.number % capacity * sizeof(Record), &record, sizeof(Record));
    return record.number;
  }
};

inline uint64_t boxes_made = 0;
// Waits until the kernel of `reductions.h` no longer writes to the box.
void release_box(Box* box);

inline PyObject* box_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* map;
  unsigned long long ring_at, capacity;
  if (!PyArg_ParseTuple(args, "OKK", &map, &ring_at, &capacity)) return nullptr;
  auto* self = reinterpret_cast<Box*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  new (&self->next) std::atomic<uint64_t>(0);
  if (PyObject_GetBuffer(map, &self->view, PyBUF_WRITABLE) < 0) {
    Py_DECREF(self);
    return nullptr;
  }
  auto length = static_cast<unsigned long long>(self->view.len);
  if (!capacity || ring_at + capacity * sizeof(Record) > length) {
    PyErr_SetString(PyExc_ValueError, "the ring is not inside the map");
    PyBuffer_Release(&self->view);
    Py_DECREF(self);
    return nullptr;
  }
  self->words = static_cast<uint64_t*>(self->view.buf);
  self->ring = static_cast<char*>(self->view.buf) + ring_at;
  self->capacity = capacity;
  self->id = ++boxes_made;
  return reinterpret_cast<PyObject*>(self);
}

inline PyObject* box_close(Box* self, PyObject*) {
  if (self->words != nullptr) {
    release_box(self);
    self->words = nullptr;
    PyBuffer_Release(&self->view);
  }
  self->id = 0;
  Py_RETURN_NONE;
}

inline PyObject* box_abandon(Box* self, PyObject*) {
  self->id = 0;
  Py_RETURN_NONE;
}

inline void box_dealloc(Box* self) {
  Py_XDECREF(box_close(self, nullptr));
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// The fields in the order of `BoxWriter.record`: offset and size in bytes of each.
struct Field {
  uint8_t at, size;
};
constexpr Field fields[] = {
    {16, 1}, {8, 8}, {17, 1}, {18, 1}, {19, 1}, {20, 4}, {24, 4},
    {28, 4}, {32, 4}, {36, 4}, {40, 4}, {44, 4}, {48, 4}, {52, 8}};
constexpr Py_ssize_t FIELDS = sizeof(fields) / sizeof(Field);
static_assert(offsetof(Record, step) == 20 && offsetof(Record, extra) == 52, "offsets of fields");

// record(kind, t_ns, pass, flags, thread, step, module, call, line, graph, subject, beneficiary,
// param, extra) -> number. Only kind and t_ns are required. A value that does not fit is an error,
// as for struct.pack.
inline PyObject* box_record(Box* self, PyObject* const* args, Py_ssize_t given) {
  if (given < 2 || given > FIELDS)
    return PyErr_Format(PyExc_TypeError, "a record has 2 to 14 fields, not %zd", given);
  Record record{};
  for (Py_ssize_t at = 0; at < given; ++at) {
    uint64_t value = PyLong_AsUnsignedLongLong(args[at]);
    bool is_bad = value == ~0ull && PyErr_Occurred();
    if (is_bad) PyErr_Clear();
    if (is_bad || (fields[at].size < 8 && value >> 8 * fields[at].size))
      return PyErr_Format(
          PyExc_ValueError, "%R does not fit into field %zd of a record", args[at], at);
    auto* field = reinterpret_cast<char*>(&record) + fields[at].at;
    std::memcpy(field, &value, fields[at].size);  // little-endian
  }
  if (self->words == nullptr) return PyErr_Format(PyExc_ValueError, "the box is closed");
  return PyLong_FromUnsignedLongLong(self->put(record));
}

// Writes the times of the parts of a step, and begins the next one.
inline void put_step_times(
    Box* box, uint64_t cursor, uint64_t pass, uint64_t thread, uint64_t t_ns) {
  StepClock& clock = box->clock;
  clock.add(t_ns);
  Record record{};
  uint32_t us[PARTS];
  for (int part = 0; part < PARTS; ++part) {
    uint64_t all_us = clock.ns[part] / 1000;
    us[part] = static_cast<uint32_t>(all_us < 0xFFFFFFFF ? all_us : 0xFFFFFFFF);
    record.extra += clock.ns[part];
  }
  record.kind = STEP_TIMES;
  record.t_ns = t_ns;
  record.thread = static_cast<uint8_t>(thread);
  record.step = static_cast<uint32_t>(box->step);
  auto* fields = reinterpret_cast<char*>(&record) + offsetof(Record, module);
  std::memcpy(fields, us + 1, (PARTS - 1) * sizeof(uint32_t));
  box->put(record);
  clock.restart(cursor, pass, t_ns);
}

// Reads ints that Python passes.
inline bool read_ints(PyObject* const* args, Py_ssize_t given, Py_ssize_t expected, uint64_t* to) {
  if (given != expected) {
    PyErr_Format(PyExc_TypeError, "expected %zd ints, not %zd", expected, given);
    return false;
  }
  for (Py_ssize_t at = 0; at < given; ++at) to[at] = PyLong_AsUnsignedLongLong(args[at]);
  return !PyErr_Occurred();
}

// start_clock(cursor, place): times this thread from now on.
inline PyObject* box_start_clock(Box* self, PyObject* const* args, Py_ssize_t given) {
  uint64_t of[2];
  if (!read_ints(args, given, 2, of)) return nullptr;
  self->clock.restart(of[0], of[1] >> PASS_SHIFT & PASS_MASK, now_ns());
  Py_RETURN_NONE;
}

// move_clock(cursor, place, t_ns): a thread is at this place from now on.
inline PyObject* box_move_clock(Box* self, PyObject* const* args, Py_ssize_t given) {
  uint64_t of[3];
  if (!read_ints(args, given, 3, of)) return nullptr;
  self->clock.move(of[0], of[1] >> PASS_SHIFT & PASS_MASK, of[2]);
  Py_RETURN_NONE;
}

// begin_part(cursor, part) -> whether it has begun.
inline PyObject* box_begin_part(Box* self, PyObject* const* args, Py_ssize_t given) {
  uint64_t of[2];
  if (!read_ints(args, given, 2, of)) return nullptr;
  StepClock& clock = self->clock;
  bool begins = of[0] == clock.cursor && clock.open_part == 0 && of[1] < PARTS;
  if (begins) {
    clock.open_part = static_cast<int>(of[1]);
    clock.add(now_ns());
  }
  return PyBool_FromLong(begins);
}

inline PyObject* box_end_part(Box* self, PyObject*) {
  self->clock.open_part = 0;
  self->clock.add(now_ns());
  Py_RETURN_NONE;
}

inline void set_evaluation(Box* box, uint64_t cursor, bool whether) {
  StepClock& clock = box->clock;
  if (cursor != clock.cursor || clock.is_evaluation == whether) return;
  clock.is_evaluation = whether;
  clock.add(now_ns());
}

// set_evaluation(cursor, whether)
inline PyObject* box_set_evaluation(Box* self, PyObject* const* args, Py_ssize_t given) {
  uint64_t of[2];
  if (!read_ints(args, given, 2, of)) return nullptr;
  set_evaluation(self, of[0], of[1] != 0);
  Py_RETURN_NONE;
}

// end_step(cursor, place, thread): writes the times of a step.
inline PyObject* box_end_step(Box* self, PyObject* const* args, Py_ssize_t given) {
  uint64_t of[3];
  if (!read_ints(args, given, 3, of)) return nullptr;
  if (self->words == nullptr) return PyErr_Format(PyExc_ValueError, "the box is closed");
  put_step_times(self, of[0], of[1] >> PASS_SHIFT & PASS_MASK, of[2], now_ns());
  Py_RETURN_NONE;
}

template <typename Function>
PyCFunction method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

inline PyMethodDef box_methods[] = {
    {"record", method(box_record), METH_FASTCALL, nullptr},
    {"close", method(box_close), METH_NOARGS, nullptr},
    {"abandon", method(box_abandon), METH_NOARGS, nullptr},
    {"start_clock", method(box_start_clock), METH_FASTCALL, nullptr},
    {"move_clock", method(box_move_clock), METH_FASTCALL, nullptr},
    {"begin_part", method(box_begin_part), METH_FASTCALL, nullptr},
    {"end_part", method(box_end_part), METH_NOARGS, nullptr},
    {"set_evaluation", method(box_set_evaluation), METH_FASTCALL, nullptr},
    {"end_step", method(box_end_step), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyMemberDef box_members[] = {
    {const_cast<char*>("step"), T_ULONGLONG, offsetof(Box, step), 0, nullptr},
    {const_cast<char*>("main_cursor"), T_ULONGLONG, offsetof(Box, main_cursor), 0, nullptr},
    {const_cast<char*>("clock_cursor"), T_ULONGLONG, offsetof(Box, clock.cursor), READONLY, nullptr},
    {const_cast<char*>("part"), T_UBYTE, offsetof(Box, clock.part), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
inline PyType_Slot box_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(box_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(box_dealloc)},
    {Py_tp_methods, box_methods},
    {Py_tp_members, box_members},
    {0, nullptr}};
inline PyType_Spec box_spec = {
    "torchwhere_native.Box", sizeof(Box), 0, Py_TPFLAGS_DEFAULT, box_slots};

// Counts like itertools.count. Python and C++ share it.
struct Count {
  PyObject_HEAD
  std::atomic<uint64_t> next;
};

inline PyObject* count_new(PyTypeObject* type, PyObject* args, PyObject*) {
  unsigned long long first = 0;
  if (!PyArg_ParseTuple(args, "|K", &first)) return nullptr;
  auto* self = reinterpret_cast<Count*>(type->tp_alloc(type, 0));
  if (self != nullptr) new (&self->next) std::atomic<uint64_t>(first);
  return reinterpret_cast<PyObject*>(self);
}

inline PyObject* count_next(Count* self) {
  return PyLong_FromUnsignedLongLong(self->next.fetch_add(1));
}

inline void count_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyType_Slot count_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(count_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(count_dealloc)},
    {Py_tp_iter, reinterpret_cast<void*>(PyObject_SelfIter)},
    {Py_tp_iternext, reinterpret_cast<void*>(count_next)},
    {0, nullptr}};
inline PyType_Spec count_spec = {
    "torchwhere_native.Count", sizeof(Count), 0, Py_TPFLAGS_DEFAULT, count_slots};

}  // namespace torchwhere
