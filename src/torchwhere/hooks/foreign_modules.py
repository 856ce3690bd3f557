"""Names for modules that belong to no known model: a second model, a loss, an activation made on
the fly.

Such a module is looked for below all known roots, which takes a walk over them. One that is called
outside any other is looked for in the modules that the calling frames can see. Where modules of one
class came from nowhere twice at one place, the next one there is taken to be another one. A module
that has parts or parameters is still looked for now and then, and in the frames each time.
"""

from __future__ import annotations

import heapq
import weakref
from functools import partial
from types import FrameType

from torch import nn

from torchwhere.hooks.enclosing import enclosing
from torchwhere.model.module_names import NameTable
from torchwhere.model.wrappers import innermost

OUTSIDE = 0  # any other module
_OFTEN = 2


class _Numbers:
    """Numbers from 1 on for things that are alive. A number is free again when its thing is
    gone."""

    def __init__(self) -> None:
        self._free: list[int] = []  # a heap
        self._used: dict[int, weakref.ref[nn.Module]] = {}
        self._highest = 0

    def give(self, thing: nn.Module) -> int:
        """The lowest number that is free."""
        if self._free:
            number = heapq.heappop(self._free)
        else:
            number = self._highest = self._highest + 1
        self._used[number] = weakref.ref(thing, partial(self._take_back, number))
        return number

    def _take_back(self, number: int, _dead: object) -> None:
        del self._used[number]
        heapq.heappush(self._free, number)


class ForeignModules:
    """Names them in angle brackets: not a state_dict name."""

    def __init__(self, names: NameTable) -> None:
        self._names = names
        self._numbered: dict[str, _Numbers] = {}  # by the name of a class
        self._from_nowhere: dict[tuple[type, int], int] = {}

    def is_one(self, module: nn.Module, within: int) -> bool:
        """Whether a module, called in another one (its id) or `OUTSIDE`, need not be looked for in
        the known models."""
        times = self._from_nowhere.get((type(module), within), 0)
        return times >= _OFTEN and (_is_bare(module) or times.bit_count() > 1)

    def inside(self, module: nn.Module, within: int, parent: str | None) -> str:
        """A name for one that is held in a plain list of another one, or made on the fly there."""
        name = f"{parent}.<{type(module).__name__}>" if parent else f"<{type(module).__name__}>"
        if module._modules:  # so that its parts have names of their own
            self._names.begin_root(module, prefix=name)
        self._note(module, within)
        return name

    def root_of(self, module: nn.Module, frame: FrameType | None) -> nn.Module:
        """The model that one called outside any other belongs to, as far as the calling frames can
        see it: often itself."""
        if _is_bare(module) and self.is_one(module, OUTSIDE):
            return module
        root = enclosing(module, frame)
        if root is module:
            self._note(module, OUTSIDE)
        return root

    def prefix(self, root: nn.Module) -> str:
        """`<CrossEntropyLoss>`, `<Discriminator>.layers.0`. One of the same class is `#2`, unless
        the first is gone by now."""
        name = type(innermost(root)).__name__
        number = self._numbered.setdefault(name, _Numbers()).give(root)
        return f"<{name}>" if number == 1 else f"<{name}#{number}>"

    def _note(self, module: nn.Module, within: int) -> None:
        key = type(module), within
        self._from_nowhere[key] = self._from_nowhere.get(key, 0) + 1


def _is_bare(module: nn.Module) -> bool:
    return not module._modules and not module._parameters
