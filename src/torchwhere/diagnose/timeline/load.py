"""Reads a folder as often as a timeline needs it, one box at a time.

Clocks can be aligned when all ranks have been heard, and a call is complete when all have come to
it: so the boxes are read once for the clocks, once for the calls, and once more to be drawn. What
is kept in between is small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import NO_STEP
from torchwhere.blackbox.reader import BoxReader
from torchwhere.blackbox.run import RunSummary, box_files, choose
from torchwhere.blackbox.summary import BoxSummary, summarize
from torchwhere.core.errors import TorchwhereError
from torchwhere.diagnose.clocks.arrivals import NEVER, Arrivals, arrivals
from torchwhere.diagnose.clocks.clocks import Aligner, Clocks, thinned
from torchwhere.diagnose.clocks.meetings import Meetings
from torchwhere.diagnose.timeline.slices import Timeline, TimeWindow, timeline, window

Progress = Callable[[int, int], None]

_PASSES = 3
# of the trace: what is unfinished must be seen to be; nobody knows how long it has been going on
_TAIL = 0.05
_LEAST_TAIL_NS = 1_000_000


@dataclass(slots=True)
class Survey:
    """A run that is about to be drawn."""

    run: RunSummary[BoxSummary]
    clocks: Clocks
    meetings: Meetings  # of all ranks
    shown: Meetings  # of those that are drawn, within their windows: what has arrows
    windows: dict[int, TimeWindow] = field(default_factory=dict)
    lacking: list[int] = field(default_factory=list)  # ranks whose boxes have none of the steps
    begin_ns: int = 0
    end_ns: int = 0
    _reader: BoxReader = field(default_factory=BoxReader)
    _told: Callable[[], None] = lambda: None

    def timelines(self) -> Iterator[tuple[Box, Timeline]]:
        """Of each rank, its box and what it did."""
        for rank, within in self.windows.items():
            box = self._reader.read(self.run.boxes[rank].path)
            yield (
                box,
                timeline(
                    box,
                    clocks=self.clocks,
                    meetings=self.meetings,
                    within=within,
                    end_ns=self.end_ns,
                ),
            )
            self._told()


def survey(
    folder: str | Path,
    *,
    ranks: set[int] | None = None,
    steps: range | None = None,
    on_progress: Progress | None = None,
) -> Survey:
    """Look over the newest run in a folder. Raises `TorchwhereError` when there is nothing there to
    draw."""
    files = box_files(folder)
    reader, told = BoxReader(), _Told(len(files), on_progress)
    run, kept = _heard(Path(folder), files, reader, told)
    unknown = sorted((ranks or set()) - set(run.boxes))
    if unknown:
        raise TorchwhereError(
            f"{folder} has no box of rank {unknown[0]}; it has ranks {_span(sorted(run.boxes))}"
        )
    clocks = Aligner(kept).clocks()
    met = Meetings(clocks)
    found = Survey(
        run,
        clocks,
        met,
        met if ranks is None and steps is None else Meetings(clocks),
        _reader=reader,
        _told=told,
    )
    every: set[int] = set()
    for rank, each in run.boxes.items():
        box = reader.read(each.path)
        came = arrivals(box)
        found.meetings.add(came)
        if ranks is None or rank in ranks:
            every |= _steps_of(box)
            _look_at(found, box, came, steps)
        told()
    if not found.windows:
        raise TorchwhereError(_nothing(folder, steps, every))
    _end(found)
    return found


def _heard(
    folder: Path, files: list[Path], reader: BoxReader, told: _Told
) -> tuple[RunSummary[BoxSummary], list[Arrivals]]:
    labels, by_path = [], {}
    for path in files:
        try:
            box = reader.read(path)
        except TorchwhereError as error:  # deleted since the folder was listed
            box = Box(path=path, problems=[str(error)])
        labels.append(summarize(box))
        by_path[path] = thinned(arrivals(box), ranks=len(files))
        told()
    chosen, earlier, unreadable = choose(folder, labels)
    run = RunSummary(folder, dict(sorted(chosen.items())), earlier, unreadable)
    return run, [by_path[each.path] for each in run.boxes.values()]


def _look_at(found: Survey, box: Box, came: Arrivals, steps: range | None) -> None:
    within = window(box, found.clocks, steps)
    if within is None:
        if len(box.records):
            found.lacking.append(box.rank)
        return
    found.windows[box.rank] = within
    if found.shown is not found.meetings:
        found.shown.add(came, window=(within.begin_ns, within.end_ns))


def _end(found: Survey) -> None:
    """Where the trace ends: with the last thing known, or later if something had not ended then."""
    windows = found.windows.values()
    found.begin_ns = min(each.begin_ns for each in windows)
    found.end_ns = max(each.last_ns for each in windows)
    if any(each.end_ns == NEVER for each in windows):
        found.end_ns += max(int((found.end_ns - found.begin_ns) * _TAIL), _LEAST_TAIL_NS)


def _steps_of(box: Box) -> set[int]:
    """The first and the last one that are in the ring."""
    steps = box.records["step"][box.records["step"] != NO_STEP]
    return {int(steps.min()), int(steps.max())} if len(steps) else set()


def _nothing(folder: str | Path, steps: range | None, every: set[int]) -> str:
    if steps is None or not every:
        return f"{folder} holds no events to draw"
    asked = f"step {steps.start} was not recorded, or is overwritten"
    if len(steps) > 1:
        asked = (
            f"none of the steps {steps.start} to {steps.stop - 1} was recorded, or all are"
            " overwritten"
        )
    return f"{asked}: {folder} has steps {min(every)} to {max(every)}"


def _span(ranks: list[int]) -> str:
    return f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 8 else ", ".join(map(str, ranks))


class _Told:
    """Counts what was read."""

    def __init__(self, boxes: int, on_progress: Progress | None) -> None:
        self._done, self._of, self._on_progress = 0, boxes * _PASSES, on_progress

    def __call__(self) -> None:
        self._done += 1
        if self._on_progress is not None:
            self._on_progress(min(self._done, self._of), self._of)
