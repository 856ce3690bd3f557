"""The lead: the monitor of host 0, which gives the verdict for all hosts.

With a shared folder it reads all boxes there, and its `LeadState` is a file. Without one, it
publishes the state in a store, and snapshots of the other hosts arrive there. It waits a few
seconds for an answer at most; a verdict says what was missing.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchwhere.blackbox.run import BoxRun, has_assumed_rank, port_of
from torchwhere.blackbox.summary import BoxOrSummary
from torchwhere.core.atomic_file import replace_file
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.calls.job_calls import calls_of_run
from torchwhere.monitor.broadcast import LeadState, run_key
from torchwhere.monitor.discovery import Rendezvous
from torchwhere.monitor.joined import JoinedData
from torchwhere.monitor.single import (
    GRACE_S,
    LINGER_S,
    MOST_LINGER_S,
    STATE_FILE,
    Inputs,
    Lifetime,
    SavedStatuses,
    SingleHost,
)
from torchwhere.monitor.transport import TICK_S, LeadServer, Received, ready_s
from torchwhere.snapshots.decode import InvalidSnapshot, decode_snapshot
from torchwhere.snapshots.encode import HostSnapshot
from torchwhere.snapshots.read import saved_statuses

ANSWER_S = 3.0  # to wait for snapshots
STACKS_S = 4.0  # to wait for snapshots with stacks
SETTLE_S = 30.0  # to wait for other hosts, before a verdict is given without them
FRESH_S = 1.0  # a host is not asked again so soon after a snapshot
_VERDICTS_KEPT = 64


class Lead(SingleHost):
    """The monitor of host 0."""

    def __init__(
        self,
        folder: Path,
        *,
        stall_s: float,
        rendezvous: Rendezvous | None,
        port: int | None = None,
    ) -> None:
        self._folder, self._stall_s, self._rendezvous = folder, stall_s, rendezvous
        self._state = LeadState(token=secrets.token_hex(8), run=run_key())
        self._started_at = time.monotonic()
        self._published_at = 0.0
        self._lifetime = Lifetime()
        self._server: LeadServer | None = None
        # arrival of the last snapshot that a diagnosis used, by host
        self._used: dict[int, float] = {}
        # with the arrival of each
        self._last_decoded: dict[int, tuple[float, HostSnapshot | InvalidSnapshot]] = {}
        # hosts that did not answer, with the arrival of their last snapshot
        self._late: dict[int, float] = {}
        self._run: BoxRun | None = None
        self._is_shared = self.gives_verdicts = False
        if port is not None:
            self._serve(port)

    def update(self, run: BoxRun | None) -> bool:
        now = time.monotonic()
        if now - self._published_at > TICK_S:
            self._publish()
        if run is not None and run is not self._run:
            self._use(run)
        has_settled = run is not None and now - self._started_at > GRACE_S
        needs_server = self._server is None and not self._is_shared
        if needs_server and has_settled and self._rendezvous is not None:
            self._serve(0)
        # A host that sends a snapshot unasked, or too late, reports something new.
        has_news = any(
            snapshot.at > self._used.get(host, 0.0) for host, snapshot in self._snapshots().items()
        )
        gave_verdicts = self.gives_verdicts
        self.gives_verdicts = gave_verdicts or self._may_start()
        return self.gives_verdicts and (has_news or not gave_verdicts)

    def _use(self, run: BoxRun) -> None:
        self._run, self._is_shared = run, not run.missing
        self._lifetime.start(run)
        if self._rendezvous is None:
            first = next(iter(run.summaries.values()))
            self._rendezvous = Rendezvous.at(first.meta.get("store"))

    def _may_start(self) -> bool:
        """Whether verdicts may be given: there is data of all ranks, or they had time to join.

        An earlier verdict would blame ranks that only start late.
        """
        if self._run is None:
            return False
        reported = {rank for snapshot in self._decoded().values() for rank in _ranks_of(snapshot)}
        known = self._run.boxes.keys() | reported
        is_complete = self._is_shared or known >= set(range(self._run.world_size))
        return is_complete or time.monotonic() - self._started_at > SETTLE_S

    def request_snapshots(self) -> None:
        """Ask the other hosts for snapshots and wait a moment for them."""
        snapshots = self._snapshots()
        now = time.monotonic()
        excused = tuple(host for host, snapshot in snapshots.items() if now - snapshot.at < FRESH_S)
        ended = [host for host, snapshot in self._decoded().items() if snapshot.is_last]
        asked = [host for host in snapshots if host not in excused and host not in ended]
        if not asked:
            return
        self._state = replace(
            self._state,
            requests=self._state.requests + 1,
            excused_hosts=excused,
            wanted_stacks=(),
        )
        self._wait_for(
            [host for host in asked if self._late.get(host) != snapshots[host].at], ANSWER_S
        )

    def inputs(self, run: BoxRun) -> Inputs:
        """Join the boxes of this host with the snapshots of the others."""
        if self._server is None:
            return SingleHost.inputs(self, run)
        joined = JoinedData(calls_of_run(run), dict(run.boxes))
        for host, received in sorted(self._snapshots().items()):
            snapshot = self._snapshot_of(host)
            self._used[host] = received.at
            if isinstance(snapshot, InvalidSnapshot):
                joined.missing.append(f"a snapshot of another host was refused: {snapshot.reason}")
                continue
            problem = self._problem(host, snapshot, run)
            if problem is None:
                joined.add(host, snapshot)
            else:
                joined.missing.append(problem)
        if len(joined.boxes) < run.world_size and self._server.problem:
            joined.missing.append(
                f"cannot receive snapshots of other hosts: {self._server.problem}"
            )
        return joined.inputs(run)

    def request_stacks(self, ranks: Sequence[int]) -> SavedStatuses:
        own = self._run.boxes if self._run is not None else {}
        hosts = {
            rank: host
            for host, snapshot in self._decoded().items()
            for rank, status in snapshot.statuses.items()
            if status.alive and rank not in own
        }
        remote = [rank for rank in ranks if rank in hosts]
        saved = saved_statuses(self._folder)
        shared = [rank for rank in ranks if _is_on_other_host(saved.get(rank))]
        if not remote and not shared:
            return {}
        self._state = replace(
            self._state,
            requests=self._state.requests + 1,
            excused_hosts=(),
            wanted_stacks=(*remote, *shared),
        )
        self._wait_for({hosts[rank] for rank in remote}, STACKS_S, shared)
        saved = saved_statuses(self._folder)
        statuses = {rank: status for rank, status in saved.items() if rank in shared}
        decoded = self._decoded()
        for rank in remote:
            snapshot = decoded.get(hosts[rank])
            if snapshot is not None and rank in snapshot.statuses:
                statuses[rank] = snapshot.statuses[rank].to_dict()
        self._used |= {host: snapshot.at for host, snapshot in self._snapshots().items()}
        return statuses

    def on_verdict(self, verdict: str, *, ends_ranks: bool) -> None:
        verdicts = (*self._state.verdicts, verdict)[-_VERDICTS_KEPT:]
        self._state = replace(self._state, verdicts=verdicts, ends_ranks=ends_ranks)
        self._publish()

    def may_exit(self, *, has_succeeded: bool) -> bool:
        """When the other hosts have ended too, or had some seconds more to ask what happened."""
        ended_s = self._lifetime.end()
        others_run = any(
            not snapshot.is_last and any(status.alive for status in snapshot.statuses.values())
            for host, snapshot in self._decoded().items()
            if self._late.get(host) != self._last_decoded[host][0]
        )
        is_needed = others_run or not (self.gives_verdicts or has_succeeded)
        has_time = min(ended_s, ready_s(self._server)) < LINGER_S and ended_s < MOST_LINGER_S
        if is_needed and has_time:
            return False
        self.gives_verdicts = True  # the last chance for a verdict
        return True

    def describe(self) -> dict[str, Any]:
        hosts = [snapshot.host for _, snapshot in sorted(self._decoded().items())]
        return {"role": "lead", "connected_to": hosts}

    def close(self) -> bool:
        self._state = replace(self._state, has_left=True)
        self._publish()
        if self._server is None:
            return True
        time.sleep(0.3)  # the state needs a moment to arrive; the store ends with this process
        return self._server.close()

    # -- snapshots ---------------------------------------------------------------------------------

    def _serve(self, port: int) -> None:
        self._server = LeadServer(self._state.token, self._rendezvous, port)
        self._server.publish(self._state)
        self._server.open()

    def _snapshots(self) -> dict[int, Received]:
        return dict(self._server.snapshots) if self._server is not None else {}

    def _snapshot_of(self, host: int) -> HostSnapshot | InvalidSnapshot:
        received = self._snapshots()[host]
        decoded = self._last_decoded.get(host)
        if decoded is None or decoded[0] != received.at:
            decoded = self._last_decoded[host] = received.at, decode_snapshot(received.data)
        return decoded[1]

    def _decoded(self) -> dict[int, HostSnapshot]:
        """The valid snapshots by host."""
        snapshots = {host: self._snapshot_of(host) for host in self._snapshots()}
        return {
            host: snapshot
            for host, snapshot in snapshots.items()
            if isinstance(snapshot, HostSnapshot)
        }

    def _wait_for(
        self, hosts: Collection[int], patience_s: float, shared: Sequence[int] = ()
    ) -> None:
        """Wait until these hosts have answered, and the stacks of `shared` are in the folder."""
        self._publish()
        deadline = time.monotonic() + patience_s
        waiting = set(hosts)
        while (waiting or shared) and time.monotonic() < deadline:
            time.sleep(0.05)
            waiting = {host for host in waiting if not self._has_answered(host)}
            saved = saved_statuses(self._folder) if shared else {}
            shared = [rank for rank in shared if not saved.get(rank, {}).get("stack")]
        snapshots = self._snapshots()
        self._late |= {host: snapshots[host].at for host in waiting}

    def _has_answered(self, host: int) -> bool:
        snapshot = self._snapshot_of(host)
        return isinstance(snapshot, HostSnapshot) and (
            snapshot.answers >= self._state.requests or snapshot.is_last
        )

    def _problem(self, host: int, snapshot: HostSnapshot, run: BoxRun) -> str | None:
        """Why a snapshot cannot be used."""
        if _has_assumed_ranks(snapshot):
            return (
                f"the processes of host {snapshot.host} have not called init_process_group, so"
                " their ranks are unknown"
            )
        ranks = _ranks_of(snapshot)
        age_s = time.monotonic() - self._snapshots()[host].at
        if not snapshot.is_last and age_s > max(ANSWER_S, self._stall_s / 2):
            return (
                f"no data from host {snapshot.host} ({ranks_phrase(ranks)}) for {age_s:.0f} s: the"
                " host, its monitor or the network is down"
            )
        is_outside = any(rank >= run.world_size for rank in ranks)
        if is_outside or self._is_other_attempt(snapshot, run):
            return (
                f"the snapshot of host {snapshot.host} ({ranks_phrase(ranks)}) belongs to another"
                " run or restart"
            )
        return None

    def _is_other_attempt(self, snapshot: HostSnapshot, run: BoxRun) -> bool:
        """Whether the ranks of a snapshot never ran at the same time as those of this host.

        Hosts may count restarts differently, so the count cannot decide.
        """
        own = list(run.summaries.values())
        others = [summary.box_summary for summary in snapshot.batch.rank_summaries]
        jobs = {_job(box) for box in own}
        if any(_job(box) not in jobs for box in others):
            return True
        started_ns = min((box.meta["started_ns"] for box in others), default=0)
        own_started_ns = min((box.meta.get("started_ns", 0) for box in own), default=0)
        statuses = [
            status for rank, status in snapshot.statuses.items() if rank not in run.summaries
        ]
        last_ns = max((status.alive_ns or 0 for status in statuses), default=0)
        have_exited = bool(statuses) and not any(status.alive for status in statuses)
        own_ended_ns = time.time_ns() - int(self._lifetime.ended_s * 1e9)
        started_after = self._lifetime.has_ended and started_ns > own_ended_ns
        ended_before = have_exited and 0 < last_ns < own_started_ns
        return started_after or ended_before

    def _publish(self) -> None:
        self._published_at = time.monotonic()
        self._state = replace(
            self._state,
            number=self._state.number + 1,
            t_ns=time.time_ns(),
            age_ns=int(self._lifetime.age_s * 1e9),
            ended_ns=int(self._lifetime.ended_s * 1e9),
        )
        if self._server is not None:
            self._server.publish(self._state)
        replace_file(self._folder / STATE_FILE, self._state.to_json())


def _is_on_other_host(saved: dict[str, Any] | None) -> bool:
    """Whether another host that shares the folder has seen the rank alive."""
    return (
        saved is not None
        and saved.get("alive") is True
        and saved.get("host") != socket.gethostname()
    )


def _job(box: BoxOrSummary) -> tuple[str, Any, str]:
    return box.run[0], box.meta.get("world_size"), port_of(box)


def _has_assumed_ranks(snapshot: HostSnapshot) -> bool:
    """Whether the processes of a snapshot do not know their ranks: their boxes have rank 0 for
    now."""
    return any(has_assumed_rank(summary.box_summary) for summary in snapshot.batch.rank_summaries)


def _ranks_of(snapshot: HostSnapshot) -> list[int]:
    """The ranks of a snapshot, if its processes know them."""
    if _has_assumed_ranks(snapshot):
        return []
    return [summary.box_summary.rank for summary in snapshot.batch.rank_summaries]
