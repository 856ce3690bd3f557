"""The role of the only monitor of a job, and the interface of all roles.

`Lead` and `Follower` are the other two roles. `Inputs` is what a diagnosis starts from, in every
role.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.lazy_boxes import LazyBoxes
from torchwhere.blackbox.run import BoxRun, RunSummary
from torchwhere.diagnose.calls.job_calls import JobCalls, load_calls
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.gpus.samples import HostGpus
from torchwhere.processes.status import ProcessStatus
from torchwhere.render.verdict_text.observers import hosts_text

STATE_FILE = ".monitor-lead.json"
# A monitor looks for other hosts after this time: those that share the folder have boxes by then.
GRACE_S = 1.0
_MOST_NAMED = 16
# How long a monitor stays after its own ranks have exited, while other monitors may still need it:
# counted from when it could connect, and at most in all.
LINGER_S = 8.0
MOST_LINGER_S = 20.0
SavedStatuses = dict[int, dict[str, Any]]  # process statuses by rank, as a monitor saves them


NOUN = "box or snapshot"  # what a rank of a job on several hosts leaves


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a diagnosis starts from."""

    run: RunSummary[Any]
    job_calls: JobCalls | None = None
    saved: SavedStatuses = field(default_factory=dict)
    gpus: Sequence[HostGpus] = ()  # of other hosts


@dataclass(slots=True)
class Lifetime:
    """How long ago the ranks of this host started and ended.

    These are durations, so hosts can compare them without a common clock.
    """

    # At the latest now: a rank has started this monitor.
    _started_at: float = field(default_factory=time.monotonic)
    _ended_at: float | None = None
    has_run: bool = False  # whether boxes of the run were read

    def start(self, run: BoxRun) -> None:
        host = socket.gethostname()
        now = time.monotonic()
        own = [box for box in run.summaries.values() if box.meta.get("host") == host]
        started = [box.meta.get("started_ns") for box in own]
        ages = [(time.time_ns() - t_ns) / 1e9 for t_ns in started if isinstance(t_ns, int)]
        self._started_at = min(self._started_at, now - max(ages, default=0.0))
        self.has_run = True

    def end(self) -> float:
        """Note that the ranks have ended. Returns how many seconds ago."""
        if self._ended_at is None:
            self._ended_at = time.monotonic()
        return self.ended_s

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._started_at

    @property
    def ended_s(self) -> float:
        return time.monotonic() - self._ended_at if self._ended_at is not None else 0.0

    @property
    def has_ended(self) -> bool:
        return self._ended_at is not None


class SingleHost:
    """The role of the only monitor of a job. The methods are the interface of every role."""

    gives_verdicts = True
    wanted_stacks: tuple[int, ...] = ()  # ranks whose stacks the lead wants
    ends_ranks = False  # whether the lead wants the ranks ended

    def update(self, run: BoxRun | None) -> bool:
        """Exchange data with other hosts. Returns True if an examination or a report is due."""
        return False

    def request_snapshots(self) -> None:
        """Ask other hosts for snapshots, before the boxes are read."""

    def inputs(self, run: BoxRun) -> Inputs:
        """What there is to diagnose. Several processes load the calls of a large run."""
        return Inputs(*load_calls(run.folder)) if isinstance(run.boxes, LazyBoxes) else Inputs(run)

    def request_stacks(self, ranks: Sequence[int]) -> SavedStatuses:
        """Ask other hosts for the stacks of their ranks."""
        return {}

    def has_printed(self, verdict: str) -> bool:
        """Whether another monitor has printed this verdict."""
        return False

    def may_blame(self, culprits: Sequence[int]) -> bool:
        """Whether this monitor knows enough to blame these ranks."""
        return True

    def on_verdict(self, verdict: str, *, ends_ranks: bool) -> None:
        """Called after this monitor has printed a verdict."""

    def send_report(
        self,
        boxes: Mapping[int, Box],
        statuses: Mapping[int, ProcessStatus],
        *,
        is_last: bool = False,
    ) -> None:
        """Send what this host shows to the lead."""

    def may_exit(self, *, has_succeeded: bool) -> bool:
        """Whether the monitor may exit, now that all processes of this host have."""
        return True

    def describe(self) -> dict[str, Any]:
        """The role and its connections, for `monitor-<host>.json`."""
        return {"role": "alone"}

    def close(self) -> bool:
        """Stop all threads. Returns False if one is still running."""
        return True


def with_hosts(verdict: Verdict, run: RunSummary[Any]) -> Verdict:
    """Add the hosts of the culprits to the verdict of a job on several hosts."""
    host_of = {
        rank: box.meta.get("source_host") or box.meta.get("host")
        for rank, box in run.summaries.items()
    }
    if len(set(host_of.values())) < 2:
        return verdict
    hosts = {rank: str(host_of[rank]) for rank in verdict.culprits[:_MOST_NAMED] if rank in host_of}
    return replace(
        verdict,
        explanation=(*verdict.explanation, *hosts_text(hosts)),
        facts=verdict.facts | {"hosts": hosts},
    )
