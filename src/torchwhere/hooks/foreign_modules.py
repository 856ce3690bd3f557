"""Names modules that belong to no known model: a second model, a loss, an activation created in a
forward.

The search for such a module walks through all known models. If no other module calls the module,
the search also covers the modules in the variables of the calling frames. If two modules of one
class, called by the same module, are in no model, later ones are not searched for. A module that
has submodules or parameters is still searched for sometimes, and in the frames each time.
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

OUTSIDE = 0  # no other module calls the module
_OFTEN = 2  # searches without success, after which most searches are skipped


class _Numbers:
    """Numbers live modules from 1 on. A new module may get the number of a freed one."""

    def __init__(self) -> None:
        self._free: list[int] = []  # a heap
        self._used: dict[int, weakref.ref[nn.Module]] = {}
        self._highest = 0

    def give(self, module: nn.Module) -> int:
        """Give the lowest free number to a module."""
        if self._free:
            number = heapq.heappop(self._free)
        else:
            number = self._highest = self._highest + 1
        self._used[number] = weakref.ref(module, partial(self._take_back, number))
        return number

    def _take_back(self, number: int, _dead: object) -> None:
        del self._used[number]
        heapq.heappush(self._free, number)


class ForeignModules:
    """Names modules that are in no known model. The names have angle brackets, because they are not
    `state_dict` names."""

    def __init__(self, names: NameTable) -> None:
        self._names = names
        self._numbered: dict[str, _Numbers] = {}  # by the name of a class
        # by class and calling module: how many modules were in no model
        self._not_found: dict[tuple[type, int], int] = {}

    def is_foreign(self, module: nn.Module, within: int) -> bool:
        """Whether a search for a module in the known models can be skipped. `within` is the id of
        the name of the module that calls it, or `OUTSIDE`."""
        count = self._not_found.get((type(module), within), 0)
        return count >= _OFTEN and (_is_bare(module) or count.bit_count() > 1)

    def inside(self, module: nn.Module, within: int, parent: str | None) -> str:
        """The name of a module that another module calls without registering it: the module is in a
        plain list, or was created in the forward."""
        name = f"{parent}.<{type(module).__name__}>" if parent else f"<{type(module).__name__}>"
        if module._modules:  # so that its parts have names of their own
            self._names.begin_root(module, prefix=name)
        self._note_not_found(module, within)
        return name

    def root_of(self, module: nn.Module, frame: FrameType | None) -> nn.Module:
        """The model of a module that no other module calls, if a variable of the calling frames has
        it; otherwise the module itself."""
        if _is_bare(module) and self.is_foreign(module, OUTSIDE):
            return module
        root = enclosing(module, frame)
        if root is module:
            self._note_not_found(module, OUTSIDE)
        return root

    def prefix(self, root: nn.Module) -> str:
        """The prefix of a model: `<CrossEntropyLoss>`, `<Discriminator>`. The second live model of
        a class is `<Discriminator#2>`."""
        name = type(innermost(root)).__name__
        number = self._numbered.setdefault(name, _Numbers()).give(root)
        return f"<{name}>" if number == 1 else f"<{name}#{number}>"

    def _note_not_found(self, module: nn.Module, within: int) -> None:
        key = type(module), within
        self._not_found[key] = self._not_found.get(key, 0) + 1


def _is_bare(module: nn.Module) -> bool:
    return not module._modules and not module._parameters
