// References to objects of Python.
#pragma once

#include <Python.h>

#include <utility>

namespace torchwhere {

// A strong reference to an object of Python.
class Owned {
 public:
  explicit Owned(PyObject* object = nullptr) : object_(object) {}
  template <typename Object>
  explicit Owned(Object* object) : object_(reinterpret_cast<PyObject*>(object)) {}
  Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Owned(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyFrameObject* frame() const { return reinterpret_cast<PyFrameObject*>(object_); }
  PyCodeObject* code() const { return reinterpret_cast<PyCodeObject*>(object_); }

 private:
  PyObject* object_;
};

}  // namespace torchwhere
