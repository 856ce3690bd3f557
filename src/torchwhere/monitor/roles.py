"""What a monitor needs of the monitors of other hosts, and the plain case: that there are none.

`Lead` and `Follower` are the other two roles. `Inputs` is what there is to judge, in all of them.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.lazy_boxes import LazyBoxes
from torchwhere.blackbox.run import BoxRun, RunSummary
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.load import load_calls
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.processes.status import ProcessStatus

WORD_FILE = ".monitor-lead.json"
# before other hosts are looked for: those that share the folder are mostly there by then
GRACE_S = 1.0
_MOST_NAMED = 16
# after its own ranks, and since others could hear it, while there is something to say or to hear
LINGER_S = 8.0
MOST_LINGER_S = 20.0
Kept = dict[int, dict[str, Any]]


@dataclass(slots=True)
class MultiHostRun(RunSummary[Any]):
    """A job of several hosts: boxes of this one, labels that came in snapshots, and what is not
    known."""

    noun: ClassVar[str] = "box or snapshot"

    lacks: tuple[str, ...] = ()

    def caveats(self) -> list[str]:
        # Not super(): a dataclass with slots is made anew, and the name of the class no longer
        # means it.
        return [*RunSummary.caveats(self), *self.lacks]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What there is to judge."""

    run: RunSummary[Any]
    job_calls: JobCalls | None = None
    kept: Kept = field(default_factory=dict)


@dataclass(slots=True)
class Lifetime:
    """For how long ranks of this host have been there, and been gone: durations, which hosts can
    compare without a clock."""

    # not later than this monitor, which a rank has started
    _began: float = field(default_factory=time.monotonic)
    _left: float | None = None
    has_met: bool = False  # a run

    def meet(self, run: BoxRun) -> None:
        host, now = socket.gethostname(), time.monotonic()
        own = [
            box.meta.get("started_ns")
            for box in run.summaries.values()
            if box.meta.get("host") == host
        ]
        ages = [(time.time_ns() - started) / 1e9 for started in own if isinstance(started, int)]
        self._began, self.has_met = min(self._began, now - max(ages, default=0.0)), True

    def end(self) -> float:
        """They are gone: for how many seconds."""
        self._left = self._left if self._left is not None else time.monotonic()
        return self.gone_s

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def gone_s(self) -> float:
        return time.monotonic() - self._left if self._left is not None else 0.0

    @property
    def has_ended(self) -> bool:
        return self._left is not None


class SingleHost:
    """The one monitor of a job."""

    speaks = True
    stacks: tuple[int, ...] = ()
    ends = False

    def tend(self, run: BoxRun | None) -> bool:
        """Called often: whether somebody wants an examination, or a report."""
        return False

    def prepare(self) -> None:
        """Before the boxes are read."""

    def gather(self, run: BoxRun) -> Inputs:
        """A large job is heard by several processes; a small one by whoever judges."""
        return Inputs(*load_calls(run.folder)) if isinstance(run.boxes, LazyBoxes) else Inputs(run)

    def ask(self, ranks: Sequence[int]) -> Kept:
        """Have these ranks' stacks, where other hosts can see them."""
        return {}

    def has_said(self, verdict: str) -> bool:
        return False

    def may_tell(self, culprits: Sequence[int]) -> bool:
        """Whether this one knows enough to blame these ranks."""
        return True

    def told(self, verdict: str, *, ends: bool) -> None:
        """A verdict was given."""

    def report(
        self,
        boxes: Mapping[int, Box],
        statuses: Mapping[int, ProcessStatus],
        *,
        is_last: bool = False,
    ) -> None:
        """To whom speaks."""

    def may_leave(self, *, is_well: bool) -> bool:
        """Asked when all processes of this host are gone; `is_well` says whether they have
        finished."""
        return True

    def describe(self) -> dict[str, Any]:
        """What it is, and whom it hears: for somebody who wonders why it says nothing."""
        return {"role": "alone"}

    def close(self) -> bool:
        """Whether nothing of it runs any more."""
        return True


def with_hosts(verdict: Verdict, run: RunSummary[Any]) -> Verdict:
    """The verdict with where its culprits are, if the job has several hosts: somebody has to go
    there."""
    hosts = {
        rank: box.meta.get("source_host") or box.meta.get("host")
        for rank, box in run.summaries.items()
    }
    if len(set(hosts.values())) < 2:
        return verdict
    found = {rank: str(hosts[rank]) for rank in verdict.culprits[:_MOST_NAMED] if rank in hosts}
    said = tuple(f"  rank {rank} is on host {host}" for rank, host in found.items())
    return replace(
        verdict, explanation=(*verdict.explanation, *said), facts=verdict.facts | {"hosts": found}
    )
