// Events on the streams of an accelerator, and the thread that reads them without the GIL.
//
// A training thread records an event on its current stream and attaches data to it. When the event
// completes, the device has executed everything that the stream had before it. Another thread, the
// harvester, polls the events, computes when each completed, and passes the data to a reader.
//
// The device writes the time of an event when it executes it, which has a cost: an event with a time
// behind a wait for another stream holds up other streams of the process (docs/overhead.md). An
// event without a time does not. It completed at the latest at the next event of its stream that has
// a time, or when the harvester found it complete.
//
// The number of events is bounded, and events are reused. Nothing here waits for the device, except
// that a stream takes a limited number of tasks: recording an event on a full stream waits, as any
// other work on it does. The thread then holds neither the lock nor the GIL.
//
// This code uses c10's interface for any device, so it needs no headers of CUDA.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/Event.h>

#include "box.h"
#include "device_runtime.h"

namespace torchwhere {

constexpr size_t MOST_LANES = 31, MOST_PENDING = 4096;  // events in use, in all lanes together
constexpr auto HARVEST_EVERY = std::chrono::milliseconds(20);
constexpr auto STOP_WITHIN = std::chrono::seconds(1);
// Elapsed times are 32-bit floats of ms: over 10 s they are exact to 1 us.
constexpr double REBASE_MS = 10'000;

// -- events ---------------------------------------------------------------------------------------

template <typename Data>
struct PendingEvent {
  c10::Event event;
  uint64_t issued_ns = 0;
  Data data{};
  PendingEvent(c10::DeviceType type, bool has_time)
      : event(type, has_time ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT) {}

  bool has_time() const { return event.flag() == c10::EventFlag::BACKEND_DEFAULT; }
};

// The events of one stream. They complete in the order in which they were recorded.
template <typename Data>
struct Lane {
  c10::Device device;
  c10::StreamId stream;
  size_t index;
  std::deque<std::unique_ptr<PendingEvent<Data>>> pending;
  uint64_t incomplete_ns = 0;  // when its first event was last found not to be complete
};

// Maps times of the device to the clock of the host. The device reaches an event after the event
// was issued, after the last poll that did not find it complete, and before the one that does: these
// bounds correct the estimate. If a stream is idle at least once, the first is exact up to the cost
// of a launch. If it never is, the second is exact up to the time between two polls.
template <typename Data>
struct DeviceClock {
  c10::Device device;
  std::unique_ptr<PendingEvent<Data>> base;
  int64_t base_ns = 0;

  // Returns when an event completed. If the base is too old, the event becomes the new base, and
  // `event` then has the old base, which is free for reuse.
  uint64_t time_of(
      std::unique_ptr<PendingEvent<Data>>& event, uint64_t incomplete_ns, uint64_t polled_ns) {
    auto earliest = static_cast<int64_t>(std::max(event->issued_ns, incomplete_ns));
    if (base == nullptr) {
      base = std::move(event);
      base_ns = earliest;
      return static_cast<uint64_t>(earliest);
    }
    double ms = base->event.elapsedTime(event->event);
    auto after = static_cast<int64_t>(ms * 1e6);
    base_ns = std::min(std::max(base_ns, earliest - after), static_cast<int64_t>(polled_ns) - after);
    int64_t completed_ns = base_ns + after;
    if (ms > REBASE_MS) {
      std::swap(base, event);
      base_ns = completed_ns;
    }
    return static_cast<uint64_t>(std::max<int64_t>(completed_ns, 0));
  }
};

struct EventCounts {
  uint64_t recorded = 0, completed = 0;
  uint64_t skipped = 0;   // no event was free, or the process uses too many streams
  uint64_t captured = 0;  // the stream was being captured into a graph
};

// -- all events of the process --------------------------------------------------------------------

// Records events, and passes them to a `Reader` when they have completed. The reader has the type
// `Data` of what is attached to an event; its function `needs_time` says whether the event has a time.
// The reader has these functions, all called by the harvester, without the GIL and without the lock:
// `completed(lane, data, t_ns)`, `waits(lane, number of pending events, data of the first or null)`
// and `polled(t_ns, number of skipped events)`. `opened(lane)` is called by a training thread at the
// first event of a stream.
//
// Never freed: threads may still use it when the process exits.
template <typename Reader>
struct DeviceEvents {
  using Data = typename Reader::Data;
  using Event = PendingEvent<Data>;

  c10::DeviceType type = c10::DeviceType::CPU;
  Reader reader;  // changed only while the harvester does not run
  std::mutex reading;  // held by the harvester while it calls the reader
  // Guards all fields below; never held while the device is polled or the reader runs.
  std::mutex lock;
  std::condition_variable changed;
  std::vector<std::unique_ptr<Lane<Data>>> lanes;
  std::vector<std::unique_ptr<Event>> pools[2];  // free events: without a time, with one
  size_t events = 0;     // number of events that exist
  size_t recording = 0;  // threads that record an event now
  std::vector<DeviceClock<Data>> clocks;  // only the harvester uses them
  std::atomic<bool> is_on{false};
  bool is_running = false, has_ended = true;
  EventCounts counts;
  // Why events are off for good: after an error of the device, nothing polls it again.
  std::string problem;

  bool record(c10::DeviceIndex index, uint64_t issued_ns, const Data& data) noexcept {
    return record(index, issued_ns, data, [] {});
  }

  // Calls `launch`, which may enqueue work on the current stream of a device, and records an event
  // after it. Returns false if no event was recorded; then `launch` was called only if there was an
  // error, or if the watch has ended. Called by training threads; never throws. Releases the GIL
  // meanwhile, so the watch may have ended when this returns.
  template <typename Launch>
  bool record(
      c10::DeviceIndex index, uint64_t issued_ns, const Data& data, const Launch& launch) noexcept {
    if (!is_on.load(std::memory_order_relaxed)) return false;
    WithoutGil without_gil;
    Lane<Data>* lane = nullptr;
    std::unique_ptr<Event> event;
    try {
      c10::impl::VirtualGuardImpl guard(type);
      c10::Stream stream = guard.getStream(c10::Device(type, index));
      bool is_captured = is_capturing(guard, stream);
      {
        std::lock_guard<std::mutex> locked(lock);
        if (!is_on) return false;
        lane = is_captured ? nullptr : lane_of(stream);
        event = lane == nullptr ? nullptr : free_event(stream.device(), data.needs_time());
        if (event == nullptr) {
          ++(is_captured ? counts.captured : counts.skipped);
          return false;
        }
        ++recording;
      }
      event->issued_ns = issued_ns;
      event->data = data;
      launch();
      event->event.record(stream);  // waits while the stream is full
    } catch (const std::exception& error) {
      fail(error.what());
    }
    if (event == nullptr) return false;
    std::lock_guard<std::mutex> locked(lock);
    --recording;
    if (is_on) {
      if (has_ended) start_harvester();
      lane->pending.push_back(std::move(event));
      ++counts.recorded;
      return true;
    }
    event->data = {};
    give_back(std::move(event));
    changed.notify_all();
    return false;
  }

  // Lets events be recorded. Returns false if there was an error before, or if the harvester or a
  // training thread of an earlier watch is still blocked.
  bool start(c10::DeviceType device_type, const Reader& new_reader) {
    std::lock_guard<std::mutex> guard(lock);
    if (!has_ended || recording != 0 || !problem.empty()) return false;
    type = device_type;
    reader = new_reader;
    lanes.clear();
    clocks.clear();
    events = pools[0].size() + pools[1].size();
    counts = {};
    is_running = is_on = true;
    return true;
  }

  // No event is recorded or read after this. Returns false if a thread is blocked in the driver: then
  // it may still use the lanes.
  bool stop() {
    std::unique_lock<std::mutex> guard(lock);
    is_on = is_running = false;
    changed.notify_all();
    auto is_unused = [this] { return has_ended && recording == 0; };
    if (!changed.wait_for(guard, STOP_WITHIN, is_unused)) {
      guard.unlock();
      std::lock_guard<std::mutex> not_reading(reading);
      return false;
    }
    for (auto& lane : lanes) {
      for (auto& event : lane->pending) {
        event->data = {};
        give_back(std::move(event));  // an event may be recorded again at any time
      }
    }
    lanes.clear();
    return true;
  }

  // Ends the events for good, because of an error of the device.
  void fail(const std::string& why) {
    std::lock_guard<std::mutex> guard(lock);
    if (problem.empty()) problem = why.substr(0, why.find('\n'));
    is_on = false;
  }

 private:
  // Starts the harvester, at the first event: a job that forks before it uses the device has no
  // thread of ours.
  void start_harvester() {
    sigset_t all, before;  // signals of the job are for its own threads
    sigfillset(&all);
    for (int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      std::thread([this] { run(); }).detach();
      has_ended = false;
    } catch (const std::exception&) {  // too many threads: the next event tries again
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  Lane<Data>* lane_of(const c10::Stream& stream) {
    for (auto& lane : lanes)
      if (lane->stream == stream.id() && lane->device == stream.device()) return lane.get();
    if (lanes.size() == MOST_LANES) return nullptr;
    lanes.push_back(
        std::make_unique<Lane<Data>>(Lane<Data>{stream.device(), stream.id(), lanes.size(), {}}));
    reader.opened(*lanes.back());
    return lanes.back().get();
  }

  void give_back(std::unique_ptr<Event> event) {
    auto& pool = pools[event->has_time()];
    pool.push_back(std::move(event));
  }

  std::unique_ptr<Event> free_event(const c10::Device& device, bool has_time) {
    auto& pool = pools[has_time];
    for (size_t at = pool.size(); at-- > 0;) {
      if (pool[at]->event.device_index() != device.index() &&
          pool[at]->event.was_marked_for_recording())
        continue;
      std::swap(pool[at], pool.back());
      std::unique_ptr<Event> event = std::move(pool.back());
      pool.pop_back();
      return event;
    }
    if (events == MOST_PENDING) {
      auto& others = pools[!has_time];
      if (others.empty()) return nullptr;
      others.pop_back();
      --events;
    }
    ++events;
    return std::make_unique<Event>(device.type(), has_time);
  }

  DeviceClock<Data>& clock_of(const c10::Device& device) {
    for (auto& clock : clocks)
      if (clock.device == device) return clock;
    clocks.push_back(DeviceClock<Data>{device, nullptr});
    return clocks.back();
  }

  // Calls a function of the reader, unless the watch has ended meanwhile.
  template <typename Call>
  void call_reader(const Call& call) {
    std::lock_guard<std::mutex> guard(reading);
    if (is_on) call();
  }

  // Passes events without a time to the reader, which completed before `until_ns`.
  void complete(
      Lane<Data>& lane, std::vector<std::pair<Data, uint64_t>>& untimed, uint64_t until_ns) {
    for (auto& [data, polled_ns] : untimed)
      call_reader([&] { reader.completed(lane, data, std::min(polled_ns, until_ns)); });
    untimed.clear();
  }

  // Reads the completed events of one lane. Only the harvester removes events, so the front stays
  // valid without the lock.
  void harvest(Lane<Data>& lane) {
    c10::impl::VirtualGuardImpl(type).uncheckedSetDevice(lane.device);
    std::vector<std::pair<Data, uint64_t>> untimed;  // events without a time, and when it was found
    while (is_on) {
      Event* front;
      {
        std::lock_guard<std::mutex> guard(lock);
        front = lane.pending.empty() ? nullptr : lane.pending.front().get();
      }
      uint64_t queried_ns = now_ns();
      if (front == nullptr || !is_on) break;
      if (!front->event.query()) {
        lane.incomplete_ns = queried_ns;
        break;
      }
      if (!is_on) break;  // the watch may have ended during the query
      uint64_t polled_ns = now_ns();
      std::unique_ptr<Event> event;
      {
        std::lock_guard<std::mutex> guard(lock);
        event = std::move(lane.pending.front());
        lane.pending.pop_front();
        ++counts.completed;
      }
      Data data = std::exchange(event->data, {});
      if (event->has_time()) {
        uint64_t t_ns = clock_of(lane.device).time_of(event, lane.incomplete_ns, polled_ns);
        complete(lane, untimed, t_ns);
        call_reader([&] { reader.completed(lane, data, t_ns); });
      } else {
        untimed.emplace_back(std::move(data), polled_ns);
      }
      std::lock_guard<std::mutex> guard(lock);
      if (event != nullptr) give_back(std::move(event));
    }
    complete(lane, untimed, UINT64_MAX);
    size_t pending;
    Data next{};
    {
      std::lock_guard<std::mutex> guard(lock);
      if (!is_on) return;
      pending = lane.pending.size();
      if (pending != 0) next = lane.pending.front()->data;
    }
    call_reader([&] { reader.waits(lane, pending, pending == 0 ? nullptr : &next); });
  }

  void harvest_all() {
    uint64_t skipped = 0;
    for (size_t at = 0;; ++at) {
      Lane<Data>* lane;
      {
        std::lock_guard<std::mutex> guard(lock);
        if (!is_on) return;
        skipped = counts.skipped;
        if (at >= lanes.size()) break;
        lane = lanes[at].get();
      }
      harvest(*lane);
    }
    call_reader([&] { reader.polled(now_ns(), skipped); });
  }

  void run() {
    try {
      bool is_relaxed = false;
      while (true) {
        {
          std::unique_lock<std::mutex> guard(lock);
          changed.wait_for(guard, HARVEST_EVERY, [this] { return !is_running; });
          if (!is_running) break;
          if (!is_on) continue;
        }
        if (!is_relaxed) exchange_capture_mode(type, RELAXED);
        is_relaxed = true;
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

}  // namespace torchwhere
