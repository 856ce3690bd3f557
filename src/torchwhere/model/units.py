"""Finds the units of a model: DDP, FSDP1, FSDP2, ZeRO, and pipeline stages. Each becomes a
`Manager`.

A manager has the facts of its unit. For each parameter below it, it says whether the unit manages
the parameter, and how the unit shards it. Wrappers are recognized without importing their
libraries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchwhere.core.grouping import grouped
from torchwhere.core.model_layout import FLAT, Unit
from torchwhere.model.fsdp import (
    HeldParam,
    Slot,
    dtensor_param,
    dtype_texts,
    fsdp1_facts,
    fsdp1_params,
    fsdp2_facts,
    fsdp2_params,
    is_replicating,
    policy_dtypes,
)
from torchwhere.model.fsdp_states import fsdp2_groups, fsdp2_state, is_fsdp1
from torchwhere.model.meshes import Meshes
from torchwhere.model.wrappers import live_objects, loaded_class

# Takes a module, the name of a parameter in it, and the tensor there. Returns None for a parameter
# that the unit does not manage.
FindParam = Callable[[nn.Module, str, Any], HeldParam | None]


@dataclass(slots=True)
class Manager:
    """A unit while the modules below it are walked."""

    kind: str
    find_param: FindParam
    facts: dict[str, Any] = field(default_factory=dict)
    # all modules that the unit begins at, if there are several
    modules: tuple[nn.Module, ...] = ()
    # by the id of a module: the names of parameters that FSDP1 may have removed from it
    removed: dict[int, list[str]] = field(default_factory=dict)
    params: int = 0
    bytes: int = 0
    local_bytes: int = 0

    def unit(self, also: Iterable[str]) -> Unit:
        sums = {"params": self.params, "bytes": self.bytes, "local_bytes": self.local_bytes}
        facts: dict[str, Any] = self.facts | sums
        return Unit(self.kind, also=tuple(also), **facts)


def managers_at(module: nn.Module, meshes: Meshes) -> Iterator[Manager]:
    """The units that begin at a module or wrapper itself."""
    state = fsdp2_state(module)
    if state is not None:
        yield from _fsdp2(state, meshes)
    elif is_fsdp1(module):
        yield _fsdp1(module, meshes)
    elif (ddp := _ddp(module, meshes)) is not None:
        yield ddp
    elif isinstance(module, nn.DataParallel):
        yield Manager("DataParallel", lambda _module, _name, param: held_param(param, meshes))
    elif isinstance(module, loaded_class("deepspeed.runtime.engine", "DeepSpeedEngine")):
        yield from _engine(module, meshes)


def _find_among(params: dict[Slot, HeldParam]) -> FindParam:
    return lambda module, name, _param: params.get((id(module), name))


# -- parameters that no unit describes -------------------------------------------------------------


def held_param(param: Any, meshes: Meshes) -> HeldParam:
    """Describe a parameter from the tensor alone: a DTensor, a parameter of ZeRO-3, or a plain
    tensor, which is whole on this rank."""
    if hasattr(param, "ds_shape"):
        return _zero3_param(param, meshes)
    if hasattr(param, "device_mesh") and hasattr(param, "placements"):
        return dtensor_param(param, meshes, key=id(param))
    is_lazy = nn.parameter.is_lazy(param)
    shape = (0,) if is_lazy else tuple(param.shape)
    return HeldParam(
        shape,
        shape,
        param.dtype,
        param.requires_grad,
        param.device.type,
        id(param),
        note="no shape yet" * is_lazy,
    )


def _zero3_param(param: Any, meshes: Meshes) -> HeldParam:
    part, numel = param.ds_tensor, int(param.ds_numel)
    size = 0 if part is None else int(getattr(part, "ds_numel", part.numel()))
    start = size * int(getattr(param, "ds_zero_partition_rank", 0))
    return HeldParam(
        shape=tuple(param.ds_shape),
        local_shape=(max(0, min(size, numel - start)),),
        dtype=param.dtype,
        requires_grad=param.requires_grad,
        device=param.device.type if part is None else part.device.type,
        key=id(param),
        mesh=meshes.of_groups([("", getattr(param, "ds_process_group", None))]),
        placements=(FLAT,),
        note="kept gathered" if getattr(param, "ds_persist", False) else "",
    )


# -- data parallel ---------------------------------------------------------------------------------


def _fsdp2(state: Any, meshes: Meshes) -> Iterator[Manager]:
    kind, groups = "replicate" if is_replicating(state) else "FSDP2", fsdp2_groups(state)
    for group in groups:
        yield Manager(
            kind,
            _find_among(fsdp2_params(group, meshes)),
            fsdp2_facts(state, group, meshes),
            tuple(group.modules),
        )
    if not groups:  # units below this module manage all of its parameters
        yield Manager(kind, lambda _module, _name, _param: None)


def _fsdp1(wrapper: Any, meshes: Meshes) -> Manager:
    facts = fsdp1_facts(wrapper, meshes)
    params = fsdp1_params(wrapper, facts["mesh"], facts["placements"])
    return Manager("FSDP1", _find_among(params), facts, removed=grouped(params))


def _ddp(module: nn.Module, meshes: Meshes) -> Manager | None:
    """The unit of DDP: of the wrapper, or of the composable `replicate`, which creates a DDP object
    in the first forward."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        named: Any = module.module.named_parameters()
        return _ddp_manager(
            module,
            {id(param) for name, param in named if name in module.parameters_to_ignore},
            meshes,
        )
    if not isinstance(module, loaded_class("torch.distributed._composable.replicate", "DDP")):
        return None
    from torch.distributed._composable.replicate import replicate

    state = replicate.state(module)
    ddp = getattr(state, "_ddp", None)
    if ddp is None:
        return Manager("DDP", _replicated(None, set(), meshes), {"placements": ("Replicate()",)})
    managed = {id(param) for param in state._param_list}
    return _ddp_manager(ddp, {id(param) for param in module.parameters()} - managed, meshes)


def _ddp_manager(ddp: Any, ignored: set[int], meshes: Meshes) -> Manager:
    mesh = meshes.of_groups([("", ddp.process_group)], device=str(getattr(ddp, "device_type", "")))
    precision = getattr(ddp, "mixed_precision", None)
    facts = {
        "mesh": mesh,
        "placements": ("Replicate()",),
        "dtypes": policy_dtypes(precision, "buffer"),
        "settings": (
            ("bucket_cap_mb", round(ddp.bucket_bytes_cap / 2**20, 3)),
            *(
                (name, True)
                for name in ("find_unused_parameters", "static_graph")
                if getattr(ddp, name, False)
            ),
            *((("ignored_parameters", len(ignored)),) if ignored else ()),
        ),
    }
    return Manager("DDP", _replicated(mesh, ignored, meshes), facts)


def _replicated(mesh: int | None, ignored: set[int], meshes: Meshes) -> FindParam:
    def find_param(_module: nn.Module, _name: str, param: Any) -> HeldParam | None:
        if param is None or id(param) in ignored:
            return None
        held = held_param(param, meshes)
        if held.mesh is None:
            held.mesh, held.placements = mesh, ("Replicate()",)
        return held

    return find_param


# -- DeepSpeed -------------------------------------------------------------------------------------

_SHARDED = (
    "nothing",
    "optimizer states",
    "optimizer states, gradients",
    "optimizer states, gradients, parameters",
)


def _engine(engine: Any, meshes: Meshes) -> Iterator[Manager]:
    if hasattr(engine, "stage_id") and hasattr(engine, "num_stages"):  # a pipeline of DeepSpeed
        yield _stage_manager(engine.stage_id, engine.num_stages, None, meshes)
    dtypes = {"reduce": engine.communication_data_type}
    yield zero(
        int(engine.zero_optimization_stage()),
        engine.optimizer,
        next(engine.module.parameters(), None),
        meshes,
        dtypes,
    )


def zero_of(root: nn.Module, meshes: Meshes) -> Manager | None:
    """The unit of ZeRO for a model that was passed without its engine: the parameters lead to the
    optimizer."""
    if "deepspeed" not in sys.modules:
        return None
    for param in root.parameters():
        if hasattr(param, "ds_id"):
            return zero(3, getattr(param, "_z3_optimizer", None), param, meshes, {})
        if hasattr(param, "_hp_mapping"):
            optimizer = _zero_around(param)
            stage = 1 + bool(getattr(optimizer, "partition_gradients", False))
            return zero(stage, optimizer, param, meshes, {}) if optimizer is not None else None
    return None


def _zero_around(param: Any) -> Any:
    """The ZeRO-1 or ZeRO-2 optimizer of a parameter. Only in some versions of DeepSpeed a parameter
    refers to it, so this searches all optimizers that are alive."""
    kind = loaded_class("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer")
    for optimizer in live_objects(kind) if kind else ():
        if any(own is param for group in optimizer.bit16_groups for own in group):
            return optimizer
    return None


def zero(stage: int, optimizer: Any, param: Any, meshes: Meshes, dtypes: dict[str, Any]) -> Manager:
    """The unit of a ZeRO optimizer. `param` is any parameter of the model."""
    groups = getattr(optimizer, "real_dp_process_group", None) or [
        getattr(param, "ds_process_group", None)
    ]
    mesh = meshes.of_groups([("", groups[0] or _world())])
    masters = _masters(optimizer)
    dtypes = {
        "param": getattr(param, "dtype", None),
        "master": masters[0].dtype if masters else None,
    } | dtypes
    facts = {
        "mesh": mesh,
        "placements": (FLAT if stage == 3 else "Replicate()",),
        "dtypes": dtype_texts(dtypes),
        "offload": _offload(optimizer),
        "settings": (
            ("sharded", _SHARDED[stage]),
            ("optimizer", type(getattr(optimizer, "optimizer", optimizer)).__name__),
        ),
        "state_bytes": _state_bytes(optimizer, masters),
    }
    return Manager(
        f"ZeRO-{stage}" if stage else "DeepSpeed", _replicated(mesh, set(), meshes), facts
    )


def _world() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def _masters(optimizer: Any) -> list[Any]:
    """This rank's part of the copies of parameters that the inner optimizer updates."""
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        masters = [
            tensor for tensor in getattr(optimizer, name, ()) if isinstance(tensor, torch.Tensor)
        ]
        if masters:
            return masters
    return []


def _state_bytes(optimizer: Any, masters: list[Any]) -> int | None:
    states = getattr(getattr(optimizer, "optimizer", optimizer), "state", None)
    if not isinstance(states, dict):
        return None
    tensors = [
        value
        for state in states.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return int(sum(tensor.numel() * tensor.dtype.itemsize for tensor in [*masters, *tensors]))


def _offload(optimizer: Any) -> str | None:
    names = {
        "cpu_offload": "optimizer",
        "offload_optimizer": "optimizer",
        "offload_param": "parameters",
    }
    moved = dict.fromkeys(
        text for name, text in names.items() if getattr(optimizer, name, False) is True
    )
    return f"{', '.join(moved)} to cpu" if moved else None


# -- pipelines -------------------------------------------------------------------------------------


_STAGE = "torch.distributed.pipelining.stage", "_PipelineStageBase"
_SCHEDULE = "torch.distributed.pipelining.schedules", "_PipelineSchedule"


def stages_of(thing: Any) -> list[Any] | None:
    """This rank's stages of a pipeline stage or schedule; None for any other object."""
    if isinstance(thing, loaded_class(*_STAGE)):
        return [thing]
    if isinstance(thing, loaded_class(*_SCHEDULE)):
        return list(getattr(thing, "_stages", None) or [thing._stage])
    return None


def stage_around(module: nn.Module) -> Any:
    """The pipeline stage of a submodule. Torch has no list of the stages, so this searches all
    stages that are alive."""
    base = loaded_class(*_STAGE)
    kinds = [base] if base else []
    for kind in kinds:
        kinds += kind.__subclasses__()
        for stage in live_objects(kind):
            if getattr(stage, "submod", None) is module:
                return stage
    return None


def stage_manager(stage: Any, meshes: Meshes) -> Manager:
    return _stage_manager(stage.stage_index, stage.num_stages, stage.group or _world(), meshes)


def _stage_manager(index: int, count: int, group: Any, meshes: Meshes) -> Manager:
    facts = {
        "mesh": meshes.of_groups([("", group)]),
        "settings": (("stage", int(index)), ("stages", int(count))),
    }
    return Manager("pipeline stage", lambda _module, _name, _param: None, facts)
