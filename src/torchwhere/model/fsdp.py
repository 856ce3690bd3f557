"""What FSDP knows of a module: the groups of parameters it gathers together, FSDP1 and FSDP2
(`fully_shard`) alike.

Facts come from FSDP's own states, not from what the module holds at the moment: between forward and
backward that may be the gathered parameters. Whatever is read here is there in torch 2.11 and 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchwhere.core.layout_json import Facts
from torchwhere.core.model_layout import FLAT
from torchwhere.model.fsdp_states import groups2, is_fsdp1, state2
from torchwhere.model.meshes import Meshes, placement_texts
from torchwhere.model.wrappers import wrapped

# until the first forward FSDP2 does not know which is the root
UNSETTLED = "after forward, the root after backward"
Slot = tuple[int, str]  # where a parameter is held: id of the module, name in it


@dataclass(slots=True)
class Held:
    """A parameter as its manager, or the tensor itself, knows it."""

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    device: str
    key: object  # equal for two names of one parameter
    mesh: int | None = None
    placements: tuple[str, ...] = ()
    note: str = ""


def dtypes_text(found: dict[str, Any]) -> Facts:
    """Dtypes by their use, those that are set."""
    return tuple(
        (use, str(dtype).removeprefix("torch."))
        for use, dtype in found.items()
        if dtype is not None
    )


# -- FSDP2 -----------------------------------------------------------------------------------------


def is_replicating(state: Any) -> bool:
    return "Replicate" in type(state).__name__


def held2(group: Any, meshes: Meshes) -> dict[Slot, Held]:
    """What a group manages, by every slot that holds it."""
    found: dict[Slot, Held] = {}
    for managed in group.fsdp_params:
        param = managed.sharded_param
        held = held_dtensor(param, meshes, key=id(managed))
        if managed.offload_to_cpu:
            held.device = "cpu"
        info = managed._module_info
        found[id(info.module), info.param_name] = held
        for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
            found[id(module), name] = held
    return found


def held_dtensor(param: Any, meshes: Meshes, *, key: object) -> Held:
    # nothing of this is to be differentiated, and outside of autograd it copies nothing
    with torch.no_grad():
        local = param.to_local()
    return Held(
        shape=tuple(param.shape),
        local_shape=tuple(local.shape),
        dtype=param.dtype,
        requires_grad=param.requires_grad,
        device=param.device.type,
        key=key,
        mesh=meshes.of_mesh(param.device_mesh),
        placements=placement_texts(param.placements),
    )


def facts2(state: Any, group: Any, meshes: Meshes) -> dict[str, Any]:
    """The fields of the Unit of a group."""
    info, policy = group.mesh_info, group.mp_policy
    return {
        "mesh": meshes.of_mesh(info.mesh),
        "placements": tuple(
            "Shard(0)" if dim == info.shard_mesh_dim else "Replicate()"
            for dim in range(info.mesh.ndim)
        ),
        "dtypes": dtypes_text(
            {use: getattr(policy, f"{use}_dtype", None) for use in ("param", "reduce", "output")}
        ),
        "reshard": None if is_replicating(state) else _reshard2(state, group),
        "offload": _offload2(group.offload_policy),
        "padding_bytes": sum(_padding2(managed) for managed in group.fsdp_params),
    }


def _reshard2(state: Any, group: Any) -> str:
    after = group.post_forward_mesh_info
    if after is None:
        return "after backward"
    if getattr(state, "_auto_reshard_after_forward", False) and state._is_root is None:
        return UNSETTLED
    size = after.shard_mesh_size
    return (
        "after forward"
        if size == group.mesh_info.shard_mesh_size
        else f"after forward, to {size} ranks"
    )


def _offload2(policy: Any) -> str | None:
    if type(policy).__name__ != "CPUOffloadPolicy":
        return None
    return "cpu, pinned" if policy.pin_memory else "cpu"


def _padding2(managed: Any) -> int:
    extra = managed.padded_sharded_param_size.numel() - managed.sharded_size.numel()
    return int(extra * managed.sharded_param.dtype.itemsize)


# -- FSDP1 -----------------------------------------------------------------------------------------


def held1(state: Any, mesh: int | None, placements: tuple[str, ...]) -> dict[Slot, Held]:
    """What the flat parameter of an FSDP1 wrapper is made of, by every slot that holds, or would
    hold, a part of it."""
    handle = state._handle
    if handle is None:
        return {}
    flat, found = handle.flat_param, {}
    for at, (info, shard) in enumerate(
        zip(flat._param_infos, flat._shard_param_infos, strict=True)
    ):
        shape = tuple(flat._shapes[at])
        extension = flat._param_extensions[at]
        originals = getattr(flat, "_params", None)
        found[id(info.module), info.param_name] = Held(
            shape=shape,
            local_shape=shape if FLAT not in placements else (shard.numel_in_shard or 0,),
            dtype=flat.dtype,
            requires_grad=(originals[at] if originals else flat).requires_grad,
            device=flat.device.type,
            key=(id(info.module), info.param_name),
            mesh=mesh,
            placements=placements,
            note=""
            if extension is None
            else f"of a DTensor, {getattr(extension, 'placements', '')}".strip(", "),
        )
    for shared in flat._shared_param_infos:
        primary = found.get((id(shared.prim_module), shared.prim_param_name))
        if primary is not None:
            found[id(shared.module), shared.param_name] = primary
    return found


def facts1(state: Any, meshes: Meshes) -> dict[str, Any]:
    """The fields of the Unit of an FSDP1 wrapper."""
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
    uses = {use: getattr(precision, f"{use}_dtype", None) for use in ("param", "reduce", "buffer")}
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
        "dtypes": dtypes_text(uses),
        "reshard": reshard,
        "offload": "cpu" if state.cpu_offload.offload_params else None,
        "settings": (("strategy", strategy), ("use_orig_params", bool(state._use_orig_params))),
        "padding_bytes": _padding1(handle),
    }


def _device(state: Any) -> str:
    return str(getattr(getattr(state, "compute_device", None), "type", ""))


def _padding1(handle: Any) -> int:
    if handle is None:
        return 0
    flat = handle.flat_param
    if handle._sharding_strategy.name == "NO_SHARD":
        used = sum(flat._numels)
    else:
        used = sum(shard.numel_in_shard or 0 for shard in flat._shard_param_infos)
    return int((flat._sharded_size.numel() - used) * flat.dtype.itemsize)


# -- the tree of the original ----------------------------------------------------------------------

# what `fully_shard` and `replicate` put before a module's own class
_MIXED_IN = ("FSDPModule", "ReplicateModule", "DDP")
# not part of a parameter's name
_TRANSPARENT = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


@dataclass(slots=True)
class TreeLine:
    """A module in the tree: `fqn[Class]`, and the names of the parameters it manages if it is
    sharded."""

    level: int
    name: str
    is_sharded: bool
    params: list[str]


def sharded_tree(model: nn.Module) -> list[TreeLine]:
    """Every module in the order of the model, each below the one that holds it, wrappers
    included."""
    lines: list[TreeLine] = []
    handles: dict[int, Any] = {}  # FSDP1: the wrapper has it, the module inside is the sharded one
    units: list[tuple[TreeLine, dict[int, list[str]]]] = []  # those we are inside of
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
    """The parameters that FSDP manages as a unit that begins at this module, by the id of the
    module that holds them."""
    handle, state = handles.get(id(module)), state2(module)
    infos: list[Any] = []
    if handle is not None:
        infos = list(handle.flat_param._param_infos)
    elif state is not None and not is_replicating(state):
        infos = [managed._module_info for group in groups2(state) for managed in group.fsdp_params]
    found: dict[int, list[str]] = {}
    for info in infos:
        found.setdefault(id(info.module), []).append(info.param_name)
    return found


def class_name(module: nn.Module) -> str:
    """The class the user wrote: `fully_shard` and `replicate` make one of their own from it."""
    cls = type(module)
    while len(cls.__bases__) == 2 and cls.__bases__[0].__name__ in _MIXED_IN:
        cls = cls.__bases__[1]
    return cls.__name__
