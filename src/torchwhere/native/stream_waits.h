// The waits of a job for other streams, and the methods that replace those of torch.
//
// FSDP issues its collectives on streams of its own, and each blocks its stream. The job waits for an
// event that was recorded on that stream after the collective. A mark before the wait shows when the
// stream of the job came to it, and one after it when it went on. The collective has its own marks on
// its stream.
#pragma once

#include <cstring>
#include <memory>
#include <optional>

#include "device_waits.h"
#include "owned.h"

namespace torchwhere {

// Returns the stream that a method of an event got, or the current one. Nothing if it is unknown.
inline std::optional<c10::Stream> stream_given(
    PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  bool is_keyword = keywords != nullptr && PyTuple_GET_SIZE(keywords) == 1 && given == 1;
  PyObject* object = given == 2 || is_keyword ? args[1] : Py_None;
  if (object == Py_None) return current_stream();
  Owned id(PyObject_GetAttrString(object, "stream_id"));
  Owned index(id.get() == nullptr ? nullptr : PyObject_GetAttrString(object, "device_index"));
  if (index.get() == nullptr) return PyErr_Clear(), std::nullopt;
  c10::Device device(
      device_progress->type, static_cast<c10::DeviceIndex>(PyLong_AsLong(index.get())));
  c10::StreamId stream_id = PyLong_AsLongLong(id.get());
  if (PyErr_Occurred()) return PyErr_Clear(), std::nullopt;
  return c10::Stream(c10::Stream::UNSAFE, device, stream_id);
}

// The stream on which an event was recorded may have a collective before it: then a wait for the
// event is a wait for this collective.
inline void recorded(PyObject* event, const c10::Stream& stream) {
  std::optional<Mark> mark;
  if (stream.id() != job_stream) mark = stream_calls->find(stream);
  if (mark)
    async_calls->add(
        std::make_shared<const AsyncCall>(AsyncCall{stream.device_index(), *mark, {event}}));
  else
    async_calls->take(event);  // an earlier event at this address, or an earlier use of this one
}

// Returns the collective that the job waits for with an event; null if it is not known, or if
// another stream than that of the job waits.
inline AsyncCallPtr call_before(PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  std::optional<c10::Stream> stream = stream_given(args, given, keywords);
  bool is_job = stream && stream->id() == job_stream && *stream == current_stream();
  return is_job ? async_calls->take(args[0]) : nullptr;
}

inline bool marks_streams(Py_ssize_t given) {
  DeviceProgress& self = *device_progress;
  return given > 0 && self.is_on.load(std::memory_order_relaxed) && self.has_context;
}

// The replacement of `Event.record`.
inline PyObject* event_record(
    PyObject* record, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  PyObject* result = PyObject_Vectorcall(record, args, given, keywords);
  if (result == nullptr || !marks_streams(given)) return result;
  try {
    if (auto stream = stream_given(args, given, keywords)) recorded(args[0], *stream);
  } catch (const std::exception&) {  // not an error of the device
  }
  return result;
}

// The replacement of `Event.wait`.
inline PyObject* event_wait(
    PyObject* wait, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  AsyncCallPtr call;
  try {
    if (marks_streams(given)) call = call_before(args, given, keywords);
  } catch (const std::exception&) {  // not an error of the device
  }
  if (call != nullptr) call->set_mark(Point::STREAM_WAITED);
  PyObject* result = PyObject_Vectorcall(wait, args, given, keywords);
  if (call != nullptr && result != nullptr) call->set_mark(Point::STREAM_PASSED);
  return result;
}

// -- the methods ----------------------------------------------------------------------------------

// device_method(name, original) -> the method that replaces "Work.wait", "Event.record",
// "Event.wait", or "_start_coalescing" or "_end_coalescing" of ProcessGroup. `original` is the
// function of the original method.
inline PyObject* device_method(PyObject*, PyObject* args) {
  constexpr int flags = METH_FASTCALL | METH_KEYWORDS;
  static PyMethodDef definitions[] = {
      {"Work.wait", method(work_wait), flags, nullptr},
      {"Event.record", method(event_record), flags, nullptr},
      {"Event.wait", method(event_wait), flags, nullptr},
      {"_start_coalescing", method(start_coalescing), flags, nullptr},
      {"_end_coalescing", method(end_coalescing), flags, nullptr}};
  const char* name;
  PyObject* original;
  if (!PyArg_ParseTuple(args, "sO", &name, &original)) return nullptr;
  for (PyMethodDef& definition : definitions) {
    if (std::strcmp(definition.ml_name, name) != 0) continue;
    PyObject* function = PyCFunction_New(&definition, original);
    PyObject* replacement = function == nullptr ? nullptr : PyInstanceMethod_New(function);
    Py_XDECREF(function);
    return replacement;
  }
  return PyErr_Format(PyExc_ValueError, "unknown method %s", name);
}

}  // namespace torchwhere
