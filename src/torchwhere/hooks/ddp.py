"""Whose gradients a DDP all-reduce carries: the parameters of its bucket.

DDP's C++ reducer launches buckets in order, 0 first, once per backward, from the hook of the
parameter that completed one. It does not say which. Its logger knows the buckets once they were
rebuilt, from the third step on; before that they follow from DDP's own bucketing function. A plan
is believed only if the bucket's size is that of the tensor that is reduced.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchwhere.hooks import _torch
from torchwhere.model.module_names import NameTable
from torchwhere.model.tensors import Slot

if TYPE_CHECKING:
    from torchwhere.native.load import NativeExtension

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
    completed_by: int = 0  # the id of the parameter whose gradient launched it last
    # that parameter, until its place was asked for: a model may go while we watch
    param: torch.Tensor | None = None
    spot: Any = None  # the place of that parameter, once it was asked for
    index: int = 0  # where it stood among the buckets of its instance when it was reduced last
    progress: Any = None  # of that instance


@dataclass(slots=True)
class BucketProgress:
    """How far a backward is in the buckets of one DDP instance. The native part has its own, and
    moves it on by itself."""

    task: int = -1
    next: int = 0
    turn: int = 0  # of all instances, the one with the highest was reduced last

    def forget(self) -> None:
        """The buckets are others from now on."""


class Reducer:
    """One DDP instance: its parameters, how they may be bucketed, and how far through its buckets a
    backward is."""

    def __init__(self, ddp: Any, names: NameTable, progress: Any) -> None:
        self.progress = progress
        self._ddp = weakref.ref(ddp)
        self._names = names
        self._params = list(_reduced(ddp))
        self._plans: list[list[Bucket]] = []  # the surest first
        self.looks_left = _MOST_LOOKS

    def look(self) -> None:
        """Ask DDP's logger how things stand, until it knows for good.

        Before a backward, never inside: the logger waits for a lock that the reducer holds while it
        launches a bucket.
        """
        ddp = self._ddp()
        if ddp is None or not self.looks_left:
            return
        self.looks_left -= 1
        self.progress.forget()
        said = ddp.logger._get_ddp_logging_data()
        rebuilt = said.strs_map.get("rebuilt_per_bucket_param_indices")
        if rebuilt:
            self._plans = [
                [self._bucket([int(i) for i in indices.split()]) for indices in rebuilt.split(",")]
            ]
            self.looks_left = 0
            return
        cap = int(said.ints_map["bucket_cap_bytes"])
        order = [
            int(i)
            for i in said.strs_map.get("prev_iteration_grad_ready_order_indices", "")
            .replace(",", " ")
            .split()
        ]
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
        found = (
            (module, key)
            for ref, key in map(self._params.__getitem__, indices)
            if (module := ref()) is not None
        )
        return [
            param for module, key in found if (param := module._parameters.get(key)) is not None
        ]

    def _assigned(self, order: list[int], cap: int, *, rebuilding: bool) -> list[Bucket]:
        """What DDP's bucketing makes of the parameters in this order; at first, of the reverse of
        their definition."""
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
        """The bucket that is being reduced in graph task `task`; None if that cannot be told."""
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
        if tensor.is_floating_point():  # not the map of used parameters, which is no bucket
            progress.next = index + 1
        return None

    def expects(self, task: int, tensor: torch.Tensor) -> bool:
        """Whether a bucket of this size is the next to be reduced in a graph task."""
        index, numel = self.progress.next if task == self.progress.task else 0, tensor.numel()
        return any(index < len(plan) and plan[index].numel == numel for plan in self._plans)


def _reduced(ddp: Any) -> Iterator[Slot]:
    """The parameters that DDP reduces, in its order, each by a module that has it: `swap_tensors`
    refuses a tensor that has a weak reference."""
    names = getattr(ddp, "parameters_to_ignore", ())
    seen = {id(param) for name, param in ddp.module.named_parameters() if name in names}
    for module in ddp.modules():
        ref = weakref.ref(module)
        for key, param in module._parameters.items():
            if param is not None and param.requires_grad and id(param) not in seen:
                seen.add(id(param))
                yield ref, key


class Reducers:
    """Finds the DDP instance, and with it the bucket, behind an all-reduce in backward."""

    def __init__(self, names: NameTable, native: NativeExtension | None = None) -> None:
        self._names = names
        self._make_progress: Callable[[], Any] = (
            BucketProgress if native is None else native.Buckets
        )
        # one for each reduction, of all instances
        self.turns: Any = itertools.count(1) if native is None else native.Count(1)
        self._of_param: dict[int, Reducer] = {}
        self._seen: dict[int, Reducer] = {}  # by the id of the DDP instance, while that is there
        self._alive: dict[int, weakref.ref[nn.Module]] = {}
        # by `replicate()`, which makes a DDP instance in the first forward
        self._replicated: list[weakref.ref[nn.Module]] = []
        self._task_id: Callable[[], int] = _torch.private("graph_task_id") or (lambda: -1)
        self._node: Callable[[], Any] = _torch.private("current_node") or (lambda: None)

    def meet(self, module: nn.Module) -> None:
        """A module is called for the first time: it may be a DDP instance, or have one."""
        replicated = _torch.private("replicated")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            self._add(module)
        elif replicated is not None and isinstance(module, replicated):
            self._replicated.append(weakref.ref(module))

    def _add(self, ddp: nn.Module) -> None:
        key = id(ddp)
        if key not in self._seen:
            reducer = self._seen[key] = Reducer(ddp, self._names, self._make_progress())
            self._alive[key] = weakref.ref(ddp, partial(self._forget, key))
            for param in reducer.params():
                self._of_param[id(param)] = reducer

    def _forget(self, key: int, _dead: object) -> None:
        """The ids of its parameters were good as long as it lived: its reducer holds them."""
        self._alive.pop(key, None)
        reducer = self._seen.pop(key, None)
        self._of_param = {
            param: other for param, other in self._of_param.items() if other is not reducer
        }
        if reducer is not None:
            reducer.progress.forget()

    def look(self) -> bool:
        """A backward is about to begin. Whether all is known by now: no need to look again before
        something new is met."""
        if self._replicated:
            self._add_replicated()
        is_known = not self._replicated
        for reducer in list(self._seen.values()):
            reducer.look()
            is_known = is_known and not reducer.looks_left
        return is_known

    def _add_replicated(self) -> None:
        state_of, waiting = _torch.private("replicate"), []
        for ref in self._replicated:
            module = ref()
            ddp = getattr(state_of.state(module), "_ddp", None) if module is not None else None
            if ddp is not None:
                self._add(ddp)
            elif module is not None:
                waiting.append(ref)
        self._replicated = waiting

    def bucket(self, tensor: torch.Tensor) -> Bucket | None:
        """The bucket whose gradients `tensor` carries, if DDP's reducer is launching it right now
        on this thread.

        It is launched by the hook of the parameter that completed it, or by a callback at the end
        of the backward. Cheap: in a small step the GPU waits for it.
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
            bucket.completed_by, bucket.param, bucket.spot = key, param, None
        return bucket

    def _at_the_end(self, task: int, tensor: torch.Tensor) -> Reducer | None:
        """Whose bucket is reduced once all gradients are there: a static graph's first backward
        reduces none before."""
        seen = list(self._seen.values())
        last = max(seen, key=lambda reducer: int(reducer.progress.turn), default=None)
        last = last if last is not None and last.progress.turn else None
        likeliest = [last] if last is not None else []
        return next(
            (reducer for reducer in (*likeliest, *seen) if reducer.expects(task, tensor)), last
        )
