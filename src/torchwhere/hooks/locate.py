"""Finds the current place: from the track of this thread, the node that the autograd engine runs,
and the user's line.

`place_ids()` returns the ids that a record has: about 1 us in forward, 3 us in backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchwhere.blackbox.file_format import (
    CALL_MASK,
    FLAG_INFERRED,
    FLAG_UNKNOWN,
    MODULE_SHIFT,
    NO_CALL,
    PASS_SHIFT,
    EntryType,
)
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.place import Pass
from torchwhere.hooks import _torch, python_stack
from torchwhere.hooks.compilation import being_compiled
from torchwhere.hooks.python_stack import FrameworkFrame, Stack
from torchwhere.hooks.threads import FIRST_MODULE_PLACE, OPTIMIZER_PLACE, Threads, Track, pass_of
from torchwhere.model.graph_walk import ACCUMULATE_GRAD_SEQ
from torchwhere.model.module_names import NameTable, owner

_OPTIMIZER_FRAMES = (
    "Optimizer.profile_hook_step.<locals>.wrapper",
    "DeepSpeedEngine.step",  # the original, or our wrapper of it
)


class PlaceIds(NamedTuple):
    """A place as table ids, with the flags of its certainty."""

    pass_: int
    module: int = 0
    call: int = 0
    param: int = 0
    flags: int = 0

    @property
    def packed(self) -> int:
        """Module, pass and call in one word, as in a cursor."""
        return self.module << MODULE_SHIFT | self.pass_ << PASS_SHIFT | self.call & CALL_MASK


_PLAIN = {int(pass_): PlaceIds(int(pass_)) for pass_ in Pass}


class Locator:
    """Finds the place of the calling thread."""

    def __init__(self, box: BoxWriter, names: NameTable, threads: Threads, *, folder: str) -> None:
        self.names = names
        self.threads = threads
        self._box = box
        self.counter = box.counter  # has the number of the current step
        self.folder = folder
        self._task_id = _torch.getter("graph_task_id", -1)
        self._node = _torch.getter("current_node")
        self._texts: dict[int, str] = {}
        self._lines: dict[tuple[str, int, FrameworkFrame | None], int] = {}
        self._params: dict[tuple[str, int], PlaceIds] = {}
        # The number of compilations that run. While it is 0, an event outside of any graph has the
        # graph id 0, and the hot path asks nothing more.
        self.compiling = 0

    # -- numbers -----------------------------------------------------------------------------------

    def place_ids(self, track: Track) -> PlaceIds:
        """The place of a thread now. Called on that thread."""
        top = track.top
        if top >= FIRST_MODULE_PLACE:
            return self.place_ids_of_packed(top, track, pass_of(top))
        running = self._task_id() != -1
        pass_ = pass_of(top)
        if pass_ == Pass.OPTIMIZER and not is_in_optimizers():
            # A step that raised did not run its post hook.
            track.top = track.below_optimizer[0] if track.below_optimizer else 0
            track.below_optimizer.clear()
            return self.place_ids(track)
        if not running:
            return _PLAIN[pass_]
        node = self._node()
        pass_ = pass_ if pass_ == Pass.OPTIMIZER else int(Pass.BACKWARD)
        return PlaceIds(pass_) if node is None else self.place_ids_of_node(node, track, pass_)

    def place_ids_in_optimizer(self, track: Track) -> PlaceIds:
        """`place_ids` for a hook of an optimizer step, which need not search the stack for the
        step."""
        return (
            self.place_ids(track)
            if track.top != OPTIMIZER_PLACE or self._task_id() != -1
            else _PLAIN[Pass.OPTIMIZER]
        )

    def place_ids_of_packed(self, packed: int, track: Track, pass_: int) -> PlaceIds:
        """The place of a packed place in the log of a track."""
        if packed < FIRST_MODULE_PLACE:
            return PlaceIds(pass_)
        call, flags = packed & CALL_MASK, 0
        if pass_of(packed) == Pass.RECOMPUTE:
            call = track.recomputed_call(packed)
            flags = FLAG_INFERRED if call == NO_CALL else 0
        elif pass_ == Pass.SHAPE_INFERENCE:
            pass_ = int(Pass.FORWARD)
        return PlaceIds(pass_, packed >> MODULE_SHIFT, call, 0, flags)

    def place_ids_of_node(self, node: Any, track: Track, pass_: int = Pass.BACKWARD) -> PlaceIds:
        """The place of an autograd node: the call that made it, or the parameter that it
        accumulates into."""
        seq = node._sequence_nr()
        if seq == ACCUMULATE_GRAD_SEQ:
            return self.place_ids_of_param(node.variable, pass_)
        maker, certain = self.threads.maker(seq, track)
        packed = maker.packed_at(seq) if maker is not None else None
        if maker is None or packed is None:
            return PlaceIds(pass_, flags=FLAG_UNKNOWN)
        place_ids = self.place_ids_of_packed(packed, maker, pass_)
        return place_ids if certain else place_ids._replace(flags=FLAG_INFERRED)

    def place_ids_of_param(self, param: torch.Tensor, pass_: int = Pass.BACKWARD) -> PlaceIds:
        """The place of a gradient accumulation: the parameter, in the module that has it."""
        names = self.names.param_names(param)
        return (
            self.place_ids_of_param_name(names[0], pass_)
            if names
            else PlaceIds(pass_, flags=FLAG_UNKNOWN)
        )

    def place_ids_of_param_name(self, name: str, pass_: int) -> PlaceIds:
        place_ids = self._params.get((name, pass_))
        if place_ids is None:
            place_ids = self._params[name, pass_] = PlaceIds(
                pass_, self.module_id(owner(name)), NO_CALL, self._intern(EntryType.PARAM, name)
            )
        return place_ids

    # -- names and lines ---------------------------------------------------------------------------

    def module_id(self, name: str) -> int:
        return self._intern(EntryType.MODULE, name)

    def _intern(self, entry_type: EntryType, text: str) -> int:
        entry_id = self._box.intern(entry_type, text)
        self._texts[entry_id] = text
        return entry_id

    def text_of(self, entry_id: int) -> str | None:
        return self._texts.get(entry_id)

    def line_id(self, stack: Stack) -> int:
        """The id of the user's line, with the framework's line that it has called."""
        if stack.file is None:
            return 0
        key = (stack.file, stack.line, stack.framework)
        entry_id = self._lines.get(key)
        if entry_id is None:
            text = stack.stored_line(folder=self.folder) or ""
            entry_id = self._lines[key] = self._intern(EntryType.LINE, text)
        return entry_id

    def graph_id(self, graph: str | None) -> int:
        """The id of a compiled graph; without one, of the graph that this thread compiles, or 0."""
        graph = graph or being_compiled()
        return self._box.intern(EntryType.GRAPH, graph) if graph else 0


def is_in_optimizers(count: int = 1) -> bool:
    """Whether this many optimizer steps are running on this thread, one inside the other."""
    frame = python_stack.caller()
    while frame is not None:
        count -= frame.f_code.co_qualname in _OPTIMIZER_FRAMES
        if not count:
            return True
        frame = frame.f_back
    return False
