// DDP's reductions without Python: a kernel on c10d::allreduce_ that records a bucket which Python has seen before.
//
// Whatever is not such a bucket goes to torchwhere::allreduce_, an op of the same schema with today's Python kernel on it. When
// Python recognizes a bucket there, it hands over what is the same every time (`Buckets.learn`); the kernel has kept, for this
// thread, what identifies the call it was asked about. The next one like it costs no Python object and no GIL.
#pragma once

#include <sched.h>

#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include "device_progress.h"
#include "thread_track.h"

namespace torchwhere {

// What identifies a launch of DDP's reducer.
struct Launch {
  c10::TensorImpl* param = nullptr;  // the parameter that completed the bucket; null: no such launch
  c10::intrusive_ptr_target* group = nullptr;
  int64_t numel = 0;
  c10::Device device = c10::DeviceType::CPU;
};

// A bucket that Python knows. The reference to the group is weak and kept only so that no other object can have the same address.
// The parameter has no reference, not even a weak one: `torch.utils.swap_tensors` refuses a tensor that has one. DDP's reducer
// holds it, and Python forgets the buckets of a DDP instance when that is gone.
struct Learned {
  c10::weak_intrusive_ptr<c10::intrusive_ptr_target> group;
  c10::TensorImpl* param_at;
  c10::intrusive_ptr_target* group_at;
  int64_t numel;
  Record record;   // all that repeats
  int64_t counter;   // index of the stream's words; negative: it has none
  Count* numbers;  // of the stream; a reference of ours
  uint64_t label;  // what the recorder calls it
};

// The buckets of one DDP instance in their order, and how far a backward is in them: `ddp.Progress` for both sides.
struct Buckets {
  PyObject_HEAD
  long long task, next;
  unsigned long long turn;  // of all instances, the one with the highest was reduced last
  std::vector<std::optional<Learned>> known;
};

struct Recent {
  uint64_t number, index, label;
};

// The kernel of this process. It is never freed: a thread may be in it at any time.
struct Kernel {
  std::atomic<Box*> box{nullptr};  // null: nothing is recorded, all-reduces pass
  std::atomic<int> inside{0};      // threads that may be using `box` and are not holding the GIL
  std::atomic<uint64_t> passed{0};  // calls that came while nothing was recorded
  std::atomic<bool> is_paused{false};  // somebody in Python wants to be told of every collective
  PyObject* engine_code = nullptr;  // the code of the frame that calls the engine
  Count* turns = nullptr;
  // Guards the tables. Nobody stores to the map, or waits for the GIL, while holding it: a store may fault, and the handler of
  // that fault is Python's.
  std::mutex lock;
  std::unordered_map<c10::TensorImpl*, Buckets*> reducer_of;
  Recent recent[3] = {};
  uint64_t recorded = 0;
  std::optional<c10::RegistrationHandleRAII> registration;
  std::optional<c10::OperatorHandle> python;
};
inline Kernel& kernel = *new Kernel;
inline thread_local Launch asked;  // what Python is being asked about on this thread

// -- who calls -------------------------------------------------------------------------------------------------------

// The code of the Python frame this thread is in, null where it is in none. Needs no GIL: only this thread changes it.
// CPython has no function for it that could be called without the GIL; `check_frames` finds out whether this is the layout.
inline PyObject* running_code() {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (thread == nullptr) return nullptr;
#if PY_VERSION_HEX >= 0x030D0000
  auto* frame = reinterpret_cast<PyObject**>(thread->current_frame);
#else
  auto* frame = reinterpret_cast<PyObject**>(thread->cframe->current_frame);
#endif
  constexpr int code_at = PY_VERSION_HEX >= 0x030C0000 ? 0 : 4;
  return frame == nullptr ? nullptr : frame[code_at];
}

// check_frames(code): whether `code` is what runs.
inline PyObject* check_frames(PyObject*, PyObject* code) {
  return PyBool_FromLong(running_code() == code);
}

// Whether DDP's reducer calls: out of the engine, no Python in between, from the hook of a parameter. As `_is_from_engine` and
// `Reducers.bucket` have it.
inline Launch launch_of(const std::vector<c10::IValue>& stack, size_t arguments) {
  PyObject* code = running_code();
  if (code != nullptr && code != kernel.engine_code) return {};
  if (torch::autograd::get_current_graph_task_id() == -1) return {};
  auto node = torch::autograd::get_current_node();
  auto* accumulates = dynamic_cast<torch::autograd::AccumulateGrad*>(node.get());
  if (accumulates == nullptr) return {};
  const c10::IValue& tensors = stack[stack.size() - arguments];
  const c10::IValue& group = stack[stack.size() - arguments + 1];
  if (!tensors.isTensorList() || !group.isCustomClass()) return {};
  c10::ArrayRef<c10::IValue> list = tensors.toListRef();
  if (list.size() != 1) return {};
  const auto& holder = group.toObjectRef().getSlot(0);
  const at::Tensor& bucket = list[0].toTensor();
  return {accumulates->variable.unsafeGetTensorImpl(), holder.toCapsule().get(), bucket.numel(), bucket.device()};
}

// -- the kernel ------------------------------------------------------------------------------------------------------

// Finds the bucket, counts it, and gives what to write. Under the lock, touching no page of the map.
inline bool find(const Launch& launch, Record* record, int64_t* counter) {
  std::lock_guard<std::mutex> guard(kernel.lock);
  auto found = kernel.reducer_of.find(launch.param);
  if (found == kernel.reducer_of.end()) return false;
  Buckets* buckets = found->second;
  int task = torch::autograd::get_current_graph_task_id();
  size_t index = buckets->task == task ? static_cast<size_t>(buckets->next) : 0;
  if (index >= buckets->known.size() || !buckets->known[index]) return false;
  const Learned& known = *buckets->known[index];
  if (known.param_at != launch.param || known.group_at != launch.group || known.numel != launch.numel) return false;
  buckets->task = task;
  buckets->next = static_cast<long long>(index) + 1;
  buckets->turn = kernel.turns->next.fetch_add(1);
  *record = known.record;
  *counter = known.counter;
  record->extra = known.numbers->next.fetch_add(1);
  kernel.recent[kernel.recorded % 3] = {0, record->extra, known.label};
  record->number = kernel.recorded++;  // where `recent` wants the number that `put` will find
  return true;
}

inline bool write(Box* box, const Launch& launch) {
  if (here.box != box->id || box->step >> 32) return false;
  Record record;
  int64_t counter;
  if (!find(launch, &record, &counter)) return false;
  uint64_t at = record.number;
  uint64_t* cursor = box->words + here.track->cursor;
  record.t_ns = now_ns();
  record.thread = static_cast<uint8_t>(here.track->number);
  record.step = static_cast<uint32_t>(box->step);
  uint64_t line = cursor[CURSOR_LINE];
  if (!line && box->main_cursor) line = box->words[box->main_cursor + CURSOR_LINE];
  record.line = static_cast<uint32_t>(line);
  uint64_t number = box->put(record);
  kernel.recent[at % 3].number = number;
  if (counter >= 0) {
    box->words[counter + COUNTER_COUNT] = record.extra + 1;
    box->words[counter + COUNTER_TIME] = record.t_ns;
    box->words[counter + COUNTER_RECORD] = number;
  }
  uint64_t place =
      static_cast<uint64_t>(record.module) << MODULE_SHIFT | static_cast<uint64_t>(record.pass) << PASS_SHIFT | record.call;
  cursor[CURSOR_RECORD] = number;
  cursor[CURSOR_PLACE] = place;
  cursor[CURSOR_TIME] = record.t_ns;
  if (!launch.device.is_cpu())
    device_progress->mark(
        launch.device,
        {Point::REACHED, static_cast<int64_t>(number), counter, record.extra + 1, place, record.step, record.t_ns});
  return true;
}

// Behind the gate: whether nothing is left to do for Python. Gives what the call is, as far as that was found out.
inline bool recorded_natively(const c10::OperatorHandle& op, const torch::jit::Stack& stack, Launch* launch) {
  struct Inside {
    Inside() { kernel.inside.fetch_add(1); }
    ~Inside() { kernel.inside.fetch_sub(1); }
  } inside;
  Box* box = kernel.box.load();
  if (box == nullptr) {
    kernel.passed.fetch_add(1);
    return true;
  }
  try {
    *launch = launch_of(stack, op.schema().arguments().size());
    return launch->param != nullptr && !kernel.is_paused.load() && write(box, *launch);
  } catch (const std::exception&) {  // a tensor that has no numel, say
    return false;
  }
}

inline void allreduce(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  static const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  Launch launch;
  if (recorded_natively(op, *stack, &launch)) {
    op.redispatchBoxed(keys & below, stack);
    return;
  }
  struct Asking {  // a collective may begin inside another one's kernel
    Launch before = asked;
    ~Asking() { asked = before; }
  } asking;
  asked = launch;
  kernel.python->redispatchBoxed(keys, stack);
}

// -- what Python says ------------------------------------------------------------------------------------------------

// Nobody is in there any more with the box it had. The GIL is free meanwhile: who is inside may need it for a fault.
inline void close_gate() {
  Box* box = kernel.box.exchange(nullptr);
  if (box == nullptr) return;
  Py_BEGIN_ALLOW_THREADS;
  while (kernel.inside.load() != 0) sched_yield();
  Py_END_ALLOW_THREADS;
  Py_DECREF(box);
}

void let_go_of(Box* box) {
  if (kernel.box.load() == box) close_gate();
}

// begin(box, engine_code, turns): record reductions into this box. The ops must be there.
inline PyObject* begin(PyObject*, PyObject* args) {
  PyObject *box, *code, *turns;
  if (!PyArg_ParseTuple(args, "OOO", &box, &code, &turns)) return nullptr;
  close_gate();
  try {
    auto& dispatcher = c10::Dispatcher::singleton();
    kernel.python = dispatcher.findSchemaOrThrow("torchwhere::allreduce_", "");
    const auto& arguments = dispatcher.findSchemaOrThrow("c10d::allreduce_", "").schema().arguments();
    if (arguments.size() < 2 || arguments[0].name() != "tensors" || arguments[1].name() != "process_group")
      throw std::runtime_error("this torch's all_reduce takes other arguments");
    Py_INCREF(code);
    Py_XSETREF(kernel.engine_code, code);
    Py_INCREF(turns);
    Count* before = kernel.turns;
    kernel.turns = reinterpret_cast<Count*>(turns);
    Py_XDECREF(before);
    kernel.recorded = 0;
    kernel.is_paused = false;
    Py_INCREF(box);
    kernel.box = reinterpret_cast<Box*>(box);
    if (!kernel.registration) {  // it may have been left by a watch that ended while threads were on their way to it
      kernel.registration = dispatcher.registerImpl(
          {"c10d::allreduce_", ""},
          c10::DispatchKey::BackendSelect,
          c10::KernelFunction::makeFromBoxedFunction<&allreduce>(),
          std::nullopt,
          nullptr,
          "torchwhere");
    }
  } catch (const std::exception& error) {
    close_gate();
    return PyErr_Format(PyExc_RuntimeError, "%s", error.what());
  }
  Py_RETURN_NONE;
}

// pause(): record nothing from now on. The kernel stays: removing it takes locks of torch's.
inline PyObject* pause(PyObject*, PyObject*) {
  close_gate();
  Py_RETURN_NONE;
}

// abandon(): in a forked child, where the threads that were inside are not.
inline PyObject* abandon(PyObject*, PyObject*) {
  kernel.inside = 0;
  new (&kernel.lock) std::mutex;
  close_gate();
  Py_RETURN_NONE;
}

// end(): take the kernel off.
inline PyObject* end(PyObject*, PyObject*) {
  close_gate();
  kernel.registration.reset();
  Py_RETURN_NONE;
}

inline PyObject* defer_to_python(PyObject*, PyObject* whether) {
  kernel.is_paused = PyObject_IsTrue(whether) == 1;
  Py_RETURN_NONE;
}

// recent() -> [(record, index, label)]: the last reductions that Python has not seen.
inline PyObject* recent(PyObject*, PyObject*) {
  Recent found[3];
  uint64_t size;
  {
    std::lock_guard<std::mutex> guard(kernel.lock);
    std::copy(std::begin(kernel.recent), std::end(kernel.recent), found);
    size = kernel.recorded < 3 ? kernel.recorded : 3;
  }
  PyObject* list = PyList_New(0);
  for (uint64_t at = 0; list != nullptr && at < size; ++at) {
    PyObject* one = Py_BuildValue("KKK", found[at].number, found[at].index, found[at].label);
    if (one == nullptr || PyList_Append(list, one) < 0) Py_CLEAR(list);
    Py_XDECREF(one);
  }
  return list;
}

// passed() -> how many reductions came while nothing was recorded.
inline PyObject* passed(PyObject*, PyObject*) {
  return PyLong_FromUnsignedLongLong(kernel.passed.load());
}

// recorded() -> how many reductions were recorded by the kernel in this watch, or in the last.
inline PyObject* recorded(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> guard(kernel.lock);
  return PyLong_FromUnsignedLongLong(kernel.recorded);
}

// -- the type Buckets ------------------------------------------------------------------------------------------------

inline PyObject* buckets_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Buckets*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->task = -1;
  new (&self->known) std::vector<std::optional<Learned>>();
  return reinterpret_cast<PyObject*>(self);
}

// forget(): the buckets are others now.
inline PyObject* buckets_forget(Buckets* self, PyObject*) {
  std::vector<std::optional<Learned>> gone;
  {
    std::lock_guard<std::mutex> guard(kernel.lock);
    gone.swap(self->known);
    for (auto at = kernel.reducer_of.begin(); at != kernel.reducer_of.end();)
      at = at->second == self ? kernel.reducer_of.erase(at) : std::next(at);
  }
  for (auto& known : gone)
    if (known) Py_DECREF(known->numbers);
  Py_RETURN_NONE;
}

inline void buckets_dealloc(Buckets* self) {
  Py_XDECREF(buckets_forget(self, nullptr));
  self->known.~vector();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// learn(index, label, numbers, counter, kind, pass, flags, module, call, subject, beneficiary, param): what Python has found out about the
// launch it is being asked about. counter: -1 for none.
inline PyObject* buckets_learn(Buckets* self, PyObject* args) {
  unsigned long long index, label;
  long long counter;
  unsigned int kind, pass, flags, module, call, subject, beneficiary, param;
  PyObject* numbers;
  if (!PyArg_ParseTuple(
          args, "KKOLIIIIIIII", &index, &label, &numbers, &counter, &kind, &pass, &flags, &module, &call, &subject, &beneficiary, &param))
    return nullptr;
  if (asked.param == nullptr || index > 1u << 20) Py_RETURN_NONE;
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
  std::optional<Learned> gone{Learned{
      c10::weak_intrusive_ptr<c10::intrusive_ptr_target>(
          c10::intrusive_ptr<c10::intrusive_ptr_target>::reclaim_copy(asked.group)),
      asked.param,
      asked.group,
      asked.numel,
      record,
      counter,
      reinterpret_cast<Count*>(numbers),
      label}};
  {
    std::lock_guard<std::mutex> guard(kernel.lock);
    if (self->known.size() <= index) self->known.resize(index + 1);
    gone.swap(self->known[index]);
    kernel.reducer_of[asked.param] = self;
  }
  if (gone) Py_DECREF(gone->numbers);
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
inline PyType_Spec buckets_spec = {"torchwhere_native.Buckets", sizeof(Buckets), 0, Py_TPFLAGS_DEFAULT, buckets_slots};

}  // namespace torchwhere
