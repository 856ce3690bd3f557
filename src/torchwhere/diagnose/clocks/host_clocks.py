"""Aligns the clocks of the hosts of a run, by reading one rank of each host.

That takes about 3 ms a host. With more than `MOST_HOSTS` hosts nothing is aligned: wall clocks are
used as they are, and `HostClocks.description` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchwhere.blackbox.run import RunSummary, read_again
from torchwhere.diagnose.clocks.arrivals import arrivals
from torchwhere.diagnose.clocks.clocks import Clock, Clocks, Evidence, aligned
from torchwhere.diagnose.clocks.line import TimeOrTimes

MOST_HOSTS = 256


@dataclass(frozen=True, slots=True)
class HostClocks:
    """Converts wall-clock times of ranks to the clock of the lowest rank's host."""

    hosts: Mapping[int, str] = field(default_factory=dict)  # by rank
    clocks: Clocks = field(default_factory=Clocks)
    probes: Mapping[str, int] = field(default_factory=dict)  # the rank that was read for a host

    def of_host(self, host: str) -> Clock | None:
        """Returns the clock of a host; None if it was not compared with others."""
        return self.clocks.of(self.probes[host]) if host in self.probes else None

    def aligned_ns(self, rank: int, t_ns: TimeOrTimes) -> TimeOrTimes:
        """Converts a wall-clock time of a rank; unchanged if its host's clock was not compared."""
        probe = self.probes.get(self.hosts.get(rank, ""))
        return t_ns if probe is None else self.clocks.aligned_ns(probe, t_ns)

    def description(self, ranks: Iterable[int]) -> str:
        """Says by what clocks the times of some ranks are compared."""
        hosts = {self.hosts.get(rank, "") for rank in ranks}
        if len(hosts) < 2:
            return "the wall clock of the host"
        clocks = [self.of_host(host) for host in hosts]
        unaligned = sum(clock is None or clock.evidence is Evidence.UNMATCHED for clock in clocks)
        if unaligned == len(hosts):
            return f"the wall clocks of {len(hosts)} hosts, not aligned: they add to the skew"
        exception = f" ({unaligned} of them not aligned)" if unaligned else ""
        return f"the aligned clocks of {len(hosts)} hosts{exception}"


UNALIGNED = HostClocks()


def align_hosts(run: RunSummary[Any]) -> HostClocks:
    """Aligns the clocks of the hosts of a run."""
    hosts = {rank: str(box.meta.get("host") or "") for rank, box in sorted(run.boxes.items())}
    probes: dict[str, int] = {}
    for rank, host in hosts.items():
        if host and not run.boxes[rank].lacks_counts:
            probes.setdefault(host, rank)
    if not 2 <= len(probes) <= MOST_HOSTS:
        return HostClocks(hosts)
    clocks = aligned(map(arrivals, read_again(run, probes.values())))
    compared = {host: rank for host, rank in probes.items() if clocks.of(rank) is not None}
    return HostClocks(hosts, clocks, compared)
