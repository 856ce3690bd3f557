"""Names a module at its first call.

A model that was not passed to `watch` is found when one of its modules is called. Its modules are
then named in parts, some at each first call. So a first call is cheap, however large the model is:
a job may copy the model and call the copy in every step. If a module is called before the walk over
its model reaches it, its name is that of the calling module and the path from there.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch
from torch import nn

from torchwhere.hooks import python_stack
from torchwhere.hooks.foreign_modules import OUTSIDE, ForeignModules
from torchwhere.hooks.locate import Locator
from torchwhere.model.module_walk import ModuleWalk, child_name, children_of, name_below
from torchwhere.model.wrappers import innermost, inwards

# Modules that are searched for older roots and trained parameters:
_MOST_AT_FIRST = 100  # from its start, at the first call of a model
_MOST_FROM_END = 50  # at the same call
_MOST_LATER = 64  # at a later first call, if the search is not over
_MOST_IN_GRAPH = 1000  # modules that are searched for a parameter
_MOST_PARAMS = 64  # parameters of one module


class ModuleNamer:
    """Names every module that is called, and decides which model has names without a prefix: the
    root."""

    def __init__(
        self,
        locator: Locator,
        *,
        forget: Callable[[int], None],
        forget_all: Callable[[], None],
    ) -> None:
        self.root_class = ""  # of the model whose names have no prefix
        self._locator = locator
        self._names = names = locator.names
        self._forget = forget  # removes the name of a module, by the id of the module
        self._forget_all = forget_all
        self._foreign = ForeignModules(names)
        self._called: dict[int, weakref.ref[nn.Module]] = {}  # by the id of the name
        self._lock = threading.RLock()
        self._root: weakref.ref[nn.Module] | None = None
        self._root_is_given = False
        self._searches: deque[ModelSearch] = deque()  # those that are not over
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
        if self._searches:
            self._continue_search()
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
            (names[0] for part in inwards(module) if (names := self._names.names_so_far(part))),
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
        if name is None and not self._names.is_complete:
            name = self._name_below_caller(module, within)
        return name

    def _name_below_caller(self, module: nn.Module, within: int) -> str | None:
        ref = self._called.get(within)
        caller = None if ref is None else ref()
        if caller is None:
            return None
        name = self._known_name(caller)  # the caller may have another name since it was called
        return self._name_below(
            caller, self._locator.text_of(within) if name is None else name, module
        )

    def _name_below(
        self, outer: nn.Module, outer_name: str | None, module: nn.Module
    ) -> str | None:
        """The name of a module from its path below another module, until a walk reaches it."""
        relative = None if outer_name is None else name_below(outer, module)
        if outer_name is None or relative is None:
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
            if name is None and self._names.names_so_far(root):
                name = self._name_of_added(module, root)
            return self._name_of_new_root(module, root) if name is None else name

    def _name_inside(self, module: nn.Module, within: int) -> str:
        """The name of a module that another module calls and does not contain."""
        is_complete = self._names.is_complete
        name = self._foreign.inside(module, within, self._locator.text_of(within))
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
        is_model = self._search(root)
        if is_model:
            self._set_root(root)
        prefix = "" if is_model else self._foreign.prefix(root)
        is_complete = self._names.is_complete
        self._names.begin_root(root, prefix=prefix)
        if not is_complete:  # an older root may contain the new one
            self._names.set_provisional(root, prefix)
        elif root is not module:  # else the first calls of its modules continue the walk
            self._names.continue_walks()
        name = self._known_name(module)
        if name is None:
            name = self._name_below(root, prefix, module)
        return f"<{type(module).__name__}>" if name is None else name

    # -- the root ----------------------------------------------------------------------------------

    def _search(self, model: nn.Module) -> bool:
        """Begin to search a new model. Returns whether it is the root now."""
        with_parts = self._is_first_step and any(
            self._may_be_dropped(root) for _, root in self._names.roots()
        )
        if not with_parts and not self._root_is_free:
            return False
        search = ModelSearch(model)
        self._visit(search, search.last(_MOST_FROM_END))
        self._visit(search, search.next(_MOST_AT_FIRST))
        if not search.is_over:
            self._searches.append(search)
        return search.is_trained and self._root_is_free

    def _continue_search(self) -> None:
        """Visit further modules of the model that has waited longest. If a trained parameter or the
        root is inside, the model is the root from now on."""
        with self._lock:
            search = self._searches.popleft() if self._searches else None
            model = None if search is None else search.model
            is_root = model is not None and self._names.prefix_of(model) is not None
            if search is None or model is None or not is_root:
                return
            self._visit(search, search.next(_MOST_LATER))
            if search.is_trained and self._root_is_free:
                self._drop(model)
                self._set_root(model)
                self._names.begin_root(model, prefix="")
            if not search.is_over and (self._root_is_free or self._is_first_step):
                self._searches.appendleft(search)

    def _visit(self, search: ModelSearch, parts: Iterable[nn.Module]) -> None:
        """Visit some modules of a model. In the first step, forget the names of those that are
        roots: they get names below the model.

        A job may call a part before it builds the model. In later steps a model around the root may
        be a wrapper for evaluation on a single rank.
        """
        model, is_first_step = search.model, self._is_first_step
        for part in parts:
            if is_first_step and part is not model and self._may_be_dropped(part):
                if self._root is not None and self._root() is part:
                    self._root, search.is_trained = None, True
                self._drop(part)

    @property
    def _is_first_step(self) -> bool:
        return not self._locator.counter.step

    @property
    def _root_is_free(self) -> bool:
        """Whether a new model may have the names without a prefix: there is no root, or it was
        freed."""
        if self._root_is_given:
            return False
        return self._root is None or self._root() is None

    def _may_be_dropped(self, module: nn.Module) -> bool:
        """Whether a module is a root that the user did not pass."""
        prefix = self._names.prefix_of(module)
        return prefix is not None and (bool(prefix) or not self._root_is_given)

    def _drop(self, module: nn.Module) -> None:
        """Forget the name of a module, and of everything below it if it is a root."""
        if self._names.prefix_of(module) is None:
            self._forget(id(module))
            return
        # Which modules below it were called is not known without a walk. So all modules are named
        # again at their next call; those of other roots get the same names.
        self._forget_all()
        self._names.drop_root(module)


def _is_graph(module: nn.Module) -> bool:
    """Whether a module is a graph that a compiler made: it has no parameters. A traced model has
    parameters."""
    return isinstance(module, torch.fx.GraphModule) and not any(
        param is not None
        for _, part in ModuleWalk(module).next(_MOST_IN_GRAPH)
        for param in part._parameters.values()
    )


# -- the search through a new model ----------------------------------------------------------------
# It finds out whether the model is trained, and which modules are inside it. A search over 10,000
# modules takes 4 ms, and the first call of a module must not wait for it. So a search visits some
# modules at the first call of the model, and some at each later first call.


class ModelSearch:
    """Visits all modules of a model. Refers to the model weakly."""

    __slots__ = ("_model", "_walk", "is_trained")

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._walk = ModuleWalk(model)
        self.is_trained = False  # whether a visited module has a parameter that requires a gradient

    @property
    def model(self) -> nn.Module | None:
        return self._model()

    @property
    def is_over(self) -> bool:
        return self._walk.is_over

    def last(self, most: int) -> Iterator[nn.Module]:
        """Visit the last modules of the model, the last one first. A model with many frozen modules
        often has a trained head."""
        model = self._model()
        pending = [model] if model is not None else []
        while pending and most > 0:
            module = pending.pop()
            most -= 1
            yield self._visited(module)
            children = list(islice(reversed(children_of(module).values()), most))
            pending += [child for child in reversed(children) if child is not None]

    def next(self, most: int) -> Iterator[nn.Module]:
        """Visit at most this many further modules. Exhaust the iterator before the next part."""
        for _, module in self._walk.next(most):
            yield self._visited(module)

    def _visited(self, module: nn.Module) -> nn.Module:
        if not self.is_trained and module._parameters:
            self.is_trained = _has_trained_parameter(module)
        return module


def _has_trained_parameter(module: nn.Module) -> bool:
    params = islice(module._parameters.values(), _MOST_PARAMS)
    return any(param is not None and param.requires_grad for param in params)
