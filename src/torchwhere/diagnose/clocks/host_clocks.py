"""When something happened, by one clock for all hosts of a report.

Takes a run, gives `Moments`, which turns wall-clock times of a rank into those of the host of the
lowest rank. One rank of each host is read for that (`diagnose/clocks/clocks.py` says how clocks are
compared): about 3 ms a host, so of more than `MOST_HOSTS` hosts none is, their wall clocks are
taken as they are, and that is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.reader import BoxReader
from torchwhere.blackbox.run import RunSummary
from torchwhere.core.errors import TorchwhereError
from torchwhere.diagnose.clocks.arrivals import Arrivals, arrivals
from torchwhere.diagnose.clocks.clocks import Clocks, Evidence, aligned

MOST_HOSTS = 256


@dataclass(frozen=True, slots=True)
class Moments:
    """One clock for all ranks, as far as it is known."""

    hosts: Mapping[int, str] = field(default_factory=dict)  # by rank
    clocks: Clocks = field(default_factory=Clocks)
    # the rank by which a host's clock is known
    witnesses: Mapping[str, int] = field(default_factory=dict)

    def of(self, rank: int, t_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        stall_snapshot = self.witnesses.get(self.hosts.get(rank, ""))
        return t_ns if stall_snapshot is None else self.clocks.aligned_ns(stall_snapshot, t_ns)

    def one(self, rank: int, t_ns: int) -> int:
        stall_snapshot = self.witnesses.get(self.hosts.get(rank, ""))
        return t_ns if stall_snapshot is None else self.clocks.aligned_ns(stall_snapshot, t_ns)

    def said(self, ranks: Iterable[int]) -> str:
        """By what clocks the times of some ranks are compared."""
        hosts = {self.hosts.get(rank, "") for rank in ranks}
        if len(hosts) < 2:
            return "the wall clock of the host"
        known = [self.clocks.of(self.witnesses[host]) for host in hosts if host in self.witnesses]
        sure = [
            clock
            for clock in known
            if clock is not None and clock.evidence is not Evidence.UNMATCHED
        ]
        if not sure:
            return (
                f"the wall clocks of {len(hosts)} hosts: what differs between these clocks is in"
                " the skew"
            )
        rest = (
            f", {len(hosts) - len(sure)} of them as their wall clocks are"
            if len(sure) < len(hosts)
            else ""
        )
        return f"the clocks of {len(hosts)} hosts, aligned by what their ranks did together{rest}"


def moments(run: RunSummary[Any]) -> Moments:
    """The clocks of a run."""
    hosts = {rank: str(box.meta.get("host") or "") for rank, box in sorted(run.boxes.items())}
    witnesses: dict[str, int] = {}
    for rank, host in hosts.items():
        if host and not run.boxes[rank].lacks_counts:
            witnesses.setdefault(host, rank)
    if not 2 <= len(witnesses) <= MOST_HOSTS:
        return Moments(hosts)
    found = aligned(_arrivals(run, witnesses.values()))
    return Moments(
        hosts, found, {host: rank for host, rank in witnesses.items() if found.of(rank) is not None}
    )


def _arrivals(run: RunSummary[Any], ranks: Iterable[int]) -> Iterator[Arrivals]:
    reader = BoxReader()
    for rank in ranks:
        try:
            box = reader.read(run.boxes[rank].path)
        except TorchwhereError:  # gone since the folder was listed
            continue
        if box.rank == rank:
            yield arrivals(box)
