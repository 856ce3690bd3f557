"""Where each thread is: its stack of module calls, and which autograd nodes were made in which of
them.

A *word* says module, pass and call in one integer (`blackbox/file_format.py`). A thread's track
holds the word of what runs now (`top`), those below it (`stack`), and a log of transitions: at this
autograd sequence number, this word began. A node made in forward carries its number into backward;
the last transition at or before that number is the innermost call it was made in. Fixed arrays, no
tuples: a list of tuples woke the cycle collector and made a GPT-2 step 21 to 27 % slower.
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
# begins the name of a thread that Python did not make: one of the autograd engine's, as a rule
NATIVE = "native-"
REGIONS = 1 << 12  # recomputed regions remembered, a power of two
_NOTHING = array("Q")
_NONE: tuple[str, ...] = ()
FIRST_MODULE_WORD = 1 << MODULE_SHIFT  # every word below names no module

BACKWARD_WORD = Pass.BACKWARD << PASS_SHIFT
OPTIMIZER_WORD = Pass.OPTIMIZER << PASS_SHIFT
RECOMPUTE_BIT = (Pass.RECOMPUTE ^ Pass.FORWARD) << PASS_SHIFT  # set in a rehearsal too
SHAPE_INFERENCE_BITS = (Pass.SHAPE_INFERENCE ^ Pass.FORWARD) << PASS_SHIFT
# what a module called inside a recomputation or rehearsal has from its caller
INHERITED = SHAPE_INFERENCE_BITS | CALL_MASK


def pass_of(word: int) -> int:
    return word >> PASS_SHIFT & PASS_MASK


class Track:
    """One thread's place and log. Written by its own thread only.

    A class without slots of its own: what the hot paths touch is in Python's slots (`PythonTrack`)
    or in the native part's.
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
        self.began = began  # the autograd number the thread had come to when it was first seen
        self.number = number
        self.name = name
        self.slot = 0  # which cursor slot is this thread's
        self.cursor = 0  # index of that slot's first word
        self.top = 0
        # whether it has issued a collective, or run a backward, in which one may be issued
        self.may_issue = False
        # a thread that runs no module needs no log
        self.seqs = self.marks = self.regions = _NOTHING
        self.makers = []  # of each recomputed region: the track of its forward
        self.count = 0  # transitions ever logged
        self.below_optimizer = []

    def ready(self) -> None:
        """Allocate the log, before the first transition. It begins outside: a node may be made
        before any module is called."""
        if self.seqs is _NOTHING:
            self.seqs = array("Q", bytes(8 * LOG_LENGTH))
            self.marks = array("Q", bytes(8 * LOG_LENGTH))
            self.regions = array("Q", bytes(8 * REGIONS))
            self.makers = [None] * REGIONS
            self.seqs[0] = self.began
            self.count = 1
            self.use(self.seqs, self.marks)

    def retire(self) -> None:
        """Give the log back."""
        self.use(None, None)
        self.seqs = self.marks = self.regions = _NOTHING
        self.makers = []
        self.count = 0

    def use(self, seqs: array[int] | None, marks: array[int] | None) -> None:
        """Told of the arrays of the log: the native part writes to them, too."""

    def move(self, _box: extension.Box, _word: int, _line: int = 0) -> bool:
        """Go to a word outside any module; given a line, by way of the log. Whether it was done:
        only the native part can."""
        return False

    def is_here(self, native_box: extension.Box) -> None:
        """Told that this is the calling thread's track, while the box of that pen is written."""

    def log(self, seq: int, word: int) -> None:
        self.ready()
        at = self.count & LOG_MASK
        self.seqs[at] = seq
        self.marks[at] = word
        self.count += 1

    def position(self, seq: int) -> int | None:
        """Index of the last transition at or before `seq`; None if it is older than the log."""
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
        """A number above every node this thread is known to have made."""
        return self.seqs[(self.count - 1) & LOG_MASK] if self.count else 0

    def word_at(self, seq: int) -> int | None:
        position = self.position(seq)
        return None if position is None else self.marks[position & LOG_MASK]

    def add_region(self, number: int, seq: int, maker: Track | None, *, reentrant: bool) -> None:
        """Remember which node, made by which thread, asked for a recomputation."""
        self.regions[number & (REGIONS - 1)] = (seq << 1 | reentrant) & 0xFFFFFFFFFFFFFFFF
        self.makers[number & (REGIONS - 1)] = maker

    def is_reentrant(self, word: int) -> bool:
        """Whether a recomputed call makes nodes that backward runs: reentrant checkpointing; the
        other kind runs the old."""
        return pass_of(word) == Pass.RECOMPUTE and bool(
            self.regions[word & CALL_MASK & (REGIONS - 1)] & 1
        )

    def call_of(self, word: int) -> int:
        """The number of a call: of a recomputed one, what it was in the forward."""
        call = word & CALL_MASK
        return self.recomputed_call(word) if word & RECOMPUTE_BIT and call != NO_CALL else call

    def recomputed_call(self, word: int) -> int:
        """The call number that a recomputed module had in its forward, NO_CALL where that is no
        longer known.

        A region remembers the node whose backward asked for it. Non-reentrant checkpointing asks
        from a node made inside the original call: the latest call of the module at that node. The
        reentrant kind asks from its own node, made just before the original call: the next call of
        the module after it.
        """
        number = word & CALL_MASK & (REGIONS - 1)
        seq, reentrant = self.regions[number] >> 1, self.regions[number] & 1
        forward = self.makers[number]
        start = forward.position(seq) if forward is not None else None
        if forward is None or start is None:
            return NO_CALL
        oldest, base = max(0, forward.count - LOG_LENGTH), (word & ~RECOMPUTE_BIT) >> PASS_SHIFT
        path = range(start + 1, forward.count) if reentrant else range(start, oldest - 1, -1)
        for index in path:
            mark = forward.marks[index & LOG_MASK]
            if (mark & ~RECOMPUTE_BIT) >> PASS_SHIFT == base:
                if not mark & RECOMPUTE_BIT:
                    return mark & CALL_MASK
                # a checkpoint inside a checkpoint: what that one repeats
                if (mark ^ word) & CALL_MASK & (REGIONS - 1):
                    return forward.recomputed_call(mark)
        return NO_CALL


_COLD = ("__weakref__", "began", "makers", "marks", "may_issue", "name", "regions", "seqs", "slot")


class PythonTrack(Track):
    """A track all of whose parts are Python's."""

    __slots__ = (*_COLD, "below_optimizer", "count", "cursor", "number", "top")


@cache
def track_type(native: NativeExtension | None) -> type[Track]:
    """The class of tracks whose hot parts are the native part's; None: Python's own."""
    if native is None:
        return PythonTrack
    return type("NativeTrack", (native.ThreadTrack, Track), {"__slots__": _COLD})


class Tracks(threading.local):
    """The calling thread's track as `.track`; there once `Threads.here` was called on that
    thread."""

    track: Track


class Threads:
    """All tracks of one session. A track ends with its thread."""

    def __init__(
        self, register: Callable[[Track], None], native: NativeExtension | None = None
    ) -> None:
        self._track_type = track_type(native)
        self.local = Tracks()
        self._all: weakref.WeakSet[Track] = weakref.WeakSet()
        self._joined = 0
        self.main: Track | None = None  # the main thread's
        self._register = register  # told of every new track
        # a signal handler may ask where it is while its thread joins
        self._lock = threading.RLock()
        self._main = threading.main_thread().ident
        self._sequence_nr: Callable[[], int] = _torch.private("sequence_nr") or (lambda: 0)

    @_torch.unseen
    def here(self) -> Track:
        """The calling thread's track."""
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
            self._register(track)
            self._all.add(track)
            if track.name == "MainThread":
                self.main = track
        self.local.track = track
        return track

    def _name(self) -> str:
        """The thread's name. Not `current_thread()`: it leaves a dummy object behind for threads
        made in C."""
        ident = get_ident()
        if ident == self._main:
            return "MainThread"
        for thread in threading.enumerate():
            if thread.ident == ident:
                return thread.name
        return f"{NATIVE}{threading.get_native_id()}"

    def others_may_issue(self) -> bool:
        """Whether another thread lives that has issued collectives. One of the autograd engine does
        so for whoever runs it."""
        own = self.here()
        return any(
            track.may_issue and track is not own and not track.name.startswith(NATIVE)
            for track in list(self._all)
        )

    def close(self) -> None:
        """Give the logs back now: tracks are in cycles, and a megabyte each is much to leave to the
        cycle collector."""
        for track in list(self._all):
            track.retire()

    def logged(self) -> list[Track]:
        """The tracks of all threads that made nodes in a module."""
        return [track for track in self._all if track.count]

    def maker(self, seq: int, own: Track) -> tuple[Track | None, bool]:
        """The track whose thread made node `seq`, and whether that is certain.

        Numbers are counted per thread. A thread that called backward itself most likely made its
        nodes itself, if it has made that many. A device thread of the engine runs nodes made
        elsewhere; where several threads could have made this one, the main thread is the likely
        one.
        """
        if own.count and len(self._all) == 1:
            return (own, True) if own.position(seq) is not None else (None, False)
        able = [
            (track, at)
            for track in self._all
            if track.count and (at := track.position(seq)) is not None
        ]
        within = [
            lock_new_file for lock_new_file in able if seq < lock_new_file[0].newest()
        ] or able
        # At 0 a log says no more than that its thread had called no module yet: any other log knows
        # better.
        within = [lock_new_file for lock_new_file in within if lock_new_file[1]] or within
        return self._likeliest([track for track, _ in within], own)

    def _likeliest(self, within: list[Track], own: Track) -> tuple[Track | None, bool]:
        if pass_of(own.top) == Pass.BACKWARD and own in within:
            return own, len(within) == 1
        others = [track for track in within if track is not own] or within
        if not others:
            return None, False
        return (self.main if self.main in others else others[0]), len(others) == 1
