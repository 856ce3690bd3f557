"""Publishes the verdicts of a monitor: prints each one once, and keeps the last one as files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchwhere.core.atomic_file import replace_file
from torchwhere.core.place import Certainty
from torchwhere.diagnose.doctor.verdict import Verdict, VerdictKind
from torchwhere.render.verdict import verdict_json, verdict_text
from torchwhere.render.verdict_text.observers import passed_text, wait_over_text

_NOT_WRONG = (VerdictKind.HEALTHY, VerdictKind.STRAGGLER)
_MAY_PASS = (VerdictKind.MISSING, VerdictKind.DEADLOCK, VerdictKind.TOGETHER)


def print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the output of the monitor


@dataclass(slots=True)
class VerdictOutput:
    """Prints verdicts on stderr, or gives them to `print_verdict`; writes `verdict.txt`,
    `.json`."""

    folder: Path
    print_verdict: Callable[[Verdict], None] | None = None
    print_line: Callable[[str], None] = print_error
    _printed: set[str] = field(default_factory=set)
    _wait: Verdict | None = None  # the last verdict, if it is a wait that may pass

    def is_new(self, verdict: Verdict) -> bool:
        return is_worth_printing(verdict) and verdict_key(verdict) not in self._printed

    def publish(self, verdict: Verdict) -> None:
        self._printed.add(verdict_key(verdict))
        text = verdict_text(verdict)
        if self.print_verdict is not None:
            self.print_verdict(verdict)
        else:
            self.print_line(
                f"\n--- torchwhere ---\n{text}\n--- saved in {self.folder}: verdict.txt,"
                " verdict.json ---"
            )
        self._write(text, verdict_json(verdict))
        self._wait = verdict if verdict.kind in _MAY_PASS else None

    def retract_wait(self, now: Verdict) -> None:
        """Take back a printed wait if the job goes on: it is not how the job ended."""
        if self._wait is None or now.kind not in _NOT_WRONG or now.certainty is Certainty.UNKNOWN:
            return
        earlier, self._wait = self._wait, None
        self._printed.clear()  # the same may happen again
        if self.print_verdict is not None:
            self.print_verdict(now)
        else:
            self.print_line(wait_over_text(now))
        text = f"{verdict_text(earlier)}\n{passed_text(now)}"
        self._write(text, verdict_json(earlier) | {"passed": True})

    def _write(self, text: str, values: dict[str, Any]) -> None:
        replace_file(self.folder / "verdict.txt", text + "\n")
        replace_file(self.folder / "verdict.json", json.dumps(values, indent=1))


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
