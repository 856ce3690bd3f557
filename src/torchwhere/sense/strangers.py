"""Names for modules that belong to no model known so far: a second model, a loss, an activation made on the fly.

A module that nobody knows is looked for below all known roots, and one that is called outside any other is asked for who holds
it. Both take milliseconds, which is nothing for a model and much for a loss that is made anew in every step: of a class whose
bare modules (no parameters, no parts) came from nowhere twice at one place, the next one there is taken to be another one.
"""

from __future__ import annotations

import itertools
import weakref

from torch import nn

from torchwhere.inspect.names import NameTable, innermost, topmost

OUTSIDE = 0  # any other module
_OFTEN = 2


class Strangers:
    """Names them in angle brackets: not a state_dict name."""

    def __init__(self, names: NameTable) -> None:
        self._names = names
        self._numbered: dict[str, dict[int, weakref.ref[nn.Module]]] = {}
        self._from_nowhere: dict[tuple[type, int], int] = {}

    def is_one(self, module: nn.Module, within: int) -> bool:
        """Whether a module, called in another one (its id) or `OUTSIDE`, need not be looked for."""
        return self._from_nowhere.get((type(module), within), 0) >= _OFTEN and _is_bare(module)

    def inside(self, module: nn.Module, within: int, parent: str | None) -> str:
        """A name for one that is held in a plain list of another one, or made on the fly there."""
        name = f"{parent}.<{type(module).__name__}>" if parent else f"<{type(module).__name__}>"
        if module._modules:  # so that its parts have names of their own
            self._names.add_root(module, prefix=name)
        self._note(module, within)
        return name

    def root_of(self, module: nn.Module) -> nn.Module:
        """The model that one called outside any other belongs to: often itself."""
        if self.is_one(module, OUTSIDE):
            return module
        root = topmost(module)
        if root is module:
            self._note(module, OUTSIDE)
        return root

    def prefix(self, root: nn.Module) -> str:
        """`<CrossEntropyLoss>`, `<Discriminator>.layers.0`. One of the same class is `#2`, unless the first is gone by now."""
        name = type(innermost(root)).__name__
        used = self._numbered.setdefault(name, {})
        number = next(each for each in itertools.count(1) if each not in used or used[each]() is None)
        used[number] = weakref.ref(root)
        return f"<{name}>" if number == 1 else f"<{name}#{number}>"

    def _note(self, module: nn.Module, within: int) -> None:
        if _is_bare(module):
            key = type(module), within
            self._from_nowhere[key] = self._from_nowhere.get(key, 0) + 1


def _is_bare(module: nn.Module) -> bool:
    return not module._modules and not module._parameters
