"""A timeline as Chrome's trace events, in JSON: what Perfetto, chrome://tracing and HTA read.

Takes what `diagnose/timeline` found, gives the text piece by piece: nothing is held but one rank at
a time. A rank is a process, its threads are threads. `docs/trace.md` says what is in a trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import NO_CALL, NO_STEP
from torchwhere.core.events import Kind, json_text
from torchwhere.core.place import shown
from torchwhere.core.version import __version__
from torchwhere.diagnose.clocks.arrivals import ClockStream
from torchwhere.diagnose.clocks.call_arrivals import CallArrivals
from torchwhere.diagnose.timeline.load import RunTimelines
from torchwhere.diagnose.timeline.slices import STEPS, Instant, Mark, Slice, Timeline

# beyond all ranks: Perfetto takes a thread whose number is that of its process for the main thread
_TIDS = 2_000_000
_THREADS = 256  # numbers of threads are below this
_OF_PLACE = ("subject", "module", "line", "graph", "beneficiary", "param", "pass", "flags")
# of points at the same time, Perfetto may take the last for the first
_LATER_NS = {"s": 0, "t": 1, "f": 2}
_MOST_NAME = 256
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
)
_CATEGORIES = {
    Kind.START: "start",
    Kind.END: "end",
    Kind.OPTIMIZER: "optimizer",
    Kind.NOTE: "note",
    Kind.EXCEPTION: "exception",
}
# What HTA calls a step, and what kineto calls the rest.
_KINETO = {
    "step": "user_annotation",
    "phase": "user_annotation",
    "module": "python_function",
    "collective": "cpu_op",
}


@dataclass(slots=True)
class TraceCounts:
    """What was written."""

    slices: int = 0
    instants: int = 0
    flows: int = 0
    counters: int = 0
    unfinished: int = 0
    ranks: list[int] = field(default_factory=list)
    has_modules: bool = False

    @property
    def events(self) -> int:
        return self.slices + self.instants + self.flows + self.counters

    def to_dict(self) -> dict[str, Any]:
        found = {
            name: getattr(self, name)
            for name in ("events", "slices", "instants", "flows", "counters", "unfinished")
        }
        return found | {"ranks": self.ranks}


def head(box: Box, found: RunTimelines) -> str:
    """The beginning of a file. HTA takes the first `"rank": N` in it, with the space, for the rank
    of the trace."""
    backend = next(
        (str(group["backend"]) for group in box.groups().values() if group.get("backend")), ""
    )
    begin_ns, clocks = found.begin_ns, found.clocks.to_dict()
    info = {"backend": backend, "rank": box.rank, "world_size": found.run.world_size}
    return (
        f'{{"schemaVersion": 1, "distributedInfo": {json.dumps(info)},\n"displayTimeUnit": "ms",'
        f' "baseTimeNanoseconds": {begin_ns}, "otherData":'
        f' {_compact({"torchwhere": __version__, "clocks": clocks})},\n"traceEvents": [\n'
    )


TAIL = "\n]}\n"


def joined(events: Iterable[str], *, is_first: bool) -> Iterator[str]:
    """Events as they stand in a list, several at a time: a file is written in large pieces."""
    piece: list[str] = []
    for event in events:
        piece.append(event)
        if len(piece) == 4096:
            yield ("" if is_first else ",\n") + ",\n".join(piece)
            is_first, piece = False, []
    if piece:
        yield ("" if is_first else ",\n") + ",\n".join(piece)


class RankWriter:
    """The events of one rank."""

    def __init__(
        self,
        box: Box,
        found: Timeline,
        survey: RunTimelines,
        *,
        counter: TraceCounts,
        is_kineto: bool = False,
    ) -> None:
        self._box, self._found, self._survey, self._tally = box, found, survey, counter
        self._begin_ns, self._rank, self._is_kineto = survey.begin_ns, box.rank, is_kineto
        self._pid = _process(box) if is_kineto else box.rank
        self._said: dict[tuple[Any, ...], tuple[str, str]] = {}
        rows = box.records
        self._places = list(zip(*(rows[name].tolist() for name in _OF_PLACE), strict=True))
        self._own = list(
            zip(*(rows[name].tolist() for name in ("step", "extra", "call")), strict=True)
        )

        tracks = {(each.thread, each.lane) for each in found.slices} | {
            (each.thread, 0) for each in found.instants
        }
        self._tracks = {track: f'"pid":{self._pid},"tid":{_tid(*track)}' for track in tracks}

    def events(self) -> Iterator[str]:
        self._tally.ranks.append(self._box.rank)
        self._tally.has_modules |= self._found.has_modules
        yield from self._names()
        slices = self._found.slices
        self._tally.slices += len(slices)
        for each, arrivals in zip(slices, self._met(), strict=True):
            if arrivals is not None and arrivals.arrived > 1:
                yield f"{self._slice(each)},\n{self._arrow(each, arrivals)}"
            else:
                yield self._slice(each)
        for instant in self._found.instants:
            yield self._instant(instant)
        for t_ns, size in self._found.step_bytes:
            self._tally.counters += 1
            name = '"name":"bytes issued in the step","ph":"C"'
            yield f'{{{name},"ts":{self._us(t_ns)},"pid":{self._pid},"args":{{"bytes":{size}}}}}'

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
            tid = _tid(thread, lane)
            yield self._metadata(
                "thread_name", {"name": f"{name} ({lane + 1})" if lane else name}, tid
            )
            yield self._metadata("thread_sort_index", {"sort_index": tid}, tid)

    def _metadata(self, name: str, args: dict[str, Any], tid: int | None = None) -> str:
        of = "" if tid is None else f'"tid":{tid},'
        return f'{{"name":"{name}","ph":"M","pid":{self._pid},{of}"args":{_compact(args)}}}'

    # -- slices ------------------------------------------------------------------------------------

    def _slice(self, each: Slice) -> str:
        begin_ns, end_ns, kind, at, thread, marks, _, arrivals, lane = each
        start, args = self._said.get((kind, self._places[at])) or self._words(kind, at)
        step, more, call = self._own[at]
        if kind == "collective":
            args = f'{args},"number":{more}'
        if arrivals is not None:
            late_us = (begin_ns - arrivals.first_ns) / 1000
            args = (
                f'{args},"arrived":{arrivals.arrived},"last":{arrivals.last_rank}'
                f',"after_first_us":{late_us:.3f}'
            )
        step_said = f',"step":{step}' if step != NO_STEP else ""
        call_text = f',"call":{call}' if call != NO_CALL and self._places[at][1] else ""
        when = (
            f'"ts":{(begin_ns - self._begin_ns) / 1000:.3f},"dur":{(end_ns - begin_ns) / 1000:.3f}'
        )
        marked = (
            ',"end":"estimated"'
            if marks == Mark.ESTIMATED
            else self._marked(marks)
            if marks
            else ""
        )
        track = self._tracks[thread, lane]
        all_args = f"{args}{step_said}{call_text}{marked}"
        return f'{start}"ph":"X",{when},{track},"args":{{{all_args}}}}}'

    def _marked(self, marks: int) -> str:
        said = ""
        if marks & Mark.UNFINISHED:
            self._tally.unfinished += 1
            said += ',"unfinished":true'
        if marks & Mark.EARLY:
            said += ',"began":"before the ring does"'
        if marks & Mark.ESTIMATED:
            said += ',"end":"estimated"'
        return said + (',"cut":true' if marks & (Mark.CUT_BEGIN | Mark.CUT_END) else "")

    def _words(self, kind: str, at: int) -> tuple[str, str]:
        """The beginning of an event and of its arguments: the same for all that happen at one
        place, but for steps."""
        event = self._box.event(at)
        place, fields = event.place.to_dict(), event.fields
        args = {
            k: place[k]
            for k in ("pass", "module", "line", "graph", "param")
            if place[k] is not None
        }
        if place["certainty"] != "exact":
            args["certainty"] = place["certainty"]
        args |= self._described(kind, fields)
        cat = _KINETO.get(kind, "user_annotation") if self._is_kineto else kind
        name = self._title(kind, event.place.step, fields, event.place.module, event.place.pass_)
        known = f'{{"name":{json.dumps(name)},"cat":"{cat}",', _compact(args)[1:-1]
        if kind != "step":
            self._said[kind, self._places[at]] = known
        return known

    def _title(
        self, kind: str, step: int | None, fields: dict[str, Any], module: str | None, pass_: str
    ) -> str:
        if kind == "step":
            return f"ProfilerStep#{step}" if self._is_kineto else f"step {step}"
        if kind == "collective":
            title = fields.get("mesh_dim") or fields.get("group_desc") or fields.get("group")
            return _short(str(fields.get("op") or "collective") + (f" on {title}" if title else ""))
        if kind == "module":
            return _short(shown(module) + (" (recompute)" if pass_ == "recompute" else ""))
        return _short(
            f"compile {fields.get('what')}" if kind == "compile" else str(fields.get("phase"))
        )

    def _described(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        if kind == "compile":
            return {k: fields[k] for k in ("what", "part", "because") if fields.get(k) is not None}
        if kind != "collective":
            return {}
        said = {k: fields[k] for k in _OF_COLLECTIVE if fields.get(k) not in (None, [])}
        said |= {
            k: fields[k]
            for k in ("group_desc", "mesh_dim", "group_size")
            if fields.get(k) is not None
        }
        beneficiary = fields.get("for")
        if isinstance(beneficiary, list) and len(beneficiary) > _MOST_LISTED:
            beneficiary = f"{beneficiary[0]} .. {beneficiary[-1]} ({len(beneficiary)} parameters)"
        return (
            said
            | ({"for": beneficiary} if beneficiary is not None else {})
            | {"async": fields["async"]}
        )

    # -- instants ----------------------------------------------------------------------------------

    def _instant(self, each: Instant) -> str:
        self._tally.instants += 1
        event = self._box.event(each.at)
        place, fields = event.place.to_dict(), event.fields
        text = fields.get("text") or fields.get("reason") or fields.get("what")
        category = _CATEGORIES[each.kind]
        name = (
            str(text)
            if each.kind == Kind.NOTE and text
            else f"{category}: {text}"
            if text
            else category
        )
        args = {
            k: v for k, v in place.items() if k not in ("rank", "thread") and v is not None
        } | fields
        where = f'"ts":{self._us(each.t_ns)},{self._tracks[each.thread, 0]},"s":"t"'
        named = f'"name":{json.dumps(_short(name))},"cat":"{category}"'
        return f'{{{named},"ph":"i",{where},"args":{_compact(args)}}}'

    # -- arrows ------------------------------------------------------------------------------------

    def _met(self) -> list[CallArrivals | None]:
        """For each slice, who of those that are drawn came to that call."""
        slices, survey = self._found.slices, self._survey
        if survey.shown_arrivals is survey.arrivals:
            return [each.arrivals for each in slices]
        found: list[CallArrivals | None] = [None] * len(slices)
        by_stream: dict[ClockStream, list[int]] = {}
        for index, each in enumerate(slices):
            if each.stream is not None and not each.marks & Mark.CUT_BEGIN:
                by_stream.setdefault(each.stream, []).append(index)
        for stream, indexes in by_stream.items():
            numbers = np.array([self._own[slices[index].at][1] for index in indexes], np.int64)
            for index, arrivals in zip(
                indexes, survey.shown_arrivals.of(stream, numbers), strict=True
            ):
                found[index] = arrivals
        return found

    def _arrow(self, each: Slice, arrivals: CallArrivals) -> str:
        """From who came first, over all others, to who came last; from a send to its recv."""
        self._tally.flows += 1
        rank, stream = self._rank, each.stream
        phase = "s" if rank == arrivals.first_rank else "f" if rank == arrivals.last_rank else "t"
        if stream is None or not stream.is_message:
            return self._point("collective", phase, each.begin_ns, each, arrivals)
        if (
            arrivals.first_rank != stream.destination
            or arrivals.held_ns <= arrivals.last_ns + _LATER_NS["f"]
        ):
            return self._point("message", phase, each.begin_ns, each, arrivals)
        if rank == stream.source:
            return self._point("message", "s", each.begin_ns, each, arrivals)
        return self._received(each, stream, arrivals)

    def _received(self, each: Slice, stream: ClockStream, arrivals: CallArrivals) -> str:
        """A recv that has waited for its send. Perfetto draws from what began first to what began
        later: the arrow ends at a slice of its own, from when the message can have come."""
        self._tally.slices += 1
        begin_ns = min(arrivals.last_ns, each.end_ns)
        when = f'"ts":{self._us(begin_ns)},"dur":{(each.end_ns - begin_ns) / 1000:.3f}'
        name = f'"name":"from rank {stream.source}","cat":"message","ph":"X"'
        track = self._tracks[each.thread, each.lane]
        point = self._point("message", "f", begin_ns, each, arrivals)
        return f'{{{name},{when},{track},"args":{{"number":{self._own[each.at][1]}}}}},\n{point}'

    def _point(self, name: str, phase: str, t_ns: int, each: Slice, arrivals: CallArrivals) -> str:
        end = ',"bp":"e"' if phase == "f" else ""
        t_us = (t_ns + _LATER_NS[phase] - self._begin_ns) / 1000
        where = f'"ts":{t_us:.3f},{self._tracks[each.thread, each.lane]}'
        return (
            f'{{"name":"{name}","cat":"{name}","ph":"{phase}","id":{arrivals.call},{where}{end}}}'
        )


def _process(box: Box) -> int:
    """The number of the process, as the profiler has it. HTA takes all of a process 0 for a GPU's:
    no rank may be one."""
    pid = box.meta.get("pid")
    return pid if type(pid) is int and 0 < pid < 1 << 31 else box.rank + 1


def _tid(thread: int, lane: int) -> int:
    """The number of a track: the steps, then the threads, then what lies across others."""
    return _TIDS + thread + 1 + lane * (_THREADS + 1)


def _short(text: str) -> str:
    return text if len(text) <= _MOST_NAME else text[: _MOST_NAME - 1] + "…"


def _compact(value: Any) -> str:
    """As JSON, without a space: only the head has a rank that HTA finds."""
    return json_text(value, separators=(",", ":"))
