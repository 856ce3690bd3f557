// An allocator for torch's device type of out-of-tree backends, with statistics that a test sets.
// `test_native_memory.py` compiles it: it stands for the caching allocator of a GPU.
#include <stdexcept>

#include <c10/core/CachingDeviceAllocator.h>

namespace {

struct CountingAllocator : c10::DeviceAllocator {
  c10::CachingDeviceAllocator::DeviceStats stats;
  bool is_initialized = false, fails = false;
  int resets = 0, looks = 0;

  c10::DataPtr allocate(size_t) override { return {}; }
  void copy_data(void*, const void*, std::size_t) const override {}
  bool initialized() override { return is_initialized; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    ++looks;
    if (fails) throw std::runtime_error("no statistics");
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override { ++resets; }
  void resetPeakStats(c10::DeviceIndex) override { ++resets; }
};
CountingAllocator allocator;

}  // namespace

extern "C" {
void begin() { c10::SetAllocator(c10::DeviceType::PrivateUse1, &allocator); }
void initialize() { allocator.is_initialized = true; }
void fail() { allocator.fails = true; }
int resets() { return allocator.resets; }
int looks() { return allocator.looks; }
void set(int64_t allocated, int64_t reserved, int64_t peak) {
  allocator.stats.allocated_bytes[0].current = allocated;
  allocator.stats.allocated_bytes[0].peak = peak;
  allocator.stats.reserved_bytes[0].current = reserved;
}
}
