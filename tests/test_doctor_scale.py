"""The doctor on a thousand ranks: one in a crowd is blamed and nobody else, and work grows as the
ranks do."""

from __future__ import annotations

import cProfile
import json
import pstats
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from synthetic_boxes import RANKS, VICTIM, Made, made_once, make
from synthetic_job import TP, Job
from torchwhere.blackbox.run import RunSummary
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.diagnose.calls.job_calls import JobCalls, load_calls
from torchwhere.diagnose.doctor.verdict import State, Verdict
from torchwhere.pipeline.verdict import diagnose_folder, diagnose_run
from torchwhere.render.verdict import verdict_json


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Boxes of a job, made once."""
    return made_once(tmp_path_factory.mktemp, records=512)


@pytest.fixture(scope="module")
def verdict_on(made: Made) -> Callable[[str], Verdict]:
    """The verdict on a thousand ranks, given once."""
    return cache(lambda fault: diagnose_folder(made(fault)))


def found(verdict: Verdict) -> tuple[str, tuple[int, ...], str]:
    return str(verdict.kind), verdict.culprits, str(verdict.certainty)


def without(folder: Path, rank: int, into: Path) -> Path:
    """The same boxes less one."""
    into.mkdir()
    for box in folder.glob("*.box"):
        if box.name != f"rank{rank}.box":
            (into / box.name).symlink_to(box)
    return into


# -- verdicts --------------------------------------------------------------------------------------


def test_missing(verdict_on: Callable[[str], Verdict]) -> None:
    """One rank of a thousand stops in a backward: it is named, with its place, and those who wait
    for it are not."""
    verdict = verdict_on("missing")
    assert found(verdict) == ("missing", (VICTIM,), "inferred")
    culprit = verdict.ranks[VICTIM]
    assert (culprit.state, culprit.place.module, culprit.place.line) == (
        State.RUNNING,
        "layers.12.mlp.up",
        "train.py:50",
    )
    assert {rank for rank, report in verdict.ranks.items() if report.state is State.RUNNING} == {
        VICTIM
    }
    assert verdict.collective is not None
    assert VICTIM in verdict.collective["group_ranks"]


def test_dead(verdict_on: Callable[[str], Verdict]) -> None:
    """One rank ends while the others wait, directly or for those who wait."""
    verdict = verdict_on("dead")
    assert found(verdict) == ("dead", (VICTIM,), "exact")
    assert (verdict.ranks[VICTIM].state, verdict.ranks[VICTIM].detail) == (State.DEAD, "exit 1")


def test_mismatch_in_form(verdict_on: Callable[[str], Verdict]) -> None:
    """One rank of one tensor-parallel group gives another shape: that group, that number, that
    rank."""
    verdict = verdict_on("shape")
    assert found(verdict) == ("mismatch", (VICTIM,), "exact")
    first = VICTIM // TP * TP
    assert verdict.collective is not None
    assert (verdict.collective["group"], verdict.collective["group_ranks"]) == (
        "tp",
        list(range(first, first + TP)),
    )
    assert verdict.facts["differs_in"] == ["shape"]
    assert [cohort["ranks"] for cohort in verdict.facts["cohorts"]][1] == [VICTIM]


def test_mismatch_in_meaning(verdict_on: Callable[[str], Verdict]) -> None:
    """One rank swaps two collectives of one shape, two steps before the end: nothing fails, and it
    is seen."""
    verdict = verdict_on("swapped")
    assert found(verdict) == ("mismatch", (VICTIM,), "inferred")
    assert verdict.facts["differs_in"] == ["module", "line"]


def test_deadlock(verdict_on: Callable[[str], Verdict]) -> None:
    """One rank takes two groups in the other order: the circle goes over several groups, and who
    changed its ways is blamed."""
    verdict = verdict_on("deadlock")
    assert found(verdict) == ("deadlock", (VICTIM,), "exact")
    cycle = [link["rank"] for link in verdict.facts["circle"]]
    assert VICTIM in cycle
    assert {link["collective"]["group"] for link in verdict.facts["circle"]} >= {"tp", "default"}


def test_straggler(made: Made) -> None:
    """One rank that is late step after step is named; a large group does not hide it."""
    verdict = diagnose_folder(made("straggler", ranks=512, steps=14, records=1024))
    assert found(verdict) == ("straggler", (VICTIM,), "inferred")
    assert verdict.facts["late_s"] == pytest.approx(0.03, rel=0.05)
    assert verdict.facts["after"] == "recv at train.py:41"


def test_healthy(made: Made) -> None:
    """Nothing is wrong: nobody is blamed."""
    verdict = diagnose_folder(made("none"))
    assert found(verdict) == ("healthy", (), "exact")
    assert verdict.facts["last_step"] == 5


def test_culprits_box_is_gone(made: Made, tmp_path: Path) -> None:
    """Without the culprit's own box, those who stand in a collective with it are not blamed: the
    one nobody knows about is."""
    verdict = diagnose_folder(without(made("missing"), VICTIM, tmp_path / "run"))
    assert found(verdict) == ("missing", (VICTIM,), "inferred")
    assert (
        verdict.missing_data[0]
        == f"{RANKS - 1} of {RANKS} ranks are watched: no box of rank {VICTIM}"
    )


@pytest.mark.parametrize("gone", [VICTIM // TP * TP, VICTIM - 128, 0])
def test_another_box_is_gone(gone: int, made: Made, tmp_path: Path) -> None:
    """Without the box of somebody else, of the culprit's group, of a stage before or of another
    one, the culprit is found."""
    verdict = diagnose_folder(without(made("missing"), gone, tmp_path / "run"))
    assert found(verdict) == ("missing", (VICTIM,), "inferred")


def test_healthy_with_a_box_gone(made: Made, tmp_path: Path) -> None:
    """A rank without a box is not blamed, and the job is not called healthy."""
    assert found(diagnose_folder(without(made("none"), 5, tmp_path / "run"))) == (
        "partial",
        (),
        "inferred",
    )


@pytest.mark.parametrize(
    ("fault", "kind"), [("missing", "missing"), ("shape", "mismatch"), ("deadlock", "deadlock")]
)
def test_rings_have_wrapped(fault: str, kind: str, made: Made) -> None:
    """With rings that keep two of twelve steps the verdict is the same, and it says what was
    compared."""
    ranks = RANKS if fault == "missing" else 256
    verdict = diagnose_folder(made(fault, ranks=ranks, steps=11, records=100))
    assert (verdict.kind, verdict.culprits) == (kind, (VICTIM % ranks,))
    assert f"the rings of {ranks:,} ranks have wrapped" in " ".join(verdict.missing_data)


# -- how -------------------------------------------------------------------------------------------


def test_processes_give_the_same_verdict(made: Made) -> None:
    """Boxes read here or by several processes, each with its own ids, give the same verdict."""
    folder = made("shape")
    here, there = (judged(load_calls(folder, processes=processes)) for processes in (0, 3))
    assert here.to_dict() == there.to_dict()
    assert here.explanation == there.explanation


def judged(loaded: tuple[RunSummary[BoxSummary], JobCalls]) -> Verdict:
    return diagnose_run(loaded[0], {}, stall_s=10, job_calls=loaded[1])


def test_without_processes(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no process can be started, or it ends at once, the boxes are read here."""
    for program in ("/bin/false", "/nowhere/python"):
        monkeypatch.setattr(sys, "executable", program)
        run, job_calls = load_calls(made("missing"), processes=2)
        assert (len(run.boxes), len(job_calls.by_rank)) == (RANKS, RANKS)


def test_progress(made: Made) -> None:
    """`on_progress` gets the number of boxes read, up to all of them."""
    told: list[tuple[int, int]] = []
    diagnose_folder(made("none"), on_progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert (len(told) > 8, told[-1]) == (True, (RANKS, RANKS))


def test_groups_are_shared(made: Made) -> None:
    """A group that a thousand boxes list, each with a thousand members, is kept once."""
    _, job_calls = load_calls(made("none"), processes=2)
    job = Job(RANKS)
    worlds = {
        id(job_calls.group(key))
        for each in job_calls.by_rank.values()
        for key in each.counts
        if key.group == 0
    }
    assert len(worlds) == 1
    with pytest.raises(IndexError):
        job_calls.shared_ids.groups[1 + job.pp * job.dp + job.pp * TP + job.dp * TP]


def test_earlier_boxes_are_left_out(made: Made, tmp_path: Path) -> None:
    """A box that a larger run left in the folder is left out, whatever process reads it."""
    folder = tmp_path / "run"
    shutil.copytree(made("none", ranks=64), folder)
    make(Job(128, steps=2, records=512), tmp_path / "larger")
    shutil.copy(tmp_path / "larger" / "rank100.box", folder)
    (folder / "rank7.box").write_bytes(b"not a box")
    for processes in (0, 2):
        run, job_calls = load_calls(folder, processes=processes)
        assert len(run.boxes) == len(job_calls.by_rank)
        assert [box.path.name for box in run.unreadable] == ["rank7.box"]


# -- how much --------------------------------------------------------------------------------------


def calls_made(work: Callable[[], Any]) -> int:
    profile = cProfile.Profile()
    profile.runcall(work)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", ["missing", "deadlock", "none"])
def test_work_grows_as_the_ranks_do(fault: str, made: Made) -> None:
    """Four times the ranks take four times the function calls, or little more: to read the boxes,
    and to judge them."""
    work = {}
    for ranks in (256, RANKS):
        folder = made(fault, ranks=ranks)
        loaded = load_calls(folder, processes=0)
        work[ranks] = (
            calls_made(lambda folder=folder: load_calls(folder, processes=0)),
            calls_made(lambda loaded=loaded: judged(loaded)),
        )
    for few, many in zip(work[256], work[RANKS], strict=True):
        assert many / few < 1.25 * RANKS / 256, work


def test_half_the_ranks_wait_for_the_other_half(tmp_path: Path) -> None:
    """Where hundreds wait for hundreds, nothing is done for each pair."""
    work = {}
    for ranks in (256, RANKS):
        job = Job(ranks, steps=2, records=256, fault="none")
        make(job, tmp_path / f"{ranks}", done=lambda rank, length: length - 4 * (rank % 2))
        loaded = load_calls(tmp_path / f"{ranks}", processes=0)
        verdict = judged(loaded)
        assert (verdict.kind, verdict.culprits) == ("missing", tuple(range(1, ranks, 2)))
        work[ranks] = calls_made(lambda loaded=loaded: judged(loaded))
    assert work[RANKS] / work[256] < 1.25 * RANKS / 256, work


def test_every_record_is_decoded_once(made: Made) -> None:
    """The encoder decodes each record of each box once, and keeps about ten bytes a collective."""
    from torchwhere.blackbox.reader import BoxReader
    from torchwhere.diagnose.calls.encode import Encoder

    paths = sorted(made("none").glob("*.box"))
    reader, encoder = BoxReader(), Encoder()
    batch = encoder.encode(reader.read(path) for path in paths)
    assert (
        encoder.decoded
        == sum(rank_summary.box_summary.counts.good for rank_summary in batch.rank_summaries)
        == 6 * 48 * RANKS
    )
    arrays = (batch.codes, batch.steps, batch.records, batch.ticks)
    assert sum(array.nbytes for array in arrays) <= 10 * len(batch.codes)


# -- JSON ------------------------------------------------------------------------------------------


def test_json_of_many_ranks_is_folded(verdict_on: Callable[[str], Verdict]) -> None:
    """Every rank has its state and step; the culprit and one of each kind are whole; 16,384 of them
    fit into 2 MB."""
    verdict = verdict_on("missing")
    value = verdict_json(verdict)
    ranks = value["ranks"]
    assert list(map(int, ranks)) == list(range(RANKS))
    assert ranks[str(VICTIM)] == verdict.ranks[VICTIM].to_dict()
    whole = {rank for rank, report in ranks.items() if "like" not in report}
    assert 1 < len(whole) < RANKS / 8
    for rank, report in ranks.items():
        assert report["state"] == str(verdict.ranks[int(rank)].state)
        assert report["step"] == verdict.ranks[int(rank)].place.step
        assert str(report.get("like", rank)) in whole
    assert len(json.dumps(value)) * 16_384 / RANKS < 2_000_000


def test_like_means_like(verdict_on: Callable[[str], Verdict]) -> None:
    """A rank that is `like` another one has the same report, in all that `alike_in` names."""
    verdict = verdict_on("deadlock")
    value = verdict_json(verdict)
    assert value["alike_in"] == [
        "state",
        "pass",
        "module",
        "call",
        "line",
        "detail",
        "op",
        "group",
        "number",
    ]
    for rank, report in value["ranks"].items():
        own, head = verdict.ranks[int(rank)], verdict.ranks[report.get("like", int(rank))]
        assert (own.state, own.place.pass_, own.place.module, own.place.line) == (
            *(head.state, head.place.pass_, head.place.module, head.place.line),
        )
        assert own.last is not None
        assert head.last is not None
        assert (own.last["op"], own.last["number"]) == (head.last["op"], head.last["number"])


def test_json_of_few_ranks_is_whole(made: Made) -> None:
    """Up to 256 ranks each has its whole report, and nothing is said of folding."""
    verdict = diagnose_folder(made("missing", ranks=256))
    value = verdict_json(verdict)
    assert "alike_in" not in value
    assert value["ranks"] == {str(rank): report.to_dict() for rank, report in verdict.ranks.items()}
