"""The doctor on real jobs of four ranks with a fault planted in one: kind, culprits, place; live,
and after all were killed, with and without what a monitor kept, and with any one box gone or
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
from torchwhere.core.errors import TorchwhereError
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.native.load import SWITCH
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.processes import py_spy
from torchwhere.snapshots.read import DOCTOR, MONITOR

AT_ONCE = 4
STEPS_ENOUGH = 40
# who kept notes: its monitor, and the doctor who was asked while it was there
ALL = (MONITOR, DOCTOR)
BARE: tuple[str, ...] = ()  # nobody looked at it but its own ranks
VICTIMS = (0, 2, 3) if os.environ.get("TORCHWHERE_ALL_VICTIMS") else (2,)
NAMES = [
    pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in REPRESENTATIVE))
    for name in FAULTS
]


class Nursery:
    """A process that has imported everything and forks a job's ranks: torch is imported once for
    all jobs."""

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
        """The processes of a job by rank, and last its monitor."""
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
    """What happened to a run's folder after all of the job was killed."""

    rank: int | None = None  # whose box is gone or cut
    size: int | None = None  # what is left of it
    kept: tuple[str, ...] = ALL  # whose notes are there


@dataclass(slots=True)
class Outcome:
    """What the doctor said of one job: while it was there, and after all of it was killed, whole or
    damaged."""

    live: Verdict
    after: dict[Damage, Verdict]


def diagnose(nursery: Nursery, name: str, victim: int, folder: Path) -> Outcome:
    folder.mkdir()
    expected = FAULTS[name][1]
    with expected.around(around_name(folder)) if expected.around is not None else nullcontext():
        with nursery.lock:
            pids = nursery.start(name, victim, folder)
        try:
            live = wait_for_verdict(folder / "run", expected)
            if waits_for_stall_snapshot(folder / "run", live):
                live = wait_for_verdict(folder / "run", expected)
        finally:
            kill(pids[::-1])  # the monitor first
        after = {
            damage: consult_damaged(folder, damage) for damage in damages(name, victim, folder)
        }
    return Outcome(live, after)


def damages(name: str, victim: int, folder: Path) -> list[Damage]:
    """None, each box deleted, each box cut at two random bytes; each with all that was kept, and
    with nothing."""
    chance = random.Random(f"{name} {victim}")
    whole = (folder / "run" / "rank0.box").stat().st_size
    cuts = [
        (rank, size)
        for rank in range(WORLD)
        for size in (chance.randrange(whole), chance.randrange(40_000))
    ]
    kinds = [(None, None), *((rank, None) for rank in range(WORLD)), *cuts]
    only_monitored = [Damage(rank, None, (MONITOR,)) for rank in (None, *range(WORLD))]
    return [
        *(Damage(rank, size, kept) for rank, size in kinds for kept in (ALL, BARE)),
        *only_monitored,
    ]


def consult_damaged(folder: Path, damage: Damage) -> Verdict:
    run = damaged(folder, damage)
    verdict = diagnose_folder(run, stall_s=STALL_S)
    shutil.rmtree(run)
    return verdict


def damaged(folder: Path, damage: Damage) -> Path:
    """The run of a job, with one box gone or cut, and with what some have kept."""
    found = Path(tempfile.mkdtemp(dir=folder))
    for path in (folder / "run").iterdir():
        keeper = MONITOR if path.name.startswith("verdict.") else path.name.partition("-")[0]
        if path.name != f"rank{damage.rank}.box" and (
            keeper in damage.kept or keeper not in (MONITOR, DOCTOR)
        ):
            os.link(path, found / path.name)
    if damage.size is not None:
        with (folder / "run" / f"rank{damage.rank}.box").open("rb") as box:
            (found / f"rank{damage.rank}.box").write_bytes(box.read(damage.size))
    return found


def wait_for_verdict(folder: Path, expected: Expected, *, most_s: float = 90) -> Verdict:
    """The first verdict on a job that is not `healthy`; of one that must be healthy, the one after
    ten seconds; of one that is slow for one rank, one that has enough steps to go by, whatever else
    the machine does."""
    begin, verdict = time.monotonic(), None
    is_healthy = expected.kinds == ("healthy",)
    while time.monotonic() - begin < most_s:
        time.sleep(0.5)
        try:
            verdict = diagnose_folder(folder, stall_s=STALL_S)
        except TorchwhereError:  # no box yet
            continue
        is_early = (
            verdict.kind == "healthy" or verdict.facts.get("of_steps", STEPS_ENOUGH) < STEPS_ENOUGH
        )
        has_trained = all(report.place.step for report in verdict.ranks.values())
        is_over = is_healthy and has_trained and time.monotonic() - begin > 10
        if len(verdict.ranks) == WORLD and (is_over or not is_early):
            return verdict
    raise AssertionError(f"no verdict within {most_s} s, but {verdict}")


def waits_for_stall_snapshot(folder: Path, verdict: Verdict, *, most_s: float = 15) -> bool:
    """Wait until a rank of a stalled job has saved a snapshot of the stall: on a busy machine that
    may come later than the doctor's verdict. Returns whether there was a wait."""
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
    """All selected jobs, a few at a time: most of their time they do nothing but hang. Watched as
    `torchwhere run` would, natively."""
    nursery, folder = Nursery(library), tmp_path_factory.mktemp("jobs")
    jobs = selected_jobs(request.session.items)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = {
            job: pool.submit(diagnose, nursery, *job, folder / f"{job[0]}-{job[1]}") for job in jobs
        }
    nursery.close()
    return done


def selected_jobs(items: list[pytest.Item]) -> list[tuple[str, int]]:
    """Name and victim of each job that the selected tests need."""
    functions = [item for item in items if "outcomes" in getattr(item, "fixturenames", ())]
    parameters = [item.callspec.params for item in functions if hasattr(item, "callspec")]
    jobs = [(parameter["name"], parameter["victim"]) for parameter in parameters]
    return list(dict.fromkeys([*jobs, ("cable_pulled", 2)]))


def test_every_kind_is_represented() -> None:
    """The faults that `make test` plants exist, and cover every kind of verdict."""
    assert set(FAULTS) >= REPRESENTATIVE
    kinds = {name: expected.kinds[0] for name, (_, expected) in FAULTS.items()}
    assert {kinds[name] for name in REPRESENTATIVE} == set(kinds.values())


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("name", NAMES)
def test_fault(name: str, victim: int, outcomes: dict[tuple[str, int], Future[Outcome]]) -> None:
    """Kind and culprits are right while the job hangs, and again when it and its monitor were
    killed; the culprit's place is right."""
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
        (said,) = [
            cohort["issued"] for cohort in live.facts["cohorts"] if cohort["ranks"] == [victim]
        ]
        assert f"{marked(expected.issued)}," in said
    if expected.words is not None:
        assert expected.words in (live.ranks[victim].detail or "")
    assert (after.kind in kinds_after(expected), set(after.culprits)) == (True, culprits), (
        after.explanation
    )


def kinds_after(expected: Expected) -> tuple[str, ...]:
    """What may be said when all was killed: of a job that was well, that it is dead, and not that
    it was healthy to its end."""
    return ("dead",) if expected.kinds == ("healthy",) else expected.kinds


def is_right(verdict: Verdict, expected: Expected, victim: int) -> bool:
    """Whether it names the right ones, and what they did. One that died before the others noticed
    may be called missing, where nobody saw it: as a conclusion."""
    is_close = (
        "dead" in expected.kinds and verdict.kind == "missing" and verdict.certainty == "inferred"
    )
    return set(verdict.culprits) == expected.culprits(victim) and (
        verdict.kind in kinds_after(expected) or is_close
    )


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("name", NAMES)
def test_nobody_watched(
    name: str, victim: int, outcomes: dict[tuple[str, int], Future[Outcome]]
) -> None:
    """When all was killed and no monitor was there, the boxes alone tell the same: by their hearts,
    how long it had stood."""
    verdict, expected = outcome_of(outcomes, name, victim).after[Damage(kept=BARE)], FAULTS[name][1]
    assert is_right(verdict, expected, victim), verdict.explanation


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("name", NAMES)
def test_one_box_is_gone_or_cut(
    name: str, victim: int, outcomes: dict[tuple[str, int], Future[Outcome]]
) -> None:
    """With any one box deleted or cut, nobody is blamed but the culprit, and it is said. The
    culprit is named if somebody was asked before; and else where ranks stood still, as one of them
    or a monitor had seen it; if not, it takes the boxes that show it."""
    expected, outcome = FAULTS[name][1], outcome_of(outcomes, name, victim)
    for damage, verdict in outcome.after.items():
        if damage.rank is None:
            continue
        said = " ".join(verdict.missing_data)
        assert (
            f"no box of rank {damage.rank}" in said if damage.size is None else verdict.missing_data
        ), damage
        assert set(verdict.culprits) <= expected.culprits(victim), (damage, verdict.explanation)
        is_known = DOCTOR in damage.kept or outcome.live.stalled_s is not None
        if is_known or damage.rank not in expected.needs(victim):
            assert is_right(verdict, expected, victim), (damage, verdict.explanation)


def outcome_of(outcomes: dict[tuple[str, int], Future[Outcome]], name: str, victim: int) -> Outcome:
    try:
        return outcomes[name, victim].result()
    except NotHereError as error:
        pytest.skip(str(error))


def test_the_flight_recorder_is_asked(outcomes: dict[tuple[str, int], Future[Outcome]]) -> None:
    """Where all hang together, every rank that listens is asked for its dump, once, and what it
    adds is said."""
    live = outcome_of(outcomes, "cable_pulled", 2).live
    assert live.collective is not None
    number = live.collective["number"]
    assert (
        f'By the flight recorder, #{number} of group "default" is issued on ranks 0-3.'
        in live.explanation
    )
    assert live.facts["flight_recorder"][0]["ranks"] == [
        {"ranks": list(range(WORLD)), "issued": number, "started": None, "completed": None}
    ]
