"""The log of a report: notes, exceptions, ends and log lines of a few ranks side by side, and where
they first differ.

Takes boxes and the log files of a run, gives `LogDigest`. What ranks say is brought to one row if
it is the same but for its values (`diff/strip.py`), in the same step, and as often before in that
step. Whatever a ring has lost is no difference: rows are compared from the first step on that all
of these ranks still have.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import NO_STEP
from torchwhere.core.errors import TorchwhereError
from torchwhere.diagnose.diff import logs
from torchwhere.diagnose.diff.log_lines import Stripper, skeleton
from torchwhere.diagnose.report.texts import cut, event_text

MOST_RANKS = 8
_KINDS = {"note", "exception", "end"}
_MOST_EVENTS = 200  # of a rank
_MOST_LINES = 200  # of a file
_MOST_ROWS = 250
_LOG = "log"


class Said(NamedTuple):
    """One thing that a rank said."""

    step: int | None
    kind: str
    text: str
    value: str  # without what may differ between ranks
    flow: str  # without the values


@dataclass(frozen=True, slots=True)
class LogRow:
    """What ranks said at one place."""

    step: int | None
    cells: tuple[tuple[str, str] | None, ...]
    how: str | None  # "flow": somebody did not say it; "value": they said it of different values

    def to_dict(self) -> dict[str, Any]:
        cells = [list(cell) if cell is not None else None for cell in self.cells]
        return {"step": self.step, "cells": cells, "differs": self.how is not None, "how": self.how}


@dataclass(frozen=True, slots=True)
class LogDigest:
    """Rows in the order of the program: events by step, then the lines of log files."""

    ranks: tuple[int, ...]
    rows: tuple[LogRow, ...]

    @property
    def first_difference(self) -> int | None:
        for how in ("flow", "value"):
            for at, row in enumerate(self.rows):
                if row.how == how:
                    return at
        return None

    def to_dict(self) -> dict[str, Any]:
        rows = [row.to_dict() for row in self.rows]
        return {"ranks": list(self.ranks), "rows": rows, "first_difference": self.first_difference}


def log(boxes: Mapping[int, Box], files: Mapping[int, Path]) -> LogDigest:
    """What some ranks said, side by side."""
    ranks = tuple(sorted(boxes))[:MOST_RANKS]
    strippers = {
        rank: Stripper(
            rank, host if isinstance(host := boxes[rank].meta.get("host"), str) else None
        )
        for rank in ranks
    }
    from_step = max(
        (step for rank in ranks if (step := _first_whole(boxes[rank])) is not None), default=0
    )
    events = [list(_events(boxes[rank], strippers[rank])) for rank in ranks]
    lines = [list(_lines(files.get(rank), strippers[rank])) for rank in ranks]
    rows = [
        *_aligned(events, from_step),
        *_aligned(lines, 0, is_there=[bool(each) for each in lines]),
    ]
    return LogDigest(ranks, tuple(rows[-_MOST_ROWS:]))


def _first_whole(box: Box) -> int | None:
    """The first step of which nothing was overwritten; None if nothing ever was."""
    steps = box.records["step"][box.records["step"] != NO_STEP]
    return int(steps[0]) + 1 if box.counts.overwritten and len(steps) else None


def _events(box: Box, strip: Stripper) -> Iterator[Said]:
    for event in box.events(kinds=_KINDS, last=_MOST_EVENTS):
        text = event_text(event)
        value = strip(text)
        yield Said(event.place.step, event.kind, text, value, skeleton(value))


def _lines(path: Path | None, strip: Stripper) -> Iterator[Said]:
    if path is None:
        return
    try:
        last = deque(logs.Log(path, strip).lines(), maxlen=_MOST_LINES)
    except TorchwhereError:  # gone since the folder was listed
        return
    for _, line in last:
        text = cut(line)
        value = strip(text)
        yield Said(None, _LOG, text, value, skeleton(value))


def log_files(paths: Sequence[Path]) -> dict[int, Path]:
    """The files by rank; none where their names do not say."""
    try:
        return logs.ranks_of(paths) if paths else {}
    except TorchwhereError:
        return {}


# -- side by side ----------------------------------------------------------------------------------


def _aligned(
    said: Sequence[Sequence[Said]], from_step: int, *, is_there: Sequence[bool] | None = None
) -> list[LogRow]:
    """What ranks said, in rows. Ranks that have nothing to compare (`is_there`) are not missed."""
    keyed = [dict(_keyed(each)) for each in said]
    rows = []
    for key in _merged([list(each) for each in keyed]):
        cells = [each.get(key) for each in keyed]
        first = next(cell for cell in cells if cell is not None)
        expected = [cell for at, cell in enumerate(cells) if is_there is None or is_there[at]]
        how = _how(expected) if first.step is None or first.step >= from_step else None
        rows.append(
            LogRow(
                first.step,
                tuple(None if cell is None else (cell.kind, cell.text) for cell in cells),
                how,
            )
        )
    return rows


def _keyed(said: Iterable[Said]) -> Iterator[tuple[tuple[Any, ...], Said]]:
    """Each thing with what tells it apart from the others of its rank."""
    seen: Counter[tuple[Any, ...]] = Counter()
    for one in said:
        key = (one.step, one.kind, one.flow)
        yield (*key, seen[key]), one
        seen[key] += 1


def _how(cells: Sequence[Said | None]) -> str | None:
    if len(cells) < 2:
        return None
    known = [cell for cell in cells if cell is not None]
    if len(known) < len(cells):
        return "flow"
    return "value" if len({cell.value for cell in known}) > 1 else None


def _merged(lists: Sequence[list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """All keys, each once: by step, and in one step in an order that fits all ranks as far as there
    is one."""
    merged: list[tuple[Any, ...]] = []
    for keys in lists:
        at = {key: index for index, key in enumerate(merged)}
        after: dict[int, list[tuple[Any, ...]]] = {}
        last = -1
        for key in keys:
            if key in at:
                last = max(last, at[key])
            else:
                after.setdefault(last, []).append(key)
        merged = [
            *after.get(-1, []),
            *(one for index, key in enumerate(merged) for one in (key, *after.get(index, []))),
        ]
    return sorted(merged, key=lambda key: -1 if key[0] is None else key[0])
