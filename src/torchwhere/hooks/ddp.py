"""Finds the parameters whose gradients a DDP all-reduce carries: those of its bucket.

DDP's C++ reducer launches buckets in order, 0 first, once per backward, from the hook of the
parameter that completed the bucket. It does not say which bucket it is. Its logger has the buckets
once they are rebuilt, from the third step on; before that, DDP's own bucketing function gives them.
A plan counts only if the size of its bucket is the size of the reduced tensor.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchwhere.hooks import _torch
from torchwhere.model.module_names import NameTable
from torchwhere.model.tensors import WeakSlot

if TYPE_CHECKING:
    from torchwhere.native.load import NativeExtension

_DEFAULT_CAP_BYTES = 25 << 20
_MOST_LOOKS = 8  # buckets that are not rebuilt after so many backwards are never rebuilt
_MOST_SKIPS = 64  # backwards of other threads, until an instance without a look is given up
_FIRST_BUCKET_BYTES = 1 << 20  # with the default cap: a small first bucket starts early


@dataclass(slots=True)
class Bucket:
    """Parameters whose gradients are reduced together."""

    names: list[str]
    numel: int
    entry: int = 0  # id of the names in the table; 0 until they are written
    call: Any = None  # its first all-reduce; later ones differ only in their number
    completed_by: int = 0  # the id of the parameter whose gradient launched it last
    # that parameter, only until its place is found: the job may free a model during a watch
    param: torch.Tensor | None = None
    place_ids: Any = None  # the place of that parameter, once it is found
    index: int = 0  # its position among the buckets of its instance at the last reduction
    progress: Any = None  # of that instance


@dataclass(slots=True)
class BucketProgress:
    """How many buckets of one DDP instance a backward has reduced. The native extension has its own
    class, and updates it."""

    task: int = -1
    next: int = 0
    turn: int = 0  # the instance with the highest turn was reduced last

    def forget(self) -> None:
        """Forget the buckets: they have changed."""


class Reducer:
    """One DDP instance: its parameters, the possible plans of its buckets, and the progress of a
    backward."""

    def __init__(self, ddp: Any, names: NameTable, progress: Any, *, thread: int) -> None:
        self.progress = progress
        self._thread = thread  # the one that called it first
        self._skips_left = _MOST_SKIPS
        self._ddp = weakref.ref(ddp)
        self._names = names
        self._params = list(_reduced(ddp))
        self._plans: list[list[Bucket]] = []  # the most certain first
        self.looks_left = _MOST_LOOKS

    def look(self) -> None:
        """Read the buckets from DDP's logger, until they are final.

        Call it before a backward, never inside: the logger waits for a lock that the reducer holds
        while it launches a bucket. Another thread may be in a backward of this instance, and may
        wait for the calling thread there, so only the thread of the instance looks.
        """
        ddp = self._ddp()
        if ddp is None or not self.looks_left:
            return
        if threading.get_ident() != self._thread:
            self._skips_left -= 1
            self.looks_left = self.looks_left if self._skips_left else 0
            return
        self.looks_left -= 1
        self.progress.forget()
        logged = ddp.logger._get_ddp_logging_data()
        rebuilt = logged.strs_map.get("rebuilt_per_bucket_param_indices")
        if rebuilt:
            self._plans = [
                [self._bucket([int(i) for i in indices.split()]) for indices in rebuilt.split(",")]
            ]
            self.looks_left = 0
            return
        cap = int(logged.ints_map["bucket_cap_bytes"])
        ready_order = logged.strs_map.get("prev_iteration_grad_ready_order_indices", "")
        order = [int(i) for i in ready_order.replace(",", " ").split()]
        rebuilds = ddp.static_graph or not ddp.find_unused_parameters
        self._plans = [self._assigned(order, cap, rebuilding=True)] if order and rebuilds else []
        self._plans.append(
            self._assigned(
                list(range(len(self._params))), sys.maxsize if rebuilds else cap, rebuilding=False
            )
        )

    def _bucket(self, indices: list[int]) -> Bucket:
        params = self._tensors(indices)
        return Bucket(
            [(self._names.param_names(p) or ["?"])[0] for p in params],
            sum(p.numel() for p in params),
        )

    def params(self) -> list[torch.Tensor]:
        return self._tensors(range(len(self._params)))

    def _tensors(self, indices: Iterable[int]) -> list[torch.Tensor]:
        alive = (
            (module, key)
            for ref, key in map(self._params.__getitem__, indices)
            if (module := ref()) is not None
        )
        return [
            param for module, key in alive if (param := module._parameters.get(key)) is not None
        ]

    def _assigned(self, order: list[int], cap: int, *, rebuilding: bool) -> list[Bucket]:
        """The buckets that DDP makes of the parameters in this order; without rebuilding, in the
        reverse order of their definition."""
        assign = _torch.private("bucket_assignment")
        tensors = self._tensors(order)
        if assign is None or len(tensors) != len(order):
            return []
        first = _FIRST_BUCKET_BYTES if cap == _DEFAULT_CAP_BYTES else cap
        indices, _ = assign(
            tensors, [first, cap], [False] * len(tensors), order if rebuilding else []
        )
        buckets = [self._bucket(list(bucket)) for bucket in indices]
        return buckets if rebuilding else buckets[::-1]

    def bucket(self, task: int, tensor: torch.Tensor) -> Bucket | None:
        """The bucket that graph task `task` reduces now; None if it is unknown."""
        progress = self.progress
        if task != progress.task:
            progress.task, progress.next = task, 0
        index, numel = progress.next, tensor.numel()
        for plan in self._plans:
            if index < len(plan) and plan[index].numel == numel:
                progress.next = index + 1
                bucket: Bucket = plan[index]
                bucket.index, bucket.progress = index, progress
                return bucket
        if tensor.is_floating_point():  # the map of used parameters is not a bucket
            progress.next = index + 1
        return None

    def expects(self, task: int, tensor: torch.Tensor) -> bool:
        """Whether the next bucket of a graph task has this size."""
        index, numel = self.progress.next if task == self.progress.task else 0, tensor.numel()
        return any(index < len(plan) and plan[index].numel == numel for plan in self._plans)


def _reduced(ddp: Any) -> Iterator[WeakSlot]:
    """The parameters that DDP reduces, in its order. Each is a weak reference to its module and a
    key: `swap_tensors` refuses a tensor that has a weak reference."""
    ignored = getattr(ddp, "parameters_to_ignore", ())
    done = {id(param) for name, param in ddp.module.named_parameters() if name in ignored}
    for module in ddp.modules():
        ref = weakref.ref(module)
        for key, param in module._parameters.items():
            if param is not None and param.requires_grad and id(param) not in done:
                done.add(id(param))
                yield ref, key


def _instance(module: nn.Module) -> nn.Module | None:
    """The DDP instance that a module is, or that `replicate()` has created for it by now."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return module
    instance: nn.Module | None = getattr(_torch.private("replicate").state(module), "_ddp", None)
    return instance


class Reducers:
    """Finds the DDP instance and the bucket of an all-reduce in backward."""

    def __init__(self, names: NameTable, native: NativeExtension | None) -> None:
        self._names = names
        self._make_progress: Callable[[], Any] = (
            BucketProgress if native is None else native.Buckets
        )
        # numbers the reductions of all instances
        self.turns: Any = itertools.count(1) if native is None else native.Count(1)
        self._of_param: dict[int, Reducer] = {}
        self._reducers: dict[int, Reducer] = {}  # by the id of the DDP instance, while it lives
        self._alive: dict[int, weakref.ref[nn.Module]] = {}
        # Modules that were called and are or have DDP instances, until the next backward begins: a
        # first call must not wait for a list of all parameters, and `replicate()` creates its
        # instance in the first forward.
        self._waiting: list[tuple[weakref.ref[nn.Module], int]] = []  # each with its thread
        self._task_id: Callable[[], int] = _torch.getter("graph_task_id", -1)
        self._node: Callable[[], Any] = _torch.getter("current_node")

    def meet(self, module: nn.Module) -> None:
        """Check a module at its first call: it may be a DDP instance, or have one."""
        replicated = _torch.private("replicated")
        if isinstance(module, nn.parallel.DistributedDataParallel) or (
            replicated is not None and isinstance(module, replicated)
        ):
            self._waiting.append((weakref.ref(module), threading.get_ident()))

    def _add(self, ddp: nn.Module, *, thread: int) -> None:
        key = id(ddp)
        if key not in self._reducers:
            reducer = Reducer(ddp, self._names, self._make_progress(), thread=thread)
            self._reducers[key] = reducer
            self._alive[key] = weakref.ref(ddp, partial(self._forget, key))
            for param in reducer.params():
                self._of_param[id(param)] = reducer

    def _forget(self, key: int, _dead: object) -> None:
        """Drop a dead DDP instance: the ids of its parameters are valid only while it lives."""
        self._alive.pop(key, None)
        reducer = self._reducers.pop(key, None)
        self._of_param = {
            param: other for param, other in self._of_param.items() if other is not reducer
        }
        if reducer is not None:
            reducer.progress.forget()

    def look(self) -> bool:
        """Read the buckets before a backward. Returns whether all are final: no need to look again
        until there is a new instance."""
        if self._waiting:
            self._add_waiting()
        is_final = not self._waiting
        for reducer in list(self._reducers.values()):
            reducer.look()
            is_final = is_final and not reducer.looks_left
        return is_final

    def _add_waiting(self) -> None:
        called, self._waiting = self._waiting, []
        for ref, thread in called:
            module = ref()
            ddp = None if module is None else _instance(module)
            if ddp is not None:
                self._add(ddp, thread=thread)
            elif module is not None:
                self._waiting.append((ref, thread))

    def bucket(self, tensor: torch.Tensor) -> Bucket | None:
        """The bucket whose gradients `tensor` carries, if DDP's reducer launches it now on this
        thread.

        The hook of the parameter that completed it launches it, or a callback at the end of the
        backward. This must be cheap: in a small step the GPU waits for it.
        """
        if not self._of_param:
            return None
        task = self._task_id()
        if task == -1:
            return None
        param = getattr(self._node(), "variable", None)
        key = id(param)
        reducer = self._of_param.get(key) if param is not None else self._at_the_end(task, tensor)
        if reducer is None:
            return None
        reducer.progress.turn = next(self.turns)
        bucket = reducer.bucket(task, tensor)
        if bucket is not None and bucket.completed_by != key:
            bucket.completed_by, bucket.param, bucket.place_ids = key, param, None
        return bucket

    def _at_the_end(self, task: int, tensor: torch.Tensor) -> Reducer | None:
        """The instance whose bucket is reduced after all gradients are computed: the first backward
        of a static graph reduces no bucket earlier."""
        reducers = list(self._reducers.values())
        last = max(reducers, key=lambda reducer: int(reducer.progress.turn), default=None)
        if last is not None and last.progress.turn:
            reducers.insert(0, last)
        else:
            last = None
        return next((reducer for reducer in reducers if reducer.expects(task, tensor)), last)
