"""The sentences of a verdict: each cause has a text, and no text needs data that may be missing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from skewed_job import Player, Skew, call
from torchwhere.blackbox.run import read_run
from torchwhere.diagnose.doctor.examine import examine
from torchwhere.diagnose.doctor.finding import Cause
from torchwhere.diagnose.doctor.rules.missing import MissingRanks
from torchwhere.diagnose.doctor.waits import Wait
from torchwhere.render.verdict_text.explanation import _TEXTS, explain

WORLD = (0, 1, 2)


def written(folder: Path, counts: tuple[int, ...]) -> Path:
    """A run whose ranks have issued so many calls of one group."""
    programs = [[call(WORLD)] * count for count in counts]
    Player(programs).play().write(folder, [Skew()] * len(counts), ["a"] * len(counts))
    return folder


def test_each_cause_has_a_text() -> None:
    """A rule that returns a new kind of cause has a function that explains it."""
    # By name: a dataclass with slots replaces the class that it was made from.
    causes = {cause.__name__ for cause in Cause.__subclasses__()}
    assert {cause.__name__ for cause in _TEXTS} == causes


def test_rules_cannot_change_the_context(tmp_path: Path) -> None:
    """The context and the finding of a diagnosis are frozen."""
    diagnosis = examine(read_run(written(tmp_path, (5, 5, 4))))
    for part in (diagnosis, diagnosis.context, diagnosis.context.timing, diagnosis.context.exits):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(part)[0].name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        diagnosis.finding.culprits = ()  # type: ignore[misc]


def test_missing_ranks_of_which_one_left_no_box(tmp_path: Path) -> None:
    """The text names a rank without a box beside a rank that cannot complete the call."""
    written(tmp_path, (5, 5, 4))
    (tmp_path / "rank2.box").unlink()
    context = examine(read_run(tmp_path)).context
    key, _ = context.job_calls.by_rank[1].last or pytest.fail("no call")
    lines = explain(MissingRanks((0, 2), Wait(1, key, 4, (), (0, 2))), context)
    assert lines[0].endswith("but cannot complete it.")
    assert lines[2].startswith("  rank 0 is ")
    assert lines[3] == "  rank 2 left no box; its location is unknown"
