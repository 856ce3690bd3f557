"""Compares the runs of a test file: finds the cases that always pass in one mode and never in
another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from upstream.cases import FAILED, NOT_RUN, PASSED, Outcome
from upstream.processes import PLAIN, FileRun

Rerun = Callable[[str, Sequence[str]], FileRun]  # called with a mode and some cases


@dataclass(frozen=True, slots=True)
class Difference:
    """A case that passes in one mode and not in the other."""

    case: str
    mode: str
    plain: str
    other: str
    message: str

    def __str__(self) -> str:
        return f"{self.case}: {self.plain} {PLAIN}, {self.other} {self.mode}" + (
            f": {self.message}" if self.message else ""
        )


def candidates(plain: Mapping[str, Outcome], other: Mapping[str, Outcome]) -> list[str]:
    """Return the cases that pass in exactly one of two runs.

    This includes a case that passes in one run and is skipped in the other one.
    """
    nothing = Outcome(NOT_RUN)
    return [
        case
        for case in dict.fromkeys([*plain, *other])
        if (plain.get(case, nothing).result == PASSED)
        != (other.get(case, nothing).result == PASSED)
    ]


def confirmed(
    first: Mapping[str, FileRun], mode: str, *, rerun: Rerun, repeat: int
) -> tuple[list[Difference], list[Difference]]:
    """Return the cases that always differ between the plain run and a mode, and the cases that
    differ only sometimes."""
    cases = candidates(first[PLAIN].outcomes, first[mode].outcomes)
    runs = {compared: [first[compared].outcomes] for compared in (PLAIN, mode)}
    for _ in range(repeat if cases else 0):
        for compared, outcomes in runs.items():
            outcomes.append(_rerun(cases, partial(rerun, compared)))
    steady: list[Difference] = []
    flaky: list[Difference] = []
    for case in cases:
        kind = steady if _is_steady(case, runs[PLAIN], runs[mode]) else flaky
        kind.append(_difference(case, mode, runs[PLAIN], runs[mode]))
    return steady, flaky


def _rerun(cases: Sequence[str], run: Callable[[Sequence[str]], FileRun]) -> dict[str, Outcome]:
    """Run cases once more in one process. Cases that do not run before its time limit get their own
    processes."""
    together = run(cases)
    outcomes = dict(together.outcomes)
    for case in cases:
        if together.timed_out and case not in outcomes:
            outcomes |= run([case]).outcomes
    return outcomes


def _is_steady(
    case: str, plain: Sequence[Mapping[str, Outcome]], other: Sequence[Mapping[str, Outcome]]
) -> bool:
    passes = [{_get(run, case).result == PASSED for run in runs} for runs in (plain, other)]
    return all(len(results) == 1 for results in passes)


def _difference(
    case: str,
    mode: str,
    plain: Sequence[Mapping[str, Outcome]],
    other: Sequence[Mapping[str, Outcome]],
) -> Difference:
    failed = [_get(run, case) for run in (*plain, *other) if _get(run, case).result == FAILED]
    message = failed[0].message if failed else ""
    return Difference(case, mode, _results(case, plain), _results(case, other), message)


def _results(case: str, runs: Sequence[Mapping[str, Outcome]]) -> str:
    """Return `passed`, or `passed, failed` if the runs do not agree."""
    return ", ".join(sorted({_get(run, case).result for run in runs}))


def _get(run: Mapping[str, Outcome], case: str) -> Outcome:
    return run.get(case, Outcome(NOT_RUN))
