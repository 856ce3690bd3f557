"""torchwhere: where is it? Step, pass, module, line, collective and compiled graph of a PyTorch job, on every rank.

    import torchwhere
    with torchwhere.watch(model, out="run/"):
        train(model)

Importing this imports neither torch nor anything else that costs time, and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchwhere.errors import TorchwhereError
from torchwhere.place import Certainty, Place
from torchwhere.version import __version__

if TYPE_CHECKING:
    from torchwhere.blackbox.run import Run, read_run
    from torchwhere.events import Event
    from torchwhere.marks import note, phase, step, where
    from torchwhere.process import start, stop, watch

__all__ = [
    "Certainty",
    "Event",
    "Place",
    "Run",
    "TorchwhereError",
    "__version__",
    "note",
    "phase",
    "read_run",
    "start",
    "step",
    "stop",
    "watch",
    "where",
]

_HOME = {
    "Event": "torchwhere.events",
    "Run": "torchwhere.blackbox.run",
    "note": "torchwhere.marks",
    "phase": "torchwhere.marks",
    "read_run": "torchwhere.blackbox.run",
    "start": "torchwhere.process",
    "step": "torchwhere.marks",
    "stop": "torchwhere.process",
    "watch": "torchwhere.process",
    "where": "torchwhere.marks",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'torchwhere' has no attribute {name!r}")
    import importlib

    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise TorchwhereError(
            f"torchwhere.{name} needs PyTorch, which is not installed here: pip install torch. "
            "Reading what was recorded (torchwhere events, comms) works without it."
        ) from None
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return __all__
