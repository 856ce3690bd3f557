// The kernel of all collectives: it is on the `BackendSelect` key of each op of `c10d::` that takes a
// process group.
//
// It records buckets of DDP (`reductions.h`) and calls that Python has recorded before
// (`known_calls.h`). Every other call goes to an op of ours with the same schema, for example
// torchwhere::allreduce_, which has a kernel in Python.
#pragma once

#include "known_calls.h"

namespace torchwhere {

inline const c10::DispatchKeySet& below_kernel() {
  static const c10::DispatchKeySet below(
      c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  return below;
}

// Passes a call on to Python. A collective may begin inside the kernel of another one.
inline void call_python(
    const CollectiveOp& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack,
    const Launch& launch,
    const CallInPython& call) {
  struct Restore {
    Launch launch = launch_in_python;
    CallInPython call = call_in_python;
    DueMark due = std::exchange(due_mark, {});  // of a collective around this one
    ~Restore() {
      launch_in_python = launch, call_in_python = call;
      due_mark = std::move(due);  // also after an exception
    }
  } restore;
  launch_in_python = launch;
  call_in_python = call;
  op.python.redispatchBoxed(keys, stack);
}

inline void collective(
    const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (kernel.box.load() == nullptr) {
    kernel.passed.fetch_add(1);
    handle.redispatchBoxed(keys & below_kernel(), stack);
    return;
  }
  const CollectiveOp& op = kernel.ops.at(handle);
  Launch launch;
  LaunchMark due;
  if (op.is_all_reduce && record_bucket(op.arguments, *stack, &launch, &due)) {
    if (due.is_due) mark_launch(launch.device.index(), due);
    handle.redispatchBoxed(keys & below_kernel(), stack);
    return;
  }
  CallKey key;
  RecordedCall recorded;
  CallInPython call;
  bool may_be_known = launch.param == nullptr && !kernel.defers_to_python.load();
  if (may_be_known && add_arguments(key, op, *stack)) {
    if (record_known(&key, &recorded, &call.is_known)) {
      launch_known(op, handle, keys & below_kernel(), stack, recorded);
      return;
    }
    call.arguments = &key;
  }
  call_python(op, keys, stack, launch, call);
}

// -- functions for Python -------------------------------------------------------------------------

// Stops recording, and waits until no thread uses the box. Releases the GIL meanwhile: a thread
// inside may need it to handle a fault.
inline void close_gate() {
  Box* box = kernel.box.exchange(nullptr);
  async_calls->clear();
  stream_calls->clear();
  known_calls.forget();
  frame_roles.end();
  if (box == nullptr) return;
  Py_BEGIN_ALLOW_THREADS;
  while (kernel.inside.load() != 0) sched_yield();
  Py_END_ALLOW_THREADS;
  Py_DECREF(box);
}

void release_box(Box* box) {
  if (kernel.box.load() == box) close_gate();
}

inline std::vector<int> ints_in(PyObject* tuple) {
  std::vector<int> ints;
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(tuple); ++at)
    ints.push_back(static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(tuple, at))));
  return ints;
}

// Finds the ops, once. `ops` is a list of (name, position of the group, position of the reduce op or
// -1, positions of tensors).
inline bool find_ops(PyObject* ops) {
  auto& dispatcher = c10::Dispatcher::singleton();
  decltype(kernel.ops) found;
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(ops); ++at) {
    const char* name;
    int group_at, reduce_op_at;
    PyObject* tensors_at;
    if (!PyArg_ParseTuple(
            PyList_GET_ITEM(ops, at), "siiO!", &name, &group_at, &reduce_op_at, &PyTuple_Type,
            &tensors_at))
      return false;
    std::string raw(name);
    c10::OperatorHandle handle = dispatcher.findSchemaOrThrow(("c10d::" + raw).c_str(), "");
    c10::OperatorHandle python = dispatcher.findSchemaOrThrow(("torchwhere::" + raw).c_str(), "");
    bool is_all_reduce = raw == "allreduce_";
    const auto& arguments = handle.schema().arguments();
    if (is_all_reduce && (group_at != 1 || arguments[0].name() != "tensors"))
      throw std::runtime_error("c10d::allreduce_ has unknown arguments in this torch");
    found.emplace(
        handle,
        CollectiveOp{
            python, arguments.size(), group_at, reduce_op_at, ints_in(tensors_at), is_all_reduce});
  }
  if (PyErr_Occurred()) return false;
  kernel.ops.swap(found);
  return true;
}

inline void register_kernel(const c10::OperatorName& op, c10::KernelFunction function) {
  kernel.registrations.push_back(c10::Dispatcher::singleton().registerImpl(
      op, c10::DispatchKey::BackendSelect, std::move(function), std::nullopt, nullptr,
      "torchwhere"));
}

inline void end_kernels() {
  kernel.registrations.clear();
  kernel.marks_waits = false;
}

// begin(box, engine_code, turns, ops, role_of): records collectives into this box. The ops must
// exist. `role_of` is `python_stack.frame_role`.
inline PyObject* begin(PyObject*, PyObject* args) {
  PyObject *box, *code, *turns, *ops, *role_of;
  if (!PyArg_ParseTuple(args, "OOOO!O", &box, &code, &turns, &PyList_Type, &ops, &role_of))
    return nullptr;
  close_gate();
  // A watch that ended while other threads called the kernels has left them registered.
  bool is_first = kernel.registrations.empty();
  try {
    if (kernel.ops.empty() && !find_ops(ops)) return nullptr;
    Py_INCREF(code);
    Py_XSETREF(kernel.engine_code, code);
    Py_INCREF(turns);
    Count* before = kernel.turns;
    kernel.turns = reinterpret_cast<Count*>(turns);
    Py_XDECREF(before);
    kernel.recorded = 0;
    kernel.defers_to_python = false;
    frame_roles.begin(role_of);
    Py_INCREF(box);
    kernel.box = reinterpret_cast<Box*>(box);
    if (is_first)
      for (const auto& [handle, op] : kernel.ops)
        register_kernel(
            handle.operator_name(), c10::KernelFunction::makeFromBoxedFunction<&collective>());
    c10::OperatorName wait_op("_c10d_functional::wait_tensor", "");
    if (device_progress->is_on && !kernel.marks_waits &&
        c10::Dispatcher::singleton().findSchema(wait_op)) {
      register_kernel(wait_op, c10::KernelFunction::makeFromBoxedFunction<&wait_tensor>());
      kernel.marks_waits = true;
    }
  } catch (const std::exception& error) {
    close_gate();
    if (is_first) end_kernels();
    return PyErr_Format(PyExc_RuntimeError, "%s", error.what());
  }
  Py_RETURN_NONE;
}

// pause(): records nothing from now on. The kernel stays: to remove it needs locks of torch.
inline PyObject* pause(PyObject*, PyObject*) {
  close_gate();
  Py_RETURN_NONE;
}

// abandon(): stops in a forked child, where the threads that were inside do not exist.
inline PyObject* abandon(PyObject*, PyObject*) {
  kernel.inside = 0;
  new (&kernel.lock) std::mutex;
  async_calls = new AsyncCalls;
  stream_calls = new StreamCalls;
  close_gate();
  Py_RETURN_NONE;
}

// end(): removes the kernels.
inline PyObject* end(PyObject*, PyObject*) {
  close_gate();
  end_kernels();
  Py_RETURN_NONE;
}

// defer_to_python(whether): sends every collective to Python, or not.
inline PyObject* defer_to_python(PyObject*, PyObject* whether) {
  kernel.defers_to_python = PyObject_IsTrue(whether) == 1;
  Py_RETURN_NONE;
}

// recent() -> [(record, index, label)]: the last collectives that the kernel recorded.
inline PyObject* recent(PyObject*, PyObject*) {
  Recent entries[3];
  uint64_t size;
  {
    std::lock_guard<std::mutex> guard(kernel.lock);
    std::copy(std::begin(kernel.recent), std::end(kernel.recent), entries);
    size = kernel.recorded < 3 ? kernel.recorded : 3;
  }
  PyObject* list = PyList_New(0);
  for (uint64_t at = 0; list != nullptr && at < size; ++at) {
    const Recent& entry = entries[at];
    PyObject* tuple = Py_BuildValue("KKK", entry.number, entry.index, entry.label);
    if (tuple == nullptr || PyList_Append(list, tuple) < 0) Py_CLEAR(list);
    Py_XDECREF(tuple);
  }
  return list;
}

// passed() -> the number of collectives while nothing was recorded.
inline PyObject* passed(PyObject*, PyObject*) {
  return PyLong_FromUnsignedLongLong(kernel.passed.load());
}

// recorded() -> the number of collectives that the kernel recorded in this watch, or in the last
// one.
inline PyObject* recorded(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> guard(kernel.lock);
  return PyLong_FromUnsignedLongLong(kernel.recorded);
}

}  // namespace torchwhere
