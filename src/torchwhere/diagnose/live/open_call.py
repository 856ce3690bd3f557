"""Finds the collective that a rank waits in, of those that it has reached.

An asynchronous collective does not block the stream of the device that issues it, so a device may
have reached several that another rank has not. They complete in order, and the rank waits in the
first of them. The doctor does the same (`device_stalls.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from torchwhere.blackbox.issued import Issued
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.string_table import P2P, StreamName, op_of
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.events import Kind
from torchwhere.diagnose.live.ranks import RankNow


def first_open(rank: RankNow, call: Issued, awaited: Iterable[RankNow]) -> Issued:
    """The first call in the stream of `call` that the awaited ranks have not reached; `call` itself
    if that is not known. `rank` has reached `call` last."""
    behind = [other for other in awaited if _reached(other, call.stream) < call.number]
    numbers = [_first_unreached(other, call.stream) for other in behind]
    known = [number for number in numbers if number is not None]
    number = min(known, default=call.number)
    if len(known) < len(numbers) or number >= call.number:
        return call
    op = _op_at(rank, call, number)
    return call if op is None else replace(call, op=op, number=number)


def _reached(rank: RankNow, stream: StreamName) -> int:
    """How many calls of a stream a rank is known to have reached."""
    return rank.live_box.counts().get(stream, 0)


def _first_unreached(rank: RankNow, stream: StreamName) -> int | None:
    """The number of the first call of a stream that a rank has not reached; None if it has issued
    calls since the last look at its device, and it is not known which of them are in the stream."""
    if rank.device is None or rank.device.pending:
        return _reached(rank, stream)
    issued = rank.issued
    return issued.number + 1 if issued is not None and issued.stream == stream else None


def _op_at(rank: RankNow, call: Issued, number: int) -> str | None:
    """The op of an earlier call in the same stream; None if the ring has lost it."""
    if call.stream.source >= 0:
        return call.op  # a stream of messages has one op
    try:
        box = read_box(rank.live_box.path)
    except TorchwhereError:
        return None
    records = box.records[box.records["kind"] == int(Kind.COLLECTIVE)]
    for subject in np.unique(records["subject"][records["extra"] == number]).tolist():
        op, group = op_of(box.value(subject))
        if group == call.stream.group and op not in P2P:
            return op
    return None
