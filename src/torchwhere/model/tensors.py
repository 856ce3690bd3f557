"""Names of tensors by id, with nothing on the tensors themselves.

`torch.utils.swap_tensors` refuses a tensor that has a weak reference, and `nn.Module.to()` swaps
every DTensor parameter: a weak reference on a parameter would end a job. So a tensor is known by
where it is: the module that has it (held weakly) and its key there. Another tensor may get the id
of one that is gone, so every look-up checks that the tensor is still there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from torchwhere.model.fsdp_states import Managed

WeakSlot = tuple[weakref.ref[Any], str]  # a module, and the key under which it has a tensor
_NONE: list[str] = []


class _Entry:
    """The names of one tensor, and for each of them where the tensor is."""

    __slots__ = ("managed", "names", "slots")

    def __init__(self, names: list[str], slots: list[WeakSlot]) -> None:
        self.names = names
        self.slots = slots
        self.managed: Managed | None = None

    def keep(self, places: Iterable[int]) -> None:
        kept = list(places)
        self.names = [self.names[at] for at in kept]
        self.slots = [self.slots[at] for at in kept]


class TensorNames:
    """The names of the parameters, or of the buffers, of some models."""

    __slots__ = ("_held_in", "_of")

    def __init__(self, held_in: str) -> None:
        self._held_in = held_in  # the dictionary of a module: `_parameters` or `_buffers`
        self._of: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, tensor: object) -> bool:
        return bool(self.of(tensor))

    def of(self, tensor: object) -> list[str]:
        """All names of a tensor; empty for a tensor that is unknown, or is not in its place any
        more."""
        entry = self._of.get(id(tensor))
        if entry is None:
            return _NONE
        try:
            for ref, key in entry.slots:
                if getattr(ref(), self._held_in).get(key) is not tensor:
                    return self._checked(entry, tensor)
        # the module is gone, or is a ScriptModule, where this is no dictionary
        except AttributeError:
            return self._checked(entry, tensor)
        return entry.names

    def _checked(self, entry: _Entry, tensor: Any) -> list[str]:
        """The names that are left of a tensor that is not in all of its places."""
        if entry.managed is not None and entry.managed.has(tensor):
            return entry.names
        entry.keep(at for at, slot in enumerate(entry.slots) if self._at(slot) is tensor)
        if not entry.names:
            del self._of[id(tensor)]
        return entry.names

    def _at(self, slot: WeakSlot) -> object:
        module = slot[0]()
        if module is None:
            return None
        held = getattr(module, self._held_in)
        try:
            return held.get(slot[1])
        except AttributeError:  # that of a ScriptModule is no dictionary
            return dict(held.items()).get(slot[1])

    def add(self, tensor: torch.Tensor, name: str, slot: WeakSlot) -> None:
        """Note that a tensor is in this place, under this name. It must be there now."""
        entry = self._of.get(id(tensor))
        if entry is None or not self.of(tensor):  # unknown, or the id of one that is gone
            self._of[id(tensor)] = _Entry([name], [slot])
        elif name not in entry.names:
            entry.names.append(name)
            entry.slots.append(slot)

    def add_managed(self, managed: Managed, named: list[tuple[str, WeakSlot]]) -> list[int]:
        """Note all tensors that stand for one parameter, also those that are in no module now.
        Gives their ids."""
        ids = []
        for tensor in managed.tensors():
            if tensor is not None:
                if not self.of(tensor):
                    self._of[id(tensor)] = _Entry(
                        *map(list, zip(*dict(named).items(), strict=True))
                    )
                self._of[id(tensor)].managed = managed
                ids.append(id(tensor))
        return ids

    def drop(self, tensor: object) -> None:
        self._of.pop(id(tensor), None)

    def leave(self, key: int, module: weakref.ref[Any]) -> None:
        """The module is gone, or has no tensor with this id any more."""
        entry = self._of.get(key)
        if entry is not None:
            entry.keep(at for at, (ref, _) in enumerate(entry.slots) if ref is not module)
            if not entry.names:
                del self._of[key]

    def is_managed(self, key: int) -> bool:
        entry = self._of.get(key)
        return (
            entry is not None and entry.managed is not None and entry.managed.holder() is not None
        )

    def clear(self) -> None:
        self._of.clear()
