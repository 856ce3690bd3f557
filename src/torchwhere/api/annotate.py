"""The functions that a watched program calls: `where()`, `step()`, `note()`, `phase()`.

They do nothing without a watch and while dynamo traces. Their own errors never reach the program;
only a wrong argument raises.
"""

from __future__ import annotations

from typing import Any, Literal, Self, overload

from torch.compiler import is_dynamo_compiling

from torchwhere.api.watch import current
from torchwhere.blackbox.file_format import NO_STEP
from torchwhere.core.device_place import DevicePlace
from torchwhere.core.place import Place, unknown_place
from torchwhere.hooks import _torch, python_stack
from torchwhere.hooks.decorate import Function, decorated
from torchwhere.recorder import identity
from torchwhere.recorder.own_device import NO_WATCH


@overload
def where(*, device: Literal[False] = False) -> Place: ...


@overload
def where(*, device: Literal[True]) -> DevicePlace: ...


@_torch.unseen
def where(*, device: bool = False) -> Place | DevicePlace:
    """Return the current place of the calling thread, or of the device.

    Args:
        device: Return how far the GPU of this process has come, beside the place of the calling
            thread. This never waits for the device.

    Returns:
        A `Place`: the step, pass, module and line. Without a watch only the rank is known, and
        `certainty` is `unknown`. With `device=True` a `DevicePlace`: the last place that the device
        has reached, and how far it is behind; `problem` says why if that is not known.

    Raises:
        TypeError: `device` is not a bool.

    Example:
        place = torchwhere.where()
        print(place)  # rank 0, step 12, forward of layers.3.mlp, train.py:48
        print(torchwhere.where(device=True).place)  # rank 0, step 11, backward of layers.0.mlp
    """
    if not isinstance(device, bool):
        raise TypeError(f"where(device={device!r}): expected True or False")
    session = current()
    if session is None:
        place = unknown_place(identity.rank_and_world()[0])
        return DevicePlace(place, problem=NO_WATCH) if device else place
    place = session.recorder.place(python_stack.caller(0))
    return session.recorder.device_place(place) if device else place


def step(number: int | None = None) -> None:
    """Mark the beginning of a training step. From then on, optimizers no longer count the steps.

    Args:
        number: The number of the step. Without it, the next number; the first step is 0.

    Raises:
        ValueError: `number` is not an integer of 0 or more, or it is too large for a box.

    Example:
        for number, batch in enumerate(loader):
            torchwhere.step(number)
            train(batch)
    """
    if number is not None and (not isinstance(number, int) or not 0 <= number < NO_STEP):
        raise ValueError(
            f"step({number!r}): expected a step number of 0 or more, below {NO_STEP}, or no"
            " argument for the next step"
        )
    session = current()
    if session is not None and not is_dynamo_compiling():
        recorder = session.recorder
        # the first call names the step that has been running since the start of the watch
        if number is None:
            number = recorder.step + recorder.step_is_users
        recorder.step_is_users = True
        if number != recorder.step:
            with session.errors:
                session.next_step(number)


def note(text: str, /, **fields: Any) -> None:
    """Record a note at the current place. Does nothing without a watch.

    Args:
        text: The text of the note.
        **fields: Further values, of any type that JSON can hold, and tensors. Pass a tensor of a
            GPU without `.item()`: the call does not wait for the GPU, and its numbers appear in the
            note when the GPU has computed them.

    Example:
        torchwhere.note("loss spike", loss=loss, batch=index)
    """
    session = current()
    if session is not None and not is_dynamo_compiling():
        with session.errors:
            session.recorder.note(str(text), fields, frame=python_stack.caller(0))


class phase:  # noqa: N801 - called like a function: `with phase("data"):`
    """A named part of a step: a context manager and a decorator.

    Phases can be nested, and they work on any thread and in coroutines. One object can be used many
    times, also inside itself and on several threads at once. For a decorated coroutine function,
    the phase lasts from its beginning to its end, including the time it awaits. For a decorated
    generator function, it lasts while the generator computes an item, not while its caller uses it.

    Args:
        name: The name of the phase.

    Raises:
        ValueError: `name` is empty or not a string.

    Example:
        with torchwhere.phase("data"):
            batch = next(loader)

        @torchwhere.phase("evaluate")
        def evaluate(model): ...
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"phase({name!r}): expected a name")
        self._name = name

    def __repr__(self) -> str:
        return f"phase({self._name!r})"

    # The check for dynamo comes first: otherwise dynamo would guard on whether a watch is running.

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
