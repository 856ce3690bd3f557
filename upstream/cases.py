"""The outcome of each case of a test file, as `case_log.py` has written it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

PASSED, FAILED, SKIPPED, NOT_RUN = "passed", "failed", "skipped", "not run"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one case, and the first line of its error."""

    result: str
    message: str = ""


def read(log: Path) -> dict[str, Outcome]:
    """Return the outcome of every case by its pytest id. Empty if no case ended.

    A case that passes or fails and then has an error in its teardown is in the log twice; it
    failed.
    """
    outcomes: dict[str, Outcome] = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:  # the process was killed while it wrote
            continue
        case = fields["case"]
        if case not in outcomes or outcomes[case].result != FAILED:
            outcomes[case] = Outcome(fields["result"], fields["message"])
    return outcomes
