"""Lists every op that runs, in order, with its place: a dispatch mode for `CommDebugMode`.

It costs about 6 us per op; torch's way into Python and back takes 5 of them. A watch does not use
it. Compilation is the same under it, and in a compiled graph it sees the ops that the graph still
calls. `ops` is one flat list with three items for each op: the op, its packed place
(`blackbox/file_format.py`), and the DTensors among its arguments. A tuple for each op would trigger
the garbage collector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchwhere.drop_in.counted_ops import DispatchedCollective
from torchwhere.hooks import _torch
from torchwhere.hooks.error_limiter import ErrorLimiter, log
from torchwhere.hooks.locate import Locator
from torchwhere.hooks.threads import BACKWARD_PLACE, FIRST_MODULE_PLACE, Track
from torchwhere.model.graph_walk import ACCUMULATE_GRAD_SEQ

_OP = type(torch.ops.aten.add.Tensor)  # ops with a process group have a subclass of it
COLLECTIVE_NAMESPACES = (
    "c10d",
    "_c10d_functional",
    "c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
)


class Sharded(NamedTuple):
    """The DTensors among the arguments of an op."""

    shapes: list[torch.Size]
    placements: list[tuple[Any, ...]]
    mesh: Any


class OpLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the ops of the threads that entered it, unless `lists` is false, and reports
    collectives to `dispatched`, on the thread that runs them."""

    supports_higher_order_operators = True

    def __init__(
        self, locator: Locator, dispatched: DispatchedCollective, *, lists: bool = True
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Any] = []
        self._lists = lists
        self._dispatched = dispatched
        self.is_paused = False  # while torchwhere itself reads tensors
        self._locator = locator
        self._local, self._here = locator.threads.local, locator.threads.here
        self._task_id: Callable[[], int] = _torch.private("graph_task_id") or (lambda: -1)
        self._node: Callable[[], Any] = _torch.private("current_node") or (lambda: None)
        # Thread, sequence number and packed place of the last node: a node runs several ops.
        self._last_node: tuple[Track | None, int, int] = (None, -1, 0)
        self._fake_tensor = _torch.private("fake_tensor")
        self._fake_mode: Callable[[], Any] = _torch.private("fake_mode") or (lambda: None)
        self._modes_left: Callable[[], int] = _torch.private("dispatch_modes") or (lambda: 0)
        self._errors = ErrorLimiter("ops", lambda: None)
        for sentence in _torch.missing("ops"):
            log.warning("torchwhere: %s", sentence)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell dynamo to compile as without this mode, and to disable it meanwhile."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Decline torch's wrapper, which keeps dynamo out and imports it. `unseen` below does the
        same at no cost."""
        return False

    @_torch.unseen
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_sharded = DTensor in types and isinstance(func, _OP)
        if is_sharded:  # DTensor answers, and its ops on the local tensors come here
            self._list(func, args, is_sharded=True)
            return NotImplemented
        is_collective, is_done = self._begin_collective(func), False
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
            is_done = True
        finally:
            if is_collective:
                self._end_collective(is_done=is_done)
        self._list(func, args, is_sharded=False)
        return result

    def _begin_collective(self, func: Any) -> bool:
        try:
            if not isinstance(func, _OP) or func.namespace not in COLLECTIVE_NAMESPACES:
                return False
            self._dispatched.begin(func)
        except Exception as error:
            self._errors(error)
            return False
        return True

    def _end_collective(self, *, is_done: bool) -> None:
        try:
            self._dispatched.end(is_done=is_done)
        except Exception as error:
            self._errors(error)

    def _list(self, func: Any, args: Any, *, is_sharded: bool) -> None:
        try:
            # A higher-order operator is not an op of the program.
            if not isinstance(func, _OP) or self.is_paused or not self._lists:
                return
            if is_sharded or not self._has_no_data(args):
                sharded = _sharded(args) if is_sharded else None
                # one call into C, so that threads do not interleave
                self.ops.extend((func, self._packed_place(), sharded))
        except Exception as error:
            self._errors(error)

    def _has_no_data(self, args: Any) -> bool:
        """Whether the op runs on fake tensors, to infer shapes."""
        first = args[0] if args else None
        if type(first) is list and first:
            first = first[0]
        return type(first) is self._fake_tensor or (
            self._modes_left() > 0 and self._fake_mode() is not None
        )

    def _packed_place(self) -> int:
        try:
            track = self._local.track
        except AttributeError:
            track = self._here()
        top = track.top
        if top >= FIRST_MODULE_PLACE or self._task_id() == -1:
            return top
        node = self._node()
        if node is None:
            return BACKWARD_PLACE
        seq = node._sequence_nr()
        last_track, last_seq, place = self._last_node
        if seq != last_seq or track is not last_track or seq == ACCUMULATE_GRAD_SEQ:
            place = self._locator.place_ids_of_node(node, track).packed
            self._last_node = track, seq, place
        return place


def _sharded(args: Any) -> Sharded:
    tensors = [arg for arg in args if isinstance(arg, DTensor)]
    mesh = tensors[-1].device_mesh if tensors else None
    return Sharded(
        [tensor.shape for tensor in tensors], [tensor.placements for tensor in tensors], mesh
    )
