"""Waits for the import of torch in every Python process, if `TORCHWHERE_OUT` names a folder."""

# `torchwhere_startup.pth` imports this file when Python starts, or a `sitecustomize.py` where no
# such file is installed. It is outside the package, and short, because every process of a job pays
# for it: `import torchwhere` takes 25 ms, and `from __future__ import annotations` reads a file.
# Once torch is loaded, `torchwhere.startup.ranks` decides whether the process is a rank.
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

OUT = "TORCHWHERE_OUT"
# The variables of a process with a rank, for the processes that it starts: these inherit its rank.
OF_PARENT = "TORCHWHERE_RANK_OF_PARENT"
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def rank_variables() -> str:
    """The variables that give this process a rank, as one text; empty without any."""
    get = os.environ.get
    values = [get(name, "") for name in RANK_VARIABLES]
    # the agent of torchrun in a pod has the RANK of its first worker, and no LOCAL_RANK
    return " ".join([*values, get("LOCAL_RANK", "")]) if any(values) else ""


def mark_children() -> None:
    """Record in the environment which rank the processes that this one starts inherit from it."""
    variables = rank_variables()
    if variables:
        os.environ[OF_PARENT] = variables


def watch_forks() -> None:
    """Prepare a process that `torchwhere run` watches: those that it forks may become ranks."""
    from torchwhere.startup import rank_watch

    mark_children()
    rank_watch.watch_forks()


class TorchFinder:
    """Finds torch through the other finders, and calls back after torch is loaded."""

    def __init__(self) -> None:
        self._of_parent = os.environ.get(OF_PARENT)
        mark_children()

    def find_spec(self, name: str, *args: "Any") -> "ModuleSpec | None":
        """Part of the import protocol."""
        if name != "torch":
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            find_spec = getattr(finder, "find_spec", None)  # an old finder may have none
            spec: ModuleSpec | None = find_spec(name, *args) if find_spec else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    self._wrap(spec.loader)
                return spec
        return None

    def _wrap(self, loader: "Any") -> None:
        # A search alone (`importlib.util.find_spec`) loads nothing: the finder stays until then.
        original = loader.exec_module

        def exec_module(module: "Any") -> None:
            del loader.exec_module
            original(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)  # type: ignore[arg-type]
                self._torch_is_loaded()

        loader.exec_module = exec_module

    def _torch_is_loaded(self) -> None:
        try:
            from torchwhere.startup.ranks import torch_is_loaded

            variables = rank_variables()
            torch_is_loaded(has_own_rank=variables not in ("", self._of_parent))
        except Exception as error:
            report_failure(error)


def report_failure(error: Exception) -> None:
    """Say why this process is not watched."""
    sys.stderr.write(
        f"torchwhere: cannot watch this process ({type(error).__name__}: {error}); the job"
        " continues without a watch\n"
    )


def install(out: str) -> None:
    """Wait for the import of torch, in this process and in those that it starts."""
    try:  # noqa: SIM105 - contextlib takes time
        # processes with another working directory write to the same folder
        os.environ[OUT] = os.path.abspath(out)
    except OSError:  # the working directory is gone
        pass
    sys.meta_path.insert(0, TorchFinder())  # type: ignore[arg-type]


if os.environ.get(OUT):
    install(os.environ[OUT])
