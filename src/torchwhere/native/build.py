"""Compiles the native part: one call of the system's C++ compiler, with the headers that torch and Python bring along.

Takes about ten seconds. The finished library appears under its name all at once, so that a job that starts meanwhile finds a
whole one or none. What is missing is said in a sentence (`TorchwhereError`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from torchwhere.errors import TorchwhereError
from torchwhere.native.load import SOURCES, built_for, checksum, checksum_file, library, load

# Not asked of torch.utils.cpp_extension: that imports setuptools, which may not be there.
_TORCH = Path(torch.__file__).parent
_HEADERS = (_TORCH / "include", _TORCH / "include" / "torch" / "csrc" / "api" / "include")
_COMPILERS = ("c++", "g++", "clang++")
_STANDARDS = ("c++20", "c++17")  # newer torch needs the one, older compilers know only the other
_MOST_SAID = 4  # lines of a compiler's complaint
_TIMEOUT_S = 600


def build(*, anew: bool = False) -> tuple[Path, bool]:
    """Where the library is, and whether it was built just now."""
    path = library()
    if path.exists() and not anew:
        return path, False
    compiler = _compiler()
    _check_headers()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
            made = Path(folder) / path.name
            _compile(compiler, made)
            checksum_file(made).write_text(checksum(made))
            _try_out(made)
            # The checksum first: in between there is an old library that does not fit it, which is refused, or none.
            os.replace(checksum_file(made), checksum_file(path))
            os.replace(made, path)
    except OSError as error:
        raise TorchwhereError(f"the native part cannot be written to {path.parent}: {error.strerror or error}") from None
    return path, True


def _compiler() -> list[str]:
    if sys.platform != "linux" or sys.byteorder != "little":
        raise TorchwhereError(f"the native part is for Linux on little-endian machines; this is {sys.platform}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise TorchwhereError("the native part needs a Python with a GIL; this one is free-threaded")
    asked = shlex.split(os.environ.get("CXX", ""))
    found = next((name for name in (asked[:1] or _COMPILERS) if shutil.which(name)), None)
    if found is None:
        looked_for = asked[0] if asked else ", ".join(_COMPILERS)
        raise TorchwhereError(f"no C++ compiler is there ({looked_for}): install g++, or name one in CXX")
    return asked or [found]


def _check_headers() -> None:
    python = Path(sysconfig.get_path("include")) / "Python.h"
    if not python.exists():
        raise TorchwhereError(f"the headers of Python are not there ({python}): install python3-dev, or what it is called here")
    if not (_HEADERS[0] / "ATen" / "core" / "dispatch" / "Dispatcher.h").exists():
        raise TorchwhereError("this torch came without its C++ headers: the native part cannot be built for it")


def _compile(compiler: list[str], to: Path) -> None:
    said = ""
    for standard in _STANDARDS:
        done = subprocess.run(_command(compiler, standard, to), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode == 0:
            return
        said = said or done.stderr
    errors = [line for line in said.splitlines() if "error" in line] or said.splitlines()
    raise TorchwhereError("the compiler could not build the native part: " + "; ".join(errors[:_MOST_SAID]))


def _command(compiler: list[str], standard: str, to: Path) -> list[str]:
    headers = [*map(str, _HEADERS), sysconfig.get_path("include")]
    return [
        *(*compiler, f"-std={standard}", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"),
        *("-Wno-invalid-offsetof", "-Wno-missing-field-initializers"),
        *(f'-DTORCHWHERE_BUILT_FOR="{built_for()}"', f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
        *(part for folder in headers for part in ("-isystem", folder)),
        *(str(SOURCES / "native.cpp"), "-o", str(to), f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"),
    ]


def _try_out(path: Path) -> None:
    """It must load before it gets its name."""
    try:
        load(path)
    except Exception as error:
        raise TorchwhereError(f"the native part was built and cannot be used: {error}") from None
