"""Lists the collectives of this torch and the positions of their arguments, from the schemas of its
ops."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torchwhere.hooks import _torch

# Public names of ops. An op that is not listed has its own name without outer underscores.
PUBLIC_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "recv_any_source_": "recv",
}


@dataclass(frozen=True, slots=True)
class Op:
    """The positions of the arguments of one c10d op."""

    raw: str
    name: str
    group_at: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    reduce_op_at: int | None
    root_at: int | None  # root_rank, src or dst
    async_at: int | None
    is_p2p: bool
    is_barrier: bool
    splits_at: tuple[int, int] | None = None  # input_split_sizes, output_split_sizes
    # a coalesced op with a single tensor, as functional collectives issue it: its plain name
    of_one: Op | None = None


def read_schema(schema: Any) -> Op | None:
    """The positions of the arguments of an op; None if it is not a collective (it takes no process
    group)."""
    at = {argument.name: index for index, argument in enumerate(schema.arguments)}
    if "process_group" not in at:
        return None
    tensors = [
        (index, a.name)
        for index, a in enumerate(schema.arguments)
        if "Tensor" in str(a.type) and "Optional" not in str(a.type)
    ]
    outputs = tuple(index for index, name in tensors if name.startswith("output"))
    raw = schema.name.removeprefix("c10d::")
    name = PUBLIC_NAMES.get(raw, raw.strip("_"))
    op = Op(
        raw=raw,
        name=name,
        is_p2p=name in ("send", "recv"),
        is_barrier=name in ("barrier", "monitored_barrier"),
        group_at=at["process_group"],
        inputs=tuple(index for index, _ in tensors if index not in outputs),
        outputs=outputs,
        reduce_op_at=at.get("reduce_op"),
        root_at=next((at[name] for name in ("root_rank", "src", "dst") if name in at), None),
        async_at=at.get("async_op"),
        splits_at=(at["input_split_sizes"], at["output_split_sizes"])
        if "input_split_sizes" in at
        else None,
    )
    if name.endswith("_coalesced"):
        op = replace(op, of_one=replace(op, name=name.removesuffix("_coalesced")))
    return op


@cache
def all_ops() -> list[Op]:
    """The collectives of this torch. Cached: a search through all schemas takes 10 ms."""
    schemas = [
        schema for schema in _torch.private("all_schemas")() if schema.name.startswith("c10d::")
    ]
    return [
        op
        for schema in schemas
        if not schema.overload_name and (op := read_schema(schema)) is not None
    ]
