"""Measures the parts of each step on the thread that trains: data, forward, backward and others.

The clock is always in exactly one part, so the parts of a step add up to its time. Three things
decide the part, in this order of priority: a part that was begun explicitly, an outermost module
call that only evaluates, and the pass of the thread. At the end of a step the clock writes one
record (`step_times.py` reads it).

Only one thread is timed: the one that ended the last step, and the main thread before that. Native
boxes have the same methods (`native/step_clock.h`).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from time import monotonic_ns
from typing import Protocol

from torchwhere.blackbox.file_format import pass_of
from torchwhere.core.events import SideKind
from torchwhere.core.place import Pass

_MOST_US = 0xFFFFFFFF


class StepPart(IntEnum):
    """The parts of a step that a clock measures. The file format stores these values."""

    OTHER = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    CHECKPOINT = 5
    EVALUATION = 6

    @property
    def label(self) -> str:
        return self.name.lower()


PART_BY_NAME = {part.label: part for part in StepPart if part is not StepPart.OTHER}
_PART_OF_PASS = {
    int(Pass.FORWARD): StepPart.FORWARD,
    int(Pass.SHAPE_INFERENCE): StepPart.FORWARD,
    int(Pass.BACKWARD): StepPart.BACKWARD,
    int(Pass.RECOMPUTE): StepPart.BACKWARD,
    int(Pass.OPTIMIZER): StepPart.OPTIMIZER,
}


class _HasStep(Protocol):
    step: int


class StepClock:
    """The clock without the native extension."""

    __slots__ = (
        "_counter",
        "_is_evaluation",
        "_ns",
        "_open_part",
        "_pass_part",
        "_record",
        "_since_ns",
        "clock_cursor",
        "part",
    )

    def __init__(self, record: Callable[..., int], counter: _HasStep) -> None:
        self._record = record
        self._counter = counter
        self.clock_cursor = 0  # of the thread that is timed; 0: none
        self._since_ns = 0
        self._ns = [0] * len(StepPart)  # of the parts of this step, until `_since_ns`
        self._open_part = 0  # a part that was begun explicitly
        self._pass_part = 0  # the part of the thread's pass
        self._is_evaluation = False
        self.part = 0  # the part that runs

    def start_clock(self, cursor: int, place: int) -> None:
        """Time the thread that has this cursor, from now on."""
        self._restart(cursor, place, monotonic_ns())

    def move_clock(self, cursor: int, place: int, t_ns: int) -> None:
        """A thread is at this packed place from now on."""
        if cursor == self.clock_cursor:
            self._pass_part = _PART_OF_PASS.get(pass_of(place), StepPart.OTHER)
            self._add(t_ns)

    def begin_part(self, cursor: int, part: int) -> bool:
        """Begin a part. Returns whether it has begun: inside another such part, and on other
        threads, nothing changes."""
        begins = cursor == self.clock_cursor and not self._open_part
        if begins:
            self._open_part = part
            self._add(monotonic_ns())
        return begins

    def end_part(self) -> None:
        """End a part that has begun."""
        self._open_part = 0
        self._add(monotonic_ns())

    def set_evaluation(self, cursor: int, whether: bool) -> None:
        """Set whether the outermost module call of a thread only evaluates."""
        if cursor == self.clock_cursor and whether != self._is_evaluation:
            self._is_evaluation = whether
            self._add(monotonic_ns())

    def end_step(self, cursor: int, place: int, thread: int) -> None:
        """Write the times of the step, and time the next one on this thread."""
        now_ns = monotonic_ns()
        self._add(now_ns)
        us = [min(part_ns // 1000, _MOST_US) for part_ns in self._ns[1:]]
        total_ns = sum(self._ns)
        self._record(
            SideKind.STEP_TIMES, now_ns, 0, 0, thread, self._counter.step, *us, 0, total_ns
        )
        self._restart(cursor, place, now_ns)

    def _restart(self, cursor: int, place: int, t_ns: int) -> None:
        if cursor != self.clock_cursor:
            self._open_part, self._is_evaluation = 0, False
        self.clock_cursor = cursor
        self._pass_part = _PART_OF_PASS.get(pass_of(place), StepPart.OTHER)
        self._ns = [0] * len(StepPart)
        self._since_ns = t_ns
        self._add(t_ns)

    def _add(self, t_ns: int) -> None:
        """Add the time since the last change to the part that ran, and find the one that runs
        now."""
        if t_ns > self._since_ns:
            self._ns[self.part] += t_ns - self._since_ns
            self._since_ns = t_ns
        evaluates = self._is_evaluation and self._pass_part == StepPart.FORWARD
        self.part = self._open_part or (StepPart.EVALUATION if evaluates else self._pass_part)
