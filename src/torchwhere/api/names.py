"""`torchwhere.names(model)`: every module, parameter and buffer of a model by name, and all facts
about its parameters.

Takes a model, wrapped or not, and gives `Names`. `name_lookup.py` finds objects by name and names
by object; this file adds the facts, and the names as text and as data.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchwhere.api.name_lookup import NameLookup, UnknownNameError
from torchwhere.core.place import shown
from torchwhere.core.results import Tabular
from torchwhere.model.fsdp import Slot, class_name
from torchwhere.model.module_walk import check_module, child_name
from torchwhere.model.parameters import (
    BUFFER,
    FLAT_KEY,
    PARAMETER,
    ParameterFacts,
    Part,
    facts,
    is_flat,
)
from torchwhere.model.wrappers import innermost
from torchwhere.render.plain_table import PlainTable

__all__ = ["Names", "UnknownNameError", "check", "names", "names_of_live_models"]


def names(model: nn.Module) -> Names:
    """List the names of all modules, parameters and buffers of a model.

    From then on `describe()` also knows the names, as long as the model is alive.

    Args:
        model: The model, or the wrapper that DDP, FSDP, `torch.compile` or DeepSpeed made.

    Returns:
        Finds objects by name, and names by object. It keeps no object alive.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`.

    Example:
        >>> names = torchwhere.names(model)
        >>> names["layers.0.up.weight"]  # the parameter
        >>> names[model.head.weight]  # all its names
        ['head.weight', 'embedding.weight']
    """
    check(model, caller="names")
    result = Names(model)
    root = innermost(model)
    key = id(root)
    _live_models[key] = result, weakref.ref(root, lambda _dead: _live_models.pop(key, None))
    return result


def check(model: object, *, caller: str) -> None:
    """Raise a `TypeError` in the name of `caller` if `model` is not a module."""
    advice = ". Pass the model, or the wrapper that DDP, FSDP, torch.compile or DeepSpeed made."
    check_module(model, f"{caller}(model)", advice=advice)


# by the id of the user's own model, as long as it is alive
_live_models: dict[int, tuple[Names, weakref.ref[nn.Module]]] = {}


def names_of_live_models() -> list[Names]:
    """The names of all models that `names()` was called with and that are still alive."""
    return [model_names for model_names, _ in list(_live_models.values())]


class Names(NameLookup, Tabular):
    """Finds the objects of one model by name, and the names of an object. Keeps no object alive.

    `names[name]` is the module, parameter or buffer; `names[thing]` is the list of its names,
    beginning with the name in `state_dict`. Iterating gives pairs of a name and an object; a tied
    object comes once for each of its names.

    Example:
        names = torchwhere.names(model)
        names["head.weight"] is model.head.weight  # True
        print(names)  # a table of all names
    """

    def facts(self, key: str | torch.Tensor) -> ParameterFacts:
        """Return everything about a parameter or buffer.

        Args:
            key: The parameter or buffer, or its name.

        Raises:
            TypeError: `key` is a module.
            UnknownNameError: It is not in the model.

        Example:
            names.facts("head.weight").local_shape
        """
        name = key if isinstance(key, str) else self[key][0]
        tensor = self[name]
        if isinstance(tensor, nn.Module):
            raise TypeError(
                f"facts({name!r}): expected a parameter or a buffer; that is a module"
                f" ({type(tensor).__name__})"
            )
        owner = self._thing(name.rpartition(".")[0])
        return self._facts_of(tensor, name, owner, self._parts())

    def parameters(self) -> list[ParameterFacts]:
        """Return everything about every parameter, in the order of the model.

        A tied parameter is listed once.

        Example:
            sum(param.numel for param in names.parameters())
        """
        return [entry for entry in self._all_facts() if entry.kind != BUFFER]

    def buffers(self) -> list[ParameterFacts]:
        """Return everything about every buffer, in the order of the model.

        Example:
            [buffer.name for buffer in names.buffers()]
        """
        return [entry for entry in self._all_facts() if entry.kind == BUFFER]

    def _all_facts(self) -> list[ParameterFacts]:
        self._table.refresh()
        parts, ids, entries = self._parts(), set(), []
        for name, module in self._modules():
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None and id(tensor) not in ids:
                        ids.add(id(tensor))
                        entries.append(self._facts_of(tensor, child_name(name, key), module, parts))
        return entries

    def _facts_of(
        self, tensor: torch.Tensor, name: str, owner: Any, parts: dict[Slot, Part]
    ) -> ParameterFacts:
        key = name.rpartition(".")[2]
        part = parts.get((id(owner), key))
        is_part = part is not None and part.flat is not None and key != FLAT_KEY
        # `name` may be the original name of a part, while `tensor` is the flat parameter
        all_names = [] if is_part and is_flat(tensor) else self.known_names(tensor)
        is_buffer = self._table.buffers is not None and tensor in self._table.buffers
        return facts(
            tensor,
            [name, *(other for other in all_names if other != name)],
            kind=BUFFER if is_buffer else PARAMETER,
            part=part,
            flat_name=child_name(part.unit, FLAT_KEY) if part is not None and is_part else None,
        )

    # -- as text and as data -----------------------------------------------------------------------

    def __repr__(self) -> str:
        modules, params, buffers = self._counts()
        deleted = ", deleted" if self.model is None else ""
        return (
            f"<Names of {self._class}{deleted}: {modules:,} modules, {params:,} parameters,"
            f" {buffers:,} buffers>"
        )

    def __str__(self) -> str:
        """One line for each module, parameter and buffer."""
        return f"{self!r}\n{self._as_table().text()}"

    def _repr_html_(self) -> str:
        # Imported here: it loads rich, which a training process does not need.
        from torchwhere.render import html as page

        title = page.paragraph(repr(self), style="bold")
        return page.fragment(title, self._as_table().html())

    def _as_table(self) -> PlainTable:
        return PlainTable(HEADINGS, list(self._rows()), right=("numel", "id"))

    def as_rows(self) -> list[dict[str, Any]]:
        """Return one row for each parameter and buffer, with the fields of `ParameterFacts`.

        Example:
            [row["name"] for row in names.as_rows() if row["dtype"] == "float32"]
        """
        return [entry.to_dict() for entry in self._all_facts()]

    def _rows(self) -> Iterator[dict[str, str]]:
        by_name = {entry.name: entry for entry in self._all_facts()}
        ids: set[int] = set()
        for name, thing in self:
            if id(thing) in ids:
                continue
            ids.add(id(thing))
            if isinstance(thing, nn.Module):
                aliases = [shown(other) for other in self.known_names(thing) if other != name]
                yield {"name": shown(name), "type": class_name(thing), "also": ", ".join(aliases)}
            else:
                yield row(by_name[name])

    def to_dict(self) -> dict[str, Any]:
        """Return the names as values for JSON.

        Returns:
            `model` is the class of the model, `modules` has the name, class and aliases of each
            module, `parameters` and `buffers` have the fields of `ParameterFacts`.

        Example:
            json.dumps(torchwhere.names(model).to_dict())
        """
        entries = self._all_facts()
        return {
            "model": self._class,
            "modules": self._module_dicts(),
            "parameters": [entry.to_dict() for entry in entries if entry.kind != BUFFER],
            "buffers": [entry.to_dict() for entry in entries if entry.kind == BUFFER],
        }

    def _module_dicts(self) -> list[dict[str, Any]]:
        ids, modules = set(), []
        for name, module in self._modules():
            if id(module) not in ids:
                ids.add(id(module))
                aliases = [other for other in self.known_names(module) if other != name]
                modules.append({"name": name, "class": class_name(module), "aliases": aliases})
        return modules


HEADINGS = (
    "name",
    "type",
    "shape",
    "here",
    "numel",
    "dtype",
    "device",
    "id",
    "status",
    "sharded",
    "holds",
    "also",
)


def row(facts: ParameterFacts) -> dict[str, str]:
    """The cells of a parameter or buffer, by heading."""
    sharding = []
    if facts.mesh is not None:
        sharding.append(f"on {facts.mesh}: {', '.join(facts.placements or ())}")
    if facts.unit is not None:
        sharding.append(f"unit {shown(facts.unit)}")
    return {
        "name": facts.name,
        "type": facts.kind,
        "shape": str(list(facts.shape)),
        "here": str(list(facts.local_shape)) if facts.local_shape != facts.shape else "",
        "numel": f"{facts.numel:,}",
        "dtype": facts.dtype,
        "device": facts.device,
        "id": "" if facts.id is None else str(facts.id),
        "status": facts.zero_status or "",
        "sharded": ", ".join(sharding),
        "holds": ", ".join(facts.holds),
        "also": ", ".join(facts.aliases),
    }
