"""Reads a run: the folder of boxes that one job left, or is writing.

Takes a folder, gives a `BoxRun`: one box per rank of the newest run in it. Boxes of earlier runs or
restarts are kept apart and counted, missing ranks are named. A `RunSummary` is the same with labels
instead of boxes, for those who do not need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.lazy_boxes import LazyBoxes
from torchwhere.blackbox.reader import BoxReader, read_box
from torchwhere.blackbox.summary import BoxOrSummary, BoxSummary, label
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.events import Event
from torchwhere.core.results import Shown

_LATE_START_NS = 60 * 1_000_000_000  # ranks of one run may begin this far apart
_FEW = 256  # boxes that are kept in memory together
_MOST_CAVEATS = 32  # about single ranks

B = TypeVar("B", bound=BoxOrSummary)


@dataclass(slots=True, repr=False)
class RunSummary(Shown, Generic[B]):
    """One job: its boxes, or their labels, by rank; and what is not there."""

    noun: ClassVar[str] = "box"  # what a rank leaves

    folder: Path
    boxes: Mapping[int, B]
    # boxes of earlier runs or restarts in the same folder
    earlier: list[Path] = field(default_factory=list)
    unreadable: list[B] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        sizes = [
            size
            for box in self.labels.values()
            if isinstance(size := box.meta.get("world_size"), int)
        ]
        return max([*sizes, len(self.boxes)])

    @property
    def labels(self) -> Mapping[int, BoxOrSummary]:
        """What is known of every box without reading one."""
        return self.boxes.labels if isinstance(self.boxes, LazyBoxes) else self.boxes

    def in_order(self) -> Iterator[tuple[int, B]]:
        """The boxes by rank, one at a time."""
        for rank in sorted(self.boxes):
            yield rank, self.boxes[rank]

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.boxes]

    def caveats(self) -> list[str]:
        """What a reader should know before trusting the rest: missing ranks, torn records, foreign
        files."""
        said = []
        missing = self.missing
        if missing:
            said.append(
                f"{len(self.boxes)} of {self.world_size} ranks: no {self.noun} of rank"
                f" {_few(missing)}"
            )
        of_ranks = []
        for rank, box in sorted(self.labels.items()):
            of_ranks += [f"rank {rank}: {problem}" for problem in box.problems]
            if torn := box.counts.torn + box.counts.torn_entries:
                of_ranks.append(
                    f"rank {rank}: {torn} torn or damaged record{'s' * (torn > 1)} left out"
                )
        of_ranks += [
            f"{box.path.name}: {problem}" for box in self.unreadable for problem in box.problems
        ]
        said += of_ranks[:_MOST_CAVEATS]
        if len(of_ranks) > _MOST_CAVEATS:
            said.append(f"and {len(of_ranks) - _MOST_CAVEATS} more of this kind")
        return said


@dataclass(slots=True, repr=False)
class BoxRun(RunSummary[Box]):
    """One job, with all that its boxes hold."""

    def events(
        self,
        *,
        ranks: set[int] | None = None,
        kinds: set[str] | None = None,
        last: int | None = None,
    ) -> Iterator[Event]:
        """Events rank by rank, each rank's in its own order: clocks of different hosts do not order
        them."""
        for rank, box in self.in_order():
            if ranks is None or rank in ranks:
                yield from box.events(kinds=kinds, last=last)


def read_run(
    folder: str | Path, *, on_progress: Callable[[int, int], None] | None = None
) -> BoxRun:
    """Read the newest run in a folder. Raises `TorchwhereError` when there is nothing there to
    read.

    The boxes of a large one are read when they are asked for: to go through it twice takes twice
    the time, not the memory. `on_progress` is told how many boxes have been read, of how many; of a
    large run, also while somebody goes through it.
    """
    files = box_files(folder)
    is_small, tell = len(files) <= _FEW, on_progress or (lambda _done, _of: None)
    reader, found = BoxReader(), []
    for count, path in enumerate(files, 1):
        found.append(_box(path) if is_small else _label(reader, path))
        tell(count, len(files) if is_small else 2 * len(files))
    if is_small:
        return BoxRun(
            Path(folder), *choose(Path(folder), [box for box in found if isinstance(box, Box)])
        )
    chosen, earlier, unreadable = choose(
        Path(folder), [label for label in found if isinstance(label, BoxSummary)]
    )
    lazy_boxes = LazyBoxes(
        chosen, on_read=lambda count: tell(min(len(files) + count, 2 * len(files)), 2 * len(files))
    )
    return BoxRun(
        Path(folder),
        lazy_boxes,
        earlier,
        [Box(one.path, problems=list(one.problems)) for one in unreadable],
    )


def _box(path: Path) -> Box:
    try:
        return read_box(path)
    except TorchwhereError as error:  # not ours to read, or deleted since the folder was listed
        return Box(path=path, problems=[str(error)])


def _label(reader: BoxReader, path: Path) -> BoxSummary:
    try:
        return label(reader.read(path))
    except TorchwhereError as error:  # deleted since the folder was listed
        return label(Box(path=path, problems=[str(error)]))


def box_files(folder: str | Path) -> list[Path]:
    """The boxes in a folder, by rank. Raises `TorchwhereError` when there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise TorchwhereError(
            f"there is no folder {folder}. Record one with: torchwhere run --out {folder} train.py"
        )
    # a pipe of that name would be waited for
    files = [path for path in folder.glob("*.box") if path.is_file()]
    files.sort(key=lambda path: (len(path.name.partition(".")[0]), path.name))
    if not files:
        raise TorchwhereError(
            f"{folder} holds no black box (*.box). Record one with: torchwhere run --out {folder}"
            " train.py"
        )
    return files


def choose(folder: Path, boxes: list[B]) -> tuple[dict[int, B], list[Path], list[B]]:
    """Of the boxes in a folder, those of the newest run by rank, the paths of earlier ones, and
    what cannot be read."""
    readable = [box for box in boxes if box.is_readable]
    unreadable = [box for box in boxes if not box.is_readable]
    if not readable:
        problems = "; ".join(sorted({problem for box in unreadable for problem in box.problems}))
        raise TorchwhereError(f"none of the {len(boxes)} boxes in {folder} can be read: {problems}")
    readable.sort(key=_started_ns)
    newest = readable[-1]
    chosen = _last_life([box for box in readable if _is_of_one_job(box, newest)])
    earlier = [box.path for box in readable if chosen.get(box.rank) is not box]
    return chosen, earlier, unreadable


def _is_of_one_job(box: BoxOrSummary, newest: BoxOrSummary) -> bool:
    """Whether two boxes are of one job, by what their launcher said."""
    ports = {port_of(box), port_of(newest)} - {""}
    if (
        box.run[0] != newest.run[0]
        or box.meta.get("world_size") != newest.meta.get("world_size")
        or len(ports) > 1
    ):
        return False
    return not _was_over(box, newest)


def port_of(box: BoxOrSummary) -> str:
    """The port of the job's own store: of each life another one, with most launchers. Its address
    may have several names."""
    return str(box.meta.get("store", "")).rpartition(":")[2]


def _was_over(box: BoxOrSummary, newest: BoxOrSummary) -> bool:
    """Whether a box was last written well before the newest one began: a rank of an earlier run
    under the same name."""
    return box.last_ns < _started_ns(newest) - _LATE_START_NS


def _last_life(boxes: list[B]) -> dict[int, B]:
    """Of the boxes of one job, in the order of their start, those since its last restart.

    Each agent of torchrun counts its own failures, so in one life hosts may be at different counts
    (pytorch issue 135712), and at the same one in two lives. But all ranks end before one begins
    again: a life is over when a rank is there anew, in another process, or when the count of a host
    goes up.
    """
    last = max(box.run[1] for box in boxes)
    newest = {box.rank: box for box in boxes if box.run[1] == last}
    processes = {(box.rank, _process(box)) for box in boxes if box.run[1] == last}
    # all hosts count the same: no clock is needed
    if len(newest) == len(processes) == boxes[-1].meta.get("world_size"):
        return newest
    life: dict[int, B] = {}
    counts: dict[str, int] = {}
    for box in boxes:
        host, before = str(box.meta.get("host")), life.get(box.rank)
        if (before is not None and _process(before) != _process(box)) or box.run[1] > counts.get(
            host, box.run[1]
        ):
            life, counts = {}, {}
        life[box.rank] = box
        counts[host] = box.run[1]
    return life


def _process(box: BoxOrSummary) -> tuple[str, str]:
    # what stands in a box may be anything
    return str(box.meta.get("host")), str(box.meta.get("pid"))


def _started_ns(box: BoxOrSummary) -> int:
    started = box.meta.get("started_ns", 0)
    return started if isinstance(started, int) else 0


def _few(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (
        f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    )
