"""What each rank is doing now, from glances at its box: its state, its age, its speed, and whether
it stands still.

`LiveRanks` remembers what earlier glances saw. The time is given to it. A rank stands still when it
has not moved for longer than it usually takes: `stall_s`, or a few of its own steps if those are
longer. Who waits for whom is in `waiting.py`. All of it is a first impression, of every rank and at
once; the verdict of the doctor says why, and comes later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torchwhere.blackbox.live_box import Issued, LiveBox
from torchwhere.core.events import Event
from torchwhere.core.place import Place
from torchwhere.diagnose.calls.keys import Group
from torchwhere.diagnose.doctor.exits import ended_well
from torchwhere.diagnose.doctor.verdict import State
from torchwhere.diagnose.live.waiting import who_waits
from torchwhere.processes.status import ProcessStatus

STALL_S = 1.5  # shown at the next look: within two seconds
_STEPS = 5  # a rank may stand still for as long as so many of its steps take
_GAPS = 2  # or so many of the longest stops it has made so far
_START_S = 30.0  # before the first module, collective or step, and while a graph is compiled
_STEPS_KEPT = 9
_SEEN_NOTHING = ProcessStatus()


@dataclass(frozen=True)
class RankNow:
    """One rank, now. What has to be looked up in its box is looked up when it is asked for."""

    rank: int
    state: State
    step: int | None
    age_s: float  # since it last moved
    steps_per_s: float | None
    is_stalled: bool
    is_blamed: bool  # others wait for it
    waits_for: tuple[int, ...]
    detail: str | None  # how it ended
    live_box: LiveBox = field(repr=False, compare=False)

    @cached_property
    def place(self) -> Place:
        return self.live_box.place()

    @cached_property
    def issued(self) -> Issued | None:
        return self.live_box.issued()

    @property
    def host(self) -> str:
        return str(self.live_box.meta.get("host") or "")

    @property
    def group(self) -> str | None:
        """The group of its last collective, as people call it."""
        return _title(self.issued.group) if self.issued is not None else None

    @property
    def is_trouble(self) -> bool:
        return self.is_stalled or self.is_blamed or self.state in (State.DEAD, State.STOPPED)

    def to_dict(self) -> dict[str, Any]:
        place, issued = self.place.to_dict(), self.issued
        last = (
            {"op": issued.op, "group": self.group, "number": issued.number}
            if issued is not None
            else None
        )
        return {
            "rank": self.rank,
            "state": str(self.state),
            **{name: place[name] for name in ("step", "pass", "module", "call", "line")},
            "phase": self.live_box.phase(),
            "last": last,
            "age_s": round(self.age_s, 3),
            "steps_per_s": None if self.steps_per_s is None else round(self.steps_per_s, 4),
            "stalled": self.is_stalled,
            "blamed": self.is_blamed,
            "waits_for": list(self.waits_for),
            "host": self.host,
            "detail": self.detail,
        }


def _title(entry: tuple[str, str, str | None, tuple[int, ...]]) -> str:
    name, desc, mesh_dim, _ = entry
    return Group(name, (), desc, None, mesh_dim).title


@dataclass(slots=True)
class _Track:
    """What is remembered of one rank. Times are those of whoever looks."""

    live_box: LiveBox
    first_s: float
    looked_s: float
    moved_s: float
    gap_s: float = 0.0  # the longest it stood still and went on
    # when each was first seen
    steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))

    def look(self, now_s: float, now_ns: int, *, has_moved: bool) -> None:
        if has_moved:
            # By the rank's own clock, but within the time since the last look: clocks of hosts
            # differ.
            ago_s = min(max(0.0, (now_ns - self.live_box.moved_ns) / 1e9), now_s - self.looked_s)
            self.gap_s = max(self.gap_s, now_s - ago_s - self.moved_s)
            self.moved_s = now_s - ago_s
        self.looked_s = now_s
        step = self.live_box.step
        if step is not None and (not self.steps or step != self.steps[-1][1]):
            if self.steps and step < self.steps[-1][1]:
                self.steps.clear()
            self.steps.append((now_s, step))

    def step_s(self) -> float | None:
        """How long a step usually takes."""
        if len(self.steps) > 2:  # the first was under way when it was seen
            (begin, first), (end, last) = self.steps[1], self.steps[-1]
            return (end - begin) / (last - first)
        mean_ns = self.live_box.mean_step_ns
        return mean_ns / 1e9 if mean_ns else None

    def steps_per_s(self, now_s: float) -> float | None:
        usual = self.step_s()
        if usual is None or usual <= 0:
            return None
        late_s = now_s - self.steps[-1][0] if self.steps else 0.0
        return 1 / usual if late_s < _STEPS * usual + 1 else 0.0

    def patience_s(self, now_s: float, stall_s: float, *, is_waiting: bool) -> float:
        """How long it may stand still."""
        usual = self.step_s()
        if not self.live_box.has_begun or self.live_box.is_compiling:
            return max(stall_s, _START_S)
        if usual is None:  # in its first step all is slow; but others that are behind are a reason
            return stall_s if is_waiting else max(stall_s, _START_S / 3)
        limit = _STEPS * usual
        has_learned = now_s - self.first_s > 2 * usual and self.gap_s > 0
        return max(stall_s, min(limit, _GAPS * self.gap_s) if has_learned else limit)


class LiveRanks:
    """The ranks of one run, over many looks."""

    def __init__(self, *, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._tracks: dict[int, _Track] = {}

    def meet(self, live_box: LiveBox, *, now_s: float, now_ns: int) -> None:
        """A box belongs to the run: from now on it is the one of its rank. Its age is by the clock
        of its host, at first."""
        track = self._tracks.get(live_box.rank)
        if track is None or track.live_box is not live_box:
            moved_s = now_s - max(0.0, (now_ns - live_box.moved_ns) / 1e9)
            track = self._tracks[live_box.rank] = _Track(live_box, now_s, now_s, moved_s)
            track.look(now_s, now_ns, has_moved=False)

    def looked(self, live_box: LiveBox, *, has_moved: bool, now_s: float, now_ns: int) -> None:
        """A box was looked at again."""
        track = self._tracks.get(live_box.rank)
        if track is not None and track.live_box is live_box:
            track.look(now_s, now_ns, has_moved=has_moved)

    def now(
        self, ranks: Iterable[int], statuses: Mapping[int, ProcessStatus], *, now_s: float
    ) -> list[RankNow]:
        """Every rank that was looked at, as it is now."""
        tracks = {rank: track for rank in ranks if (track := self._tracks.get(rank)) is not None}
        states = {
            rank: _state(track.live_box, statuses.get(rank, _SEEN_NOTHING))
            for rank, track in tracks.items()
        }
        still = [
            rank for rank, track in tracks.items() if self._stands_still(track, states[rank], now_s)
        ]
        # all is over: in what did it end?
        if all(state in (State.DEAD, State.FINISHED) for state in states.values()):
            still = [rank for rank, track in tracks.items() if track.live_box.ended is None]
        waiting = who_waits({rank: track.live_box for rank, track in tracks.items()}, still)
        stalled = {
            rank
            for rank in still
            if self._is_stalled(tracks[rank], now_s, is_waiting=rank in waiting.waits)
        }
        waiting = waiting.of(stalled)
        blamed = waiting.blamed()
        found = []
        for rank, track in tracks.items():
            state, seen = states[rank], statuses.get(rank, _SEEN_NOTHING)
            waits_for = waiting.waits.get(rank, ())
            found.append(
                RankNow(
                    rank=rank,
                    state=State.WAITING if waits_for and state is State.RUNNING else state,
                    step=track.live_box.step,
                    age_s=max(0.0, now_s - track.moved_s),
                    steps_per_s=_speed(track, state, now_s, is_stalled=rank in stalled),
                    is_stalled=rank in stalled and state is not State.DEAD,
                    is_blamed=rank in blamed,
                    waits_for=waits_for,
                    detail=track.live_box.ended or seen.ended,
                    live_box=track.live_box,
                )
            )
        return found

    def _stands_still(self, track: _Track, state: State, now_s: float) -> bool:
        return now_s - track.moved_s > self._stall_s and state in (State.RUNNING, State.STOPPED)

    def _is_stalled(self, track: _Track, now_s: float, *, is_waiting: bool) -> bool:
        return now_s - track.moved_s > track.patience_s(now_s, self._stall_s, is_waiting=is_waiting)


def _state(live_box: LiveBox, seen: ProcessStatus) -> State:
    """Without waiting, which is between ranks."""
    if live_box.ended is not None:
        is_well = ended_well(Event("end", 0, 0, live_box.place(), {"reason": live_box.ended}))
        return State.FINISHED if is_well else State.DEAD
    if seen.alive is False or seen.ended is not None:
        return State.DEAD
    return State.STOPPED if seen.is_stopped else State.RUNNING


def _speed(track: _Track, state: State, now_s: float, *, is_stalled: bool) -> float | None:
    if state in (State.DEAD, State.FINISHED):
        return None
    return 0.0 if is_stalled else track.steps_per_s(now_s)
