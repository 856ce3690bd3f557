"""The doctor on real jobs of four ranks with a fault planted in one: kind, culprits, place; live, and after all were killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from faulty_jobs import FAULTS, WORLD, Expected, around_name, marked
from surroundings import NotHereError
from torchwhere.consultation import consult
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.errors import TorchwhereError
from torchwhere.host import py_spy

STALL_S = 5.0
AT_ONCE = 4
VICTIMS = (0, 2, 3) if os.environ.get("TORCHWHERE_ALL_VICTIMS") else (2,)


class Nursery:
    """A process that has imported everything and forks a job's ranks: torch is imported once for all jobs."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import faulty_jobs; faulty_jobs.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def start(self, name: str, victim: int, folder: Path) -> list[int]:
        """The processes of a job, by rank."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name} {victim} {folder}\n")
        self._process.stdin.flush()
        return [int(pid) for pid in self._process.stdout.readline().split()]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


@dataclass(slots=True)
class Outcome:
    """What the doctor said of one job: while it was there, and after all of it was killed."""

    live: Verdict
    after: Verdict
    folder: Path


def examine(nursery: Nursery, name: str, victim: int, folder: Path) -> Outcome:
    folder.mkdir()
    expected = FAULTS[name][1]
    with expected.around(around_name(folder)) if expected.around is not None else nullcontext():
        with nursery.lock:
            pids = nursery.start(name, victim, folder)
        try:
            live = wait_for_verdict(folder / "run", expected)
            if live.kind == "dead":
                time.sleep(1.0)  # until the others have noticed, on a crowded machine
        finally:
            kill(pids)
        return Outcome(live, consult(folder / "run", stall_s=STALL_S), folder / "run")


def wait_for_verdict(folder: Path, expected: Expected, *, most_s: float = 90) -> Verdict:
    """The first verdict on a job that is not `healthy`; of one that must be healthy, the one after ten seconds."""
    begin, verdict = time.monotonic(), None
    is_healthy = expected.kinds == ("healthy",)
    while time.monotonic() - begin < most_s:
        time.sleep(0.5)
        try:
            verdict = consult(folder, stall_s=STALL_S)
        except TorchwhereError:  # no box yet
            continue
        if len(verdict.ranks) == WORLD and (verdict.kind != "healthy" or (is_healthy and time.monotonic() - begin > 10)):
            return verdict
    raise AssertionError(f"no verdict within {most_s} s, but {verdict}")


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Future[Outcome]]:
    """All jobs, a few at a time: most of their time they do nothing but hang."""
    nursery, folder = Nursery(), tmp_path_factory.mktemp("jobs")
    jobs = [(name, victim) for name in FAULTS for victim in VICTIMS]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = {job: pool.submit(examine, nursery, *job, folder / f"{job[0]}-{job[1]}") for job in jobs}
    nursery.close()
    return done


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str, victim: int, outcomes: dict[tuple[str, int], Future[Outcome]]) -> None:
    """Kind and culprits are right while the job hangs and again when all of it was killed; the culprit's place is right."""
    try:
        expected, outcome = FAULTS[name][1], outcomes[name, victim].result()
    except NotHereError as error:
        pytest.skip(str(error))
    live, after, culprits = outcome.live, outcome.after, expected.culprits(victim)
    assert (live.kind in expected.kinds, set(live.culprits)) == (True, culprits), live.explanation
    if expected.line is not None:
        assert live.ranks[victim].place.line == marked(expected.line)
    if expected.spied_line is not None and py_spy.program() is not None:
        assert live.ranks[victim].place.line == marked(expected.spied_line)
    if expected.spied_words is not None and py_spy.program() is not None:
        assert expected.spied_words in (live.ranks[victim].detail or "")
    if expected.module is not None:
        assert live.ranks[victim].place.module == expected.module
    if expected.issued is not None:
        (said,) = [cohort["issued"] for cohort in live.facts["cohorts"] if cohort["ranks"] == [victim]]
        assert f"{marked(expected.issued)}," in said
    if expected.words is not None:
        assert expected.words in (live.ranks[victim].detail or "")
    if not expected.only_live:
        assert (after.kind in expected.kinds, set(after.culprits)) == (True, culprits), after.explanation


@pytest.mark.parametrize("gone", range(WORLD))
@pytest.mark.parametrize("name", ["branch", "endless_loop", "opposite_groups"])
def test_one_box_is_gone(name: str, gone: int, outcomes: dict[tuple[str, int], Future[Outcome]], tmp_path: Path) -> None:
    """With any one box deleted the culprit is still found, if not from its own box then as the one nobody knows about."""
    run = copied(outcomes[name, 2].result().folder, tmp_path)
    (run / f"rank{gone}.box").unlink()
    verdict = consult(run, stall_s=STALL_S)
    assert f"no box of rank {gone}" in " ".join(verdict.missing_data)
    if gone == 2:  # the others are all in one call, or were hung up on, and that is all there is to see
        assert (verdict.kind in ("missing", "dead"), verdict.culprits, verdict.certainty) == (True, (2,), "inferred")
    else:
        assert (verdict.kind in FAULTS[name][1].kinds, verdict.culprits) == (True, (2,)), verdict.explanation


@pytest.mark.parametrize(
    "name",
    [
        *("wrong_dtype", "wrong_root", "wrong_peer", "microbatches", "shared_by_two_groups", "others_give_up"),
        *("mail_from_anybody", "sigkill", "exception", "data_loader"),
    ],
)
def test_nobody_else_is_blamed(name: str, outcomes: dict[tuple[str, int], Future[Outcome]], tmp_path: Path) -> None:
    """With any one box deleted no rank is blamed but the victim; where that cannot be told nobody is."""
    folder = outcomes[name, 2].result().folder
    for gone in range(WORLD):
        run = tmp_path / f"without-{gone}"
        run.mkdir()
        for path in folder.iterdir():
            if path.name != f"rank{gone}.box":
                os.link(path, run / path.name)
        verdict = consult(run, stall_s=STALL_S)
        assert set(verdict.culprits) <= {2}, (gone, verdict.explanation)
        assert f"no box of rank {gone}" in " ".join(verdict.missing_data)


@pytest.mark.parametrize("cut", range(WORLD))
@pytest.mark.parametrize("name", ["branch", "endless_loop"])
def test_one_box_is_cut(name: str, cut: int, outcomes: dict[tuple[str, int], Future[Outcome]], tmp_path: Path) -> None:
    """With any one box cut at any byte the verdict blames nobody else, and says what is missing."""
    run = copied(outcomes[name, 2].result().folder, tmp_path)
    box = run / f"rank{cut}.box"
    whole = box.read_bytes()
    for size in (*random.Random(cut).sample(range(len(whole)), 12), 0, 100, 3000, 6000, 20000):
        box.write_bytes(whole[:size])
        verdict = consult(run, stall_s=STALL_S)
        assert verdict.missing_data
        assert set(verdict.culprits) == {2}, (size, verdict.explanation)


def test_the_flight_recorder_is_asked(outcomes: dict[tuple[str, int], Future[Outcome]]) -> None:
    """Where all hang together, every rank that listens is asked for its dump, once, and what it adds is said."""
    try:
        live = outcomes["cable_pulled", 2].result().live
    except NotHereError as error:
        pytest.skip(str(error))
    assert live.collective is not None
    number = live.collective["number"]
    assert f'By the flight recorder, #{number} of group "default" is issued on ranks 0-3.' in live.explanation
    assert live.facts["flight_recorder"][0]["ranks"] == [
        {"ranks": list(range(WORLD)), "issued": number, "started": None, "completed": None}
    ]


def copied(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder / "run")
    return folder / "run"
