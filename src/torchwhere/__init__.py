"""Records where a PyTorch job is, on every rank: step, pass, module, line, collective and compiled
graph.

Example:
    import torchwhere

    with torchwhere.watch(model, out="run/"):
        train(model)

`import torchwhere` changes nothing and does not import torch: each public name is imported when it
is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchwhere.core.device_place import DevicePlace
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.place import Certainty, Place
from torchwhere.core.results import Renderer, set_renderer
from torchwhere.core.version import __version__

if TYPE_CHECKING:
    from torchwhere.api.annotate import note, phase, step, where
    from torchwhere.api.autograd import backward_graph, forward_line, forward_lines
    from torchwhere.api.comms import comms
    from torchwhere.api.describe import describe
    from torchwhere.api.export import export
    from torchwhere.api.graphs import graphs
    from torchwhere.api.modules import ModuleCall, on_module
    from torchwhere.api.names import names
    from torchwhere.api.phases import phases
    from torchwhere.api.printing import print_rank, rank_log
    from torchwhere.api.rank_logging import PlaceFilter, RankHandler
    from torchwhere.api.run import Run, doctor, read_run
    from torchwhere.api.watch import start, stop, watch
    from torchwhere.core.events import Event
    from torchwhere.core.model_layout import Layout
    from torchwhere.diagnose.doctor.verdict import Verdict
    from torchwhere.model.read_layout import layout

__all__ = [
    "Certainty",
    "DevicePlace",
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


def _load_renderer() -> Renderer:
    from torchwhere.render import reprs

    return reprs


set_renderer(_load_renderer)

_HOME = {
    "Event": "torchwhere.core.events",
    "Layout": "torchwhere.core.model_layout",
    "ModuleCall": "torchwhere.api.modules",
    "PlaceFilter": "torchwhere.api.rank_logging",
    "RankHandler": "torchwhere.api.rank_logging",
    "Run": "torchwhere.api.run",
    "Verdict": "torchwhere.diagnose.doctor.verdict",
    "backward_graph": "torchwhere.api.autograd",
    "comms": "torchwhere.api.comms",
    "describe": "torchwhere.api.describe",
    "doctor": "torchwhere.api.run",
    "export": "torchwhere.api.export",
    "forward_line": "torchwhere.api.autograd",
    "forward_lines": "torchwhere.api.autograd",
    "graphs": "torchwhere.api.graphs",
    "layout": "torchwhere.model.read_layout",
    "names": "torchwhere.api.names",
    "note": "torchwhere.api.annotate",
    "on_module": "torchwhere.api.modules",
    "phase": "torchwhere.api.annotate",
    "phases": "torchwhere.api.phases",
    "print_rank": "torchwhere.api.printing",
    "rank_log": "torchwhere.api.printing",
    "read_run": "torchwhere.api.run",
    "start": "torchwhere.api.watch",
    "step": "torchwhere.api.annotate",
    "stop": "torchwhere.api.watch",
    "watch": "torchwhere.api.watch",
    "where": "torchwhere.api.annotate",
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
