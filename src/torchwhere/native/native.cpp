// The native extension of torchwhere: the hot paths of `blackbox/writer.py` and of `hooks/` in C++.
// The Python code is the reference. The extension handles only what Python has handled before, and
// leaves everything else to Python. `torchwhere native` builds it for one torch and one Python; see
// `docs/overhead.md`. `extension.pyi` describes it to the type checker.
#include "box.h"
#include "collective_kernel.h"
#include "device_progress.h"
#include "exit_code.h"
#include "modules.h"
#include "fast_path.h"
#include "memory.h"
#include "note_numbers.h"
#include "place_marks.h"
#include "stream_waits.h"
#include "terminate.h"
#include "thread_track.h"

namespace {

PyMethodDef functions[] = {
    {"begin", torchwhere::begin, METH_VARARGS, nullptr},
    {"pause", torchwhere::pause, METH_NOARGS, nullptr},
    {"abandon", torchwhere::abandon, METH_NOARGS, nullptr},
    {"end", torchwhere::end, METH_NOARGS, nullptr},
    {"defer_to_python", torchwhere::defer_to_python, METH_O, nullptr},
    {"learn_call", torchwhere::learn_call, METH_VARARGS, nullptr},
    {"forget_calls", torchwhere::forget_calls, METH_NOARGS, nullptr},
    {"recorded", torchwhere::recorded, METH_NOARGS, nullptr},
    {"passed", torchwhere::passed, METH_NOARGS, nullptr},
    {"recent", torchwhere::recent, METH_NOARGS, nullptr},
    {"check_frames", torchwhere::check_frames, METH_O, nullptr},
    {"device_begin", torchwhere::device_begin, METH_VARARGS, nullptr},
    {"device_end", torchwhere::device_end, METH_NOARGS, nullptr},
    {"device_abandon", torchwhere::device_abandon, METH_NOARGS, nullptr},
    {"device_ready", torchwhere::device_ready, METH_NOARGS, nullptr},
    {"device_reach", torchwhere::method(torchwhere::device_reach), METH_FASTCALL, nullptr},
    {"device_mark", torchwhere::method(torchwhere::device_mark), METH_FASTCALL, nullptr},
    {"device_launched", torchwhere::method(torchwhere::device_launched), METH_FASTCALL, nullptr},
    {"device_method", torchwhere::device_method, METH_VARARGS, nullptr},
    {"device_step", torchwhere::method(torchwhere::device_step), METH_FASTCALL, nullptr},
    {"device_note", torchwhere::device_note, METH_VARARGS, nullptr},
    {"device_fail", torchwhere::device_fail, METH_O, nullptr},
    {"device_status", torchwhere::device_status, METH_NOARGS, nullptr},
    {"terminate_begin", torchwhere::terminate_begin, METH_O, nullptr},
    {"terminate_end", torchwhere::terminate_end, METH_NOARGS, nullptr},
    {"on_exit_code", torchwhere::on_exit_code, METH_VARARGS, nullptr},
    {"memory_begin", torchwhere::memory_begin, METH_VARARGS, nullptr},
    {"memory_record", torchwhere::memory_record, METH_VARARGS, nullptr},
    {"memory_now", torchwhere::memory_now, METH_NOARGS, nullptr},
    {"memory_end", torchwhere::memory_end, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "torchwhere_native",
    nullptr,
    -1,
    functions,
    nullptr,
    nullptr,
    nullptr,
    nullptr};

bool add(PyObject* module, PyType_Spec* spec) {
  PyObject* type = PyType_FromSpec(spec);
  bool is_added =
      type != nullptr && PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type)) == 0;
  Py_XDECREF(type);
  return is_added;
}

}  // namespace

PyMODINIT_FUNC PyInit_torchwhere_native() {
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  for (PyType_Spec* spec :
       {&torchwhere::box_spec,
        &torchwhere::count_spec,
        &torchwhere::track_spec,
        &torchwhere::buckets_spec,
        &torchwhere::int_map_spec,
        &torchwhere::counts_spec,
        &torchwhere::calls_spec,
        &torchwhere::sum_spec,
        &torchwhere::fast_path_spec}) {
    if (!add(module, spec)) {
      Py_DECREF(module);
      return nullptr;
    }
  }
  constexpr long log_length = static_cast<long>(torchwhere::LOG_MASK) + 1;
  if (PyModule_AddStringConstant(module, "built_for", TORCHWHERE_BUILT_FOR) < 0 ||
      PyModule_AddIntConstant(module, "LOG_LENGTH", log_length) < 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
