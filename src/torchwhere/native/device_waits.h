// The waits of a job for its asynchronous collectives.
//
// An asynchronous collective runs on a stream of its process group. It blocks no stream of the job
// until the job waits for it: in `Work.wait`, in `wait_tensor`, or, for DDP, at the end of a backward.
// A mark before the wait and one after it show when the stream came to the wait, and when the
// collective was done at the latest.
#pragma once

#include <cstring>
#include <optional>
#include <unordered_map>

#include <ATen/core/dispatch/Dispatcher.h>

#include "device_progress.h"

namespace torchwhere {

constexpr size_t MOST_ASYNC_CALLS = 4096;  // a job that never waits would fill the table

// An asynchronous collective that the job has not waited for.
struct AsyncCall {
  c10::DeviceIndex index = 0;
  Mark mark{};
  const void *work = nullptr, *storage = nullptr;  // either leads to it

  void set_mark(Point point) const {
    Mark due = mark;
    due.point = point;
    device_progress->mark(index, now_ns(), due);
  }
};

class AsyncCalls {
 public:
  void add(const AsyncCall& call) {
    std::lock_guard<std::mutex> guard(lock_);
    if (calls_.size() >= MOST_ASYNC_CALLS) calls_.clear();
    for (const void* key : {call.work, call.storage})
      if (key != nullptr) calls_[key] = call;
  }

  // Finds and removes the call of a Work or of a storage.
  bool take(const void* key, AsyncCall* call) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = calls_.find(key);
    if (found == calls_.end()) return false;
    *call = found->second;
    for (const void* other : {call->work, call->storage}) {
      auto entry = calls_.find(other);
      if (entry != calls_.end() && entry->second.mark.call.record == call->mark.call.record)
        calls_.erase(entry);
    }
    return true;
  }

  void clear() {
    std::lock_guard<std::mutex> guard(lock_);
    calls_.clear();
  }

 private:
  std::mutex lock_;
  std::unordered_map<const void*, AsyncCall> calls_;
};
inline AsyncCalls* async_calls = new AsyncCalls;  // never freed: threads may still use it at exit

// The asynchronous collectives that this thread has issued since `_start_coalescing`: they have one
// Work, which `_end_coalescing` returns.
inline thread_local std::optional<std::vector<AsyncCall>> issued_together;

// Returns the address of the object that an instance of a class of pybind11 holds. Only a key: it is
// not used as a pointer.
inline const void* held_by(PyObject* instance) {
  struct Instance {
    PyObject_HEAD
    const void* value;
  };
  return reinterpret_cast<Instance*>(instance)->value;
}

// device_launched(work, storage): marks the end of the collective that this thread has just launched,
// if it runs on the current stream. Otherwise remembers it by its Work and by the address of its
// storage. `work` may be None, and `storage` 0.
inline PyObject* device_launched(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (given != 2) return PyErr_Format(PyExc_TypeError, "expected 2 arguments, not %zd", given);
  const void* work = args[0] == Py_None ? nullptr : held_by(args[0]);
  const void* storage = PyLong_AsVoidPtr(args[1]);
  if (PyErr_Occurred()) return nullptr;
  AsyncCall call{due_mark.index, due_mark.mark, work, storage};
  // An exception may have left out `_end_coalescing`.
  if (issued_together && issued_together->size() >= MOST_ASYNC_CALLS) issued_together.reset();
  if (due_mark.is_on_current_stream) {
    async_calls->take(work, &call);  // a Work that was at this address before
    device_progress->mark(due_mark.index, now_ns(), due_mark.mark);
  } else if (issued_together) {
    issued_together->push_back(call);
  } else if (work != nullptr) {
    async_calls->add(call);
  }
  Py_RETURN_NONE;
}

// The replacement of `Work.wait`. `wait` is the original.
inline PyObject* work_wait(
    PyObject* wait, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  AsyncCall call;
  bool is_marked = given > 0 && async_calls->take(held_by(args[0]), &call);
  if (is_marked) call.set_mark(Point::WAITED);
  PyObject* result = PyObject_Vectorcall(wait, args, given, keywords);
  if (is_marked && result != nullptr) call.set_mark(Point::DONE);
  return result;
}

// The replacement of `ProcessGroup._start_coalescing`.
inline PyObject* start_coalescing(
    PyObject* start, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  issued_together.emplace();
  return PyObject_Vectorcall(start, args, given, keywords);
}

// The replacement of `ProcessGroup._end_coalescing`.
inline PyObject* end_coalescing(
    PyObject* end, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  std::vector<AsyncCall> calls;
  if (issued_together) calls.swap(*issued_together);
  issued_together.reset();
  PyObject* work = PyObject_Vectorcall(end, args, given, keywords);
  if (work == nullptr || work == Py_None || calls.empty()) return work;
  std::vector<MarkedCall> others;
  for (const AsyncCall& call : calls) others.push_back(call.mark.call);
  others.pop_back();
  AsyncCall all{calls.back().index, calls.back().mark, held_by(work), nullptr};
  all.mark.others = std::make_shared<const std::vector<MarkedCall>>(std::move(others));
  async_calls->add(all);
  return work;
}

// device_method(name, original) -> the method that replaces `Work.wait`, or `_start_coalescing` or
// `_end_coalescing` of ProcessGroup. `original` is the function of the original method.
inline PyObject* device_method(PyObject*, PyObject* args) {
  constexpr int flags = METH_FASTCALL | METH_KEYWORDS;
  static PyMethodDef definitions[] = {
      {"wait", method(work_wait), flags, nullptr},
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

// The kernel on `_c10d_functional::wait_tensor`, which waits for a functional collective.
inline void wait_tensor(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  static const c10::DispatchKeySet below(
      c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  AsyncCall call;
  const c10::IValue& given = stack->back();
  bool is_marked = given.isTensor() && given.toTensor().has_storage() &&
      async_calls->take(given.toTensor().storage().unsafeGetStorageImpl(), &call);
  if (is_marked) call.set_mark(Point::WAITED);
  op.redispatchBoxed(keys & below, stack);
  if (is_marked) call.set_mark(Point::DONE);
}

}  // namespace torchwhere
