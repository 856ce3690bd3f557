"""Names of tensors by id, without any reference to the tensors.

`torch.utils.swap_tensors` refuses a tensor that has a weak reference, and `nn.Module.to()` swaps
every DTensor parameter: a weak reference to a parameter would end a job. So this table identifies a
tensor by its slot: a weak reference to its module, and its key there. A new tensor may get the id
of a freed one, so every look-up checks that the tensor is still in its slot.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchwhere.model.fsdp_states import Managed

WeakSlot = tuple[weakref.ref[Any], str]  # a module, and the key under which it has a tensor
_NONE: list[str] = []


@dataclass(slots=True, eq=False)
class _Entry:
    """The names of one tensor, and the slot for each name."""

    names: list[str]
    slots: list[WeakSlot]
    managed: Managed | None = None

    def keep_only(self, indexes: Iterable[int]) -> None:
        chosen = list(indexes)
        self.names = [self.names[index] for index in chosen]
        self.slots = [self.slots[index] for index in chosen]


class TensorNames:
    """The names of the parameters, or of the buffers, of some models."""

    __slots__ = ("_entries", "_held_in")

    def __init__(self, held_in: str) -> None:
        self._held_in = held_in  # the dictionary of a module: `_parameters` or `_buffers`
        self._entries: dict[int, _Entry] = {}  # by the id of the tensor

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, tensor: object) -> bool:
        return bool(self.of(tensor))

    def of(self, tensor: object) -> list[str]:
        """All names of a tensor; empty if the tensor is unknown, or no longer in its slot."""
        entry = self._entries.get(id(tensor))
        if entry is None:
            return _NONE
        try:
            for ref, key in entry.slots:
                if getattr(ref(), self._held_in).get(key) is not tensor:
                    return self._checked(entry, tensor)
        # The module was freed, or is a ScriptModule, which has no such dictionary.
        except AttributeError:
            return self._checked(entry, tensor)
        return entry.names

    def _checked(self, entry: _Entry, tensor: Any) -> list[str]:
        """The remaining names of a tensor that is no longer in all of its slots."""
        if entry.managed is not None and entry.managed.has(tensor):
            return entry.names
        entry.keep_only(at for at, slot in enumerate(entry.slots) if self._at(slot) is tensor)
        if not entry.names:
            del self._entries[id(tensor)]
        return entry.names

    def _at(self, slot: WeakSlot) -> object:
        module = slot[0]()
        if module is None:
            return None
        held = getattr(module, self._held_in)
        try:
            return held.get(slot[1])
        except AttributeError:  # a ScriptModule has no dictionary here
            return dict(held.items()).get(slot[1])

    def add(self, tensor: torch.Tensor, name: str, slot: WeakSlot) -> None:
        """Add a name and the slot of a tensor. The tensor must be in that slot now."""
        entry = self._entries.get(id(tensor))
        if entry is None or not self.of(tensor):  # unknown, or the id of a freed tensor
            self._entries[id(tensor)] = _Entry([name], [slot])
        elif name not in entry.names:
            entry.names.append(name)
            entry.slots.append(slot)

    def add_all(self, ref: weakref.ref[Any], module: nn.Module, start: str) -> list[int]:
        """Add the tensors that a module has now. Their names begin with `start`. Returns their
        ids."""
        ids = []
        for key, tensor in getattr(module, self._held_in).items():
            if tensor is not None:
                self.add(tensor, start + key, (ref, key))
                ids.append(id(tensor))
        return ids

    def add_managed(self, managed: Managed, named: list[tuple[str, WeakSlot]]) -> list[int]:
        """Add all tensors that represent one parameter, also those that are in no module now.
        Returns their ids."""
        ids = []
        for tensor in managed.tensors():
            if tensor is not None:
                if not self.of(tensor):
                    slots = dict(named)
                    self._entries[id(tensor)] = _Entry(list(slots), list(slots.values()))
                self._entries[id(tensor)].managed = managed
                ids.append(id(tensor))
        return ids

    def remove_slots(self, key: int, module: weakref.ref[Any]) -> None:
        """Remove the names of a tensor in a module that was freed, or no longer has the tensor."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.keep_only(at for at, (ref, _) in enumerate(entry.slots) if ref is not module)
            if not entry.names:
                del self._entries[key]

    def is_managed(self, key: int) -> bool:
        entry = self._entries.get(key)
        return (
            entry is not None and entry.managed is not None and entry.managed.holder() is not None
        )

    def clear(self) -> None:
        self._entries.clear()
