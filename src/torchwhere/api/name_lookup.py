"""Looks up the modules, parameters and buffers of a model by name, and all names of each.

A lookup reads the model as it is now. A name from before the model was wrapped, sharded or compiled
still finds the object, and objects that were added later are found too. The names of a known object
take one dictionary lookup; an unknown object costs a walk over the model.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Iterator
from typing import overload

import torch
from torch import nn

from torchwhere.model.fsdp import Slot, class_name
from torchwhere.model.module_names import NameTable
from torchwhere.model.module_walk import child_name, walk
from torchwhere.model.parameters import FLAT_KEY, Part, fsdp_parts, is_flat
from torchwhere.model.tensors import TensorNames
from torchwhere.model.wrappers import WRAPPER_PARTS, innermost, topmost, wrapped

Thing = nn.Module | torch.Tensor  # a module, parameter or buffer

_MOST_SEARCHED = 20_000  # a larger model gets no suggestion for a misspelt name


class UnknownNameError(KeyError):
    """The model has no such name, or no such object. A `KeyError` with a readable text.

    Example:
        try:
            torchwhere.names(model)["head.wieght"]
        except KeyError as error:
            print(error)
    """

    def __str__(self) -> str:
        return str(self.args[0])


class NameLookup:
    """Finds the objects of one model by name, and the names of an object. Keeps no object alive."""

    def __init__(self, model: nn.Module, *, table: NameTable | None = None) -> None:
        root = innermost(model)
        self._root = weakref.ref(root)
        self._outer = weakref.ref(model)
        self._class = class_name(root)
        self._table = NameTable(buffers=TensorNames("_buffers")) if table is None else table
        self._table.add_root(root)

    @property
    def model(self) -> nn.Module | None:
        """The user's own model, inside all wrappers; None if it was deleted."""
        return self._root()

    @overload
    def __getitem__(self, key: str) -> Thing: ...
    @overload
    def __getitem__(self, key: Thing) -> list[str]: ...
    def __getitem__(self, key: str | Thing) -> Thing | list[str]:
        """Return the object with a name, or all names of an object.

        Args:
            key: A name, or a module, parameter or buffer.

        Returns:
            For a name, the module, parameter or buffer. For an object, its names, beginning with
            the name in `state_dict`.

        Raises:
            TypeError: `key` is something else.
            UnknownNameError: The model has no such name or object.

        Example:
            names["head.weight"]
        """
        result = self.get(key)
        if result is None or (isinstance(result, list) and not result):
            raise UnknownNameError(self._unknown(key))
        return result

    @overload
    def get(self, key: str) -> Thing | None: ...
    @overload
    def get(self, key: Thing) -> list[str]: ...
    def get(self, key: str | Thing) -> Thing | list[str] | None:
        """Return the same as `names[key]`, without an error for an unknown key.

        Args:
            key: A name, or a module, parameter or buffer.

        Returns:
            None for an unknown name, and an empty list for an unknown object.

        Raises:
            TypeError: `key` is something else.

        Example:
            names.get("no.such.name")  # None
        """
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
        """Return the names of an object that are known without another walk over the model.

        Args:
            thing: A module, parameter or buffer.

        Returns:
            Its names; empty if they are not known.

        Example:
            names.known_names(model.head)  # ['head']
        """
        while isinstance(thing, nn.Module) and id(thing) not in self._table.modules:
            inner = wrapped(thing)  # a wrapper that was added later has the name of its content
            if inner is None:
                return []
            thing = inner
        if isinstance(thing, nn.Module):
            return self._table.modules[id(thing)]
        names = self._table.params.of(thing)
        if names or self._table.buffers is None:
            return names
        return self._table.buffers.of(thing)

    def _names_now(self, thing: Thing) -> list[str]:
        self._table.refresh()
        names = self.known_names(thing)
        # With use_orig_params no module holds the flat parameter: it gets the name it would have.
        if not names and is_flat(thing):
            names = [
                child_name(part.unit, FLAT_KEY)
                for (_, key), part in self._parts().items()
                if key == FLAT_KEY and part.flat is thing
            ]
        return names

    def _thing(self, name: str) -> Thing | None:
        """The object that has this name now. The name may contain parts of wrappers (`module.`,
        `_orig_mod.`)."""
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
        tensor: torch.Tensor | None = module._parameters.get(key)
        if tensor is None:
            tensor = module._buffers.get(key)
        # FSDP1 has moved it from the module to the flat parameter of its unit
        if tensor is None:
            part = self._parts().get((id(module), key))
            tensor = part.flat if part is not None else None
        return tensor

    def _unknown(self, key: str | Thing) -> str:
        if self.model is None:
            return f"the model ({self._class}) of these names was deleted"
        if isinstance(key, str):
            is_small = len(self) <= _MOST_SEARCHED
            near = difflib.get_close_matches(key, dict(self), n=1) if is_small else []
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return f"{self._class} has no module, parameter or buffer {key!r}{hint}"
        label = type(key).__name__
        if isinstance(key, torch.Tensor):
            label += f" of shape {tuple(key.shape)}"
        return (
            f"this {label} is not part of {self._class}; call torchwhere.names() with the model"
            " that it belongs to"
        )

    # -- the whole model ---------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[str, Thing]]:
        for name, module in self._modules():
            yield name, module
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        yield child_name(name, key), tensor

    def __len__(self) -> int:
        """The number of modules, parameters and buffers; a tied object counts once."""
        return sum(self._counts())

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The user's own modules, without wrappers."""
        root = self._root()
        if root is not None:
            yield from ((name, module) for name, module in walk(root) if wrapped(module) is None)

    def _counts(self) -> tuple[int, int, int]:
        """The numbers of modules, parameters and buffers."""
        modules, params, buffers = set(), set(), set()
        for _, module in self._modules():
            modules.add(id(module))
            params |= {id(param) for param in module._parameters.values() if param is not None}
            buffers |= {id(buffer) for buffer in module._buffers.values() if buffer is not None}
        return len(modules), len(params), len(buffers)

    # -- FSDP --------------------------------------------------------------------------------------

    def _parts(self) -> dict[Slot, Part]:
        root = self._root()
        return {} if root is None else fsdp_parts(walk(self._outermost(root)))

    def _outermost(self, root: nn.Module) -> nn.Module:
        """The model with its wrappers. FSDP1 stores the facts about the root's parameters only on
        the wrapper."""
        outer = self._outer()
        is_fsdp1 = getattr(root, "_is_fsdp_managed_module", False) and not hasattr(
            root, "_get_fsdp_state"
        )
        if outer is None or (outer is root and is_fsdp1):
            outer = topmost(root)
            outer = outer if innermost(outer) is root else root
            self._outer = weakref.ref(outer)
        return outer
