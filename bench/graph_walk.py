"""Measures a walk over an autograd graph of 1,000,000 nodes: time and memory per node; and what it
costs a forward to record lines.

`rows()` returns (name, figure, unit). The walk is compared with the shortest loop that visits each
node once and stores nothing: the cost of asking torch for the edges. Times are CPU times, so other
programs do not count. DeepSpeed's `print_backward_tensors` recurses over every path: the walk is
compared with that on 14 residual layers.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchwhere
from torchwhere.model.graph_walk import walk

NODES = 1_000_000
ROUNDS = 3
FORWARDS = 200
# torch 2.13 overflows the stack when it frees a longer chain whose nodes Python has accessed,
# except through `walk`
_SAFE = 20_000
Row = tuple[str, float, str]


def rows(*, nodes: int = NODES) -> list[Row]:
    return [*_walk_rows(nodes), *_path_rows(), *_line_rows()]


def _chain(nodes: int) -> torch.Tensor:
    x = torch.ones(2, requires_grad=True)
    for _ in range(nodes - 1):
        x = x + 1
    return x


def _walk_rows(nodes: int) -> list[Row]:
    """Measure a chain, the deepest graph of that size. Each run gets a new one: torch keeps the
    Python objects of nodes that were accessed."""
    contenders: dict[str, Callable[[Any], Any]] = {
        f"edges alone, {min(nodes, _SAFE):,} nodes": _visit,
        f"walk, {nodes:,} nodes": lambda tensor: walk([tensor.grad_fn]),
        f"backward_graph, {nodes:,} nodes": torchwhere.backward_graph,
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    sizes: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, contender in contenders.items():
            tensor = _chain(min(nodes, _SAFE) if contender is _visit else nodes)
            before, start = _resident(), time.process_time()
            result = contender(tensor)
            count = len(result.nodes)
            times[name].append((time.process_time() - start) / count * 1e6)
            sizes[name].append((_resident() - before) / count)
            del result, tensor
    graph = torchwhere.backward_graph(_chain(nodes))
    start = time.process_time()
    graph.text()
    text = (time.process_time() - start) / nodes * 1e6
    return [
        *((name, statistics.median(values), "us a node") for name, values in times.items()),
        (f"text, {nodes:,} nodes", text, "us a node"),
        *(
            (f"{name}, memory", statistics.median(values), "bytes a node")
            for name, values in list(sizes.items())[1:]
        ),
    ]


class _Visited(list[Any]):
    @property
    def nodes(self) -> list[Any]:
        return self


def _visit(tensor: torch.Tensor) -> _Visited:
    pending, visited = [tensor.grad_fn], {tensor.grad_fn}
    while pending:
        node: Any = pending.pop()
        for following, _ in node.next_functions:
            if following is not None and following not in visited:
                visited.add(following)
                pending.append(following)
    return _Visited(visited)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _path_rows() -> list[Row]:
    """Compare a visit of every node with a visit of every path, which DeepSpeed's
    print_backward_tensors does."""
    x = torch.ones(2, requires_grad=True)
    for _ in range(14):
        x = x + x.sin()
    ours, paths = [], []
    for _ in range(ROUNDS):
        start = time.process_time()
        walk([x.grad_fn])
        middle = time.process_time()
        for _ in _paths(x.grad_fn):
            pass
        ours.append(middle - start)
        paths.append(time.process_time() - middle)
    return [
        ("14 residual layers, walk", statistics.median(ours) * 1e3, "ms"),
        ("14 residual layers, every path", statistics.median(paths) * 1e3, "ms"),
    ]


def _paths(node: Any) -> Iterator[Any]:
    yield node
    for following, _ in node.next_functions:
        if following is not None:
            yield from _paths(following)


class _Block(nn.Module):
    """A module of the user, whose lines are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        y = torch.relu(y)
        y = self.down(y)
        return x + y


def _line_rows() -> list[Row]:
    """Measure a forward of eight blocks with 40 ops, alternating: alone, with recorded lines, and
    in anomaly mode."""
    model, x = nn.Sequential(*(_Block() for _ in range(8))), torch.ones(8, 64)
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "forward alone": nullcontext,
        "forward, forward_lines()": torchwhere.forward_lines,
        "forward, anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    }
    times: dict[str, list[float]] = {name: [] for name in contexts}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(ROUNDS + 1):
            for name, context in contexts.items():
                with context():
                    start = time.process_time()
                    for _ in range(FORWARDS):
                        model(x)
                    times[name].append((time.process_time() - start) / FORWARDS * 1e6)
    return [(name, statistics.median(values[1:]), "us") for name, values in times.items()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, figure, unit in rows(nodes=int(sys.argv[1]) if len(sys.argv) > 1 else NODES):
        print(f"{name:40} {figure:12,.2f} {unit}")
