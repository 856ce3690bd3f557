"""A plugin of pytest: writes the outcome of each case as one line of JSON when the case ends.

A run that is killed at its time limit keeps the outcomes of the cases before it. `processes.py`
copies this file to a folder on PYTHONPATH, so it imports nothing of the repository.
"""

from __future__ import annotations

import json
import os
from typing import Any

VARIABLE = "TORCHWHERE_UPSTREAM_CASES"  # the path of the log


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        _write(report)


def pytest_collectreport(report: Any) -> None:
    if report.outcome == "failed":  # the file could not be imported
        _write(report)


def _write(report: Any) -> None:
    line = {"case": report.nodeid, "result": report.outcome, "message": ""}
    if report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        text = str(report.longrepr) if crash is None else crash.message
        line["message"] = text.strip().partition("\n")[0]
    with open(os.environ[VARIABLE], "a") as log:
        log.write(json.dumps(line) + "\n")
