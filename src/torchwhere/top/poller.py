"""Polls every rank of a run: a few KB of its box, and the state of its process.

Takes the folder of a job that runs, will run or has ended; gives what its ranks are doing now. It
never touches the job. A poll has a time limit: of a large job it reads a part each time, and the
age of a rank counts from the last time it was seen to move. New boxes (ranks that start late, an
elastic restart) are found within about a second.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from torchwhere.blackbox.live_box import LiveBox
from torchwhere.blackbox.live_names import NameReader
from torchwhere.blackbox.run import RunSummary, choose, has_assumed_rank
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.errors import TorchwhereError
from torchwhere.diagnose.live.ranks import LiveRanks
from torchwhere.diagnose.live.run import RunNow
from torchwhere.processes.look import SILENT_S, look, merged, with_silent_ended
from torchwhere.processes.status import ProcessStatus
from torchwhere.snapshots.read import saved_statuses

_LIST_S = 1.0  # between two listings of the folder, and between two readings of saved statuses
_MOST_SHARE = 0.1  # of the time, for each of them
_MOST_CAVEATS = 8


class RunPoller:
    """One folder, polled again and again."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._live = LiveRanks()
        self._names = NameReader()
        self._live_boxes: dict[Path, LiveBox] = {}
        self._files: set[str] = set()
        self._order: list[Path] = []
        self._next = 0
        self._unread: set[Path] = set()
        self._run: RunSummary[BoxSummary] | None = None
        self._saved: dict[int, dict[str, Any]] = {}
        self._list_at = self._saved_at = 0.0
        self._beats_ns: dict[int, int] = {}  # the last heartbeats
        self._beat_s: float | None = None  # when the last one was seen
        self._was_there = False
        self._problem: str | None = None

    def poll(self, *, most_s: float = 0.2) -> RunNow:
        """Read as many boxes as `most_s` allows, and return the state of the run."""
        begin = time.monotonic()
        has_news = self._list(begin)
        has_news |= self._read_boxes(begin + most_s)
        if has_news:
            self._choose()
        return self._now()

    # -- boxes -------------------------------------------------------------------------------------

    def _list(self, now_s: float) -> bool:
        """List the boxes. Returns True if the run must be chosen again: a box was added or deleted,
        or heartbeats since then may show which boxes belong together."""
        if now_s < self._list_at:
            return False
        files = self._box_names()
        self._list_at = _next_at(now_s)
        # When all boxes are gone, the screen keeps what was read last.
        if not files or files == self._files:
            return self._has_assumed_ranks()
        self._files = files
        paths = {self.folder / name for name in files}
        for path in self._live_boxes.keys() - paths:
            del self._live_boxes[path]
        for path in paths - self._live_boxes.keys():
            self._live_boxes[path] = LiveBox(path, self._names)
            self._unread.add(path)
        self._unread &= paths
        self._order = sorted(paths, key=lambda path: (len(path.name), path.name))
        return True

    def _has_assumed_ranks(self) -> bool:
        run = self._run
        return run is not None and (
            bool(run.unranked) or any(map(has_assumed_rank, run.boxes.values()))
        )

    def _box_names(self) -> set[str]:
        try:
            with os.scandir(self.folder) as entries:
                files = {
                    entry.name
                    for entry in entries
                    if entry.name.endswith(".box") and entry.is_file()
                }
        except OSError as error:
            self._problem = self._absence(error)
            return set()
        self._was_there = True
        if files:
            self._problem = None
        elif self._files:
            self._problem = f"{self.folder} no longer holds a black box (*.box)"
        else:
            self._problem = self._no_box_yet()
        return files

    def _no_box_yet(self) -> str:
        return f"{self.folder} holds no black box (*.box) yet"

    def _absence(self, error: OSError) -> str:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return f"cannot read {self.folder}: {error.strerror}"
        if self._was_there:
            return f"the folder {self.folder} is gone"
        return f"there is no folder {self.folder} yet"

    def _read_boxes(self, until_s: float) -> bool:
        """Read the next boxes, each at most once. Returns True if one has a new header."""
        has_news = False
        for _ in range(len(self._order)):
            live_box = self._live_boxes[self._order[self._next % len(self._order)]]
            self._next = (self._next + 1) % len(self._order)
            before = live_box.meta
            has_moved = live_box.look()
            now_s = time.monotonic()
            has_news |= live_box.meta is not before or live_box.path in self._unread
            self._unread.discard(live_box.path)
            self._live.update(live_box, has_moved=has_moved, now_s=now_s, now_ns=time.time_ns())
            if now_s > until_s:
                break
        return has_news

    def _choose(self) -> None:
        """Choose the boxes of the newest run among all that were read."""
        summaries = [
            live_box.summary()
            for path, live_box in self._live_boxes.items()
            if path not in self._unread
        ]
        try:
            self._run = RunSummary(self.folder, *choose(self.folder, summaries))
        except TorchwhereError as error:
            self._run, self._problem = None, str(error)
            return
        now_s, now_ns = time.monotonic(), time.time_ns()
        for box in self._run.boxes.values():
            self._live.add(self._live_boxes[box.path], now_s=now_s, now_ns=now_ns)

    # -- the state of the run ----------------------------------------------------------------------

    def _now(self) -> RunNow:
        t_ns, run = time.time_ns(), self._run
        if run is None:
            return RunNow(str(self.folder), t_ns, problem=self._problem or self._no_box_yet())
        ranks = self._live.now(sorted(run.boxes), self._statuses(run), now_s=time.monotonic())
        unread = len(self._unread)
        return RunNow(
            folder=str(self.folder),
            t_ns=t_ns,
            ranks=tuple(ranks),
            world_size=run.world_size,
            missing=tuple(run.missing) if not unread else (),
            caveats=self._caveats(run),
            unread=unread,
            problem=self._problem,
        )

    def _caveats(self, run: RunSummary[BoxSummary]) -> tuple[str, ...]:
        caveats = []
        for rank, box in sorted(run.boxes.items()):
            live_box = self._live_boxes.get(box.path)
            if live_box is not None and live_box.problem:
                caveats.append(f"rank {rank}: {live_box.problem}")
        for box in run.unreadable:
            caveats += [f"{box.path.name}: {problem}" for problem in box.problems]
        return tuple(caveats[:_MOST_CAVEATS])

    def _statuses(self, run: RunSummary[BoxSummary]) -> dict[int, ProcessStatus]:
        """The processes as this host shows them, and as monitors of other hosts saved them."""
        begin = time.monotonic()
        if begin > self._saved_at:
            self._saved = saved_statuses(self.folder)
            self._saved_at = _next_at(begin)
        statuses = merged(look(run.boxes), self._saved)
        if self._has_beaten(run, begin):
            return statuses
        return with_silent_ended(statuses, self._beats_ns.values())

    def _has_beaten(self, run: RunSummary[BoxSummary], now_s: float) -> bool:
        """Whether a rank was seen to send a heartbeat in the last minute, by the clock of this
        host: that of another host may be behind."""
        paths = {rank: box.path for rank, box in run.boxes.items()}
        boxes = {rank: self._live_boxes.get(path) for rank, path in paths.items()}
        beats_ns = {rank: box.beat_ns if box is not None else 0 for rank, box in boxes.items()}
        before = self._beats_ns
        if any(0 < before.get(rank, 0) < beat_ns for rank, beat_ns in beats_ns.items()):
            self._beat_s = now_s
        self._beats_ns = beats_ns
        return self._beat_s is not None and now_s < self._beat_s + SILENT_S


def _next_at(begin_s: float) -> float:
    """When to do again what began at `begin_s` and has just ended: later if it took long."""
    return begin_s + max(_LIST_S, (time.monotonic() - begin_s) / _MOST_SHARE)
