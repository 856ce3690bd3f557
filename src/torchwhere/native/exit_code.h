// Completes the record of a process that ends: only after the end of Python is its exit code known.
#pragma once

#include <Python.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace torchwhere {

constexpr int EXIT_CODES = 256;

// The text that each exit code writes, one after the other and all of one size.
struct ExitText {
  pid_t process = 0;  // 0: no text
  std::string path;
  off_t position = 0;
  std::string of_codes;
};

inline ExitText* exit_text = nullptr;  // never deleted: `exit` runs after other destructors

inline void write_exit_code(int status, void*) {
  const ExitText& text = *exit_text;
  size_t code = static_cast<size_t>(status & (EXIT_CODES - 1));
  if (text.process != getpid() || code == 0) return;  // a forked child has another end
  int file = open(text.path.c_str(), O_WRONLY | O_CLOEXEC);
  if (file < 0) return;
  size_t size = text.of_codes.size() / EXIT_CODES;
  [[maybe_unused]] ssize_t written =
      pwrite(file, text.of_codes.data() + code * size, size, text.position);
  close(file);
}

// on_exit_code(path, position, texts). Does nothing if the C library does not tell the code.
inline PyObject* on_exit_code(PyObject*, PyObject* args) {
  const char* path;
  Py_ssize_t position;
  PyObject* texts;
  if (!PyArg_ParseTuple(args, "ynS", &path, &position, &texts)) return nullptr;
#ifdef __GLIBC__
  if (exit_text == nullptr) {
    exit_text = new ExitText;
    on_exit(write_exit_code, nullptr);
  }
  size_t size = static_cast<size_t>(PyBytes_GET_SIZE(texts));
  *exit_text = {getpid(), path, position, std::string(PyBytes_AS_STRING(texts), size)};
#endif
  Py_RETURN_NONE;
}

}  // namespace torchwhere
