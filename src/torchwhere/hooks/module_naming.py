"""Names a module at its first call.

A model that was not passed to `watch` is found when one of its modules is called. Its modules are
then named in parts, some at each first call. So a first call is cheap, however large the model is:
a job may copy the model and call the copy in every step. If a module is called before the walk over
its model reaches it, its name is that of the calling module and the path from there.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn

from torchwhere.hooks import python_stack
from torchwhere.hooks.foreign_modules import OUTSIDE, ForeignModules
from torchwhere.model.module_names import NameTable
from torchwhere.model.module_walk import ModuleWalk, child_name, name_below
from torchwhere.model.wrappers import innermost, wrapped

_MOST_SEARCHED = 200  # modules of a model, if a model of the same class was searched before
_MOST_IN_GRAPH = 1000  # modules that are searched for a parameter


class ModuleNamer:
    """Names every module that is called, and decides which model has names without a prefix: the
    root."""

    def __init__(
        self,
        names: NameTable,
        *,
        text_of: Callable[[int], str | None],
        current_step: Callable[[], int],
        forget: Callable[[int], None],
    ) -> None:
        self.root_class = ""  # of the model whose names have no prefix
        self._names = names
        self._text_of = text_of
        self._current_step = current_step
        self._forget = forget  # removes the name of a module, by the id of the module
        self._foreign = ForeignModules(names)
        self._called: dict[int, weakref.ref[nn.Module]] = {}  # by the id of the name
        self._lock = threading.RLock()
        self._root: weakref.ref[nn.Module] | None = None
        self._root_is_given = False
        self._searched: set[str] = set()  # classes of models that were searched for older roots
        self._trained: dict[str, bool] = {}  # by class: whether a model of it is trained
        names.on_renamed = self._drop

    def add_model(self, model: nn.Module) -> None:
        """Name a model that the user passed. The first one is the root; the names of a later one
        begin with its class."""
        if not self._names.known_names(model):
            self._names.add_root(
                model, prefix=self._foreign.prefix(model) if self._root is not None else ""
            )
        if self._root is None:
            self._set_root(model)
            self._root_is_given = True

    def _set_root(self, root: nn.Module) -> None:
        self._root, self.root_class = weakref.ref(root), type(innermost(root)).__name__

    def note_called(self, name: int, ref: weakref.ref[nn.Module]) -> None:
        """Remember which module has a name, by the id of the name."""
        self._called[name] = ref

    def name(self, module: nn.Module, within: int) -> str | None:
        """The name of a module that is called for the first time; None for the graph of a compiler.

        Args:
            module: The module.
            within: The id of the name of the module that calls it, or `OUTSIDE`.
        """
        name = self._known_name(module)
        if name is None:
            name = self._looked_up(module, within)
        if name is not None:
            return name
        return None if _is_graph(module) else self._foreign_name(module, within)

    # -- modules of known models -------------------------------------------------------------------

    def _known_name(self, module: nn.Module) -> str | None:
        """The name of a module of a known model, or of the module that it wraps."""
        return next(
            (names[0] for part in _inwards(module) if (names := self._names.modules.get(id(part)))),
            None,
        )

    def _looked_up(self, module: nn.Module, within: int) -> str | None:
        """The name of a module that no walk has reached, or that was added to a known model.

        Visits a limited number of modules.
        """
        if self._names.is_complete:
            if within == OUTSIDE or self._foreign.is_foreign(module, within):
                return None
            self._names.begin_refresh()
        self._names.continue_walks()
        name = self._known_name(module)
        caller = self._called.get(within)
        if name is None and caller is not None and not self._names.is_complete:
            name = self._name_below(caller(), self._text_of(within), module)
        return name

    def _name_below(
        self, outer: nn.Module | None, outer_name: str | None, module: nn.Module
    ) -> str | None:
        """The name of a module from its path below another module, until a walk reaches it."""
        if outer is None or outer_name is None:
            return None
        relative = name_below(outer, module)
        if relative is None:
            return None
        # a wrapped module has the name of its wrapper
        name = child_name(outer_name, relative) if relative else outer_name
        self._names.set_provisional(module, name)
        return name

    # -- other modules -----------------------------------------------------------------------------

    def _foreign_name(self, module: nn.Module, within: int) -> str:
        """A name for a module that belongs to no known model."""
        if within != OUTSIDE:
            return self._name_inside(module, within)
        with self._lock:  # if two threads call two models first, only one of them is the root
            root = self._foreign.root_of(module, python_stack.caller(4))
            name = self._known_name(module)
            if name is None and id(root) in self._names.modules:
                name = self._name_of_added(module, root)
            return self._name_of_new_root(module, root) if name is None else name

    def _name_inside(self, module: nn.Module, within: int) -> str:
        """The name of a module that another module calls and does not contain."""
        is_complete = self._names.is_complete
        name = self._foreign.inside(module, within, self._text_of(within))
        if not is_complete:  # it may be in a part of the model that no walk has reached
            self._names.set_provisional(module, name)
        return name

    def _name_of_added(self, module: nn.Module, root: nn.Module) -> str | None:
        """The name of a module that was added to a known model."""
        if self._names.is_complete:
            self._names.begin_refresh()
            self._names.continue_walks()
        name = self._known_name(module)
        if name is None:
            name = self._name_below(root, self._known_name(root), module)
        return name

    def _name_of_new_root(self, module: nn.Module, root: nn.Module) -> str:
        is_model = self._takes_root(root) and self._is_trained(root)
        if is_model:
            self._set_root(root)
        prefix = "" if is_model else self._foreign.prefix(root)
        is_complete = self._names.is_complete
        self._names.begin_root(root, prefix=prefix)
        if is_complete:
            self._names.continue_walks()
        else:  # this call has named enough modules, and an older root may contain the new one
            self._names.set_provisional(root, prefix)
        name = self._known_name(module)
        if name is None:
            name = self._name_below(root, prefix, module)
        return f"<{type(module).__name__}>" if name is None else name

    # -- the root ----------------------------------------------------------------------------------

    def _takes_root(self, model: nn.Module) -> bool:
        """Whether a model may have the names without a prefix.

        True for the first model, and for a new model after the first one was freed. In the first
        step also for a model that contains the first one: a job may call a part before it builds
        the model. In later steps such a model may be a wrapper for evaluation on a single rank.
        """
        parts = self._drop_parts_of(model)
        if self._root is None or self._root_is_given:
            return self._root is None
        root = self._root()
        return root is None or any(part is root for part in parts)

    def _drop_parts_of(self, model: nn.Module) -> list[nn.Module]:
        """In the first step, forget the names of roots that are part of a model: they get names
        below that model."""
        if self._current_step():
            return []
        roots = {
            id(root): root
            for prefix, root in self._names.roots()
            if prefix or not self._root_is_given
        }
        parts = self._contained(roots, model) if roots else []
        for part in parts:
            self._drop(part)
        return parts

    def _contained(self, modules: dict[int, nn.Module], model: nn.Module) -> list[nn.Module]:
        """The modules that are part of a model."""
        kind = _class_of(model)
        most = _MOST_SEARCHED if kind in self._searched else sys.maxsize
        self._searched.add(kind)
        ids = {id(part) for _, part in ModuleWalk(model).next(most) if id(part) in modules}
        return [module for key, module in modules.items() if key in ids]

    def _drop(self, module: nn.Module) -> None:
        """Forget the name of a module, and of everything below it if it is a root."""
        if all(root is not module for _, root in self._names.roots()):
            self._forget(id(module))
            return
        for part in module.modules():
            self._forget(id(part))
        self._names.drop_root(module)

    def _is_trained(self, model: nn.Module) -> bool:
        """Whether a model has a parameter that requires a gradient."""
        kind = _class_of(model)
        walk = ModuleWalk(model)
        most = _MOST_SEARCHED if kind in self._trained else sys.maxsize
        is_trained = any(_has_trained_parameter(part) for _, part in walk.next(most))
        if is_trained or walk.is_over:
            self._trained[kind] = is_trained
        return self._trained[kind]


def _inwards(module: nn.Module) -> Iterator[nn.Module]:
    """A module, and the modules that it wraps, from the outside to the inside."""
    inner: nn.Module | None = module
    while inner is not None:
        yield inner
        inner = wrapped(inner)


def _class_of(model: nn.Module) -> str:
    cls = type(innermost(model))
    return f"{cls.__module__}.{cls.__qualname__}"


def _has_trained_parameter(module: nn.Module) -> bool:
    return any(param is not None and param.requires_grad for param in module._parameters.values())


def _is_graph(module: nn.Module) -> bool:
    """Whether a module is a graph that a compiler made: it has no parameters. A traced model has
    parameters."""
    return isinstance(module, torch.fx.GraphModule) and not any(
        param is not None
        for _, part in ModuleWalk(module).next(_MOST_IN_GRAPH)
        for param in part._parameters.values()
    )
