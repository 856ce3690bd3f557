"""Names the whole parameters that FSDP computes with. They are the leaves of the autograd graph,
but outside of a forward or backward they are in no module.

FSDP2 gathers each whole parameter and puts it in the place of the sharded one for the time of a
forward. FSDP1 does the same with one flat parameter for each unit (`layers.0._flat_param`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from torchwhere.model.fsdp_states import fsdp2_groups, fsdp2_state
from torchwhere.model.module_names import NameTable
from torchwhere.model.module_walk import child_name, walk
from torchwhere.model.parameters import FLAT_KEY


def unsharded_names(table: NameTable) -> Iterator[tuple[int, list[str]]]:
    """For all models of a table: the id of each whole parameter, and the names of the sharded
    parameter that it was made from."""
    for prefix, root in table.roots():
        for name, module in walk(root, prefix=prefix):
            yield from _fully_sharded(module, table)
            yield from _flat(module, name)


def _fully_sharded(module: nn.Module, table: NameTable) -> Iterator[tuple[int, list[str]]]:
    state = fsdp2_state(module)
    groups = fsdp2_groups(state) if state is not None else []
    for managed in (param for group in groups for param in group.fsdp_params):
        whole, info = getattr(managed, "_unsharded_param", None), managed._module_info
        if whole is not None:
            names = table.known_names(info.module)
            yield id(whole), [child_name(name, info.param_name) for name in names]


def _flat(module: nn.Module, name: str) -> Iterator[tuple[int, list[str]]]:
    flat: Any = getattr(getattr(module, "_handle", None), "flat_param", None)
    if flat is not None:
        yield id(flat), [child_name(name, FLAT_KEY)]
