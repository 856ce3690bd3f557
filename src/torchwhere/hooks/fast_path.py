"""How backwards, optimizer steps and training steps begin and end, as far as the native part does
that: nothing without it.

It does only what Python has done before. What it must know for that it learns here: the way from a
hook of ours to the user's line, and the names of optimizers. Whoever asks it goes on as ever where
it says that it has not done it.
"""

from __future__ import annotations

from functools import cache
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import Kind
from torchwhere.hooks import python_stack
from torchwhere.hooks.threads import BACKWARD_WORD, OPTIMIZER_WORD

if TYPE_CHECKING:
    from torchwhere.native import extension
    from torchwhere.native.load import NativeExtension

_MOST_CODES = 1 << 12  # on the ways that are learned; whatever comes then is left to Python
_NONE: tuple[str, ...] = ()


class FastPath:
    """What the native part does instead of Python, which is nothing: its own class has these names
    too, and comes first."""

    __slots__ = _NONE
    is_paused: bool  # the next backward is Python's: something may be new
    ends_after_backward: bool  # `end_backward` is to say that there is more to do

    def begin_backward(self, _args: tuple[Any, ...]) -> int | None:
        """Where the thread was before; None: this one is for Python. Given are the engine's
        arguments, without the first."""
        return None

    def end_backward(self, _below: int) -> bool:
        """Of a backward that began here. Whether there is more to do."""
        return False

    def begin_optimizer(self) -> bool:
        """Whether it was done."""
        return False

    def end_optimizer(self, _optimizer: Any) -> bool:
        """Whether it was done, and with it the end of the step, if it is one."""
        return False

    def next_step(self, _step: int) -> bool:
        """Whether it was done."""
        return False

    def rest(self, _until_ns: int, _counts_steps: bool, _looked_at: tuple[Any, ...]) -> None:
        """Python has seen to what there is to do between steps: until then, or until one of these
        has another size."""

    def wake(self) -> None:
        """Python is to be asked the next time."""

    def learn_line(self, _frame: FrameType | None, _line: int) -> None:
        """From this frame, a hook of ours, the way leads to that line."""

    def learn_name(self, _name: str, _entry: int) -> None:
        """The id of an optimizer's name."""


class PythonFastPath(FastPath):
    """All of it is Python's."""

    __slots__ = ("ends_after_backward", "is_paused")

    def __init__(self) -> None:
        self.is_paused = self.ends_after_backward = False


class _Learning(FastPath):
    """The half of the native one that is Python's."""

    __slots__ = _NONE
    _codes: dict[int, CodeType]  # by their ids; kept, so that their ids stay their own
    _lines: Any
    _names: dict[str, int]

    def learn_line(self, frame: FrameType | None, line: int) -> None:
        way = python_stack.way_out(frame)
        if way and line and len(self._codes) + len(way) <= _MOST_CODES:
            *between, users = way
            self._codes |= {id(passed.f_code): passed.f_code for passed in way}
            for passed in between:
                self._lines[id(passed.f_code)] = 0
            self._lines[id(users.f_code) + 1 + users.f_lasti] = line

    def learn_name(self, name: str, entry: int) -> None:
        self._names[name] = entry


@cache
def _type_of(native: NativeExtension) -> type[extension.FastPath]:
    return type(
        "NativePasses", (native.FastPath, _Learning), {"__slots__": ("_codes", "_lines", "_names")}
    )


def make_fast_path(box: BoxWriter, *, calls: Any, steps: Any, steppers: set[int]) -> FastPath:
    """Those of a watch. `steps` is the sum of all steps, `steppers` the optimizers that have
    stepped in this one."""
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
        BACKWARD_WORD,
        OPTIMIZER_WORD,
        int(Kind.OPTIMIZER),
        int(Kind.STEP_END),
        int(Kind.STEP_BEGIN),
    )
    fast_path._codes, fast_path._lines, fast_path._names = {}, lines, names
    made: FastPath = fast_path
    return made
