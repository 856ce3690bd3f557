"""Runs in every Python process of a test run: `processes.py` copies this file to a folder on
PYTHONPATH as `sitecustomize.py`.

It waits until the process has imported torch. Then it starts a watch, or replaces the originals by
the drop-ins, depending on the variable TORCHWHERE_UPSTREAM. In a process that never imports torch
it does nothing. With the variable TORCHWHERE_UPSTREAM_FORK, `multiprocessing` forks where a test
asks for spawned processes. This file imports nothing of the repository at the top, because it must
work as a copy.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

VARIABLE, FORK_VARIABLE = "TORCHWHERE_UPSTREAM", "TORCHWHERE_UPSTREAM_FORK"
WATCHED, DROP_INS = "watched", "drop-ins"

# From original modules of torch to their drop-ins.
SWAPPED = {
    "torch._functorch._aot_autograd.logging_utils": "torchwhere.drop_in.aot_logging",
    "torch.distributed._tools.mod_tracker": "torchwhere.drop_in.mod_tracker",
    "torch.utils.module_tracker": "torchwhere.drop_in.mod_tracker",
    "torch.distributed.fsdp._debug_utils": "torchwhere.drop_in.fsdp_debug",
    "torch.distributed.tensor.debug._comm_mode": "torchwhere.drop_in.comm_mode",
}


class AfterTorch(importlib.abc.MetaPathFinder):
    """Calls a function once, when `import torch` has run."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: Any) -> None:
        run, then = loader.exec_module, self._then

        def exec_module(module: ModuleType) -> None:
            run(module)
            then()

        loader.exec_module = exec_module


def watch() -> None:
    """Start a watch for the rest of the process."""
    torchwhere: Any = importlib.import_module("torchwhere")
    torchwhere.start()
    if FORK_VARIABLE in os.environ:  # a forked process is not watched by itself
        os.register_at_fork(after_in_child=torchwhere.start)


def fork_instead_of_spawn() -> None:
    """Let `multiprocessing` fork where a test asks for spawned processes."""
    contexts: Any = importlib.import_module("multiprocessing.context")
    contexts._concrete_contexts["spawn"] = contexts._concrete_contexts["fork"]


def swap() -> None:
    """Replace every original by its drop-in: in `sys.modules`, in its package, and in all modules
    of torch that imported a name from it."""
    replaced: dict[int, object] = {}
    for original_name, drop_in_name in SWAPPED.items():
        original, drop_in = (
            importlib.import_module(original_name),
            importlib.import_module(drop_in_name),
        )
        for name, value in list(vars(original).items()):
            is_own = getattr(value, "__module__", "").startswith(original_name.rpartition(".")[0])
            if (
                is_own
                and (inspect.isclass(value) or inspect.isfunction(value))
                and hasattr(drop_in, name)
            ):
                replaced[id(value)] = getattr(drop_in, name)
        parent, _, last = original_name.rpartition(".")
        setattr(sys.modules[parent], last, drop_in)
        sys.modules[original_name] = drop_in
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").partition(".")[0] == "torch":
            for name, value in list(vars(module).items()):
                if id(value) in replaced:
                    setattr(module, name, replaced[id(value)])


def run_other_sitecustomize(folder: str) -> None:
    """Run the `sitecustomize` that Python would have found without ours."""
    others = [
        entry for entry in sys.path if os.path.realpath(entry or ".") != os.path.realpath(folder)
    ]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def install(mode: str) -> None:
    """Start a watch, or use the drop-ins, as soon as the process has imported torch."""
    if FORK_VARIABLE in os.environ:
        fork_instead_of_spawn()
    start = {WATCHED: watch, DROP_INS: swap}.get(mode)
    if start is not None:
        sys.meta_path.insert(0, AfterTorch(start))


if __name__ == "sitecustomize":
    run_other_sitecustomize(os.path.dirname(__file__))
    install(os.environ[VARIABLE])
