"""Reads untrusted pickles of plain data safely.

Takes bytes, gives dicts, lists, tuples, strings, numbers, booleans and None. A pickle is a program;
the interpreter (`pickle_machine.py`) knows only the instructions that build plain data. It imports
and calls nothing, whatever the file contains. It allocates nothing because a file announces it: a
string is cut out of the bytes that are there. `Caps` limits work, memory and depth.

Limits: keys are strings, tuples hold no containers, and a container never changes after its first
reuse, so that nothing contains itself. Dumps of the flight recorder need no more.
"""

from __future__ import annotations

from typing import Any

from torchwhere.flight_recorder.limits import CAPS, Caps, CutShortError, RefusedFileError
from torchwhere.flight_recorder.pickle_machine import EndOfDataError, PickleMachine


def loads(data: bytes, *, caps: Caps = CAPS) -> Any:
    """The value of a pickle.

    Raises:
        RefusedFileError: The pickle is damaged, too large, or more than plain data.
        CutShortError: The file ends before its value does.
    """
    if len(data) > caps.bytes:
        raise RefusedFileError(f"{len(data)} bytes; at most {caps.bytes} are read")
    machine = PickleMachine(data, caps)
    try:
        return machine.run()
    except EndOfDataError:
        raise CutShortError(
            f"cut short: it ends at byte {len(data)}, in the middle of its data", machine.salvaged()
        ) from None
