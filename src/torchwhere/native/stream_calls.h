// The collectives that block a stream which is not that of the job, as those of FSDP.
#pragma once

#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "place_marks.h"

namespace torchwhere {

// The last collective that has blocked each stream except that of the job.
class StreamCalls {
 public:
  void add(const c10::Stream& stream, const Mark& mark) {
    std::lock_guard<std::mutex> guard(lock_);
    for (auto& [other, last] : calls_) {
      if (other != stream) continue;
      last = mark;
      return;
    }
    if (calls_.size() < MOST_LANES) calls_.emplace_back(stream, mark);
  }

  std::optional<Mark> find(const c10::Stream& stream) {
    std::lock_guard<std::mutex> guard(lock_);
    for (auto& [other, last] : calls_)
      if (other == stream) return last;
    return std::nullopt;
  }

  void clear() {
    std::lock_guard<std::mutex> guard(lock_);
    calls_.clear();
  }

 private:
  std::mutex lock_;
  std::vector<std::pair<c10::Stream, Mark>> calls_;
};
inline StreamCalls* stream_calls = new StreamCalls;  // never freed: threads may still use it at exit

// Marks the end of a collective that has been launched and blocks the current stream.
//
// If that is not the stream of the job, the mark has no time. The stream has nothing to execute until
// the collective is done, and CUDA leaves it at that; an event with a time makes it wait on the
// device, where other streams then wait behind it. On an H200 that four ranks shared, a step of FSDP2
// became 7 % longer.
inline void mark_end(c10::DeviceIndex index, Mark mark) noexcept {
  if (!device_progress->is_on) return;
  try {
    c10::impl::VirtualGuardImpl guard(device_progress->type);
    c10::Stream stream = guard.getStream(c10::Device(device_progress->type, index));
    if (stream.id() != job_stream) {
      mark.point = Point::ENDED;
      stream_calls->add(stream, mark);
    }
  } catch (const std::exception&) {  // not an error of the device: the wait will be unknown
  }
  device_progress->mark(index, now_ns(), mark);
}

}  // namespace torchwhere
