"""Turns what the senses notice into records: adds the place, the step and the numbers, and writes them down.

Takes calls from the senses, from any thread; gives records to the box. Holds the little that must be known between events: the
step, the rank, the last collectives.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from torchwhere.blackbox.layout import (
    CALL_MASK,
    CURSOR_LINE,
    CURSOR_PHASE,
    CURSOR_RECORD,
    CURSOR_STEP,
    CURSOR_THREAD,
    CURSOR_TIME,
    MODULE_SHIFT,
    PASS_SHIFT,
    TALLY_COUNT,
    TALLY_RECORD,
    TALLY_TIME,
    Sort,
)
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.errors import described
from torchwhere.events import TEXT_FIELD, Kind
from torchwhere.place import Pass, Place
from torchwhere.sense import _torch, compilation, stack
from torchwhere.sense.collectives import Call
from torchwhere.sense.ddp import Reducers
from torchwhere.sense.exceptions import NOTE_START
from torchwhere.sense.locate import Locator, Spot
from torchwhere.sense.tracks import Track

Tap = Callable[[int, Call], None]  # the number of the record, and the call

_COLLECTIVE = int(Kind.COLLECTIVE)
_MOST_TEXT = 1 << 14
_LAST_COLLECTIVES = 3  # in the note on an exception


class Recorder:
    """Writes events with their places."""

    def __init__(self, box: BoxWriter, locator: Locator, *, rank: int) -> None:
        self.box = box
        self.locator = locator
        self.rank = rank
        self.step = 0
        self.step_is_users = False  # the user counts steps; optimizers no longer do
        self.reducers = Reducers(locator.names)
        self._last: deque[tuple[str, int, str]] = deque(maxlen=_LAST_COLLECTIVES)
        self._aims: dict[str, int] = {}
        self._compiling = 0  # compilations under way
        self.taps: list[Tap] = []  # told of every collective, once its record is written
        self._here = locator.threads.here
        self._node = _torch.private("current_node") or (lambda: None)

    # -- threads -----------------------------------------------------------------------------------------------------

    def meet_thread(self, track: Track) -> None:
        track.cursor = self.box.cursor_at(track.slot)
        self.box.intern(Sort.THREAD, f"{track.number}\t{track.name}")
        words, cursor = self.box.words, track.cursor
        for word in (CURSOR_LINE, CURSOR_RECORD, CURSOR_PHASE):  # the slot may have been another thread's
            words[cursor + word] = 0
        words[cursor + CURSOR_THREAD] = track.number + 1
        words[cursor + CURSOR_STEP] = self.step
        words[cursor + CURSOR_TIME] = time.monotonic_ns()

    def move(self, track: Track, word: int) -> None:
        """A thread went from one pass to another, outside any module."""
        track.top = word
        self.box.words[track.cursor] = word
        self.box.words[track.cursor + CURSOR_TIME] = time.monotonic_ns()

    # -- events ------------------------------------------------------------------------------------------------------

    def event(self, kind: Kind, *, what: int = 0, text: dict[str, Any] | None = None, frame: FrameType | None = None) -> int:
        """One event at the place of the calling thread."""
        track = self.locator.threads.here()
        spot, looked = self.locator.spot(track), stack.read(frame or stack.caller(1))
        return self._write(
            kind,
            track,
            spot,
            line=self.locator.line_id(looked.file, looked.line),
            graph=self._graph_id(looked.graph),
            what=what,
            more=self._text(text),
        )

    def _write(self, kind: Kind, track: Track, spot: Spot, *, line: int, graph: int = 0, what: int = 0, more: int = 0) -> int:
        number = self.box.record(
            *(kind, time.monotonic_ns(), spot.pass_, spot.flags, track.number, self.step, spot.module, spot.call),
            *(line, graph, what, 0, spot.param, more),
        )
        self.box.words[track.cursor + CURSOR_RECORD] = number
        return number

    def _text(self, fields: dict[str, Any] | None) -> int:
        if fields is None:
            return 0
        text = json.dumps(fields, default=str)
        if len(text) > _MOST_TEXT:  # a text is kept whole or not at all: shorten it here, where its parts are known
            short = {key: str(value)[: _MOST_TEXT // 8] for key, value in fields.items()}
            text = json.dumps(dict(list(short.items())[:4]) | {"cut": True})
        return self.box.text(text)

    def _graph_id(self, graph: str | None) -> int:
        graph = graph or compilation.being_compiled()
        return self.box.intern(Sort.GRAPH, graph) if graph else 0

    def note(self, text: str, fields: dict[str, Any], *, frame: FrameType | None) -> None:
        self.event(Kind.NOTE, text={TEXT_FIELD[Kind.NOTE]: text, **fields}, frame=frame)

    def compile_begins(self, compile_id: str) -> None:
        self._compiling += 1
        self.event(Kind.COMPILE_BEGIN, what=self.box.intern(Sort.GRAPH, compile_id))

    def compile_ends(self, compile_id: str) -> None:
        self._compiling = max(0, self._compiling - 1)
        self.event(Kind.COMPILE_END, what=self.box.intern(Sort.GRAPH, compile_id))

    # -- steps -------------------------------------------------------------------------------------------------------

    def optimizer_stepped(self, name: str) -> None:
        self.event(Kind.OPTIMIZER, what=self.box.intern(Sort.PHASE, name))

    def set_step(self, step: int) -> None:
        """The step is over, another begins."""
        self.event(Kind.STEP_END)
        self.step = step
        self.begin_step()

    def begin_step(self) -> None:
        track = self.locator.threads.here()
        self.box.words[track.cursor + CURSOR_STEP] = self.step
        self.event(Kind.STEP_BEGIN)
        self.box.check_file()

    # -- phases ------------------------------------------------------------------------------------------------------

    def phase_begins(self, name: str, *, frame: FrameType | None) -> None:
        track = self.locator.threads.here()
        phase = self.box.intern(Sort.PHASE, name)
        track.phases.append(phase)
        self.box.words[track.cursor + CURSOR_PHASE] = phase
        self.event(Kind.PHASE_BEGIN, what=phase, frame=frame)

    def phase_ends(self, name: str, *, frame: FrameType | None) -> None:
        track = self.locator.threads.here()
        phase = self.box.intern(Sort.PHASE, name)
        self.event(Kind.PHASE_END, what=phase, frame=frame)
        if phase in track.phases:  # a phase that an exception cut short ends here too
            del track.phases[len(track.phases) - 1 - track.phases[::-1].index(phase) :]
        self.box.words[track.cursor + CURSOR_PHASE] = track.phases[-1] if track.phases else 0

    # -- collectives -------------------------------------------------------------------------------------------------

    def collective(self, call: Call) -> None:
        box, locator, looked = self.box, self.locator, call.stack
        track = self._here()
        completed_by = call.bucket.completed_by if call.bucket is not None else None
        spot = locator.spot(track) if completed_by is None else locator.spot_of_param(completed_by)
        graph = looked.graph
        if graph is None and spot.pass_ == Pass.BACKWARD and not spot.param:
            graph = compilation.backward_graph(self._node())
        line = locator.line_id(looked.file, looked.line) or self._line_of_backward(spot)
        graph_id = self._graph_id(graph) if graph is not None or self._compiling else 0
        aim, t_ns = self._aim(call), time.monotonic_ns()
        # fmt: off
        number = box.record(  # plain positions: unpacking two tuples takes 0.4 us more
            _COLLECTIVE, t_ns, spot.pass_, spot.flags | call.flags, track.number, self.step, spot.module, spot.call,
            line, graph_id, call.signature, aim, spot.param, call.number,
        )
        # fmt: on
        words, tally = box.words, call.stream.tally
        if tally is not None:
            words[tally + TALLY_COUNT] = call.number + 1
            words[tally + TALLY_TIME] = t_ns
            words[tally + TALLY_RECORD] = number
        words[track.cursor + CURSOR_RECORD] = number
        if spot.pass_ == Pass.BACKWARD:
            self._show(track, spot)
        self._last.append((call.op.name, call.number, call.group.desc))
        for tap in self.taps:
            tap(number, call)

    def _line_of_backward(self, spot: Spot) -> int:
        """On a device thread there is no Python stack: the line that called backward led here."""
        if spot.pass_ != Pass.BACKWARD:
            return 0
        main = self.locator.threads.main
        return int(self.box.words[main.cursor + CURSOR_LINE]) if main is not None else 0

    def _show(self, track: Track, spot: Spot) -> None:
        """In backward nothing but a collective says where it is: show it to those who read the cursor."""
        word = spot.module << MODULE_SHIFT | spot.pass_ << PASS_SHIFT | spot.call & CALL_MASK
        self.box.words[track.cursor] = word
        self.box.words[track.cursor + CURSOR_TIME] = time.monotonic_ns()

    def _aim(self, call: Call) -> int:
        looked = call.stack
        if looked.unit is not None:
            names = self.locator.names.module_names(looked.unit)
            return self._aim_id(names[0]) if names else 0
        if looked.variables is not None:
            return self._aim_of_params(_params_in(looked.variables))
        bucket = call.bucket
        if bucket is None:
            return 0
        bucket.entry = bucket.entry or self.box.intern(Sort.AIM, json.dumps(bucket.names))
        return bucket.entry

    def _aim_id(self, unit: str) -> int:
        known = self._aims.get(unit)
        if known is None:
            known = self._aims[unit] = self.box.intern(Sort.AIM, json.dumps(unit))
        return known

    def _aim_of_params(self, params: list[torch.Tensor]) -> int:
        names = [found[0] for param in params if (found := self.locator.names.params.get(id(param)))]
        return self.box.intern(Sort.AIM, json.dumps(names)) if names else 0

    # -- exceptions --------------------------------------------------------------------------------------------------

    def exception(self, error: BaseException, track: Track, spot: Spot, line: str | None) -> None:
        place = self.locator.place_of_spot(spot, track, rank=self.rank, step=self.step, line=line)
        last = [f"{op} #{number} on {group}" for op, number, group in self._last]
        error.add_note(f"{NOTE_START}{place}; {'last collectives: ' + ', '.join(last) if last else 'no collective so far'}")
        text = {"text": described(error), "type": type(error).__name__, "last": last}
        line_id = self.box.intern(Sort.LINE, line) if line else 0
        self._write(Kind.EXCEPTION, track, spot, line=line_id, more=self._text(text))

    def place(self, frame: FrameType | None) -> Place:
        return self.locator.place(self.locator.threads.here(), frame, rank=self.rank, step=self.step)


def _params_in(variables: dict[str, Any]) -> list[torch.Tensor]:
    """The parameters a frame works on: those of a DDP bucket given to a hook, or a list of them."""
    bucket, params = variables.get("bucket"), variables.get("params")
    if bucket is not None and hasattr(bucket, "parameters"):
        return list(bucket.parameters())
    return [p for p in params if isinstance(p, torch.Tensor)] if isinstance(params, (list, tuple)) else []
