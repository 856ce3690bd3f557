"""Reads the states that FSDP1 and FSDP2 keep: which module is a unit, and which tensors stand for
each of its parameters.

FSDP replaces the tensor that a module holds: FSDP2 has a sharded and a whole one for each
parameter, FSDP1 puts views of its flat parameter in the place of the original ones. FSDP's own
object holds all of them at any time. Whatever is read here exists in torch 2.11 and 2.13.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Owners = list[tuple[nn.Module, str]]  # modules that hold a parameter, each with its key


def state2(module: nn.Module) -> Any:
    """The state that `fully_shard` or `replicate` left with a module, or None."""
    if "torch.distributed.fsdp" not in sys.modules:
        return None
    from torch.distributed._composable_state import _get_module_state
    from torch.distributed.fsdp import FSDPModule

    return _get_module_state(module) if isinstance(module, FSDPModule) else None


def groups2(state: Any) -> list[Any]:
    """The parameter groups of a state: one in torch 2.11, one for each mesh since."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def is_fsdp1(module: nn.Module) -> bool:
    home = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return home is not None and isinstance(module, home.FullyShardedDataParallel)


def unit_classes() -> tuple[type, ...]:
    """The classes whose modules are FSDP units; none where FSDP was not imported."""
    one = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    two = sys.modules.get("torch.distributed.fsdp")
    found = (getattr(one, "FullyShardedDataParallel", None), getattr(two, "FSDPModule", None))
    return tuple(each for each in found if each is not None)


@dataclass(frozen=True, slots=True)
class Managed:
    """One parameter of a unit, held weakly by FSDP's own object for it."""

    holder: weakref.ref[Any]  # FSDP2: an `FSDPParam`; FSDP1: a `FlatParamHandle`
    index: int | None = None  # FSDP1: the place among the original parameters

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors that stand for it, whether or not a module has them now."""
        holder = self.holder()
        if holder is None:
            return ()
        if self.index is None:
            sharded = getattr(holder, "sharded_param", None)
            return sharded, getattr(holder, "_unsharded_param", None)
        originals = getattr(holder.flat_param, "_params", None) or ()
        return tuple(originals[self.index : self.index + 1])

    def has(self, tensor: torch.Tensor) -> bool:
        return any(one is tensor for one in self.tensors())


def managed(unit: nn.Module) -> Iterator[tuple[Managed, Owners]]:
    """The parameters of a unit, each with the modules that hold it. FSDP1: the original ones that
    it keeps."""
    if is_fsdp1(unit):
        yield from _managed1(unit)
        return
    state = state2(unit)
    for param in (
        (param for group in groups2(state) for param in group.fsdp_params)
        if state is not None
        else ()
    ):
        info = param._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        yield Managed(weakref.ref(param)), [(info.module, info.param_name), *shared]


def _managed1(unit: Any) -> Iterator[tuple[Managed, Owners]]:
    handle = unit._handle
    if handle is None or not getattr(handle.flat_param, "_params", None):
        return
    flat = handle.flat_param
    for index, info in enumerate(flat._param_infos):
        owner = info.module, info.param_name
        shared = [
            (one.module, one.param_name)
            for one in flat._shared_param_infos
            if (one.prim_module, one.prim_param_name) == owner
        ]
        yield Managed(weakref.ref(handle), index), [owner, *shared]
