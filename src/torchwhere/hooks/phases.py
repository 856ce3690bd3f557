"""Records named phases: which one runs, how often each ran, how long it took.

`torchwhere.phase` calls `begin` and `end`, on any thread. Each phase gives two records, and adds to
sums by path that are exact whatever the size of the ring. A context variable holds the phase around
a phase: each thread nests by itself, and coroutines that take turns on one thread work too.

Hot: a phase takes about 4 us in total. Its place is looked up once, at its start; it ends in the
same function.
"""

from __future__ import annotations

import json
import threading
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from time import monotonic_ns
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from torchwhere.blackbox.file_format import CURSOR_PHASE, CURSOR_RECORD, EntryType
from torchwhere.blackbox.phase_sums import (
    ENDED,
    ENDED_ELSEWHERE,
    MOST_PATHS,
    OTHERS,
    PhaseKey,
    PhaseSum,
)
from torchwhere.blackbox.step_clock import PART_BY_NAME
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import Kind
from torchwhere.hooks import _torch, python_stack
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.locate import Locator, PlaceIds
from torchwhere.hooks.threads import Track

if TYPE_CHECKING:
    from torchwhere.native.load import NativeExtension

_BEGIN, _END = int(Kind.PHASE_BEGIN), int(Kind.PHASE_END)
_MOST_LINES = 1 << 12


_NONE: tuple[str, ...] = ()
# the slots of a node besides its sums
_OTHERS = ("ended", "entry", "inner", "lock", "name", "path", "under_way")


class PhaseNode:
    """A phase by its path, on the main thread or on the others: its sums, and the phases inside it.

    This class has no slots. The sums are Python slots (`PythonPhaseNode`), or, for the steps,
    fields of the native class.
    """

    __slots__ = _NONE
    begun_ns: int
    count: int
    max_ns: int
    running: int
    total_ns: int

    def __init__(
        self, path: tuple[str, ...], entry: int, lock: threading.RLock | None = None
    ) -> None:
        self.path = path
        self.name = path[-1] if path else ""
        self.entry = entry  # id of the name
        self.lock = lock  # None if only one thread writes
        self.inner: dict[str, PhaseNode] = {}
        self.count = self.total_ns = self.max_ns = self.running = self.begun_ns = 0
        self.ended = 0  # index of its words in the box: phases that ended
        self.under_way: int | None = None  # and phases that run; None if the box has no room

    def sum(self) -> PhaseSum:
        return PhaseSum(self.count, self.total_ns, self.max_ns, self.running, self.begun_ns)


class PythonPhaseNode(PhaseNode):
    """A node whose fields are all Python slots."""

    __slots__ = ("begun_ns", "count", "max_ns", "running", "total_ns", *_OTHERS)


@cache
def _type_of_steps(native: NativeExtension | None) -> type[PhaseNode]:
    """The class of the node that counts steps. The native extension writes to it."""
    if native is None:
        return PythonPhaseNode
    return type("NativeNode", (native.Sum, PhaseNode), {"__slots__": _OTHERS})


@dataclass(slots=True, eq=False)
class OpenPhase:
    """A phase that has begun and not ended."""

    name: str
    entry: int  # id of the name
    node: PhaseNode
    outer: OpenPhase | None
    track: Track
    place_ids: PlaceIds
    line: int
    graph: int
    t_ns: int
    is_part: bool  # whether its time counts as a part of the step


_innermost: ContextVar[OpenPhase | None] = ContextVar("torchwhere_phase", default=None)


class PhaseRecorder:
    """The phases of one watch. The sums stay after the end of the watch."""

    def __init__(self, box: BoxWriter, locator: Locator, *, rank: int) -> None:
        self._box: BoxWriter | None = box
        self._locator: Locator | None = locator
        # reentrant: a finalizer or a signal handler may have phases of its own
        self._lock = threading.RLock()
        # the root of the main thread's phases counts the steps
        self.steps = self._node(box, (), ENDED, _type_of_steps(box.native))
        self._elsewhere = PythonPhaseNode((), 0)
        self._nodes = {PhaseKey((), True): self.steps}
        self._lines: dict[tuple[int, int], tuple[int, int]] = {}
        self._codes: list[CodeType] = []  # referenced, so that their ids stay unique
        self._ended_ns: int | None = None
        self.errors = ErrorLimiter("phases", self.close)
        self.rank = rank
        self._counter = box.counter
        _latest[:] = [self]

    # -- steps -------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Begin a step, and end the one before it."""
        now, node = monotonic_ns(), self.steps
        if node.running:
            self._add(node, now - node.begun_ns, node.begun_ns)
        self._open(node, now)

    # -- phases ------------------------------------------------------------------------------------

    @_torch.unseen
    def begin(self, name: str, frame: FrameType | None) -> None:
        box, locator = self._box, self._locator
        if box is None or locator is None:
            return
        try:
            track, outer = locator.threads.here(), _innermost.get()
            if outer is not None and outer.track is track:
                around = outer.node
            # no phase, or one of another thread (whose context this one has) or of an earlier watch
            else:
                outer, around = None, self.steps if track.name == "MainThread" else self._elsewhere
            node = around.inner.get(name) or self._add_node(
                box, around, name, is_main=track.name == "MainThread"
            )
            place_ids, (line, graph) = locator.place_ids(track), self._line(box, locator, frame)
            entry = node.entry if node.name == name else box.intern(EntryType.PHASE, name)
            now, words = monotonic_ns(), box.words
            part = PART_BY_NAME.get(name)
            is_part = part is not None and box.clock.begin_part(track.cursor, part)
            # fmt: off
            _innermost.set(OpenPhase(
                name, entry, node, outer, track, place_ids, line, graph, now, is_part
            ))
            # fmt: on
            if node.lock is None:
                self._open(node, now)
            else:
                with node.lock:
                    self._open(node, now)
            words[track.cursor + CURSOR_PHASE] = entry
            # fmt: off
            words[track.cursor + CURSOR_RECORD] = box.record(
                _BEGIN, now, place_ids.pass_, place_ids.flags, track.number, self._counter.step,
                place_ids.module, place_ids.call, line, graph, entry, 0, place_ids.param,
            )
            # fmt: on
        except Exception as error:
            self.errors(error)

    @_torch.unseen
    def end(self, name: str) -> None:
        box, locator = self._box, self._locator
        if box is None or locator is None:
            return
        try:
            track, phase = locator.threads.here(), _innermost.get()
            if phase is not None and phase.track is track and phase.name == name:
                _innermost.set(phase.outer)
            else:
                phase = _taken_out(phase, name, track)
            if phase is None:  # it began before the watch
                return
            now, place_ids, words = monotonic_ns(), phase.place_ids, box.words
            took = now - phase.t_ns
            node = phase.node
            if phase.is_part:
                box.clock.end_part()
            if node.lock is None:
                self._add(node, took, phase.t_ns)
            else:
                with node.lock:
                    self._add(node, took, phase.t_ns)
            words[track.cursor + CURSOR_PHASE] = _entry(_innermost.get(), track)
            # fmt: off
            words[track.cursor + CURSOR_RECORD] = box.record(
                _END, now, place_ids.pass_, place_ids.flags, track.number, self._counter.step,
                place_ids.module, place_ids.call, phase.line, phase.graph, phase.entry, 0,
                place_ids.param, took,
            )
            # fmt: on
        except Exception as error:
            self.errors(error)

    def _open(self, node: PhaseNode, now: int) -> None:
        running = node.running = node.running + 1
        begun_ns = node.begun_ns = node.begun_ns + now
        at, box = node.under_way, self._box
        if at is not None and box is not None:
            words = box.words
            words[at + 1] = running
            words[at + 2] = begun_ns

    def _add(self, node: PhaseNode, took: int, begun_ns: int) -> None:
        running = node.running = node.running - 1
        begun_ns = node.begun_ns = node.begun_ns - begun_ns
        count = node.count = node.count + 1
        total_ns = node.total_ns = node.total_ns + took
        if took > node.max_ns:
            node.max_ns = took
        at, box = node.under_way, self._box
        if at is not None and box is not None:
            words = box.words
            words[at + 1] = running
            words[at + 2] = begun_ns
            at = node.ended
            words[at + 1] = count
            words[at + 2] = total_ns
            words[at + 3] = node.max_ns

    def _line(self, box: BoxWriter, locator: Locator, frame: FrameType | None) -> tuple[int, int]:
        """Line and graph. If the caller is the user's own code, both are cached by its
        instruction."""
        code = frame.f_code if frame is not None else None
        key = (id(code), frame.f_lasti if frame is not None else 0)
        line_and_graph = self._lines.get(key)
        if line_and_graph is None:
            looked = python_stack.read(frame)
            graph = box.intern(EntryType.GRAPH, looked.graph) if looked.graph else 0
            line_and_graph = locator.line_id(looked), graph
            if code is not None and code.co_filename == looked.file and looked.graph != "?":
                if len(self._lines) >= _MOST_LINES:
                    self._lines.clear()
                    self._codes.clear()
                self._lines[key] = line_and_graph
                self._codes.append(code)
        return line_and_graph

    # -- nodes -------------------------------------------------------------------------------------

    def _add_node(
        self, box: BoxWriter, around: PhaseNode, name: str, *, is_main: bool
    ) -> PhaseNode:
        """The node of a new phase. If a program has too many names, all further phases share one
        node."""
        with self._lock:
            node = around.inner.get(name)
            if node is None:
                path = (*around.path, name) if len(self._nodes) < MOST_PATHS - 2 else (OTHERS,)
                key = PhaseKey(path, is_main)
                node = self._nodes.get(key) or self._nodes.setdefault(
                    key, self._node(box, path, ENDED if is_main else ENDED_ELSEWHERE)
                )
                if path[-1] == name:
                    around.inner[name] = node
            return node

    def _node(
        self,
        box: BoxWriter,
        path: tuple[str, ...],
        which: int,
        node_type: type[PhaseNode] = PythonPhaseNode,
    ) -> PhaseNode:
        lock = None if which == ENDED else self._lock
        node = node_type(path, box.intern(EntryType.PHASE, path[-1]) if path else 0, lock)
        entry = box.intern(EntryType.PHASE_PATH, json.dumps(path))
        ended, under_way = (box.counter_at((entry, slot, -1)) for slot in (which, which + 1))
        if ended is not None and under_way is not None:
            node.ended, node.under_way = ended, under_way
        return node

    # -- results -----------------------------------------------------------------------------------

    def sums(self) -> tuple[dict[PhaseKey, PhaseSum], int]:
        """The sums, and the time up to which they count."""
        with self._lock:
            sums = {key: node.sum() for key, node in self._nodes.items()}
            return sums, self._ended_ns or monotonic_ns()

    def abandon(self) -> None:
        """In a forked child: as `close`, but a thread of the parent may have held the lock at the
        fork."""
        self._lock = threading.RLock()
        self.close()

    def close(self) -> None:
        """End the recording: keep the sums, release everything else."""
        with self._lock:
            self._ended_ns = self._ended_ns or monotonic_ns()
            self.errors.is_over = True
            self._box = self._locator = None
            self._lines.clear()
            self._codes.clear()


_latest: list[PhaseRecorder] = []


def latest() -> PhaseRecorder | None:
    """The phases of the current watch of this process, or of the last one."""
    return _latest[0] if _latest else None


def _entry(phase: OpenPhase | None, track: Track) -> int:
    return phase.entry if phase is not None and phase.track is track else 0


def _taken_out(phase: OpenPhase | None, name: str, track: Track) -> OpenPhase | None:
    """Remove the innermost phase of that name, also from the middle: the phase of a generator may
    end while a phase of its caller runs."""
    above = None
    while phase is not None:
        if phase.track is track and phase.name == name:
            if above is None:
                _innermost.set(phase.outer)
            else:
                above.outer = phase.outer
            return phase
        above, phase = phase, phase.outer
    return None
