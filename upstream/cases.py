"""The outcome of each case of a test file, read from pytest's JUnit XML."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

PASSED, FAILED, SKIPPED, NOT_RUN = "passed", "failed", "skipped", "not run"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one case, and the first line of its error."""

    result: str
    message: str = ""


def read(report: Path, file: str) -> dict[str, Outcome]:
    """Return the outcome of every case by its pytest id. Empty if pytest wrote no report: it
    crashed or was killed.

    A case that fails and then has an error in its teardown is in the report twice; it failed.
    """
    try:
        root = ElementTree.parse(report).getroot()
    except (OSError, ElementTree.ParseError):
        return {}
    outcomes: dict[str, Outcome] = {}
    for element in root.iter("testcase"):
        if "name" not in element.attrib:  # the case that was running when pytest was interrupted
            continue
        case = _pytest_id(file, element.get("classname", ""), element.get("name", ""))
        outcome = _outcome(element)
        if outcomes.get(case, outcome).result != FAILED or outcome.result == FAILED:
            outcomes[case] = outcome
    return outcomes


def _pytest_id(file: str, classname: str, name: str) -> str:
    """`a/test_b.py`, `a.test_b.Class` and `test_c` make `a/test_b.py::Class::test_c`."""
    module = file.removesuffix(".py").replace("/", ".")
    if not classname:  # the file itself could not be imported
        return file
    inside = classname.removeprefix(module).removeprefix(".")
    return "::".join([file, *filter(None, inside.split(".")), name])


def _outcome(element: ElementTree.Element) -> Outcome:
    for tag in ("failure", "error"):
        problem = element.find(tag)
        if problem is not None:
            message = problem.get("message") or problem.text or ""
            return Outcome(FAILED, message.strip().partition("\n")[0])
    return Outcome(SKIPPED if element.find("skipped") is not None else PASSED)
