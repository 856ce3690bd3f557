"""`python -m upstream CHECKOUT [FILE ...]`: runs PyTorch's tests plain, watched and on the
drop-ins, and lists the cases that differ.

The exit code is 0 if no case differs, 1 if one does, and 2 if there is nothing to run.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from upstream import differences
from upstream.cases import PASSED, SKIPPED
from upstream.differences import Difference
from upstream.files import DEFAULT, INTENDED, TestFile
from upstream.processes import MODES, PLAIN, Checkout, FileRun
from upstream.startup import DROP_INS


@dataclass(frozen=True, slots=True)
class FileResult:
    """The runs of one test file, and the cases that differ between them."""

    path: str
    runs: dict[str, FileRun]
    steady: list[Difference]
    flaky: list[Difference]
    intended: list[Difference]

    def row(self) -> str:
        plain = [outcome.result for outcome in self.runs[PLAIN].outcomes.values()]
        counts = f"{len(plain):6} {plain.count(PASSED):7} {plain.count(SKIPPED):8}"
        times = " ".join(f"{_time(run):>8}" for run in self.runs.values())
        return f"{counts} {len(self.steady):8} {len(self.flaky):6} {times}  {self.path}"

    def to_dict(self) -> dict[str, object]:
        return {
            "file": self.path,
            "runs": {mode: _run_dict(run) for mode, run in self.runs.items()},
            "differences": [asdict(difference) for difference in self.steady],
            "flaky": [asdict(difference) for difference in self.flaky],
            "intended": [asdict(difference) for difference in self.intended],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    # Exit by an exception, so that the running tests are terminated too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    checkout = Checkout(options.checkout, limit_s=options.limit, forks=options.fork)
    wanted = [TestFile(path, options.keyword) for path in options.files] or list(DEFAULT)
    missing = [file.path for file in wanted if not checkout.has(file.path)]
    for path in missing:
        print(f"not in this checkout: {path}")
    present = [file for file in wanted if file.path not in missing]
    if not present:
        print(f"upstream: no test file to run below {checkout.tests}", file=sys.stderr)
        return 2
    modes = [PLAIN, *options.modes]
    print(
        f"{'cases':>6} {'passed':>7} {'skipped':>8} {'differs':>8} {'flaky':>6} "
        + " ".join(f"{mode:>8}" for mode in modes)
    )
    results = []
    for result in _results(checkout, present, modes, options.repeat):
        results.append(result)
        print(result.row(), flush=True)
        # after each file: a run takes hours and may be stopped
        _write(options.json, results, missing)
    _print_differences(results)
    print(f"\nwritten to {options.json}")
    return 1 if any(result.steady for result in results) else 0


def _results(
    checkout: Checkout, files: Sequence[TestFile], modes: Sequence[str], repeat: int
) -> Iterator[FileResult]:
    for file in files:

        def rerun(mode: str, cases: Sequence[str], path: str = file.path) -> FileRun:
            return checkout.run(path, mode, only=cases)

        runs = _runs(checkout, file, modes)
        steady: list[Difference] = []
        flaky: list[Difference] = []
        for mode in modes[1:]:
            always, sometimes = differences.confirmed(runs, mode, rerun=rerun, repeat=repeat)
            steady += always
            flaky += sometimes
        intended = [difference for difference in steady if _is_intended(difference)]
        steady = [difference for difference in steady if difference not in intended]
        yield FileResult(file.path, runs, steady, flaky, intended)


def _runs(checkout: Checkout, file: TestFile, modes: Sequence[str]) -> dict[str, FileRun]:
    """Run a file in each mode. If the plain run, which comes first, reaches the time limit, the
    other ones run the same cases."""
    runs: dict[str, FileRun] = {}
    reached: list[str] = []
    for mode in modes:
        runs[mode] = checkout.run(file.path, mode, only=reached, keyword=file.keyword)
        if mode == PLAIN and runs[mode].timed_out:
            reached = list(runs[mode].outcomes)
    return runs


def _is_intended(difference: Difference) -> bool:
    return difference.mode == DROP_INS and difference.case in INTENDED


def _print_differences(results: Sequence[FileResult]) -> None:
    steady = [difference for result in results for difference in result.steady]
    flaky = [difference for result in results for difference in result.flaky]
    for title, cases in (
        ("cases that differ", steady),
        ("flaky cases, which differ in some runs only", flaky),
    ):
        print(f"\n{title}: {len(cases)}")
        for difference in cases:
            print(f"  {difference}")
    for difference in (difference for result in results for difference in result.intended):
        print(f"\nintended: {difference.case}: {INTENDED[difference.case]}")


def _time(run: FileRun) -> str:
    return "limit" if run.timed_out else f"{run.seconds:.0f} s"


def _run_dict(run: FileRun) -> dict[str, object]:
    # without a report, the end of the output is the only evidence
    tail = {} if run.outcomes else {"tail": run.tail}
    return {
        "seconds": round(run.seconds, 1),
        "timed_out": run.timed_out,
        "exit_code": run.exit_code,
        **tail,
        "cases": {case: outcome.result for case, outcome in run.outcomes.items()},
    }


def _write(path: Path, results: Sequence[FileResult], missing: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"missing": list(missing), "files": [result.to_dict() for result in results]}
    path.write_text(json.dumps(report, indent=1) + "\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m upstream", description=__doc__)
    parser.add_argument(
        "checkout", type=Path, help="a checkout of PyTorch, of the release that is installed"
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="test file below test/ (default: the files in upstream/files.py)",
    )
    parser.add_argument(
        "--keyword", "-k", default="", help="expression for pytest -k, for the given files"
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES[1:],
        default=MODES[1:],
        help="modes to compare with the plain run (default: both)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=900,
        metavar="S",
        help="seconds for one run of a file (default: 900)",
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=2,
        metavar="N",
        help="number of re-runs of a case that differs (default: 2)",
    )
    parser.add_argument(
        "--fork",
        action="store_true",
        help="fork the ranks of multi-process tests instead of spawning them: a tenth of the time",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("run/upstream.json"),
        metavar="PATH",
        help="file for the results (default: run/upstream.json)",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
