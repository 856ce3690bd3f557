"""Names modules that belong to no known model: a second model, a loss, an activation created in a
forward.

The search for such a module walks through all known models. For a module that is called outside all
others, it also looks at the modules in the variables of the calling frames. If modules of one class
were found nowhere twice at one place, the next one there is not searched for. A module that has
submodules or parameters is still searched for sometimes, and in the frames each time.
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
    """Numbers live modules from 1 on. The number of a freed module is given again."""

    def __init__(self) -> None:
        self._free: list[int] = []  # a heap
        self._used: dict[int, weakref.ref[nn.Module]] = {}
        self._highest = 0

    def give(self, thing: nn.Module) -> int:
        """Give the lowest free number to a module."""
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
    """Names modules of no known model in angle brackets: these are not state_dict names."""

    def __init__(self, names: NameTable) -> None:
        self._names = names
        self._numbered: dict[str, _Numbers] = {}  # by the name of a class
        self._from_nowhere: dict[tuple[type, int], int] = {}

    def is_one(self, module: nn.Module, within: int) -> bool:
        """Whether a module need not be searched for in the known models. `within` is the id of the
        module that calls it, or `OUTSIDE`."""
        times = self._from_nowhere.get((type(module), within), 0)
        return times >= _OFTEN and (_is_bare(module) or times.bit_count() > 1)

    def inside(self, module: nn.Module, within: int, parent: str | None) -> str:
        """The name of a module that another module calls without registering it: from a plain list,
        or created in its forward."""
        name = f"{parent}.<{type(module).__name__}>" if parent else f"<{type(module).__name__}>"
        if module._modules:  # so that its parts have names of their own
            self._names.begin_root(module, prefix=name)
        self._note(module, within)
        return name

    def root_of(self, module: nn.Module, frame: FrameType | None) -> nn.Module:
        """The model of a module that is called outside all others, as far as the calling frames
        have it; often the module itself."""
        if _is_bare(module) and self.is_one(module, OUTSIDE):
            return module
        root = enclosing(module, frame)
        if root is module:
            self._note(module, OUTSIDE)
        return root

    def prefix(self, root: nn.Module) -> str:
        """The prefix of a model: `<CrossEntropyLoss>`, `<Discriminator>`. The second live model of
        a class is `<Discriminator#2>`."""
        name = type(innermost(root)).__name__
        number = self._numbered.setdefault(name, _Numbers()).give(root)
        return f"<{name}>" if number == 1 else f"<{name}#{number}>"

    def _note(self, module: nn.Module, within: int) -> None:
        key = type(module), within
        self._from_nowhere[key] = self._from_nowhere.get(key, 0) + 1


def _is_bare(module: nn.Module) -> bool:
    return not module._modules and not module._parameters
