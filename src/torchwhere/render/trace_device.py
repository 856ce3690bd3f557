"""The device of one rank as Chrome trace events: its steps, its collectives, and arrows to them.

Takes a `DeviceTimeline`. The tracks of a device follow the threads of its rank. An arrow goes from
the call that the CPU issued to the same call on the device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.device_time.calls import NO_RANK, UNKNOWN_NS
from torchwhere.diagnose.device_time.steps import PARTS, DeviceSteps
from torchwhere.diagnose.timeline.device import (
    DeviceSlice,
    DeviceTimeline,
    DeviceTrack,
    NotReached,
)
from torchwhere.diagnose.timeline.slices import Mark
from torchwhere.render.trace_counts import TraceCounts

# Larger than any number of a thread and its lanes.
_TIDS = 3_000_000
_LANES = 16  # between the numbers of two tracks
_MOST_RUNS = 4  # of ranks in a name
_ARROWS = 1 << 52  # larger than the id of any call of the job
_NAMES = {
    DeviceTrack.STEPS: "device: steps",
    DeviceTrack.STREAM: "device: stream of the job",
    DeviceTrack.OTHERS: "device: other collectives",
}
_MARKS = {
    Mark.NONE: "",
    Mark.ESTIMATED: ',"end":"estimated"',
    Mark.UNFINISHED: ',"unfinished":true',
}


@dataclass(frozen=True, slots=True)
class CpuCall:
    """Where the CPU's slice of a collective is drawn."""

    begin_ns: int
    track: str  # as JSON


@dataclass(frozen=True, slots=True)
class DeviceWriter:
    """Writes the events of the device of one rank."""

    timeline: DeviceTimeline
    rank: int
    begin_ns: int  # of the trace
    # the start of the event of a record, and of its arguments
    start_of: Callable[[int], tuple[str, str]]
    cpu_calls: Mapping[int, CpuCall]  # by index of the record
    counts: TraceCounts

    def tracks(self) -> Iterator[tuple[int, str]]:
        """Yield the number and the name of each track."""
        used = {(piece.track, piece.lane) for piece in self.timeline.slices}
        if self.timeline.steps is not None and len(self.timeline.steps):
            used.add((DeviceTrack.STEPS, 0))
        if self.timeline.not_reached is not None:
            used.add((DeviceTrack.STREAM, self.timeline.not_reached.lane))
        for track, lane in sorted(used):
            name = _NAMES[track]
            yield _tid(track, lane), f"{name} ({lane + 1})" if lane else name

    def events(self) -> Iterator[str]:
        if self.timeline.steps is not None:
            yield from self._steps(self.timeline.steps)
        for piece in self.timeline.slices:
            yield from self._collective(piece)
        if self.timeline.not_reached is not None:
            yield self._not_reached(self.timeline.not_reached)

    def _not_reached(self, piece: NotReached) -> str:
        _, args = self.start_of(piece.at)
        op = json.loads(f"{{{args}}}").get("op") or "collective"
        name = json.dumps(f"not reached: {op} #{piece.number}")
        where = self._where(DeviceTrack.STREAM, piece.lane)
        took_ns = piece.end_ns - piece.begin_ns
        return self._slice(f'"name":{name},"cat":"device"', piece.begin_ns, took_ns, where, args)

    def _steps(self, steps: DeviceSteps) -> Iterator[str]:
        names = ("device", *PARTS, "waited")
        columns = [getattr(steps, f"{name}_ns") for name in names]
        where = self._where(DeviceTrack.STEPS, 0)
        for step, begin, waited_for, *times in zip(
            *(c.tolist() for c in (steps.steps, steps.begin_ns, steps.waited_for, *columns)),
            strict=True,
        ):
            parts = zip(names[1:], times[1:], strict=True)
            args = f'"step":{step}' + "".join(f',"{name}_us":{_us(ns)}' for name, ns in parts)
            if waited_for != NO_RANK:
                args += f',"waited_for":{waited_for}'
            yield self._slice(f'"name":"step {step}","cat":"device"', begin, times[0], where, args)

    def _collective(self, piece: DeviceSlice) -> Iterator[str]:
        start, args = self.start_of(piece.at)
        where = self._where(piece.track, piece.lane)
        took = piece.end_ns - piece.begin_ns
        if piece.last_rank != NO_RANK:
            args += f',"last":{piece.last_rank}'
        for name, ns in (("waited_us", piece.wait_ns), ("transfer_us", piece.transfer_ns)):
            if ns != UNKNOWN_NS:
                args += f',"{name}":{_us(ns)}'
        self.counts.unfinished += piece.marks == Mark.UNFINISHED
        yield self._slice(start, piece.begin_ns, took, where, args + _MARKS[piece.marks])
        if 0 < piece.wait_ns < took:
            name = f'"name":"wait for rank {piece.last_rank}","cat":"device"'
            yield self._slice(name, piece.begin_ns, piece.wait_ns, where, "")
        elif piece.absent:
            ranks = ranks_phrase(piece.absent, most=_MOST_RUNS)
            name = f'"name":"wait for {ranks}","cat":"device"'
            yield self._slice(name, piece.begin_ns, took, where, "")
        issued = self.cpu_calls.get(piece.at)
        if issued is not None:
            yield from self._arrow(piece, issued, where)

    def _slice(self, start: str, begin_ns: int, took_ns: int, where: str, args: str) -> str:
        self.counts.slices += 1
        when = f'"ts":{_us(begin_ns - self.begin_ns)},"dur":{_us(took_ns)}'
        return f'{{{start},"ph":"X",{when},{where},"args":{{{args}}}}}'

    def _arrow(self, piece: DeviceSlice, issued: CpuCall, where: str) -> Iterator[str]:
        self.counts.flows += 2
        arrow = f'"name":"issue","cat":"issue","id":{_ARROWS + (self.rank << 32) + piece.at}'
        begin, end = issued.begin_ns - self.begin_ns, piece.begin_ns - self.begin_ns
        yield f'{{{arrow},"ph":"s","ts":{_us(begin)},{issued.track}}}'
        # Perfetto may swap points of the same time.
        yield f'{{{arrow},"ph":"f","bp":"e","ts":{_us(max(end, begin + 1))},{where}}}'

    def _where(self, track: DeviceTrack, lane: int) -> str:
        return f'"pid":{self.rank},"tid":{_tid(track, lane)}'


def _tid(track: DeviceTrack, lane: int) -> int:
    return _TIDS + track + lane * _LANES


def _us(ns: int) -> str:
    return f"{ns / 1000:.3f}"
