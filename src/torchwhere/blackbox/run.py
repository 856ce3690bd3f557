"""Reads a run: the folder with the boxes of one job, running or ended.

Takes a folder and returns a `BoxRun`: one box for each rank of the newest run in it. It lists boxes
of earlier runs and restarts separately, and names missing ranks. A `RunSummary` is the same with
summaries instead of boxes.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_names import is_set_aside
from torchwhere.blackbox.lazy_boxes import LazyBoxes
from torchwhere.blackbox.reader import WRITTEN_BY, BoxReader, read_box, read_or_empty
from torchwhere.blackbox.summary import BoxOrSummary, BoxSummary, started_ns, summarize
from torchwhere.core.errors import TorchwhereError, nothing_recorded
from torchwhere.core.events import Event
from torchwhere.core.rank_text import ranks_phrase, watched_phrase
from torchwhere.core.results import Shown
from torchwhere.core.sanitize import plural
from torchwhere.core.worker_pool import Progress, ProgressCounter

_LATE_START_NS = 60 * 1_000_000_000  # ranks of one run may start this far apart
_FEW = 256  # at most this many boxes are in memory together
_MAX_CAVEATS = 32  # about single ranks

B = TypeVar("B", bound=BoxOrSummary)


@dataclass(slots=True, repr=False)
class RunSummary(Shown, Generic[B]):
    """One job: its boxes or their summaries by rank, and what is missing."""

    folder: Path
    boxes: Mapping[int, B]
    earlier: list[Path] = field(default_factory=list)  # boxes of earlier runs or restarts
    unreadable: list[B] = field(default_factory=list)
    unranked: list[Path] = field(default_factory=list)  # boxes of processes that may become ranks
    noun: str = "box"  # what a rank leaves: a box, a dump, a box or snapshot
    notes: Sequence[str] = ()  # other caveats

    @property
    def is_of_dumps(self) -> bool:
        """Whether it was read from dumps of the flight recorder."""
        return self.noun == "dump"

    @property
    def world_size(self) -> int:
        """The number of ranks of the job."""
        sizes = [box.meta.get("world_size") for box in self.summaries.values()]
        return max([*(size for size in sizes if isinstance(size, int)), len(self.boxes)])

    @property
    def summaries(self) -> Mapping[int, BoxOrSummary]:
        """Summaries of all boxes, without reading one; the boxes themselves if they are in
        memory."""
        return self.boxes.summaries if isinstance(self.boxes, LazyBoxes) else self.boxes

    def checked_ranks(self, ranks: Iterable[int] | None) -> set[int] | None:
        """Return the chosen ranks as a set, None for all of them.

        Raises:
            TorchwhereError: The run has no box of one of them.
        """
        if ranks is None:
            return None
        chosen = set(ranks)
        absent = chosen - set(self.boxes)
        if absent:
            raise TorchwhereError(
                f"{self.folder} has no box of rank {min(absent)}; it has"
                f" {ranks_phrase(self.boxes.keys())}"
            )
        return chosen

    def in_order(self, ranks: Collection[int] | None = None) -> Iterator[tuple[int, B]]:
        """Yield the boxes of all ranks, or of `ranks`, by rank and one at a time."""
        for rank in sorted(self.boxes):
            if ranks is None or rank in ranks:
                yield rank, self.boxes[rank]

    @property
    def missing(self) -> list[int]:
        """The ranks without a box."""
        return [rank for rank in range(self.world_size) if rank not in self.boxes]

    def caveats(self) -> list[str]:
        """Return sentences about missing ranks, torn records and unreadable files."""
        caveats = []
        missing = self.missing
        if missing:
            count, total = len(self.boxes), self.world_size
            are = f"{count} of {total} ranks" if self.is_of_dumps else watched_phrase(count, total)
            caveats.append(f"{are}: no {self.noun} of {ranks_phrase(missing, most=8)}")
        of_ranks = []
        for rank, box in sorted(self.summaries.items()):
            of_ranks += [f"rank {rank}: {problem}" for problem in box.problems]
            torn = box.counts.torn + box.counts.torn_entries
            if torn:
                of_ranks.append(f"rank {rank}: {plural(torn, 'torn or damaged record')} left out")
        for box in self.unreadable:
            of_ranks += [f"{box.path.name}: {problem}" for problem in box.problems]
        of_ranks += [
            f"{path.name}: its process has not called init_process_group, so its rank is unknown"
            for path in self.unranked
            if missing  # otherwise it is not a rank, for example the parent of the ranks
        ]
        caveats += of_ranks[:_MAX_CAVEATS]
        if len(of_ranks) > _MAX_CAVEATS:
            caveats.append(f"and {len(of_ranks) - _MAX_CAVEATS} more of this kind")
        return [*caveats, *self.notes]


@dataclass(slots=True, repr=False)
class BoxRun(RunSummary[Box]):
    """One job with the content of its boxes."""

    def events(
        self,
        *,
        ranks: set[int] | None = None,
        kinds: set[str] | None = None,
        last: int | None = None,
    ) -> Iterator[Event]:
        """Yield events rank by rank, each rank's in order.

        Clocks of different hosts do not order them.

        Args:
            ranks: Only these ranks.
            kinds: Only events of these kinds.
            last: Only the last events of each rank.
        """
        for _, box in self.in_order(ranks):
            yield from box.events(kinds=kinds, last=last)


def read_run(folder: str | Path, *, on_progress: Progress | None = None) -> BoxRun:
    """Read the newest run in a folder. Raises `TorchwhereError` if it holds no readable box.

    Reads the boxes of a large run only when they are used: a second pass takes time again, but no
    memory. `on_progress` gets the number of boxes read so far and the total; for a large run also
    during the first pass.
    """
    files = box_files(folder)
    if len(files) > _FEW:
        return _read_large_run(Path(folder), files, ProgressCounter(2 * len(files), on_progress))
    boxes, progress = [], ProgressCounter(len(files), on_progress)
    for path in files:
        boxes.append(read_or_empty(read_box, path))
        progress.add()
    return BoxRun(Path(folder), *choose(Path(folder), boxes))


def _read_large_run(folder: Path, files: list[Path], progress: ProgressCounter) -> BoxRun:
    summaries = read_summaries(files, progress)
    chosen, earlier, unreadable, unranked = choose(folder, summaries)
    unreadable_boxes = [
        Box(summary.path, problems=list(summary.problems)) for summary in unreadable
    ]
    boxes = LazyBoxes(chosen, on_read=progress.add)
    return BoxRun(folder, boxes, earlier, unreadable_boxes, unranked)


def read_summaries(files: list[Path], progress: ProgressCounter) -> list[BoxSummary]:
    """Read all boxes one after the other, and keep only their summaries in memory."""
    reader, summaries = BoxReader(), []
    for path in files:
        summaries.append(summarize(read_or_empty(reader.read, path)))
        progress.add()
    return summaries


def read_again(run: RunSummary[Any], ranks: Iterable[int]) -> Iterator[Box]:
    """Read the boxes of some ranks, one at a time; one that was deleted or replaced is left out."""
    reader = BoxReader()
    for rank in ranks:
        box = read_or_empty(reader.read, run.boxes[rank].path)
        if box.rank == rank:
            yield box


def run_folder(path: str | os.PathLike[str]) -> str:
    """The folder of a run, from its own path or from the path of one of its boxes.

    Example:
        run_folder("run/rank0.box")  # "run"
    """
    text = os.fspath(path)
    is_box = text.endswith(".box") and os.path.isfile(text)
    return os.path.dirname(text) or "." if is_box else text


def box_files(folder: str | Path) -> list[Path]:
    """The boxes in a folder, by rank. Raises `TorchwhereError` if there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise nothing_recorded(f"there is no folder {folder}", folder)
    # opening a pipe of that name would block
    files = [path for path in folder.glob("*.box") if path.is_file()]
    files.sort(key=lambda path: (len(path.name.partition(".")[0]), path.name))
    if not files:
        raise nothing_recorded(f"{folder} holds no black box (*.box)", folder)
    return files


def choose(folder: Path, boxes: list[B]) -> tuple[dict[int, B], list[Path], list[B], list[Path]]:
    """The boxes of the newest run by rank, the paths of earlier boxes, the unreadable boxes, and
    the paths of boxes whose processes ran beside this run and do not know their ranks."""
    readable = [box for box in boxes if box.is_readable]
    unreadable = [box for box in boxes if not box.is_readable]
    if not readable:
        raise TorchwhereError(_nothing_readable(folder, unreadable))
    readable.sort(key=started_ns)
    newest = _newest(readable)
    of_one_job = [box for box in readable if box is newest or _is_of_one_job(box, newest)]
    chosen = _last_restart(of_one_job)
    others = [box for box in readable if chosen.get(box.rank) is not box]
    first_ns = min(map(started_ns, chosen.values()))
    unranked = [box.path for box in others if _may_become_rank(box, first_ns)]
    earlier = [box.path for box in others if box.path not in unranked]
    return dict(sorted(chosen.items())), earlier, unreadable, unranked


def has_assumed_rank(box: BoxOrSummary) -> bool:
    """Whether the process did not know its rank: its box has rank 0 for now."""
    return box.meta.get("rank_is_assumed") is True


def _may_become_rank(box: BoxOrSummary, first_ns: int) -> bool:
    """Whether a box is of a process beside the ranks of a run, which began at `first_ns`. Such a
    process may record nothing, and has no heartbeat, until it calls `init_process_group`."""
    is_recent = alive_ns(box) > first_ns - _LATE_START_NS
    return has_assumed_rank(box) and is_recent and not is_set_aside(box.path)


def alive_ns(box: BoxOrSummary) -> int:
    """The last sign of life in a box: its last record or heartbeat."""
    return max(box.last_ns, box.beat_ns)


def _newest(boxes: list[B]) -> B:
    """The box that started last. A box that knows its rank wins over a younger one that does not,
    if its process was alive when the younger one started: then both are of one job."""
    newest = boxes[-1]
    if has_assumed_rank(newest):
        ranked = [box for box in boxes if not has_assumed_rank(box)]
        if ranked and max(map(alive_ns, ranked)) > started_ns(newest):
            return ranked[-1]
    return newest


def _nothing_readable(folder: Path, boxes: Sequence[BoxOrSummary]) -> str:
    problems = sorted({problem for box in boxes for problem in box.problems})
    if len(problems) == 1 and problems[0].startswith(WRITTEN_BY):
        return f"{boxes[0].path.name} was {problems[0]}"
    return f"none of the {len(boxes)} boxes in {folder} can be read: {'; '.join(problems)}"


def _is_of_one_job(box: BoxOrSummary, newest: BoxOrSummary) -> bool:
    """Whether two boxes belong to one job, from what the launcher set."""
    if has_assumed_rank(box) != has_assumed_rank(newest):
        return False
    ports = {port_of(box), port_of(newest)} - {""}
    if box.run[0] != newest.run[0] or len(ports) > 1:
        return False
    if box.meta.get("world_size") != newest.meta.get("world_size"):
        return False
    return not _had_ended(box, newest)


def port_of(box: BoxOrSummary) -> str:
    """Port of the job's own store. Most launchers choose a new one for each restart. Without the
    address, which may have several names."""
    return str(box.meta.get("store", "")).rpartition(":")[2]


def _had_ended(box: BoxOrSummary, newest: BoxOrSummary) -> bool:
    """Whether the last record of a box is much older than the start of the newest box: then it
    belongs to an earlier run of the same name."""
    return box.last_ns < started_ns(newest) - _LATE_START_NS


def _last_restart(boxes: list[B]) -> dict[int, B]:
    """The boxes of one job since its last restart, given all its boxes in the order of their start.

    Each torchrun agent counts its own failures. So hosts may have different restart counts at the
    same time (pytorch issue 135712), or the same count before and after a restart. But all ranks
    end before the first one starts again: a restart has happened if a rank has a new process, or if
    the count of a host goes up.
    """
    last = max(box.run[1] for box in boxes)
    newest = {box.rank: box for box in boxes if box.run[1] == last}
    processes = {(box.rank, process_of(box)) for box in boxes if box.run[1] == last}
    # all hosts have the same count: no clock is needed
    if len(newest) == len(processes) == boxes[-1].meta.get("world_size"):
        return newest
    current: dict[int, B] = {}
    counts: dict[str, int] = {}  # by host
    for box in boxes:
        host, count = str(box.meta.get("host")), box.run[1]
        before = current.get(box.rank)
        has_new_process = before is not None and process_of(before) != process_of(box)
        if has_new_process or count > counts.get(host, count):
            current, counts = {}, {}
        current[box.rank] = box
        counts[host] = count
    return current


def process_of(box: BoxOrSummary) -> tuple[str, str]:
    """Host and process id, as text: a box may hold anything."""
    return str(box.meta.get("host")), str(box.meta.get("pid"))
