"""Finds the chain of module calls around a call, from the outermost to the innermost.

The log of a track says at which number a call began to run, but not inside which call: the hot path
has no time for that. The order of the log shows it. This file reads the log on request, each
transition once: about 0.3 us for each new transition.

Limit: the log keeps 65,536 transitions. If a forward has more without a request in between, the
calls around the innermost one are unknown. They are left out, never guessed.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from typing import NamedTuple

import torch

from torchwhere.blackbox.file_format import CALL_MASK, MODULE_SHIFT, PASS_SHIFT
from torchwhere.core.place import Pass
from torchwhere.hooks import _torch
from torchwhere.hooks.locate import Locator
from torchwhere.hooks.threads import (
    BACKWARD_PLACE,
    FIRST_MODULE_PLACE,
    LOG_LENGTH,
    LOG_MASK,
    RECOMPUTE_BIT,
    REGIONS,
    Track,
    pass_of,
)
from torchwhere.model.graph_walk import ACCUMULATE_GRAD_SEQ

_NONE = -1
_NO_NAMES: frozenset[str] = frozenset()
_MOST_NAMES = 1 << 12  # calls whose names are cached
_TO_FORWARD = (Pass.BACKWARD ^ Pass.FORWARD) << PASS_SHIFT


class Made(NamedTuple):
    """One call of a module: its track, and the transition of the log at which it began."""

    track: Track
    begin: int

    @property
    def packed(self) -> int:
        return self.track.marks[self.begin & LOG_MASK]


class CallChain:
    """Which calls of one track are inside which. Any thread may read it."""

    def __init__(self, track: Track) -> None:
        self._track = track
        self._lock = threading.Lock()
        # for each transition: the start of the call that runs after it
        self._calls = array("q", [_NONE]) * LOG_LENGTH
        # for each start of a call: the start of the call around it
        self._above = array("q", [_NONE]) * LOG_LENGTH
        self._read = 0  # transitions read so far
        # the calls that run after them, outermost first: begin and packed place
        self._open: list[tuple[int, int]] = []
        # the latest begin, by packed place, and by packed place without the call
        self._latest: dict[int, int] = {}
        # the calls around are unknown until the log is back outside all modules
        self._is_lost = False

    def _oldest(self) -> int:
        return max(0, self._track.count - LOG_LENGTH)

    def _read_on(self) -> None:
        with self._lock:
            end = self._track.count
            start, oldest = self._read, self._oldest()
            if start < oldest:
                start, self._is_lost = oldest, True
            for at in range(start, end):
                self._calls[at & LOG_MASK] = self._call_after(at, self._track.marks[at & LOG_MASK])
            self._read = end
            if len(self._latest) > 2 * LOG_LENGTH:
                self._latest = {
                    packed: begin for packed, begin in self._latest.items() if begin >= oldest
                }

    def _call_after(self, at: int, packed: int) -> int:
        """The start of the call that runs after transition `at`. A transition begins a call, or
        ends one."""
        stack = self._open
        if self._is_lost:
            stack.clear()
            self._is_lost = packed >= FIRST_MODULE_PLACE or packed == BACKWARD_PLACE
            return self._begin(at, packed) if self._is_lost else _NONE
        # logged by a backward: belongs to the call that it differentiates
        if pass_of(packed) == Pass.BACKWARD and packed != BACKWARD_PLACE:
            return self._latest.get(packed ^ _TO_FORWARD, _NONE)
        if stack and packed == stack[-1][1]:  # a wrapper and the module inside it are one call
            return stack[-1][0]
        if len(stack) > 1 and packed == stack[-2][1]:
            stack.pop()
            return stack[-1][0]
        if packed < FIRST_MODULE_PLACE and packed != BACKWARD_PLACE:
            stack.clear()
            return _NONE
        return self._begin(at, packed)

    def _begin(self, at: int, packed: int) -> int:
        self._above[at & LOG_MASK] = self._open[-1][0] if self._open else _NONE
        self._open.append((at, packed))
        self._latest[packed] = self._latest[packed >> PASS_SHIFT] = at
        return at

    def call_at(self, position: int) -> int:
        """The start of the innermost call that runs after a transition; -1 outside all modules."""
        if position >= self._read:
            self._read_on()
        begin = self._calls[position & LOG_MASK]
        return begin if begin >= self._oldest() else _NONE

    def above(self, begin: int) -> int:
        """The start of the call around a call; -1 if there is none, or only a backward."""
        above = self._above[begin & LOG_MASK]
        return (
            above
            if above >= self._oldest() and self._track.marks[above & LOG_MASK] >= FIRST_MODULE_PLACE
            else _NONE
        )

    def last_before(self, position: int, module: int) -> int:
        """The start of the latest call of a module, at or before a transition. `module` is a packed
        place without the call."""
        marks = self._track.marks
        for at in range(position, self._oldest() - 1, -1):
            if marks[at & LOG_MASK] >> PASS_SHIFT == module:
                return self.call_at(at)
        return _NONE

    def last(self, module: int) -> int:
        """The start of the latest call of a module."""
        self._read_on()
        begin = self._latest.get(module, _NONE)
        return begin if begin >= self._oldest() else _NONE


class CallChains:
    """The chain of calls at any point of any thread. It costs nothing until a request."""

    def __init__(self, locator: Locator) -> None:
        self._locator = locator
        self._of: weakref.WeakKeyDictionary[Track, CallChain] = weakref.WeakKeyDictionary()
        self._names: dict[Made, frozenset[str]] = {}
        self._task_id = _torch.getter("graph_task_id", -1)
        self._node = _torch.getter("current_node")

    def of(self, track: Track) -> CallChain:
        chain = self._of.get(track)
        if chain is None:
            chain = self._of[track] = CallChain(track)
        return chain

    def made_at(self, track: Track, position: int) -> Made | None:
        """The innermost call that ran after transition `position` of a track."""
        begin = self.of(track).call_at(position)
        made = Made(track, begin) if begin != _NONE else None
        return made if made is not None and made.packed >= FIRST_MODULE_PLACE else None

    def made_by(self, seq: int, own: Track) -> Made | None:
        """The innermost call that made the autograd node with this number; `own` is the track of
        the calling thread."""
        maker, _ = self._locator.threads.maker(seq, own)
        position = maker.position(seq) if maker is not None else None
        return None if maker is None or position is None else self.made_at(maker, position)

    def around(self, made: Made) -> Made | None:
        """The call around a call, in the same forward or recomputation."""
        above = self.of(made.track).above(made.begin)
        return Made(made.track, above) if above != _NONE else None

    def above(self, made: Made) -> Made | None:
        """The call around a call; for the outermost recomputed call, the call around its
        original."""
        around = self.around(made)
        if around is None and pass_of(made.packed) == Pass.RECOMPUTE:
            return self._above_recomputed(made)
        return around

    def _above_recomputed(self, made: Made) -> Made | None:
        track, packed = made.track, made.packed
        number = packed & CALL_MASK & (REGIONS - 1)
        seq, is_reentrant, maker = (
            track.regions[number] >> 1,
            track.regions[number] & 1,
            track.makers[number],
        )
        position = maker.position(seq) if maker is not None else None
        if maker is None or position is None:
            return None
        if is_reentrant:  # a node that was made just outside the call started it
            return self.made_at(maker, position)
        begin = self.of(maker).last_before(position, (packed & ~RECOMPUTE_BIT) >> PASS_SHIFT)
        return self.above(Made(maker, begin)) if begin != _NONE else None

    def names_here(self) -> frozenset[str]:
        """The names of the modules that the calling thread is in, in forward or in backward."""
        made = self.here(self._locator.threads.here())
        return _NO_NAMES if made is None else self._names_of(made)

    def _names_of(self, made: Made) -> frozenset[str]:
        """The names of a call and of all calls around it. Cached: every operation asks for the same
        ones."""
        names = self._names.get(made)
        if names is None:
            above, name = self.above(made), self._locator.text_of(made.packed >> MODULE_SHIFT)
            names = self._names_of(above) if above is not None else _NO_NAMES
            names = names if name is None else names | {name}
            if len(self._names) >= _MOST_NAMES:
                self._names.clear()
            self._names[made] = names
        return names

    def here(self, track: Track) -> Made | None:
        """The innermost call that the calling thread is in, in forward or in backward."""
        if track.top >= FIRST_MODULE_PLACE:
            return self.made_at(track, track.count - 1)
        node = self._node() if self._task_id() != -1 else None
        if node is None:
            return None
        seq = node._sequence_nr()
        return (
            self.made_by(seq, track)
            if seq != ACCUMULATE_GRAD_SEQ
            else self._holder(node.variable, track)
        )

    def _holder(self, param: torch.Tensor, track: Track) -> Made | None:
        """The latest call of the module that has the parameter: its gradient is accumulated
        there."""
        place_ids = self._locator.place_ids_of_param(param)
        if place_ids.module:
            packed = place_ids.module << MODULE_SHIFT - PASS_SHIFT | Pass.FORWARD
            for maker in (track, self._locator.threads.main):
                begin = self.of(maker).last(packed) if maker is not None and maker.count else _NONE
                if maker is not None and begin != _NONE:
                    return Made(maker, begin)
        return None
