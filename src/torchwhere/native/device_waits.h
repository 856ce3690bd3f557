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
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>

#include "buckets.h"
#include "stream_calls.h"

namespace torchwhere {

constexpr size_t MOST_ASYNC_CALLS = 4096;  // a job that never waits would fill the table

// A collective that the job has not waited for.
struct AsyncCall {
  c10::DeviceIndex index = 0;
  Mark mark{};
  // its Work and its storages, or an event after it: each leads to it
  std::vector<const void*> keys;

  void set_mark(Point point) const {
    Mark due = mark;
    due.point = point;
    device_progress->mark(index, now_ns(), due);
  }
};
using AsyncCallPtr = std::shared_ptr<const AsyncCall>;

class AsyncCalls {
 public:
  void add(const AsyncCallPtr& call) {
    std::lock_guard<std::mutex> guard(lock_);
    if (calls_.size() >= MOST_ASYNC_CALLS) calls_.clear();
    for (const void* key : call->keys) calls_[key] = call;
  }

  // Finds and removes the call of a Work or of a storage. Null if there is none.
  AsyncCallPtr take(const void* key) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = calls_.find(key);
    if (found == calls_.end()) return nullptr;
    AsyncCallPtr call = found->second;
    for (const void* other : call->keys) {
      auto entry = calls_.find(other);
      if (entry != calls_.end() && entry->second == call) calls_.erase(entry);
    }
    return call;
  }

  void clear() {
    std::lock_guard<std::mutex> guard(lock_);
    calls_.clear();
  }

 private:
  std::mutex lock_;
  std::unordered_map<const void*, AsyncCallPtr> calls_;
};
inline AsyncCalls* async_calls = new AsyncCalls;  // never freed: threads may still use it at exit

// The collectives that this thread has issued since `_start_coalescing`. They are launched together
// in `_end_coalescing`, which returns one Work for all of them, or none if they are not asynchronous.
inline thread_local std::optional<std::vector<DueMark>> issued_together;

// Returns the address of the object that an instance of a class of pybind11 holds. Only a key: it is
// not used as a pointer.
inline const void* held_by(PyObject* instance) {
  struct Instance {
    PyObject_HEAD
    const void* value;
  };
  return reinterpret_cast<Instance*>(instance)->value;
}

// A collective has been launched, and this is the mark that is due at its end. Sets the mark, if the
// collective runs on the current stream; otherwise remembers it by the keys that lead to it: the
// addresses of its storages and of its Work, which is null if there is none.
inline void launched(const DueMark& due, const void* work, std::vector<const void*> keys) {
  if (work != nullptr) {
    keys.push_back(work);
    async_calls->take(work);  // an earlier Work at this address, which nothing waited for
  }
  // An exception may have left out `_end_coalescing`.
  if (issued_together && issued_together->size() >= MOST_ASYNC_CALLS) issued_together.reset();
  if (due.end == End::UNMARKED) return;
  if (issued_together)
    issued_together->push_back(due);
  else if (due.end == End::AT_LAUNCH)
    mark_end(due.index, due.mark);
  else
    async_calls->add(
        std::make_shared<const AsyncCall>(AsyncCall{due.index, due.mark, std::move(keys)}));
}

// device_launched(work[, storage, ...]): the collective that this thread has marked with
// `device_reach`, if any, has been launched. `work` is its Work, or None.
inline PyObject* device_launched(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (given < 1) return PyErr_Format(PyExc_TypeError, "expected at least one argument");
  std::vector<const void*> keys;
  for (Py_ssize_t at = 1; at < given; ++at) keys.push_back(PyLong_AsVoidPtr(args[at]));
  DueMark due = std::exchange(due_mark, {});
  if (PyErr_Occurred()) return nullptr;
  launched(due, args[0] == Py_None ? nullptr : held_by(args[0]), std::move(keys));
  Py_RETURN_NONE;
}

// The replacement of `Work.wait`. `wait` is the original.
inline PyObject* work_wait(
    PyObject* wait, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  AsyncCallPtr call = given > 0 ? async_calls->take(held_by(args[0])) : nullptr;
  if (call != nullptr) call->set_mark(Point::WAITED);
  PyObject* result = PyObject_Vectorcall(wait, args, given, keywords);
  if (call != nullptr && result != nullptr) call->set_mark(Point::DONE);
  return result;
}

// The replacement of `ProcessGroup._start_coalescing`.
inline PyObject* start_coalescing(
    PyObject* start, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  PyObject* result = PyObject_Vectorcall(start, args, given, keywords);
  if (result != nullptr) issued_together.emplace();
  return result;
}

// The replacement of `ProcessGroup._end_coalescing`.
inline PyObject* end_coalescing(
    PyObject* end, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  std::vector<DueMark> marks;
  if (issued_together) marks.swap(*issued_together);
  issued_together.reset();
  PyObject* work = PyObject_Vectorcall(end, args, given, keywords);
  if (work == nullptr || marks.empty()) return work;
  std::vector<MarkedCall> others;
  for (const DueMark& due : marks) others.push_back(due.mark.call);
  others.pop_back();
  AsyncCall all{marks.back().index, marks.back().mark, {}};
  all.mark.others = std::make_shared<const std::vector<MarkedCall>>(std::move(others));
  if (work == Py_None) {
    mark_end(all.index, all.mark);
  } else {
    all.keys.push_back(held_by(work));
    async_calls->add(std::make_shared<const AsyncCall>(std::move(all)));
  }
  return work;
}

// The kernel on `_c10d_functional::wait_tensor`, which waits for a functional collective.
inline void wait_tensor(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  static const c10::DispatchKeySet below(
      c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  if (kernel.box.load() == nullptr) kernel.passed.fetch_add(1);
  AsyncCallPtr call;
  const c10::IValue& given = stack->back();
  if (given.isTensor() && given.toTensor().has_storage())
    call = async_calls->take(given.toTensor().storage().unsafeGetStorageImpl());
  if (call != nullptr) call->set_mark(Point::WAITED);
  op.redispatchBoxed(keys & below, stack);
  if (call != nullptr) call->set_mark(Point::DONE);
}

}  // namespace torchwhere
