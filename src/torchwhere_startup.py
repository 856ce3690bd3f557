"""Watches the processes of a job that become ranks, if `TORCHWHERE_OUT` names a folder.

Python runs this file when it starts: `torchwhere_startup.pth` imports it, or a `sitecustomize.py`
where no such file is installed. It is outside the package because `import torchwhere` takes longer
than a process without torch may pay. It imports nothing that Python has not imported already, and
it waits until the process has imported torch. `torchwhere.startup` then decides whether the process
is a rank.

The watch begins after `import torch` if a launcher has set a rank, otherwise in
`init_process_group`. A process that a rank has started inherits the variables of that rank. It is
not a rank until it makes a process group itself.
"""

# Not `from __future__ import annotations`: that imports a file.
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

OUT = "TORCHWHERE_OUT"
# The rank variables of the first process that has them, for the processes that it starts.
_OF_PARENT = "TORCHWHERE_RANK_VARIABLES"
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
# Programs that start ranks. Under Slurm or in a pod they have rank variables and are not ranks.
LAUNCHERS = frozenset(
    {
        "accelerate",
        "accelerate-launch",
        "accelerate.commands.accelerate_cli",
        "accelerate.commands.launch",
        "deepspeed",
        "deepspeed.launcher.launch",
        "deepspeed.launcher.runner",
        "deepspeed.pt",
        "ds",
        "fabric",
        "torch.distributed.launch",
        "torch.distributed.run",
        "torchrun",
    }
)


def install() -> None:
    """Wait for the import of torch, if `TORCHWHERE_OUT` is set. It is off if it is empty."""
    out = os.environ.get(OUT)
    program = _program()
    # `torchwhere run` begins a watch by itself, and the other commands are not part of a job
    if not out or program.partition(".")[0] == "torchwhere":
        return
    try:  # noqa: SIM105 - contextlib takes time
        # processes with another working directory write to the same folder
        os.environ[OUT] = os.path.abspath(out)
    except OSError:  # the working directory is gone
        pass
    TorchFinder(is_launcher=program in LAUNCHERS).install()


def _program() -> str:
    """The name of the script, or with `-m` of the module, that this process runs."""
    arguments: list[str] = getattr(sys, "argv", None) or [""]  # a program may embed Python
    if arguments[0] == "-m":
        return sys.orig_argv[len(sys.orig_argv) - len(arguments)].removeprefix("-m")
    return os.path.basename(arguments[0])


def mark_children() -> None:
    """Tell the processes that this one starts which rank variables they inherit from it."""
    if variables := _rank_variables():
        os.environ[_OF_PARENT] = variables


def _rank_variables() -> str:
    """The rank variables of this process as one text; empty without any."""
    values = [f"{name}={os.environ[name]}" for name in RANK_VARIABLES if os.environ.get(name)]
    return " ".join(values)


class TorchFinder:
    """Finds torch through the other finders, and calls back after torch is loaded.

    A search alone (`importlib.util.find_spec`) loads nothing: the finder stays until torch is
    loaded.
    """

    def __init__(self, *, is_launcher: bool) -> None:
        self._is_launcher = is_launcher
        self._of_parent = os.environ.get(_OF_PARENT)

    def install(self) -> None:
        if not self._is_launcher:
            mark_children()
        if "torch" in sys.modules:
            self._torch_is_loaded()
        else:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def find_spec(
        self, name: str, path: "Any" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Part of the import protocol."""
        if name != "torch":
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(name, path, target) if find_spec else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    self._wrap(spec.loader)
                return spec
        return None

    def _wrap(self, loader: "Any") -> None:
        original = loader.exec_module

        def exec_module(module: "ModuleType") -> None:
            del loader.exec_module
            original(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)  # type: ignore[arg-type]
                self._torch_is_loaded()

        loader.exec_module = exec_module

    def _torch_is_loaded(self) -> None:
        variables = _rank_variables()
        has_rank = bool(variables) and variables != self._of_parent
        try:
            from torchwhere.startup.ranks import torch_is_loaded

            torch_is_loaded(is_rank=has_rank and not self._is_launcher)
        except Exception as error:
            sys.stderr.write(
                f"torchwhere: cannot watch this process ({type(error).__name__}: {error}); the job"
                " continues without a watch\n"
            )


install()
