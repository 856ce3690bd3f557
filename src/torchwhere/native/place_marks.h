// Marks at places and steps, and the stream of the job: the one on which its steps begin.
//
// These functions release the GIL. They come last in a function, after all use of the box.
#pragma once

#include "device_progress.h"

namespace torchwhere {

// A thread marks its place at most this often, and more often if the pass changes. So places cost
// at most 0.4 % of the time of the thread, for any model: a mark takes about 2 us.
constexpr uint64_t PLACE_EVERY_NS = 500'000, PASS_EVERY_NS = 50'000;

struct LastPlaceMark {
  uint64_t t_ns = 0, pass = 0;
};
inline thread_local LastPlaceMark last_place_mark;

// Marks the place of this thread on the device, if the last mark is old enough.
inline void mark_place(const Box* box, uint64_t place, uint64_t t_ns) {
  DeviceProgress& self = *device_progress;
  if (!self.has_context.load(std::memory_order_relaxed)) return;
  LastPlaceMark& last = last_place_mark;
  uint64_t pass = place >> PASS_SHIFT & PASS_MASK;
  if (t_ns - last.t_ns < (pass == last.pass ? PLACE_EVERY_NS : PASS_EVERY_NS)) return;
  last = {t_ns, pass};
  self.mark_current_device(t_ns, {Point::PLACE, {-1, -1, 0}, place, box->step});
}

// The current stream of the current device. Only after the job has used the device.
inline c10::Stream current_stream() {
  c10::impl::VirtualGuardImpl guard(device_progress->type);
  return guard.getStream(guard.getDevice());
}

// The stream on which the last step began. Before that it is the default stream, whose id is 0.
inline std::atomic<c10::StreamId> job_stream{0};

inline void mark_step(const Box* box, uint64_t place, uint64_t record, uint64_t t_ns) {
  DeviceProgress& self = *device_progress;
  if (!self.has_context.load(std::memory_order_relaxed) || !self.is_on.load()) return;
  auto number = static_cast<int64_t>(record);
  Mark mark{Point::PLACE, {number, -1, 0}, place, box->step};
  try {
    job_stream = current_stream().id();
  } catch (const std::exception&) {  // not an error of the device: the next step tries again
  }
  self.mark_current_device(t_ns, mark);
}

// device_step(box, place, record): marks the begin of a step on the current device.
inline PyObject* device_step(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (given != 3) return PyErr_Format(PyExc_TypeError, "expected 3 arguments, not %zd", given);
  uint64_t place = PyLong_AsUnsignedLongLong(args[1]);
  uint64_t record = PyLong_AsUnsignedLongLong(args[2]);
  if (PyErr_Occurred()) return nullptr;
  mark_step(reinterpret_cast<Box*>(args[0]), place, record, now_ns());
  Py_RETURN_NONE;
}

}  // namespace torchwhere
