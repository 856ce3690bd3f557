// Records DDP's all-reduces without Python, if Python has recorded the bucket before.
//
// When Python recognizes a bucket, it passes everything that repeats to `Buckets.learn`; the kernel
// (`collective_kernel.h`) has stored, for this thread, what identifies the call. The next call of
// that bucket needs no Python object and no GIL.
#pragma once

#include <sched.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include "buckets.h"
#include "device_waits.h"

namespace torchwhere {

// -- the caller -----------------------------------------------------------------------------------

// Returns the code of the Python frame that this thread runs, or null. Needs no GIL: only this
// thread changes it. CPython has no function for this that works without the GIL. `check_frames`
// checks that Python has this layout.
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

// check_frames(code): whether `code` is the code that runs.
inline PyObject* check_frames(PyObject*, PyObject* code) {
  return PyBool_FromLong(running_code() == code);
}

// Returns the launch if DDP's reducer calls: from the engine, with no Python in between, from the
// hook of a parameter. Same conditions as in `_is_from_engine` and `Reducers.bucket`.
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
  return {
      accumulates->variable.unsafeGetTensorImpl(),
      holder.toCapsule().get(),
      bucket.numel(),
      bucket.device()};
}

// -- the kernel -----------------------------------------------------------------------------------

// The mark to set on the device before a launch.
struct LaunchMark {
  bool is_due = false;
  uint64_t t_ns = 0, box = 0;
  Mark mark{};
};

// Counts a thread that may use the box.
struct Inside {
  Inside() { kernel.inside.fetch_add(1); }
  ~Inside() { kernel.inside.fetch_sub(1); }
};

// Finds and counts the bucket, and returns what to write. Holds the lock, and touches no page of
// the map.
inline bool find(const Launch& launch, Record* record, int64_t* counter) {
  std::lock_guard<std::mutex> guard(kernel.lock);
  auto reducer = kernel.reducer_of.find(launch.param);
  if (reducer == kernel.reducer_of.end()) return false;
  Buckets* buckets = reducer->second;
  int task = torch::autograd::get_current_graph_task_id();
  size_t index = buckets->task == task ? static_cast<size_t>(buckets->next) : 0;
  if (index >= buckets->learned.size() || !buckets->learned[index]) return false;
  const LearnedBucket& bucket = *buckets->learned[index];
  if (bucket.param_at != launch.param || bucket.group_at != launch.group ||
      bucket.numel != launch.numel)
    return false;
  buckets->task = task;
  buckets->next = static_cast<long long>(index) + 1;
  buckets->turn = kernel.turns->next.fetch_add(1);
  *record = bucket.record;
  *counter = bucket.counter;
  record->extra = bucket.numbers->next.fetch_add(1);
  kernel.recent[kernel.recorded % 3] = {0, record->extra, bucket.label};
  record->number = kernel.recorded++;  // tells `write` which entry of `recent` to complete
  return true;
}

// Writes the record of a collective, counts the collective in its stream and moves the cursor of the
// thread. Returns the mark that shows when the device reaches it.
inline Mark put_collective(
    Box* box, const ThreadTrack* track, Record* record, int64_t counter) {
  uint64_t* cursor = box->words + track->cursor;
  record->t_ns = now_ns();
  record->thread = static_cast<uint8_t>(track->number);
  record->step = static_cast<uint32_t>(box->step);
  bool is_backward = record->pass == BACKWARD_PASS;
  if (is_backward && !record->line) {  // a thread of the engine has no line
    uint64_t line = cursor[CURSOR_LINE];
    if (!line && box->main_cursor) line = box->words[box->main_cursor + CURSOR_LINE];
    record->line = static_cast<uint32_t>(line);
  }
  uint64_t number = box->put(*record);
  if (counter >= 0) {
    box->words[counter + COUNTER_COUNT] = record->extra + 1;
    box->words[counter + COUNTER_TIME] = record->t_ns;
    box->words[counter + COUNTER_RECORD] = number;
  }
  uint64_t place = static_cast<uint64_t>(record->module) << MODULE_SHIFT |
      static_cast<uint64_t>(record->pass) << PASS_SHIFT | record->call;
  cursor[CURSOR_RECORD] = number;
  if (is_backward) {  // nothing else writes the place there
    cursor[CURSOR_PLACE] = place;
    cursor[CURSOR_TIME] = record->t_ns;
  }
  MarkedCall call{static_cast<int64_t>(number), counter, record->extra + 1};
  return {Point::REACHED, call, place, record->step};
}

// Records the bucket, and sets the mark of its launch on the device.
inline bool write(Box* box, const Launch& launch, LaunchMark* due) {
  if (current.box != box->id || box->step >> 32) return false;
  Record record;
  int64_t counter;
  if (!find(launch, &record, &counter)) return false;
  uint64_t at = record.number;
  Mark mark = put_collective(box, current.track, &record, counter);
  kernel.recent[at % 3].number = record.number;
  if (!launch.device.is_cpu()) *due = {true, record.t_ns, box->id, mark};
  return true;
}

// Returns true if Python has nothing left to do. Sets `launch` as far as it is known.
inline bool record_bucket(
    size_t arguments, const torch::jit::Stack& stack, Launch* launch, LaunchMark* due) {
  Inside inside;
  Box* box = kernel.box.load();
  if (box == nullptr) return true;
  try {
    *launch = launch_of(stack, arguments);
    return launch->param != nullptr && !kernel.defers_to_python.load() && write(box, *launch, due);
  } catch (const std::exception&) {  // for example, a tensor without numel
    return false;
  }
}

// -- the wait of DDP ------------------------------------------------------------------------------
// DDP waits for its buckets in a callback at the end of the backward. Callbacks run in the order in
// which they were queued, also those that a callback queues: ours before the one of DDP, and ours
// after it, mark the wait. If the backward fails, they do not run.

// The buckets that one backward has launched on a device.
struct BucketWait {
  int task;
  uint64_t box;
  c10::DeviceIndex index;
  Mark mark;  // of the last bucket
  std::vector<MarkedCall> calls;
};
inline std::shared_ptr<BucketWait>& bucket_wait = *new std::shared_ptr<BucketWait>;

inline void set_mark(const BucketWait& wait, const Mark& mark) noexcept {
  {
    Inside inside;
    Box* box = kernel.box.load();
    if (box == nullptr || box->id != wait.box) return;  // the watch has ended
  }
  device_progress->mark(wait.index, now_ns(), mark);
}

// Takes the pointer by value: the callback that holds it may move while it runs.
inline void mark_wait(std::shared_ptr<BucketWait> wait) noexcept {
  try {
    {
      std::lock_guard<std::mutex> guard(kernel.lock);
      if (bucket_wait == wait) bucket_wait = nullptr;
    }
    Mark mark = wait->mark;
    wait->calls.pop_back();
    mark.others = std::make_shared<const std::vector<MarkedCall>>(std::move(wait->calls));
    mark.point = Point::WAITED;
    set_mark(*wait, mark);
    mark.point = Point::DONE;
    torch::autograd::Engine::get_default_engine().queue_callback(
        [wait, mark] { set_mark(*wait, mark); });
  } catch (const std::exception&) {  // no memory
  }
}

// Marks the launch of a bucket, outside the gate of the box: the mark waits if the stream is full.
inline void mark_launch(c10::DeviceIndex index, const LaunchMark& due) noexcept {
  if (!device_progress->is_on) return;
  device_progress->mark(index, due.t_ns, due.mark);
  try {
    int task = torch::autograd::get_current_graph_task_id();
    std::shared_ptr<BucketWait> wait;
    {
      std::lock_guard<std::mutex> guard(kernel.lock);
      wait = bucket_wait;
      bool is_new = wait == nullptr || wait->task != task || wait->box != due.box ||
          wait->index != index;
      if (is_new) bucket_wait = std::make_shared<BucketWait>(BucketWait{task, due.box, index});
      bucket_wait->mark = due.mark;
      bucket_wait->calls.push_back(due.mark.call);
      wait = is_new ? bucket_wait : nullptr;
    }
    if (wait != nullptr)
      torch::autograd::Engine::get_default_engine().queue_callback([wait] { mark_wait(wait); });
  } catch (const std::exception&) {  // no memory
  }
}

}  // namespace torchwhere
