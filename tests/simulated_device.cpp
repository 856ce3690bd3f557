// An accelerator in software, for tests of device progress on machines without a GPU.
//
// It is a backend of torch's device type for out-of-tree devices (PrivateUse1), with streams, events
// and collectives as an accelerator has them: the CPU enqueues and continues, a stream executes in
// order. Each stream is a thread. A kernel is a time to sleep, or it never ends. A collective ends
// when all ranks of the job have reached it; they meet in a file that their processes share. No
// collective transfers data. Operations on tensors run on the CPU at once, beside the streams.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <ATen/DeviceGuard.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr auto LOOK_EVERY = std::chrono::microseconds(200);
constexpr c10::DeviceIndex DEVICES = 2;

uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

// What a test sets, for the whole process.
std::atomic<bool> is_initialized{false}, is_captured{false}, is_lost{false};
std::atomic<bool> blocks_queries{false}, blocks_times{false};
std::atomic<bool> is_released{false};  // ends the kernels that do not end
std::atomic<size_t> queue_length{SIZE_MAX};  // tasks that a stream takes before it blocks the CPU
std::atomic<int> queries{0}, capture_queries{0}, copies{0};

void wait_until(const std::function<bool()>& is_true) {
  while (!is_true()) std::this_thread::sleep_for(LOOK_EVERY);
}

// -- streams --------------------------------------------------------------------------------------

// Executes tasks in order, in a thread of its own that starts with the first task.
struct Queue {
  std::mutex lock;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  uint64_t enqueued = 0, executed = 0;
  bool has_thread = false;

  void push(std::function<void()> task) {
    std::unique_lock<std::mutex> guard(lock);
    changed.wait(guard, [this] { return tasks.size() < queue_length; });
    tasks.push_back(std::move(task));
    ++enqueued;
    if (!has_thread) std::thread([this] { run(); }).detach();
    has_thread = true;
    changed.notify_all();
  }

  void synchronize() {
    std::unique_lock<std::mutex> guard(lock);
    changed.wait(guard, [this, target = enqueued] { return executed >= target; });
  }

 private:
  void run() {
    while (true) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> guard(lock);
        changed.wait(guard, [this] { return !tasks.empty(); });
        task = std::move(tasks.front());
        tasks.pop_front();
        changed.notify_all();
      }
      task();
      std::lock_guard<std::mutex> guard(lock);
      ++executed;
      changed.notify_all();
    }
  }
};

struct Device {
  c10::DeviceIndex index = 0;
  c10::StreamId stream = 0;
};
thread_local Device current;

// Never freed, as the streams of a device.
Queue& queue_of(const c10::Stream& stream) {
  static auto* lock = new std::mutex;
  static auto* queues = new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Queue>;
  std::lock_guard<std::mutex> guard(*lock);
  return (*queues)[{stream.device_index(), stream.id()}];
}

c10::Stream stream_of(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, index), id);
}

c10::Stream current_stream() { return stream_of(current.index, current.stream); }

// -- events ---------------------------------------------------------------------------------------

struct Event {
  std::atomic<uint64_t> recorded{0}, completed{0}, completed_ns{0};
};
using EventPtr = std::shared_ptr<Event>;

EventPtr& event_at(void* event) { return *static_cast<EventPtr*>(event); }

void record_on(const c10::Stream& stream, const EventPtr& event) {
  uint64_t version = ++event->recorded;
  queue_of(stream).push([event, version] {
    event->completed_ns = now_ns();
    event->completed = version;
  });
}

void wait_on(const c10::Stream& stream, const EventPtr& event) {
  uint64_t version = event->recorded;
  queue_of(stream).push([event, version] {
    wait_until([&] { return event->completed >= version; });
  });
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {TYPE, current.index}; }
  void setDevice(c10::Device device) const override { current.index = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current.index = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(device.index(), current.stream);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.index(), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return stream_of(device.index(), ++last);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    current.stream = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  // without `override`: older versions of torch do not ask
  bool isStreamCapturing(const c10::Stream&) const {
    ++capture_queries;
    return is_captured;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    if (*event == nullptr) *event = new EventPtr(std::make_shared<Event>());
    record_on(stream, event_at(*event));
  }
  void block(void* event, const c10::Stream& stream) const override {
    wait_on(stream, event_at(event));
  }
  bool queryEvent(void* event) const override {
    ++queries;
    wait_until([] { return !blocks_queries; });
    TORCH_CHECK(!is_lost, "the device was lost");
    return event_at(event)->completed >= event_at(event)->recorded;
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    wait_until([] { return !blocks_times; });
    auto begin = static_cast<double>(event_at(first)->completed_ns);
    return (static_cast<double>(event_at(second)->completed_ns) - begin) / 1e6;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
};

// Memory that the device can copy to while the CPU continues.
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = malloc(bytes);
    return {data, data, &free, c10::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* memory = new PinnedMemory;
    return memory;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override;
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_initialized; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current.index; }
};

// -- tensors --------------------------------------------------------------------------------------

struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    is_initialized = true;
    void* data = malloc(bytes);
    return {data, data, &free, c10::Device(TYPE, current.index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

HostMemory* memory = new HostMemory;

// FSDP frees the memory of its parameters, and allocates it again, in this way.
void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
  c10::DataPtr data = memory->allocate(bytes);
  size_t common = std::min(bytes, storage.nbytes());
  if (common != 0) std::memcpy(data.get(), storage.data(), common);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}
constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard on_device(device.value_or(Guard().getDevice()));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), memory, KEYS, dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  c10::DeviceGuard on_device(device.value_or(Guard().getDevice()));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      memory,
      KEYS,
      dtype.value_or(at::kFloat));
}

// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().type() != TYPE) return tensor;
  auto options = tensor.options().device(at::kCPU);
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), options);
}

// A copy that does not block takes place when the current stream comes to it.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!non_blocking || to.device().type() == TYPE) {
    on_host(to).copy_(on_host(from));
    return to;
  }
  ++copies;
  auto* source = from.const_data_ptr();
  queue_of(current_stream()).push([from, to, source] {
    std::memcpy(to.mutable_data_ptr(), source, to.nbytes());
  });
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  TORCH_CHECK(from.sizes() == to.sizes(), "tensors of this device cannot be resized");
  return copy_from(from, to, false);
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

// -- collectives ----------------------------------------------------------------------------------

// Where the ranks of a group meet: a file with one counter for each collective, and for each message
// between two ranks.
struct MeetingPoints {
  static constexpr size_t COLLECTIVES = 1 << 16, MESSAGES = 1 << 12, MOST_RANKS = 8;
  static constexpr size_t COUNTERS = COLLECTIVES + MOST_RANKS * MOST_RANKS * MESSAGES;
  std::atomic<uint32_t>* counters;

  explicit MeetingPoints(const std::string& path) {
    int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
    TORCH_CHECK(file >= 0 && ftruncate(file, COUNTERS * 4) == 0, "cannot create ", path);
    void* mapped =
        mmap(nullptr, COUNTERS * 4, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    TORCH_CHECK(mapped != MAP_FAILED, "cannot map ", path);
    counters = static_cast<std::atomic<uint32_t>*>(mapped);
  }
};

using Tensors = std::vector<at::Tensor>;

// As with NCCL, `wait` lets the current stream wait, and not the CPU.
struct Work final : c10d::Work {
  c10::intrusive_ptr<c10::ivalue::Future> future;

  Work(const c10::Stream& stream, const Tensors& tensors)
      : future(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()),
            std::vector<c10::Device>{stream.device()})) {
    c10::StreamGuard on_stream(stream);
    future->markCompleted(c10::IValue(tensors));  // records an event on the stream
  }
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override {
    future->wait();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

struct Collectives final : c10d::Backend {
  using Result = c10::intrusive_ptr<c10d::Work>;
  MeetingPoints points;
  uint64_t issued = 0;
  std::map<size_t, uint64_t> messages;
  bool is_coalescing = false;
  std::vector<std::atomic<uint32_t>*> together;  // where coalesced messages meet
  Tensors their_tensors;
  c10::Stream own_stream = Guard().getNewStream({TYPE, 0}, 0);  // of asynchronous collectives

  Collectives(int rank, int size, const std::string& path) : Backend(rank, size), points(path) {}
  const std::string getBackendName() const override { return "simulated"; }

  Result allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return meet(tensors, options.asyncOp);
  }
  Result broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return meet(tensors, options.asyncOp);
  }
  Result allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors&, const c10d::AllgatherOptions& options) override {
    return meet(outputs, options.asyncOp);
  }
  Result _allgather_base(
      at::Tensor& output, at::Tensor&, const c10d::AllgatherOptions& options) override {
    return meet({output}, options.asyncOp);
  }
  Result _reduce_scatter_base(
      at::Tensor& output, at::Tensor&, const c10d::ReduceScatterOptions& options) override {
    return meet({output}, options.asyncOp);
  }
  Result barrier(const c10d::BarrierOptions& options) override {
    Tensors tensors{at::empty(1, c10::Device(TYPE, 0))};
    return meet(tensors, options.asyncOp);
  }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { is_coalescing = true; }
  // All messages run at the same time, as in NCCL.
  Result endCoalescing() override {
    is_coalescing = false;
    c10::Stream stream = after_current_stream();
    queue_of(stream).push([counters = std::move(together)] {
      std::vector<uint32_t> all;
      for (auto* counter : counters) all.push_back((counter->fetch_add(1) / 2 + 1) * 2);
      for (size_t at = 0; at < all.size(); ++at)
        wait_until([&] { return counters[at]->load() >= all[at]; });
    });
    together.clear();
    return c10::make_intrusive<Work>(stream, std::exchange(their_tensors, {}));
  }
  Result send(Tensors& tensors, int to, int) override { return exchange(tensors, getRank(), to); }
  Result recv(Tensors& tensors, int from, int) override {
    return exchange(tensors, from, getRank());
  }

 private:
  Result meet(const Tensors& tensors, bool is_async) {
    c10::Stream stream = is_async ? after_current_stream() : current_stream();
    return arrive(tensors, stream, issued++ % MeetingPoints::COLLECTIVES, getSize());
  }

  // The own stream, which waits until the current one has executed everything before.
  c10::Stream after_current_stream() {
    EventPtr begin = std::make_shared<Event>();
    record_on(current_stream(), begin);
    wait_on(own_stream, begin);
    return own_stream;
  }

  Result exchange(const Tensors& tensors, int from, int to) {
    size_t pair = static_cast<size_t>(from) * MeetingPoints::MOST_RANKS + static_cast<size_t>(to);
    uint64_t number = messages[pair]++ % MeetingPoints::MESSAGES;
    size_t at = MeetingPoints::COLLECTIVES + pair * MeetingPoints::MESSAGES + number;
    if (!is_coalescing) return arrive(tensors, current_stream(), at, 2);
    together.push_back(points.counters + at);
    their_tensors.insert(their_tensors.end(), tensors.begin(), tensors.end());
    return nullptr;
  }

  Result arrive(const Tensors& tensors, const c10::Stream& stream, size_t at, int ranks) {
    std::atomic<uint32_t>* counter = points.counters + at;
    queue_of(stream).push([counter, ranks] {
      uint32_t before = counter->fetch_add(1);
      uint32_t all = (before / ranks + 1) * ranks;  // a counter may be used again
      wait_until([&] { return counter->load() >= all; });
    });
    return c10::make_intrusive<Work>(stream, tensors);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

PYBIND11_MODULE(simulated_device, module) {
  static Hooks hooks;
  static Guard guard;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::impl::registerDeviceGuard(TYPE, &guard);
  module.def("collectives", [](int rank, int size, const std::string& path) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Collectives>(rank, size, path));
  });
  using WithoutGil = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def(
      "kernel",
      [](double seconds) {
        queue_of(current_stream()).push([seconds] {
          std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
        });
      },
      WithoutGil());
  module.def(
      "endless_kernel",
      [] { queue_of(current_stream()).push([] { wait_until([] { return is_released.load(); }); }); },
      WithoutGil());
  module.def("limit_queue", [](size_t length) { queue_length = length; });
  module.def("release", [] { is_released = true; });
  module.def(
      "synchronize", [] { queue_of(current_stream()).synchronize(); }, WithoutGil());
  module.def("set_device", [](int index) { current.index = static_cast<c10::DeviceIndex>(index); });
  module.def("set_stream", [](int64_t id) { current.stream = id; });
  module.def("is_initialized", [] { return is_initialized.load(); });
  module.def("initialize", [] { is_initialized = true; });
  module.def("capture", [](bool value) { is_captured = value; });
  module.def("lose", [] { is_lost = true; });
  module.def("block_queries", [](bool value) { blocks_queries = value; });
  module.def("block_times", [](bool value) { blocks_times = value; });
  module.def("copies", [] { return copies.load(); });
  module.def("queries", [] { return queries.load(); });
  module.def("capture_queries", [] { return capture_queries.load(); });
}
