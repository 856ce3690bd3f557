"""What wraps a module, or was applied to it: DDP, FSDP1, FSDP2, ZeRO, a pipeline stage. Each
becomes a `Manager`.

A manager knows the facts of its unit and, for any parameter below it, whether it manages it and how
it is cut. Wrappers are recognised without importing their libraries.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchwhere.core.model_layout import FLAT, Unit
from torchwhere.model.fsdp import Held, dtypes_text, facts1, facts2, held1, held2, held_dtensor
from torchwhere.model.fsdp import is_replicating as replicates
from torchwhere.model.fsdp_states import groups2, is_fsdp1, state2
from torchwhere.model.meshes import Meshes, placement_texts

# a module, the name of a parameter in it, and what stands there
Holds = Callable[[nn.Module, str, Any], Held | None]


@dataclass(slots=True)
class Manager:
    """A unit while the modules below it are walked."""

    kind: str
    holds: Holds
    facts: dict[str, Any] = field(default_factory=dict)
    # all modules that the unit begins at, where there are several
    modules: tuple[nn.Module, ...] = ()
    # by the id of a module: names that may not be in it any more
    taken: dict[int, list[str]] = field(default_factory=dict)
    params: int = 0
    bytes: int = 0
    local_bytes: int = 0

    def unit(self, also: Iterable[str]) -> Unit:
        sums = {"params": self.params, "bytes": self.bytes, "local_bytes": self.local_bytes}
        facts: dict[str, Any] = self.facts | sums
        return Unit(self.kind, also=tuple(also), **facts)


def managers_at(module: nn.Module, meshes: Meshes) -> Iterator[Manager]:
    """The units that begin at this very module or wrapper."""
    state = state2(module)
    if state is not None:
        yield from _fsdp2(state, meshes)
    elif is_fsdp1(module):
        yield _fsdp1(module, meshes)
    elif (ddp := _ddp(module, meshes)) is not None:
        yield ddp
    elif isinstance(module, nn.DataParallel):
        yield Manager("DataParallel", lambda _module, _name, param: held(param, meshes))
    elif _is_engine(module):
        yield from _engine(module, meshes)


def _slots(known: dict[tuple[int, str], Held]) -> Holds:
    return lambda module, name, _param: known.get((id(module), name))


# -- parameters by themselves ----------------------------------------------------------------------


def held(param: Any, meshes: Meshes) -> Held:
    """A parameter that says itself how it is cut: a DTensor, one of ZeRO-3, or a plain one, whole
    on this rank."""
    if hasattr(param, "ds_shape"):
        return _held_zero3(param, meshes)
    if hasattr(param, "device_mesh") and hasattr(param, "placements"):
        return held_dtensor(param, meshes, key=id(param))
    is_lazy = nn.parameter.is_lazy(param)
    shape = (0,) if is_lazy else tuple(param.shape)
    return Held(
        shape,
        shape,
        param.dtype,
        param.requires_grad,
        param.device.type,
        id(param),
        note="no shape yet" * is_lazy,
    )


def _held_zero3(param: Any, meshes: Meshes) -> Held:
    part, numel = param.ds_tensor, int(param.ds_numel)
    size = 0 if part is None else int(getattr(part, "ds_numel", part.numel()))
    start = size * int(getattr(param, "ds_zero_partition_rank", 0))
    return Held(
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
    kind, groups = "replicate" if replicates(state) else "FSDP2", groups2(state)
    for group in groups:
        yield Manager(
            kind, _slots(held2(group, meshes)), facts2(state, group, meshes), tuple(group.modules)
        )
    if not groups:  # everything below it is managed by units further in
        yield Manager(kind, lambda _module, _name, _param: None)


def _fsdp1(wrapper: Any, meshes: Meshes) -> Manager:
    facts = facts1(wrapper, meshes)
    known = held1(wrapper, facts["mesh"], facts["placements"])
    taken: dict[int, list[str]] = {}
    for module, name in known:
        taken.setdefault(module, []).append(name)
    return Manager("FSDP1", _slots(known), facts, taken=taken)


def _ddp(module: nn.Module, meshes: Meshes) -> Manager | None:
    """DDP as a wrapper, or as the composable `replicate` that makes one for itself in the first
    forward."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        named: Any = module.module.named_parameters()
        return _ddp_manager(
            module,
            {id(param) for name, param in named if name in module.parameters_to_ignore},
            meshes,
        )
    home = sys.modules.get("torch.distributed._composable.replicate")
    if home is None or not isinstance(module, home.DDP):
        return None
    state = home.replicate.state(module)
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
        "dtypes": dtypes_text(
            {use: getattr(precision, f"{use}_dtype", None) for use in ("param", "reduce", "buffer")}
        ),
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


def _replicated(mesh: int | None, ignored: set[int], meshes: Meshes) -> Holds:
    def holds(_module: nn.Module, _name: str, param: Any) -> Held | None:
        if param is None or id(param) in ignored:
            return None
        found = held(param, meshes)
        if found.mesh is None:
            found.mesh, found.placements = mesh, ("Replicate()",)
        return found

    return holds


# -- DeepSpeed -------------------------------------------------------------------------------------

_SHARDED = (
    "nothing",
    "optimizer states",
    "optimizer states, gradients",
    "optimizer states, gradients, parameters",
)


def _is_engine(module: nn.Module) -> bool:
    home = sys.modules.get("deepspeed.runtime.engine")
    return home is not None and isinstance(module, home.DeepSpeedEngine)


def _engine(engine: Any, meshes: Meshes) -> Iterator[Manager]:
    if hasattr(engine, "stage_id") and hasattr(engine, "num_stages"):  # DeepSpeed's own pipelines
        yield _stage_manager(engine.stage_id, engine.num_stages, None, meshes)
    facts = {"reduce": engine.communication_data_type}
    yield zero(
        int(engine.zero_optimization_stage()),
        engine.optimizer,
        next(engine.module.parameters(), None),
        meshes,
        facts,
    )


def zero_of(root: nn.Module, meshes: Meshes) -> Manager | None:
    """ZeRO around a model whose engine was not given: its parameters know their optimizer."""
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
    """The ZeRO-1 or 2 optimizer that has a parameter. A parameter knows it in some versions only:
    those alive are asked."""
    home = sys.modules.get("deepspeed.runtime.zero.stage_1_and_2")
    kind = getattr(home, "DeepSpeedZeroOptimizer", None)
    alive = (
        (thing for thing in gc.get_referrers(kind) if isinstance(thing, kind))
        if kind is not None
        else ()
    )
    return next(
        (
            one
            for one in alive
            if any(held is param for group in one.bit16_groups for held in group)
        ),
        None,
    )


def zero(stage: int, optimizer: Any, param: Any, meshes: Meshes, dtypes: dict[str, Any]) -> Manager:
    groups = getattr(optimizer, "real_dp_process_group", None) or [
        getattr(param, "ds_process_group", None)
    ]
    mesh = meshes.of_groups(
        [("", groups[0] or (dist.group.WORLD if dist.is_initialized() else None))]
    )
    masters = _masters(optimizer)
    dtypes = {
        "param": getattr(param, "dtype", None),
        "master": masters[0].dtype if masters else None,
    } | dtypes
    facts = {
        "mesh": mesh,
        "placements": (FLAT if stage == 3 else "Replicate()",),
        "dtypes": dtypes_text(dtypes),
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


def _masters(optimizer: Any) -> list[Any]:
    """The copies that the inner optimizer steps: this rank's part of them."""
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        found = [
            tensor for tensor in getattr(optimizer, name, ()) if isinstance(tensor, torch.Tensor)
        ]
        if found:
            return found
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


def stages_of(thing: Any) -> list[Any] | None:
    """The stages on this rank, of a pipeline stage or schedule; None if it is neither."""
    stage = sys.modules.get("torch.distributed.pipelining.stage")
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    if stage is not None and isinstance(thing, stage._PipelineStageBase):
        return [thing]
    if schedules is not None and isinstance(thing, schedules._PipelineSchedule):
        return list(getattr(thing, "_stages", None) or [thing._stage])
    return None


def stage_around(module: nn.Module) -> Any:
    """The pipeline stage whose submodule this is. Nothing lists the stages: those that are alive
    are asked."""
    home = sys.modules.get("torch.distributed.pipelining.stage")
    if home is None:
        return None
    kinds = [home._PipelineStageBase]
    for kind in kinds:
        kinds += kind.__subclasses__()
    alive = (
        thing
        for kind in kinds
        for thing in gc.get_referrers(kind)
        if isinstance(thing, home._PipelineStageBase)
    )
    return next((stage for stage in alive if getattr(stage, "submod", None) is module), None)


def stage_manager(stage: Any, meshes: Meshes) -> Manager:
    group = stage.group or (dist.group.WORLD if dist.is_initialized() else None)
    return _stage_manager(stage.stage_index, stage.num_stages, group, meshes)


def _stage_manager(index: int, count: int, group: Any, meshes: Meshes) -> Manager:
    facts = {
        "mesh": meshes.of_groups([("", group)]),
        "settings": (("stage", int(index)), ("stages", int(count))),
    }
    return Manager("pipeline stage", lambda _module, _name, _param: None, facts)


# -- tensor parallel -------------------------------------------------------------------------------


def plan_of(module: nn.Module) -> str:
    """The style that `parallelize_module` applied, read off the hooks it left: `ColwiseParallel:
    Replicate() to Shard(-1)`."""
    if not module._forward_pre_hooks and not module._forward_hooks:
        return ""
    found: dict[str, list[str]] = {}
    for hook in [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]:
        for value in _enclosed(hook):
            if isinstance(value, functools.partial) and value.func.__name__ in (
                "_prepare_input_fn",
                "_prepare_output_fn",
            ):
                found.setdefault(value.func.__qualname__.split(".")[0], []).append(
                    _layouts(value.args[0])
                )
            elif type(value).__module__.startswith("torch.distributed.tensor.parallel"):
                found.setdefault(type(value).__name__, [])
    return "; ".join(
        f"{style}: {' to '.join(filter(None, ends))}".rstrip(": ") for style, ends in found.items()
    )


def _enclosed(hook: Any) -> Iterator[Any]:
    for cell in getattr(hook, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def _layouts(value: Any) -> str:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return ", ".join(placement_texts(one for one in values if hasattr(one, "is_replicate")))
