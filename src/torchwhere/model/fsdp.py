"""Reads from FSDP1 and FSDP2 (`fully_shard`) how they shard a module: which parameters they gather
together, and in which way.

The facts come from the states of FSDP, not from the tensors that a module has at the moment: those
may be the gathered parameters between forward and backward. All private attributes used here exist
in torch 2.11 and 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchwhere.core.grouping import grouped
from torchwhere.core.layout_json import Facts
from torchwhere.core.model_layout import FLAT
from torchwhere.model.fsdp_states import (
    Owners,
    fsdp1_owners,
    fsdp2_groups,
    fsdp2_owners,
    fsdp2_state,
    is_fsdp1,
)
from torchwhere.model.meshes import Meshes, placement_texts
from torchwhere.model.wrappers import wrapped

# until the first forward FSDP2 does not know which unit is the root
RESHARD_UNDECIDED = "after forward, the root after backward"
Slot = tuple[int, str]  # where a parameter is: the id of its module, and its name there


@dataclass(slots=True)
class HeldParam:
    """A parameter, as the unit that manages it describes it, or the tensor itself."""

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    device: str
    key: object  # equal for two names of one parameter
    mesh: int | None = None
    placements: tuple[str, ...] = ()
    note: str = ""


def dtype_texts(dtypes: dict[str, Any]) -> Facts:
    """The dtypes that are set, as text, by their use."""
    return tuple(
        (use, str(dtype).removeprefix("torch."))
        for use, dtype in dtypes.items()
        if dtype is not None
    )


def policy_dtypes(policy: Any, third: str) -> Facts:
    """The dtypes of a policy for mixed precision: for parameters, for reductions, and for a third
    use."""
    uses = ("param", "reduce", third)
    return dtype_texts({use: getattr(policy, f"{use}_dtype", None) for use in uses})


# -- FSDP2 -----------------------------------------------------------------------------------------


def is_replicating(state: Any) -> bool:
    return "Replicate" in type(state).__name__


def fsdp2_params(group: Any, meshes: Meshes) -> dict[Slot, HeldParam]:
    """The parameters that a group manages, by each slot that has them."""
    params: dict[Slot, HeldParam] = {}
    for managed in group.fsdp_params:
        param = managed.sharded_param
        held = dtensor_param(param, meshes, key=id(managed))
        if managed.offload_to_cpu:
            held.device = "cpu"
        for module, name in fsdp2_owners(managed):
            params[id(module), name] = held
    return params


def dtensor_param(param: Any, meshes: Meshes, *, key: object) -> HeldParam:
    """Describe a parameter that is a DTensor."""
    with torch.no_grad():  # outside of autograd `to_local` copies nothing
        local = param.to_local()
    return HeldParam(
        shape=tuple(param.shape),
        local_shape=tuple(local.shape),
        dtype=param.dtype,
        requires_grad=param.requires_grad,
        device=param.device.type,
        key=key,
        mesh=meshes.of_mesh(param.device_mesh),
        placements=placement_texts(param.placements),
    )


def fsdp2_facts(state: Any, group: Any, meshes: Meshes) -> dict[str, Any]:
    """The fields of the `Unit` of a group."""
    info, policy = group.mesh_info, state._mp_policy  # torch 2.15 has none in the group
    return {
        "mesh": meshes.of_mesh(info.mesh),
        "placements": tuple(
            "Shard(0)" if dim == info.shard_mesh_dim else "Replicate()"
            for dim in range(info.mesh.ndim)
        ),
        "dtypes": policy_dtypes(policy, "output"),
        "reshard": None if is_replicating(state) else _fsdp2_reshard(state, group),
        "offload": _fsdp2_offload(group.offload_policy),
        "padding_bytes": sum(_fsdp2_padding(managed) for managed in group.fsdp_params),
    }


def _fsdp2_reshard(state: Any, group: Any) -> str:
    after = group.post_forward_mesh_info
    if after is None:
        return "after backward"
    if getattr(state, "_auto_reshard_after_forward", False) and state._is_root is None:
        return RESHARD_UNDECIDED
    size = after.shard_mesh_size
    return (
        "after forward"
        if size == group.mesh_info.shard_mesh_size
        else f"after forward, to {size} ranks"
    )


def _fsdp2_offload(policy: Any) -> str | None:
    if type(policy).__name__ != "CPUOffloadPolicy":
        return None
    return "cpu, pinned" if policy.pin_memory else "cpu"


def _fsdp2_padding(managed: Any) -> int:
    extra = managed.padded_sharded_param_size.numel() - managed.sharded_size.numel()
    return int(extra * managed.sharded_param.dtype.itemsize)


# -- FSDP1 -----------------------------------------------------------------------------------------


def fsdp1_params(
    state: Any, mesh: int | None, placements: tuple[str, ...]
) -> dict[Slot, HeldParam]:
    """The original parameters in the flat parameter of an FSDP1 wrapper, by each slot that has one
    of them, or had it before FSDP1 took it out."""
    handle = state._handle
    if handle is None:
        return {}
    flat, params = handle.flat_param, {}
    originals = getattr(flat, "_params", None)
    for at, owners in enumerate(fsdp1_owners(flat)):
        shape = tuple(flat._shapes[at])
        shard, extension = flat._shard_param_infos[at], flat._param_extensions[at]
        held = HeldParam(
            shape=shape,
            local_shape=shape if FLAT not in placements else (shard.numel_in_shard or 0,),
            dtype=flat.dtype,
            requires_grad=(originals[at] if originals else flat).requires_grad,
            device=flat.device.type,
            key=(id(flat), at),
            mesh=mesh,
            placements=placements,
            note=""
            if extension is None
            else f"of a DTensor, {getattr(extension, 'placements', '')}".strip(", "),
        )
        for module, name in owners:
            params[id(module), name] = held
    return params


def fsdp1_facts(state: Any, meshes: Meshes) -> dict[str, Any]:
    """The fields of the `Unit` of an FSDP1 wrapper."""
    handle, precision = state._handle, state.mixed_precision
    strategy = (
        handle._sharding_strategy if handle is not None else state.sharding_strategy
    ).name.removeprefix("_")
    outer = getattr(state, "_inter_node_pg", None) if strategy.startswith("HYBRID") else None
    inner = "Replicate()" if strategy == "NO_SHARD" else FLAT
    device_mesh = getattr(state, "_device_mesh", None)
    groups = (
        [("replicate", outer), ("shard", state.process_group)]
        if outer is not None
        else [("", state.process_group)]
    )
    reshard: str | None = "after backward"
    if strategy == "NO_SHARD":
        reshard = None
    elif strategy in ("FULL_SHARD", "HYBRID_SHARD") and not state._is_root:
        reshard = "after forward"
    return {
        "mesh": meshes.of_groups(groups, device=_device(state))
        if device_mesh is None
        else meshes.of_mesh(device_mesh),
        "placements": (inner,) if outer is None else ("Replicate()", inner),
        "dtypes": policy_dtypes(precision, "buffer"),
        "reshard": reshard,
        "offload": "cpu" if state.cpu_offload.offload_params else None,
        "settings": (("strategy", strategy), ("use_orig_params", bool(state._use_orig_params))),
        "padding_bytes": _fsdp1_padding(handle),
    }


def _device(state: Any) -> str:
    return str(getattr(getattr(state, "compute_device", None), "type", ""))


def _fsdp1_padding(handle: Any) -> int:
    if handle is None:
        return 0
    flat = handle.flat_param
    if handle._sharding_strategy.name == "NO_SHARD":
        used = sum(flat._numels)
    else:
        used = sum(shard.numel_in_shard or 0 for shard in flat._shard_param_infos)
    return int((flat._sharded_size.numel() - used) * flat.dtype.itemsize)


# -- the tree of modules ---------------------------------------------------------------------------

# base classes that `fully_shard` and `replicate` put before the class of a module
_MIXED_IN = ("FSDPModule", "ReplicateModule", "DDP")
# attributes of wrappers: they are not part of the name of a parameter
_TRANSPARENT = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


@dataclass(slots=True)
class TreeLine:
    """A module in the tree: `fqn[Class]`, and the names of the parameters that FSDP manages there,
    if it is sharded."""

    level: int
    name: str
    is_sharded: bool
    params: list[str]


def sharded_tree(model: nn.Module) -> list[TreeLine]:
    """List all modules of a model, wrappers too, in the order of a depth-first walk."""
    lines: list[TreeLine] = []
    handles: dict[int, Any] = {}  # FSDP1: of the wrapper, by the module inside
    units: list[tuple[TreeLine, dict[int, list[str]]]] = []  # that contain the current module
    pending: list[tuple[nn.Module, str, int]] = [(model, "", 0)]
    while pending:
        module, prefix, level = pending.pop()
        while units and units[-1][0].level >= level:
            units.pop()
        handle: Any = module._handle if is_fsdp1(module) else None
        if handle is not None:
            handles[id(handle._fully_sharded_module)] = handle
        managed = _managed(module, handles)
        line = TreeLine(
            level, f"{prefix.removesuffix('.')}[{class_name(module)}]", bool(managed), []
        )
        lines.append(line)
        if managed:
            units.append((line, managed))
        for unit, names in units:
            unit.params += [prefix + name for name in names.pop(id(module), ())]
        children = [
            (child, prefix + _part(module, key), level + 1)
            for key, child in module.named_children()
        ]
        pending += reversed(children)
    return lines


def _part(module: nn.Module, key: str) -> str:
    return "" if key in _TRANSPARENT and wrapped(module) is module._modules[key] else f"{key}."


def _managed(module: nn.Module, handles: dict[int, Any]) -> dict[int, list[str]]:
    """The names of the parameters of the FSDP unit that begins at a module, by the id of the module
    that has them."""
    handle, state = handles.get(id(module)), fsdp2_state(module)
    owners: list[Owners] = []
    if handle is not None:
        owners = fsdp1_owners(handle.flat_param)
    elif not is_replicating(state):
        owners = [
            fsdp2_owners(managed) for group in fsdp2_groups(state) for managed in group.fsdp_params
        ]
    return grouped((id(holder), name) for (holder, name), *_aliases in owners)


def class_name(module: nn.Module) -> str:
    """The name of the user's class: `fully_shard` and `replicate` derive another class from it."""
    cls = type(module)
    while len(cls.__bases__) == 2 and cls.__bases__[0].__name__ in _MIXED_IN:
        cls = cls.__bases__[1]
    return cls.__name__
