// What the recording of events needs of the runtime of an accelerator, and of Python.
//
// Two functions of CUDA or HIP are looked up by name, so this needs no headers of theirs. One tells
// whether a stream is being captured into a graph. The other lets a thread call the runtime without
// breaking a capture in another thread.
#pragma once

#include <Python.h>
#include <dlfcn.h>

#include <string>

#include <c10/core/impl/VirtualGuardImpl.h>

namespace torchwhere {

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

// Sets which functions of the runtime this thread may call during a capture in another thread.
// Returns the mode that it had before.
inline int exchange_capture_mode(c10::DeviceType type, int mode) {
  static const Runtime runtime(type);
  if (runtime.exchange_capture_mode != nullptr) runtime.exchange_capture_mode(&mode);
  return mode;
}
constexpr int RELAXED = 2;  // all functions, and none of them breaks the capture

// Lets this thread call all functions of the runtime.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(c10::DeviceType type)
      : type_(type), before_(exchange_capture_mode(type, RELAXED)) {}
  ~RelaxedCapture() { exchange_capture_mode(type_, before_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  c10::DeviceType type_;
  int before_;
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

inline bool is_capturing(const c10::impl::VirtualGuardImpl& guard, const c10::Stream& stream) {
  static const Runtime runtime(stream.device_type());
  if (runtime.is_capturing == nullptr) return generic_is_capturing(guard, stream, 0);
  int status = 0;
  return runtime.is_capturing(stream.native_handle(), &status) != 0 || status != 0;
}

// Takes the GIL.
class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Whether this thread has the GIL. `PyGILState_Check` says so of every thread, once the process has
// created a sub-interpreter.
inline bool has_gil() {
#if PY_VERSION_HEX >= 0x030D0000
  PyThreadState* running = PyThreadState_GetUnchecked();
#else
  PyThreadState* running = _PyThreadState_UncheckedGet();
#endif
  return running != nullptr && running == PyGILState_GetThisThreadState();
}

// Releases the GIL, if this thread has it.
class WithoutGil {
 public:
  WithoutGil() : thread_(has_gil() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (thread_ != nullptr) PyEval_RestoreThread(thread_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* thread_;
};

}  // namespace torchwhere
