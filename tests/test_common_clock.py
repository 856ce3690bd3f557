"""Stragglers on several hosts with different clocks: a clock blames no rank, and hides none."""

from __future__ import annotations

from pathlib import Path

import pytest

from skewed_job import Act, Player, Skew, call, mark, work
from torchwhere.blackbox.run import read_run
from torchwhere.core.events import Kind
from torchwhere.diagnose.calls.job_calls import calls_of_run
from torchwhere.diagnose.doctor.stragglers import straggler
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.pipeline.verdict import diagnose_run

STEPS, USUAL_NS, SLOW_NS = 60, 10_000_000, 15_000_000


def verdict_on(
    folder: Path,
    *,
    hosts: list[str],
    skews: list[Skew],
    slow: int | None = None,
    is_async: bool = False,
) -> Verdict:
    """A verdict on a job in which one rank may be slow."""
    world = range(len(hosts))

    def program(rank: int) -> list[Act]:
        acts = []
        for _ in range(STEPS):
            takes = USUAL_NS + SLOW_NS * (rank == slow)
            acts += [mark(Kind.STEP_BEGIN), work(takes), call(world, is_async=is_async)]
        return [*acts, mark(Kind.STEP_BEGIN)]

    Player([program(rank) for rank in world]).play().write(folder, skews, hosts)
    return diagnose_run(read_run(folder), {}, stall_s=30.0)


AHEAD = [Skew(), Skew(offset_ns=50_000_000)]
BEHIND = [Skew(), Skew(offset_ns=-50_000_000)]


@pytest.mark.parametrize("skews", [AHEAD, BEHIND], ids=["ahead", "behind"])
def test_a_clock_is_no_straggler(tmp_path: Path, skews: list[Skew]) -> None:
    """On two hosts of one rank each with clocks 50 ms apart, no rank is late after five steps. By
    wall clocks alone one would be."""
    verdict = verdict_on(tmp_path, hosts=["a", "b"], skews=skews)
    assert (verdict.kind, verdict.culprits) == ("healthy", ())


@pytest.mark.parametrize("skews", [AHEAD, BEHIND], ids=["ahead", "behind"])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_straggler_behind_a_clock(tmp_path: Path, skews: list[Skew], slow: int) -> None:
    """A rank that is 15 ms late is named, with that number, although clocks are 50 ms apart; the
    remaining clock error is printed."""
    verdict = verdict_on(tmp_path, hosts=["a", "b"], skews=skews, slow=slow)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("straggler", (slow,), "inferred")
    assert verdict.facts["late_s"] == pytest.approx(SLOW_NS / 1e9, rel=0.05)
    assert 0 < verdict.facts["unsure_s"] < SLOW_NS / 2e9
    assert " The host clocks were aligned to about " in verdict.explanation[0]


def test_calls_that_do_not_wait(tmp_path: Path) -> None:
    """If nothing connects the clocks, no rank is blamed across hosts."""
    verdict = verdict_on(
        tmp_path, hosts=["a", "b"], skews=[Skew(), Skew(offset_ns=4_000_000)], is_async=True
    )
    assert (verdict.kind, verdict.culprits) == ("healthy", ())


def test_late_among_its_own(tmp_path: Path) -> None:
    """A rank that is later than the others of its host is late by any clock, also without a
    comparison of clocks."""
    skews = [Skew(), Skew(), Skew(offset_ns=50_000_000), Skew(offset_ns=50_000_000)]
    verdict = verdict_on(tmp_path, hosts=["a", "a", "b", "b"], skews=skews, slow=1)
    assert (verdict.kind, verdict.culprits) == ("straggler", (1,))
    plain = [Skew()] * 4
    (tmp_path / "plain").mkdir()
    verdict_on(tmp_path / "plain", hosts=["a", "a", "b", "b"], skews=plain, slow=3)
    late = straggler(calls_of_run(read_run(tmp_path / "plain")))
    assert late is not None
    assert (late.rank, late.unsure_s) == (3, 0.0)
