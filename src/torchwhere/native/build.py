"""Compiles the native extension: one call of a C++ compiler, with the headers of torch and Python.

Takes about fifteen seconds. The new library first trains a small model in a separate process. Then
it gets its final name in one atomic step, so that a job that starts in between finds a complete
library or none. If something is missing, `TorchwhereError` says what.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from torchwhere.core.errors import TorchwhereError
from torchwhere.native.load import (
    BUILDING,
    FOLDER,
    SOURCES,
    built_for,
    checksum,
    checksum_file,
    failure_file,
    library,
)

# Not from torch.utils.cpp_extension: it imports setuptools, which may be missing.
_TORCH = Path(torch.__file__).parent
_HEADERS = (_TORCH / "include", _TORCH / "include" / "torch" / "csrc" / "api" / "include")
_COMPILERS = ("c++", "g++", "clang++")
_STANDARDS = ("c++20", "c++17")  # newer torch needs C++20, older compilers know only C++17
_MAX_ERROR_LINES = 4  # of the compiler
_TIMEOUT_S = 600


def build(*, anew: bool = False, timeout_s: float = _TIMEOUT_S) -> tuple[Path, bool]:
    """Build the extension, unless it is built already.

    Args:
        anew: Build it even if it exists.
        timeout_s: Limit for the compiler, and for the test of the result.

    Returns:
        The path of the library, and whether this call built it.

    Raises:
        TorchwhereError: If it cannot be built or does not work.

    Example:
        >>> path, is_new = build()
    """
    path = library()
    if os.path.exists(path) and not anew:
        return path, False
    compiler = check_tools()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=BUILDING) as caches:
            new = Path(caches) / FOLDER / path.name
            new.parent.mkdir()
            _compile(compiler, new, timeout_s)
            checksum_file(new).write_text(checksum(new))
            _test(caches, timeout_s)
            # The checksum first: until the library follows, there is no library, or an old one that
            # does not match the checksum and is refused.
            os.replace(checksum_file(new), checksum_file(path))
            os.replace(new, path)
        failure_file(path).unlink(missing_ok=True)
    except OSError as error:
        raise TorchwhereError(
            f"the native extension cannot be written to {path.parent}: {error.strerror or error}"
        ) from None
    return path, True


def check_tools() -> list[str]:
    """Return the command of the compiler. Raises `TorchwhereError` if a tool is missing."""
    compiler = _compiler()
    _check_headers()
    return compiler


def _compiler() -> list[str]:
    if sys.platform != "linux" or sys.byteorder != "little":
        raise TorchwhereError(
            "the native extension needs Linux on a little-endian machine; this is"
            f" {sys.platform}, {sys.byteorder}-endian"
        )
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise TorchwhereError(
            "the native extension needs a Python with a GIL; this one is free-threaded"
        )
    users = shlex.split(os.environ.get("CXX", ""))
    names = users[:1] or _COMPILERS
    compiler = next((name for name in names if shutil.which(name)), None)
    if compiler is None:
        raise TorchwhereError(
            f"no C++ compiler found ({', '.join(names)}): install g++, or set CXX to a compiler"
        )
    return users or [compiler]


def _check_headers() -> None:
    python = Path(sysconfig.get_path("include")) / "Python.h"
    if not python.exists():
        raise TorchwhereError(
            f"Python.h not found ({python}): install the Python headers (python3-dev,"
            " python3-devel)"
        )
    if not (_HEADERS[0] / "ATen" / "core" / "dispatch" / "Dispatcher.h").exists():
        raise TorchwhereError(
            "this torch has no C++ headers: the native extension cannot be built for it"
        )


def _compile(compiler: list[str], to: Path, timeout_s: float) -> None:
    output = ""
    for standard in _STANDARDS:
        command = _command(compiler, standard, to)
        done = _run(command, name="compiling the native extension", timeout_s=timeout_s)
        if done.returncode == 0:
            return
        output = output or done.stderr
    errors = [line for line in output.splitlines() if "error" in line] or output.splitlines()
    raise TorchwhereError(
        "the compiler could not build the native extension: " + "; ".join(errors[:_MAX_ERROR_LINES])
    )


def _command(compiler: list[str], standard: str, to: Path) -> list[str]:
    options = ["-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"]
    options += ["-Wno-invalid-offsetof", "-Wno-missing-field-initializers"]
    options += [f'-DTORCHWHERE_BUILT_FOR="{built_for()}"']
    options += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    for folder in (*_HEADERS, sysconfig.get_path("include")):
        options += ["-isystem", str(folder)]
    libraries = [f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
    source = str(SOURCES / "native.cpp")
    return [*compiler, f"-std={standard}", *options, source, "-o", str(to), *libraries]


def _test(caches: str, timeout_s: float) -> None:
    """Let the new library watch a small job in a separate process, without a GPU and without
    settings of torch."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
    env |= {"XDG_CACHE_HOME": caches, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torchwhere", "native", "--check"]
    done = _run(command, name="the test of the native extension", timeout_s=timeout_s, env=env)
    if done.returncode < 0:
        raise TorchwhereError(
            "the native extension was built, but crashed in its test:"
            f" {signal.Signals(-done.returncode).name}"
        )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        why = lines[-1].removeprefix("torchwhere: ") if lines else "it printed no error"
        raise TorchwhereError(f"the native extension was built, but failed its test: {why}")


def _run(
    command: list[str], *, name: str, timeout_s: float, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, env=env
        )
    except subprocess.TimeoutExpired:
        raise TorchwhereError(f"{name} took longer than {timeout_s:.0f} s") from None
