"""`torchwhere.names(model)`: every module, parameter and buffer of a model by name, and every name
of each.

Takes a model, wrapped or not, gives `Names`. It goes both ways, and asks the model as it is now: a
name taken before the model was wrapped, sharded or compiled still leads to the object, and an
object that came later is found when it is asked for. That costs a walk over the model; what is
known costs one look.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Iterator
from typing import Any, overload

import torch
from torch import nn

from torchwhere.api.names_table import HEADINGS, row, table
from torchwhere.core.place import shown
from torchwhere.core.results import Tabular
from torchwhere.model.fsdp import Slot, class_name
from torchwhere.model.module_names import NameTable
from torchwhere.model.module_walk import walk
from torchwhere.model.outermost import topmost
from torchwhere.model.parameters import (
    BUFFER,
    FLAT_KEY,
    PARAMETER,
    ParameterFacts,
    Part,
    facts,
    fsdp_parts,
    is_flat,
)
from torchwhere.model.tensors import TensorNames
from torchwhere.model.wrappers import WRAPPER_PARTS, innermost, wrapped

Thing = nn.Module | torch.Tensor

_MOST_SEARCHED = 20_000  # names among which a mistyped one is looked for


class UnknownNameError(KeyError):
    """No such name in this model, or no such object. A `KeyError` whose text reads as it was
    written."""

    def __str__(self) -> str:
        return str(self.args[0])


def names(model: nn.Module) -> Names:
    """List the names of all modules, parameters and buffers of a model.

    `describe()` knows the names too from now on, as long as the model lives.

    Args:
        model: The model, or what DDP, FSDP, `torch.compile` or DeepSpeed made of it.

    Returns:
        The names and the objects, both ways. They keep no object alive.

    Raises:
        TypeError: If `model` is not a `torch.nn.Module`.

    Example:
        >>> names = torchwhere.names(model)
        >>> names["layers.0.up.weight"]  # the parameter
        >>> names[model.head.weight]  # all its names
        ['head.weight', 'embedding.weight']
    """
    check(model, caller="names")
    found = Names(model)
    root = innermost(model)
    key = id(root)
    _known[key] = found, weakref.ref(root, lambda _dead: _known.pop(key, None))
    return found


def check(model: object, *, caller: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{caller}(model): expected a torch.nn.Module, got {type(model).__name__}. "
            "Give it the model itself, or what DDP, FSDP, torch.compile or DeepSpeed made of it."
        )


# by id of the user's own model, while it lives
_known: dict[int, tuple[Names, weakref.ref[nn.Module]]] = {}


def known() -> list[Names]:
    """The names of all models they were asked for, of those that are still alive."""
    return [found for found, _ in list(_known.values())]


class Names(Tabular):
    """Names and objects of one model, both ways. Holds nothing alive.

    `names[name]` is the module, parameter or buffer; `names[thing]` the list of its names, the one
    in `state_dict` first. `get` is the same without an error. Iterating gives `(name, thing)`, tied
    things once for each of their names.
    """

    def __init__(self, model: nn.Module, *, table: NameTable | None = None) -> None:
        root = innermost(model)
        self._root = weakref.ref(root)
        self._outer = weakref.ref(model)
        self._class = class_name(root)
        self._table = NameTable(buffers=TensorNames("_buffers")) if table is None else table
        self._table.add_root(root)

    @property
    def model(self) -> nn.Module | None:
        """The user's own model, inside all wrappers; None if it is gone."""
        return self._root()

    # -- both ways ---------------------------------------------------------------------------------

    @overload
    def __getitem__(self, key: str) -> Thing: ...
    @overload
    def __getitem__(self, key: Thing) -> list[str]: ...
    def __getitem__(self, key: str | Thing) -> Thing | list[str]:
        found = self.get(key)
        if found is None or (isinstance(found, list) and not found):
            raise UnknownNameError(self._unknown(key))
        return found

    @overload
    def get(self, key: str) -> Thing | None: ...
    @overload
    def get(self, key: Thing) -> list[str]: ...
    def get(self, key: str | Thing) -> Thing | list[str] | None:
        """As `names[key]`, but None for an unknown name and an empty list for an unknown thing."""
        if isinstance(key, str):
            return self._thing(key)
        if not isinstance(key, (nn.Module, torch.Tensor)):
            raise TypeError(
                "names[...]: expected a name, a module, a parameter or a buffer, got"
                f" {type(key).__name__}"
            )
        return list(self.known_names(key) or self._names_now(key))

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            return self.get(key) is not None
        return isinstance(key, (nn.Module, torch.Tensor)) and bool(self.get(key))

    def known_names(self, thing: object) -> list[str]:
        """The names of a thing as far as they are known without walking the model again."""
        while isinstance(thing, nn.Module) and id(thing) not in self._table.modules:
            inner = wrapped(thing)  # a wrapper that came later has the name of what it wraps
            if inner is None:
                return []
            thing = inner
        if isinstance(thing, nn.Module):
            return self._table.modules[id(thing)]
        found = self._table.params.of(thing)
        return found or (self._table.buffers.of(thing) if self._table.buffers is not None else [])

    def _names_now(self, thing: Thing) -> list[str]:
        self._table.refresh()
        found = self.known_names(thing)
        # with use_orig_params no module has it: named as if it had
        if not found and is_flat(thing):
            units = (
                part.unit
                for (_, key), part in self._parts().items()
                if key == FLAT_KEY and part.flat is thing
            )
            found = [_below(unit, FLAT_KEY) for unit in units]
        return found

    def _thing(self, name: str) -> Thing | None:
        """What has this name now. Names with wrappers' parts in them (`module.`, `_orig_mod.`) are
        understood too."""
        module = self._root()
        if module is None or not name:
            return module
        *path, last = name.split(".")
        for part in path:
            module = self._child(module, part)
            if module is None:
                return None
        child = self._child(module, last)
        return self._tensor(innermost(module), last) if child is None else innermost(child)

    def _child(self, module: nn.Module, part: str) -> nn.Module | None:
        inner = innermost(module)
        child = inner._modules.get(part)
        return inner if child is None and part in WRAPPER_PARTS else child

    def _tensor(self, module: nn.Module, key: str) -> torch.Tensor | None:
        found: torch.Tensor | None = module._parameters.get(key)
        if found is None:
            found = module._buffers.get(key)
        # FSDP1 has taken it out of the module: it is in the unit's flat parameter
        if found is None:
            part = self._parts().get((id(module), key))
            found = part.flat if part is not None else None
        return found

    def _unknown(self, key: str | Thing) -> str:
        if self.model is None:
            return f"the model ({self._class}) that these names were of is gone"
        if isinstance(key, str):
            near = (
                difflib.get_close_matches(key, dict(self), n=1)
                if len(self) <= _MOST_SEARCHED
                else []
            )
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return f"{self._class} has no module, parameter or buffer {key!r}{hint}"
        what = (
            f"{type(key).__name__} of shape {tuple(key.shape)}"
            if isinstance(key, torch.Tensor)
            else type(key).__name__
        )
        return (
            f"this {what} is in no part of {self._class}; ask torchwhere.names() of the model that"
            " it belongs to"
        )

    # -- all of them -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[str, Thing]]:
        for name, module in self._modules():
            yield name, module
            start = f"{name}." if name else ""
            for held in (module._parameters, module._buffers):
                yield from (
                    (start + key, tensor) for key, tensor in held.items() if tensor is not None
                )

    def __len__(self) -> int:
        """How many modules, parameters and buffers there are; tied ones count once."""
        return sum(self._counts())

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The user's own modules, without those that wrap them."""
        root = self._root()
        if root is not None:
            yield from ((name, module) for name, module in walk(root) if wrapped(module) is None)

    def _counts(self) -> tuple[int, int, int]:
        modules, params, buffers = set(), set(), set()
        for _, module in self._modules():
            modules.add(id(module))
            params |= {id(param) for param in module._parameters.values() if param is not None}
            buffers |= {id(buffer) for buffer in module._buffers.values() if buffer is not None}
        return len(modules), len(params), len(buffers)

    def facts(self, key: str | torch.Tensor) -> ParameterFacts:
        """Everything about a parameter or buffer, given itself or by name. `UnknownNameError` if it
        is not in the model."""
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
        """Everything about every parameter, in the order of the model; a tied one once."""
        return [found for found in self._all_facts() if found.kind != BUFFER]

    def buffers(self) -> list[ParameterFacts]:
        """Everything about every buffer, in the order of the model."""
        return [found for found in self._all_facts() if found.kind == BUFFER]

    def _all_facts(self) -> list[ParameterFacts]:
        self._table.refresh()
        parts, seen, found = self._parts(), set(), []
        for name, module in self._modules():
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        found.append(self._facts_of(tensor, _below(name, key), module, parts))
        return found

    def _parts(self) -> dict[Slot, Part]:
        root = self._root()
        return {} if root is None else fsdp_parts(walk(self._outermost(root)))

    def _outermost(self, root: nn.Module) -> nn.Module:
        """The model with what wraps it: FSDP1 keeps what it knows about the root's parameters on
        its wrapper alone."""
        outer = self._outer()
        is_fsdp1 = getattr(root, "_is_fsdp_managed_module", False) and not hasattr(
            root, "_get_fsdp_state"
        )
        if outer is None or (outer is root and is_fsdp1):
            outer = topmost(root)
            outer = outer if innermost(outer) is root else root
            self._outer = weakref.ref(outer)
        return outer

    def _facts_of(
        self, tensor: torch.Tensor, name: str, owner: Any, parts: dict[Slot, Part]
    ) -> ParameterFacts:
        key = name.rpartition(".")[2]
        part = parts.get((id(owner), key))
        is_part = part is not None and part.flat is not None and key != FLAT_KEY
        # a part asked for by its original name
        all_names = [] if is_part and is_flat(tensor) else self.known_names(tensor)
        return facts(
            tensor,
            [name, *(other for other in all_names if other != name)],
            kind=(
                BUFFER
                if self._table.buffers is not None and tensor in self._table.buffers
                else PARAMETER
            ),
            part=part,
            flat_name=_below(part.unit, FLAT_KEY) if part is not None and is_part else None,
        )

    # -- as text and as data -----------------------------------------------------------------------

    def __repr__(self) -> str:
        modules, params, buffers = self._counts()
        gone = ", gone" * (self.model is None)
        return (
            f"<Names of {self._class}{gone}: {modules:,} modules, {params:,} parameters,"
            f" {buffers:,} buffers>"
        )

    def __str__(self) -> str:
        """One line for each module, parameter and buffer."""
        return f"{self!r}\n{table(self._rows())}"

    def _repr_html_(self) -> str:
        from torchwhere.render.names import names_html

        return names_html(repr(self), HEADINGS, self._rows())

    def as_rows(self) -> list[dict[str, Any]]:
        """The parameters and buffers, one a row (see `ParameterFacts`)."""
        return [found.to_dict() for found in self._all_facts()]

    def _rows(self) -> Iterator[dict[str, str]]:
        of_name = {found.name: found for found in self._all_facts()}
        seen: set[int] = set()
        for name, thing in self:
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            if isinstance(thing, nn.Module):
                aliases = [shown(other) for other in self.known_names(thing) if other != name]
                yield {"name": shown(name), "what": class_name(thing), "also": ", ".join(aliases)}
            else:
                yield row(of_name[name])

    def to_dict(self) -> dict[str, Any]:
        """For JSON: `model`, `modules` (name, class, aliases), `parameters` and `buffers` (see
        `ParameterFacts`)."""
        every, seen = self._all_facts(), set()
        modules = []
        for name, module in self._modules():
            if id(module) not in seen:
                seen.add(id(module))
                aliases = [other for other in self.known_names(module) if other != name]
                modules.append({"name": name, "class": class_name(module), "aliases": aliases})
        return {
            "model": self._class,
            "modules": modules,
            "parameters": [found.to_dict() for found in every if found.kind != BUFFER],
            "buffers": [found.to_dict() for found in every if found.kind == BUFFER],
        }


def _below(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key
