// Writes the message of an uncaught C++ exception to the fault file. The watchdog thread of NCCL
// ends a process in this way: no Python code runs, and the exit code is that of any abort.
#pragma once

#include <Python.h>
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include <c10/util/Exception.h>

namespace torchwhere {

constexpr const char* UNCAUGHT = "Uncaught C++ exception: ";  // `processes/fault_handler.py` reads it
constexpr size_t MOST_MESSAGE = 4096;

inline std::atomic<int> message_file{-1};  // a file descriptor
inline std::terminate_handler handler_below = nullptr;  // the one that the last watch found
inline std::terminate_handler first_handler = nullptr;  // the one that the first watch found

// Functions of the C++ library that torch uses. Libraries of NVIDIA contain copies of it, and the
// linker may bind this extension to such a copy, which knows no exception of torch.
struct CppLibrary {
  std::terminate_handler (*set)(std::terminate_handler) = std::set_terminate;
  std::terminate_handler (*get)() = std::get_terminate;
  std::exception_ptr (*current)() = std::current_exception;

  CppLibrary() {
    void* library = dlopen("libstdc++.so.6", RTLD_NOLOAD | RTLD_LAZY);
    if (library == nullptr) return;
    find(library, "_ZSt13set_terminatePFvvE", &set);
    find(library, "_ZSt13get_terminatev", &get);
    find(library, "_ZSt17current_exceptionv", &current);
  }

 private:
  template <typename Function>
  static void find(void* library, const char* name, Function* function) {
    if (void* symbol = dlsym(library, name)) *function = reinterpret_cast<Function>(symbol);
  }
};

inline CppLibrary& cpp_library() {
  static CppLibrary library;
  return library;
}

inline std::string uncaught_message() {
  try {
    if (std::exception_ptr error = cpp_library().current()) std::rethrow_exception(error);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "of an unknown type";
  }
  return "";
}

[[noreturn]] inline void write_uncaught() {
  int file = message_file.exchange(-1);  // a second thread that ends the process writes nothing
  if (file >= 0) {
    std::string message = uncaught_message();
    if (!message.empty()) {
      message = UNCAUGHT + message.substr(0, MOST_MESSAGE) + "\n";
      if (::write(file, message.data(), message.size()) < 0) message.clear();  // the disk is full
    }
  }
  // A handler on top of this one may be the one below it too, since a later watch, and call it again.
  static thread_local bool is_running = false;
  auto next = std::exchange(is_running, true) ? first_handler : handler_below;
  if (next != nullptr) next();
  std::abort();
}

// terminate_begin(file)
inline PyObject* terminate_begin(PyObject*, PyObject* file) {
  long number = PyLong_AsLong(file);
  if (number == -1 && PyErr_Occurred() != nullptr) return nullptr;
  message_file = static_cast<int>(number);
  std::terminate_handler before = cpp_library().get();
  if (before != write_uncaught) {
    handler_below = before;
    if (first_handler == nullptr) first_handler = before;
    cpp_library().set(write_uncaught);
  }
  Py_RETURN_NONE;
}

// terminate_end(): a handler that was set on top of this one stays, and may still call it.
inline PyObject* terminate_end(PyObject*, PyObject*) {
  message_file = -1;
  if (cpp_library().get() == write_uncaught) cpp_library().set(handler_below);
  Py_RETURN_NONE;
}

}  // namespace torchwhere
