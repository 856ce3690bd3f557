// Follows the memory of an accelerator: the bytes that its caching allocator has allocated and
// reserved, and where the CPU was when the most was allocated.
//
// A sample copies the numbers of the allocator, under the lock of the allocator. It calls neither
// the device nor its driver. Only threads of the job take samples, with the GIL, when they go from
// one place to another: they allocate themselves, so they never wait for that lock longer than the
// job does. Another thread must not take samples: it would wait for a thread that is blocked in the
// driver.
//
// The allocator's own peak is never reset: the job may read it. If it has risen since the sample
// before, the peak was at the place that the CPU is leaving. Otherwise the peak of the step is known
// only from the samples, and may have been higher between them.
//
// A sample takes 0.2 to 0.3 us. While the allocator's peak rises to new heights, each change of
// place takes one, so that the place of the peak is exact. From the first step in which it does not,
// samples are as rare as marks of places on the device (`device_progress.h`). The end of a step
// always takes one. If the peak rises again, the place is one of those since the sample before, and
// the record says that it is inferred.
#pragma once

#include <algorithm>
#include <string>

#include <c10/core/CachingDeviceAllocator.h>

#include "box.h"
#include "place_marks.h"

namespace torchwhere {

constexpr uint64_t MEMORY_UNIT = 512, MEMORY_MOST = 0xFFFFFFFF;
constexpr int MEMORY_RESERVED_SHIFT = 32;
constexpr uint8_t FLAG_INFERRED = 2, FLAG_AT_LEAST = 64;

struct DeviceMemory {
  c10::DeviceAllocator* allocator = nullptr;  // null: off
  c10::DeviceIndex device = 0;
  int kind = 0;  // of the record
  bool has_sample = false;
  uint64_t allocated = 0, reserved = 0, highest_ever = 0;  // of the last sample
  uint64_t sampled_ns = 0;
  bool has_skipped = false;  // the CPU has left places since the last sample
  uint64_t peak = 0, place = 0;  // since the last record
  bool is_exact = false, is_inferred = false;
  uint64_t record_high = 0;  // the highest peak of the allocator; it remains if the job resets that
  bool has_grown = false, is_growing = false;  // since the last record; since the one before

  // Whether a sample is due when the CPU leaves a place.
  bool is_due(uint64_t leaving, uint64_t entering, uint64_t t_ns) const {
    bool is_same_pass = !((leaving ^ entering) >> PASS_SHIFT & PASS_MASK);
    return is_growing || t_ns - sampled_ns >= (is_same_pass ? PLACE_EVERY_NS : PASS_EVERY_NS);
  }

  // Looks at the allocator. `leaving` is the place of the CPU, since the sample before unless it has
  // skipped places.
  void sample(uint64_t leaving, uint64_t t_ns) noexcept {
    try {
      if (!allocator->initialized()) return;
      const auto stats = allocator->getDeviceStats(device);
      const auto& sum = stats.allocated_bytes[0];  // of all pools
      allocated = static_cast<uint64_t>(sum.current);
      reserved = static_cast<uint64_t>(stats.reserved_bytes[0].current);
      auto ever = static_cast<uint64_t>(sum.peak);
      bool has_risen = has_sample && ever > highest_ever;
      highest_ever = ever;  // lower than before if the job has reset it
      if (ever > record_high) {
        record_high = ever;
        has_grown = is_growing = true;
      }
      uint64_t most = has_risen ? ever : allocated;
      if (most > peak) {
        peak = most;
        place = leaving;
        is_exact = has_risen;
        is_inferred = has_risen && has_skipped;
      }
      has_sample = true;
      has_skipped = false;
      sampled_ns = t_ns;
    } catch (const std::exception&) {  // an allocator without statistics
      allocator = nullptr;
    }
  }

  // Writes a record of what was sampled since the record before.
  void write(Box* box, uint64_t thread, uint64_t t_ns) {
    auto units = [](uint64_t bytes) { return std::min(bytes / MEMORY_UNIT, MEMORY_MOST); };
    Record record{};
    record.kind = static_cast<uint8_t>(kind);
    record.t_ns = t_ns;
    record.pass = place >> PASS_SHIFT & PASS_MASK;
    record.flags = (is_exact ? 0 : FLAG_AT_LEAST) | (is_inferred ? FLAG_INFERRED : 0);
    record.thread = static_cast<uint8_t>(thread);
    record.step = static_cast<uint32_t>(box->step);
    record.module = static_cast<uint32_t>(place >> MODULE_SHIFT);
    record.call = static_cast<uint32_t>(place & CALL_MASK);
    record.subject = static_cast<uint32_t>(units(peak));
    record.extra = units(allocated) | units(reserved) << MEMORY_RESERVED_SHIFT;
    box->put(record);
    peak = place = 0;
    is_exact = is_inferred = false;
    is_growing = has_grown;
    has_grown = false;
  }
};
inline DeviceMemory device_memory;

// Called when a thread goes from one place to another. Costs one comparison without an accelerator.
inline void leave_place(uint64_t leaving, uint64_t entering, uint64_t t_ns) {
  DeviceMemory& self = device_memory;
  if (self.allocator == nullptr) return;
  if (self.is_due(leaving, entering, t_ns))
    self.sample(leaving, t_ns);
  else
    self.has_skipped = true;
}

inline void record_memory(Box* box, uint64_t thread, uint64_t place, uint64_t t_ns) {
  DeviceMemory& self = device_memory;
  if (self.allocator != nullptr) self.sample(place, t_ns);
  if (self.allocator != nullptr && self.has_sample) self.write(box, thread, t_ns);
}

// -- functions for Python -------------------------------------------------------------------------

// memory_begin(type, index, kind): follows a device that the job has initialised. Returns False
// if its allocator has no statistics.
inline PyObject* memory_begin(PyObject*, PyObject* args) {
  const char* type;
  int index, kind;
  if (!PyArg_ParseTuple(args, "sii", &type, &index, &kind)) return nullptr;
  device_memory = DeviceMemory{};
  try {
    auto* allocator = c10::GetAllocator(c10::Device(std::string(type)).type());
    device_memory.allocator = dynamic_cast<c10::DeviceAllocator*>(allocator);
  } catch (const std::exception&) {
  }
  device_memory.device = static_cast<c10::DeviceIndex>(index);
  device_memory.kind = kind;
  if (device_memory.allocator != nullptr)
    device_memory.sample(0, now_ns());  // a later rise of the peak counts from here
  return PyBool_FromLong(device_memory.allocator != nullptr);
}

// memory_record(box, thread, place): takes a sample and writes a record.
inline PyObject* memory_record(PyObject*, PyObject* args) {
  PyObject* box;
  unsigned long long thread, place;
  if (!PyArg_ParseTuple(args, "OKK", &box, &thread, &place)) return nullptr;
  auto* native_box = reinterpret_cast<Box*>(box);
  if (native_box->words != nullptr) record_memory(native_box, thread, place, now_ns());
  Py_RETURN_NONE;
}

// memory_now() -> (allocated, reserved, peak) of the last sample, or None.
inline PyObject* memory_now(PyObject*, PyObject*) {
  const DeviceMemory& now = device_memory;
  if (now.allocator == nullptr || !now.has_sample) Py_RETURN_NONE;
  return Py_BuildValue("(KKK)", now.allocated, now.reserved, now.highest_ever);
}

// memory_end(): takes no more samples.
inline PyObject* memory_end(PyObject*, PyObject*) {
  device_memory = DeviceMemory{};
  Py_RETURN_NONE;
}

}  // namespace torchwhere
