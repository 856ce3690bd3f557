// Records the progress of an accelerator: marks at collectives, steps and places.
//
// A mark is an event (`device_events.h`) on the current stream, recorded just before a collective is
// issued, at the begin of a step, or when the place of the thread changes (`place_marks.h`). When it
// completes, the device has reached that point. A second mark after a collective on the current
// stream shows when the collective was done; for an asynchronous collective, marks around the wait
// for it show that (`device_waits.h`). If the current stream is not that of the job, as in FSDP, the
// second mark has no time, and the end of the job's wait for it has (`stream_waits.h`). The reader of
// the events writes the times into the box.
#pragma once

#include <ATen/Context.h>

#include "device_events.h"
#include "device_numbers.h"

namespace torchwhere {

// The last slot has the time of the last poll, and the number of skipped marks.
constexpr size_t POLL_SLOT = MOST_LANES;
constexpr int POLL_TIME = 0, POLL_SKIPPED = 1;
constexpr int LANE_WORDS = 8;
constexpr int LANE_PLACE = 0, LANE_TIME = 1, LANE_STEP = 2, LANE_ID = 3, LANE_RECORD = 4,
              LANE_PENDING = 5, LANE_NEXT_PLACE = 6, LANE_NEXT_RECORD = 7;
constexpr int PROGRESS_REACHED = 0, PROGRESS_REACHED_TIME = 1, PROGRESS_DONE = 2,
              PROGRESS_DONE_TIME = 3, PROGRESS_WORDS = 4;
constexpr int TIMES_NUMBER = 0, TIMES_REACHED = 1, TIMES_DONE = 2, TIMES_WAITED = 3,
              TIMES_WORDS = 4;
// The index of the lane plus 1: in the word of the number, and in that of the wait.
constexpr int TIMES_LANE_SHIFT = 56, WAITED_LANE_SHIFT = 59;
// In the word of the end: the collective was done at that time or before.
constexpr uint64_t DONE_BEFORE = 1ull << 63;

// ENDED: the collective is done, on a stream that is not that of the job; has no time.
// WAITED: the stream has come to a wait for an asynchronous collective.
// STREAM_WAITED, STREAM_PASSED: the stream has come to a wait for the stream of a collective, and has
// passed it. The collective has its own marks on its stream.
enum class Point : int {
  REACHED = 0,
  DONE = 1,
  PLACE = 2,
  WAITED = 3,
  STREAM_WAITED = 4,
  STREAM_PASSED = 5,
  ENDED = 6
};

// `record` and `counter` are negative if there is none.
struct MarkedCall {
  int64_t record;   // number of the record of a collective, or of the begin of a step
  int64_t counter;  // index of the words of a collective's stream counter
  uint64_t count;   // its number in the stream, plus 1
};

// The point that a mark represents.
struct Mark {
  Point point;
  MarkedCall call;
  uint64_t place, step;
  // of a wait for several collectives: all but the last one, which is `call`
  std::shared_ptr<const std::vector<MarkedCall>> others = nullptr;
  NumberCopyPtr numbers = nullptr;  // a copy before the mark

  bool needs_time() const { return point != Point::ENDED; }
};

// Writes marks into the device sections of a box. All positions are indexes of words.
struct DeviceSections {
  using Data = Mark;
  using MarkLane = Lane<Mark>;
  Box* box = nullptr;
  uint64_t lanes = 0, times = 0;
  int64_t progress_shift = 0;  // from the counter of a stream to its progress

  void opened(const MarkLane& lane) {
    words_of(lane)[LANE_ID] = (static_cast<uint64_t>(lane.device.index()) + 1) |
        static_cast<uint64_t>(lane.stream) << 8;
  }

  void completed(const MarkLane& lane, const Mark& mark, uint64_t t_ns) {
    uint64_t* words = words_of(lane);
    words[LANE_PLACE] = mark.place;
    words[LANE_STEP] = mark.step;
    if (is_on_lane(mark.point))  // the wait for a collective may come after others
      words[LANE_RECORD] = std::max(words[LANE_RECORD], collective_of(mark));
    words[LANE_TIME] = t_ns;
    if (mark.others != nullptr)
      for (const MarkedCall& call : *mark.others) reach(lane, mark.point, call, t_ns);
    reach(lane, mark.point, mark.call, t_ns);
    if (mark.numbers != nullptr) mark.numbers->deliver(box);
  }

  void waits(const MarkLane& lane, size_t pending, const Mark* next) {
    uint64_t* words = words_of(lane);
    words[LANE_NEXT_PLACE] = next == nullptr ? 0 : next->place;
    // before it has come to a wait for another stream, this stream is not in the collective there
    bool has_next = next != nullptr && next->point != Point::STREAM_WAITED;
    words[LANE_NEXT_RECORD] = has_next ? collective_of(*next) : 0;
    words[LANE_PENDING] = pending;
  }

  void polled(uint64_t t_ns, uint64_t skipped) {
    uint64_t* words = box->words + lanes + POLL_SLOT * LANE_WORDS;
    words[POLL_TIME] = t_ns;
    words[POLL_SKIPPED] = skipped;
  }

 private:
  uint64_t* words_of(const MarkLane& lane) {
    return box->words + lanes + lane.index * LANE_WORDS;
  }

  // Whether a mark of a collective shows that this lane has reached it.
  static bool is_on_lane(Point point) {
    return point != Point::STREAM_WAITED && point != Point::STREAM_PASSED;
  }

  // The number of the record of a mark's collective, plus 1; 0 if it has none.
  static uint64_t collective_of(const Mark& mark) {
    bool is_collective = mark.point != Point::PLACE && mark.call.record >= 0;
    return is_collective ? static_cast<uint64_t>(mark.call.record) + 1 : 0;
  }

  void reach(const MarkLane& lane, Point point, const MarkedCall& call, uint64_t t_ns) {
    if (call.record >= 0) set_time(lane, point, static_cast<uint64_t>(call.record) + 1, t_ns);
    bool is_counted = point == Point::REACHED || point == Point::DONE || point == Point::ENDED;
    if (is_counted && call.counter >= 0) count(point, call, t_ns);
  }

  // `number` is that of the record plus 1, as in the box. The marks of a collective may be on several
  // streams, so they may be read in any order.
  void set_time(const MarkLane& lane, Point point, uint64_t number, uint64_t t_ns) {
    uint64_t* times_of = box->words + times + (number - 1) % box->capacity * TIMES_WORDS;
    uint64_t before = times_of[TIMES_NUMBER] << 8 >> 8;
    if (before > number) return;  // a newer record has the slot
    if (before != number) {
      times_of[TIMES_NUMBER] = 0;
      times_of[TIMES_REACHED] = times_of[TIMES_DONE] = times_of[TIMES_WAITED] = 0;
    }
    uint64_t lane_number = lane.index + 1;
    if (point == Point::DONE)
      times_of[TIMES_DONE] = t_ns;
    else if (point == Point::ENDED || point == Point::STREAM_PASSED)
      times_of[TIMES_DONE] = earlier_end(times_of[TIMES_DONE], t_ns);
    else if (point == Point::WAITED)
      times_of[TIMES_WAITED] = t_ns | lane_number << WAITED_LANE_SHIFT;
    else if (point != Point::STREAM_WAITED)
      times_of[TIMES_REACHED] = t_ns;
    else if (times_of[TIMES_WAITED] == 0)  // the first wait: a later one finds the stream free
      times_of[TIMES_WAITED] = t_ns | lane_number << WAITED_LANE_SHIFT;
    bool is_reached = point == Point::REACHED || point == Point::PLACE;
    if (is_reached)
      times_of[TIMES_NUMBER] = number | lane_number << TIMES_LANE_SHIFT;
    else if (before != number)
      times_of[TIMES_NUMBER] = number;
  }

  // The word of an end that is already known, and also lies before a time.
  static uint64_t earlier_end(uint64_t known, uint64_t before_ns) {
    bool is_exact = known != 0 && !(known & DONE_BEFORE);
    if (is_exact || (known != 0 && (known & ~DONE_BEFORE) <= before_ns)) return known;
    return before_ns | DONE_BEFORE;
  }

  void count(Point point, const MarkedCall& call, uint64_t t_ns) {
    bool is_done = point != Point::REACHED;
    uint64_t* progress = box->words + call.counter + progress_shift;
    uint64_t& count = progress[is_done ? PROGRESS_DONE : PROGRESS_REACHED];
    if (call.count <= count) return;  // a group may use several streams, as FSDP does
    progress[is_done ? PROGRESS_DONE_TIME : PROGRESS_REACHED_TIME] = t_ns;
    count = call.count;
  }
};

// The marks of this process. `has_context` is true once the job itself has used the device: a mark
// must not be the first use, which takes memory and forbids a later fork.
struct DeviceProgress : DeviceEvents<DeviceSections> {
  std::atomic<bool> has_context{false}, takes_numbers{false};
  std::atomic<uint64_t> contexts{0};  // bit i: device i has a context

  void mark(c10::DeviceIndex index, uint64_t t_ns, const Mark& mark) noexcept {
    has_context.store(true, std::memory_order_relaxed);
    record(index, t_ns, mark);
  }

  // Copies the numbers of a small tensor to the host, and marks the place after the copy. `delivery`
  // gets the numbers in the harvester, without the GIL. Returns false if it will never get them.
  bool read(const at::Tensor& tensor, Mark mark, Delivery delivery) noexcept {
    // after an error of the device, `takes_numbers` is still true: nothing may call the device again
    if (!is_on || !takes_numbers) return false;
    bool is_small = tensor.nbytes() > 0 && tensor.nbytes() <= SLOT_BYTES;
    if (tensor.device().type() != type || !is_small) return false;
    WithoutGil without_gil;
    try {
      c10::impl::VirtualGuardImpl guard(type);
      if (is_capturing(guard, guard.getStream(tensor.device()))) return false;
      RelaxedCapture relaxed(type);
      char* slot = pinned_slots->take();
      if (slot == nullptr) return false;
      mark.numbers = std::make_shared<NumberCopy>(slot, tensor, std::move(delivery));
    } catch (const std::exception&) {  // not an error of the device
      return false;
    }
    has_context.store(true, std::memory_order_relaxed);
    return record(tensor.device().index(), now_ns(), mark, [&] { mark.numbers->enqueue(tensor); });
  }

  // Takes no more numbers. Waits for a short time for those that are under way.
  void wait_for_numbers() {
    takes_numbers = false;
    auto until = std::chrono::steady_clock::now() + STOP_WITHIN;
    while (is_on && pinned_slots->under_way != 0 && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(HARVEST_EVERY / 4);
  }

  // Records a mark on the current device, if that device has a context.
  void mark_current_device(uint64_t t_ns, const Mark& mark) noexcept {
    if (!is_on.load(std::memory_order_relaxed)) return;
    try {
      c10::DeviceIndex index = c10::impl::VirtualGuardImpl(type).getDevice().index();
      if (index < 0 || index > 63) return;
      uint64_t bit = 1ull << index;
      if (!(contexts.load(std::memory_order_relaxed) & bit)) {
        if (!at::globalContext().getAcceleratorHooksInterface(type).hasPrimaryContext(index))
          return;
        contexts.fetch_or(bit);
      }
      record(index, t_ns, mark);
    } catch (const std::exception&) {  // not an error of the device: the next mark tries again
    }
  }
};
inline DeviceProgress* device_progress = new DeviceProgress;

// -- functions for Python -------------------------------------------------------------------------

// device_begin(box, type, lanes_at, times_at, progress_shift): starts to record marks on devices of
// this type, for example "cuda", and to write their times into this box. The offsets are indexes of
// words.
inline PyObject* device_begin(PyObject*, PyObject* args) {
  PyObject* box;
  const char* type;
  unsigned long long lanes, times;
  long long progress_shift;
  if (!PyArg_ParseTuple(args, "OsKKL", &box, &type, &lanes, &times, &progress_shift))
    return nullptr;
  try {
    c10::DeviceType device_type = c10::Device(std::string(type)).type();
    Py_INCREF(box);
    DeviceProgress& self = *device_progress;
    self.has_context = false;
    self.contexts = 0;
    pinned_slots->under_way = 0;
    bool is_on = self.start(
        device_type, {reinterpret_cast<Box*>(box), lanes, times, progress_shift});
    self.takes_numbers = is_on;
    if (!is_on) Py_DECREF(box);
    return PyBool_FromLong(is_on);
  } catch (const std::exception& error) {
    return PyErr_Format(PyExc_ValueError, "%s", error.what());
  }
}

// device_end(): no event is recorded or polled after this. Numbers that the job wants get a moment to
// arrive. If the harvester is blocked in the driver, it keeps its box.
inline PyObject* device_end(PyObject*, PyObject*) {
  DeviceProgress& self = *device_progress;
  bool has_ended;
  Py_BEGIN_ALLOW_THREADS;
  self.has_context = false;
  self.wait_for_numbers();
  has_ended = self.stop();
  Py_END_ALLOW_THREADS;
  if (has_ended) {
    Box* box = nullptr;
    std::swap(box, self.reader.box);
    Py_XDECREF(box);
  }
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

// device_ready(): the job has used the device, so marks may begin before its first collective.
inline PyObject* device_ready(PyObject*, PyObject*) {
  device_progress->has_context = device_progress->is_on.load();
  Py_RETURN_NONE;
}

// Where a mark shows the end of a collective: after the launch, because it blocks the current stream;
// at the wait for it; nowhere.
enum class End : int { AT_LAUNCH = 0, AT_WAIT = 1, UNMARKED = 2 };

// The mark at the end of the collective that this thread launches now.
struct DueMark {
  End end = End::UNMARKED;
  c10::DeviceIndex index = 0;
  Mark mark{};
};
inline thread_local DueMark due_mark;

// Reads the arguments index, record, counter, count, place, step, issued_ns and a last one.
struct MarkArguments {
  c10::DeviceIndex index = 0;
  Mark mark{};
  uint64_t issued_ns = 0;
  long long last = 0;

  bool parse(PyObject* const* args, Py_ssize_t given) {
    if (given != 8) {
      PyErr_Format(PyExc_TypeError, "expected 8 arguments, not %zd", given);
      return false;
    }
    long long values[8];
    for (Py_ssize_t at = 0; at < given; ++at) values[at] = PyLong_AsLongLong(args[at]);
    index = static_cast<c10::DeviceIndex>(values[0]);
    mark = {
        Point::REACHED,
        {values[1], values[2], static_cast<uint64_t>(values[3])},
        static_cast<uint64_t>(values[4]),
        static_cast<uint64_t>(values[5])};
    issued_ns = static_cast<uint64_t>(values[6]);
    last = values[7];
    return !PyErr_Occurred();
  }
};

// device_reach(index, record, counter, count, place, step, issued_ns, end): marks a collective that
// is about to be launched. `device_launched` must follow after the launch.
inline PyObject* device_reach(PyObject*, PyObject* const* args, Py_ssize_t given) {
  MarkArguments given_mark;
  if (!given_mark.parse(args, given)) return nullptr;
  auto& [index, mark, issued_ns, end] = given_mark;
  device_progress->mark(index, issued_ns, mark);
  mark.point = Point::DONE;
  due_mark = {static_cast<End>(end), index, mark};
  Py_RETURN_NONE;
}

// device_mark(index, record, counter, count, place, step, issued_ns, point): sets one mark, before
// or after the replay of a CUDA graph.
inline PyObject* device_mark(PyObject*, PyObject* const* args, Py_ssize_t given) {
  MarkArguments given_mark;
  if (!given_mark.parse(args, given)) return nullptr;
  given_mark.mark.point = given_mark.last == 1 ? Point::DONE : Point::REACHED;
  device_progress->mark(given_mark.index, given_mark.issued_ns, given_mark.mark);
  Py_RETURN_NONE;
}

// device_fail(problem): the job has seen an error of the device, so nothing calls the device again.
inline PyObject* device_fail(PyObject*, PyObject* problem) {
  const char* text = PyUnicode_AsUTF8(problem);
  if (text == nullptr) return nullptr;
  {
    WithoutGil without_gil;
    device_progress->fail(text);
  }
  Py_RETURN_NONE;
}

// device_status() -> {marked, harvested, skipped, captured, problem}
inline PyObject* device_status(PyObject*, PyObject*) {
  EventCounts counts;
  std::string problem;
  Py_BEGIN_ALLOW_THREADS;  // a thread that has the lock may wait for the device
  {  // unlocked before this thread waits for the GIL: marks take the lock while they hold the GIL
    std::lock_guard<std::mutex> guard(device_progress->lock);
    counts = device_progress->counts;
    problem = device_progress->problem;
  }
  Py_END_ALLOW_THREADS;
  return Py_BuildValue(
      "{sKsKsKsKss}",
      "marked",
      counts.recorded,
      "harvested",
      counts.completed,
      "skipped",
      counts.skipped,
      "captured",
      counts.captured,
      "problem",
      problem.c_str());
}

}  // namespace torchwhere
