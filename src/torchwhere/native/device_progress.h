// Records the progress of an accelerator with events on its streams. A thread that never holds the
// GIL reads the events.
//
// A mark is an event on the current stream, recorded just before a collective (or at a step, or at
// a module) is issued. When the event completes, the device has reached that point. The training
// thread only records events. Another thread, the harvester, polls whether events have completed,
// computes when, and writes the times into the box. Nothing here waits for the device.
//
// This code uses c10's interface for any device, so it needs no headers of CUDA. It looks up two
// functions of the runtime by name. One tells whether a stream is being captured into a graph. The
// other keeps a query in this thread from breaking a capture in another thread.
#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "box.h"

namespace torchwhere {

constexpr size_t MOST_LANES = 7, MOST_PENDING = 4096;  // events in use, in all lanes together
constexpr size_t POLL_SLOT = MOST_LANES;  // the last slot has the time of the last poll
constexpr int LANE_WORDS = 8;
constexpr int LANE_PLACE = 0, LANE_TIME = 1, LANE_STEP = 2, LANE_ID = 3, LANE_RECORD = 4,
              LANE_PENDING = 5, LANE_NEXT_PLACE = 6, LANE_NEXT_RECORD = 7;
constexpr int PROGRESS_REACHED = 0, PROGRESS_REACHED_TIME = 1, PROGRESS_DONE = 2,
              PROGRESS_DONE_TIME = 3, PROGRESS_WORDS = 4;
constexpr int TIMES_NUMBER = 0, TIMES_REACHED = 1, TIMES_DONE = 2, TIMES_WORDS = 3;
constexpr auto HARVEST_EVERY = std::chrono::milliseconds(20);
constexpr auto STOP_WITHIN = std::chrono::seconds(1);
// Elapsed times are 32-bit floats of ms: over 10 s they are exact to 1 us.
constexpr double REBASE_MS = 10'000;

enum class Point : int { REACHED = 0, DONE = 1, PLACE = 2 };

// -- the runtime ----------------------------------------------------------------------------------

// Functions of CUDA or HIP; null if the process has not loaded them.
struct Runtime {
  int (*is_capturing)(void* stream, int* status) = nullptr;
  int (*exchange_capture_mode)(int* mode) = nullptr;

  explicit Runtime(c10::DeviceType type) {
    if (type != c10::DeviceType::CUDA && type != c10::DeviceType::HIP) return;
    for (const char* prefix : {"cuda", "hip"}) {
      std::string name(prefix);
      is_capturing = find<decltype(is_capturing)>(name + "StreamIsCapturing");
      exchange_capture_mode =
          find<decltype(exchange_capture_mode)>(name + "ThreadExchangeStreamCaptureMode");
      if (is_capturing != nullptr && exchange_capture_mode != nullptr) return;
    }
  }

 private:
  template <typename Function>
  static Function find(const std::string& name) {
    return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name.c_str()));
  }
};

template <typename Guard>
auto generic_is_capturing(const Guard& guard, const c10::Stream& stream, int)
    -> decltype(guard.isStreamCapturing(stream)) {
  return guard.isStreamCapturing(stream);
}
template <typename Guard>
bool generic_is_capturing(
    const Guard&,
    const c10::Stream&,
    long) {  // a torch without this function, or a device without graphs
  return false;
}

// -- marks ----------------------------------------------------------------------------------------

// The point that a mark represents. `record` and `counter` are negative if there is none.
struct MarkOf {
  Point point;
  int64_t record;   // number of the record of a collective
  int64_t counter;  // index of the words of its stream's counter
  uint64_t count;   // its number in the stream, plus 1
  uint64_t place, step, issued_ns;
};

struct Mark {
  c10::Event event;
  MarkOf of;
  explicit Mark(c10::DeviceType type) : event(type, c10::EventFlag::BACKEND_DEFAULT), of() {}
};

// The marks of one stream. They complete in the order in which they were recorded.
struct Lane {
  c10::Device device;
  c10::StreamId stream;
  size_t index;
  std::deque<std::unique_ptr<Mark>> pending;
};

// Maps times of the device to the clock of the host. The device reaches a point after the point was
// issued and before a poll finds it complete: both bounds correct the estimate. If a stream is idle
// at least once, the first bound is exact up to the cost of a launch.
struct DeviceClock {
  c10::Device device;
  std::unique_ptr<Mark> base;
  int64_t base_ns = 0;

  // Returns when a mark was reached. If the base is too old, the mark becomes the new base, and
  // `mark` then has the old base, which is free for reuse.
  uint64_t place(std::unique_ptr<Mark>& mark, uint64_t seen_ns) {
    auto issued = static_cast<int64_t>(mark->of.issued_ns);
    if (base == nullptr) {
      base = std::move(mark);
      base_ns = issued;
      return static_cast<uint64_t>(issued);
    }
    double ms = base->event.elapsedTime(mark->event);
    auto after = static_cast<int64_t>(ms * 1e6);
    base_ns = std::min(std::max(base_ns, issued - after), static_cast<int64_t>(seen_ns) - after);
    int64_t reached_ns = base_ns + after;
    if (ms > REBASE_MS) {
      std::swap(base, mark);
      base_ns = reached_ns;
    }
    return static_cast<uint64_t>(std::max<int64_t>(reached_ns, 0));
  }
};

// -- the device sections of a box -----------------------------------------------------------------

// The device sections of a box. All positions are indexes of words.
struct DeviceSections {
  Box* box = nullptr;
  uint64_t lanes = 0, times = 0;
  int64_t progress_shift = 0;  // from the counter of a stream to its progress

  void reached(const Lane& lane, const MarkOf& mark, uint64_t t_ns) {
    uint64_t* words = box->words + lanes + lane.index * LANE_WORDS;
    words[LANE_PLACE] = mark.place;
    words[LANE_STEP] = mark.step;
    if (mark.record >= 0) words[LANE_RECORD] = static_cast<uint64_t>(mark.record) + 1;
    words[LANE_TIME] = t_ns;
    if (mark.record < 0) return;
    bool is_done = mark.point == Point::DONE;
    auto record = static_cast<uint64_t>(mark.record);
    uint64_t* times_of = box->words + times + record % box->capacity * TIMES_WORDS;
    if (times_of[TIMES_NUMBER] != record + 1) {
      times_of[TIMES_NUMBER] = 0;
      times_of[TIMES_REACHED] = times_of[TIMES_DONE] = 0;
    }
    times_of[is_done ? TIMES_DONE : TIMES_REACHED] = t_ns;
    times_of[TIMES_NUMBER] = record + 1;
    if (mark.counter < 0) return;
    uint64_t* progress = box->words + mark.counter + progress_shift;
    uint64_t& count = progress[is_done ? PROGRESS_DONE : PROGRESS_REACHED];
    if (mark.count <= count)
      return;  // a group may use several streams, as FSDP does
    progress[is_done ? PROGRESS_DONE_TIME : PROGRESS_REACHED_TIME] = t_ns;
    count = mark.count;
  }

  void looked(uint64_t t_ns) { box->words[lanes + POLL_SLOT * LANE_WORDS] = t_ns; }

  void waits_at(const Lane& lane, size_t pending, const MarkOf* next) {
    uint64_t* words = box->words + lanes + lane.index * LANE_WORDS;
    words[LANE_NEXT_PLACE] = next == nullptr ? 0 : next->place;
    words[LANE_NEXT_RECORD] =
        next == nullptr || next->record < 0 ? 0 : static_cast<uint64_t>(next->record) + 1;
    words[LANE_PENDING] = pending;
  }
};

// -- all marks of the process ---------------------------------------------------------------------

// The marks of this process and the thread that reads them. Never freed: threads may still use it
// when the process exits.
struct DeviceProgress {
  std::mutex
      lock;  // guards all fields below; never held while the device is polled or the box is written
  std::condition_variable changed;
  std::vector<std::unique_ptr<Lane>> lanes;
  std::vector<std::unique_ptr<Mark>> pool;
  size_t events = 0;  // number of events that exist
  DeviceSections sections;
  std::vector<DeviceClock> clocks;  // only the harvester uses them
  std::atomic<bool> is_on{false};
  bool is_running = false, has_ended = true;
  uint64_t marked = 0, harvested = 0, skipped = 0, captured = 0;
  std::string problem;  // why marking is off for good: after an error of the device, nothing polls
                        // it again

  void fail(const std::string& why) {
    std::lock_guard<std::mutex> guard(lock);
    if (problem.empty()) problem = why.substr(0, why.find('\n'));
    is_on = false;
  }

  Lane* lane_of(const c10::Stream& stream) {
    for (auto& lane : lanes)
      if (lane->device == stream.device() && lane->stream == stream.id()) return lane.get();
    if (lanes.size() == MOST_LANES) return nullptr;
    lanes.push_back(std::make_unique<Lane>(Lane{stream.device(), stream.id(), lanes.size(), {}}));
    uint64_t* words = sections.box->words + sections.lanes + lanes.back()->index * LANE_WORDS;
    words[LANE_ID] = (static_cast<uint64_t>(stream.device_index()) + 1) |
                     static_cast<uint64_t>(stream.id()) << 8;
    return lanes.back().get();
  }

  std::unique_ptr<Mark> free_mark(const c10::Device& device) {
    for (size_t at = pool.size(); at-- > 0;) {
      if (pool[at]->event.device_index() != device.index() &&
          pool[at]->event.was_marked_for_recording())
        continue;
      std::swap(pool[at], pool.back());
      std::unique_ptr<Mark> mark = std::move(pool.back());
      pool.pop_back();
      return mark;
    }
    if (events == MOST_PENDING) return nullptr;
    ++events;
    return std::make_unique<Mark>(device.type());
  }

  // Records a mark on the current stream of a device. Called by training threads; never throws.
  void mark(const c10::Device& device, const MarkOf& of) noexcept {
    if (!is_on.load(std::memory_order_relaxed)) return;
    try {
      c10::impl::VirtualGuardImpl guard(device.type());
      c10::Stream stream = guard.getStream(device);
      static const Runtime runtime(device.type());
      if (is_capturing(guard, runtime, stream)) {
        std::lock_guard<std::mutex> locked(lock);
        ++captured;
        return;
      }
      std::lock_guard<std::mutex> locked(lock);
      if (!is_on || sections.box == nullptr) return;
      Lane* lane = lane_of(stream);
      std::unique_ptr<Mark> mark = lane == nullptr ? nullptr : free_mark(stream.device());
      if (mark == nullptr) {
        ++skipped;
        return;
      }
      mark->of = of;
      mark->event.record(stream);  // enqueues and returns
      lane->pending.push_back(std::move(mark));
      ++marked;
    } catch (const std::exception& error) {
      fail(error.what());
    }
  }

  static bool is_capturing(
      const c10::impl::VirtualGuardImpl& guard, const Runtime& runtime, const c10::Stream& stream) {
    if (runtime.is_capturing == nullptr) return generic_is_capturing(guard, stream, 0);
    int status = 0;
    return runtime.is_capturing(stream.native_handle(), &status) != 0 || status != 0;
  }

  DeviceClock& clock_of(const c10::Device& device) {
    for (auto& clock : clocks)
      if (clock.device == device) return clock;
    clocks.push_back(DeviceClock{device, nullptr});
    return clocks.back();
  }

  // Reads the completed marks of one lane. Only the harvester removes marks, so the front stays
  // valid without the lock.
  void harvest(Lane& lane) {
    c10::impl::VirtualGuardImpl(lane.device.type()).uncheckedSetDevice(lane.device);
    while (is_on) {
      Mark* front;
      {
        std::lock_guard<std::mutex> guard(lock);
        front = lane.pending.empty() ? nullptr : lane.pending.front().get();
        if (front == nullptr || sections.box == nullptr) break;
      }
      if (!front->event.query() || !is_on)
        break;  // the watch may have ended during the query
      uint64_t seen_ns = now_ns();
      std::unique_ptr<Mark> mark;
      {
        std::lock_guard<std::mutex> guard(lock);
        mark = std::move(lane.pending.front());
        lane.pending.pop_front();
        ++harvested;
      }
      MarkOf of = mark->of;
      sections.reached(lane, of, clock_of(lane.device).place(mark, seen_ns));
      std::lock_guard<std::mutex> guard(lock);
      if (mark != nullptr) pool.push_back(std::move(mark));
    }
    size_t pending;
    MarkOf next{};
    {
      std::lock_guard<std::mutex> guard(lock);
      if (!is_on) return;
      pending = lane.pending.size();
      if (pending != 0) next = lane.pending.front()->of;
    }
    sections.waits_at(lane, pending, pending == 0 ? nullptr : &next);
  }

  void harvest_all() {
    for (size_t at = 0;; ++at) {
      Lane* lane;
      {
        std::lock_guard<std::mutex> guard(lock);
        if (sections.box == nullptr || !is_on) return;
        if (at >= lanes.size()) break;
        lane = lanes[at].get();
      }
      harvest(*lane);
    }
    if (is_on) sections.looked(now_ns());
  }

  void run() {
    try {
      bool is_relaxed = false;
      while (true) {
        {
          std::unique_lock<std::mutex> guard(lock);
          changed.wait_for(guard, HARVEST_EVERY, [this] { return !is_running; });
          if (!is_running) break;
          if (lanes.empty() || !is_on) continue;
        }
        if (!is_relaxed) {  // a query in this thread must not break a capture in another thread
          Runtime runtime(lanes.front()->device.type());
          int mode = 2;  // relaxed
          if (runtime.exchange_capture_mode != nullptr) runtime.exchange_capture_mode(&mode);
          is_relaxed = true;
        }
        harvest_all();
      }
    } catch (const std::exception& error) {
      fail(error.what());
    }
    std::lock_guard<std::mutex> guard(lock);
    has_ended = true;
    changed.notify_all();
  }
};
inline DeviceProgress* device_progress = new DeviceProgress;

// -- functions for Python -------------------------------------------------------------------------

// device_begin(box, lanes_at, times_at, progress_shift): starts to record marks and to write their
// times into this box. The offsets are indexes of words.
inline PyObject* device_begin(PyObject*, PyObject* args) {
  PyObject* box;
  unsigned long long lanes, times;
  long long progress_shift;
  if (!PyArg_ParseTuple(args, "OKKL", &box, &lanes, &times, &progress_shift)) return nullptr;
  DeviceProgress& self = *device_progress;
  {
    std::lock_guard<std::mutex> guard(self.lock);
    if (!self.has_ended || !self.problem.empty()) Py_RETURN_FALSE;
    Py_INCREF(box);
    self.sections = {reinterpret_cast<Box*>(box), lanes, times, progress_shift};
    self.lanes.clear();
    self.clocks.clear();
    self.events = self.pool.size();
    self.marked = self.harvested = self.skipped = self.captured = 0;
    self.is_running = true;
    self.has_ended = false;
    self.is_on = true;
  }
  sigset_t all, before;  // signals of the job are for its own threads
  sigfillset(&all);
  for (int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread([&self] { self.run(); }).detach();
  } catch (const std::exception& error) {
    self.fail(error.what());
    self.has_ended = true;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return PyBool_FromLong(self.is_on);
}

// device_end(): no event is recorded or polled after this. If the harvester is blocked in the
// driver, it keeps its box.
inline PyObject* device_end(PyObject*, PyObject*) {
  DeviceProgress& self = *device_progress;
  Box* box = nullptr;
  Py_BEGIN_ALLOW_THREADS;
  {
    std::unique_lock<std::mutex> guard(self.lock);
    self.is_on = self.is_running = false;
    self.changed.notify_all();
    if (self.changed.wait_for(guard, STOP_WITHIN, [&self] { return self.has_ended; })) {
      std::swap(box, self.sections.box);
      for (auto& lane : self.lanes)
        for (auto& mark : lane->pending)
          self.pool.push_back(std::move(mark));  // an event may be recorded again at any time
      self.lanes.clear();
    }
  }
  Py_END_ALLOW_THREADS;
  Py_XDECREF(box);
  Py_RETURN_NONE;
}

// device_abandon(): stops marking in a forked child, which must not touch the device. Leaves the
// events and the lock of the parent as they are.
inline PyObject* device_abandon(PyObject*, PyObject*) {
  auto* fresh = new DeviceProgress;
  fresh->problem = "a forked process";
  device_progress = fresh;
  Py_RETURN_NONE;
}

// device_mark(type, index, point, record, counter, count, place, step, issued_ns)
inline PyObject* device_mark(PyObject*, PyObject* args) {
  int type, index, point;
  long long record, counter;
  unsigned long long count, place, step, issued_ns;
  if (!PyArg_ParseTuple(
          args,
          "iiiLLKKKK",
          &type,
          &index,
          &point,
          &record,
          &counter,
          &count,
          &place,
          &step,
          &issued_ns))
    return nullptr;
  c10::Device device(static_cast<c10::DeviceType>(type), static_cast<c10::DeviceIndex>(index));
  device_progress->mark(
      device, {static_cast<Point>(point), record, counter, count, place, step, issued_ns});
  Py_RETURN_NONE;
}

// device_type(name) -> the number of a type of device (c10::DeviceType)
inline PyObject* device_type(PyObject*, PyObject* name) {
  const char* text = PyUnicode_AsUTF8(name);
  if (text == nullptr) return nullptr;
  try {
    return PyLong_FromLong(static_cast<long>(c10::Device(std::string(text)).type()));
  } catch (const std::exception& error) {
    return PyErr_Format(PyExc_ValueError, "%s", error.what());
  }
}

// device_status() -> {marked, harvested, skipped, captured, problem}
inline PyObject* device_status(PyObject*, PyObject*) {
  DeviceProgress& self = *device_progress;
  std::lock_guard<std::mutex> guard(self.lock);
  return Py_BuildValue(
      "{sKsKsKsKss}",
      "marked",
      self.marked,
      "harvested",
      self.harvested,
      "skipped",
      self.skipped,
      "captured",
      self.captured,
      "problem",
      self.problem.c_str());
}

}  // namespace torchwhere
