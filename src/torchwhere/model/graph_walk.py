"""Walks the autograd graph: every node once, without recursion, and so that torch can free the
graph afterwards.

`walk` takes nodes and gives a `Trail`: all nodes reachable from them, those that feed others first,
and the edges as numbers. A million nodes take about two seconds. Nodes are torch's own objects:
whoever keeps a trail keeps the graph.

Since 2.13 torch keeps the Python object of every node that Python has once seen, and a chain of
such nodes is freed recursively: from some 30,000 nodes on, `del loss` after a walk overflows the
stack and kills the process. `_Hold` is there to prevent that.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[np.uint32]

ACCUMULATE_GRAD = "AccumulateGrad"
_HELD = "torchwhere"  # key in a node's metadata
_DEEPEST = 500  # nodes that torch may free recursively; its frames take about 300 bytes each


class _Waiting(threading.local):
    """Nodes that this thread is about to let go of."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.is_freeing = False


class _Hold:
    """Keeps a node alive until the one that leads to it is gone, then lets go of it from a flat
    loop.

    Torch drops a node's edges before its metadata, where this stands: the node below survives its
    last edge, the recursion ends there, and goes on when the frames above are gone.
    """

    __slots__ = ("node",)
    _waiting = _Waiting()

    def __init__(self, node: Any) -> None:
        self.node = node

    def __del__(self) -> None:
        waiting = self._waiting
        waiting.nodes.append(self.node)
        self.node = None
        if not waiting.is_freeing:
            waiting.is_freeing = True
            while waiting.nodes:
                waiting.nodes.pop()
            waiting.is_freeing = False


class Trail(NamedTuple):
    """A walk: `nodes` from the roots to the leaves, node `i` leading to `targets[starts[i]:starts[i
    + 1]]`."""

    nodes: list[Any]
    starts: Numbers
    targets: Numbers


def walk(roots: Iterable[Any]) -> Trail:
    """Every node reachable from `roots`, once; each comes before all nodes it leads to."""
    # the last is numbered first, so the first comes first
    pending: list[Any] = [root for root in roots if root is not None]
    numbers: dict[Any, int] = {}  # counted from the leaves; -1 while on the way
    nodes: list[Any] = []
    depths, starts, targets = array("H"), array("I", [0]), array("I")
    while pending:
        entry = pending.pop()
        # how many nodes follow the one below it: they are numbered by now, so it is its turn
        if type(entry) is int:
            node, depth = pending.pop(), 0
            for following in pending[len(pending) - entry :]:
                number = numbers[following]
                targets.append(number)
                if depths[number] >= _DEEPEST:
                    _hold(node, following)
                elif depths[number] >= depth:
                    depth = depths[number] + 1
            del pending[len(pending) - entry :]
            numbers[node] = len(nodes)
            nodes.append(node)
            depths.append(depth)
            starts.append(len(targets))
        elif entry not in numbers:
            numbers[entry] = -1
            edges = [node for node, _ in entry.next_functions if node is not None]
            pending += edges[::-1]
            pending += (entry, len(edges))
            pending += edges
    return _from_the_roots(nodes, starts, targets)


def _hold(node: Any, following: Any) -> None:
    """Cut the chain that torch would free recursively between two nodes."""
    held = node.metadata.setdefault(_HELD, [])
    if all(hold.node is not following for hold in held):
        held.append(_Hold(following))


def _from_the_roots(nodes: list[Any], starts: array[int], targets: array[int]) -> Trail:
    """The same trail, numbered from the other end. Edges were noted in reverse: now they are in
    torch's order."""
    nodes.reverse()
    turned = (len(nodes) - 1 - np.asarray(targets, dtype=np.int64)[::-1]).astype(np.uint32)
    return Trail(
        nodes, (len(targets) - np.asarray(starts, dtype=np.int64)[::-1]).astype(np.uint32), turned
    )


def sources(starts: Numbers) -> Numbers:
    """For each edge of a trail the node it comes from."""
    counts = starts[1:].astype(np.int64) - starts[:-1]
    return np.repeat(np.arange(len(counts), dtype=np.uint32), counts)


def nodes_of(roots: Iterable[Any]) -> Iterator[Any]:
    """The nodes of `walk` one after the other."""
    return iter(walk(roots).nodes)


def roots_of(tensors: Any) -> list[Any]:
    """The nodes that made some tensors (or gradient edges); those that have none are left out."""
    listed = (
        [tensors]
        if isinstance(tensors, (torch.Tensor, torch.autograd.graph.GradientEdge))
        else list(tensors)
    )
    found = [getattr(tensor, "grad_fn", None) or getattr(tensor, "node", None) for tensor in listed]
    return [node for node in found if node is not None]


def is_leaf(node: Any) -> bool:
    """Whether a node stands for a leaf tensor, found as `node.variable`: it accumulates that
    tensor's gradient."""
    return type(node).__name__ == ACCUMULATE_GRAD
