"""What a monitor needs of the monitors of other hosts, and the plain case: that there are none.

`Lead` and `Deputy` are the other two roles. `Gathering` is what there is to judge, in all of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from torchwhere.blackbox.reader import Box
from torchwhere.blackbox.run import Roster, Run
from torchwhere.blackbox.shelf import Shelf
from torchwhere.clerks import hear_folder
from torchwhere.diagnose.doctor.sighting import Sighting
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.diagnose.hearing.testimony import Hearing

WORD_FILE = ".monitor-word.json"
GRACE_S = 3.0  # ranks of other hosts that share the folder have a box there by then, and the lead's word is there
_MOST_NAMED = 16
LINGER_S = 8.0  # after its own ranks, while there is something to say or to hear
Kept = dict[int, dict[str, Any]]


@dataclass(slots=True)
class Assembly(Roster[Any]):
    """A job of several hosts: boxes of this one, labels that came in letters, and what is not known."""

    noun: ClassVar[str] = "box or letter"

    lacks: tuple[str, ...] = ()

    def caveats(self) -> list[str]:
        # Not super(): a dataclass with slots is made anew, and the name of the class no longer means it.
        return [*Roster.caveats(self), *self.lacks]


@dataclass(frozen=True, slots=True)
class Gathering:
    """What there is to judge."""

    run: Roster[Any]
    hearing: Hearing | None = None
    kept: Kept = field(default_factory=dict)


class Alone:
    """The one monitor of a job."""

    speaks = True
    stacks: tuple[int, ...] = ()
    ends = False

    def tend(self, run: Run | None) -> bool:
        """Called often: whether somebody wants an examination, or a report."""
        return False

    def prepare(self) -> None:
        """Before the boxes are read."""

    def gather(self, run: Run) -> Gathering:
        """A large job is heard by several processes; a small one by whoever judges."""
        return Gathering(*hear_folder(run.folder)) if isinstance(run.boxes, Shelf) else Gathering(run)

    def ask(self, ranks: Sequence[int]) -> Kept:
        """Have these ranks' stacks, where other hosts can see them."""
        return {}

    def has_said(self, verdict: str) -> bool:
        return False

    def told(self, verdict: str, *, ends: bool) -> None:
        """A verdict was given."""

    def report(self, boxes: Mapping[int, Box], sightings: Mapping[int, Sighting], *, is_last: bool = False) -> None:
        """To whom speaks."""

    def may_leave(self, *, is_well: bool) -> bool:
        """Asked when all processes of this host are gone; `is_well` says whether they have finished."""
        return True

    def describe(self) -> dict[str, Any]:
        """What it is, and whom it hears: for somebody who wonders why it says nothing."""
        return {"role": "alone"}

    def close(self) -> bool:
        """Whether nothing of it runs any more."""
        return True


def with_hosts(verdict: Verdict, run: Roster[Any]) -> Verdict:
    """The verdict with where its culprits are, if the job has several hosts: somebody has to go there."""
    hosts = {rank: box.meta.get("told_by") or box.meta.get("host") for rank, box in run.labels.items()}
    if len(set(hosts.values())) < 2:
        return verdict
    found = {rank: str(hosts[rank]) for rank in verdict.culprits[:_MOST_NAMED] if rank in hosts}
    said = tuple(f"  rank {rank} is on host {host}" for rank, host in found.items())
    return replace(verdict, explanation=(*verdict.explanation, *said), facts=verdict.facts | {"hosts": found})


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all; a folder that cannot be written is said by the ranks themselves."""
    try:
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        part.write_text(text)
        part.replace(path)
    except OSError:
        pass
