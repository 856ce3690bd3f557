"""The monitor of a host other than the first: it reports to the lead, and gives verdicts only if
the lead is gone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.run import BoxRun
from torchwhere.gpus.samples import read_gpus
from torchwhere.monitor.broadcast import LeadState, run_key
from torchwhere.monitor.discovery import Rendezvous
from torchwhere.monitor.single import (
    GRACE_S,
    LINGER_S,
    MOST_LINGER_S,
    NOUN,
    STATE_FILE,
    Inputs,
    Lifetime,
    SingleHost,
)
from torchwhere.monitor.transport import FollowerClient, ready_s
from torchwhere.processes.status import ProcessStatus
from torchwhere.snapshots.encode import encode_boxes

SILENCE_S = 30.0  # of the lead, before a follower gives verdicts
SHARED_GRACE_S = 4.0  # used instead of GRACE_S if the folder holds a state of any lead


class Follower(SingleHost):
    """The monitor of another host than the lead's."""

    def __init__(
        self, folder: Path, *, rendezvous: Rendezvous | None, address: tuple[str, int] | None = None
    ) -> None:
        self._folder = folder
        self._rendezvous, self._address = rendezvous, address
        self._started_at = self._received_at = time.monotonic()
        self._lifetime = Lifetime()
        self._state_in_file: LeadState | None = None  # the first may be that of an earlier run
        self._since_ns = time.time_ns()  # a file that is written later is of this run
        self._own_ranks: frozenset[int] = frozenset()  # ranks with a box in the folder
        self._state: LeadState | None = None
        self._answered = -1  # below any request: it reports once unasked, so that the lead knows it
        self._client: FollowerClient | None = None
        self._is_shared = False
        if address is not None:
            self._connect()

    @property
    def gives_verdicts(self) -> bool:  # type: ignore[override]
        """True if the lead has been silent for a while, or has announced that it exits."""
        is_silent = time.monotonic() - self._received_at > SILENCE_S
        return is_silent or (self._state is not None and self._state.has_left)

    @property
    def wanted_stacks(self) -> tuple[int, ...]:  # type: ignore[override]
        return self._state.wanted_stacks if self._state is not None else ()

    @property
    def ends_ranks(self) -> bool:  # type: ignore[override]
        return self._state is not None and self._state.ends_ranks

    def update(self, run: BoxRun | None) -> bool:
        self._read_file()
        if run is not None:
            self._use(run)
        if self._shall_connect():
            self._connect()
        client = self._client
        if client is not None and client.state is not None and client.received_at is not None:
            self._on_state(client.state, client.received_at)
        if self._state is None or self._state.requests <= self._answered:
            return False
        if client is not None and client.host in self._state.excused_hosts:
            self._answered = self._state.requests
            return False
        return not self._needs_clock()

    def _use(self, run: BoxRun) -> None:
        if not self._lifetime.has_run:
            # The clock of the file system may differ: by that clock, the files of an earlier run
            # are older than the boxes of this one.
            changed_ns = [_changed_ns(box.path) for box in run.summaries.values()]
            self._since_ns = max([self._since_ns, *changed_ns])
        self._lifetime.start(run)
        self._own_ranks = frozenset(run.summaries)
        if self._rendezvous is None:
            first = next(iter(run.summaries.values()))
            self._rendezvous = Rendezvous.at(first.meta.get("store"))

    def _shall_connect(self) -> bool:
        # A script may set the address only when it starts.
        knows_where = self._rendezvous is not None or self._address is not None
        if self._client is not None or self._is_shared or not knows_where:
            return False
        grace_s = GRACE_S if self._state_in_file is None else SHARED_GRACE_S
        return time.monotonic() - self._started_at > grace_s

    def _needs_clock(self) -> bool:
        """Whether a report must wait: without the clock difference its times would be wrong."""
        return self._client is not None and not self._is_shared and self._client.ahead_ns is None

    def inputs(self, run: BoxRun) -> Inputs:
        """Used only if the lead is gone."""
        if not run.missing:
            return Inputs(run)
        problem = "no data from the lead monitor; this verdict uses only the ranks of this host"
        return Inputs(replace(run, noun=NOUN, notes=[problem]))

    def may_blame(self, culprits: Sequence[int]) -> bool:
        """After this host's ranks have ended, False for ranks of other hosts.

        Their monitor may only not have answered in time.
        """
        return not self._lifetime.has_ended or all(rank in self._own_ranks for rank in culprits)

    def has_printed(self, verdict: str) -> bool:
        return self._state is not None and verdict in self._state.verdicts

    def send_report(
        self,
        boxes: Mapping[int, Box],
        statuses: Mapping[int, ProcessStatus],
        *,
        is_last: bool = False,
    ) -> None:
        if self._needs_clock() and not is_last:
            return
        requests = self._state.requests if self._state is not None else 0
        answers = requests if requests > self._answered else 0
        self._answered = max(requests, self._answered)
        if self._client is None or self._is_shared:
            return
        snapshot = encode_boxes(
            boxes,
            statuses={rank: status for rank, status in statuses.items() if rank in boxes},
            answers=answers,
            is_last=is_last,
            ahead_ns=self._client.ahead_ns or 0,
            gpus=next(iter(read_gpus(self._folder)), None),
        )
        self._client.send(snapshot)
        if is_last:
            self._client.flush(patience_s=2.0)

    def may_exit(self, *, has_succeeded: bool) -> bool:
        """After a failure, stay until the lead can know it, or a connection is unlikely."""
        ended_s = self._lifetime.end()
        is_connected = self._client is not None and self._client.ahead_ns is not None
        if has_succeeded or self._is_shared or self.gives_verdicts or is_connected:
            return True
        return min(ended_s, ready_s(self._client)) > LINGER_S or ended_s > MOST_LINGER_S

    def describe(self) -> dict[str, Any]:
        is_connected = self._state is not None and not self.gives_verdicts
        return {"role": "follower", "connected_to": ["host 0"] if is_connected else []}

    def close(self) -> bool:
        return self._client is None or self._client.close()

    def _connect(self) -> None:
        self._client = FollowerClient(
            self._rendezvous, self._address, accepts=self._is_same_attempt
        )
        self._client.open()

    def _read_file(self) -> None:
        """Read the lead's state from a shared folder. A file that changes is of this run."""
        path = self._folder / STATE_FILE
        try:
            state = LeadState.from_json(path.read_bytes())
        except OSError:
            return
        if state is None or state == self._state_in_file or state.run != run_key():
            return
        if not self._is_same_attempt(state):
            return
        may_be_old = self._state_in_file is None and _changed_ns(path) <= self._since_ns
        self._state_in_file = state
        is_known = self._state is not None and state.token == self._state.token
        if not may_be_old or is_known:
            self._is_shared = True
            if self._client is not None:
                self._client.stop()
            self._on_state(state, time.monotonic())

    def _is_same_attempt(self, state: LeadState) -> bool:
        """Whether ranks of the lead and of this host ran at the same time.

        After a restart the lead of the earlier attempt may still be running.
        """
        if self._state is not None and state.token == self._state.token:
            return True
        return (
            state.ended_ns <= self._lifetime.age_s * 1e9
            and state.age_ns >= self._lifetime.ended_s * 1e9
        )

    def _on_state(self, state: LeadState, at: float) -> None:
        before = self._state
        self._received_at = max(at, self._received_at)
        if before is not None and state.t_ns <= before.t_ns:
            return
        self._state = state
        if before is not None and before.token != state.token:
            self._answered = -1  # another lead


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
