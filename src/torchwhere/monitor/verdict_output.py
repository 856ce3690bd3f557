"""Publishes the verdicts of a monitor: prints each one once, and saves them in the run's folder.

`verdicts.jsonl` has all verdicts of the run. `verdict.txt` and `verdict.json` have the one that
explains the state of the job: the last one, or a hang that the exits of its ranks followed.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchwhere.blackbox.run import BoxRun
from torchwhere.blackbox.summary import started_ns
from torchwhere.core.atomic_file import replace_file
from torchwhere.core.place import Certainty
from torchwhere.diagnose.doctor.verdict import NO_FAULT, Verdict, VerdictKind
from torchwhere.render.verdict import verdict_json, verdict_text
from torchwhere.render.verdict_text.observers import passed_text, pause_text, wait_over_text

_NOT_WRONG = NO_FAULT | {VerdictKind.STRAGGLER}
HISTORY_FILE = "verdicts.jsonl"
_FILES = ("verdict.txt", "verdict.json", HISTORY_FILE)
_MAY_PASS = (VerdictKind.MISSING, VerdictKind.DEADLOCK, VerdictKind.TOGETHER)


def print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the output of the monitor


@dataclass(slots=True)
class VerdictOutput:
    """Prints verdicts on stderr, or gives them to `print_verdict`; writes the files."""

    folder: Path
    print_verdict: Callable[[Verdict], None] | None = None
    print_line: Callable[[str], None] = print_error
    _printed: set[str] = field(default_factory=set)
    _printed_pauses: set[str] = field(default_factory=set)
    _saved: Verdict | None = None  # the verdict in `verdict.txt`, unless it was withdrawn

    def is_new(self, verdict: Verdict) -> bool:
        """Whether to publish a verdict. The exit of a rank that was reported missing is not new."""
        if not is_worth_printing(verdict) or verdict_key(verdict) in self._printed:
            return False
        hang, exited = self._saved, set(verdict.culprits)
        return not (exited and hang and exited <= set(hang.culprits) and _follows(hang, verdict))

    def publish(self, verdict: Verdict) -> None:
        self._printed.add(verdict_key(verdict))
        is_consequence = self._saved is not None and _follows(self._saved, verdict)
        text, values = verdict_text(verdict), verdict_json(verdict)
        files = HISTORY_FILE if is_consequence else "verdict.txt, verdict.json"
        if self.print_verdict is not None:
            self.print_verdict(verdict)
        else:
            self.print_line(
                f"\n--- torchwhere ---\n{text}\n--- saved in {self.folder}: {files} ---"
            )
        self._add_to_history(values)
        if not is_consequence:
            self._write(text, values)
            self._saved = verdict

    def retract_wait(self, now: Verdict) -> None:
        """Withdraw a printed wait if the job continues: it is not how the job ended."""
        if self._saved is None or self._saved.kind not in _MAY_PASS:
            return
        if now.kind not in _NOT_WRONG or now.certainty is Certainty.UNKNOWN:
            return
        if now.stalled_s is not None:  # the job does not continue yet
            return
        earlier, self._saved = self._saved, None
        self._printed.clear()  # the same may happen again
        if self.print_verdict is not None:
            self.print_verdict(now)
        else:
            self.print_line(wait_over_text(now))
        text = f"{verdict_text(earlier)}\n{passed_text(now)}"
        values = verdict_json(earlier) | {"passed": True}
        self._add_to_history(values)
        self._write(text, values)

    def print_pause(self, verdict: Verdict, *, stall_s: float) -> None:
        """Print that a wait of more than `stall_s` is a pause: once for each kind and ranks. It is
        not a verdict, so that no file and no JSON has it."""
        paused = verdict.facts.get("paused")
        if paused is None or (verdict.stalled_s or 0.0) < stall_s or self.print_verdict is not None:
            return
        key = f"{paused['activity']} {paused['ranks']}"
        if key not in self._printed_pauses:
            self._printed_pauses.add(key)
            self.print_line(pause_text(verdict))

    def set_aside(self, run: BoxRun) -> None:
        """Rename the files of an earlier run in the folder. A restart belongs to the same run."""
        boxes = run.summaries.values()
        if any(box.run[1] > 0 for box in boxes):
            return
        began_s = min(map(started_ns, boxes)) / 1e9
        for name in _FILES:
            path = self.folder / name
            with contextlib.suppress(OSError):
                changed_s = path.stat().st_mtime
                if changed_s < began_s:
                    when = time.strftime("%Y%m%dT%H%M%S", time.gmtime(changed_s))
                    path.rename(path.with_name(f"{path.stem}.{when}{path.suffix}"))

    def _add_to_history(self, values: dict[str, Any]) -> None:
        line = json.dumps({"t_ns": time.time_ns()} | values)
        with contextlib.suppress(OSError), (self.folder / HISTORY_FILE).open("a") as file:
            file.write(line + "\n")

    def _write(self, text: str, values: dict[str, Any]) -> None:
        replace_file(self.folder / "verdict.txt", text + "\n")
        replace_file(self.folder / "verdict.json", json.dumps(values, indent=1))


def _follows(hang: Verdict, verdict: Verdict) -> bool:
    """Whether a verdict on exits only says how a reported hang ended: the job has made no progress
    in between."""
    if verdict.kind is not VerdictKind.DEAD or hang.kind is VerdictKind.DEAD:
        return False
    awaited = _awaited(verdict)
    return awaited is not None and awaited == _awaited(hang)


def _awaited(verdict: Verdict) -> tuple[object, ...] | None:
    """The collective, or the group creation, that ranks wait in."""
    call, creation = verdict.collective, verdict.facts.get("gathering")
    if call is not None:
        return call.get("group"), call.get("op"), call.get("number")
    return (creation["op"], creation["number"]) if creation is not None else None


def verdict_key(verdict: Verdict) -> str:
    """Equal for verdicts on the same problem."""
    number = verdict.collective.get("number") if verdict.collective else None
    return f"{verdict.kind} {verdict.culprits} {number}"


def is_worth_printing(verdict: Verdict) -> bool:
    """False for a rank that failed while no other rank waits for it, if it has printed its own
    error."""
    if verdict.kind in _NOT_WRONG or verdict.certainty is Certainty.UNKNOWN:
        return False
    if verdict.kind is not VerdictKind.DEAD:
        return True
    has_waiting_ranks = verdict.collective is not None or "gathering" in verdict.facts
    return has_waiting_ranks or bool(verdict.facts.get("exit_codes"))
