"""The modules that ran under a `CommDebugMode`: its `advanced_module_tracker`, with the dicts that
the original has.

A listener of the module hook. At the first call of a module it stores the module's depth, type,
parameters and how they are sharded. Names begin with the class of the root, as in the original;
wrappers (DDP, checkpointing ...) do not appear in them. Nothing is registered on modules.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from torchwhere.blackbox.file_format import MODULE_SHIFT
from torchwhere.core.place import Pass
from torchwhere.drop_in.module_tracker import original_name
from torchwhere.drop_in.op_log import OpLog
from torchwhere.drop_in.tracker_hooks import running_backward
from torchwhere.hooks.listeners import Listener, ModuleEntry
from torchwhere.hooks.threads import LOG_MASK, Track, pass_of
from torchwhere.recorder.session import Session

GLOBAL = "Global"


class CommModeModuleTracker(Listener):
    """Which modules ran, inside which modules, with which parameters. The keys of all dicts are
    names such as `MLPModule.net1`."""

    def __init__(self) -> None:
        self.module_helper_dict: dict[str, dict[str, Any]] = {}
        self.module_parameters_dict: dict[str, dict[str, Any]] = {}
        self.module_parents_dict: dict[str, set[str]] = {}
        self.parent_dict: dict[str, list[str]] = {}
        self.sharding_dict: dict[str, Any] = {}
        self._session: Session | None = None
        self._ops: OpLog | None = None
        self._fqns: dict[str, str] = {}  # by the names that the watch uses
        self._entered: set[int] = set()  # ids of modules
        self._thread: Track | None = None

    # -- the block ---------------------------------------------------------------------------------

    def begin(self, session: Session, ops: OpLog | None) -> None:
        """Forget the last block, and listen to module calls."""
        # cleared and not replaced: the user may hold these objects
        for table in (
            self.module_helper_dict,
            self.module_parameters_dict,
            self.module_parents_dict,
            self.parent_dict,
            self.sharding_dict,
            self._fqns,
            self._entered,
        ):
            table.clear()
        self.module_helper_dict[GLOBAL] = {"depth": 0}
        self.module_parents_dict[GLOBAL] = set()
        self._session, self._ops = session, ops
        self._thread = session.recorder.locator.threads.here()
        self.is_active = True
        session.listeners.add(self)

    def end(self) -> None:
        """Stop listening."""
        session, self._session = self._session, None
        if session is not None:
            self.is_active = False
            session.listeners.remove(self)
        self._ops = self._thread = None

    # -- a listener of the module hook -------------------------------------------------------------

    def entered(self, entry: ModuleEntry) -> None:
        """Store a module at its first call. The entry before it in the log of the thread is the
        call around it."""
        track = entry.track
        word = track.top
        if (
            word >> MODULE_SHIFT in self._entered
            or track is not self._thread
            or pass_of(word) == Pass.RECOMPUTE
        ):
            return
        self._entered.add(word >> MODULE_SHIFT)
        around = track.marks[(track.count - 2) & LOG_MASK] if track.count > 1 else 0
        self._store(entry.own, self._fqn_of(word), self._fqn_of(around))

    def _store(self, module: nn.Module, name: str, parent: str) -> None:
        self._place(name, parent)
        helper = self.module_helper_dict[name]
        helper["module_type"] = str(type(module)).replace("<", "").replace(">", "")
        if self._ops is not None:
            self._ops.is_paused = True  # `.data` runs an op that is not the program's
        try:
            for key, param in module.named_parameters(recurse=False):
                data = param.data
                self.module_parameters_dict.setdefault(name, {})[key] = data
                if isinstance(data, DTensor):
                    self.sharding_dict[f"{name}.{key}"] = data.placements
                    helper.setdefault("parameters", {})[key] = str(data.placements)
        finally:
            if self._ops is not None:
                self._ops.is_paused = False

    def _place(self, name: str, parent: str) -> None:
        """Put a module below its parent, unless it is in the tree already."""
        if name in self.module_parents_dict:
            return
        parent = parent if parent in self.module_parents_dict else GLOBAL
        self.module_parents_dict[name] = {GLOBAL, *self.module_parents_dict[parent], name}
        self.module_helper_dict[name] = {
            "module_type": "",
            "depth": len(self.module_parents_dict[name]) - 1,
        }
        self.parent_dict.setdefault(parent, []).append(name)

    # -- names -------------------------------------------------------------------------------------

    def module_here(self) -> int:
        """Return the id of the module that the calling thread is in; 0 after the block."""
        if self._session is None:
            return 0
        locator = self._session.recorder.locator
        return locator.place_ids(locator.threads.here()).module

    def _fqn_of(self, word: int) -> str:
        session = self._session
        text = (
            session.recorder.locator.text_of(word >> MODULE_SHIFT) if session is not None else None
        )
        return GLOBAL if text is None else self.fqn(text)

    def fqn(self, name: str) -> str:
        """Return the name that the original gives a module: `MLPModule.net1` for `net1`, `Loss` for
        `<Loss>`."""
        fqn = self._fqns.get(name)
        if fqn is None:
            root = self._session.modules.root_class if self._session is not None else ""
            fqn = self._fqns[name] = original_name(name, root)
        return fqn

    def listed(self, name: str) -> str:
        """Return the name like `fqn`, and put the module into the tree: a backward runs nodes of
        modules that ran before the block."""
        fqn = self.fqn(name)
        self._place(fqn, self.nearest(name))
        return fqn

    def nearest(self, name: str) -> str:
        """Return the module itself if it ran, otherwise the closest module around it that ran."""
        fqn = self.fqn(name)
        while fqn and fqn not in self.module_parents_dict:
            fqn = fqn.rpartition(".")[0]
        return fqn or GLOBAL

    # -- further names of the original -------------------------------------------------------------

    @property
    def name(self) -> str:
        """The module that the calling thread is in, in forward or backward; `Global` outside any
        module."""
        if self._session is None:
            return GLOBAL if self.module_helper_dict else ""
        return self._fqn_of(self.module_here() << MODULE_SHIFT)

    @property
    def parents(self) -> set[str]:
        """The modules that the calling thread is in, and `Global`."""
        name = self.name
        return {GLOBAL, *self.module_parents_dict.get(name, ())}

    @property
    def is_bw(self) -> bool:
        """Whether the calling thread is in a backward."""
        return running_backward() != -1

    @property
    def activation_checkpointing(self) -> bool:
        """Whether the calling thread recomputes a forward."""
        session = self._session
        return (
            session is not None
            and pass_of(session.recorder.locator.threads.here().top) == Pass.RECOMPUTE
        )

    @property
    def module_depth_dict(self) -> dict[str, int]:
        """The depth of each module, as older versions have it."""
        return {name: helper["depth"] for name, helper in self.module_helper_dict.items()}

    def print_paramater_info(self) -> None:
        """Print the parameters of each module."""
        sys.stdout.write(f"{self.module_parameters_dict}\n")

    def print_sharding_info(self) -> None:
        """Print the placements of each DTensor parameter."""
        for key, value in self.sharding_dict.items():
            sys.stdout.write(f"{key}: {value}\n")
