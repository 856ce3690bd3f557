"""Reads the states of FSDP1 and FSDP2: which module is a unit, and which tensors represent each of
its parameters.

FSDP replaces the tensors of a module. FSDP2 has a sharded and a whole tensor for each parameter;
FSDP1 replaces the original parameters by views of its flat parameter. An object of FSDP has all of
these tensors at any time. All private attributes used here exist in torch 2.11 and 2.13.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchwhere.model.wrappers import loaded_class

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"
_FSDP2 = "torch.distributed.fsdp", "FSDPModule"

Owners = list[tuple[nn.Module, str]]  # the modules that have a parameter, and its key in each


def fsdp2_state(module: nn.Module) -> Any:
    """The state that `fully_shard` or `replicate` added to a module, or None."""
    if not isinstance(module, loaded_class(*_FSDP2)):
        return None
    from torch.distributed._composable_state import _get_module_state

    return _get_module_state(module)


def fsdp2_groups(state: Any) -> list[Any]:
    """The parameter groups of a state: at most one in torch 2.11, one for each mesh in 2.13; none
    without a state."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def fsdp2_owners(param: Any) -> Owners:
    """The modules that have a parameter of FSDP2, an `FSDPParam`."""
    info = param._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def fsdp1_owners(flat: Any) -> list[Owners]:
    """The modules that have each original parameter of a flat parameter, or had it before FSDP1
    took it out."""
    owners: dict[tuple[nn.Module, str], Owners] = {}
    for info in flat._param_infos:
        owner = info.module, info.param_name
        owners[owner] = [owner]
    for alias in flat._shared_param_infos:
        primary = alias.prim_module, alias.prim_param_name
        if primary in owners:
            owners[primary].append((alias.module, alias.param_name))
    return list(owners.values())


def is_fsdp1(module: nn.Module) -> bool:
    return isinstance(module, loaded_class(*_FSDP1))


def unit_classes() -> tuple[type, ...]:
    """The classes whose modules are FSDP units; empty if FSDP was not imported."""
    return tuple(cls for cls in (loaded_class(*_FSDP1), loaded_class(*_FSDP2)) if cls)


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
    for group in fsdp2_groups(fsdp2_state(unit)):
        for param in group.fsdp_params:
            yield Managed(weakref.ref(param)), fsdp2_owners(param)


def _fsdp1_managed(unit: Any) -> Iterator[tuple[Managed, Owners]]:
    handle = unit._handle
    if handle is not None and getattr(handle.flat_param, "_params", None):
        for index, owners in enumerate(fsdp1_owners(handle.flat_param)):
            yield Managed(weakref.ref(handle), index), owners
