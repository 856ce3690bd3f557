"""Turns what the senses notice into records: adds the place, the step and the numbers, and writes
them down.

Takes calls from the senses, from any thread; gives records to the box. Holds the little that must
be known between events: the step, the rank, the last collectives.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from torchwhere.blackbox.file_format import (
    CALL_MASK,
    COUNTER_COUNT,
    COUNTER_RECORD,
    COUNTER_TIME,
    CURSOR_LINE,
    CURSOR_PHASE,
    CURSOR_RECORD,
    CURSOR_STEP,
    CURSOR_THREAD,
    CURSOR_TIME,
    FLAG_INFERRED,
    FLAG_UNKNOWN,
    MODULE_SHIFT,
    NO_CALL,
    PASS_SHIFT,
    EntryType,
)
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.errors import described
from torchwhere.core.events import TEXT_FIELD, Kind
from torchwhere.core.place import Pass, Place
from torchwhere.hooks import _torch, compilation, compiled_graphs, python_stack
from torchwhere.hooks.collectives import IssuedCall
from torchwhere.hooks.ddp import Bucket, Reducers
from torchwhere.hooks.device import DeviceHook, DeviceMark
from torchwhere.hooks.exceptions import NOTE_START
from torchwhere.hooks.fast_path import FastPath, PythonFastPath
from torchwhere.hooks.locate import Locator, PlaceIds
from torchwhere.hooks.phases import PhaseRecorder
from torchwhere.hooks.threads import Track

Tap = Callable[[int, IssuedCall], None]  # the number of the record, and the call
Seen = tuple[int, int]  # the line and the graph that were found there a moment ago

_COLLECTIVE = int(Kind.COLLECTIVE)
_MOST_TEXT = 1 << 14
_CHECK_FILE_EVERY_NS = 1_000_000_000
_LAST_COLLECTIVES = 3  # in the note on an exception


class Recorder:
    """Writes events with their places."""

    def __init__(self, box: BoxWriter, locator: Locator, *, rank: int, device: DeviceHook) -> None:
        self.box = box
        self.locator = locator
        self.rank = rank
        self._counter = box.counter
        self._check_file_at = 0
        self._step_is_users = False
        self._native = box.native
        self._device = device
        self.reducers = Reducers(locator.names, box.native)
        self.phases = PhaseRecorder(box, locator, rank=rank)
        # number of the record, op, index, group
        self._last: deque[tuple[int, str, int, str]] = deque(maxlen=_LAST_COLLECTIVES)
        # op and group of the reductions that the native part has learned
        self._labels: list[tuple[str, str]] = []
        self._aims: dict[str, int] = {}
        self._compiling = 0  # compilations under way
        self._taps: list[Tap] = []
        self._here = locator.threads.here
        self._node = _torch.private("current_node") or (lambda: None)
        self.fast_path: FastPath = PythonFastPath()

    @property
    def step(self) -> int:
        number: int = self._counter.step
        return number

    @property
    def step_is_users(self) -> bool:
        """The user counts steps; optimizers no longer do."""
        return self._step_is_users

    @step_is_users.setter
    def step_is_users(self, whether: bool) -> None:
        if whether != self._step_is_users:
            self._step_is_users = whether
            self.fast_path.wake()

    @property
    def taps(self) -> list[Tap]:
        """Told of every collective, once its record is written."""
        return self._taps

    @taps.setter
    def taps(self, taps: list[Tap]) -> None:
        self._taps = taps
        if self._native is not None:
            self._native.defer_to_python(bool(taps))

    # -- threads -----------------------------------------------------------------------------------

    def meet_thread(self, track: Track) -> None:
        track.cursor = self.box.cursor_at(track.slot)
        self.box.intern(EntryType.THREAD, f"{track.number}\t{track.name}")
        words, cursor = self.box.words, track.cursor
        # the slot may have been another thread's
        for word in (CURSOR_LINE, CURSOR_RECORD, CURSOR_PHASE):
            words[cursor + word] = 0
        words[cursor + CURSOR_THREAD] = track.number + 1
        words[cursor + CURSOR_STEP] = self.step
        words[cursor + CURSOR_TIME] = time.monotonic_ns()
        if self.box.native_box is not None:
            track.is_here(self.box.native_box)
            if track.name == "MainThread":
                self.box.native_box.main_cursor = cursor

    def move(self, track: Track, word: int) -> None:
        """A thread went from one pass to another, outside any module."""
        if self.box.native_box is not None and track.move(self.box.native_box, word):
            return
        track.top = word
        self.box.words[track.cursor] = word
        self.box.words[track.cursor + CURSOR_TIME] = time.monotonic_ns()

    # -- events ------------------------------------------------------------------------------------

    def event(
        self,
        kind: Kind,
        *,
        what: int = 0,
        text: dict[str, Any] | None = None,
        frame: FrameType | None = None,
    ) -> int:
        """One event at the place of the calling thread."""
        track, spot, line, graph = self._look_around(frame or python_stack.caller(1))
        return self._write(
            kind, track, spot, line=line, graph=graph, what=what, more=self._text(text)
        )

    def _look_around(self, frame: FrameType | None) -> tuple[Track, PlaceIds, int, int]:
        """Track, spot, line and graph of the calling thread."""
        track = self._here()
        return track, self.locator.spot(track), *self._see(frame)

    def _see(self, frame: FrameType | None) -> Seen:
        looked = python_stack.read(frame)
        graph = self._graph_id(looked.graph) if looked.graph is not None or self._compiling else 0
        return self.locator.line_id(looked.file, looked.line), graph

    def _write(
        self,
        kind: Kind,
        track: Track,
        spot: PlaceIds,
        *,
        line: int,
        graph: int = 0,
        what: int = 0,
        more: int = 0,
    ) -> int:
        number = self.box.record(
            *(
                kind,
                time.monotonic_ns(),
                spot.pass_,
                spot.flags,
                track.number,
                self._counter.step,
                spot.module,
                spot.call,
            ),
            *(line, graph, what, 0, spot.param, more),
        )
        self.box.words[track.cursor + CURSOR_RECORD] = number
        return number

    def _text(self, fields: dict[str, Any] | None) -> int:
        if fields is None:
            return 0
        text = json.dumps(fields, default=str)
        # a text is kept whole or not at all: shorten it here, where its parts are known
        if len(text) > _MOST_TEXT:
            short = {key: str(value)[: _MOST_TEXT // 8] for key, value in fields.items()}
            text = json.dumps(dict(list(short.items())[:4]) | {"cut": True})
        return self.box.text(text)

    def _graph_id(self, graph: str | None) -> int:
        graph = graph or compilation.being_compiled()
        return self.box.intern(EntryType.GRAPH, graph) if graph else 0

    def note(self, text: str, fields: dict[str, Any], *, frame: FrameType | None) -> None:
        self.event(Kind.NOTE, text={TEXT_FIELD[Kind.NOTE]: text, **fields}, frame=frame)

    def compile_begins(self, compile_id: str, known: dict[str, str]) -> None:
        self._compiling += 1
        self.fast_path.wake()
        self.event(
            Kind.COMPILE_BEGIN, what=self.box.intern(EntryType.GRAPH, compile_id), text=known
        )

    def compile_ends(self, compile_id: str) -> None:
        self._compiling = max(0, self._compiling - 1)
        self.event(Kind.COMPILE_END, what=self.box.intern(EntryType.GRAPH, compile_id))

    def group_begins(self, op: str, number: int, ranks: list[int] | None) -> None:
        """A process group is about to be made: from here on this rank waits for the others."""
        self.event(
            Kind.GROUP_BEGIN,
            text={TEXT_FIELD[Kind.GROUP_BEGIN]: op, "number": number, "ranks": ranks},
        )

    def group_ends(self) -> None:
        self.event(Kind.GROUP_END)

    # -- steps -------------------------------------------------------------------------------------

    def optimizer_stepped(self, name: str) -> Seen:
        frame = python_stack.caller(1)
        track, (line, graph) = self._here(), self._see(frame)
        spot, entry = self.locator.spot_in_optimizer(track), self.box.intern(EntryType.PHASE, name)
        self._write(Kind.OPTIMIZER, track, spot, line=line, graph=graph, what=entry)
        if self._native is not None:
            self.fast_path.learn_line(frame, line)
            self.fast_path.learn_name(name, entry)
        return line, graph

    def set_step(self, step: int, *, seen: Seen | None = None) -> None:
        """The step is over, another begins. At one place: a look around takes longer than both
        records."""
        if seen is None:
            frame = python_stack.caller(1)
            track, spot, line, graph = self._look_around(frame)
            if self._native is not None:
                self.fast_path.learn_line(frame, line)
        else:
            track, (line, graph) = self._here(), seen
            spot = self.locator.spot(track)
        self._write(Kind.STEP_END, track, spot, line=line, graph=graph)
        self._counter.step = step
        self.box.words[track.cursor + CURSOR_STEP] = step
        self._write(Kind.STEP_BEGIN, track, spot, line=line, graph=graph)
        self.phases.step_begins()
        now = time.monotonic_ns()
        if now >= self._check_file_at:
            self._check_file_at = now + _CHECK_FILE_EVERY_NS
            self.box.check_file()

    def rest(self, looked_at: tuple[Any, ...]) -> None:
        """All is done that there is to do between steps: have the native part go from step to step,
        if that can be."""
        if not self._compiling:
            self.fast_path.rest(self._check_file_at, not self.step_is_users, looked_at)

    def begin_step(self) -> None:
        """The first one."""
        self.box.words[self._here().cursor + CURSOR_STEP] = self.step
        self.event(Kind.STEP_BEGIN)
        self.phases.step_begins()

    # -- collectives -------------------------------------------------------------------------------

    def collective(self, call: IssuedCall) -> DeviceMark | None:
        locator, looked = self.locator, call.stack
        track = self._here()
        track.may_issue = True
        spot = (
            self._spot_of_bucket(call.bucket, track)
            if call.bucket is not None
            else locator.spot(track)
        )
        if spot.flags & FLAG_UNKNOWN and looked.unit is not None:
            spot = self._spot_of_unit(looked.unit, spot)
        graph = looked.graph
        if graph is None and spot.pass_ == Pass.BACKWARD and not spot.param:
            graph = compiled_graphs.backward_graph(self._node())
        line = locator.line_id(looked.file, looked.line) or self._line_of_backward(track, spot)
        graph_id = self._graph_id(graph) if graph is not None or self._compiling else 0
        return self._issued(call, track, spot, line, graph_id, self._beneficiary(call))

    def bucket(self, bucket: Bucket) -> DeviceMark | None:
        """DDP reduces a bucket that it has reduced before: only the number is new. About half the
        cost of `collective`."""
        track = self._here()
        spot = bucket.spot or self._spot_of_bucket(bucket, track)
        mark = self._issued(
            bucket.call, track, spot, self._line_of_backward(track, spot), 0, bucket.entry
        )
        if self._native is not None and bucket.spot is not None:
            self._teach(bucket, bucket.call, bucket.spot)
        return mark

    def _teach(self, bucket: Bucket, call: IssuedCall, spot: PlaceIds) -> None:
        """Have the native part record the next reduction that is like the one that runs."""
        label = (call.op.name, call.group.desc)
        if label not in self._labels:
            self._labels.append(label)
        stream = call.stream
        bucket.progress.learn(
            *(
                bucket.index,
                self._labels.index(label),
                stream.numbers,
                -1 if stream.counter is None else stream.counter,
            ),
            *(_COLLECTIVE, spot.pass_, spot.flags | call.flags, spot.module, spot.call & CALL_MASK),
            *(call.signature, bucket.entry, spot.param),
        )

    def _last_collectives(self) -> list[tuple[int, str, int, str]]:
        last = list(self._last)
        if self._native is not None:  # those that it has recorded by itself
            last += [
                (number, self._labels[at][0], index, self._labels[at][1])
                for number, index, at in self._native.recent()
            ]
        return sorted(last)[-_LAST_COLLECTIVES:]

    def _spot_of_bucket(self, bucket: Bucket, track: Track) -> PlaceIds:
        param, bucket.param = bucket.param, None
        if param is None:  # launched at the end of the backward, by no parameter
            return self.locator.spot(track)
        spot = bucket.spot = self.locator.spot_of_param(param)
        return spot

    def _spot_of_unit(self, unit: torch.nn.Module, spot: PlaceIds) -> PlaceIds:
        """FSDP1 reduces where a gradient of its flat parameter is ready; nobody but the unit knows
        that parameter."""
        names = self.locator.names.module_names(unit)
        return (
            PlaceIds(spot.pass_, self.locator.module_id(names[0]), NO_CALL, 0, FLAG_INFERRED)
            if names
            else spot
        )

    def _issued(
        self,
        call: IssuedCall,
        track: Track,
        spot: PlaceIds,
        line: int,
        graph: int,
        beneficiary: int,
    ) -> DeviceMark | None:
        """Write it down and count it. Cold Python is slow Python: this touches as little as it
        can. Returns the mark to set after the launch, if any."""
        stream, t_ns, words = call.stream, time.monotonic_ns(), self.box.words
        index = next(stream.numbers)
        # fmt: off
        number = self.box.record(  # plain positions: unpacking two tuples takes 0.4 us more
            _COLLECTIVE, t_ns, spot.pass_, spot.flags | call.flags, track.number,
            self._counter.step, spot.module, spot.call, line, graph, call.signature, beneficiary,
            spot.param, index,
        )
        # fmt: on
        counter, cursor = stream.counter, track.cursor
        if counter is not None:
            words[counter + COUNTER_COUNT] = index + 1
            words[counter + COUNTER_TIME] = t_ns
            words[counter + COUNTER_RECORD] = number
        words[cursor + CURSOR_RECORD] = number
        # where nothing but a collective says where it is: show it to those who read the cursor
        if spot.pass_ == Pass.BACKWARD:
            words[cursor] = (
                spot.module << MODULE_SHIFT | spot.pass_ << PASS_SHIFT | spot.call & CALL_MASK
            )
            words[cursor + CURSOR_TIME] = t_ns
        self._last.append((number, call.op.name, index, call.group.desc))
        for tap in self._taps:
            tap(number, call)
        if call.device is None or not self._device.is_on:
            return None
        return self._mark(call, spot, number, index, t_ns)

    def _mark(
        self, call: IssuedCall, spot: PlaceIds, number: int, index: int, t_ns: int
    ) -> DeviceMark | None:
        """Mark a collective on its device."""
        device = call.device
        assert device is not None
        mark = DeviceMark(
            self._device.type_number(device),
            device.index or 0,
            number,
            -1 if call.stream.counter is None else call.stream.counter,
            index + 1,
            spot.module << MODULE_SHIFT | spot.pass_ << PASS_SHIFT | spot.call & CALL_MASK,
            self._counter.step,
            t_ns,
        )
        self._device.reach(mark)
        return mark if call.is_on_current_stream else None

    def _line_of_backward(self, track: Track, spot: PlaceIds) -> int:
        """Out of the engine there is no Python stack of use: the line that called backward led
        here."""
        if spot.pass_ != Pass.BACKWARD:
            return 0
        words, main = self.box.words, self.locator.threads.main
        line = words[track.cursor + CURSOR_LINE]
        return line or (words[main.cursor + CURSOR_LINE] if main is not None else 0)

    def _beneficiary(self, call: IssuedCall) -> int:
        looked = call.stack
        if looked.unit is not None:
            names = self.locator.names.module_names(looked.unit)
            return self._aim_id(names[0]) if names else 0
        if looked.variables is not None:
            return self._aim_of_params(_params_in(looked.variables))
        bucket = call.bucket
        if bucket is None:
            return 0
        bucket.entry = bucket.entry or self.box.intern(
            EntryType.BENEFICIARY, json.dumps(bucket.names)
        )
        return bucket.entry

    def _aim_id(self, unit: str) -> int:
        known = self._aims.get(unit)
        if known is None:
            known = self._aims[unit] = self.box.intern(EntryType.BENEFICIARY, json.dumps(unit))
        return known

    def _aim_of_params(self, params: list[torch.Tensor]) -> int:
        names = [found[0] for param in params if (found := self.locator.names.params.of(param))]
        return self.box.intern(EntryType.BENEFICIARY, json.dumps(names)) if names else 0

    # -- exceptions --------------------------------------------------------------------------------

    def exception(
        self, error: BaseException, track: Track, spot: PlaceIds, line: str | None
    ) -> None:
        place = self.locator.place_of_spot(spot, track, rank=self.rank, step=self.step, line=line)
        last = [f"{op} #{number} on {group}" for _, op, number, group in self._last_collectives()]
        error.add_note(
            f"{NOTE_START}{place};"
            f" {'last collectives: ' + ', '.join(last) if last else 'no collective so far'}"
        )
        text = {"text": described(error), "type": type(error).__name__, "last": last}
        line_id = self.box.intern(EntryType.LINE, line) if line else 0
        self._write(Kind.EXCEPTION, track, spot, line=line_id, more=self._text(text))

    def place_of_node(self, node: Any) -> Place:
        """Where an autograd node comes from: the module call that made it, or the parameter it
        accumulates into."""
        track = self._here()
        spot = self.locator.spot_of_node(node, track)
        return self.locator.place_of_spot(spot, track, rank=self.rank, step=self.step, line=None)

    def place(self, frame: FrameType | None) -> Place:
        place = self.locator.place(
            self.locator.threads.here(), frame, rank=self.rank, step=self.step
        )
        graph = place.graph or self._graph_around(frame)
        return place if graph == place.graph else dataclasses.replace(place, graph=graph)

    def _graph_around(self, frame: FrameType | None) -> str | None:
        """The graph that is being compiled here, or that runs here: a compiled backward is known by
        its node alone."""
        if not _torch.is_dynamo_loaded():
            return None
        return (
            compilation.being_compiled()
            or compiled_graphs.backward_graph(self._node())
            or python_stack.graph_around(frame)
        )


def _params_in(variables: dict[str, Any]) -> list[torch.Tensor]:
    """The parameters a frame works on: those of a DDP bucket given to a hook, or a list of them."""
    bucket, params = variables.get("bucket"), variables.get("params")
    if bucket is not None and hasattr(bucket, "parameters"):
        return list(bucket.parameters())
    return (
        [p for p in params if isinstance(p, torch.Tensor)]
        if isinstance(params, (list, tuple))
        else []
    )
