// The time of each part of the running step: the same as `blackbox/step_clock.py`. All of this runs
// with the GIL.
#pragma once

#include <Python.h>

#include <cstdint>

#include <c10/core/GradMode.h>

namespace torchwhere {

// As in `blackbox/step_clock.py`. The record of a step has all but the first.
constexpr int OTHER = 0, DATA = 1, FORWARD = 2, BACKWARD = 3, OPTIMIZER = 4, CHECKPOINT = 5,
              EVALUATION = 6, PARTS = 7;
// As in `core/place.py`.
constexpr int FORWARD_PASS = 1, BACKWARD_PASS = 2, OPTIMIZER_PASS = 4,
              RECOMPUTE_PASS = 9, SHAPE_INFERENCE_PASS = 13;

constexpr int part_of_pass(uint64_t pass) {
  switch (pass) {
    case FORWARD_PASS:
    case SHAPE_INFERENCE_PASS:
      return FORWARD;
    case BACKWARD_PASS:
    case RECOMPUTE_PASS:
      return BACKWARD;
    case OPTIMIZER_PASS:
      return OPTIMIZER;
    default:
      return OTHER;
  }
}

// A box creates it as zeros: then no thread is timed.
struct StepClock {
  uint64_t cursor;  // of the thread that is timed
  uint64_t since_ns;
  uint64_t ns[PARTS];  // of the parts of this step, until `since_ns`
  int open_part;       // a part that was begun explicitly; 0 if there is none
  int pass_part;       // the part of the thread's pass
  bool is_evaluation;  // whether the outermost module call only evaluates
  unsigned char part;  // the part that runs

  void add(uint64_t t_ns) {
    if (t_ns > since_ns) ns[part] += t_ns - since_ns, since_ns = t_ns;
    int of_pass = pass_part == FORWARD && is_evaluation ? EVALUATION : pass_part;
    part = static_cast<unsigned char>(open_part ? open_part : of_pass);
  }

  void move(uint64_t own_cursor, uint64_t pass, uint64_t t_ns) {
    if (own_cursor != cursor) return;
    pass_part = part_of_pass(pass);
    add(t_ns);
  }

  // Times this thread from now on, from 0.
  void restart(uint64_t own_cursor, uint64_t pass, uint64_t t_ns) {
    if (own_cursor != cursor) open_part = 0, is_evaluation = false;
    cursor = own_cursor;
    pass_part = part_of_pass(pass);
    for (uint64_t& part_ns : ns) part_ns = 0;
    since_ns = t_ns;
    add(t_ns);
  }
};

// Whether a module is in evaluation mode, and computes no gradients.
inline bool evaluates(PyObject* module) {
  if (c10::GradMode::is_enabled()) return false;
  PyObject* training = PyObject_GetAttrString(module, "training");
  if (training == nullptr) PyErr_Clear();
  Py_XDECREF(training);
  return training == Py_False;
}

}  // namespace torchwhere
