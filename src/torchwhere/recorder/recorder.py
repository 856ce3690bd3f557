"""Turns what the hooks report into records: adds place and step to each event, and writes it.

Takes calls from the hooks, on any thread; writes records to the box. Holds the state that events
share: the step and the rank. `collectives.py` records collectives, `hooks/phases.py` phases.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from torchwhere.blackbox.file_format import (
    CURSOR_LINE,
    CURSOR_PHASE,
    CURSOR_RECORD,
    CURSOR_STEP,
    CURSOR_THREAD,
    CURSOR_TIME,
    FLAG_INFERRED,
    FLAG_UNKNOWN,
    NO_CALL,
    EntryType,
)
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.device_place import DevicePlace
from torchwhere.core.errors import described
from torchwhere.core.events import TEXT_FIELD, Kind
from torchwhere.core.place import Certainty, Pass, Place, line_fields
from torchwhere.hooks import _torch, compilation, compiled_graphs, python_stack
from torchwhere.hooks.exceptions import NOTE_START, is_of_device
from torchwhere.hooks.fast_path import FastPath, PythonFastPath
from torchwhere.hooks.locate import Locator, PlaceIds
from torchwhere.hooks.threads import Track
from torchwhere.recorder.note_text import NoteText, json_text
from torchwhere.recorder.own_device import device_note, own_device_place

EXIT = "exit"  # the reason of a watch that ends with its process
LineAndGraph = tuple[int, int]  # the ids of a line and of the compiled graph that runs there

_CHECK_FILE_EVERY_NS = 1_000_000_000


class Recorder:
    """Writes events with their places."""

    def __init__(
        self,
        box: BoxWriter,
        locator: Locator,
        *,
        rank: int,
        last_collectives: Callable[[], list[str]],
        on_step: Callable[[int, int], None],
        on_device_error: Callable[[str], None],
    ) -> None:
        self.box = box
        self.locator = locator
        self.rank = rank
        self._last_collectives = last_collectives
        self._on_step = on_step
        self._on_device_error = on_device_error
        self._counter = box.counter
        self._native = box.native
        self._check_file_at = 0
        self._step_is_users = False
        self._here = locator.threads.here
        self._node = _torch.getter("current_node")
        self.fast_path: FastPath = PythonFastPath()

    @property
    def step(self) -> int:
        return self._counter.step

    @property
    def step_is_users(self) -> bool:
        """Whether the user counts steps; optimizers then no longer do."""
        return self._step_is_users

    @step_is_users.setter
    def step_is_users(self, whether: bool) -> None:
        if whether != self._step_is_users:
            self._step_is_users = whether
            self.fast_path.wake()

    # -- threads -----------------------------------------------------------------------------------

    def register_thread(self, track: Track) -> None:
        """Give a new thread its cursor in the box."""
        track.cursor = self.box.cursor_at(track.slot)
        self.box.intern(EntryType.THREAD, f"{track.number}\t{track.name}")
        words, cursor = self.box.words, track.cursor
        # another thread may have used this slot before
        for field in (CURSOR_LINE, CURSOR_RECORD, CURSOR_PHASE):
            words[cursor + field] = 0
        words[cursor + CURSOR_THREAD] = track.number + 1
        words[cursor + CURSOR_STEP] = self.step
        words[cursor + CURSOR_TIME] = time.monotonic_ns()
        if self.box.native_box is not None:
            track.is_here(self.box.native_box)
            if track.name == "MainThread":
                self.box.native_box.main_cursor = cursor

    def move(self, track: Track, packed_place: int) -> None:
        """Record that a thread changes from one pass to another, outside any module."""
        if self.box.native_box is not None and track.move(self.box.native_box, packed_place):
            return
        track.top = packed_place
        self.box.words[track.cursor] = packed_place
        self.box.words[track.cursor + CURSOR_TIME] = now = time.monotonic_ns()
        self.box.clock.move_clock(track.cursor, packed_place, now)

    # -- events ------------------------------------------------------------------------------------

    def event(
        self,
        kind: Kind,
        *,
        subject: int = 0,
        text: dict[str, Any] | None = None,
        extra: int = 0,
        frame: FrameType | None = None,
    ) -> int:
        """Record one event at the place of the calling thread.

        Args:
            kind: The kind of the event.
            subject: The id of what the event is about, for example a graph.
            text: Further fields, stored as JSON.
            extra: A number of the event, instead of a text.
            frame: The frame where the search for the user's line begins; by default the caller's.

        Returns:
            The number of the record.
        """
        track = self._here()
        place_ids = self.locator.place_ids(track)
        line, graph = self.line_and_graph(frame or python_stack.caller(1))
        extra = self._text(text) if text is not None else extra
        return self.write(
            kind, track, place_ids, line=line, graph=graph, subject=subject, extra=extra
        )

    def line_and_graph(self, frame: FrameType | None) -> LineAndGraph:
        """Return the ids of the user's line and of the compiled graph that runs there."""
        stack, locator = python_stack.read(frame), self.locator
        has_graph = stack.graph is not None or locator.compiling
        return locator.line_id(stack), locator.graph_id(stack.graph) if has_graph else 0

    def write(
        self,
        kind: Kind,
        track: Track,
        place_ids: PlaceIds,
        *,
        line: int,
        graph: int = 0,
        subject: int = 0,
        extra: int = 0,
        t_ns: int = 0,
    ) -> int:
        """Write a record, by default with the present time. Returns its number."""
        number = self.box.record(
            kind,
            t_ns or time.monotonic_ns(),
            place_ids.pass_,
            place_ids.flags,
            track.number,
            self._counter.step,
            place_ids.module,
            place_ids.call,
            line,
            graph,
            subject,
            0,
            place_ids.param,
            extra,
        )
        self.box.words[track.cursor + CURSOR_RECORD] = number
        return number

    def _text(self, fields: dict[str, Any]) -> int:
        return self.box.text(json_text(fields))

    def note(self, text: str, fields: dict[str, Any], *, frame: FrameType | None) -> None:
        """Record a note of the user."""
        reads_device = self._native is not None and self.box.geometry.lanes > 0
        contents = {TEXT_FIELD[Kind.NOTE]: text, **fields}
        note_text = NoteText(contents, reads_device=reads_device)
        position = self.box.text(note_text.text)
        self.event(Kind.NOTE, extra=position, frame=frame)
        note_text.complete(self.box, position, self._here().top)

    def end(self, reason: str) -> None:
        """Record the end of the watch. At the exit of the process its code is not known yet: the
        box completes the record."""
        field = TEXT_FIELD[Kind.END]
        if reason != EXIT:
            self.event(Kind.END, text={field: reason})
            return
        reasons = [EXIT, *(f"{EXIT} {code}" for code in range(1, 256))]
        texts = [json.dumps({field: reason}) for reason in reasons]
        self.event(Kind.END, extra=self.box.text_of_exit(texts))

    def compile_begins(self, compile_id: str, fields: dict[str, str]) -> None:
        """Record that torch begins to compile a graph."""
        self.locator.compiling += 1
        self.fast_path.wake()
        graph = self.box.intern(EntryType.GRAPH, compile_id)
        self.event(Kind.COMPILE_BEGIN, subject=graph, text=fields)

    def compile_ends(self, compile_id: str) -> None:
        """Record that a compilation has ended."""
        self.locator.compiling = max(0, self.locator.compiling - 1)
        self.event(Kind.COMPILE_END, subject=self.box.intern(EntryType.GRAPH, compile_id))

    def group_begins(self, op: str, number: int, ranks: list[int] | None) -> None:
        """Record that this rank begins to create a process group, and waits for other ranks."""
        self.event(
            Kind.GROUP_BEGIN,
            text={TEXT_FIELD[Kind.GROUP_BEGIN]: op, "number": number, "ranks": ranks},
        )

    def group_ends(self) -> None:
        """Record that the process group exists."""
        self.event(Kind.GROUP_END)

    # -- steps -------------------------------------------------------------------------------------

    def optimizer_stepped(self, name: str) -> LineAndGraph:
        """Record the step of an optimizer. Returns where it was called, for `set_step`."""
        frame = python_stack.caller(1)
        track, (line, graph) = self._here(), self.line_and_graph(frame)
        place_ids = self.locator.place_ids_in_optimizer(track)
        entry = self.box.intern(EntryType.PHASE, name)
        self.write(Kind.OPTIMIZER, track, place_ids, line=line, graph=graph, subject=entry)
        if self._native is not None:
            self.fast_path.learn_line(frame, line)
            self.fast_path.learn_name(name, entry)
        return line, graph

    def set_step(self, step: int, *, called_at: LineAndGraph | None) -> None:
        """Record the end of a step and the start of the next one.

        Both records have one place: reading the stack takes longer than writing both.
        """
        track = self._here()
        if called_at is None:
            frame = python_stack.caller(1)
            line, graph = self.line_and_graph(frame)
            if self._native is not None:
                self.fast_path.learn_line(frame, line)
        else:
            line, graph = called_at
        place_ids = self.locator.place_ids(track)
        self.box.clock.end_step(track.cursor, track.top, track.number)
        self.write(Kind.STEP_END, track, place_ids, line=line, graph=graph)
        self._counter.step = step
        self.box.words[track.cursor + CURSOR_STEP] = step
        number = self.write(Kind.STEP_BEGIN, track, place_ids, line=line, graph=graph)
        self._on_step(place_ids.packed, number)
        now = time.monotonic_ns()
        if now >= self._check_file_at:
            self._check_file_at = now + _CHECK_FILE_EVERY_NS
            self.box.check_file()

    def rest(self, containers: tuple[Any, ...]) -> None:
        """Let the native extension record steps by itself, as long as the containers keep their
        sizes: then Python has nothing to do between steps."""
        if not self.locator.compiling:
            self.fast_path.rest(self._check_file_at, not self.step_is_users, containers)

    def begin_step(self) -> None:
        """Record the start of the first step."""
        track = self._here()
        self.box.words[track.cursor + CURSOR_STEP] = self.step
        self.box.clock.start_clock(track.cursor, track.top)
        self.event(Kind.STEP_BEGIN)

    # -- exceptions and places ---------------------------------------------------------------------

    def exception(
        self, error: BaseException, track: Track, place_ids: PlaceIds, line: str | None
    ) -> None:
        """Record an exception of the job, and add a note with its place to it."""
        place = self._place(place_ids, track, line)
        last = self._last_collectives()
        collectives = f"last collectives: {', '.join(last)}" if last else "no collective so far"
        error.add_note(f"{NOTE_START}{place}; {collectives}")
        text = {"text": described(error), "type": type(error).__name__, "last": last}
        if is_of_device(error):
            text["device"] = device_note(self.device_place(place))
            error.add_note(f"{NOTE_START}{text['device']}")
            self._on_device_error(described(error))
        line_id = self.box.intern(EntryType.LINE, line) if line else 0
        self.write(Kind.EXCEPTION, track, place_ids, line=line_id, extra=self._text(text))

    def place_of_node(self, node: Any) -> Place:
        """Return where an autograd node comes from: the module call that made it, or the parameter
        that it accumulates into."""
        track = self._here()
        place_ids = self.locator.place_ids_of_node(node, track)
        return self._place(place_ids, track, None)

    def device_place(self, cpu: Place) -> DevicePlace:
        """Return where the device of this process is, beside the place of its CPU.

        Does not call the device, so it is safe after an error of the device.
        """
        return own_device_place(self.box, cpu)

    def place(self, frame: FrameType | None) -> Place:
        """Return the place of the calling thread."""
        track, stack = self._here(), python_stack.read(frame)
        return self._place(
            self.locator.place_ids(track),
            track,
            stack.stored_line(folder=self.locator.folder),
            stack.graph or self._graph_around(frame),
        )

    def _place(
        self, place_ids: PlaceIds, track: Track, line: str | None, graph: str | None = None
    ) -> Place:
        text_of = self.locator.text_of
        module = text_of(place_ids.module) if place_ids.module else None
        return Place(
            rank=self.rank,
            step=self.step,
            pass_=Pass(place_ids.pass_).label,
            module=module,
            call=None if module is None or place_ids.call == NO_CALL else place_ids.call,
            **line_fields(line),
            graph=graph,
            thread=track.name,
            certainty=_certainty(place_ids.flags),
            param=text_of(place_ids.param) if place_ids.param else None,
        )

    def _graph_around(self, frame: FrameType | None) -> str | None:
        """Return the graph that is compiled or runs here. Only its node identifies a compiled
        backward."""
        if not _torch.is_dynamo_loaded():
            return None
        return (
            compilation.being_compiled()
            or compiled_graphs.backward_graph(self._node())
            or python_stack.graph_around(frame)
        )


def _certainty(flags: int) -> Certainty:
    if flags & FLAG_UNKNOWN:
        return Certainty.UNKNOWN
    return Certainty.INFERRED if flags & FLAG_INFERRED else Certainty.EXACT
