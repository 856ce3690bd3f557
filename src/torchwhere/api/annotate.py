"""What a program says and asks while it is watched: `where()`, `step()`, `note()`, `phase()`.

Each does nothing while nobody watches and while dynamo traces, and what goes wrong in it never
reaches the program.
"""

from __future__ import annotations

from typing import Any, Self

from torch.compiler import is_dynamo_compiling

from torchwhere.api.watch import Function, current, quietly
from torchwhere.blackbox.file_format import NO_STEP
from torchwhere.core.place import Certainty, Place
from torchwhere.hooks import _torch, python_stack
from torchwhere.hooks.decorate import decorated
from torchwhere.recorder import identity


@_torch.unseen
def where() -> Place:
    """The place of the calling thread, now. Without a watch: the rank, and that nothing is
    known."""
    session = current()
    if session is None:
        return Place(
            rank=identity.rank_and_world()[0],
            step=None,
            pass_="outside",
            certainty=Certainty.UNKNOWN,
        )
    return session.recorder.place(python_stack.caller(0))


def step(number: int | None = None) -> None:
    """Say that a training step begins: `number`, or the next one (0 at first). Optimizers no longer
    count steps then."""
    if number is not None and (not isinstance(number, int) or not 0 <= number < NO_STEP):
        raise ValueError(
            f"step({number!r}): expected a step number of 0 or more, below {NO_STEP}, or nothing"
            " for the next one"
        )
    session = current()
    if session is not None and not is_dynamo_compiling():
        recorder = session.recorder
        # the first time, what has been running since the start is the step that begins
        if number is None:
            number = recorder.step + recorder.step_is_users
        recorder.step_is_users = True
        if number != recorder.step:
            quietly(session.next_step, number)


def note(text: str, /, **fields: Any) -> None:
    """Leave a note at this place, with any fields that JSON can hold. Does nothing while nobody
    watches."""
    session = current()
    if session is not None and not is_dynamo_compiling():
        quietly(session.recorder.note, str(text), fields, frame=python_stack.caller(0))


class phase:  # noqa: N801 - read as a noun of the program: `with phase("data"):`
    """A named part of a step: a context manager and a decorator. Nested as you like; on any thread,
    and in coroutines.

    One object may be used as often as you like, inside itself and on many threads at once. A
    coroutine function that is decorated is timed from its beginning to its end, what it awaits
    included; a generator function each time it runs, from being asked for an item until it gives
    one.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"phase({name!r}): expected a name")
        self._name = name

    def __repr__(self) -> str:
        return f"phase({self._name!r})"

    # Dynamo is asked first: it then leaves no guard on whether somebody watches.

    def __enter__(self) -> Self:
        if not is_dynamo_compiling() and (session := current()) is not None:
            session.phases.begin(self._name, python_stack.caller(1))
        return self

    def __exit__(self, *_error: object) -> None:
        if not is_dynamo_compiling() and (session := current()) is not None:
            session.phases.end(self._name)

    def __call__(self, function: Function) -> Function:
        if not callable(function):
            raise TypeError(f"{self!r} decorates a function, got {type(function).__name__}")
        return decorated(self, function)
