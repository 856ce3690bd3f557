"""The ward: a round past every rank of a run, again and again, with a glance at its box and at its
process.

Takes a folder where a job runs, is about to, or has been; gives what its ranks are doing now. It
reads a few KB of each box, and never touches the job. A visit takes no longer than it is given: of
a large job it sees a part each time, and the age of a rank counts from when it was last seen to
move. Boxes that come (ranks that start late, an elastic restart) are found within a second or so.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from torchwhere.blackbox.live_box import LiveBox
from torchwhere.blackbox.live_names import NameReader
from torchwhere.blackbox.run import RunSummary, choose
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.errors import TorchwhereError
from torchwhere.diagnose.live.ranks import STALL_S, LiveRanks
from torchwhere.diagnose.live.run import RunNow
from torchwhere.pipeline.verdict import saved_statuses
from torchwhere.processes.look import look, merged
from torchwhere.processes.status import ProcessStatus

_LIST_S = 1.0  # new boxes are looked for this often, and what monitors have written is read
_MOST_SHARE = 0.1  # of the time, for each of them
_MOST_CAVEATS = 8


class RunPoller:
    """One folder, visited again and again."""

    def __init__(self, folder: str | Path, *, stall_s: float = STALL_S) -> None:
        self.folder = Path(folder)
        self._live = LiveRanks(stall_s=stall_s)
        self._names = NameReader()
        self._glances: dict[Path, LiveBox] = {}
        self._files: set[str] = set()
        self._order: list[Path] = []
        self._next = 0
        self._unseen: set[Path] = set()
        self._roster: RunSummary[BoxSummary] | None = None
        self._kept: dict[int, dict[str, Any]] = {}
        self._list_at = self._kept_at = 0.0
        self._was_there = False
        self._problem: str | None = None

    def poll(self, *, most_s: float = 0.2) -> RunNow:
        """Look around for at most so long."""
        begin = time.monotonic()
        has_news = self._list(begin)
        has_news |= self._look(begin + most_s)
        if has_news:
            self._choose()
        return self._now()

    def path_of(self, rank: int) -> Path | None:
        box = self._roster.boxes.get(rank) if self._roster is not None else None
        return box.path if box is not None else None

    # -- boxes -------------------------------------------------------------------------------------

    def _list(self, now_s: float) -> bool:
        """Which boxes there are; whether one has come or gone."""
        if now_s < self._list_at:
            return False
        try:
            with os.scandir(self.folder) as entries:
                files = {
                    entry.name
                    for entry in entries
                    if entry.name.endswith(".box") and entry.is_file()
                }
        except OSError as error:
            files, self._problem = set(), self._absent(error)
        else:
            self._was_there = True
            none = (
                "no longer holds a black box (*.box)"
                if self._files
                else "holds no black box (*.box) yet"
            )
            self._problem = None if files else f"{self.folder} {none}"
        self._list_at = now_s + max(_LIST_S, (time.monotonic() - now_s) / _MOST_SHARE)
        # what was seen last stays on the screen when all is gone
        if not files or files == self._files:
            return False
        self._files, paths = files, {self.folder / name for name in files}
        for path in self._glances.keys() - paths:
            del self._glances[path]
        for path in paths - self._glances.keys():
            self._glances[path] = LiveBox(path, self._names)
            self._unseen.add(path)
        self._unseen &= paths
        self._order = sorted(paths, key=lambda path: (len(path.name), path.name))
        return True

    def _absent(self, error: OSError) -> str:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return (
                f"the folder {self.folder} is gone"
                if self._was_there
                else f"there is no folder {self.folder} yet"
            )
        return f"cannot read {self.folder}: {error.strerror}"

    def _look(self, until_s: float) -> bool:
        """Look at the next boxes, each at most once; whether one has another header than before."""
        has_news = False
        for _ in range(len(self._order)):
            live_box = self._glances[self._order[self._next % len(self._order)]]
            self._next = (self._next + 1) % len(self._order)
            before = live_box.meta
            has_moved = live_box.look()
            now_s = time.monotonic()
            has_news |= live_box.meta is not before or live_box.path in self._unseen
            self._unseen.discard(live_box.path)
            self._live.update(live_box, has_moved=has_moved, now_s=now_s, now_ns=time.time_ns())
            if now_s > until_s:
                break
        return has_news

    def _choose(self) -> None:
        """Of all boxes, those of the newest run. Those that were chosen just now have been looked
        at already."""
        labels = [
            live_box.summary()
            for path, live_box in self._glances.items()
            if path not in self._unseen
        ]
        try:
            self._roster = RunSummary(self.folder, *choose(self.folder, labels))
        except TorchwhereError as error:
            self._roster, self._problem = None, str(error)
            return
        now_s, now_ns = time.monotonic(), time.time_ns()
        for box in self._roster.boxes.values():
            self._live.add(self._glances[box.path], now_s=now_s, now_ns=now_ns)

    # -- all together ------------------------------------------------------------------------------

    def _now(self) -> RunNow:
        t_ns, run = time.time_ns(), self._roster
        if run is None:
            problem = self._problem or f"{self.folder} holds no black box (*.box) yet"
            return RunNow(str(self.folder), t_ns, problem=problem)
        ranks = self._live.now(sorted(run.boxes), self._statuses(run), now_s=time.monotonic())
        unread = len(self._unseen)
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
        glances = (
            (f"rank {rank}", self._glances.get(box.path)) for rank, box in sorted(run.boxes.items())
        )
        said = [
            f"{who}: {live_box.problem}"
            for who, live_box in glances
            if live_box is not None and live_box.problem
        ]
        said += [
            f"{box.path.name}: {problem}" for box in run.unreadable for problem in box.problems
        ]
        return tuple(said[:_MOST_CAVEATS])

    def _statuses(self, run: RunSummary[BoxSummary]) -> dict[int, ProcessStatus]:
        """What is seen of the processes here, and what monitors saw elsewhere."""
        begin = time.monotonic()
        if begin > self._kept_at:
            self._kept = saved_statuses(self.folder)
            self._kept_at = begin + max(_LIST_S, (time.monotonic() - begin) / _MOST_SHARE)
        return merged(look(run.boxes), self._kept)
