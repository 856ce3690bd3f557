"""Reads a run for a timeline, one box at a time.

Clocks can be aligned only after all ranks were read, and a call is complete only after all ranks
were read again with aligned clocks. So every box is read three times: for the clocks, for the
arrivals at calls, and to be drawn. Little is kept in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import NO_STEP
from torchwhere.blackbox.reader import BoxReader, read_or_empty
from torchwhere.blackbox.run import RunSummary, box_files, choose
from torchwhere.blackbox.summary import BoxSummary, summarize
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.worker_pool import Progress, ProgressCounter
from torchwhere.diagnose.clocks.arrivals import NEVER, Arrivals, arrivals, times_ns
from torchwhere.diagnose.clocks.call_arrivals import JobArrivals
from torchwhere.diagnose.clocks.clocks import Aligner, Clocks, thinned
from torchwhere.diagnose.device_time.calls import device_arrivals
from torchwhere.diagnose.timeline.device import DeviceTimeline, device_timeline
from torchwhere.diagnose.timeline.slices import Timeline, TimeWindow, timeline, window

_PASSES = 3
# The trace ends at least this much later if something is unfinished, so that it can be seen.
_TAIL = 0.05
_LEAST_TAIL_NS = 1_000_000


@dataclass(slots=True)
class RunTimelines:
    """A run with aligned clocks, ready to be drawn."""

    run: RunSummary[BoxSummary]
    clocks: Clocks
    arrivals: JobArrivals  # of all ranks
    shown_arrivals: JobArrivals  # of the ranks that are drawn, within their windows; for arrows
    device_arrivals: JobArrivals  # of the devices of all ranks
    _reader: BoxReader
    _progress: ProgressCounter
    windows: dict[int, TimeWindow] = field(default_factory=dict)
    lacking: list[int] = field(default_factory=list)  # ranks that have none of the wanted steps
    begin_ns: int = 0
    end_ns: int = 0

    def timelines(self) -> Iterator[tuple[Box, Timeline]]:
        """Yields the box and the timeline of each rank."""
        for rank, within in self.windows.items():
            box = self._reader.read(self.run.boxes[rank].path)
            drawn = timeline(
                box,
                clocks=self.clocks,
                job_arrivals=self.arrivals,
                within=within,
                end_ns=self.end_ns,
            )
            yield box, drawn
            self._progress.add()

    def device(self, box: Box) -> DeviceTimeline | None:
        """Returns the timeline of the device of a rank; None if nothing is known about it."""
        return device_timeline(
            box,
            clocks=self.clocks,
            job_arrivals=self.device_arrivals,
            within=self.windows[box.rank],
            issued_ns=self.clocks.aligned_ns(box.rank, times_ns(box)),
            end_ns=self.end_ns,
        )

    def _add(self, box: Box, own_arrivals: Arrivals, steps: range | None) -> None:
        """Adds a rank that is drawn."""
        within = window(box, self.clocks, steps)
        if within is None:
            if len(box.records):
                self.lacking.append(box.rank)
            return
        self.windows[box.rank] = within
        if self.shown_arrivals is not self.arrivals:
            self.shown_arrivals.add(own_arrivals, window=(within.begin_ns, within.end_ns))

    def _set_span(self) -> None:
        """Sets begin and end of the trace. If something had not ended, the trace ends later: when
        a rank was last known alive."""
        windows = self.windows.values()
        self.begin_ns = min(within.begin_ns for within in windows)
        self.end_ns = max(within.last_ns for within in windows)
        if any(within.end_ns == NEVER for within in windows):
            tail_ns = max(int((self.end_ns - self.begin_ns) * _TAIL), _LEAST_TAIL_NS)
            self.end_ns = max(self.end_ns + tail_ns, *(within.alive_ns for within in windows))


def load_timelines(
    folder: str | Path,
    *,
    ranks: set[int] | None = None,
    steps: range | None = None,
    on_progress: Progress | None = None,
) -> RunTimelines:
    """Reads the newest run in a folder.

    Args:
        folder: The folder with the boxes.
        ranks: The ranks to draw; all by default.
        steps: The steps to draw; all by default.
        on_progress: Called with the number of boxes read so far, and of boxes to read. Every box
            counts three times.

    Raises:
        TorchwhereError: There is nothing to draw, or a rank does not exist.
    """
    files = box_files(folder)
    reader, progress = BoxReader(), ProgressCounter(_PASSES * len(files), on_progress)
    run, all_arrivals = _read_arrivals(Path(folder), files, reader, progress)
    run.checked_ranks(ranks)
    clocks = Aligner(all_arrivals).clocks()
    job_arrivals = JobArrivals(clocks)
    is_whole = ranks is None and steps is None
    shown = job_arrivals if is_whole else JobArrivals(clocks)
    by_device = JobArrivals(clocks)
    loaded = RunTimelines(run, clocks, job_arrivals, shown, by_device, reader, progress)
    recorded: set[int] = set()
    for rank, summary in run.boxes.items():
        box = reader.read(summary.path)
        own_arrivals = arrivals(box)
        job_arrivals.add(own_arrivals)
        on_device = device_arrivals(box)
        if on_device is not None:
            by_device.add(on_device)
        if ranks is None or rank in ranks:
            recorded |= _first_and_last_step(box)
            loaded._add(box, own_arrivals, steps)
        progress.add()
    if not loaded.windows:
        raise TorchwhereError(_nothing_to_draw(folder, steps, recorded))
    loaded._set_span()
    return loaded


def _read_arrivals(
    folder: Path, files: list[Path], reader: BoxReader, progress: ProgressCounter
) -> tuple[RunSummary[BoxSummary], list[Arrivals]]:
    """Reads all boxes for the clocks."""
    summaries, by_path = [], {}
    for path in files:
        box = read_or_empty(reader.read, path)
        summaries.append(summarize(box))
        by_path[path] = thinned(arrivals(box), ranks=len(files))
        progress.add()
    run = RunSummary(folder, *choose(folder, summaries))
    return run, [by_path[summary.path] for summary in run.boxes.values()]


def _first_and_last_step(box: Box) -> set[int]:
    """Returns the first and the last step in the ring."""
    steps = box.records["step"][box.records["step"] != NO_STEP]
    return {int(steps.min()), int(steps.max())} if len(steps) else set()


def _nothing_to_draw(folder: str | Path, steps: range | None, recorded: set[int]) -> str:
    if steps is None or not recorded:
        return f"{folder} holds no events to draw"
    wanted = (
        f"step {steps.start} was"
        if len(steps) == 1
        else (f"steps {steps.start} to {steps.stop - 1} were")
    )
    return (
        f"{wanted} not recorded, or overwritten since; {folder} has steps {min(recorded)} to"
        f" {max(recorded)}"
    )
