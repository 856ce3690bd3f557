"""Loads the native extension that was built for exactly this torch, Python and torchwhere.

The file name contains everything that the extension depends on, and a second file its checksum. So
an extension for another torch is never found, and a damaged one is never loaded: mapping a
truncated file would kill the process. This module compiles nothing.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from torchwhere.core.errors import TorchwhereError

if TYPE_CHECKING:
    from torchwhere.native import extension

log = logging.getLogger("torchwhere")

SOURCES = Path(__file__).parent
SWITCH = "TORCHWHERE_NATIVE"  # the environment variable; 0: never use the extension
NAME = "torchwhere_native"
FOLDER = "torchwhere"
BUILDING = "building-"  # prefix of the folder of a build that is running

_loaded: dict[Path, NativeExtension | None] = {}  # None for a refused library


class NativeExtension(Protocol):
    """The loaded module as a value. `extension.pyi` has the signatures."""

    built_for: str
    Box: type[extension.Box]
    Buckets: type[extension.Buckets]
    Calls: type[extension.Calls]
    Count: type[extension.Count]
    Counts: type[extension.Counts]
    FastPath: type[extension.FastPath]
    IntMap: type[extension.IntMap]
    Sum: type[extension.Sum]
    ThreadTrack: type[extension.ThreadTrack]

    def begin(
        self,
        box: extension.Box,
        code: CodeType,
        turns: extension.Count,
        ops: list[tuple[str, int, int, tuple[int, ...]]],
        role_of: Callable[[CodeType], int],
        /,
    ) -> None: ...
    def learn_call(
        self,
        box: extension.Box,
        frame: FrameType | None,
        label: int,
        numbers: extension.Count,
        counter: int,
        device_index: int,
        end: int,
        kind: int,
        flags: int,
        line: int,
        graph: int,
        subject: int,
        beneficiary: int,
        /,
    ) -> None: ...
    def forget_calls(self) -> None: ...
    def pause(self) -> None: ...
    def abandon(self) -> None: ...
    def end(self) -> None: ...
    def defer_to_python(self, whether: bool, /) -> None: ...
    def recorded(self) -> int: ...
    def passed(self) -> int: ...
    def recent(self) -> list[tuple[int, int, int]]: ...
    def check_frames(self, code: CodeType, /) -> bool: ...
    def device_begin(
        self,
        box: extension.Box,
        device_type: str,
        lanes_at: int,
        times_at: int,
        progress_shift: int,
        /,
    ) -> bool: ...
    def device_end(self) -> None: ...
    def device_abandon(self) -> None: ...
    def device_ready(self) -> None: ...
    def device_reach(
        self,
        index: int,
        record: int,
        counter: int,
        count: int,
        place: int,
        step: int,
        issued_ns: int,
        end: int,
        /,
    ) -> None: ...
    def device_mark(
        self,
        index: int,
        record: int,
        counter: int,
        count: int,
        place: int,
        step: int,
        issued_ns: int,
        point: int,
        /,
    ) -> None: ...
    def device_launched(self, work: object | None, /, *storages: int) -> None: ...
    def device_method(self, name: str, original: object, /) -> Callable[..., Any]: ...
    def device_step(self, box: extension.Box, place: int, record: int, /) -> None: ...
    def device_note(
        self,
        box: extension.Box,
        text_at: int,
        place: int,
        tensors: list[int],
        offsets: list[int],
        /,
    ) -> None: ...
    def device_fail(self, problem: str, /) -> None: ...
    def device_status(self) -> dict[str, int | str]: ...
    def terminate_begin(self, file: int, /) -> None: ...
    def terminate_end(self) -> None: ...
    def on_exit_code(self, path: bytes, position: int, texts: bytes, /) -> None: ...
    def memory_begin(self, device_type: str, index: int, kind: int, /) -> bool: ...
    def memory_record(self, box: extension.Box, thread: int, place: int, /) -> None: ...
    def memory_now(self) -> tuple[int, int, int] | None: ...
    def memory_end(self) -> None: ...
    def __hash__(self) -> int: ...


if TYPE_CHECKING:
    _checked: NativeExtension = extension  # mypy compares the protocol with the stub


class RefusedLibraryError(Exception):
    """A library exists but must not be used; the message says why."""


def native() -> NativeExtension | None:
    """Return the native extension; None if it is not built, switched off or refused.

    A refused library is logged once.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        path = library()
    except TorchwhereError:
        return None
    # not `path.exists()`, which raises in the home folder of another user
    if path not in _loaded and os.path.exists(path):
        try:
            _loaded[path] = load(path)
        except Exception as error:
            _loaded[path] = None
            log.warning(
                "torchwhere: the native extension is not used: %s. The Python code records"
                " everything; `torchwhere native --anew` builds the extension again.",
                error,
            )
    return _loaded.get(path)


@cache
def built_for() -> str:
    """Return everything that the extension depends on as one string: its sources, torch and how it
    was built, Python and its ABI."""
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in source_files())).hexdigest()[
        :12
    ]
    abi = "" if torch.compiled_with_cxx11_abi() else "-old"
    commit = (torch.version.git_version or "unknown")[:8]
    return f"{sources}-torch{torch.__version__}-{commit}{abi}-{sysconfig.get_config_var('SOABI')}"


def source_files() -> list[Path]:
    """Return the C++ files."""
    return sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])


def library() -> Path:
    """Return the path of the built library, whether it exists or not."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(caches):
        raise TorchwhereError(
            "there is no home folder for the native extension: set XDG_CACHE_HOME to a folder"
        )
    return Path(caches) / FOLDER / f"{NAME}-{built_for()}.so"


def failure_file(path: Path) -> Path:
    """Return the path of the file that says why an automatic build failed."""
    return path.with_name(path.name + ".failed")


def checksum_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load(path: Path) -> NativeExtension:
    """Load a library.

    Raises:
        RefusedLibraryError: If it is damaged, or was built for another torch or Python.
        ImportError: If the system cannot load it.
    """
    try:
        expected = checksum_file(path).read_text().strip()
    except OSError:
        raise RefusedLibraryError(f"the checksum file of {path} is missing") from None
    if checksum(path) != expected:
        raise RefusedLibraryError(f"{path} is damaged")
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = cast(NativeExtension, importlib.util.module_from_spec(spec))
    loader.exec_module(cast(ModuleType, module))
    if module.built_for != built_for():
        raise RefusedLibraryError(f"{path} was built for {module.built_for}, this is {built_for()}")
    if not module.check_frames(sys._getframe().f_code):
        raise RefusedLibraryError(
            "this Python stores its frames in a layout that the extension does not know"
        )
    return module
