"""A timeline as Chrome trace events in JSON, for Perfetto, chrome://tracing and HTA.

Takes the result of `diagnose/timeline`, gives the text piece by piece: only one rank is in memory
at a time. A rank is a process, its threads are threads. `docs/trace.md` describes the content.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import NO_CALL, NO_STEP
from torchwhere.blackbox.string_table import title_in
from torchwhere.core.events import Event, Kind, json_text
from torchwhere.core.grouping import grouped
from torchwhere.core.place import shown
from torchwhere.core.version import __version__
from torchwhere.diagnose.clocks.arrivals import ClockStream
from torchwhere.diagnose.clocks.call_arrivals import CallArrivals
from torchwhere.diagnose.comms.outline import params_text
from torchwhere.diagnose.timeline.load import RunTimelines
from torchwhere.diagnose.timeline.slices import STEPS, Instant, Mark, Slice, Timeline
from torchwhere.render.trace_counts import TraceCounts
from torchwhere.render.trace_device import CpuCall, DeviceWriter

# Larger than any rank: Perfetto takes a thread with the number of its process as the main thread.
_TIDS = 2_000_000
_THREADS = 256  # thread numbers are smaller
_OF_PLACE = ("subject", "module", "line", "graph", "beneficiary", "param", "pass", "flags")
# Perfetto may swap points of the same time, so later ones get a later time.
_LATER_NS = {"s": 0, "t": 1, "f": 2}
_MOST_NAME = 256
_PIECE = 4096  # events
_MOST_LISTED = 16
_OF_COLLECTIVE = (
    "op",
    "group",
    "bytes",
    "dtype",
    "shapes",
    "out_shapes",
    "peer",
    "reduce_op",
    "api",
    "raw_op",
    "group_desc",
    "mesh_dim",
    "group_size",
)
_CALLS = ("collective", "device")  # a call of the CPU, and the same call on the device
# The categories of kineto. HTA looks for steps under this one.
_KINETO = {
    "step": "user_annotation",
    "phase": "user_annotation",
    "module": "python_function",
    "collective": "cpu_op",
}


def head(box: Box, run_timelines: RunTimelines) -> str:
    """The start of a file. HTA takes the first `"rank": N` in it, with the space, as the rank."""
    backend = next(
        (str(group["backend"]) for group in box.groups().values() if group.get("backend")), ""
    )
    begin_ns, clocks = run_timelines.begin_ns, run_timelines.clocks.to_dict()
    info = {"backend": backend, "rank": box.rank, "world_size": run_timelines.run.world_size}
    return (
        f'{{"schemaVersion": 1, "distributedInfo": {json.dumps(info)},\n"displayTimeUnit": "ms",'
        f' "baseTimeNanoseconds": {begin_ns}, "otherData":'
        f' {_compact({"torchwhere": __version__, "clocks": clocks})},\n"traceEvents": [\n'
    )


TAIL = "\n]}\n"


def joined(events: Iterable[str], *, is_first: bool) -> Iterator[str]:
    """Join events to large pieces of a JSON list."""
    pending = iter(events)
    while piece := list(itertools.islice(pending, _PIECE)):
        yield ("" if is_first else ",\n") + ",\n".join(piece)
        is_first = False


class RankWriter:
    """Writes the events of one rank."""

    def __init__(
        self,
        box: Box,
        timeline: Timeline,
        run_timelines: RunTimelines,
        *,
        counts: TraceCounts,
        is_kineto: bool = False,
    ) -> None:
        self._box, self._timeline, self._run_timelines, self._counts = (
            box,
            timeline,
            run_timelines,
            counts,
        )
        self._begin_ns, self._rank, self._is_kineto = run_timelines.begin_ns, box.rank, is_kineto
        self._pid = _process(box) if is_kineto else box.rank
        self._starts: dict[tuple[Any, ...], tuple[str, str]] = {}
        rows = box.records
        self._places = list(zip(*(rows[name].tolist() for name in _OF_PLACE), strict=True))
        self._own = list(
            zip(*(rows[name].tolist() for name in ("step", "extra", "call")), strict=True)
        )
        tracks = {(piece.thread, piece.lane) for piece in timeline.slices}
        tracks |= {(instant.thread, 0) for instant in timeline.instants}
        self._tracks = {track: f'"pid":{self._pid},"tid":{_tid(*track)}' for track in tracks}

    def events(self) -> Iterator[str]:
        self._counts.ranks.append(self._box.rank)
        self._counts.has_modules |= self._timeline.has_modules
        yield from self._names()
        slices = self._timeline.slices
        self._counts.slices += len(slices)
        for piece, arrivals in zip(slices, self._met(), strict=True):
            if arrivals is not None and arrivals.arrived > 1:
                yield f"{self._slice(piece)},\n{self._arrow(piece, arrivals)}"
            else:
                yield self._slice(piece)
        for instant in self._timeline.instants:
            yield self._instant(instant)
        for t_ns, size in self._timeline.step_bytes:
            self._counts.counters += 1
            name = '"name":"bytes issued in the step","ph":"C"'
            yield f'{{{name},"ts":{self._us(t_ns)},"pid":{self._pid},"args":{{"bytes":{size}}}}}'
        if not self._is_kineto:  # HTA would take the slices of the device for those of a thread
            yield from self._device()

    def _device(self) -> Iterator[str]:
        timeline = self._run_timelines.device(self._box)
        if timeline is None:
            return
        issued = {
            piece.at: CpuCall(piece.begin_ns, self._tracks[piece.thread, piece.lane])
            for piece in self._timeline.slices
            if piece.kind == "collective" and not piece.marks & Mark.CUT_BEGIN
        }
        device = DeviceWriter(
            timeline,
            rank=self._rank,
            begin_ns=self._begin_ns,
            start_of=self._device_start,
            cpu_calls=issued,
            counts=self._counts,
        )
        for tid, name in device.tracks():
            yield from self._track_names(tid, name)
        yield from device.events()

    def _device_start(self, at: int) -> tuple[str, str]:
        start, args = self._starts.get(("device", self._places[at])) or self._start("device", at)
        step, number, _ = self._own[at]
        args += f',"number":{number}' + (f',"step":{step}' if step != NO_STEP else "")
        return start[1:-1], args

    def _us(self, t_ns: int) -> str:
        return f"{(t_ns - self._begin_ns) / 1000:.3f}"

    # -- names -------------------------------------------------------------------------------------

    def _names(self) -> Iterator[str]:
        meta = self._box.meta
        yield self._metadata("process_name", {"name": f"rank {self._rank}"})
        yield self._metadata(
            "process_labels", {"labels": f"{meta.get('host', '?')}, pid {meta.get('pid', '?')}"}
        )
        yield self._metadata("process_sort_index", {"sort_index": self._rank})
        for thread, lane in sorted(self._tracks):
            name = "steps" if thread == STEPS else self._box.thread(thread) or f"thread {thread}"
            whole_name = f"{name} ({lane + 1})" if lane else name
            yield from self._track_names(_tid(thread, lane), whole_name)

    def _track_names(self, tid: int, name: str) -> Iterator[str]:
        yield self._metadata("thread_name", {"name": name}, tid)
        yield self._metadata("thread_sort_index", {"sort_index": tid}, tid)

    def _metadata(self, name: str, args: dict[str, Any], tid: int | None = None) -> str:
        of = "" if tid is None else f'"tid":{tid},'
        return f'{{"name":"{name}","ph":"M","pid":{self._pid},{of}"args":{_compact(args)}}}'

    # -- slices ------------------------------------------------------------------------------------

    def _slice(self, piece: Slice) -> str:
        begin_ns, end_ns, kind, at, thread, marks, _, arrivals, lane = piece
        start, args = self._starts.get((kind, self._places[at])) or self._start(kind, at)
        step, extra, call = self._own[at]
        if kind == "collective":
            args += f',"number":{extra}'
        if arrivals is not None:
            late_us = (begin_ns - arrivals.first_ns) / 1000
            args += f',"arrived":{arrivals.arrived},"last":{arrivals.last_rank}'
            args += f',"after_first_us":{late_us:.3f}'
        if step != NO_STEP:
            args += f',"step":{step}'
        if call != NO_CALL and self._places[at][1]:
            args += f',"call":{call}'
        if marks:
            args += self._marked(marks)
        ts, dur = (begin_ns - self._begin_ns) / 1000, (end_ns - begin_ns) / 1000
        when = f'"ts":{ts:.3f},"dur":{dur:.3f}'
        return f'{start}"ph":"X",{when},{self._tracks[thread, lane]},"args":{{{args}}}}}'

    def _marked(self, marks: int) -> str:
        if marks == Mark.ESTIMATED:  # by far the most common
            return ',"end":"estimated"'
        args = ""
        if marks & Mark.UNFINISHED:
            self._counts.unfinished += 1
            args += ',"unfinished":true'
        if marks & Mark.EARLY:
            args += ',"began":"before the ring does"'
        if marks & Mark.ESTIMATED:
            args += ',"end":"estimated"'
        if marks & (Mark.CUT_BEGIN | Mark.CUT_END):
            args += ',"cut":true'
        return args

    def _start(self, kind: str, at: int) -> tuple[str, str]:
        """The start of an event and of its arguments: equal for all events of one place.

        Steps are the exception: their name holds the number.
        """
        event = self._box.event(at)
        place, fields = event.place.to_dict(), event.fields
        args = _known(place, ("pass", "module", "line", "framework_line", "graph", "param"))
        if place["certainty"] != "exact":
            args["certainty"] = place["certainty"]
        args |= self._details(kind, fields)
        category = _KINETO.get(kind, "user_annotation") if self._is_kineto else kind
        name = self._title(kind, event)
        start = f'{{"name":{json.dumps(name)},"cat":"{category}",', _compact(args)[1:-1]
        if kind != "step":
            self._starts[kind, self._places[at]] = start
        return start

    def _title(self, kind: str, event: Event) -> str:
        place, fields = event.place, event.fields
        if kind == "step":
            return f"ProfilerStep#{place.step}" if self._is_kineto else f"step {place.step}"
        if kind in _CALLS:
            title = title_in(fields)
            return _short(str(fields.get("op") or "collective") + (f" on {title}" if title else ""))
        if kind == "module":
            recompute = " (recompute)" if place.pass_ == "recompute" else ""
            return _short(shown(place.module) + recompute)
        if kind == "capture":
            return f"capture CUDA graph {fields.get('cuda_graph')}"
        return _short(
            f"compile {fields.get('what')}" if kind == "compile" else str(fields.get("phase"))
        )

    def _details(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        if kind == "compile":
            return _known(fields, ("what", "part", "because"))
        if kind not in _CALLS:
            return {}
        details = _known(fields, _OF_COLLECTIVE)
        beneficiary = fields.get("for")
        if isinstance(beneficiary, list) and len(beneficiary) > _MOST_LISTED:
            beneficiary = params_text(beneficiary)
        if beneficiary is not None:
            details["for"] = beneficiary
        details["async"] = fields["async"]
        if fields.get("replayed"):
            details["replayed"] = True
        return details

    # -- instants ----------------------------------------------------------------------------------

    def _instant(self, instant: Instant) -> str:
        self._counts.instants += 1
        event = self._box.event(instant.at)
        place, fields = event.place.to_dict(), event.fields
        text = fields.get("text") or fields.get("reason") or fields.get("what")
        category = instant.kind.label
        name = category
        if text:
            name = str(text) if instant.kind == Kind.NOTE else f"{category}: {text}"
        args = {
            key: value
            for key, value in place.items()
            if key not in ("rank", "thread") and value is not None
        }
        start = f'{{"name":{json.dumps(_short(name))},"cat":"{category}","ph":"i"'
        where = f'"ts":{self._us(instant.t_ns)},{self._tracks[instant.thread, 0]},"s":"t"'
        return f'{start},{where},"args":{_compact(args | fields)}}}'

    # -- arrows ------------------------------------------------------------------------------------

    def _met(self) -> list[CallArrivals | None]:
        """For each slice, the arrivals at that call among the ranks that are drawn."""
        slices, run_timelines = self._timeline.slices, self._run_timelines
        if run_timelines.shown_arrivals is run_timelines.arrivals:
            return [piece.arrivals for piece in slices]
        drawn_arrivals: list[CallArrivals | None] = [None] * len(slices)
        by_stream = grouped(
            (piece.stream, index)
            for index, piece in enumerate(slices)
            if piece.stream is not None and not piece.marks & Mark.CUT_BEGIN
        )
        for stream, indexes in by_stream.items():
            numbers = np.array([self._own[slices[index].at][1] for index in indexes], np.int64)
            for index, arrivals in zip(
                indexes, run_timelines.shown_arrivals.of(stream, numbers), strict=True
            ):
                drawn_arrivals[index] = arrivals
        return drawn_arrivals

    def _arrow(self, piece: Slice, arrivals: CallArrivals) -> str:
        """An arrow from the first arrival over all others to the last; from a send to its recv."""
        self._counts.flows += 1
        rank, stream = self._rank, piece.stream
        phase = "t"
        if rank == arrivals.first_rank:
            phase = "s"
        elif rank == arrivals.last_rank:
            phase = "f"
        if stream is None or not stream.is_message:
            return self._point("collective", phase, piece.begin_ns, piece, arrivals)
        has_waited = (
            arrivals.first_rank == stream.destination
            and arrivals.held_ns > arrivals.last_ns + _LATER_NS["f"]
        )
        if has_waited and rank != stream.source:
            return self._received(piece, stream, arrivals)
        return self._point("message", "s" if has_waited else phase, piece.begin_ns, piece, arrivals)

    def _received(self, piece: Slice, stream: ClockStream, arrivals: CallArrivals) -> str:
        """A recv that waited for its send.

        Perfetto draws arrows from earlier to later starts, so the arrow ends at an extra slice that
        starts when the message can have arrived.
        """
        self._counts.slices += 1
        begin_ns = min(arrivals.last_ns, piece.end_ns)
        when = f'"ts":{self._us(begin_ns)},"dur":{(piece.end_ns - begin_ns) / 1000:.3f}'
        name = f'"name":"from rank {stream.source}","cat":"message","ph":"X"'
        track = self._tracks[piece.thread, piece.lane]
        point = self._point("message", "f", begin_ns, piece, arrivals)
        return f'{{{name},{when},{track},"args":{{"number":{self._own[piece.at][1]}}}}},\n{point}'

    def _point(self, name: str, phase: str, t_ns: int, piece: Slice, arrivals: CallArrivals) -> str:
        end = ',"bp":"e"' if phase == "f" else ""
        where = f'"ts":{self._us(t_ns + _LATER_NS[phase])},{self._tracks[piece.thread, piece.lane]}'
        return (
            f'{{"name":"{name}","cat":"{name}","ph":"{phase}","id":{arrivals.call},{where}{end}}}'
        )


def _known(values: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: values[key] for key in keys if values.get(key) not in (None, [])}


def _process(box: Box) -> int:
    """The process id, as the profiler writes it. HTA takes process 0 as a GPU, so none may be 0."""
    pid = box.meta.get("pid")
    return pid if type(pid) is int and 0 < pid < 1 << 31 else box.rank + 1


def _tid(thread: int, lane: int) -> int:
    """The number of a track: the steps, then the threads, then lanes for overlapping slices."""
    return _TIDS + thread + 1 + lane * (_THREADS + 1)


def _short(text: str) -> str:
    return text if len(text) <= _MOST_NAME else text[: _MOST_NAME - 1] + "…"


def _compact(value: Any) -> str:
    """JSON without spaces: HTA must find a rank only in the head."""
    return json_text(value, separators=(",", ":"))
