"""The names of the whole parameters that FSDP computes with: they are in no module before and
after, but autograd knows them.

FSDP2 gathers a whole parameter for the time of a forward and puts it in the place of the sharded
one; FSDP1 does so with one flat parameter for each unit (`layers.0._flat_param`). The leaves of an
autograd graph are these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from torchwhere.model.fsdp_states import groups2, state2
from torchwhere.model.module_names import NameTable
from torchwhere.model.module_walk import walk
from torchwhere.model.parameters import FLAT_KEY


def unsharded_names(table: NameTable) -> Iterator[tuple[int, list[str]]]:
    """From the id of a whole parameter to the names of the one that it was made from, for all
    models of a table."""
    for prefix, root in table.roots():
        for name, module in walk(root, prefix=prefix):
            yield from _fully_sharded(module, table)
            yield from _flat(module, name)


def _fully_sharded(module: nn.Module, table: NameTable) -> Iterator[tuple[int, list[str]]]:
    state = state2(module)
    for managed in (
        (managed for group in groups2(state) for managed in group.fsdp_params)
        if state is not None
        else ()
    ):
        whole, info = getattr(managed, "_unsharded_param", None), managed._module_info
        if whole is not None:
            names = table.known_names(info.module)
            yield (
                id(whole),
                [f"{name}.{info.param_name}" if name else info.param_name for name in names],
            )


def _flat(module: nn.Module, name: str) -> Iterator[tuple[int, list[str]]]:
    flat: Any = getattr(getattr(module, "_handle", None), "flat_param", None)
    if flat is not None:
        yield id(flat), [f"{name}.{FLAT_KEY}" if name else FLAT_KEY]
