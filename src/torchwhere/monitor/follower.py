"""The monitor of a host other than the first: it tells the lead what it sees, and speaks only when
the lead is gone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.run import BoxRun
from torchwhere.monitor.broadcast import LeadState, run_key
from torchwhere.monitor.discovery import Rendezvous
from torchwhere.monitor.roles import (
    GRACE_S,
    LINGER_S,
    MOST_LINGER_S,
    WORD_FILE,
    Inputs,
    Lifetime,
    MultiHostRun,
    SingleHost,
)
from torchwhere.monitor.transport import FollowerClient, ready_for
from torchwhere.processes.status import ProcessStatus
from torchwhere.snapshots.encode import encode_boxes

SILENCE_S = 30.0  # of the lead, before a deputy speaks
SHARED_GRACE_S = 4.0  # where there is a word in the folder, of this lead or of an earlier one


class Follower(SingleHost):
    """The monitor of another host."""

    def __init__(
        self, folder: Path, *, rendezvous: Rendezvous | None, address: tuple[str, int] | None = None
    ) -> None:
        self._folder = folder
        self._rendezvous, self._address = rendezvous, address
        self._began = self._heard_at = time.monotonic()
        self._span = Lifetime()
        self._in_file: LeadState | None = None  # the first one may be an earlier run's
        self._since_ns = time.time_ns()  # what was written later is not
        self._own: frozenset[int] = frozenset()  # ranks whose boxes are in the folder
        self._state: LeadState | None = None
        self._answered = -1  # it writes once unasked, so that the lead knows of it
        self._post: FollowerClient | None = None
        self._is_shared = False
        if address is not None:
            self._open()

    @property
    def speaks(self) -> bool:  # type: ignore[override]
        """When nothing was heard of the lead for a while, or it has said that it leaves."""
        is_gone = time.monotonic() - self._heard_at > SILENCE_S
        return is_gone or (self._state is not None and self._state.is_over)

    @property
    def stacks(self) -> tuple[int, ...]:  # type: ignore[override]
        return self._state.stacks if self._state is not None else ()

    @property
    def ends(self) -> bool:  # type: ignore[override]
        return self._state is not None and self._state.ends

    def tend(self, run: BoxRun | None) -> bool:
        self._read_file()
        if run is not None and not self._span.has_met:
            # The file system may have a clock of its own: by that one, an earlier run's files are
            # older than our own boxes.
            self._since_ns = max(
                [self._since_ns, *(_changed_ns(box.path) for box in run.summaries.values())]
            )
        if run is not None:
            self._span.meet(run)
            self._own = frozenset(run.summaries)
            self._rendezvous = self._rendezvous or Rendezvous.at(
                next(iter(run.summaries.values())).meta.get("store")
            )
        grace_s = GRACE_S if self._in_file is None else SHARED_GRACE_S
        # a script may say it only when it starts
        knows_where = self._rendezvous is not None or self._address is not None
        if (
            self._post is None
            and knows_where
            and not self._is_shared
            and time.monotonic() - self._began > grace_s
        ):
            self._open()
        if (
            self._post is not None
            and self._post.state is not None
            and self._post.heard_at is not None
        ):
            self._hear(self._post.state, self._post.heard_at)
        if self._state is None or self._state.asked <= self._answered:
            return False
        if self._post is not None and self._post.host in self._state.spared:
            self._answered = self._state.asked
            return False
        return self._post is None or self._is_shared or self._post.ahead_ns is not None

    def gather(self, run: BoxRun) -> Inputs:
        """Asked only when the lead is gone."""
        if not run.missing:
            return Inputs(run)
        lacks = "nothing from the monitor of host 0: this one tells what it knows by itself"
        return Inputs(
            MultiHostRun(run.folder, run.boxes, run.earlier, list(run.unreadable), (lacks,))
        )

    def may_tell(self, culprits: Sequence[int]) -> bool:
        """When all is over here, not of ranks of other hosts: it may only be their monitor that was
        not heard in time."""
        return not self._span.has_ended or all(rank in self._own for rank in culprits)

    def has_said(self, verdict: str) -> bool:
        return self._state is not None and verdict in self._state.said

    def report(
        self,
        boxes: Mapping[int, Box],
        statuses: Mapping[int, ProcessStatus],
        *,
        is_last: bool = False,
    ) -> None:
        if (
            self._post is not None
            and not self._is_shared
            and self._post.ahead_ns is None
            and not is_last
        ):
            return  # it would tell wrong times
        asked = self._state.asked if self._state is not None else 0
        answers, self._answered = asked if asked > self._answered else 0, max(asked, self._answered)
        if self._post is None or self._is_shared:
            return
        self._post.send(
            _written(
                boxes, statuses, answers=answers, is_last=is_last, ahead_ns=self._post.ahead_ns or 0
            )
        )
        if is_last:
            self._post.flush(patience_s=2.0)

    def may_leave(self, *, is_well: bool) -> bool:
        """Not before it could say how it went, if that was not well and there is hope that somebody
        hears it."""
        gone_s = self._span.end()
        is_heard = (
            self._is_shared
            or self.speaks
            or (self._post is not None and self._post.ahead_ns is not None)
        )
        return (
            is_well
            or is_heard
            or min(gone_s, ready_for(self._post)) > LINGER_S
            or gone_s > MOST_LINGER_S
        )

    def describe(self) -> dict[str, Any]:
        return {
            "role": "follower",
            "connected_to": ["host 0"] if self._state is not None and not self.speaks else [],
        }

    def close(self) -> bool:
        return self._post is None or self._post.close()

    def _open(self) -> None:
        self._post = FollowerClient(self._rendezvous, self._address, accepts=self._is_of_this_life)
        self._post.open()

    def _read_file(self) -> None:
        """The lead's word, where it is in this folder: a file that changes is not an earlier
        run's."""
        try:
            state = LeadState.from_json((self._folder / WORD_FILE).read_bytes())
        except OSError:
            return
        if (
            state is None
            or state == self._in_file
            or state.run != run_key()
            or not self._is_of_this_life(state)
        ):
            return
        is_first, self._in_file = (
            self._in_file is None and _changed_ns(self._folder / WORD_FILE) <= self._since_ns,
            state,
        )
        if not is_first or (self._state is not None and state.token == self._state.token):
            self._is_shared = True
            if self._post is not None:
                self._post.stop()
            self._hear(state, time.monotonic())

    def _is_of_this_life(self, state: LeadState) -> bool:
        """Whether ranks of the lead and of this host were there together: after a restart, an
        earlier lead may still linger."""
        if self._state is not None and state.token == self._state.token:
            return True
        return state.gone_ns <= self._span.age_s * 1e9 and state.age_ns >= self._span.gone_s * 1e9

    def _hear(self, state: LeadState, at: float) -> None:
        known, self._heard_at = self._state, max(at, self._heard_at)
        if known is not None and state.t_ns <= known.t_ns:
            return
        self._state = state
        if known is not None and known.token != state.token:
            self._answered = -1  # another lead


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _written(
    boxes: Mapping[int, Box],
    statuses: Mapping[int, ProcessStatus],
    *,
    answers: int,
    is_last: bool,
    ahead_ns: int,
) -> bytes:
    """A snapshot that is not too large."""
    seen = {rank: status for rank, status in statuses.items() if rank in boxes}
    return encode_boxes(boxes, statuses=seen, answers=answers, is_last=is_last, ahead_ns=ahead_ns)
