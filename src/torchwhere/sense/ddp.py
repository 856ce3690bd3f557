"""Whose gradients a DDP all-reduce carries: the parameters of its bucket.

DDP's C++ reducer launches buckets in order, 0 first, once per backward, from the hook of the parameter that completed one. It
does not say which. Its logger knows the buckets once they were rebuilt, from the third step on; before that they follow from
DDP's own bucketing function. A plan is believed only if the bucket's size is that of the tensor that is reduced.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchwhere.inspect.names import NameTable
from torchwhere.sense import _torch

_DEFAULT_CAP_BYTES = 25 << 20
_MOST_LOOKS = 8  # backwards after which buckets that were not rebuilt never will be
_FIRST_BUCKET_BYTES = 1 << 20  # of the default cap: a small first bucket gets the reduction going


@dataclass(slots=True)
class Bucket:
    """Parameters whose gradients are reduced together."""

    names: list[str]
    numel: int
    entry: int = 0  # id of the names in the table, once they are there
    call: Any = None  # its first all-reduce; all later ones are the same but for their number
    completed_by: torch.Tensor | None = None  # the parameter whose gradient launched it last
    spot: Any = None  # the place of that parameter, once it was asked for


class Reducer:
    """One DDP instance: its parameters, how they may be bucketed, and how far through its buckets a backward is."""

    def __init__(self, ddp: Any, names: NameTable) -> None:
        self._ddp = weakref.ref(ddp)
        self._names = names
        self._params = [p for p in ddp.parameters() if p.requires_grad and p not in _ignored(ddp)]
        self._plans: list[list[Bucket]] = []  # the surest first
        self._task = -1
        self._next = 0
        self._looks_left = _MOST_LOOKS

    def look(self) -> None:
        """Ask DDP's logger how things stand, until it knows for good.

        Before a backward, never inside: the logger waits for a lock that the reducer holds while it launches a bucket.
        """
        ddp = self._ddp()
        if ddp is None or not self._looks_left:
            return
        self._looks_left -= 1
        said = ddp.logger._get_ddp_logging_data()
        rebuilt = said.strs_map.get("rebuilt_per_bucket_param_indices")
        if rebuilt:
            self._plans = [[self._bucket([int(i) for i in indices.split()]) for indices in rebuilt.split(",")]]
            self._looks_left = 0
            return
        cap = int(said.ints_map["bucket_cap_bytes"])
        order = [int(i) for i in said.strs_map.get("prev_iteration_grad_ready_order_indices", "").replace(",", " ").split()]
        rebuilds = ddp.static_graph or not ddp.find_unused_parameters
        self._plans = [self._assigned(order, cap, rebuilding=True)] if order and rebuilds else []
        self._plans.append(self._assigned(list(range(len(self._params))), sys.maxsize if rebuilds else cap, rebuilding=False))

    def _bucket(self, indices: list[int]) -> Bucket:
        params = [self._params[i] for i in indices]
        return Bucket([(self._names.param_names(p) or ["?"])[0] for p in params], sum(p.numel() for p in params))

    def _assigned(self, order: list[int], cap: int, *, rebuilding: bool) -> list[Bucket]:
        """What DDP's bucketing makes of the parameters in this order; at first, of the reverse of their definition."""
        assign = _torch.private("bucket_assignment")
        if assign is None:
            return []
        first = _FIRST_BUCKET_BYTES if cap == _DEFAULT_CAP_BYTES else cap
        tensors = [self._params[i] for i in order]
        indices, _ = assign(tensors, [first, cap], [False] * len(tensors), order if rebuilding else [])
        buckets = [self._bucket(list(bucket)) for bucket in indices]
        return buckets if rebuilding else buckets[::-1]

    def bucket(self, task: int, numel: int) -> Bucket | None:
        """The bucket that is being reduced in graph task `task`; None if that cannot be told."""
        if task != self._task:
            self._task, self._next = task, 0
        index, self._next = self._next, self._next + 1
        for plan in self._plans:
            if index < len(plan) and plan[index].numel == numel:
                return plan[index]
        return None


def _ignored(ddp: Any) -> set[Any]:
    names = getattr(ddp, "parameters_to_ignore", ())
    return {param for name, param in ddp.module.named_parameters() if name in names}


class Reducers:
    """Finds the DDP instance, and with it the bucket, behind an all-reduce in backward."""

    def __init__(self, names: NameTable) -> None:
        self._names = names
        self._of_param: dict[int, Reducer] = {}
        self._seen: weakref.WeakKeyDictionary[nn.Module, Reducer] = weakref.WeakKeyDictionary()
        self._last: Reducer | None = None
        self._task_id: Callable[[], int] = _torch.private("graph_task_id") or (lambda: -1)
        self._node: Callable[[], Any] = _torch.private("current_node") or (lambda: None)

    def add(self, ddp: nn.Module) -> None:
        if ddp not in self._seen:
            reducer = self._seen[ddp] = Reducer(ddp, self._names)
            for param in ddp.parameters():
                self._of_param[id(param)] = reducer

    def look(self) -> None:
        """A backward is about to begin."""
        for reducer in self._seen.values():
            reducer.look()

    def bucket(self, tensor: torch.Tensor) -> Bucket | None:
        """The bucket whose gradients `tensor` carries, if DDP's reducer is launching it right now on this thread.

        It is launched by the hook of the parameter that completed it, or by a callback at the end of the backward. Cheap: in
        a small step the GPU waits for it.
        """
        if not self._of_param:
            return None
        task = self._task_id()
        if task == -1:
            return None
        param = getattr(self._node(), "variable", None)
        reducer = self._of_param.get(id(param)) if param is not None else self._last
        if reducer is None:
            return None
        self._last = reducer
        bucket = reducer.bucket(task, tensor.numel())
        if bucket is not None and bucket.completed_by is not param:
            bucket.completed_by, bucket.spot = param, None
        return bucket
