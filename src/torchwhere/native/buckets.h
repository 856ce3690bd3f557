// The buckets of DDP that Python has recorded, and the state of the kernel that records them. See
// `reductions.h`.
#pragma once

#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>

#include "thread_track.h"

namespace torchwhere {

// What identifies a launch of DDP's reducer.
struct Launch {
  c10::TensorImpl* param = nullptr;  // the parameter that completed the bucket; null: not from DDP
  c10::intrusive_ptr_target* group = nullptr;
  int64_t numel = 0;
  c10::Device device = c10::DeviceType::CPU;
};

// A bucket that Python has recorded. The weak reference to the group only prevents that another
// object gets its address. The parameter has no reference, not even a weak one, because
// `torch.utils.swap_tensors` refuses a tensor with a weak reference. DDP's reducer holds the
// parameter, and Python forgets the buckets of a DDP instance when the instance is deleted.
struct LearnedBucket {
  c10::weak_intrusive_ptr<c10::intrusive_ptr_target> group;
  c10::TensorImpl* param_at;
  c10::intrusive_ptr_target* group_at;
  int64_t numel;
  Record record;    // all fields that repeat
  int64_t counter;  // index of the words of the stream; negative: none
  Count* numbers;   // of the stream; a strong reference
  uint64_t label;   // the index of op and group in `CollectiveRecorder`
};

// The buckets of one DDP instance in order, and how many of them the running backward has reduced.
// Python and C++ share it, in place of `ddp.BucketProgress`.
struct Buckets {
  PyObject_HEAD
  long long task, next;
  unsigned long long turn;  // the DDP instance with the highest turn was reduced last
  std::vector<std::optional<LearnedBucket>> learned;
};

struct Recent {
  uint64_t number, index, label;
};

// One collective of torch.
struct CollectiveOp {
  c10::OperatorHandle python;  // our op with the same schema and a kernel in Python
  size_t arguments;
  int group_at, reduce_op_at;   // positions of arguments; negative: the op has none
  std::vector<int> tensors_at;  // the tensors that a job may wait for
  bool is_all_reduce;
};

// The state of the kernel in this process. Never freed: a thread may be in the kernel at any time.
struct Kernel {
  std::atomic<Box*> box{nullptr};             // null: record nothing, only redispatch
  std::atomic<int> inside{0};                 // threads that may use `box` without the GIL
  std::atomic<uint64_t> passed{0};            // calls while nothing was recorded
  std::atomic<bool> defers_to_python{false};  // Python needs every collective
  PyObject* engine_code = nullptr;            // the code of the frame that calls the engine
  Count* turns = nullptr;
  // Guards the tables. A thread that holds it must not store to the map or wait for the GIL: a
  // store may fault, and the handler of that fault runs in Python.
  std::mutex lock;
  std::unordered_map<c10::TensorImpl*, Buckets*> reducer_of;
  Recent recent[3] = {};
  uint64_t recorded = 0;
  std::unordered_map<c10::OperatorHandle, CollectiveOp> ops;  // does not change once it is filled
  std::vector<c10::RegistrationHandleRAII> registrations;
  bool marks_waits = false;  // one of the registrations is the kernel on wait_tensor
};
inline Kernel& kernel = *new Kernel;
inline thread_local Launch launch_in_python;  // the launch that Python handles on this thread now

// -- the type Buckets -----------------------------------------------------------------------------

inline PyObject* buckets_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Buckets*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->task = -1;
  new (&self->learned) std::vector<std::optional<LearnedBucket>>();
  return reinterpret_cast<PyObject*>(self);
}

// forget(): forgets all buckets, because DDP has new ones.
inline PyObject* buckets_forget(Buckets* self, PyObject*) {
  std::vector<std::optional<LearnedBucket>> removed;
  {
    std::lock_guard<std::mutex> guard(kernel.lock);
    removed.swap(self->learned);
    for (auto at = kernel.reducer_of.begin(); at != kernel.reducer_of.end();)
      at = at->second == self ? kernel.reducer_of.erase(at) : std::next(at);
  }
  for (auto& bucket : removed)
    if (bucket) Py_DECREF(bucket->numbers);
  Py_RETURN_NONE;
}

// Forgets the buckets of all DDP instances. Python teaches them again at their next reduction.
inline void forget_all_buckets() {
  std::vector<Buckets*> all;
  {
    std::lock_guard<std::mutex> guard(kernel.lock);
    for (const auto& [param, buckets] : kernel.reducer_of) all.push_back(buckets);
  }
  for (Buckets* buckets : all) Py_XDECREF(buckets_forget(buckets, nullptr));
}

inline void buckets_dealloc(Buckets* self) {
  Py_XDECREF(buckets_forget(self, nullptr));
  self->learned.~vector();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// learn(index, label, numbers, counter, kind, pass, flags, module, call, subject, beneficiary,
// param): stores the launch that Python handles now. The counter is -1 if there is none.
inline PyObject* buckets_learn(Buckets* self, PyObject* args) {
  unsigned long long index, label;
  long long counter;
  unsigned int kind, pass, flags, module, call, subject, beneficiary, param;
  PyObject* numbers;
  if (!PyArg_ParseTuple(
          args,
          "KKOLIIIIIIII",
          &index,
          &label,
          &numbers,
          &counter,
          &kind,
          &pass,
          &flags,
          &module,
          &call,
          &subject,
          &beneficiary,
          &param))
    return nullptr;
  if (launch_in_python.param == nullptr || index > 1u << 20) Py_RETURN_NONE;
  Record record{};
  record.kind = static_cast<uint8_t>(kind);
  record.pass = static_cast<uint8_t>(pass);
  record.flags = static_cast<uint8_t>(flags);
  record.module = module;
  record.call = call;
  record.subject = subject;
  record.beneficiary = beneficiary;
  record.param = param;
  Py_INCREF(numbers);
  std::optional<LearnedBucket> replaced{LearnedBucket{
      c10::weak_intrusive_ptr<c10::intrusive_ptr_target>(
          c10::intrusive_ptr<c10::intrusive_ptr_target>::reclaim_copy(launch_in_python.group)),
      launch_in_python.param,
      launch_in_python.group,
      launch_in_python.numel,
      record,
      counter,
      reinterpret_cast<Count*>(numbers),
      label}};
  {
    std::lock_guard<std::mutex> guard(kernel.lock);
    if (self->learned.size() <= index) self->learned.resize(index + 1);
    replaced.swap(self->learned[index]);
    kernel.reducer_of[launch_in_python.param] = self;
  }
  if (replaced) Py_DECREF(replaced->numbers);
  Py_RETURN_NONE;
}

inline PyMethodDef buckets_methods[] = {
    {"learn", method(buckets_learn), METH_VARARGS, nullptr},
    {"forget", method(buckets_forget), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyMemberDef buckets_members[] = {
    {const_cast<char*>("task"), T_LONGLONG, offsetof(Buckets, task), 0, nullptr},
    {const_cast<char*>("next"), T_LONGLONG, offsetof(Buckets, next), 0, nullptr},
    {const_cast<char*>("turn"), T_ULONGLONG, offsetof(Buckets, turn), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
inline PyType_Slot buckets_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(buckets_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(buckets_dealloc)},
    {Py_tp_methods, buckets_methods},
    {Py_tp_members, buckets_members},
    {0, nullptr}};
inline PyType_Spec buckets_spec = {
    "torchwhere_native.Buckets", sizeof(Buckets), 0, Py_TPFLAGS_DEFAULT, buckets_slots};

}  // namespace torchwhere
