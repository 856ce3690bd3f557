"""The monitor: a process of its own on each host that reads the boxes and says what is wrong, while it is wrong.

It never touches the job: it reads files and /proc, so it works while ranks hold the GIL, are stopped, or are dead. Often it
takes a pulse (cursors and counts, a few KB a rank); it reads whole boxes when the pulse stops, when a process is gone, and now
and then. A verdict is printed once, and kept in the run's folder with what was seen of the processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchwhere.blackbox.pulse import Pulse, take_pulse
from torchwhere.blackbox.run import Run, read_run
from torchwhere.consultation import judge, kept_sightings
from torchwhere.diagnose.doctor.examination import STALL_S
from torchwhere.diagnose.doctor.sighting import Sighting
from torchwhere.diagnose.doctor.verdict import Verdict, VerdictKind
from torchwhere.errors import TorchwhereError
from torchwhere.processes import is_running, look
from torchwhere.show.verdict import verdict_json, verdict_text

PULSE_S = 0.25
KEEP_S = 2.0
EXAMINE_S = 15.0
_MOST_SHARE = 0.02  # of one core: an examination that takes long is made less often
_CALM = (VerdictKind.HEALTHY, VerdictKind.STRAGGLER)


@dataclass(slots=True)
class Monitor:
    """Watches one run on one host until its processes are gone."""

    folder: Path
    stall_s: float = STALL_S
    end_with: signal.Signals | None = None  # sent to the ranks of this host after a verdict
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: T201 - its one job
    launcher: int | None = None  # the process that started it: while it is there, ranks may still come
    _run: Run | None = None
    _sightings: dict[int, Sighting] = field(default_factory=dict)
    _pulses: dict[Path, tuple[Pulse, float]] = field(default_factory=dict)  # the last one, and since when it is the same
    _said: set[tuple[str, tuple[int, ...], int | None]] = field(default_factory=set)
    _examined_at: float = 0.0
    _kept_at: float = 0.0
    _has_failed: bool = False
    _examine_every: float = EXAMINE_S
    _started_ns: int = field(default_factory=time.time_ns)

    def watch(self) -> None:
        while True:
            died = self._look()
            stalled = self._feel()
            due = time.monotonic() - self._examined_at > self._examine_every
            if self._run is not None and (died or stalled or due):
                self._examine_safely()
            if self._is_over():
                self._keep()
                return
            time.sleep(PULSE_S)

    # -- looking -----------------------------------------------------------------------------------------------------

    def _look(self) -> bool:
        """See the processes; whether one has gone since."""
        if self._run is None or set(self._paths()) != {box.path for box in self._run.boxes.values()}:
            self._run = self._read()
        if self._run is None:
            return False
        before, now = self._sightings, look(self._run.boxes)
        self._sightings = {rank: _remembered(before.get(rank), seen) for rank, seen in now.items()}
        died = any(seen.alive is False and before.get(rank, seen).alive for rank, seen in self._sightings.items())
        if died or time.monotonic() - self._kept_at > KEEP_S:
            self._keep()
        return died

    def _feel(self) -> bool:
        """Take every pulse; whether one has stood still for as long as a stall."""
        now, stalled = time.monotonic(), False
        for path in self._paths():
            pulse, known = take_pulse(path), self._pulses.get(path)
            if known is None or pulse.counts != known[0].counts:
                self._pulses[path] = pulse, now
            else:
                stalled = stalled or now - known[1] > self.stall_s
        return stalled and now - self._examined_at > self.stall_s / 2

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("rank*.box"))

    def _read(self) -> Run | None:
        try:
            run = read_run(self.folder)
        except TorchwhereError:
            return None
        newest = max(int(box.meta.get("started_ns", 0)) for box in run.boxes.values())
        return run if newest > self._started_ns - 60_000_000_000 else None  # boxes of an earlier run, not yet replaced

    def _is_over(self) -> bool:
        # One that has ended and whose parent reads our stderr to its end first must not keep us: a zombie counts as gone.
        launched = self.launcher is not None and is_running(self.launcher)
        return not launched and not any(sighting.alive for sighting in self._sightings.values())

    # -- saying ------------------------------------------------------------------------------------------------------

    def _examine_safely(self) -> None:
        """A box may be in any state; a monitor that falls over it would be one more problem for somebody who has one."""
        try:
            self._examine()
        except Exception as error:
            self._examined_at = time.monotonic()
            if not self._has_failed:
                self._has_failed = True
                self.say(f"torchwhere: the monitor could not examine {self.folder}: {type(error).__name__}: {error}")

    def _examine(self) -> None:
        start = time.monotonic()
        self._run = self._read() or self._run
        if self._run is None:
            return
        kept = kept_sightings(self.folder) | {rank: seen.to_dict() for rank, seen in self._sightings.items()}
        verdict = judge(self._run, kept, stall_s=self.stall_s)
        self._examined_at = time.monotonic()
        self._examine_every = max(EXAMINE_S, (self._examined_at - start) / _MOST_SHARE)
        number = verdict.collective.get("number") if verdict.collective else None
        if _is_news(verdict) and (verdict.kind, verdict.culprits, number) not in self._said:
            self._said.add((verdict.kind, verdict.culprits, number))
            self._tell(verdict)

    def _tell(self, verdict: Verdict) -> None:
        text = verdict_text(verdict)
        self.say(f"\n--- torchwhere ---\n{text}\n--- kept in {self.folder}: verdict.txt, verdict.json ---")
        _write(self.folder / "verdict.txt", text + "\n")
        _write(self.folder / "verdict.json", json.dumps(verdict_json(verdict), indent=1))
        for rank, report in verdict.ranks.items():
            if report.stack and rank in self._sightings:
                self._sightings[rank] = replace(self._sightings[rank], stack=report.stack)
        self._keep()
        if self.end_with is not None:
            self._end(self.end_with)

    def _end(self, number: signal.Signals) -> None:
        for rank, sighting in self._sightings.items():
            box = self._run.boxes.get(rank) if self._run is not None else None
            if sighting.alive and box is not None and isinstance(pid := box.meta.get("pid"), int):
                self.say(f"torchwhere: ending rank {rank} (process {pid}) with {number.name}")
                os.kill(pid, number)

    def _keep(self) -> None:
        """What was seen, for a doctor who comes when all is over."""
        self._kept_at = time.monotonic()
        seen = {str(rank): sighting.to_dict() for rank, sighting in self._sightings.items() if sighting.alive is not None}
        _write(self.folder / f"monitor-{socket.gethostname()}.json", json.dumps({"ranks": seen}))


def _is_news(verdict: Verdict) -> bool:
    """Whether anybody needs to be told: not that a rank failed for whom nobody waits, which it has said itself."""
    return verdict.kind not in _CALM and not (verdict.kind is VerdictKind.DEAD and verdict.collective is None)


def _remembered(before: Sighting | None, seen: Sighting) -> Sighting:
    """A new look, with what older looks knew and this one cannot: when it was last alive, and its stack."""
    if before is None:
        return seen
    return replace(seen, alive_ns=seen.alive_ns or before.alive_ns, stack=seen.stack or before.stack)


def _write(path: Path, text: str) -> None:
    """Whole or not at all; a folder that cannot be written is said by the ranks themselves."""
    try:
        part = path.with_name(f".{path.name}.part")
        part.write_text(text)
        part.replace(path)
    except OSError:
        pass
