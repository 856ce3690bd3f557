"""Finds the native part that was built for this very torch, Python and torchwhere, and loads it; or
says why not.

Its file's name holds everything it depends on, and a second file its checksum: a library for
something else is never found, a damaged one never loaded (mapping a file that was cut is a dead
process, not an error). Nothing is compiled here.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import torch

from torchwhere.core.errors import TorchwhereError

log = logging.getLogger("torchwhere")

SOURCES = Path(__file__).parent
SWITCH = "TORCHWHERE_NATIVE"  # 0: never
NAME = "torchwhere_native"
FOLDER = "torchwhere"
BUILDING = "building-"  # begins the name of a folder that a library is built in

_loaded: dict[Path, Any] = {}  # a library that was refused: None


class RefusedLibraryError(Exception):
    """A library that is there and is not used; the message says why."""


def native() -> Any:
    """The native part, or None where it was not built, is switched off, or is not what it should be
    (said once)."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        path = library()
    except TorchwhereError:
        return None
    # not `path.exists()`, which raises in a home that is somebody else's
    if path not in _loaded and os.path.exists(path):
        try:
            _loaded[path] = load(path)
        except Exception as error:
            _loaded[path] = None
            log.warning(
                "torchwhere: the native part is there but not used: %s. Everything is recorded by"
                " Python's own code; `torchwhere native --anew` builds it again.",
                error,
            )
    return _loaded.get(path)


@cache
def built_for() -> str:
    """All that a library depends on, in one word: its sources, torch and how that was built, Python
    and its ABI."""
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in source_files())).hexdigest()[
        :12
    ]
    abi = "" if torch.compiled_with_cxx11_abi() else "-old"
    commit = (torch.version.git_version or "unknown")[:8]
    return f"{sources}-torch{torch.__version__}-{commit}{abi}-{sysconfig.get_config_var('SOABI')}"


def source_files() -> list[Path]:
    return sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])


def library() -> Path:
    """Where the library is, or would be."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(caches):
        raise TorchwhereError(
            "there is no home folder to keep the native part in: name another one in XDG_CACHE_HOME"
        )
    return Path(caches) / FOLDER / f"{NAME}-{built_for()}.so"


def failure_file(path: Path) -> Path:
    """Why it could not be built, if that was tried before a job."""
    return path.with_name(path.name + ".failed")


def checksum_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load(path: Path) -> Any:
    """Load a library that is whole and was built for this. Raises `RefusedLibraryError`, or what
    the system's loader says."""
    try:
        expected = checksum_file(path).read_text().strip()
    except OSError:
        raise RefusedLibraryError(f"{path} has no checksum beside it") from None
    if checksum(path) != expected:
        raise RefusedLibraryError(f"{path} is damaged")
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module: Any = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    if module.built_for != built_for():
        raise RefusedLibraryError(f"{path} was built for {module.built_for}, this is {built_for()}")
    if not module.check_frames(sys._getframe().f_code):
        raise RefusedLibraryError(
            "this Python lays out its frames in another way than the native part knows"
        )
    return module
