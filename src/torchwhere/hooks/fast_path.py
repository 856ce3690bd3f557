"""Lets the native extension record the start and the end of backwards, optimizer steps and
training steps.

The native extension repeats what Python has recorded before. It learns two things here: the frames
from a hook to the user's line, and the ids of optimizer names. Each method returns whether the
native extension has recorded the event; otherwise the caller records it in Python. Without the
native extension no method does anything.
"""

from __future__ import annotations

from functools import cache
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, cast

from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import Kind
from torchwhere.hooks import python_stack
from torchwhere.hooks.threads import BACKWARD_PLACE, OPTIMIZER_PLACE

if TYPE_CHECKING:
    from torchwhere.native import extension
    from torchwhere.native.load import NativeExtension

_MOST_CODES = 1 << 12  # code objects learned; Python records calls from further ones
_SITE_SHIFT = 48  # as in `fast_path.h`: an address has fewer bits
_MOST_SITES = 1 << 15
_NONE: tuple[str, ...] = ()


class FastPath:
    """The interface, with methods that do nothing. The native class overrides them."""

    __slots__ = _NONE
    is_paused: bool  # Python records the next backward: something may be new
    ends_after_backward: bool  # `end_backward` must return True: a training step ends with it

    def begin_backward(self, _args: tuple[Any, ...]) -> int | None:
        """Begin a backward, from the arguments of the engine without the first. Returns the packed
        place of the thread before it; None if Python must record it."""
        return None

    def end_backward(self, _below: int) -> bool:
        """End a backward that `begin_backward` began. Returns whether Python must end a training
        step."""
        return False

    def begin_optimizer(self) -> bool:
        """Begin an optimizer step. Returns whether it is recorded."""
        return False

    def end_optimizer(self, _optimizer: Any) -> bool:
        """End an optimizer step, and the training step if it ends too. Returns whether it is
        recorded."""
        return False

    def next_step(self, _step: int) -> bool:
        """Begin the next training step. Returns whether it is recorded."""
        return False

    def rest(self, _until_ns: int, _counts_steps: bool, _looked_at: tuple[Any, ...]) -> None:
        """Let the native extension record steps alone until a time, or until one of these
        containers has another size: Python has done its work between steps."""

    def wake(self) -> None:
        """Let Python record the next step."""

    def learn_line(self, _frame: FrameType | None, _line: int) -> None:
        """Learn the id of the user's line that the frames from `_frame` on, a hook, lead to."""

    def learn_name(self, _name: str, _entry: int) -> None:
        """Learn the id of the name of an optimizer."""


class PythonFastPath(FastPath):
    """The fast path without the native extension: Python records everything."""

    __slots__ = ("ends_after_backward", "is_paused")

    def __init__(self) -> None:
        self.is_paused = self.ends_after_backward = False


class _Learning(FastPath):
    """The Python part of the native fast path."""

    __slots__ = _NONE
    _codes: dict[int, CodeType]  # by their ids; referenced, so that the ids stay unique
    _lines: Any
    _names: dict[str, int]
    _sites: dict[int, int]  # numbers of instructions of frameworks

    def learn_line(self, frame: FrameType | None, line: int) -> None:
        frames = python_stack.frames_to_user(frame)
        has_room = len(self._sites) < _MOST_SITES
        if frames and line and has_room and len(self._codes) + len(frames) <= _MOST_CODES:
            *between, users = frames
            self._codes |= {id(passed.f_code): passed.f_code for passed in frames}
            site = 0
            for passed in between:
                is_framework = python_stack.is_framework(passed.f_code)
                self._lines[id(passed.f_code)] = int(is_framework)
                if is_framework and not site:
                    site = self._framework_site(passed)
            self._lines[(site << _SITE_SHIFT) + _instruction(users)] = line

    def _framework_site(self, frame: FrameType) -> int:
        """The number, from 1, of an instruction of a framework."""
        key = _instruction(frame)
        if key not in self._sites:
            self._sites[key] = self._lines[key] = len(self._sites) + 1
        return self._sites[key]

    def learn_name(self, name: str, entry: int) -> None:
        self._names[name] = entry


def _instruction(frame: FrameType) -> int:
    """A key for the instruction that a frame has reached. A code object is longer than its
    instructions, so it is unique, and not the id of any code object."""
    return id(frame.f_code) + 1 + frame.f_lasti


@cache
def _type_of(native: NativeExtension) -> type[extension.FastPath]:
    return type(
        "NativeFastPath",
        (native.FastPath, _Learning),
        {"__slots__": ("_codes", "_lines", "_names", "_sites")},
    )


def make_fast_path(box: BoxWriter, *, calls: Any, steps: Any, steppers: set[int]) -> FastPath:
    """The fast path of a watch. `steps` is the phase node of the steps, `steppers` has the ids of
    the optimizers that have stepped in this training step."""
    if box.native is None or box.native_box is None or steps.under_way is None:
        return PythonFastPath()
    lines, names = box.native.IntMap(), dict[str, int]()
    fast_path: Any = _type_of(box.native)(
        box.native_box,
        calls,
        lines,
        names,
        steppers,
        steps,
        steps.ended,
        steps.under_way,
        BACKWARD_PLACE,
        OPTIMIZER_PLACE,
        int(Kind.OPTIMIZER),
        int(Kind.STEP_END),
        int(Kind.STEP_BEGIN),
    )
    fast_path._codes, fast_path._lines, fast_path._names = {}, lines, names
    fast_path._sites = {}
    return cast(FastPath, fast_path)
