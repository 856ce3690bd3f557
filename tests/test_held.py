"""A rank that was stopped, or died, in the middle of a collective: all have come to it, and one
cannot go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnosing import diagnose
from skewed_job import Act, Player, Skew, call, mark, recv, send
from torchwhere.blackbox.run import read_run
from torchwhere.core.events import Kind
from torchwhere.diagnose.doctor.verdict import State, Verdict
from torchwhere.processes.status import ProcessStatus

WORLD = (0, 1, 2, 3)
STEP = [mark(Kind.STEP_BEGIN), call(WORLD)]
STOPPED, GONE = (
    ProcessStatus(alive=True, state="T", alive_ns=1),
    ProcessStatus(alive=False, alive_ns=1),
)


def verdict_on(folder: Path, *programs: list[Act], seen: dict[int, ProcessStatus]) -> Verdict:
    """A minute after the last record, all others being alive."""
    Player(list(programs)).play().write(folder, [Skew()] * 4, ["node0"] * 4)
    run = read_run(folder)
    now_ns = max(box.last_ns for box in run.boxes.values()) + 60_000_000_000
    alive = dict.fromkeys(run.boxes, ProcessStatus(alive=True, state="S", alive_ns=now_ns))
    return diagnose(run, statuses=alive | seen, now_ns=now_ns, stall_s=30.0, is_suspicion=True)


def test_stopped(tmp_path: Path) -> None:
    """The one that is stopped is named; all others wait for it."""
    verdict = verdict_on(tmp_path, *[STEP * 3] * 4, seen={1: STOPPED})
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("missing", (1,), "exact")
    assert [verdict.ranks[rank].state for rank in WORLD] == [
        State.WAITING,
        State.STOPPED,
        State.WAITING,
        State.WAITING,
    ]
    assert (
        verdict.explanation[0]
        == 'Rank 1 reached all_reduce of float32 [4], #2 of group "0-1-2-3", but cannot complete it.'
    )
    assert any("stopped by a signal" in line for line in verdict.explanation)
    assert "Look at: what stopped it" in verdict.explanation[-1]


def test_died(tmp_path: Path) -> None:
    """Where a backend does not notice that a peer is gone, the dead one is named."""
    verdict = verdict_on(tmp_path, *[STEP * 3] * 4, seen={2: GONE})
    assert (verdict.kind, verdict.culprits) == ("dead", (2,))
    assert verdict.collective is not None
    assert (verdict.collective["op"], verdict.collective["number"]) == ("all_reduce", 2)


def test_nobody(tmp_path: Path) -> None:
    """Where all are alive, all stand there together."""
    verdict = verdict_on(tmp_path, *[STEP * 3] * 4, seen={})
    assert (verdict.kind, verdict.culprits) == ("together", ())


def test_who_waits_with_it_is_not_blamed(tmp_path: Path) -> None:
    """Rank 0 is in a pair with one that is stopped, two others wait for rank 0: it is the stopped
    one's fault."""
    pair = [*STEP, call((0, 1))]
    verdict = verdict_on(tmp_path, pair, pair, STEP * 2, STEP * 2, seen={1: STOPPED})
    assert (verdict.kind, verdict.culprits) == ("missing", (1,))
    assert verdict.ranks[0].state is State.WAITING


def test_somebody_got_through(tmp_path: Path) -> None:
    """A rank stopped right after a collective, which others have left: it is missing from the
    next."""
    verdict = verdict_on(tmp_path, STEP * 2, STEP * 3, STEP * 3, STEP * 3, seen={0: STOPPED})
    assert (verdict.kind, verdict.culprits) == ("missing", (0,))
    assert (
        verdict.explanation[0]
        == 'Rank 0 never issued all_reduce of float32 [4], #2 of group "0-1-2-3".'
    )


@pytest.mark.parametrize("waits_to", ["receive", "send"])
def test_the_other_end_of_a_message(tmp_path: Path, waits_to: str) -> None:
    """Of a message the verdict names what is missing, not what the one who waits has issued."""
    one, other = ([recv(3)], "send") if waits_to == "receive" else ([send(3)], "recv")
    verdict = verdict_on(tmp_path, STEP + one, STEP, STEP, STEP + [mark(Kind.STEP_BEGIN)], seen={})
    source, destination = (3, 0) if waits_to == "receive" else (0, 3)
    assert (verdict.kind, verdict.culprits) == ("missing", (3,))
    said = (
        f"Rank 3 never issued the {other} of float32 [4], #0 from rank {source} to rank"
        f' {destination} on group "0-1-2-3".'
    )
    assert verdict.explanation[0] == said
