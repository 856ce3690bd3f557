"""Tracks which module call each thread runs, and in which call each autograd node was made.

A *packed place* says module, pass and call in one integer (`blackbox/file_format.py`). The track of
a thread holds the packed place of what runs now (`top`), and a log of transitions: at this autograd
sequence number, this packed place began. A node made in forward carries its number into backward;
the last transition at or before that number is the innermost call that made it. The log uses fixed
arrays, not tuples: a list of tuples woke the cycle collector and made a GPT-2 step 21 to 27 %
slower.
"""

from __future__ import annotations

import threading
import weakref
from _thread import get_ident
from array import array
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from torchwhere.blackbox.file_format import CALL_MASK, MODULE_SHIFT, NO_CALL, PASS_MASK, PASS_SHIFT
from torchwhere.core.place import Pass
from torchwhere.hooks import _torch

if TYPE_CHECKING:
    from torchwhere.native import extension
    from torchwhere.native.load import NativeExtension

LOG_LENGTH = 1 << 16  # transitions kept per thread, a power of two: 1 MiB
LOG_MASK = LOG_LENGTH - 1
# prefix of the name of a thread that Python did not create: usually one of the autograd engine
NATIVE = "native-"
REGIONS = 1 << 12  # recomputed regions remembered, a power of two
_NOTHING = array("Q")
_NONE: tuple[str, ...] = ()
FIRST_MODULE_PLACE = 1 << MODULE_SHIFT  # a lower packed place has no module

BACKWARD_PLACE = Pass.BACKWARD << PASS_SHIFT
OPTIMIZER_PLACE = Pass.OPTIMIZER << PASS_SHIFT
RECOMPUTE_BIT = (Pass.RECOMPUTE ^ Pass.FORWARD) << PASS_SHIFT  # also set in shape inference
SHAPE_INFERENCE_BITS = (Pass.SHAPE_INFERENCE ^ Pass.FORWARD) << PASS_SHIFT
# the bits that a module call in a recomputation or a shape inference takes from its caller
INHERITED = SHAPE_INFERENCE_BITS | CALL_MASK


def pass_of(packed: int) -> int:
    return packed >> PASS_SHIFT & PASS_MASK


def is_in_backward(packed: int) -> bool:
    """Whether a thread at this packed place is in a backward. A device thread of the engine is in
    one without a place that says so."""
    task_id = _torch.private("graph_task_id")
    return pass_of(packed) == Pass.BACKWARD or (task_id is not None and task_id() != -1)


class Track:
    """The place and the log of one thread. Only that thread writes to it.

    This class has no slots. The fields of the hot paths are Python slots (`PythonTrack`) or fields
    of the native class.
    """

    __slots__ = _NONE
    began: int
    below_optimizer: list[int]
    count: int
    cursor: int
    makers: list[Track | None]
    marks: array[int]
    may_issue: bool
    name: str
    number: int
    regions: array[int]
    seqs: array[int]
    slot: int
    top: int

    def __init__(self, *, number: int, name: str, began: int = 0) -> None:
        self.began = began  # the thread's autograd number when the track was created
        self.number = number
        self.name = name
        self.slot = 0  # the cursor slot of this thread
        self.cursor = 0  # index of the first word of that slot
        self.top = 0
        # whether it has issued a collective, or run a backward, which may issue one
        self.may_issue = False
        # a thread that runs no module needs no log
        self.seqs = self.marks = self.regions = _NOTHING
        self.makers = []  # the track of the forward, for each recomputed region
        self.count = 0  # transitions logged since the start
        self.below_optimizer = []

    def ready(self) -> None:
        """Allocate the log before the first transition. Its first entry is outside all modules: a
        node may be made before the first module call."""
        if self.seqs is _NOTHING:
            self.seqs = array("Q", bytes(8 * LOG_LENGTH))
            self.marks = array("Q", bytes(8 * LOG_LENGTH))
            self.regions = array("Q", bytes(8 * REGIONS))
            self.makers = [None] * REGIONS
            self.seqs[0] = self.began
            self.count = 1
            self.use(self.seqs, self.marks)

    def retire(self) -> None:
        """Free the log."""
        self.use(None, None)
        self.seqs = self.marks = self.regions = _NOTHING
        self.makers = []
        self.count = 0

    def use(self, seqs: array[int] | None, marks: array[int] | None) -> None:
        """Pass the arrays of the log to the native class, which writes to them too."""

    def move(self, _native_box: extension.Box, _packed: int, _line: int = 0) -> bool:
        """Move to a packed place outside all modules; with a line, log it too. Returns whether it
        was done: only the native class does it."""
        return False

    def is_here(self, native_box: extension.Box) -> None:
        """Tell the native class that this is the track of the calling thread, for this box."""

    def log(self, seq: int, packed: int) -> None:
        self.ready()
        at = self.count & LOG_MASK
        self.seqs[at] = seq
        self.marks[at] = packed
        self.count += 1

    def position(self, seq: int) -> int | None:
        """Index of the last transition at or before `seq`; None if `seq` is older than the log."""
        low, high = max(0, self.count - LOG_LENGTH), self.count
        first, seqs = low, self.seqs
        while low < high:
            middle = (low + high) >> 1
            if seqs[middle & LOG_MASK] <= seq:
                low = middle + 1
            else:
                high = middle
        return low - 1 if low > first else None

    def newest(self) -> int:
        """A number above all logged nodes of this thread."""
        return self.seqs[(self.count - 1) & LOG_MASK] if self.count else 0

    def packed_at(self, seq: int) -> int | None:
        position = self.position(seq)
        return None if position is None else self.marks[position & LOG_MASK]

    def add_region(self, number: int, seq: int, maker: Track | None, *, reentrant: bool) -> None:
        """Remember the node that started a recomputation, and the track that made the node."""
        self.regions[number & (REGIONS - 1)] = (seq << 1 | reentrant) & 0xFFFFFFFFFFFFFFFF
        self.makers[number & (REGIONS - 1)] = maker

    def is_reentrant(self, packed: int) -> bool:
        """Whether backward runs the nodes that a recomputed call makes (reentrant checkpointing);
        the other kind runs the nodes of the forward."""
        return pass_of(packed) == Pass.RECOMPUTE and bool(
            self.regions[packed & CALL_MASK & (REGIONS - 1)] & 1
        )

    def call_of(self, packed: int) -> int:
        """The number of a call; for a recomputed call, its number in the forward."""
        call = packed & CALL_MASK
        return self.recomputed_call(packed) if packed & RECOMPUTE_BIT and call != NO_CALL else call

    def recomputed_call(self, packed: int) -> int:
        """The call number of a recomputed module in its forward; NO_CALL if the log no longer has
        it.

        A region remembers the node whose backward started it. Non-reentrant checkpointing starts it
        from a node made inside the original call: the latest call of the module at that node. The
        reentrant kind starts it from its own node, made just before the original call: the next
        call of the module after that node.
        """
        number = packed & CALL_MASK & (REGIONS - 1)
        seq, reentrant = self.regions[number] >> 1, self.regions[number] & 1
        forward = self.makers[number]
        start = forward.position(seq) if forward is not None else None
        if forward is None or start is None:
            return NO_CALL
        oldest, base = max(0, forward.count - LOG_LENGTH), (packed & ~RECOMPUTE_BIT) >> PASS_SHIFT
        path = range(start + 1, forward.count) if reentrant else range(start, oldest - 1, -1)
        for index in path:
            mark = forward.marks[index & LOG_MASK]
            if (mark & ~RECOMPUTE_BIT) >> PASS_SHIFT == base:
                if not mark & RECOMPUTE_BIT:
                    return mark & CALL_MASK
                # a checkpoint inside a checkpoint: the call that the outer one repeats
                if (mark ^ packed) & CALL_MASK & (REGIONS - 1):
                    return forward.recomputed_call(mark)
        return NO_CALL


_COLD = ("__weakref__", "began", "makers", "marks", "may_issue", "name", "regions", "seqs", "slot")


class PythonTrack(Track):
    """A track whose fields are all Python slots."""

    __slots__ = (*_COLD, "below_optimizer", "count", "cursor", "number", "top")


@cache
def track_type(native: NativeExtension | None) -> type[Track]:
    """The class of tracks: with the hot fields in the native class, or `PythonTrack` without the
    native extension."""
    if native is None:
        return PythonTrack
    return type("NativeTrack", (native.ThreadTrack, Track), {"__slots__": _COLD})


class Tracks(threading.local):
    """The track of the calling thread as `.track`. It exists after the first `Threads.here` on that
    thread."""

    track: Track


class Threads:
    """All tracks of one session. A track is freed with its thread."""

    def __init__(
        self, register: Callable[[Track], None], native: NativeExtension | None = None
    ) -> None:
        self._track_type = track_type(native)
        self.local = Tracks()
        self._all: weakref.WeakSet[Track] = weakref.WeakSet()
        self._joined = 0
        self.main: Track | None = None  # the track of the main thread
        self._idents: dict[int, int] = {}  # of the thread that has a slot, by slot
        self._register = register  # called with every new track
        # reentrant: a signal handler may need the track while its thread gets one
        self._lock = threading.RLock()
        self._main = threading.main_thread().ident
        self._sequence_nr: Callable[[], int] = _torch.getter("sequence_nr", 0)

    @_torch.unseen
    def here(self) -> Track:
        """The track of the calling thread."""
        try:
            return self.local.track
        except AttributeError:
            return self._join()

    def _join(self) -> Track:
        with self._lock:
            track = self._track_type(
                number=min(self._joined, 255), name=self._name(), began=self._sequence_nr()
            )
            self._joined += 1
            taken = {other.slot for other in self._all}
            track.slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
            self._idents[track.slot] = get_ident()
            self._register(track)
            self._all.add(track)
            if track.name == "MainThread":
                self.main = track
        self.local.track = track
        return track

    def training(self, cursor: int) -> tuple[Track | None, int]:
        """The track and the ident of the thread that trains: the one that the step clock times, by
        its cursor. The main thread if that one has ended."""
        for track in list(self._all):
            if track.cursor == cursor:
                return track, self._idents[track.slot]
        return self.main, self._main or 0

    def _name(self) -> str:
        """The name of the calling thread. `current_thread()` would leave a dummy object behind for
        threads that C created."""
        ident = get_ident()
        if ident == self._main:
            return "MainThread"
        for thread in threading.enumerate():
            if thread.ident == ident:
                return thread.name
        return f"{NATIVE}{threading.get_native_id()}"

    def others_may_issue(self) -> bool:
        """Whether another live thread has issued collectives. Threads of the autograd engine do not
        count: they issue them for the thread that runs the backward."""
        own = self.here()
        return any(
            track.may_issue and track is not own and not track.name.startswith(NATIVE)
            for track in list(self._all)
        )

    def close(self) -> None:
        """Free the logs now. Tracks are in reference cycles, and each has a megabyte: too much to
        leave to the cycle collector."""
        for track in list(self._all):
            track.retire()

    def logged(self) -> list[Track]:
        """The tracks of all threads that have run modules."""
        return [track for track in self._all if track.count]

    def maker(self, seq: int, own: Track) -> tuple[Track | None, bool]:
        """The track whose thread made node `seq`, and whether that is certain.

        Each thread numbers its own nodes. A thread that called backward itself most likely made the
        nodes itself, if it has made that many. A device thread of the engine runs nodes of other
        threads; if several threads could have made this one, the main thread is the most likely.
        """
        if own.count and len(self._all) == 1:
            return (own, True) if own.position(seq) is not None else (None, False)
        able = [
            (track, at)
            for track in self._all
            if track.count and (at := track.position(seq)) is not None
        ]
        within = [(track, at) for track, at in able if seq < track.newest()] or able
        # Position 0 only says that the thread had called no module yet: any other log is better.
        within = [(track, at) for track, at in within if at] or within
        return self._likeliest([track for track, _ in within], own)

    def _likeliest(self, within: list[Track], own: Track) -> tuple[Track | None, bool]:
        if pass_of(own.top) == Pass.BACKWARD and own in within:
            return own, len(within) == 1
        others = [track for track in within if track is not own] or within
        if not others:
            return None, False
        return (self.main if self.main in others else others[0]), len(others) == 1
