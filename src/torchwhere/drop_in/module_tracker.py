"""Drop-in for `ModuleTracker` of `torch.utils.module_tracker`; `mod_tracker.py` builds on it.

Import it from `torchwhere.drop_in.mod_tracker`.
"""

from __future__ import annotations

import threading
import weakref
from typing import Self

from torch import nn

from torchwhere.api import watch
from torchwhere.drop_in.tracker_hooks import TrackerHooks, running_backward
from torchwhere.hooks import _torch
from torchwhere.model.module_names import NameTable
from torchwhere.model.module_walk import check_module, child_name, walk
from torchwhere.recorder.session import Session

_GLOBAL = "Global"
_MAX_CACHED = 1 << 12


def original_name(name: str, root_class: str) -> str:
    """Return the name that the original gives a module, from the name that the watch uses:
    `MLPModule.net1` for `net1`. A module outside the model (a loss, a module in a plain list) has
    the name of its class there: `Loss` for `<Loss#2>`."""
    _, mark, own = name.rpartition("<")
    if not mark:
        return child_name(root_class, name) if name else root_class
    cls, _, rest = own.partition(">")
    return cls.partition("#")[0] + rest


class ModuleTracker(TrackerHooks):
    """Tracks which modules are running: `parents` has their names and "Global", `is_bw` says
    whether a backward runs.

    Example:
        >>> with ModuleTracker() as tracker:
        ...     model(x).sum().backward()  # inside, for example in a hook: tracker.parents
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._session: Session | None = None
        self._names = NameTable()
        # names that `_get_mod_name` gave
        self._given: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._root_class = ""
        # from the names that the watch uses to those of the original
        self._fqns: dict[frozenset[str], frozenset[str]] = {}
        # `.names`: the running modules while a backward hook of the user runs
        self._in_hook = threading.local()

    @property
    def parents(self) -> set[str]:
        """The names of the modules that run on the calling thread, and "Global"."""
        names: frozenset[str] | None = getattr(self._in_hook, "names", None)
        return {_GLOBAL, *self._entered} | (self._running() if names is None else names)

    @property
    def is_bw(self) -> bool:
        """Whether the calling thread is in a backward."""
        return running_backward() != -1

    def get_known_fqn(self, mod: nn.Module) -> str | None:
        """Return the name of a module, or None if neither it nor its model was called yet.

        Raises:
            TypeError: If `mod` is not a module.
        """
        check_module(mod, "get_known_fqn(mod)")
        if self._session is not None:
            name = self._session.modules.name_of(mod)
        else:
            name = next(iter(self._names.known_names(mod)), None)
        return self._given.get(mod) if name is None else self._fqn(name)

    def _get_mod_name(self, mod: nn.Module) -> str:
        """Return the name of any module. An unknown module becomes the root of a model, with the
        name of its class.

        torch's DebugMode and CommDebugMode call this.
        """
        name = self.get_known_fqn(mod)
        if name is None:
            name = type(mod).__name__
            self._given.update((part, fqn) for fqn, part in walk(mod, prefix=name))
        return name

    @_torch.unseen
    def _running(self) -> frozenset[str]:
        session = self._session
        if session is None:
            return frozenset()
        try:
            names = session.listeners.call_chains.names_here()
            if names not in self._fqns:
                if len(self._fqns) >= _MAX_CACHED:
                    self._fqns = {}
                self._fqns[names] = frozenset(map(self._fqn, names))
            return self._fqns[names]
        except Exception as error:
            session.listeners.errors(error)
            return frozenset()

    def _fqn(self, name: str) -> str:
        """Return the name that begins with the class of the model, from the watch's name, which is
        relative to the model."""
        if self._session is not None:
            self._root_class = self._session.modules.root_class
        return original_name(name, self._root_class)

    def __enter__(self) -> Self:
        """Begin to track modules."""
        watch.start()
        self._depth += 1
        self._session = watch.current()
        return self

    def __exit__(self, *_error: object) -> None:
        self._remove_handles()
        if self._depth == 0:  # a subclass with hooks of its own, which never called `__enter__`
            return
        self._depth -= 1
        if self._depth == 0 and self._session is not None:
            self._names, self._session = self._session.modules.names, None
            self._fqns = {}
        watch.stop()
