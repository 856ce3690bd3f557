"""The current state of each rank from repeated polls of its box: state, age, speed, stalled or not.

`LiveRanks` keeps the results of earlier polls. The caller passes the time. A rank is stalled if it
has made no progress for longer than usual: `stall_s`, or a few of its own steps if they take
longer. A stalled rank waits for the ranks that have not reached the last collective that it has
reached: a CPU reaches it when it issues it, a device when it comes to it. This is a quick
first estimate for every rank; the verdict of the doctor takes longer and gives the reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torchwhere.blackbox.issued import Issued
from torchwhere.blackbox.live_box import LiveBox
from torchwhere.core.device_place import DevicePlace
from torchwhere.core.events import Event
from torchwhere.core.place import RANK_FIELDS, Place
from torchwhere.core.results import plain_fields
from torchwhere.core.stall import NO_PROGRESS_S, no_progress_s
from torchwhere.diagnose.doctor.device_wait import device_wait
from torchwhere.diagnose.doctor.exit_records import ended_well
from torchwhere.diagnose.doctor.stacks import stack_lines
from torchwhere.diagnose.doctor.verdict import State
from torchwhere.processes.fault_handler import saved_stack
from torchwhere.processes.status import ProcessStatus

_STEPS = 5  # a rank that has been in a step for as long as so many take has no speed
_GAPS = 2  # a rank may be still for so many times its longest stop so far
_STEPS_KEPT = 9
_UNKNOWN = ProcessStatus()


@dataclass(frozen=True)
class RankNow:
    """The current state of one rank. Values that need a look into its box are computed lazily."""

    rank: int
    state: State
    step: int | None
    age_s: float  # since its last progress
    steps_per_s: float | None
    is_stalled: bool
    is_blamed: bool  # others wait for it
    waits_for: tuple[int, ...]
    detail: str | None  # how it ended
    live_box: LiveBox = field(repr=False, compare=False)

    @cached_property
    def place(self) -> Place:
        place = self.live_box.place()
        if place.line is not None or not self._is_still:
            return place
        return replace(place, **stack_lines(self._stack, folder=self.live_box.meta.get("folder")))

    @property
    def _is_still(self) -> bool:
        """Whether it does not move: what it saved while it stalled holds after its end too."""
        return self.is_stalled or self.state is State.DEAD

    @cached_property
    def _stack(self) -> tuple[str, ...]:
        """The stack that a stalled rank has saved."""
        return saved_stack(self.live_box.path, moved_ns=self.live_box.moved_ns)

    @cached_property
    def issued(self) -> Issued | None:
        return self.live_box.issued()

    @cached_property
    def arrived(self) -> Issued | None:
        """The last collective that it has reached: on its device if it runs there."""
        return self.live_box.arrived()

    @cached_property
    def device(self) -> DevicePlace | None:
        """Where its device is; None if no device has reached a mark."""
        device = self.live_box.device()
        if device is None:
            return None
        stack = self._stack if self._is_still else ()
        waits_in = device_wait(stack, self.live_box.meta, pending=device.pending)
        return replace(device, cpu=self.place, cpu_waits_in=waits_in)

    @property
    def host(self) -> str:
        return str(self.live_box.meta.get("host") or "")

    @property
    def group(self) -> str | None:
        """The displayed name of the group of its last collective."""
        return self.issued.group.title if self.issued is not None else None

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
            **{name: place[name] for name in RANK_FIELDS},
            "phase": self.live_box.phase(),
            "last": last,
            "age_s": round(self.age_s, 3),
            "steps_per_s": None if self.steps_per_s is None else round(self.steps_per_s, 4),
            "stalled": self.is_stalled,
            "blamed": self.is_blamed,
            **plain_fields(self, "waits_for", "host", "detail", "device"),
        }


@dataclass(slots=True)
class _Track:
    """The history of one rank. Times are on the clock of this process."""

    live_box: LiveBox
    first_s: float
    polled_s: float
    moved_s: float
    gap_s: float = 0.0  # its longest stop so far
    # the time at which each step was first seen
    steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))
    earlier_step_s: float | None = None  # the usual duration of the steps before the polls

    def update(self, now_s: float, now_ns: int, *, has_moved: bool) -> None:
        if has_moved:
            # On the rank's own clock, but limited to the time since the last poll: clocks of hosts
            # differ.
            ago_s = min(max(0.0, (now_ns - self.live_box.moved_ns) / 1e9), now_s - self.polled_s)
            self.gap_s = max(self.gap_s, now_s - ago_s - self.moved_s)
            self.moved_s = now_s - ago_s
        self.polled_s = now_s
        step = self.live_box.step
        if step is not None and (not self.steps or step != self.steps[-1][1]):
            if self.steps and step < self.steps[-1][1]:
                self.steps.clear()
            self.steps.append((now_s, step))

    def step_s(self) -> float | None:
        """The usual duration of a step."""
        if len(self.steps) > 2:  # the first was already running when first seen
            (begin, first), (end, last) = self.steps[1], self.steps[-1]
            return (end - begin) / (last - first)
        mean_ns = self.live_box.mean_step_ns
        return mean_ns / 1e9 if mean_ns else None

    def _recent_step_s(self) -> float | None:
        """The duration of recent steps, as users count them: without the set-up of the job."""
        if len(self.steps) > 2:
            return self.step_s()
        if self.earlier_step_s is None and self.live_box.ended_steps > 1:
            # The mean is for steps of so many records that the end of the ring has no whole one.
            step_ns = self.live_box.recent_step_ns() or self.live_box.mean_step_ns
            self.earlier_step_s = step_ns / 1e9 if step_ns else None
        return self.earlier_step_s

    def steps_per_s(self, now_s: float) -> float | None:
        usual = self._recent_step_s()
        if usual is None or usual <= 0:
            return None
        late_s = now_s - self.steps[-1][0] if self.steps else 0.0
        return 1 / usual if late_s < _STEPS * usual + 1 else 0.0

    def patience_s(self, now_s: float, stall_s: float, *, is_waiting: bool) -> float:
        """The time without progress after which the rank counts as stalled."""
        usual = self.step_s()
        is_starting = not self.live_box.has_begun or self.live_box.is_compiling
        limit = no_progress_s(
            usual, is_waiting=is_waiting, is_starting=is_starting, least_s=stall_s
        )
        if usual is None or is_starting:
            return limit
        has_learned = now_s - self.first_s > 2 * usual and self.gap_s > 0
        return max(stall_s, min(limit, _GAPS * self.gap_s)) if has_learned else limit


class LiveRanks:
    """The ranks of one run, over many polls."""

    def __init__(self, *, stall_s: float = NO_PROGRESS_S) -> None:
        self._stall_s = stall_s
        self._tracks: dict[int, _Track] = {}

    def add(self, live_box: LiveBox, *, now_s: float, now_ns: int) -> None:
        """Use a box for its rank from now on. Its first age is on the clock of its host."""
        track = self._tracks.get(live_box.rank)
        if track is None or track.live_box is not live_box:
            moved_s = now_s - max(0.0, (now_ns - live_box.moved_ns) / 1e9)
            track = self._tracks[live_box.rank] = _Track(live_box, now_s, now_s, moved_s)
            track.update(now_s, now_ns, has_moved=False)

    def update(self, live_box: LiveBox, *, has_moved: bool, now_s: float, now_ns: int) -> None:
        """Record a poll of a box."""
        track = self._tracks.get(live_box.rank)
        if track is not None and track.live_box is live_box:
            track.update(now_s, now_ns, has_moved=has_moved)

    def now(
        self, ranks: Iterable[int], statuses: Mapping[int, ProcessStatus], *, now_s: float
    ) -> list[RankNow]:
        """The current state of every polled rank among `ranks`."""
        tracks = {rank: self._tracks[rank] for rank in ranks if rank in self._tracks}
        states = {
            rank: _state(track.live_box, statuses.get(rank, _UNKNOWN))
            for rank, track in tracks.items()
        }
        still = [
            rank for rank, track in tracks.items() if self._is_still(track, states[rank], now_s)
        ]
        # After the end of the job: show the waits in which it ended.
        if all(state in (State.DEAD, State.FINISHED) for state in states.values()):
            still = [rank for rank, track in tracks.items() if track.live_box.ended is None]
        waiting = waiting_ranks({rank: track.live_box for rank, track in tracks.items()}, still)
        stalled = {
            rank
            for rank in still
            if self._is_stalled(tracks[rank], now_s, is_waiting=rank in waiting.waits)
        }
        waiting = waiting.of(stalled)
        blamed = waiting.blamed()
        ranks_now = []
        for rank, track in tracks.items():
            state, status = states[rank], statuses.get(rank, _UNKNOWN)
            waits_for = waiting.waits.get(rank, ())
            ranks_now.append(
                RankNow(
                    rank=rank,
                    state=State.WAITING if waits_for and state is State.RUNNING else state,
                    step=track.live_box.step,
                    age_s=max(0.0, now_s - track.moved_s),
                    steps_per_s=_speed(track, state, now_s, is_stalled=rank in stalled),
                    is_stalled=rank in stalled and state is not State.DEAD,
                    is_blamed=rank in blamed,
                    waits_for=waits_for,
                    detail=track.live_box.ended or status.ended,
                    live_box=track.live_box,
                )
            )
        return ranks_now

    def _is_still(self, track: _Track, state: State, now_s: float) -> bool:
        return now_s - track.moved_s > self._stall_s and state in (State.RUNNING, State.STOPPED)

    def _is_stalled(self, track: _Track, now_s: float, *, is_waiting: bool) -> bool:
        return now_s - track.moved_s > track.patience_s(now_s, self._stall_s, is_waiting=is_waiting)


def _state(live_box: LiveBox, status: ProcessStatus) -> State:
    """The state of a rank by itself; WAITING depends on other ranks."""
    if live_box.ended is not None:
        is_well = ended_well(Event("end", 0, 0, live_box.place(), {"reason": live_box.ended}))
        return State.FINISHED if is_well else State.DEAD
    if status.alive is False or status.ended is not None:
        return State.DEAD
    return State.STOPPED if status.is_stopped else State.RUNNING


def _speed(track: _Track, state: State, now_s: float, *, is_stalled: bool) -> float | None:
    if state in (State.DEAD, State.FINISHED):
        return None
    return 0.0 if is_stalled else track.steps_per_s(now_s)


@dataclass(frozen=True, slots=True)
class Waiting:
    """The ranks that each rank waits for."""

    waits: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def blamed(self) -> frozenset[int]:
        """Ranks that others wait for and that do not wait themselves; in a cycle, all of it."""
        # thousands of ranks may share one tuple of thousands
        shared = {id(others): others for others in self.waits.values()}
        awaited = {other for others in shared.values() for other in others}
        return frozenset(awaited - set(self.waits) or awaited)

    def of(self, ranks: set[int]) -> Waiting:
        """Only the waits of these ranks."""
        return Waiting({rank: others for rank, others in self.waits.items() if rank in ranks})


def waiting_ranks(boxes: Mapping[int, LiveBox], still: Iterable[int]) -> Waiting:
    """The ranks among `still` whose last collective other members have not reached."""
    behind: dict[tuple[object, int], tuple[int, ...]] = {}  # many ranks wait in the same call
    waits = {}
    for rank in still:
        issued = boxes[rank].arrived()
        if issued is None:
            continue
        key = issued.stream, issued.number
        if key not in behind:
            behind[key] = _behind(issued, boxes)
        if behind[key]:
            waits[rank] = behind[key]
    return Waiting(waits)


def _behind(issued: Issued, boxes: Mapping[int, LiveBox]) -> tuple[int, ...]:
    """Members that have not reached the call. Ranks without a box are unknown and left out."""
    stream = issued.stream
    members = (stream.source, stream.destination) if stream.source >= 0 else issued.group.ranks
    return tuple(
        rank
        for rank in members
        if rank in boxes and boxes[rank].counts().get(stream, 0) <= issued.number
    )
