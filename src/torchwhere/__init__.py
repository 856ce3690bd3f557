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
    from torchwhere.autograd import backward_graph, forward_line, forward_lines
    from torchwhere.callbacks import ModuleCall, on_module
    from torchwhere.compiled import graphs
    from torchwhere.diagnose.doctor.verdict import Verdict
    from torchwhere.events import Event
    from torchwhere.exporting import export
    from torchwhere.inspect.describe import describe
    from torchwhere.inspect.naming import names
    from torchwhere.inspect.sharding import layout
    from torchwhere.live import comms
    from torchwhere.marks import note, phase, step, where
    from torchwhere.place_logging import PlaceFilter, RankHandler
    from torchwhere.process import start, stop, watch
    from torchwhere.ranks import print_rank, rank_log
    from torchwhere.recordings import Run, doctor, read_run
    from torchwhere.sharding import Layout
    from torchwhere.timing import phases

__all__ = [
    "Certainty",
    "Event",
    "Layout",
    "ModuleCall",
    "Place",
    "PlaceFilter",
    "RankHandler",
    "Run",
    "TorchwhereError",
    "Verdict",
    "__version__",
    "backward_graph",
    "comms",
    "describe",
    "doctor",
    "export",
    "forward_line",
    "forward_lines",
    "graphs",
    "layout",
    "names",
    "note",
    "on_module",
    "phase",
    "phases",
    "print_rank",
    "rank_log",
    "read_run",
    "start",
    "step",
    "stop",
    "watch",
    "where",
]

_HOME = {
    "Event": "torchwhere.events",
    "Layout": "torchwhere.sharding",
    "ModuleCall": "torchwhere.callbacks",
    "PlaceFilter": "torchwhere.place_logging",
    "RankHandler": "torchwhere.place_logging",
    "Run": "torchwhere.recordings",
    "Verdict": "torchwhere.diagnose.doctor.verdict",
    "backward_graph": "torchwhere.autograd",
    "comms": "torchwhere.live",
    "describe": "torchwhere.inspect.describe",
    "doctor": "torchwhere.recordings",
    "export": "torchwhere.exporting",
    "forward_line": "torchwhere.autograd",
    "forward_lines": "torchwhere.autograd",
    "graphs": "torchwhere.compiled",
    "layout": "torchwhere.inspect.sharding",
    "names": "torchwhere.inspect.naming",
    "note": "torchwhere.marks",
    "on_module": "torchwhere.callbacks",
    "phase": "torchwhere.marks",
    "phases": "torchwhere.timing",
    "print_rank": "torchwhere.ranks",
    "rank_log": "torchwhere.ranks",
    "read_run": "torchwhere.recordings",
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
