"""The label of a box: what is known of it without its records. Enough to sort boxes into runs and
to find their processes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torchwhere.blackbox.box import Box, Counts
from torchwhere.blackbox.file_format import Geometry

# cursors and counters lie before the ring, at the same place in every box
_USUAL = Geometry(capacity=1)
_KEPT = (
    *(
        "rank",
        "world_size",
        "run_id",
        "store",
        "restart",
        "host",
        "pid",
        "pid_started",
        "pid_namespace",
        "stack_signal",
    ),
    *("started_ns", "folder", "oom_counter", "oom_kills", "flight_recorder", "counted"),
)


class BoxOrSummary(Protocol):
    """A box, or the label of one."""

    @property
    def path(self) -> Path: ...
    @property
    def meta(self) -> dict[str, Any]: ...
    @property
    def counts(self) -> Counts: ...
    @property
    def problems(self) -> Sequence[str]: ...
    @property
    def rank(self) -> int: ...
    @property
    def run(self) -> tuple[str, int]: ...
    @property
    def is_readable(self) -> bool: ...
    @property
    def last_ns(self) -> int: ...
    @property
    def lacks_counts(self) -> bool: ...
    @property
    def progress(self) -> int: ...
    @property
    def beat_ns(self) -> int: ...


@dataclass(frozen=True, slots=True)
class BoxSummary:
    """Of a box that is in its file: where, whose, and how well it was read."""

    path: Path
    rank: int
    run: tuple[str, int]
    is_readable: bool
    last_ns: int  # wall clock of its last record, or of its start
    lacks_counts: bool
    progress: int  # what its cursors and counters came to: another one if it was written to since
    meta: dict[str, Any] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    problems: tuple[str, ...] = ()
    beat_ns: int = 0  # wall clock of its last heartbeat


def label(box: Box) -> BoxSummary:
    meta = {name: box.meta[name] for name in _KEPT if name in box.meta}
    return BoxSummary(
        path=box.path,
        rank=box.rank,
        run=box.run,
        is_readable=box.is_readable,
        last_ns=box.last_ns,
        lacks_counts=box.lacks_counts,
        progress=box.progress,
        meta=meta,
        counts=box.counts,
        problems=tuple(box.problems),
        beat_ns=box.beat_ns,
    )


def progress_of(path: Path) -> int:
    """The pulse of a box as it is now: a few KB are read."""
    try:
        with path.open("rb") as file:
            file.seek(_USUAL.cursors_at)
            return zlib.crc32(file.read(_USUAL.ring_at - _USUAL.cursors_at))
    except OSError:
        return 0
