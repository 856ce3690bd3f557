"""The native extension that `build.py` compiles and `load.py` loads, for the type checker.

The C++ sources say what each function does. `tests/test_native.py` compares this file with the
built module. Python passes packed places and ids as ints; an int that does not fit is an error.
"""

from array import array
from collections.abc import Iterator, Sized
from mmap import mmap
from types import CodeType
from typing import Any, Self, TypeVar, overload

_T = TypeVar("_T")

built_for: str
LOG_LENGTH: int

# all-reduces of DDP (`reductions.h`)
def begin(box: Box, engine_code: CodeType, turns: Count, /) -> None: ...
def pause() -> None: ...
def abandon() -> None: ...
def end() -> None: ...
def defer_to_python(whether: bool, /) -> None: ...
def recorded() -> int: ...
def passed() -> int: ...
def recent() -> list[tuple[int, int, int]]: ...
def check_frames(code: CodeType, /) -> bool: ...
def device_begin(box: Box, lanes_at: int, times_at: int, progress_shift: int, /) -> bool: ...
def device_end() -> None: ...
def device_abandon() -> None: ...
def device_mark(
    device_type: int,
    index: int,
    point: int,
    record: int,
    counter: int,
    count: int,
    place: int,
    step: int,
    issued_ns: int,
    /,
) -> None: ...
def device_type(name: str, /) -> int: ...
def device_status() -> dict[str, int | str]: ...

class Box:
    step: int
    main_cursor: int
    def __new__(cls, region: mmap, ring_at: int, capacity: int, /) -> Self: ...
    def record(
        self,
        kind: int,
        t_ns: int,
        pass_: int = 0,
        flags: int = 0,
        thread: int = 0,
        step: int = 0,
        module: int = 0,
        call: int = 0,
        line: int = 0,
        graph: int = 0,
        subject: int = 0,
        beneficiary: int = 0,
        param: int = 0,
        extra: int = 0,
        /,
    ) -> int: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...

class Count:
    def __new__(cls, first: int = 0, /) -> Self: ...
    def __iter__(self) -> Iterator[int]: ...
    def __next__(self) -> int: ...

class ThreadTrack:
    top: int
    count: int
    cursor: int
    number: int
    below_optimizer: list[int]
    def use(self, seqs: array[int] | None, marks: array[int] | None, /) -> None: ...
    def move(self, box: Box, place: int, line: int = ..., /) -> bool: ...
    def is_here(self, box: Box, /) -> None: ...

class Buckets:
    task: int
    next: int
    turn: int
    def __new__(cls) -> Self: ...
    def learn(
        self,
        index: int,
        label: int,
        numbers: Count,
        counter: int,
        kind: int,
        pass_: int,
        flags: int,
        module: int,
        call: int,
        subject: int,
        beneficiary: int,
        param: int,
        /,
    ) -> None: ...
    def forget(self) -> None: ...

class IntMap:
    def __new__(cls) -> Self: ...
    @overload
    def get(self, key: int, /) -> int | None: ...
    @overload
    def get(self, key: int, default: _T, /) -> int | _T: ...
    @overload
    def pop(self, key: int, /) -> int | None: ...
    @overload
    def pop(self, key: int, default: _T, /) -> int | _T: ...
    def clear(self) -> None: ...
    def __setitem__(self, key: int, value: int, /) -> None: ...

class Counts:
    def __new__(cls) -> Self: ...
    def get(self, place: int, default: int, /) -> int: ...
    def clear(self) -> None: ...
    def __setitem__(self, place: int, count: int, /) -> None: ...
    def __delitem__(self, place: int, /) -> None: ...

class Calls:
    def __new__(
        cls,
        box: Box,
        bases: IntMap,
        calls: Counts,
        recompute_bit: int,
        inherited: int,
        backward_pass: int,
        pipelining: str,
        enter_kind: int,
        exit_kind: int,
        /,
    ) -> Self: ...
    def enter(self, module: object, /) -> int | None: ...
    def entered(self, place: int, below: int, /) -> int: ...
    def leave(self, below: int, /) -> None: ...

class Sum:
    count: int
    total_ns: int
    max_ns: int
    running: int
    begun_ns: int

class FastPath:
    is_paused: bool
    ends_after_backward: bool
    def __new__(
        cls,
        box: Box,
        calls: Counts,
        lines: IntMap,
        names: dict[str, int],
        steppers: set[int],
        steps: Sum,
        ended: int,
        under_way: int,
        backward_place: int,
        optimizer_place: int,
        optimizer_kind: int,
        step_end_kind: int,
        step_begin_kind: int,
        /,
    ) -> Self: ...
    def rest(self, until_ns: int, counts_steps: bool, containers: tuple[Sized, ...], /) -> None: ...
    def wake(self) -> None: ...
    def begin_backward(self, args: tuple[Any, ...], /) -> int | None: ...
    def end_backward(self, below: int, /) -> bool: ...
    def begin_optimizer(self) -> bool: ...
    def end_optimizer(self, optimizer: object, /) -> bool: ...
    def next_step(self, step: int, /) -> bool: ...
