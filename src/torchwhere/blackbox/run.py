"""Reads a run: the folder of boxes that one job left, or is writing.

Takes a folder, gives a `Run`: one box per rank of the newest run in it. Boxes of earlier runs or restarts are kept apart
and counted, missing ranks are named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from torchwhere.blackbox.reader import Box, read_box
from torchwhere.errors import TorchwhereError
from torchwhere.events import Event

_LATE_START_NS = 60 * 1_000_000_000  # ranks of one run may begin this far apart


@dataclass(slots=True)
class Run:
    """One job: its boxes by rank, and what is not there."""

    noun: ClassVar[str] = "box"  # what a rank leaves

    folder: Path
    boxes: dict[int, Box]
    earlier: list[Path] = field(default_factory=list)  # boxes of earlier runs or restarts in the same folder
    unreadable: list[Box] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        sizes = [size for box in self.boxes.values() if isinstance(size := box.meta.get("world_size"), int)]
        return max([*sizes, len(self.boxes)])

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.boxes]

    def caveats(self) -> list[str]:
        """What a reader should know before trusting the rest: missing ranks, torn records, foreign files."""
        said = []
        if self.missing:
            said.append(f"{len(self.boxes)} of {self.world_size} ranks: no {self.noun} of rank {_few(self.missing)}")
        for rank, box in sorted(self.boxes.items()):
            said += [f"rank {rank}: {problem}" for problem in box.problems]
            if torn := box.counts.torn + box.counts.torn_entries:
                said.append(f"rank {rank}: {torn} torn or damaged record{'s' * (torn > 1)} left out")
        said += [f"{box.path.name}: {problem}" for box in self.unreadable for problem in box.problems]
        return said

    def events(
        self, *, ranks: set[int] | None = None, kinds: set[str] | None = None, last: int | None = None
    ) -> Iterator[Event]:
        """Events rank by rank, each rank's in its own order: clocks of different hosts do not order them."""
        for rank, box in sorted(self.boxes.items()):
            if ranks is None or rank in ranks:
                yield from box.events(kinds=kinds, last=last)


def read_run(folder: str | Path) -> Run:
    """Read the newest run in a folder. Raises `TorchwhereError` when there is nothing there to read."""
    folder = Path(folder)
    if not folder.is_dir():
        raise TorchwhereError(f"there is no folder {folder}. Record one with: torchwhere run --out {folder} train.py")
    boxes = [read_box(path) for path in sorted(folder.glob("*.box"))]
    if not boxes:
        raise TorchwhereError(f"{folder} holds no black box (*.box). Record one with: torchwhere run --out {folder} train.py")
    readable = [box for box in boxes if box.geometry is not None and box.rank >= 0]
    unreadable = [box for box in boxes if box.geometry is None or box.rank < 0]
    if not readable:
        problems = "; ".join(sorted({problem for box in unreadable for problem in box.problems}))
        raise TorchwhereError(f"none of the {len(boxes)} boxes in {folder} can be read: {problems}")
    return _newest(folder, readable, unreadable)


def _newest(folder: Path, readable: list[Box], unreadable: list[Box]) -> Run:
    readable.sort(key=_started_ns)
    newest = readable[-1]
    boxes: dict[int, Box] = {}
    earlier: list[Path] = []
    for box in readable:
        if box.run != newest.run or box.meta.get("world_size") != newest.meta.get("world_size") or _was_over(box, newest):
            earlier.append(box.path)
            continue
        if box.rank in boxes:
            earlier.append(boxes[box.rank].path)
        boxes[box.rank] = box
    return Run(folder=folder, boxes=boxes, earlier=earlier, unreadable=unreadable)


def _was_over(box: Box, newest: Box) -> bool:
    """Whether a box was last written well before the newest one began: a rank of an earlier run under the same name."""
    last_ns = box.wall_ns(int(box.records["t_ns"].max())) if len(box.records) else _started_ns(box)
    return max(last_ns, _started_ns(box)) < _started_ns(newest) - _LATE_START_NS


def _started_ns(box: Box) -> int:
    started = box.meta.get("started_ns", 0)
    return started if isinstance(started, int) else 0


def _few(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
