"""What the doctor says about recorded runs of four NCCL ranks if the box of one rank is lost.

The runs are those of `test_nccl_runs.py` and of the files beside it. The monitor's files are left,
those of an earlier doctor are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from faulty_jobs import FAULTS
from nccl_jobs import JOBS, VICTIM
from test_nccl_runs import STALL_S, unpacked
from torchwhere.core.place import Certainty
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.pipeline.verdict import diagnose_folder

WORLD = 4
ARCHIVES = ("runs", "graphs", "marks", "failures", "faults")
SUFFIXES = ("_torchrun", "_unexplained", "_shared_gpu")  # of runs, after the name of their job


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: unpacked(f"nccl_{name}.txz", tmp_path_factory.mktemp(name)) for name in ARCHIVES}


def verdict_without(run: Path, folder: Path, lost: int, *, has_monitor: bool = True) -> Verdict:
    """The verdict on a run without the box of a rank."""
    folder.mkdir()
    left_out = (f"rank{lost}.", "doctor-", *(() if has_monitor else ("monitor-",)))
    for path in run.iterdir():
        if not path.name.startswith(left_out):
            (folder / path.name).symlink_to(path)
    return diagnose_folder(folder, stall_s=STALL_S)


def culprits_of(name: str) -> set[int]:
    """The ranks that are at fault in a run."""
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return set(JOBS[name][1].culprits) if name in JOBS else FAULTS[name][1].culprits(VICTIM)


def wrong_names(run: Path, folder: Path) -> Iterator[str]:
    """What a verdict without a box says and must not."""
    for lost in range(WORLD):
        verdict = verdict_without(run, folder / f"{run.name}-{lost}", lost)
        is_exact = verdict.certainty == Certainty.EXACT
        others = set(verdict.culprits) - culprits_of(run.name) - {lost}
        if others or (lost in verdict.culprits and is_exact):
            yield f"{run.name} without rank {lost}: {verdict.explanation[0]}"


@pytest.mark.parametrize("archive", ARCHIVES)
def test_no_other_rank_is_named(archives: dict[str, Path], tmp_path: Path, archive: str) -> None:
    """Whichever box is lost, the verdict names the rank at fault, or the rank of that box, which is
    never exact, or no rank."""
    runs = sorted(archives[archive].iterdir())
    assert len(runs) > 1
    assert [line for run in runs for line in wrong_names(run, tmp_path)] == []


@pytest.mark.parametrize("lost", [0, 1, 3])
@pytest.mark.parametrize(
    ("archive", "name"),
    [
        ("runs", "endless_ddp"),
        ("runs", "slow_ddp"),
        ("marks", "endless_fsdp2"),
        ("marks", "slow_ddp"),
        ("failures", "destroy_with_pending_work"),
        ("failures", "illegal_address"),
        ("faults", "straggler"),
        ("faults", "sigkill_shared_gpu"),
    ],
)
def test_the_fault_is_still_found(
    archives: dict[str, Path], tmp_path: Path, archive: str, name: str, lost: int
) -> None:
    """If the lost box is not the one that shows the fault, the verdict has the same kind, and names
    the rank at fault."""
    run = archives[archive] / name
    kind = diagnose_folder(run, stall_s=STALL_S).kind
    verdict = verdict_without(run, tmp_path / "run", lost)
    assert (verdict.kind, verdict.culprits) == (kind, (VICTIM,)), verdict


def test_devices_that_wait_in_a_gather_of_fsdp(archives: dict[str, Path], tmp_path: Path) -> None:
    """Devices whose stream of collectives has not passed the last gather wait in it, although other
    streams have reached later marks: the verdict names that gather and the rank without a box."""
    verdict = verdict_without(archives["marks"] / "endless_fsdp2", tmp_path / "run", VICTIM)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("missing", (2,), "inferred")
    assert verdict.explanation[0].startswith("Rank 2 may never have issued all_gather_into_tensor")
    assert verdict.explanation[1].startswith("  waiting: ranks 0-1, 3, in backward of head")


def test_ranks_that_finished(archives: dict[str, Path], tmp_path: Path) -> None:
    """If a rank that finished has lost its box, the verdict on the rank that issued one collective
    more is not certain: the others may have issued one less."""
    run = archives["failures"] / "destroy_with_pending_work"
    verdict = verdict_without(run, tmp_path / "run", 0)
    assert (verdict.kind, verdict.certainty) == ("mismatch", "inferred")


def test_a_killed_process_on_a_shared_device(archives: dict[str, Path], tmp_path: Path) -> None:
    """The exit code that a monitor saw is enough to name the killed rank."""
    run = archives["faults"] / "sigkill_shared_gpu"
    verdict = verdict_without(run, tmp_path / "run", VICTIM)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("dead", (2,), "inferred")
    assert verdict.explanation[0] == (
        "Rank 2 may have exited first: killed by SIGKILL, and it left no readable box."
    )
    assert verdict.facts["failed_because_of_it"] == {"lost peer": [0], "shared device": [1, 3]}


def test_an_unseen_process_on_a_shared_device(archives: dict[str, Path], tmp_path: Path) -> None:
    """If two ranks failed on one device, and nothing is known about a third rank, it is unknown
    which was first."""
    run = archives["faults"] / "sigkill_shared_gpu"
    verdict = verdict_without(run, tmp_path / "run", VICTIM, has_monitor=False)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("dead", (), "inferred")
    assert verdict.explanation[0] == (
        "A process exited, and it is unknown which rank exited first. Ranks 1, 3 failed because of"
        " it:"
    )


def test_a_rank_that_may_have_waited_elsewhere(archives: dict[str, Path], tmp_path: Path) -> None:
    """A rank that comes late to one group, and shares another group only with a rank without a box,
    may have waited there: it is not a straggler."""
    verdict = verdict_without(archives["faults"] / "healthy_mesh", tmp_path / "run", VICTIM)
    assert (verdict.kind, verdict.culprits) == ("dead", ())
