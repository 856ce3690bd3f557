"""Every collective: a Python kernel on the `BackendSelect` key of each `c10d::` op.

Whatever starts a collective (torch.distributed, functional collectives, DDP's C++ reducer, FSDP,
DTensor, inductor's code, DeepSpeed) ends in such an op and passes this key, on every thread. No
other op pays anything. The kernel records and sends the op on its way; an error of ours is caught
before that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch

from torchwhere.blackbox.file_format import FLAG_ASYNC, FLAG_SHADOW, EntryType
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.hooks import _torch
from torchwhere.hooks import python_stack as stack
from torchwhere.hooks.ddp import Bucket
from torchwhere.hooks.device import DeviceMark
from torchwhere.hooks.error_limiter import ErrorLimiter, log
from torchwhere.hooks.groups import WHOLE_GROUP, StreamCounter, WatchedGroup, WatchedGroups
from torchwhere.hooks.kernels import Kernels, below_backend_select
from torchwhere.hooks.native_all_reduce import REDUCED, NativeAllReduce
from torchwhere.hooks.schemas import Op, all_ops

_REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
# the frame, torch's or ours, out of which the autograd engine is called
ENGINE_CALL = "_engine_run_backward"
# of an op, of the mode, of what keeps dynamo out of it
_OF_A_MODE = ("__call__", "__torch_dispatch__", "inner", "_fn")
_MOST_SIGNATURES = 4096  # per group; a job whose shapes never repeat would fill the table
_MOST_SPLITS = 1024  # and the sizes of the parts that an all_to_all is split into repeat even less


class IssuedCall(NamedTuple):
    """One collective as it is issued, ready to be recorded. Its number is the next one of its
    stream."""

    op: Op
    group: WatchedGroup
    stream: StreamCounter
    signature: int
    flags: int
    stack: stack.Stack
    bucket: Bucket | None  # of DDP, where it is DDP's own reduction
    device: torch.device | None  # None: on the CPU
    is_on_current_stream: bool = False  # on a device: later work on the stream waits for it


class CollectiveHook:
    """Hands every collective to `on_call` before it is launched."""

    def __init__(
        self,
        box: BoxWriter,
        groups: WatchedGroups,
        *,
        bucket_of: Callable[[torch.Tensor], Bucket | None],
        on_call: Callable[[IssuedCall], DeviceMark | None],
        on_bucket: Callable[[Bucket], DeviceMark | None],
        on_launched: Callable[[DeviceMark], None],
        turns: Any = None,
    ) -> None:
        self._box = box
        self._groups = groups
        self._bucket_of = bucket_of
        self._on_call = on_call
        self._on_bucket = on_bucket
        self.on_launched = on_launched
        self._turns = turns
        self._reductions: NativeAllReduce | None = None
        self._kernels: CollectiveKernels | None = None
        self.errors = ErrorLimiter("collectives", self.switch_off)

    def install(self) -> list[str]:
        lacking = _torch.missing("collectives")
        if any(
            _torch.private(key) is None
            for key in ("dispatch_key", "keyset_after", "all_schemas", "unbox_group")
        ):
            return lacking
        self._reductions = self._begin_natively()
        self._kernels = _kernels(
            native=self._reductions.native if self._reductions is not None else None
        )
        self._kernels.report_to(self)
        return lacking

    def _begin_natively(self) -> NativeAllReduce | None:
        """Leave all-reduces to the native part's kernel, which calls back for all but DDP's known
        buckets."""
        if self._box.native is None:
            return None
        op = next(op for op in all_ops() if op.raw == REDUCED)
        try:
            reductions = NativeAllReduce(self._box, turns=self._turns)
            reductions.install(partial(self.issue, op), self.on_launched, self.errors)
        except Exception as error:
            log.warning(
                "torchwhere: reductions are recorded by Python's own code, the native part could"
                " not: %s",
                error,
            )
            return None
        return reductions

    def switch_off(self) -> None:
        """Stop recording. The kernels stay until `remove`: one of them may be running right now."""
        if self._kernels is not None:
            self._kernels.told = None
        if self._reductions is not None:
            self._reductions.switch_off()

    def abandon(self) -> None:
        """In a forked child: the kernels stay until it watches by itself. Removing them takes locks
        that a thread of the parent may have held at the fork."""
        if self._reductions is not None:
            self._reductions.abandon()
            self._reductions = None
        if self._kernels is not None:
            self._kernels.leave()
            self._kernels = None

    def remove(self, *, are_others: bool = False) -> None:
        """Take the kernels back. If there are other threads and they go on issuing collectives,
        they stay, and only send calls on."""
        self.switch_off()
        self._reductions = None
        if self._kernels is not None:
            self._kernels.remove(are_others=are_others)
            self._kernels = None

    @_torch.unseen
    def issue(self, op: Op, args: tuple[Any, ...]) -> DeviceMark | None:
        """What a collective is, before it is launched. Returns the mark that `on_launched` wants
        after it, if any.

        DDP's reducer launches from C++, out of a backward that we saw begin or on a thread of the
        engine that has no Python stack. From its second time on a bucket is known and nothing is
        read anew: the step of a small model waits for this.
        """
        frame = stack.caller(2)
        is_direct = op.raw == REDUCED and _is_from_engine(frame)
        bucket = self._bucket_of(args[0][0]) if is_direct else None
        if bucket is not None and bucket.call is not None:
            return self._on_bucket(bucket)
        return self._issue_slowly(op, args, frame, bucket)

    def _issue_slowly(
        self, op: Op, args: tuple[Any, ...], frame: FrameType | None, bucket: Bucket | None
    ) -> DeviceMark | None:
        looked = stack.read(frame)
        group = self._groups.of(args[op.group_at])
        inputs = [] if op.is_barrier else _tensors(args, op.inputs)
        outputs = _tensors(args, op.outputs) if op.outputs else []
        if op.of_one is not None and len(inputs) == 1:
            op = op.of_one
        peer = None if op.root_at is None else group.global_rank(args[op.root_at])
        stream = (
            self._groups.stream(group, _pair(op, peer)) if op.is_p2p else group.streams[WHOLE_GROUP]
        )
        signature = self._signature(op, group, args, inputs, outputs, peer, looked.api)
        flags = (FLAG_ASYNC if _is_async(op, args, looked.api) else 0) | (
            FLAG_SHADOW if looked.is_shadow else 0
        )
        device = _accelerator(inputs or outputs)
        call = IssuedCall(
            op,
            group,
            stream,
            signature,
            flags,
            looked,
            bucket,
            device,
            device is not None and op.async_at is not None and not flags & FLAG_ASYNC,
        )
        if bucket is not None:
            # nothing of this moment is kept alive
            bucket.call = call._replace(stack=stack.Stack(), bucket=None)
        return self._on_call(call)

    def _signature(
        self,
        op: Op,
        group: WatchedGroup,
        args: tuple[Any, ...],
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        peer: int | None,
        api: str | None,
    ) -> int:
        """The id of what repeats: everything about a call but its number, place and time."""
        # `.op()` does the same and takes 0.9 us more.
        reduce_op = (
            args[op.reduce_op_at]._get_method("op")() if op.reduce_op_at is not None else None
        )
        tensors = inputs or outputs
        dtype = tensors[0].dtype if tensors else None
        shapes, out_shapes = tuple([t.shape for t in inputs]), tuple([t.shape for t in outputs])
        splits = (
            _splits(op, args)
            if op.splits_at is not None and len(group.signatures) < _MOST_SPLITS
            else None
        )
        key = (op.raw, dtype, shapes, out_shapes, peer, reduce_op, api, splits)
        known = group.signatures.get(key)
        if known is None:
            fields: dict[str, Any] = {
                "op": op.name,
                "raw_op": f"c10d::{op.raw}",
                "group": group.name,
                "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
                "shapes": [list(map(int, shape)) for shape in shapes or out_shapes],
                "out_shapes": [list(map(int, shape)) for shape in out_shapes] if shapes else [],
                "bytes": max(_bytes(inputs), _bytes(outputs)),
                "peer": peer,
                "reduce_op": None if reduce_op is None else _REDUCE_OPS[reduce_op],
                "api": api,
            }
            if splits is not None:
                fields |= {"splits": splits[0], "out_splits": splits[1]}
            known = self._box.intern(EntryType.COLLECTIVE, json.dumps(fields))
            if len(group.signatures) < _MOST_SIGNATURES:
                group.signatures[key] = known
        return known


class CollectiveKernels(Kernels):
    """A Python kernel on every op, but on the one that the native part has taken, if it has."""

    told: CollectiveHook | None

    def __init__(self, *, native: Any) -> None:
        super().__init__()
        self.native = native
        for op in all_ops():
            if native is None or op.raw != REDUCED:
                self._register(f"c10d::{op.raw}", partial(self._make_kernel, op))
            else:
                self._names.append(f"c10d::{op.raw}")

    def _make_kernel(self, op: Op, redispatch: Callable[..., Any]) -> Any:
        below = below_backend_select()

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            told, mark = self.told, None
            if told is not None:
                try:
                    mark = told.issue(op, args)
                except Exception as error:
                    told.errors(error)
            else:
                self._untold += 1
            if told is None or mark is None:
                return redispatch(keyset & below, *args, **kwargs)
            launched = redispatch(keyset & below, *args, **kwargs)
            told.on_launched(mark)
            return launched

        return kernel

    def _calls(self) -> tuple[int, int]:
        return self._untold, self.native.passed() if self.native is not None else 0

    def _end(self) -> None:
        super()._end()
        if self.native is not None:
            self.native.end()


def _kernels(*, native: Any) -> CollectiveKernels:
    """The kernels that were left, or new ones."""
    left = CollectiveKernels.take_left()
    if left is not None and left.native is not native:
        left.remove()
        left = None
    return left if left is not None else CollectiveKernels(native=native)


def _is_from_engine(frame: FrameType | None) -> bool:
    """Whether C++ called, out of a backward: no frame in between, but those of a dispatch mode that
    is on."""
    while frame is not None and frame.f_code.co_name in _OF_A_MODE:
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == ENGINE_CALL


def _pair(op: Op, peer: int | None) -> tuple[int, int]:
    """The two ranks a message goes between: each pair, in each direction, is counted by itself."""
    me = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    other = -1 if peer is None else peer
    return (me, other) if op.name == "send" else (other, me)


def _tensors(args: tuple[Any, ...], positions: tuple[int, ...]) -> list[torch.Tensor]:
    """The tensors in some arguments, lists and lists of lists laid flat."""
    found: list[torch.Tensor] = []
    for position in positions:
        value = args[position]
        if not isinstance(value, list):
            found.append(value)
        elif value and isinstance(value[0], list):
            found += [tensor for inner in value for tensor in inner]
        else:
            found += value
    return found


def _splits(op: Op, args: tuple[Any, ...]) -> tuple[tuple[int, ...], ...] | None:
    """Into what sizes the input and the output of an all_to_all are split; empty where they are
    even."""
    return (
        tuple(tuple(map(int, args[at])) for at in op.splits_at)
        if op.splits_at is not None
        else None
    )


def _accelerator(tensors: list[torch.Tensor]) -> torch.device | None:
    device = tensors[0].device if tensors else None
    return device if device is not None and device.type not in ("cpu", "meta") else None


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(int(tensor.numel()) * tensor.element_size() for tensor in tensors)


def _is_async(op: Op, args: tuple[Any, ...], api: str | None) -> bool:
    """Whether the caller waits at once. Point-to-point ops carry no such argument; the function's
    name tells."""
    if op.is_p2p:
        return api in ("isend", "irecv", "batch_isend_irecv")
    if op.async_at is None:
        return False
    return bool(args[op.async_at]) if op.async_at < len(args) else True
