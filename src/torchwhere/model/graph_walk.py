"""Walks the autograd graph: visits every node once, without recursion, and in a way that lets torch
free the graph afterwards.

`walk` takes nodes and returns a `Trail`: all nodes reachable from them, each before the nodes that
it leads to, and the edges as numbers. A million nodes take about two seconds. The nodes are objects
of torch: a trail keeps the graph alive.

Since 2.13, torch keeps the Python object of every node that Python code has accessed, and frees a
chain of such nodes recursively. From about 30,000 nodes on, `del loss` after a walk overflows the
stack and kills the process. `_Hold` prevents that.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[np.uint32]

ACCUMULATE_GRAD = "AccumulateGrad"
ACCUMULATE_GRAD_SEQ = (1 << 64) - 1  # the sequence number of every AccumulateGrad node
_HELD = "torchwhere"  # key in a node's metadata
_DEEPEST = 500  # nodes that torch may free recursively; its frames take about 300 bytes each


class _Waiting(threading.local):
    """Nodes that this thread is about to release."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.is_freeing = False


class _Hold:
    """Keeps a node alive until the node that leads to it is freed, then releases it from a loop.

    It is in the metadata of the node that leads to it. Torch drops the edges of a node before its
    metadata, so the next node outlives its last edge and the recursion ends there. The loop frees
    the next node when the frames of that recursion have returned.
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
    """The result of a walk: `nodes` from the roots to the leaves. Node `i` leads to the nodes
    `targets[starts[i] : starts[i + 1]]`."""

    nodes: list[Any]
    starts: Numbers
    targets: Numbers


def walk(roots: Iterable[Any]) -> Trail:
    """Visit every node reachable from `roots` once. Each comes before all nodes it leads to."""
    # The last root is numbered first, and the numbers are reversed at the end.
    pending: list[Any] = [root for root in roots if root is not None]
    # counted from the leaves; -1 until all nodes that a node leads to have numbers
    numbers: dict[Any, int] = {}
    nodes: list[Any] = []
    depths, starts, targets = array("H"), array("I", [0]), array("I")
    while pending:
        entry = pending.pop()
        # The number of edges of the node below it on the stack. All nodes that this node leads to
        # are numbered now, so it gets its number.
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
    """Cut a chain that torch would free recursively, between two nodes."""
    held = node.metadata.setdefault(_HELD, [])
    if all(hold.node is not following for hold in held):
        held.append(_Hold(following))


def _from_the_roots(nodes: list[Any], starts: array[int], targets: array[int]) -> Trail:
    """Number the nodes from the roots. This also reverses the edges, which then have torch's
    order."""
    nodes.reverse()
    turned = (len(nodes) - 1 - np.asarray(targets, dtype=np.int64)[::-1]).astype(np.uint32)
    return Trail(
        nodes, (len(targets) - np.asarray(starts, dtype=np.int64)[::-1]).astype(np.uint32), turned
    )


def sources(starts: Numbers) -> Numbers:
    """The number of the node that each edge of a trail comes from."""
    counts = starts[1:].astype(np.int64) - starts[:-1]
    return np.repeat(np.arange(len(counts), dtype=np.uint32), counts)


def nodes_of(roots: Iterable[Any]) -> Iterator[Any]:
    """Iterate over the nodes of `walk`."""
    return iter(walk(roots).nodes)


def roots_of(tensors: Any) -> list[Any]:
    """The nodes that made some tensors (or gradient edges). Tensors without a node are left out."""
    listed = (
        [tensors]
        if isinstance(tensors, (torch.Tensor, torch.autograd.graph.GradientEdge))
        else list(tensors)
    )
    nodes = [getattr(tensor, "grad_fn", None) or getattr(tensor, "node", None) for tensor in listed]
    return [node for node in nodes if node is not None]


def is_leaf(node: Any) -> bool:
    """Whether a node accumulates the gradient of a leaf tensor, which is `node.variable`."""
    return type(node).__name__ == ACCUMULATE_GRAD


# -- saved tensors ---------------------------------------------------------------------------------
# A backward without `retain_graph` frees the saved tensors of each node after the node has run.
# Nodes and edges stay. A node that saves no tensor, for example an addition, is the same before and
# after. So nothing shows whether a graph of only such nodes was freed. Nothing here unpacks a saved
# tensor: that could run a forward.

# by the class of a node; weak, because each custom function has a class of its own
_names: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _saved_names(node: Any) -> tuple[str, ...]:
    cls = type(node)
    names = _names.get(cls)
    if names is None:
        names = _names[cls] = tuple(name for name in dir(cls) if name.startswith("_raw_saved_"))
    return names


def holds_saved(node: Any) -> bool:
    """Whether a node still has a saved tensor."""
    try:
        return any(_is_filled(getattr(node, name)) for name in _saved_names(node))
    except RuntimeError:  # freed: the node has run
        return False


def is_freed(node: Any) -> bool:
    """Whether a node saved tensors that are freed now."""
    names = _saved_names(node)
    if not names or holds_saved(node):
        return False
    try:
        # Nothing is saved now. Only if it was freed, reading it raises an error.
        for name in names:
            getattr(node, name)
            getattr(node, name.replace("_raw", "", 1), None)
    except RuntimeError:
        return True
    return False


def _is_filled(saved: Any) -> bool:
    if isinstance(saved, (tuple, list)):
        return any(map(_is_filled, saved))
    return getattr(saved, "data", None) is not None
