"""Compiles the native part: one call of the system's C++ compiler, with the headers that torch and
Python bring along.

Takes about fifteen seconds. The finished library trains a small model in a process of its own
before it gets its name; it gets it all at once, so that a job that starts meanwhile finds a whole
one or none. What is missing is said in a sentence (`TorchwhereError`).
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

# Not asked of torch.utils.cpp_extension: that imports setuptools, which may not be there.
_TORCH = Path(torch.__file__).parent
_HEADERS = (_TORCH / "include", _TORCH / "include" / "torch" / "csrc" / "api" / "include")
_COMPILERS = ("c++", "g++", "clang++")
_STANDARDS = ("c++20", "c++17")  # newer torch needs the one, older compilers know only the other
_MOST_SAID = 4  # lines of a compiler's complaint
_TIMEOUT_S = 600


def build(*, anew: bool = False, timeout_s: float = _TIMEOUT_S) -> tuple[Path, bool]:
    """Where the library is, and whether it was built just now."""
    path = library()
    if os.path.exists(path) and not anew:
        return path, False
    compiler = check_tools()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=BUILDING) as caches:
            made = Path(caches) / FOLDER / path.name
            made.parent.mkdir()
            _compile(compiler, made, timeout_s)
            checksum_file(made).write_text(checksum(made))
            _try_out(caches, timeout_s)
            # The checksum first: in between there is an old library that does not fit it, which is
            # refused, or none.
            os.replace(checksum_file(made), checksum_file(path))
            os.replace(made, path)
        failure_file(path).unlink(missing_ok=True)
    except OSError as error:
        raise TorchwhereError(
            f"the native part cannot be written to {path.parent}: {error.strerror or error}"
        ) from None
    return path, True


def check_tools() -> list[str]:
    """The compiler. What is missing to build with is a `TorchwhereError`."""
    compiler = _compiler()
    _check_headers()
    return compiler


def _compiler() -> list[str]:
    if sys.platform != "linux" or sys.byteorder != "little":
        raise TorchwhereError(
            f"the native part is for Linux on little-endian machines; this is {sys.platform}"
        )
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise TorchwhereError(
            "the native part needs a Python with a GIL; this one is free-threaded"
        )
    asked = shlex.split(os.environ.get("CXX", ""))
    found = next((name for name in asked[:1] or _COMPILERS if shutil.which(name)), None)
    if found is None:
        looked_for = asked[0] if asked else ", ".join(_COMPILERS)
        raise TorchwhereError(
            f"no C++ compiler is there ({looked_for}): install g++, or name one in CXX"
        )
    return asked or [found]


def _check_headers() -> None:
    python = Path(sysconfig.get_path("include")) / "Python.h"
    if not python.exists():
        raise TorchwhereError(
            f"the headers of Python are not there ({python}): install python3-dev, or what it is"
            " called here"
        )
    if not (_HEADERS[0] / "ATen" / "core" / "dispatch" / "Dispatcher.h").exists():
        raise TorchwhereError(
            "this torch came without its C++ headers: the native part cannot be built for it"
        )


def _compile(compiler: list[str], to: Path, timeout_s: float) -> None:
    said = ""
    for standard in _STANDARDS:
        done = _run(_command(compiler, standard, to), "compiling the native part", timeout_s)
        if done.returncode == 0:
            return
        said = said or done.stderr
    errors = [line for line in said.splitlines() if "error" in line] or said.splitlines()
    raise TorchwhereError(
        "the compiler could not build the native part: " + "; ".join(errors[:_MOST_SAID])
    )


def _command(compiler: list[str], standard: str, to: Path) -> list[str]:
    headers = [*map(str, _HEADERS), sysconfig.get_path("include")]
    return [
        *(
            *compiler,
            f"-std={standard}",
            "-O2",
            "-fPIC",
            "-shared",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
        ),
        *("-Wno-invalid-offsetof", "-Wno-missing-field-initializers"),
        *(
            f'-DTORCHWHERE_BUILT_FOR="{built_for()}"',
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ),
        *(part for folder in headers for part in ("-isystem", folder)),
        *(
            str(SOURCES / "native.cpp"),
            "-o",
            str(to),
            f"-L{_TORCH / 'lib'}",
            "-ltorch_cpu",
            "-lc10",
        ),
    ]


def _try_out(caches: str, timeout_s: float) -> None:
    """It must have watched a small job before it gets its name, one with no GPU and torch as it is
    by itself."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
    env |= {"XDG_CACHE_HOME": caches, "CUDA_VISIBLE_DEVICES": ""}
    done = _run(
        [sys.executable, "-m", "torchwhere", "native", "--check"], "its trial", timeout_s, env
    )
    if done.returncode < 0:
        raise TorchwhereError(
            "the native part was built and crashes in its trial:"
            f" {signal.Signals(-done.returncode).name}"
        )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        why = said[-1].removeprefix("torchwhere: ") if said else "no word why"
        raise TorchwhereError(f"the native part was built and failed its trial: {why}")


def _run(
    line: list[str], what: str, timeout_s: float, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            line, capture_output=True, text=True, timeout=timeout_s, check=False, env=env
        )
    except subprocess.TimeoutExpired:
        raise TorchwhereError(f"{what} took longer than {timeout_s:.0f} s") from None
