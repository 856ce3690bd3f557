"""The sentences of a verdict: each cause has a text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from skewed_job import Player, Skew, call
from torchwhere.blackbox.run import read_run
from torchwhere.diagnose.doctor.examine import examine
from torchwhere.diagnose.doctor.finding import Cause
from torchwhere.render.verdict_text.explanation import _TEXTS

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
