"""The monitor: a separate process on each host that reads the boxes and prints what is wrong.

It never touches the job: it reads files and /proc, so it works while ranks hold the GIL, are
stopped, or have exited. It often reads the progress counters, a few KB a rank. It reads whole boxes
when a rank makes no progress, when a process exits, and every 15 s. Each verdict is printed once
and saved in the run's folder, with the statuses of the processes and the last calls of their ranks
(`snapshots/write.py`). If a job has several hosts, one of their monitors gives the verdicts: its
role (`roles.py`) decides that, and knows what the other hosts report.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchwhere.core.atomic_file import replace_file
from torchwhere.core.stall import STALL_S
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.monitor.gpu_sampler import GpuSampler, uses_nvidia_gpu
from torchwhere.monitor.host import HostView
from torchwhere.monitor.single import SingleHost, with_hosts
from torchwhere.monitor.verdict_output import VerdictOutput, print_error, verdict_key
from torchwhere.pipeline.verdict import diagnose_run
from torchwhere.processes.exit_waiter import ExitWaiter
from torchwhere.processes.workers import Worker, workers_of
from torchwhere.snapshots.read import MONITOR, saved_statuses
from torchwhere.snapshots.write import MOST_RANKS, SnapshotWriter

POLL_S = 0.25
SAVE_S = 1.0
EXAMINE_S = 15.0
SETTLE_S = 1.0  # a launcher ends the other ranks soon after one has exited
_MOST_SHARE = 0.02  # of one core: slow examinations are made less often
_MOST_SHARE_LOOKING = 0.05  # the same for looking, at thousands of boxes in one folder


@dataclass(slots=True)
class Monitor:
    """Watches one run on one host until its processes have exited."""

    folder: Path
    stall_s: float = STALL_S
    end_with: signal.Signals | None = None  # sent to the ranks of this host after a verdict
    print_line: Callable[[str], None] = print_error
    print_verdict: Callable[[Verdict], None] | None = None  # replaces the text, for programs
    # the process that started it; while it runs, more ranks may start
    launcher: int | None = None
    role: SingleHost = field(default_factory=SingleHost)
    host: HostView = field(init=False)
    _output: VerdictOutput = field(init=False)
    _snapshot_writer: SnapshotWriter = field(init=False)
    _gpu_sampler: GpuSampler = field(init=False)
    _has_ended_ranks: bool = False
    _workers: list[Worker] = field(default_factory=list)  # of the ranks that it has ended
    _has_unexamined_exit: bool = False
    _exited_at: float = 0.0
    _examined_at: float = 0.0
    _saved_at: float = 0.0
    _has_failed: bool = False
    _examine_every_s: float = EXAMINE_S

    def __post_init__(self) -> None:
        self.host = HostView(self.folder, self.launcher)
        self._output = VerdictOutput(self.folder, self.print_verdict, self.print_line)
        self._snapshot_writer = SnapshotWriter(self.folder)
        self._gpu_sampler = GpuSampler(self.folder)

    def watch(self) -> bool:
        """Watch until the job is over. Returns False if a thread still waits for another host."""
        with ExitWaiter() as exits:
            while True:
                began = time.monotonic()
                has_exit = self._look()
                exits.keep(set(self.host.alive_pids().values()))
                self.host.add_exit_codes(exits.exit_codes())
                is_stalled = self._is_stalled()
                took_s = time.monotonic() - began
                self._write_due_snapshot()
                is_wanted = self.role.update(self.host.run)
                if has_exit:
                    self._has_unexamined_exit, self._exited_at = True, time.monotonic()
                if self._is_due(is_stalled=is_stalled, is_wanted=is_wanted):
                    self._act()
                if self.role.ends_ranks:
                    self._end_ranks()
                if self.host.is_over() and self.role.may_exit(
                    has_succeeded=self.host.have_succeeded()
                ):
                    return self._finish()
                exits.wait(max(POLL_S, min(took_s / _MOST_SHARE_LOOKING, self.stall_s / 3)))

    def _is_due(self, *, is_stalled: bool, is_wanted: bool) -> bool:
        """Whether to examine the run now, or to report it to the lead.

        After a rank has exited, the launcher may be ending the others. Until that is over, their
        exits and exit codes are incomplete, and the first rank to exit is not certain.
        """
        now = time.monotonic()
        if not self.role.gives_verdicts:
            return self._has_unexamined_exit or is_stalled or is_wanted
        if self._has_unexamined_exit:
            return now - self._exited_at >= SETTLE_S
        return is_stalled or is_wanted or now - self._examined_at > self._examine_every_s

    def _act(self) -> None:
        if self.host.run is not None:
            self._try(self._examine if self.role.gives_verdicts else self._report)

    def _try(self, work: Callable[[], None]) -> None:
        """Print the first failure and continue: a damaged box must not stop the monitor."""
        try:
            work()
        except Exception as error:
            self._examined_at = time.monotonic()
            if not self._has_failed:
                self._has_failed = True
                self.print_line(
                    f"torchwhere: the monitor could not examine {self.folder}:"
                    f" {type(error).__name__}: {error}"
                )

    # -- looking -----------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Look at the processes and save what they show. Returns True if one has exited."""
        had_run = self.host.run is not None
        has_exit = self.host.look()
        if self.host.run is not None and not had_run:
            self._output.set_aside(self.host.run)
        is_due = time.monotonic() - self._saved_at > SAVE_S
        if self.host.run is not None and (has_exit or is_due):
            self._save_statuses()
            if uses_nvidia_gpu(box.meta for box in self.host.run.summaries.values()):
                self._gpu_sampler.start()
        return has_exit

    def _is_stalled(self) -> bool:
        paths = self.host.run_paths() if self.role.gives_verdicts else self.host.own_paths()
        is_stalled = self.host.is_stalled(paths, stall_s=self.stall_s)
        return is_stalled and time.monotonic() - self._examined_at > self.stall_s / 2

    def _examine(self) -> None:
        """Diagnose the run and publish the verdict if it is new."""
        start = time.monotonic()
        self._has_unexamined_exit = False
        self.role.request_snapshots()
        read_ns, read_at, is_fresh = self._read_again()
        if self.host.run is None or (self.host.is_running() and not is_fresh):
            self._examined_at = time.monotonic()  # an old reading says nothing about a live job
            return
        inputs = self.role.inputs(self.host.run)
        saved = saved_statuses(self.folder) | inputs.saved | self.host.saved_statuses()
        verdict = diagnose_run(
            inputs.run,
            saved,
            stall_s=self.stall_s,
            job_calls=inputs.job_calls,
            ask=self.role.request_stacks,
            gpus=inputs.gpus,
        )
        verdict = with_hosts(verdict, inputs.run)
        self._write_snapshot(read_ns, read_at)
        self._save_stacks(verdict)
        self._examined_at = time.monotonic()
        self._examine_every_s = max(EXAMINE_S, (self._examined_at - start) / _MOST_SHARE)
        self._publish(verdict)

    def _publish(self, verdict: Verdict) -> None:
        key = verdict_key(verdict)
        # After the ranks were ended, every further verdict is a consequence of that.
        is_known = self.role.has_printed(key) or self._has_ended_ranks
        may_print = not is_known and self.role.may_blame(verdict.culprits)
        if may_print and self._output.is_new(verdict):
            self._output.publish(verdict)
            self.role.on_verdict(key, ends_ranks=self.end_with is not None)
            self._end_ranks()
        else:
            self._output.retract_wait(verdict)
            self._output.print_pause(verdict, stall_s=self.stall_s)

    def _end_ranks(self) -> None:
        """Send the signal of `--end-with` to the ranks of this host, once. Remember their workers:
        after the end of a rank, nothing shows which processes it had started."""
        if self.end_with is None or self._has_ended_ranks:
            return
        self._has_ended_ranks = True
        self._workers = workers_of(set(self.host.alive_pids().values()))
        for rank, pid in self.host.alive_pids().items():
            self.print_line(
                f"torchwhere: ending rank {rank} (process {pid}) with {self.end_with.name}"
            )
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, self.end_with)

    def _report(self, *, is_last: bool = False) -> None:
        """Send statuses and snapshots of this host to the lead."""
        self._examined_at = time.monotonic()
        self._has_unexamined_exit = False
        if self.host.run is None:
            return
        self.host.look_for_stacks(self.role.wanted_stacks)
        self._save_statuses()
        # After the look: the box of a process that has exited then holds its last events.
        self._write_snapshot(*self._read_again()[:2])
        run = self.host.run
        boxes = {rank: run.boxes[rank] for rank in self.host.own_ranks() if rank in run.boxes}
        self.role.send_report(boxes, self.host.statuses, is_last=is_last)

    def _end_workers(self) -> None:
        """End the workers that outlived the ranks which this monitor has ended."""
        for worker in self._workers:
            if worker.is_left_over():
                self.print_line(
                    f"torchwhere: ending process {worker.pid}, a worker that outlived its rank"
                )
                worker.kill()

    def _finish(self) -> bool:
        self._end_workers()
        self._save_statuses()
        self._gpu_sampler.stop()
        if not self.role.gives_verdicts:
            self._report(is_last=True)
        elif self._has_unexamined_exit:
            self._act()
        return self.role.close()

    # -- saving ------------------------------------------------------------------------------------

    def _read_again(self) -> tuple[int, float, bool]:
        """Read the boxes. Returns when that began, by the wall clock and the monotonic clock, and
        whether the run could be read."""
        now_ns = time.time_ns()
        now = time.monotonic()
        return now_ns, now, self.host.read_again()

    def _write_due_snapshot(self) -> None:
        changed_at = self.host.last_progress_at()
        if changed_at is not None and self._snapshot_writer.is_due(changed_at):
            self._try(lambda: self._write_snapshot(*self._read_again()[:2]))

    def _write_snapshot(self, read_ns: int, read_at: float) -> None:
        """Save the last calls of this host's ranks, for a doctor that lacks a box.

        If a box is already gone, the older snapshot knows more and stays.
        """
        run = self.host.run
        own = self.host.own_ranks()
        if run is None or len(own) > MOST_RANKS or any(rank not in run.boxes for rank in own):
            return
        boxes = {rank: run.boxes[rank] for rank in own}
        self._snapshot_writer.write(boxes, read_ns=read_ns, read_at=read_at)

    def _save_stacks(self, verdict: Verdict) -> None:
        """Save the stacks of suspects: after their exit they cannot be asked again."""
        statuses = self.host.statuses
        reports = {
            rank: report
            for rank, report in verdict.ranks.items()
            if report.stack and rank in statuses
        }
        for rank, report in reports.items():
            statuses[rank] = replace(
                statuses[rank],
                stack=report.stack,
                stack_ns=time.time_ns(),
                workers=report.workers,
            )
        if reports:
            self._save_statuses()

    def _save_statuses(self) -> None:
        """Save the statuses of this host's processes, for a doctor after the job has ended.

        A monitor that was started too late to see a process alive keeps the earlier file.
        """
        self._saved_at = time.monotonic()
        path = self.folder / f"{MONITOR}-{socket.gethostname()}.json"
        saw_alive = any(status.alive_ns is not None for status in self.host.statuses.values())
        is_late = self.launcher is None and not saw_alive
        if not (is_late and path.exists()):
            values = self.role.describe() | {"ranks": self.host.saved_statuses()}
            replace_file(path, json.dumps(values))
