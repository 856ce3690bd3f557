"""Records every collective: a Python kernel on the `BackendSelect` key of each `c10d::` op.

Every collective (of torch.distributed, functional collectives, DDP's C++ reducer, FSDP, DTensor,
inductor, DeepSpeed) calls such an op and passes this key, on every thread. Other ops cost nothing.
The kernel records the call and redispatches it; it catches errors of torchwhere before that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch

from torchwhere.blackbox.file_format import FLAG_ASYNC, FLAG_ON_DEVICE, FLAG_SHADOW, EntryType
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.hooks import _torch
from torchwhere.hooks import python_stack as stack
from torchwhere.hooks.ddp import Bucket, Reducers
from torchwhere.hooks.device import AT_LAUNCH, AT_WAIT, UNMARKED, DeviceHook
from torchwhere.hooks.error_limiter import ErrorLimiter, log
from torchwhere.hooks.groups import WHOLE_GROUP, StreamCounter, WatchedGroup, WatchedGroups
from torchwhere.hooks.kernels import ALL_REDUCE, Kernels, NativeKernel, below_backend_select
from torchwhere.hooks.schemas import Op, all_ops

_REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
# the frame, of torch or of our wrapper, that calls the autograd engine
ENGINE_CALL = "_engine_run_backward"
# functions of a dispatch mode: of the op, of the mode, of the wrapper that disables dynamo
_DISPATCH_MODE_FRAMES = ("__call__", "__torch_dispatch__", "inner", "_fn")
_MOST_SIGNATURES = 4096  # per group: a job whose shapes never repeat would fill the table
_MOST_TENSORS = 64  # of one collective: the job may wait for any of them
_MOST_SPLITS = 1024  # fewer: uneven split sizes of an all_to_all repeat even less


class CollectiveCall(NamedTuple):
    """One collective that is about to be launched. Its number is the next one of its stream."""

    op: Op
    group: WatchedGroup
    stream: StreamCounter
    signature: int
    flags: int
    stack: stack.Stack
    bucket: Bucket | None  # of DDP, where it is DDP's own reduction
    device_index: int  # -1: on the CPU
    end: int = AT_WAIT  # where a mark on its device shows its end
    # whether an equal call with an equal stack may be recorded without a new look at them
    may_repeat: bool = False
    frame: FrameType | None = None  # the innermost one of the stack

    def without_objects(self) -> CollectiveCall:
        """The same call without the stack and the bucket, which hold objects of the job."""
        return self._replace(stack=stack.Stack(), bucket=None, frame=None)


class CollectiveHook:
    """Passes every collective to `on_call` before it is launched."""

    def __init__(
        self,
        box: BoxWriter,
        groups: WatchedGroups,
        reducers: Reducers,
        device: DeviceHook,
        *,
        on_call: Callable[[CollectiveCall], None],
        on_bucket: Callable[[Bucket], None],
    ) -> None:
        self._box = box
        self._groups = groups
        self._bucket_of = reducers.bucket
        self._on_call = on_call
        self._on_bucket = on_bucket
        self._device = device
        self._device_errors = ErrorLimiter("launched collectives", self._ignore_launches)
        self.reports_launches = False
        self._turns = reducers.turns
        self._native_kernel: NativeKernel | None = None
        self._kernels: CollectiveKernels | None = None
        self.errors = ErrorLimiter("collectives", self.switch_off)

    def install(self) -> list[str]:
        lacking = _torch.missing("collectives")
        if any(
            _torch.private(key) is None
            for key in ("dispatch_key", "keyset_after", "all_schemas", "unbox_group")
        ):
            return lacking
        self._native_kernel = self._install_native()
        self._kernels = _kernels(
            native=None if self._native_kernel is None else self._native_kernel.native
        )
        self.reports_launches = self._device.is_on
        self._kernels.report_to(self)
        return lacking

    def _install_native(self) -> NativeKernel | None:
        """Install the native kernel. It calls `issue` for all calls that it does not know."""
        if self._box.native is None:
            return None
        try:
            kernel = NativeKernel(self._box, turns=self._turns)
            kernel.install(self)
        except Exception as error:
            log.warning(
                "torchwhere: the native extension cannot record collectives, Python code records"
                " them: %s",
                error,
            )
            return None
        return kernel

    def switch_off(self) -> None:
        """Stop recording. The kernels stay until `remove`: a thread may be inside one."""
        if self._kernels is not None:
            self._kernels.receiver = None
        if self._native_kernel is not None:
            self._native_kernel.switch_off()

    def abandon(self) -> None:
        """In a forked child: leave the kernels registered until the child starts a watch. Removing
        them takes locks that a thread of the parent may have held at the fork."""
        if self._native_kernel is not None:
            self._native_kernel.abandon()
            self._native_kernel = None
        if self._kernels is not None:
            self._kernels.leave()
            self._kernels = None

    def remove(self, *, are_others: bool = False) -> None:
        """Remove the kernels. If other threads continue to issue collectives, the kernels stay and
        only redispatch calls."""
        self.switch_off()
        self._native_kernel = None
        if self._kernels is not None:
            self._kernels.remove(are_others=are_others)
            self._kernels = None

    @_torch.unseen
    def launched(self, op: Op, args: tuple[Any, ...], result: Any) -> None:
        """Report to the hook for devices that a collective was launched, and what its op
        returned."""
        with self._device_errors:
            work = result[-1] if isinstance(result, tuple) else result
            tensors = _tensors(args, op.outputs or op.inputs) if not op.is_barrier else []
            self._device.launched(work, tensors[:_MOST_TENSORS])

    def _ignore_launches(self) -> None:
        self.reports_launches = False

    @_torch.unseen
    def issue(self, op: Op, args: tuple[Any, ...]) -> None:
        """Record a collective before it is launched.

        DDP's reducer launches all-reduces from C++: in a backward whose start was recorded, or on a
        thread of the engine without a Python stack. From the second time on a bucket is known, and
        nothing is read again: the step of a small model waits for this.
        """
        frame = stack.caller(2)
        is_direct = op.raw == ALL_REDUCE and _is_from_engine(frame)
        bucket = self._bucket_of(args[0][0]) if is_direct else None
        if bucket is not None and bucket.call is not None:
            self._on_bucket(bucket)
        else:
            self._issue_slowly(op, args, frame, bucket, is_direct=is_direct)

    def _issue_slowly(
        self,
        op: Op,
        args: tuple[Any, ...],
        frame: FrameType | None,
        bucket: Bucket | None,
        *,
        is_direct: bool,
    ) -> None:
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
        tensors = inputs or outputs
        device_index = tensors[0].get_device() if tensors else -1  # -1: on the CPU or on `meta`
        flags = (
            (FLAG_ASYNC if _is_async(op, args, looked.api) else 0)
            | (FLAG_SHADOW if looked.is_shadow else 0)
            | (FLAG_ON_DEVICE if device_index >= 0 else 0)
        )
        call = CollectiveCall(
            op,
            group,
            stream,
            signature,
            flags,
            looked,
            bucket,
            device_index,
            _end(op, flags, bucket),
            may_repeat=not is_direct and not looked.is_shadow and not any(_splits(op, args) or ()),
            frame=frame,
        )
        if bucket is not None:
            bucket.call = call.without_objects()
        self._on_call(call)

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
        """The id of all facts about a call except its number, place and time."""
        # `.op()` returns the same and takes 0.9 us longer.
        reduce_op = (
            args[op.reduce_op_at]._get_method("op")() if op.reduce_op_at is not None else None
        )
        tensors = inputs or outputs
        dtype = tensors[0].dtype if tensors else None
        shapes, out_shapes = tuple([t.shape for t in inputs]), tuple([t.shape for t in outputs])
        splits = _splits(op, args)
        if splits is not None and any(splits) and len(group.signatures) >= _MOST_SPLITS:
            splits = None
        key = (op.raw, dtype, shapes, out_shapes, peer, reduce_op, api, splits)
        signature = group.signatures.get(key)
        if signature is None:
            fields = _fields(op, group, key, size=max(_bytes(inputs), _bytes(outputs)))
            signature = self._box.intern(EntryType.COLLECTIVE, json.dumps(fields))
            if len(group.signatures) < _MOST_SIGNATURES:
                group.signatures[key] = signature
        return signature


class CollectiveKernels(Kernels):
    """The kernels on all collectives: the native kernel, or a Python kernel on each op."""

    receiver: CollectiveHook | None

    def __init__(self, *, native: Any) -> None:
        super().__init__()
        self.native = native
        for op in all_ops():
            if native is None:
                self._register(f"c10d::{op.raw}", partial(self._make_kernel, op))
            else:
                self._names.append(f"c10d::{op.raw}")

    def _make_kernel(self, op: Op, redispatch: Callable[..., Any]) -> Any:
        below = below_backend_select()

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            receiver = self.receiver
            if receiver is not None:
                try:
                    receiver.issue(op, args)
                except Exception as error:
                    receiver.errors(error)
            else:
                self._unreported += 1
            result = redispatch(keyset & below, *args, **kwargs)
            if receiver is not None and receiver.reports_launches:
                receiver.launched(op, args, result)
            return result

        return kernel

    def _calls(self) -> tuple[int, int]:
        return self._unreported, self.native.passed() if self.native is not None else 0

    def _end(self) -> None:
        super()._end()
        if self.native is not None:
            self.native.end()


def _kernels(*, native: Any) -> CollectiveKernels:
    """The kernels that an earlier watch left registered, or new ones."""
    left = CollectiveKernels.take_left()
    if left is not None and left.native is not native:
        left.remove()
        left = None
    return left or CollectiveKernels(native=native)


def _is_from_engine(frame: FrameType | None) -> bool:
    """Whether C++ issued the call in a backward: the only frames in between are those of an active
    dispatch mode."""
    while frame is not None and frame.f_code.co_name in _DISPATCH_MODE_FRAMES:
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == ENGINE_CALL


def _end(op: Op, flags: int, bucket: Bucket | None) -> int:
    """Where a mark shows the end of a collective. One that is not asynchronous blocks the current
    stream of its device. DDP waits for its buckets by itself."""
    if op.async_at is not None and not flags & FLAG_ASYNC:
        return AT_LAUNCH
    return AT_WAIT if bucket is None else UNMARKED


def _pair(op: Op, peer: int | None) -> tuple[int, int]:
    """Source and destination of a message: each pair has its own counter, in each direction."""
    me = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    other = -1 if peer is None else peer
    return (me, other) if op.name == "send" else (other, me)


def _fields(op: Op, group: WatchedGroup, key: tuple[Any, ...], *, size: int) -> dict[str, Any]:
    """The facts of a signature, as the box has them."""
    raw, dtype, shapes, out_shapes, peer, reduce_op, api, splits = key
    fields = {
        "op": op.name,
        "raw_op": f"c10d::{raw}",
        "group": group.name,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "shapes": [list(map(int, shape)) for shape in shapes or out_shapes],
        "out_shapes": [list(map(int, shape)) for shape in out_shapes] if shapes else [],
        "bytes": size,
        "peer": peer,
        "reduce_op": None if reduce_op is None else _REDUCE_OPS[reduce_op],
        "api": api,
    }
    return fields if splits is None else fields | {"splits": splits[0], "out_splits": splits[1]}


def _tensors(args: tuple[Any, ...], positions: tuple[int, ...]) -> list[torch.Tensor]:
    """The tensors in some arguments; lists and lists of lists are flattened."""
    tensors: list[torch.Tensor] = []
    for position in positions:
        value = args[position]
        if not isinstance(value, list):
            tensors.append(value)
        elif value and isinstance(value[0], list):
            tensors += [tensor for inner in value for tensor in inner]
        else:
            tensors += value
    return tensors


def _splits(op: Op, args: tuple[Any, ...]) -> tuple[tuple[int, ...], ...] | None:
    """The split sizes of the input and the output of an all_to_all; empty if they are even."""
    if op.splits_at is None:
        return None
    return tuple(tuple(map(int, args[at])) for at in op.splits_at)


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(int(tensor.numel()) * tensor.element_size() for tensor in tensors)


def _is_async(op: Op, args: tuple[Any, ...], api: str | None) -> bool:
    """Whether the call is asynchronous. Point-to-point ops have no such argument: the name of the
    function shows it."""
    if op.is_p2p:
        return api in ("isend", "irecv", "batch_isend_irecv")
    if op.async_at is None:
        return False
    return bool(args[op.async_at]) if op.async_at < len(args) else True
