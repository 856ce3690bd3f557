"""Finds the autograd node that raised an exception, from the exception itself. Works after the
engine has returned.

The frames of the traceback hold the arguments of the Python code: the node of a custom function
(`ctx`), or the tensors that backward was called on. An error in a kernel of torch leaves no such
frame. Then the progress of the engine tells the node.
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
    """The node, and whether it is certain; None for an exception that passed through no
    backward."""
    node, outputs = None, None
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
            node = nodes[-1] if nodes else node
        traceback = traceback.tb_next
    if node is None and outputs is not None:
        return frontier(outputs), False
    return node, node is not None


def frontier(outputs: Iterable[Any]) -> Any:
    """The node that the engine has reached. It runs the highest number first and frees the saved
    tensors of a node after it has run.

    So the highest node that still holds its saved tensors has raised, or the next lower node has.
    """
    pending = [node for node in walk(roots_of(outputs)).nodes[:_MOST_NODES] if holds_saved(node)]
    return max(pending, key=lambda node: int(node._sequence_nr()), default=None)
