"""The log section of a report: notes, exceptions, ends and log lines of a few ranks side by side.

Takes boxes and the log files of a run, gives `LogDigest`. Entries of several ranks share a row if
they are equal up to values (`diff/log_lines.py`), in the same step, and equally often before in
that step. An overwritten entry is not a difference: rows are compared from the first step that all
of these ranks recorded completely.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import NO_STEP
from torchwhere.blackbox.string_table import text_of
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.results import plain_fields
from torchwhere.diagnose.diff import logs
from torchwhere.diagnose.diff.log_lines import Stripper, skeleton
from torchwhere.diagnose.report.texts import cut, event_text

MOST_RANKS = 8
_KINDS = {"note", "exception", "end"}
_MOST_EVENTS = 200  # of a rank
_MOST_LINES = 200  # of a file
_MOST_ROWS = 250
_LOG = "log"


class LogEntry(NamedTuple):
    """One note, exception, end or log line of a rank."""

    step: int | None
    kind: str
    text: str
    value: str  # without what may differ between ranks
    flow: str  # also without values


@dataclass(frozen=True, slots=True)
class LogRow:
    """The entries of the ranks at one position."""

    step: int | None
    cells: tuple[tuple[str, str] | None, ...]
    how: str | None  # "flow": some ranks lack it; "value": they have different values

    def to_dict(self) -> dict[str, Any]:
        differs = {"differs": self.how is not None, "how": self.how}
        return plain_fields(self, "step", "cells") | differs


@dataclass(frozen=True, slots=True)
class LogDigest:
    """Rows in program order: events by step, then the lines of log files."""

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
        return plain_fields(self, "ranks", "rows", "first_difference")


def log(boxes: Mapping[int, Box], files: Mapping[int, Path]) -> LogDigest:
    """The entries of some ranks side by side."""
    ranks = tuple(sorted(boxes))[:MOST_RANKS]
    strippers = {rank: _stripper(boxes[rank]) for rank in ranks}
    first_steps = (_first_complete_step(boxes[rank]) for rank in ranks)
    from_step = max((step for step in first_steps if step is not None), default=0)
    events = [list(_events(boxes[rank], strippers[rank])) for rank in ranks]
    lines = [list(_lines(files.get(rank), strippers[rank])) for rank in ranks]
    rows = [
        *_aligned(events, from_step),
        *_aligned(lines, 0, has_log=[bool(of_rank) for of_rank in lines]),
    ]
    return LogDigest(ranks, tuple(rows[-_MOST_ROWS:]))


def _stripper(box: Box) -> Stripper:
    return Stripper(box.rank, text_of(box.meta, "host"))


def _first_complete_step(box: Box) -> int | None:
    """The first step without overwritten records; None if no record was overwritten."""
    steps = box.records["step"][box.records["step"] != NO_STEP]
    return int(steps[0]) + 1 if box.counts.overwritten and len(steps) else None


def _events(box: Box, strip: Stripper) -> Iterator[LogEntry]:
    for event in box.events(kinds=_KINDS, last=_MOST_EVENTS):
        text = event_text(event)
        value = strip(text)
        yield LogEntry(event.place.step, event.kind, text, value, skeleton(value))


def _lines(path: Path | None, strip: Stripper) -> Iterator[LogEntry]:
    if path is None:
        return
    try:
        last = deque(logs.Log(path, strip).lines(), maxlen=_MOST_LINES)
    except TorchwhereError:  # deleted since the folder was listed
        return
    for _, line in last:
        text = cut(line)
        value = strip(text)
        yield LogEntry(None, _LOG, text, value, skeleton(value))


def log_files(paths: Sequence[Path]) -> dict[int, Path]:
    """The files by rank; empty if their names do not show the ranks."""
    try:
        return logs.ranks_of(paths) if paths else {}
    except TorchwhereError:
        return {}


# -- side by side ----------------------------------------------------------------------------------


def _aligned(
    of_ranks: Sequence[Sequence[LogEntry]], from_step: int, *, has_log: Sequence[bool] | None = None
) -> list[LogRow]:
    """The entries of the ranks in rows. A rank without a log does not count as different."""
    keyed = [dict(_keyed(entries)) for entries in of_ranks]
    rows = []
    for key in _merged([list(of_rank) for of_rank in keyed]):
        entries = [of_rank.get(key) for of_rank in keyed]
        step = key[0]
        compared = [entry for at, entry in enumerate(entries) if has_log is None or has_log[at]]
        how = _how(compared) if step is None or step >= from_step else None
        cells = tuple(None if entry is None else (entry.kind, entry.text) for entry in entries)
        rows.append(LogRow(step, cells, how))
    return rows


def _keyed(entries: Iterable[LogEntry]) -> Iterator[tuple[tuple[Any, ...], LogEntry]]:
    """Each entry with a key that is unique within its rank."""
    seen: Counter[tuple[Any, ...]] = Counter()
    for entry in entries:
        key = (entry.step, entry.kind, entry.flow)
        yield (*key, seen[key]), entry
        seen[key] += 1


def _how(entries: Sequence[LogEntry | None]) -> str | None:
    if len(entries) < 2:
        return None
    if None in entries:
        return "flow"
    return "value" if len({entry.value for entry in entries if entry}) > 1 else None


def _merged(lists: Sequence[list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """All keys, each once: by step, and within a step in an order that suits all ranks if there is
    one."""
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
            *(new for index, key in enumerate(merged) for new in (key, *after.get(index, []))),
        ]
    return sorted(merged, key=lambda key: -1 if key[0] is None else key[0])
