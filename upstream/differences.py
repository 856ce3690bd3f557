"""Compares the runs of a test file: which cases pass in one mode and not in another, always."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from upstream.cases import FAILED, NOT_RUN, PASSED, Outcome
from upstream.processes import PLAIN, FileRun

Rerun = Callable[[str, Sequence[str]], FileRun]  # of a mode and some cases


@dataclass(frozen=True, slots=True)
class Difference:
    """A case that passes in one mode and not in the other: in the first run, and in every one after
    it."""

    case: str
    mode: str
    plain: str
    other: str
    message: str

    def __str__(self) -> str:
        return (
            f"{self.case}: {self.plain} {PLAIN}, {self.other} {self.mode}"
            + f": {self.message}" * bool(self.message)
        )


def candidates(plain: Mapping[str, Outcome], other: Mapping[str, Outcome]) -> list[str]:
    """Return the cases that pass in exactly one of two runs.

    A case that passes in one run and is skipped in the other one is among them.
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
    """Return the cases that differ between the plain run and a mode, and those that do so only
    sometimes."""
    found = candidates(first[PLAIN].outcomes, first[mode].outcomes)
    runs = {way: [first[way].outcomes] for way in (PLAIN, mode)}
    for _ in range(repeat if found else 0):
        for way in (PLAIN, mode):
            runs[way].append(_again(found, lambda cases, way=way: rerun(way, cases)))  # type: ignore[misc]
    steady: list[Difference] = []
    flaky: list[Difference] = []
    for case in found:
        kind = steady if _is_steady(case, runs[PLAIN], runs[mode]) else flaky
        kind.append(_difference(case, mode, runs[PLAIN], runs[mode]))
    return steady, flaky


def _again(cases: Sequence[str], run: Callable[[Sequence[str]], FileRun]) -> dict[str, Outcome]:
    """Run cases once more, in one process; those that it did not get to in its time, each in a
    process of its own."""
    together = run(cases)
    outcomes = dict(together.outcomes)
    for case in cases:
        if together.timed_out and case not in outcomes:
            outcomes |= run([case]).outcomes
    return outcomes


def _is_steady(
    case: str, plain: Sequence[Mapping[str, Outcome]], other: Sequence[Mapping[str, Outcome]]
) -> bool:
    fast_path = [[_get(run, case).result == PASSED for run in runs] for runs in (plain, other)]
    return all(len(set(each)) == 1 for each in fast_path)


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
    """`passed`; or `passed, failed` where the runs do not agree."""
    return ", ".join(sorted({_get(run, case).result for run in runs}))


def _get(run: Mapping[str, Outcome], case: str) -> Outcome:
    return run.get(case, Outcome(NOT_RUN))
