"""Reads the states of FSDP1 and FSDP2: which module is a unit, and which tensors represent each of
its parameters.

FSDP replaces the tensors of a module. FSDP2 has a sharded and a whole tensor for each parameter;
FSDP1 replaces the original parameters by views of its flat parameter. An object of FSDP has all of
these tensors at any time. All private attributes used here exist in torch 2.11 and 2.13.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Owners = list[tuple[nn.Module, str]]  # the modules that have a parameter, and its key in each


def fsdp2_state(module: nn.Module) -> Any:
    """The state that `fully_shard` or `replicate` added to a module, or None."""
    if "torch.distributed.fsdp" not in sys.modules:
        return None
    from torch.distributed._composable_state import _get_module_state
    from torch.distributed.fsdp import FSDPModule

    return _get_module_state(module) if isinstance(module, FSDPModule) else None


def fsdp2_groups(state: Any) -> list[Any]:
    """The parameter groups of a state: at most one in torch 2.11, one for each mesh in 2.13."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def is_fsdp1(module: nn.Module) -> bool:
    home = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return home is not None and isinstance(module, home.FullyShardedDataParallel)


def unit_classes() -> tuple[type, ...]:
    """The classes whose modules are FSDP units; empty if FSDP was not imported."""
    fsdp1 = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    fsdp2 = sys.modules.get("torch.distributed.fsdp")
    classes = (getattr(fsdp1, "FullyShardedDataParallel", None), getattr(fsdp2, "FSDPModule", None))
    return tuple(cls for cls in classes if cls is not None)


@dataclass(frozen=True, slots=True)
class Managed:
    """One parameter of a unit, as a weak reference to the object that FSDP has for it."""

    holder: weakref.ref[Any]  # FSDP2: an `FSDPParam`; FSDP1: a `FlatParamHandle`
    index: int | None = None  # FSDP1: index among the original parameters

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors that represent it, whether or not a module has them now."""
        holder = self.holder()
        if holder is None:
            return ()
        if self.index is None:
            sharded = getattr(holder, "sharded_param", None)
            return sharded, getattr(holder, "_unsharded_param", None)
        originals = getattr(holder.flat_param, "_params", None) or ()
        return tuple(originals[self.index : self.index + 1])

    def has(self, tensor: torch.Tensor) -> bool:
        return any(own is tensor for own in self.tensors())


def managed(unit: nn.Module) -> Iterator[tuple[Managed, Owners]]:
    """The parameters of a unit, each with the modules that have it. With FSDP1: the original
    parameters, if FSDP1 keeps them."""
    if is_fsdp1(unit):
        yield from _fsdp1_managed(unit)
        return
    state = fsdp2_state(unit)
    groups = fsdp2_groups(state) if state is not None else []
    for param in (param for group in groups for param in group.fsdp_params):
        info = param._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        yield Managed(weakref.ref(param)), [(info.module, info.param_name), *shared]


def _fsdp1_managed(unit: Any) -> Iterator[tuple[Managed, Owners]]:
    handle = unit._handle
    if handle is None or not getattr(handle.flat_param, "_params", None):
        return
    flat = handle.flat_param
    for index, info in enumerate(flat._param_infos):
        owner = info.module, info.param_name
        shared = [
            (alias.module, alias.param_name)
            for alias in flat._shared_param_infos
            if (alias.prim_module, alias.prim_param_name) == owner
        ]
        yield Managed(weakref.ref(handle), index), [owner, *shared]
