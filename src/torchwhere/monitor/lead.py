"""The monitor of host 0: it gives the verdict for all hosts, with what the others tell it.

With a shared folder it reads all boxes there, and its `LeadState` is a file; without one, the word
goes out through a store, and snapshots come in. What it could not learn it says, and goes on:
nobody is waited for longer than a few seconds.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchwhere.blackbox.run import BoxRun, port_of
from torchwhere.blackbox.summary import BoxOrSummary
from torchwhere.core.atomic_file import replace_file
from torchwhere.diagnose.calls.job_calls import calls_of_run
from torchwhere.monitor.broadcast import LeadState, run_key
from torchwhere.monitor.discovery import Rendezvous
from torchwhere.monitor.roles import (
    GRACE_S,
    LINGER_S,
    MOST_LINGER_S,
    WORD_FILE,
    Inputs,
    Kept,
    Lifetime,
    MultiHostRun,
    SingleHost,
)
from torchwhere.monitor.transport import TICK_S, LeadServer, Received, ready_for
from torchwhere.pipeline.verdict import saved_statuses
from torchwhere.snapshots.decode import InvalidSnapshot, decode_snapshot
from torchwhere.snapshots.encode import CALLS, HostSnapshot

ANSWER_S = 3.0  # for snapshots
STACKS_S = 4.0  # for snapshots with stacks
SETTLE_S = 30.0  # for others to join, before a verdict is given without them
FRESH_S = 1.0  # who has written just now is not asked again


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
        self._began, self._spoke_at, self._span = time.monotonic(), 0.0, Lifetime()
        self._office: LeadServer | None = None
        # when the last snapshot came that was made use of, by host
        self._seen: dict[int, float] = {}
        self._opened: dict[int, tuple[float, HostSnapshot | InvalidSnapshot]] = {}
        # hosts that did not answer, and when they had last written
        self._late: dict[int, float] = {}
        self._run: BoxRun | None = None
        self._is_shared = self.speaks = False
        if port is not None:
            self._open(port)

    def tend(self, run: BoxRun | None) -> bool:
        now = time.monotonic()
        if now - self._spoke_at > TICK_S:
            self._say()
        if run is not None and run is not self._run:
            self._run, self._is_shared = run, not run.missing
            self._span.meet(run)
            self._rendezvous = self._rendezvous or Rendezvous.at(
                next(iter(run.summaries.values())).meta.get("store")
            )
        is_settled = run is not None and now - self._began > GRACE_S
        if (
            self._office is None
            and is_settled
            and not self._is_shared
            and self._rendezvous is not None
        ):
            self._open(0)
        # Who writes unasked, or after nobody waited for it any more, has something to say.
        has_news = any(
            snapshot.at > self._seen.get(host, 0.0) for host, snapshot in self._snapshots().items()
        )
        was_settled, self.speaks = self.speaks, self.speaks or self._is_settled()
        return self.speaks and (has_news or not was_settled)

    def _is_settled(self) -> bool:
        """Whether all ranks are accounted for, or have had their time: a verdict without them would
        blame who is only late."""
        if self._run is None:
            return False
        told = {rank for host in self._snapshots() for rank in self._ranks_of(host)}
        is_whole = self._is_shared or self._run.boxes.keys() | told >= set(
            range(self._run.world_size)
        )
        return is_whole or time.monotonic() - self._began > SETTLE_S

    def prepare(self) -> None:
        """Ask all others how things are, and wait a little for their answers."""
        snapshots = self._snapshots()
        now = time.monotonic()
        spared = tuple(host for host, snapshot in snapshots.items() if now - snapshot.at < FRESH_S)
        asked = [host for host in snapshots if host not in spared and not self._is_last(host)]
        if asked:
            self._state = replace(
                self._state, asked=self._state.asked + 1, spared=spared, stacks=()
            )
            self._wait_for(
                [host for host in asked if self._late.get(host) != snapshots[host].at], ANSWER_S
            )

    def gather(self, run: BoxRun) -> Inputs:
        if self._office is None:
            return SingleHost.gather(self, run)
        job_calls, boxes, kept, lacks = (
            calls_of_run(run),
            dict[int, Any](run.boxes),
            Kept(),
            list[str](),
        )
        for host, received in sorted(self._snapshots().items()):
            snapshot, self._seen[host] = self._decode_snapshot(host), received.at
            if isinstance(snapshot, InvalidSnapshot):
                lacks.append(f"a snapshot of another host was refused: {snapshot.reason}")
            elif problem := self._problem(host, snapshot, run):
                lacks.append(problem)
            else:
                labels = {said.label.rank: said.label for said in snapshot.batch.rank_summaries}
                labels = {rank: label for rank, label in labels.items() if rank not in boxes}
                wanted = {label.path for label in labels.values() if not label.lacks_counts}
                job_calls.add_batch(snapshot.batch, encoder=host, wanted=wanted)
                boxes |= labels
                kept |= {
                    rank: snapshot.statuses[rank].to_dict()
                    for rank in labels
                    if rank in snapshot.statuses
                }
                lacks += _limits(snapshot, sorted(labels))
        if len(boxes) < run.world_size and self._office.problem:
            lacks.append(f"snapshots of other hosts cannot arrive: {self._office.problem}")
        job_calls.by_rank = dict(sorted(job_calls.by_rank.items()))
        assembly = MultiHostRun(
            run.folder, dict(sorted(boxes.items())), run.earlier, list(run.unreadable), tuple(lacks)
        )
        return Inputs(assembly, job_calls, kept)

    def ask(self, ranks: Sequence[int]) -> Kept:
        own = self._run.boxes if self._run is not None else {}
        hosts = {
            rank: host
            for host in self._snapshots()
            for rank in self._alive_at(host)
            if rank not in own
        }
        elsewhere = [rank for rank in ranks if rank in hosts]
        known = saved_statuses(self._folder)
        shared = [rank for rank in ranks if _is_elsewhere(known.get(rank))]
        if not elsewhere and not shared:
            return {}
        self._state = replace(
            self._state, asked=self._state.asked + 1, spared=(), stacks=(*elsewhere, *shared)
        )
        self._wait_for({hosts[rank] for rank in elsewhere}, STACKS_S, shared)
        found = {
            rank: value for rank, value in saved_statuses(self._folder).items() if rank in shared
        }
        for rank in elsewhere:
            snapshot = self._decode_snapshot(hosts[rank])
            if isinstance(snapshot, HostSnapshot) and rank in snapshot.statuses:
                found[rank] = snapshot.statuses[rank].to_dict()
        self._seen |= {host: snapshot.at for host, snapshot in self._snapshots().items()}
        return found

    def told(self, verdict: str, *, ends: bool) -> None:
        self._state = replace(self._state, said=(*self._state.said, verdict)[-64:], ends=ends)
        self._say()

    def may_leave(self, *, is_well: bool) -> bool:
        """When the others are done too, or have had some seconds more: what happened here, they may
        want to know there."""
        gone_s = self._span.end()
        snapshots = [
            self._decode_snapshot(host)
            for host, each in self._snapshots().items()
            if self._late.get(host) != each.at
        ]
        alive = any(
            isinstance(snapshot, HostSnapshot) and not snapshot.is_last and _any_alive(snapshot)
            for snapshot in snapshots
        )
        is_wanted = alive or not (self.speaks or is_well)
        if is_wanted and min(gone_s, ready_for(self._office)) < LINGER_S and gone_s < MOST_LINGER_S:
            return False
        self.speaks = True  # now or never
        return True

    def describe(self) -> dict[str, Any]:
        snapshots = [self._decode_snapshot(host) for host in sorted(self._snapshots())]
        return {
            "role": "lead",
            "connected_to": [
                snapshot.host for snapshot in snapshots if isinstance(snapshot, HostSnapshot)
            ],
        }

    def close(self) -> bool:
        self._state = replace(self._state, is_over=True)
        self._say()
        if self._office is None:
            return True
        time.sleep(0.3)  # a word takes a moment, and the store goes with this process
        return self._office.close()

    # -- snapshots ---------------------------------------------------------------------------------

    def _open(self, port: int) -> None:
        self._office = LeadServer(self._state.token, self._rendezvous, port)
        self._office.say(self._state)
        self._office.open()

    def _snapshots(self) -> dict[int, Received]:
        return dict(self._office.snapshots) if self._office is not None else {}

    def _decode_snapshot(self, host: int) -> HostSnapshot | InvalidSnapshot:
        received = self._snapshots()[host]
        known = self._opened.get(host)
        if known is None or known[0] != received.at:
            known = self._opened[host] = received.at, decode_snapshot(received.data)
        return known[1]

    def _is_last(self, host: int) -> bool:
        snapshot = self._decode_snapshot(host)
        return isinstance(snapshot, HostSnapshot) and snapshot.is_last

    def _ranks_of(self, host: int) -> list[int]:
        snapshot = self._decode_snapshot(host)
        return (
            [said.label.rank for said in snapshot.batch.rank_summaries]
            if isinstance(snapshot, HostSnapshot)
            else []
        )

    def _alive_at(self, host: int) -> list[int]:
        snapshot = self._decode_snapshot(host)
        return (
            [rank for rank, seen in snapshot.statuses.items() if seen.alive]
            if isinstance(snapshot, HostSnapshot)
            else []
        )

    def _wait_for(
        self, hosts: Sequence[int] | set[int], patience_s: float, shared: Sequence[int] = ()
    ) -> None:
        """Until these have answered the last question, and those who share the folder have kept the
        stacks of these ranks."""
        self._say()
        deadline = time.monotonic() + patience_s
        waiting = set(hosts)
        while (waiting or shared) and time.monotonic() < deadline:
            time.sleep(0.05)
            waiting = {host for host in waiting if not self._has_answered(host)}
            kept = saved_statuses(self._folder) if shared else {}
            shared = [rank for rank in shared if not kept.get(rank, {}).get("stack")]
        snapshots = self._snapshots()
        self._late |= {host: snapshots[host].at for host in waiting}

    def _has_answered(self, host: int) -> bool:
        snapshot = self._decode_snapshot(host)
        return isinstance(snapshot, HostSnapshot) and (
            snapshot.answers >= self._state.asked or snapshot.is_last
        )

    def _problem(self, host: int, snapshot: HostSnapshot, run: BoxRun) -> str | None:
        """Why a snapshot does not count."""
        ranks = self._ranks_of(host)
        age_s = time.monotonic() - self._snapshots()[host].at
        if not snapshot.is_last and age_s > max(ANSWER_S, self._stall_s / 2):
            return (
                f"nothing from host {snapshot.host} ({_named(ranks)}) for {age_s:.0f} s: it, its"
                " monitor or the way to it is gone"
            )
        if self._is_of_another_life(snapshot, run) or any(rank >= run.world_size for rank in ranks):
            return f"host {snapshot.host} tells of another run or restart: {_named(ranks)} there"
        return None

    def _is_of_another_life(self, snapshot: HostSnapshot, run: BoxRun) -> bool:
        """Whether a snapshot is about ranks that never were there together with those of this host.
        Hosts may count restarts differently."""
        own, told = (
            list(run.summaries.values()),
            [said.label for said in snapshot.batch.rank_summaries],
        )
        job = {_job(label) for label in own}
        if any(_job(label) not in job for label in told):
            return True
        began_ns = min((label.meta["started_ns"] for label in told), default=0)
        own_ns = min((label.meta.get("started_ns", 0) for label in own), default=0)
        seen = {
            rank: status for rank, status in snapshot.statuses.items() if rank not in run.summaries
        }
        last_ns = max((each.alive_ns or 0 for each in seen.values()), default=0)
        are_gone = bool(seen) and not any(each.alive for each in seen.values())
        left_ns = time.time_ns() - int(self._span.gone_s * 1e9)
        return (self._span.has_ended and began_ns > left_ns) or (are_gone and 0 < last_ns < own_ns)

    def _say(self) -> None:
        self._spoke_at = time.monotonic()
        age_ns, gone_ns = int(self._span.age_s * 1e9), int(self._span.gone_s * 1e9)
        number = self._state.number + 1
        self._state = replace(
            self._state, number=number, t_ns=time.time_ns(), age_ns=age_ns, gone_ns=gone_ns
        )
        if self._office is not None:
            self._office.say(self._state)
        replace_file(self._folder / WORD_FILE, self._state.to_json())


def _is_elsewhere(kept: dict[str, Any] | None) -> bool:
    """Whether another host that shares the folder has seen a rank alive."""
    return (
        kept is not None and kept.get("alive") is True and kept.get("host") != socket.gethostname()
    )


def _job(label: BoxOrSummary) -> tuple[str, Any, str]:
    return label.run[0], label.meta.get("world_size"), port_of(label)


def _any_alive(snapshot: HostSnapshot) -> bool:
    return any(seen.alive for seen in snapshot.statuses.values())


def _limits(snapshot: HostSnapshot, ranks: list[int]) -> list[str]:
    is_cut = snapshot.is_cut and ranks
    return (
        [
            (
                f"of {_named(ranks)}, on host {snapshot.host}, only the last {CALLS} collectives"
                " were compared"
            )
        ]
        if is_cut
        else []
    )


def _named(ranks: Sequence[int]) -> str:
    if not ranks:
        return "no rank"
    is_row = len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return (
        f"ranks {ranks[0]} to {ranks[-1]}"
        if is_row
        else f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:16]))}"
    )
