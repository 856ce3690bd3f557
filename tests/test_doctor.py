"""The doctor on real jobs of four ranks with a fault planted in one: kind, culprits and place, while
the job runs and after it was killed, with and without snapshots, and with any one box deleted or
cut."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from faulty_jobs import (
    FAULTS,
    REPRESENTATIVE,
    STALL_S,
    WORLD,
    Expected,
    around_name,
    marked,
)
from surroundings import NotHereError
from torchwhere.blackbox.reader import read_box
from torchwhere.core.errors import TorchwhereError
from torchwhere.diagnose.doctor.verdict import NO_FAULT, Verdict
from torchwhere.native.load import SWITCH
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.processes import py_spy
from torchwhere.snapshots.read import DOCTOR, MONITOR

AT_ONCE = 4
POLL_S = 1.0
STEPS_ENOUGH = 40
# The sources of snapshots: the job's monitor, and a doctor that ran beside the job.
ALL = (MONITOR, DOCTOR)
BARE: tuple[str, ...] = ()  # only the ranks themselves saved snapshots
VICTIMS = (0, 2, 3) if os.environ.get("TORCHWHERE_ALL_VICTIMS") else (2,)
# `make test` cuts the boxes of one job of each kind of verdict.
CUT = {
    "branch",
    "cable_pulled",
    "data_loader",
    "healthy_ddp",
    "opposite_groups",
    "sigkill",
    "straggler",
}


def names(usual: set[str]) -> list[Any]:
    """All faults as parameters; those that are not usual are exhaustive."""
    return [
        pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in usual)) for name in FAULTS
    ]


class Nursery:
    """A process that has imported torch and forks the ranks of all jobs."""

    def __init__(self, library: Path | None = None) -> None:
        self.lock = threading.Lock()
        native = (
            {"XDG_CACHE_HOME": str(library.parent.parent), SWITCH: "1"}
            if library is not None
            else {}
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import faulty_jobs; faulty_jobs.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | native,
        )

    def start(self, name: str, victim: int, folder: Path) -> list[int]:
        """Start a job. Returns the process ids of its ranks, then that of its monitor."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name} {victim} {folder}\n")
        self._process.stdin.flush()
        return [int(pid) for pid in self._process.stdout.readline().split()]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


@dataclass(frozen=True, slots=True)
class Damage:
    """What is missing in the folder of a run after the whole job was killed."""

    rank: int | None = None  # its box is deleted or cut
    size: int | None = None  # the bytes that are left of it; None: deleted
    sources: tuple[str, ...] = ALL  # their snapshots exist


@dataclass(slots=True)
class Outcome:
    """The verdicts on one job: while it ran, and after it was killed, with each damage."""

    live: Verdict
    after: dict[Damage, Verdict]


def diagnose(nursery: Nursery, name: str, victim: int, folder: Path, *, cuts: bool) -> Outcome:
    """Run a job until it has a verdict, kill it, and diagnose what is left; `cuts`: with cut boxes
    too."""
    folder.mkdir()
    expected = FAULTS[name][1]
    with expected.around(around_name(folder)) if expected.around is not None else nullcontext():
        with nursery.lock:
            pids = nursery.start(name, victim, folder)
        try:
            live = wait_for_verdict(folder / "run", expected)
            if waits_for_stall_snapshot(folder / "run", live):
                live = wait_for_verdict(folder / "run", expected)
            if live.kind == "dead":
                wait_for_survivors(folder / "run", pids[:WORLD])
        finally:
            kill(pids[::-1])  # the monitor first
        damages = [*deletions(), *(cuts_of(name, victim, folder) if cuts else ())]
        after = {damage: diagnose_damaged(folder, damage) for damage in damages}
    return Outcome(live, after)


def deletions() -> list[Damage]:
    """No box deleted, and each box deleted, with the snapshots of all, of none and of the
    monitor."""
    return [
        Damage(rank, None, sources)
        for rank in (None, *range(WORLD))
        for sources in (ALL, BARE, (MONITOR,))
    ]


def cuts_of(name: str, victim: int, folder: Path) -> list[Damage]:
    """Each box cut at two random bytes, with all snapshots and with none."""
    dice = random.Random(f"{name} {victim}")
    whole = (folder / "run" / "rank0.box").stat().st_size
    return [
        Damage(rank, size, sources)
        for rank in range(WORLD)
        for size in (dice.randrange(whole), dice.randrange(40_000))
        for sources in (ALL, BARE)
    ]


def diagnose_damaged(folder: Path, damage: Damage) -> Verdict:
    run = damaged(folder, damage)
    verdict = diagnose_folder(run, stall_s=STALL_S)
    shutil.rmtree(run)
    return verdict


def damaged(folder: Path, damage: Damage) -> Path:
    """A copy of the run with one box deleted or cut, and with the snapshots of some sources."""
    copy = Path(tempfile.mkdtemp(dir=folder))
    for path in (folder / "run").iterdir():
        source = MONITOR if path.name.startswith("verdict.") else path.name.partition("-")[0]
        if path.name != f"rank{damage.rank}.box" and (
            source in damage.sources or source not in ALL
        ):
            os.link(path, copy / path.name)
    if damage.size is not None:
        with (folder / "run" / f"rank{damage.rank}.box").open("rb") as box:
            (copy / f"rank{damage.rank}.box").write_bytes(box.read(damage.size))
    return copy


def wait_for_verdict(folder: Path, expected: Expected, *, most_s: float = 90) -> Verdict:
    """Wait for the first verdict other than `healthy`. For a job that must be healthy, wait ten
    seconds. For a straggler, wait until the verdict is based on enough steps."""
    begin, verdict = time.monotonic(), None
    is_healthy = expected.kinds == ("healthy",)
    while time.monotonic() - begin < most_s:
        time.sleep(POLL_S)
        try:
            verdict = diagnose_folder(folder, stall_s=STALL_S)
        except TorchwhereError:  # no box yet
            continue
        is_early = (
            verdict.kind in NO_FAULT or verdict.facts.get("of_steps", STEPS_ENOUGH) < STEPS_ENOUGH
        )
        has_trained = all(report.place.step for report in verdict.ranks.values())
        is_over = is_healthy and has_trained and time.monotonic() - begin > 10
        if len(verdict.ranks) == WORLD and (is_over or not is_early):
            return verdict
    raise AssertionError(f"no verdict within {most_s} s, but {verdict}")


def waits_for_stall_snapshot(folder: Path, verdict: Verdict, *, most_s: float = 15) -> bool:
    """Wait until a rank of a stalled job has saved a snapshot of the stall: on a busy machine it
    may come later than the doctor's verdict. Returns whether it had to wait."""
    if verdict.stalled_s is None:
        return False
    begin, begin_of_stall = time.monotonic(), time.time() - verdict.stalled_s
    has_waited = False
    while time.monotonic() - begin < most_s:
        snapshots = folder.glob("stall-*.snapshot")
        if any(path.stat().st_mtime > begin_of_stall for path in snapshots):
            break
        has_waited = True
        time.sleep(0.2)
    return has_waited


def wait_for_survivors(folder: Path, pids: list[int], *, most_s: float = 30) -> None:
    """Wait until each rank has exited or sent a heartbeat. Without that, the boxes of a job that is
    killed now do not show which rank exited first."""
    begin_ns, deadline = time.time_ns(), time.monotonic() + most_s
    for rank, pid in enumerate(pids):
        box = folder / f"rank{rank}.box"
        while _runs(pid) and read_box(box).beat_ns <= begin_ns:
            assert time.monotonic() < deadline, f"rank {rank} sends no heartbeat"
            time.sleep(0.2)


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
def outcomes(
    request: pytest.FixtureRequest, library: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], Future[Outcome]]:
    """All selected jobs, a few at a time: they mostly hang. They are watched natively, as with
    `torchwhere run`."""
    nursery, folder = Nursery(library), tmp_path_factory.mktemp("jobs")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = {
            job: pool.submit(diagnose, nursery, *job, folder / f"{job[0]}-{job[1]}", cuts=cuts)
            for job, cuts in selected_jobs(request.session.items).items()
        }
    nursery.close()
    return done


def selected_jobs(items: list[pytest.Item]) -> dict[tuple[str, int], bool]:
    """Name and victim of each job that the selected tests need, and whether they need cut boxes."""
    jobs = {("cable_pulled", 2): False}
    for item in items:
        if "outcomes" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec"):
            job = item.callspec.params["name"], item.callspec.params["victim"]
            jobs[job] = jobs.get(job, False) or item.originalname == "test_one_box_is_cut"
    return jobs


def test_every_kind_is_represented() -> None:
    """The faults that `make test` plants exist, and cover every kind of verdict."""
    assert set(FAULTS) >= REPRESENTATIVE
    kinds = {name: expected.kinds[0] for name, (_, expected) in FAULTS.items()}
    for usual in (REPRESENTATIVE, CUT):
        assert {kinds[name] for name in usual} == set(kinds.values())


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("name", names(REPRESENTATIVE))
def test_fault(name: str, victim: int, outcomes: dict[tuple[str, int], Future[Outcome]]) -> None:
    """Kind and culprits are right while the job hangs, and after it and its monitor were killed;
    the culprit's place is right."""
    expected, outcome = FAULTS[name][1], outcome_of(outcomes, name, victim)
    live, after, culprits = outcome.live, outcome.after[Damage()], expected.culprits(victim)
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
        (issued,) = [
            cohort["issued"] for cohort in live.facts["cohorts"] if cohort["ranks"] == [victim]
        ]
        assert f"{marked(expected.issued)}," in issued
    if expected.words is not None:
        assert expected.words in (live.ranks[victim].detail or "")
    assert (after.kind in kinds_after(expected), set(after.culprits)) == (True, culprits), (
        after.explanation
    )


def kinds_after(expected: Expected) -> tuple[str, ...]:
    """The right kinds after a job was killed: a healthy job is then dead."""
    return ("dead",) if expected.kinds == ("healthy",) else expected.kinds


def is_right(verdict: Verdict, expected: Expected, victim: int) -> bool:
    """Whether kind and culprits are right. A rank that died before the others noticed may be called
    missing if no process saw it die, but only as inferred."""
    is_close = (
        "dead" in expected.kinds and verdict.kind == "missing" and verdict.certainty == "inferred"
    )
    return set(verdict.culprits) == expected.culprits(victim) and (
        verdict.kind in kinds_after(expected) or is_close
    )


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("name", names(REPRESENTATIVE))
def test_boxes_without_snapshots(
    name: str, victim: int, outcomes: dict[tuple[str, int], Future[Outcome]]
) -> None:
    """After a job without a monitor was killed, its boxes alone give the right verdict: their
    heartbeats show how long it had hung."""
    expected, outcome = FAULTS[name][1], outcome_of(outcomes, name, victim)
    verdict = outcome.after[Damage(sources=BARE)]
    assert is_right(verdict, expected, victim), verdict.explanation


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("name", names(REPRESENTATIVE))
def test_one_box_is_gone(
    name: str, victim: int, outcomes: dict[tuple[str, int], Future[Outcome]]
) -> None:
    """With any one box deleted, the verdict says so and names no healthy rank."""
    outcome = outcome_of(outcomes, name, victim)
    for damage, verdict in outcome.after.items():
        if damage.rank is not None and damage.size is None:
            missing = " ".join(verdict.missing_data)
            assert f"no box of rank {damage.rank}" in missing, damage
            assert_no_wrong_culprit(name, victim, outcome, damage)


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("name", names(CUT))
def test_one_box_is_cut(
    name: str, victim: int, outcomes: dict[tuple[str, int], Future[Outcome]]
) -> None:
    """With any one box cut, the verdict says that data is missing and names no healthy rank."""
    outcome = outcome_of(outcomes, name, victim)
    for damage, verdict in outcome.after.items():
        if damage.size is not None:
            assert verdict.missing_data, damage
            assert_no_wrong_culprit(name, victim, outcome, damage)


def assert_no_wrong_culprit(name: str, victim: int, outcome: Outcome, damage: Damage) -> None:
    """Check that no rank but the culprit is named; and that the culprit is named if a doctor ran
    beside the job, if the job stalled, so that a rank saved a snapshot, or if the boxes that show
    the culprit are there."""
    expected, verdict = FAULTS[name][1], outcome.after[damage]
    assert set(verdict.culprits) <= expected.culprits(victim), (damage, verdict.explanation)
    is_recorded = DOCTOR in damage.sources or outcome.live.stalled_s is not None
    if is_recorded or damage.rank not in expected.needs(victim):
        assert is_right(verdict, expected, victim), (damage, verdict.explanation)


def outcome_of(outcomes: dict[tuple[str, int], Future[Outcome]], name: str, victim: int) -> Outcome:
    try:
        return outcomes[name, victim].result()
    except NotHereError as error:
        pytest.skip(str(error))


def test_the_flight_recorder_is_asked(outcomes: dict[tuple[str, int], Future[Outcome]]) -> None:
    """If all ranks hang together, the doctor asks each rank that can answer for its dump, once, and
    the verdict has what the dump adds."""
    live = outcome_of(outcomes, "cable_pulled", 2).live
    assert live.collective is not None
    number = live.collective["number"]
    assert (
        f'According to the flight recorder, #{number} of group "default" is issued on ranks 0-3.'
        in live.explanation
    )
    assert live.facts["flight_recorder"][0]["ranks"] == [
        {"ranks": list(range(WORLD)), "issued": number, "started": None, "completed": None}
    ]
