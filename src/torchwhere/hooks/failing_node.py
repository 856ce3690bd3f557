"""Which autograd node raised an exception: found from the exception itself, also after the engine
has gone.

The frames of its traceback hold what the Python code in them was given: the node of a custom
function (`ctx`), or what backward was called on. Errors of torch's own kernels leave no such frame;
then it is told from how far the engine got.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torchwhere.model.graph_walk import roots_of, walk
from torchwhere.model.saved_tensors import holds_saved

_ENGINE = "_engine_run_backward"
_MOST_NODES = 100_000


def node_that_raised(error: BaseException) -> tuple[Any, bool]:
    """The node, and whether that is certain; None for an exception that came through no
    backward."""
    found, outputs = None, None
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == _ENGINE:
            outputs = frame.f_locals.get("t_outputs", outputs)
        elif outputs is not None:
            nodes = [
                value
                for value in list(frame.f_locals.values())
                if isinstance(value, torch.autograd.graph.Node)
            ]
            found = nodes[-1] if nodes else found
        traceback = traceback.tb_next
    if found is None and outputs is not None:
        return frontier(outputs), False
    return found, found is not None


def frontier(outputs: Iterable[Any]) -> Any:
    """How far the engine got: it runs the highest number first and frees what a node saved once it
    has run.

    So the highest node that still holds what it saved is the one that raised, or the next one below
    it.
    """
    left = [node for node in walk(roots_of(outputs)).nodes[:_MOST_NODES] if holds_saved(node)]
    return max(left, key=lambda node: int(node._sequence_nr()), default=None)
