"""Calls of modules as `ModTracker` follows them into backward, for the user's backward hooks."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from torchwhere.hooks import _torch


class TrackedCall:
    """One call of a module, and how far the running backward is with it."""

    __slots__ = (
        "expected",
        "gradients",
        "has_outputs",
        "is_open",
        "module",
        "names",
        "nodes",
        "number",
        "task",
    )

    def __init__(
        self, module: nn.Module, names: frozenset[str], number: int, inputs: list[torch.Tensor]
    ) -> None:
        self.module = weakref.ref(module)
        self.names = names
        self.number = number
        # of the inputs that need a gradient
        self.nodes = [tensor.grad_fn or get_gradient_edge(tensor).node for tensor in inputs]
        self.has_outputs = False
        self.task: int | None = None  # the backward that reached it last
        self.is_open = False  # its post_bw_hook has yet to run
        self.gradients: list[torch.Tensor | None] = []
        self.expected = 0  # number of gradients of inputs that have yet to arrive

    def begin(self, task: int) -> None:
        """Note that the backward `task` has reached this call."""
        self.task, self.is_open = task, True
        self.gradients = [None] * len(self.nodes)
        self.expected = sum(map(_will_run, self.nodes))

    def end(self) -> tuple[Any, ...]:
        """Close the call. Returns the arguments for the post_bw_hook."""
        gradients, self.gradients, self.is_open = self.gradients, [], False
        return (gradients,) if self.nodes else ()


def _will_run(node: Any) -> bool:
    """Whether the running backward runs a node. torch does not answer for a leaf in
    `autograd.grad`; then the answer is True."""
    will_run = _torch.private("will_run")
    try:
        return will_run is None or bool(will_run(node))
    except RuntimeError:
        return True


def needing_gradients(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested structure that need a gradient, in order. Also looks into
    dataclasses, which pytrees do not open."""
    tensors: list[torch.Tensor] = []
    pending, visited = [value], set()
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            tensors += [item] if item.requires_grad else []
        elif type(item) in (tuple, list):
            pending += reversed(item)
        elif type(item) is dict:
            pending += reversed(item.values())
        elif dataclasses.is_dataclass(item):
            # a dataclass may contain itself
            if id(item) not in visited and not isinstance(item, type):
                visited.add(id(item))
                pending += [
                    getattr(item, field.name, None) for field in reversed(dataclasses.fields(item))
                ]
        elif item is not None:
            leaves = tree_leaves(item)
            pending += reversed(leaves) if len(leaves) != 1 or leaves[0] is not item else ()
    return tensors
