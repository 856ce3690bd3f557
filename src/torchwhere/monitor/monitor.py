"""The monitor: a process of its own on each host that reads the boxes and says what is wrong, while
it is wrong.

It never touches the job: it reads files and /proc, so it works while ranks hold the GIL, are
stopped, or are dead. Often it takes a pulse (cursors and counts, a few KB a rank); it reads whole
boxes when the pulse stops, when a process is gone, and now and then. A verdict is printed once, and
kept in the run's folder with what was seen of the processes and what their ranks did last
(`snapshots/write.py`). Of monitors of several hosts one speaks; `role.py` knows which, and what the
others can tell it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchwhere.blackbox.run import BoxRun, read_run
from torchwhere.blackbox.summary import BoxOrSummary, Progress, read_progress
from torchwhere.core.atomic_file import replace_file
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.place import Certainty
from torchwhere.diagnose.doctor.exits import ended_well
from torchwhere.diagnose.doctor.rules import STALL_S
from torchwhere.diagnose.doctor.verdict import Verdict, VerdictKind
from torchwhere.monitor.roles import SingleHost, with_hosts
from torchwhere.pipeline.verdict import diagnose_run, saved_statuses
from torchwhere.processes.exit_waiter import ExitWaiter
from torchwhere.processes.look import is_running, look
from torchwhere.processes.status import ProcessStatus
from torchwhere.render.verdict import verdict_json, verdict_text
from torchwhere.snapshots.read import MONITOR
from torchwhere.snapshots.write import MOST_RANKS, SnapshotWriter, as_saved

PULSE_S = 0.25
KEEP_S = 1.0
EXAMINE_S = 15.0
_MOST_SHARE = 0.02  # of one core: an examination that takes long is made less often
_MOST_SHARE_LOOKING = 0.05  # likewise, of a job with thousands of boxes in one folder
_AT_ONCE_S = 0.05  # who is gone so soon after another one was killed with it
_BOX_NS = 10_000_000_000  # whoever starts a monitor has a box by then, or gets none
_UNSEEN = ProcessStatus()
_CALM = (VerdictKind.HEALTHY, VerdictKind.STRAGGLER)
_MAY_PASS = (VerdictKind.MISSING, VerdictKind.DEADLOCK, VerdictKind.TOGETHER)


@dataclass(slots=True)
class Monitor:
    """Watches one run on one host until its processes are gone."""

    folder: Path
    stall_s: float = STALL_S
    end_with: signal.Signals | None = None  # sent to the ranks of this host after a verdict
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: T201 - its one job
    say_verdict: Callable[[Verdict], None] | None = None  # for programs, instead of saying its text
    # the process that started it: while it is there, ranks may still come
    launcher: int | None = None
    others: SingleHost = field(default_factory=SingleHost)  # the monitors of other hosts
    _run: BoxRun | None = None
    # of the run; also of boxes that are gone since
    _labels: dict[int, BoxOrSummary] = field(default_factory=dict)
    _statuses: dict[int, ProcessStatus] = field(default_factory=dict)
    # the last one, and since when it is the same
    _progress: dict[Path, tuple[Progress, float]] = field(default_factory=dict)
    _snapshot_writer: SnapshotWriter = field(init=False)
    _said: set[str] = field(default_factory=set)
    _waits: Verdict | None = None  # what was told last, if it is a wait that may pass
    _has_ended: bool = False
    _has_news: bool = False  # a process has gone, and no examination has seen it
    _examined_at: float = 0.0
    _kept_at: float = 0.0
    _has_failed: bool = False
    _examine_every: float = EXAMINE_S
    _started_ns: int = field(default_factory=time.time_ns)

    def __post_init__(self) -> None:
        self._snapshot_writer = SnapshotWriter(self.folder)

    def watch(self) -> bool:
        """Until all is over. False if a thread is left that waits for another host."""
        with ExitWaiter() as vigil:
            while True:
                began = time.monotonic()
                died = self._look()
                vigil.keep(self._pids())
                self._note(vigil.exit_codes())
                stalled = self._feel()
                took = time.monotonic() - began
                if self._progress and self._snapshot_writer.is_due(
                    max(moved_at for _, moved_at in self._progress.values())
                ):
                    self._try(lambda: self._write_down(*self._read_anew()))
                called = self.others.tend(self._run)
                self._has_news = self._has_news or died
                due = time.monotonic() - self._examined_at > self._examine_every
                if self._run is not None and (
                    died or stalled or called or (due and self.others.speaks)
                ):
                    self._act()
                if self.others.ends and self.end_with is not None:
                    self._end(self.end_with)
                if self._is_over() and self.others.may_leave(is_well=self._has_ended_well()):
                    return self._leave()
                vigil.wait(max(PULSE_S, min(took / _MOST_SHARE_LOOKING, self.stall_s / 3)))

    def _act(self) -> None:
        self._try(self._examine if self.others.speaks else self._report)

    def _try(self, do: Callable[[], None]) -> None:
        """A box may be in any state; a monitor that falls over it would be one more problem for
        somebody who has one."""
        try:
            do()
        except Exception as error:
            self._examined_at = time.monotonic()
            if not self._has_failed:
                self._has_failed = True
                self.say(
                    f"torchwhere: the monitor could not examine {self.folder}:"
                    f" {type(error).__name__}: {error}"
                )

    # -- looking -----------------------------------------------------------------------------------

    def _look(self) -> bool:
        """See the processes; whether one has gone since."""
        if self._run is None or set(self._paths()) != {
            box.path for box in self._run.summaries.values()
        }:
            self._take(self._read())
        if self._run is None:
            return False
        before, now = self._statuses, look(self._labels)
        died = [
            rank
            for rank, seen in now.items()
            if seen.alive is False and before.get(rank, seen).alive
        ]
        if died:  # of those who are killed together somebody is the first, for a moment
            time.sleep(_AT_ONCE_S)
            again = look(self._labels)
            are_left = any(seen.alive for seen in again.values())
            now = again | {rank: now[rank] for rank in died} if are_left else again
        self._statuses = {rank: _remembered(before.get(rank), seen) for rank, seen in now.items()}
        if died or time.monotonic() - self._kept_at > KEEP_S:
            self._keep()
        return bool(died)

    def _note(self, exit_codes: dict[int, int]) -> None:
        """Add how processes ended that are gone: which signal ended a rank says whether the
        launcher did."""
        for rank, seen in self._statuses.items():
            pid = self._labels[rank].meta.get("pid")
            if pid in exit_codes:
                self._statuses[rank] = replace(seen, exit_code=exit_codes[pid])

    def _take(self, run: BoxRun | None) -> None:
        """A run that was just read. A process whose box is gone is still there to be looked at."""
        if run is not None:
            is_same = self._run is not None and _is_one_life(run, self._run)
            self._labels = (self._labels if is_same else {}) | dict(run.summaries)
            self._statuses = self._statuses if is_same else {}
            self._run = run

    def _feel(self) -> bool:
        """Take every pulse; whether one has stood still for as long as a stall."""
        now, stalled = time.monotonic(), False
        for path in self._paths() if self.others.speaks else self._own_paths():
            progress, known = read_progress(path), self._progress.get(path)
            if known is None or progress.counts != known[0].counts:
                self._progress[path] = progress, now
            else:
                stalled = stalled or now - known[1] > self.stall_s
        return stalled and now - self._examined_at > self.stall_s / 2

    def _paths(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("rank*.box") if path.is_file())

    def _own_paths(self) -> list[Path]:
        """Boxes of this host: in a shared folder, those of others are looked at by others."""
        boxes = self._run.summaries if self._run is not None else {}
        return [
            boxes[rank].path
            for rank, seen in self._statuses.items()
            if seen.alive is not None and rank in boxes
        ]

    def _pids(self) -> set[int]:
        alive = [
            self._labels[rank].meta.get("pid")
            for rank, seen in self._statuses.items()
            if seen.alive
        ]
        return {pid for pid in alive if isinstance(pid, int)}

    def _read(self) -> BoxRun | None:
        try:
            run = read_run(self.folder)
        except TorchwhereError:
            return None
        if self.launcher is None:
            return run
        if self._run is not None and not _is_one_life(run, self._run):
            return None  # a restart, which has a monitor of its own
        return run if self._run is not None or self._is_ours(run) else None

    def _is_ours(self, run: BoxRun) -> bool:
        """Whether the process that started this monitor is one of the run: it is not in one that
        came before or after it. If it has no box, as on a full disk, ranks that began with it are
        watched."""
        here = (socket.gethostname(), self.launcher)
        if any(
            (box.meta.get("host"), box.meta.get("pid")) == here for box in run.summaries.values()
        ):
            return True
        newest = max(int(box.meta.get("started_ns", 0)) for box in run.summaries.values())
        is_old = (
            time.time_ns() - self._started_ns > _BOX_NS
            and self.launcher is not None
            and is_running(self.launcher)
        )
        return is_old and newest > self._started_ns - 6 * _BOX_NS

    def _is_over(self) -> bool:
        # One that has ended and whose parent reads our stderr to its end first must not keep us: a
        # zombie counts as gone.
        launched = self.launcher is not None and is_running(self.launcher)
        return not launched and not any(status.alive for status in self._statuses.values())

    def _has_ended_well(self) -> bool:
        """Whether all ranks that were seen here say so."""
        # a restart may have taken the folder over
        run = (self._read() or self._run) if self._statuses else None
        boxes = (
            [
                run.boxes[rank]
                for rank, seen in self._statuses.items()
                if seen.alive is False and rank in run.boxes
            ]
            if run
            else []
        )
        ends = [list(box.events(kinds={"end"}, last=1)) for box in boxes]
        return all(end and ended_well(end[0]) for end in ends)

    # -- saying ------------------------------------------------------------------------------------

    def _examine(self) -> None:
        start = time.monotonic()
        self._has_news = False
        self.others.prepare()
        read_ns, read_at = self._read_anew()
        if self._run is None:
            return
        found = self.others.gather(self._run)
        kept = saved_statuses(self.folder) | found.kept | self._seen()
        verdict = diagnose_run(
            found.run, kept, stall_s=self.stall_s, job_calls=found.job_calls, ask=self.others.ask
        )
        verdict = with_hosts(verdict, found.run)
        self._write_down(read_ns, read_at)
        self._keep_stacks(verdict)
        self._examined_at = time.monotonic()
        self._examine_every = max(EXAMINE_S, (self._examined_at - start) / _MOST_SHARE)
        number = verdict.collective.get("number") if verdict.collective else None
        news = f"{verdict.kind} {verdict.culprits} {number}"
        # or comes of that
        is_told = news in self._said or self.others.has_said(news) or self._has_ended
        if _is_news(verdict) and not is_told and self.others.may_tell(verdict.culprits):
            self._said.add(news)
            self._tell(verdict)
            self.others.told(news, ends=self.end_with is not None)
            if self.end_with is not None:
                self._end(self.end_with)
        elif (
            self._waits is not None
            and verdict.kind in _CALM
            and verdict.certainty is not Certainty.UNKNOWN
        ):
            self._take_back(self._waits, verdict)

    def _report(self, *, is_last: bool = False) -> None:
        """To the monitor that speaks: how the processes of this host are, and what their boxes
        say."""
        self._examined_at = time.monotonic()
        if self._run is None:
            return
        own = {
            rank: box
            for rank, box in self._run.summaries.items()
            if self._statuses.get(rank, _UNSEEN).alive is not None
        }
        seen = look(own, stacks=[rank for rank in self.others.stacks if rank in own])
        self._statuses |= {
            rank: _remembered(self._statuses.get(rank), each) for rank, each in seen.items()
        }
        self._keep()
        # after the look: of a process that is gone, with its last words
        self._write_down(*self._read_anew())
        boxes = {rank: self._run.boxes[rank] for rank in own if rank in self._run.boxes}
        self.others.report(boxes, self._statuses, is_last=is_last)

    def _leave(self) -> bool:
        self._keep()
        if not self.others.speaks:
            self._report(is_last=True)
        elif self._has_news:
            self._act()
        return self.others.close()

    def _tell(self, verdict: Verdict) -> None:
        text = verdict_text(verdict)
        if self.say_verdict is not None:
            self.say_verdict(verdict)
        else:
            self.say(
                f"\n--- torchwhere ---\n{text}\n--- kept in {self.folder}: verdict.txt,"
                " verdict.json ---"
            )
        replace_file(self.folder / "verdict.txt", text + "\n")
        replace_file(self.folder / "verdict.json", json.dumps(verdict_json(verdict), indent=1))
        self._waits = verdict if verdict.kind in _MAY_PASS else None

    def _take_back(self, told: Verdict, now: Verdict) -> None:
        """A wait that was told is over: nobody who reads of it later shall take it for how the job
        ended."""
        self._waits = None
        self._said.clear()  # the same may happen again
        if self.say_verdict is not None:
            self.say_verdict(now)
        else:
            self.say(f"torchwhere: the wait is over, the job goes on. {now.explanation[0]}")
        replace_file(
            self.folder / "verdict.txt",
            f"{verdict_text(told)}\nIt passed: the job went on. {now.explanation[0]}\n",
        )
        replace_file(
            self.folder / "verdict.json",
            json.dumps(verdict_json(told) | {"passed": True}, indent=1),
        )

    def _read_anew(self) -> tuple[int, float]:
        """Read the boxes; when that was begun, by both clocks."""
        now_ns, now = time.time_ns(), time.monotonic()
        self._take(self._read())
        return now_ns, now

    def _write_down(self, read_ns: int, read_at: float) -> None:
        """What the ranks of this host did last, for a doctor who has no box of one. If one is gone,
        what was written stays."""
        own = [rank for rank, seen in self._statuses.items() if seen.alive is not None]
        if (
            self._run is not None
            and len(own) <= MOST_RANKS
            and all(rank in self._run.boxes for rank in own)
        ):
            self._snapshot_writer.write(
                {rank: self._run.boxes[rank] for rank in own}, read_ns=read_ns, read_at=read_at
            )

    def _keep_stacks(self, verdict: Verdict) -> None:
        """What suspects answered: after they are gone, nobody can ask."""
        stacks = {
            rank: report.stack
            for rank, report in verdict.ranks.items()
            if report.stack and rank in self._statuses
        }
        for rank, stack in stacks.items():
            self._statuses[rank] = replace(
                self._statuses[rank], stack=stack, stack_ns=time.time_ns()
            )
        if stacks:
            self._keep()

    def _end(self, number: signal.Signals) -> None:
        """Once: who does not obey a signal does not obey it twice."""
        if self._has_ended:
            return
        self._has_ended = True
        for rank, status in self._statuses.items():
            box = self._labels.get(rank)
            if status.alive and box is not None and isinstance(pid := box.meta.get("pid"), int):
                self.say(f"torchwhere: ending rank {rank} (process {pid}) with {number.name}")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _keep(self) -> None:
        """What was seen, for a doctor who comes when all is over. Who came too late to see anything
        leaves what others saw."""
        self._kept_at = time.monotonic()
        path = self.folder / f"{MONITOR}-{socket.gethostname()}.json"
        came_late = self.launcher is None and not any(
            seen.alive_ns is not None for seen in self._statuses.values()
        )
        if not (came_late and path.exists()):
            replace_file(path, json.dumps(self.others.describe() | {"ranks": self._seen()}))

    def _seen(self) -> dict[int, dict[str, Any]]:
        """The processes of this host, as they are kept: with whose they are."""
        seen = {rank: status for rank, status in self._statuses.items() if status.alive is not None}
        return {rank: as_saved(self._labels[rank], status) for rank, status in seen.items()}


def _is_one_life(run: BoxRun, other: BoxRun) -> bool:
    """Whether two readings are of one run, with no restart in between: no rank of both is another
    process."""
    common = [
        (box, other.summaries[rank])
        for rank, box in run.summaries.items()
        if rank in other.summaries
    ]
    return all(_who(one) == _who(another) for one, another in common)


def _who(box: BoxOrSummary) -> tuple[Any, ...]:
    return *box.run, box.meta.get("host"), box.meta.get("pid")


def _is_news(verdict: Verdict) -> bool:
    """Whether anybody needs to be told: not that a rank failed for whom nobody waits, if it has
    said that itself."""
    if verdict.kind in _CALM or verdict.certainty is Certainty.UNKNOWN:
        return False
    if verdict.kind is not VerdictKind.DEAD or verdict.collective is not None:
        return True
    return "gathering" in verdict.facts or bool(verdict.facts.get("exit_codes"))


def _remembered(before: ProcessStatus | None, seen: ProcessStatus) -> ProcessStatus:
    return seen if before is None else seen.after(before)
