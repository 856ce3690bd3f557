// Numbers of an accelerator, read back without waiting for it.
//
// A training thread enqueues a copy of a small tensor into pinned memory, and an event after it
// (`device_events.h`). When the event completes, the numbers are in host memory, and the harvester
// delivers them. The copy uses the current stream and allocates nothing on the device. The number of
// copies that are under way is bounded. Pinned memory is allocated once, at the first copy.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "box.h"

namespace torchwhere {

constexpr size_t SLOT_BYTES = 128, SLOTS = 256;

// Modes of the job (dispatch modes, tracing, functorch) must not see the operations of a copy.
class BelowModes {
 public:
  BelowModes() : without_modes_(modes()) {}

 private:
  static c10::DispatchKeySet modes() {
    return c10::DispatchKeySet(
        {c10::DispatchKey::Python,
         c10::DispatchKey::PythonTLSSnapshot,
         c10::DispatchKey::PythonDispatcher,
         c10::DispatchKey::PreDispatch,
         c10::DispatchKey::Functionalize,
         c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
         c10::DispatchKey::FuncTorchDynamicLayerBackMode});
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard without_modes_;
};

// Whether a tensor holds its own numbers in its memory, one after the other. A wrapper does not, nor
// does a tensor whose sign is applied when it is read.
inline bool holds_numbers(const at::Tensor& tensor) {
  static const c10::DispatchKeySet views(
      {c10::DispatchKey::Python,
       c10::DispatchKey::Functionalize,
       c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::Conjugate,
       c10::DispatchKey::Negative,
       c10::DispatchKey::ZeroTensor});
  return tensor.defined() && !tensor.key_set().has_any(views) &&
      tensor.layout() == c10::Layout::Strided && tensor.is_contiguous();
}

// Pinned memory in slots of one size. Never freed: a device may still write to it.
class PinnedSlots {
 public:
  std::atomic<size_t> under_way{0};  // copies of this watch that are not delivered

  // Takes a free slot; null if there is none, or if this accelerator has no pinned memory.
  char* take() {
    std::lock_guard<std::mutex> guard(lock_);
    if (!has_tried_) allocate();
    if (free_.empty()) return nullptr;
    char* slot = free_.back();
    free_.pop_back();
    return slot;
  }

  void give_back(char* slot) {
    std::lock_guard<std::mutex> guard(lock_);
    free_.push_back(slot);
  }

 private:
  void allocate() {
    has_tried_ = true;
    try {
      BelowModes below_modes;
      auto options = at::TensorOptions().dtype(at::kByte).device(at::kCPU).pinned_memory(true);
      memory_ = new at::Tensor(at::empty({static_cast<int64_t>(SLOTS * SLOT_BYTES)}, options));
      auto* data = static_cast<char*>(memory_->mutable_data_ptr());
      for (size_t at = SLOTS; at-- > 0;) free_.push_back(data + at * SLOT_BYTES);
    } catch (const std::exception&) {
    }
  }

  std::mutex lock_;
  bool has_tried_ = false;
  at::Tensor* memory_ = nullptr;
  std::vector<char*> free_;
};
inline PinnedSlots* pinned_slots = new PinnedSlots;

// Numbers in host memory.
struct Numbers {
  const char* data;
  at::ScalarType type;
  size_t count;
};
// Gets the box of the watch that is on, and the numbers.
using Delivery = std::function<void(Box*, const Numbers&)>;

// One copy that is under way. A slot whose copy was enqueued is free only after its delivery: until
// then the device may write to it.
class NumberCopy {
 public:
  NumberCopy(char* slot, const at::Tensor& tensor, Delivery delivery)
      : slot_(slot),
        numbers_{slot, tensor.scalar_type(), static_cast<size_t>(tensor.numel())},
        delivery_(std::move(delivery)) {}
  ~NumberCopy() {
    if (!is_enqueued_) pinned_slots->give_back(slot_);
  }
  NumberCopy(const NumberCopy&) = delete;
  NumberCopy& operator=(const NumberCopy&) = delete;

  // Enqueues the copy on the current stream of the tensor's device.
  void enqueue(const at::Tensor& tensor) {
    BelowModes below_modes;
    is_enqueued_ = true;
    ++pinned_slots->under_way;
    auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
    at::from_blob(slot_, tensor.sizes(), options).copy_(tensor, /*non_blocking=*/true);
  }

  // Called by the harvester, once, when the copy has completed.
  void deliver(Box* box) {
    delivery_(box, numbers_);
    is_enqueued_ = false;
    --pinned_slots->under_way;
  }

 private:
  char* slot_;
  Numbers numbers_;
  Delivery delivery_;
  bool is_enqueued_ = false;
};
using NumberCopyPtr = std::shared_ptr<NumberCopy>;

}  // namespace torchwhere
