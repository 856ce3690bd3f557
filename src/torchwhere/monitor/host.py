"""What one host shows of a run: its boxes, its processes, and whether they make progress."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchwhere.blackbox.run import BoxRun, process_of, read_run
from torchwhere.blackbox.summary import BoxOrSummary, read_progress, started_ns
from torchwhere.core.errors import TorchwhereError
from torchwhere.diagnose.doctor.exit_records import ended_well
from torchwhere.processes.look import is_descendant, look
from torchwhere.processes.proc_files import running
from torchwhere.processes.status import ProcessStatus
from torchwhere.snapshots.write import as_saved

_AT_ONCE_S = 0.05  # processes that exit within this time were killed together
_BOX_NS = 10_000_000_000  # the process that starts a monitor has a box by then, or gets none


@dataclass(slots=True)
class HostView:
    """The run in a folder, as one host sees it over time."""

    folder: Path
    # the process that started the monitor; while it runs, more ranks may start
    launcher: int | None = None
    run: BoxRun | None = None
    # of the run, also of boxes that were deleted since
    summaries: dict[int, BoxOrSummary] = field(default_factory=dict)
    statuses: dict[int, ProcessStatus] = field(default_factory=dict)
    started_ns: int = field(default_factory=time.time_ns)
    # the last progress of each box, and since when it has not changed
    _progress: dict[Path, tuple[bytes, float]] = field(default_factory=dict)

    # -- boxes -------------------------------------------------------------------------------------

    def paths(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*.box") if path.is_file())

    def run_paths(self) -> list[Path]:
        """Boxes of the ranks of the run."""
        return [box.path for box in self.run.summaries.values()] if self.run is not None else []

    def own_paths(self) -> list[Path]:
        """Boxes of this host. In a shared folder, other monitors look at the others."""
        return [box.path for box in self._own_boxes().values()]

    def _own_boxes(self) -> dict[int, BoxOrSummary]:
        boxes = self.run.summaries if self.run is not None else {}
        return {rank: boxes[rank] for rank in self.own_ranks() if rank in boxes}

    def own_ranks(self) -> list[int]:
        """Ranks whose processes this host can see."""
        return [rank for rank, status in self.statuses.items() if status.alive is not None]

    def read_again(self) -> bool:
        """Read the boxes. Returns False if the run could not be read: `run` is an older reading."""
        run = self.read()
        self.use(run)
        return run is not None

    def use(self, run: BoxRun | None) -> None:
        """Use a run that was just read. A process is watched on after its box was deleted."""
        if run is None:
            return
        if self.run is None or not _is_same_attempt(run, self.run):
            self.summaries, self.statuses = {}, {}
        processes = {process_of(box) for box in run.summaries.values()}
        before = self.summaries
        # A process that has learned its rank has left the one that it assumed.
        left = {rank: box for rank, box in before.items() if process_of(box) not in processes}
        self.summaries = left | dict(run.summaries)
        self.statuses = {
            rank: status
            for rank, status in self.statuses.items()
            if rank in self.summaries
            and process_of(self.summaries[rank]) == process_of(before[rank])
        }
        self.run = run

    def read(self) -> BoxRun | None:
        """Read the run that this monitor watches; None if there is none, or only another one."""
        try:
            run = read_run(self.folder)
        except TorchwhereError:
            return None
        if self.launcher is None:
            return run
        if self.run is not None:
            # A restart has its own monitor.
            is_own = _is_same_attempt(run, self.run) or self._has_started(run)
        else:
            is_own = self._is_launchers(run)
        return run if is_own else None

    def _has_started(self, run: BoxRun) -> bool:
        """Whether the process that started this monitor also started a rank of the run."""
        return self.launcher is not None and any(
            is_descendant(box, self.launcher) for box in run.summaries.values()
        )

    def _is_launchers(self, run: BoxRun) -> bool:
        """Whether the process that started this monitor belongs to the run.

        It does not belong to earlier or later runs in the folder. If it has no box, for example on
        a full disk, a run counts whose ranks started about when the monitor did.
        """
        here = (socket.gethostname(), self.launcher)
        if any(
            (box.meta.get("host"), box.meta.get("pid")) == here for box in run.summaries.values()
        ):
            return True
        if self._has_started(run):
            return True
        newest = max(map(started_ns, run.summaries.values()))
        has_waited = time.time_ns() - self.started_ns > _BOX_NS
        return has_waited and self._launcher_runs() and newest > self.started_ns - 6 * _BOX_NS

    # -- processes ---------------------------------------------------------------------------------

    def look(self) -> bool:
        """Look at the processes. Returns True if one has exited since the last look."""
        if self.run is None or self._has_other_paths(self.run):
            self.read_again()
        if self.run is None:
            return False
        now = look(self.summaries)
        exited = [
            rank
            for rank, status in now.items()
            if status.alive is False and self.statuses.get(rank, status).alive
        ]
        if exited:
            # Of processes that are killed together, one is gone first, for a moment.
            time.sleep(_AT_ONCE_S)
            later = look(self.summaries)
            if any(status.alive for status in later.values()):
                later |= {rank: now[rank] for rank in exited}
            now = later
        self.statuses = self._completed(now)
        return bool(exited)

    def _completed(self, now: Mapping[int, ProcessStatus]) -> dict[int, ProcessStatus]:
        """New statuses with what earlier looks saw."""
        return {rank: status.after(self.statuses.get(rank, status)) for rank, status in now.items()}

    def _has_other_paths(self, run: BoxRun) -> bool:
        """Whether a box was created, renamed or deleted since the run was read."""
        paths, others = set(self.paths()), {*run.earlier, *run.unranked}
        return paths - others != set(self.run_paths())

    def add_exit_codes(self, exit_codes: Mapping[int, int]) -> None:
        """Add the exit codes of processes, by process id.

        The signal that ended a rank shows whether the launcher sent it.
        """
        for rank, pid in self._pids().items():
            if pid in exit_codes:
                self.statuses[rank] = replace(self.statuses[rank], exit_code=exit_codes[pid])

    def look_for_stacks(self, ranks: Iterable[int]) -> None:
        """Look at the processes of this host and ask these ranks for their stacks."""
        self.statuses |= self._completed(look(self._own_boxes(), stacks=ranks))

    def alive_pids(self) -> dict[int, int]:
        """Process ids of the ranks that are alive."""
        return {rank: pid for rank, pid in self._pids().items() if self.statuses[rank].alive}

    def _pids(self) -> dict[int, int]:
        pids = {rank: self.summaries[rank].meta.get("pid") for rank in self.statuses}
        return {rank: pid for rank, pid in pids.items() if isinstance(pid, int)}

    def saved_statuses(self) -> dict[int, dict[str, Any]]:
        """The processes of this host as they are saved: with the identity of each."""
        return {
            rank: as_saved(self.summaries[rank], self.statuses[rank]) for rank in self.own_ranks()
        }

    def is_over(self) -> bool:
        """Whether all processes have exited, and the launcher too.

        A zombie counts as exited: its parent may first read our stderr to the end.
        """
        return not self._launcher_runs() and not self.is_running()

    def _launcher_runs(self) -> bool:
        return self.launcher is not None and running(self.launcher) is not None

    def is_running(self) -> bool:
        """Whether a process of the run is alive."""
        return any(status.alive for status in self.statuses.values())

    def have_succeeded(self) -> bool:
        """Whether every rank of this host that has exited recorded a successful end."""
        if not self.statuses:
            return True
        run = self.read() or self.run  # a restart may have replaced the boxes
        if run is None:
            return True
        exited = [rank for rank, status in self.statuses.items() if status.alive is False]
        boxes = [run.boxes[rank] for rank in exited if rank in run.boxes]
        ends = [next(box.events(kinds={"end"}, last=1), None) for box in boxes]
        return all(end is not None and ended_well(end) for end in ends)

    # -- progress ----------------------------------------------------------------------------------

    def is_stalled(self, paths: Iterable[Path], *, stall_s: float) -> bool:
        """Read the progress of these boxes. Returns True if one has made none for `stall_s`."""
        now = time.monotonic()
        is_stalled = False
        for path in paths:
            progress = read_progress(path)
            before = self._progress.get(path)
            if before is None or progress != before[0]:
                self._progress[path] = progress, now
            elif now - before[1] > stall_s:
                is_stalled = True
        return is_stalled

    def last_progress_at(self) -> float | None:
        return max((changed_at for _, changed_at in self._progress.values()), default=None)


def _is_same_attempt(run: BoxRun, other: BoxRun) -> bool:
    """Whether there was no restart between two readings.

    Then they have a process in common, or no rank in common. Rank and run id do not count: a
    process may learn both only when it calls `init_process_group`.
    """
    processes, others = (
        {
            rank: (process_of(box), box.meta.get("pid_started"))
            for rank, box in side.summaries.items()
        }
        for side in (run, other)
    )
    has_common_process = not set(processes.values()).isdisjoint(others.values())
    return has_common_process or processes.keys().isdisjoint(others)
