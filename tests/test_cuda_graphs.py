"""CUDA graphs: collectives of a capture count once for each replay.

A CPU has no CUDA graphs. These tests call real gloo collectives, and call the hook as the wrapped
methods of `torch.cuda.CUDAGraph` do. `test_gpu_graphs.py` has the tests with real graphs.
"""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchwhere
from rank_pool import Pool
from torchwhere.api import watch
from torchwhere.blackbox.device import device_times
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.replays import NO_ROW, replay_rows
from torchwhere.core.events import Event, Kind
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.hooks.cuda_graphs import CudaGraphHook
from torchwhere.pipeline.verdict import diagnose_folder

STEPS = 12
WORLD = 4


class Graph:
    """Stands for a graph object: the hook only uses its identity and its lifetime."""


def hook() -> CudaGraphHook:
    """The hook of the running watch. Each collective that is called during a capture becomes part
    of it, as on a stream that is captured."""
    session = watch.current()
    assert session is not None
    session.cuda_graph_hook.graphs.is_capturing = lambda device: True
    return session.cuda_graph_hook


def capture(graph: Graph, *sizes: int) -> None:
    """Capture an all-reduce of each size."""
    hook().begins(graph)
    for size in sizes:
        dist.all_reduce(torch.ones(size))
    hook().ends(graph)


def replay(graph: Graph) -> None:
    marks = hook().replays(graph)
    if marks:
        hook().replayed(marks)


def events(folder: Path, *kinds: str) -> list[Event]:
    return list(torchwhere.read_run(folder).events(kinds=set(kinds)))


def numbers(folder: Path) -> list[tuple[Any, Any, bool]]:
    """Number, first size and whether it was replayed, of each collective."""
    return [
        (
            event.fields["number"],
            event.fields["shapes"][0][0],
            event.fields.get("replayed", False),
        )
        for event in events(folder, "collective")
    ]


def test_a_replay_counts_the_collectives_of_its_graph(one_rank: None, tmp_path: Path) -> None:
    """A captured collective is not issued at the capture, and is issued once by each replay, in
    order, with the line of the capture; eager collectives between replays keep their numbers."""
    graph, other = Graph(), Graph()
    with torchwhere.watch(out=tmp_path):
        dist.all_reduce(torch.ones(1))
        capture(graph, 2, 3)
        capture(other, 4)
        replay(graph)
        dist.all_reduce(torch.ones(1))
        replay(other)
        replay(graph)
    replayed = [(2, True), (3, True), (1, False), (4, True), (2, True), (3, True)]
    assert numbers(tmp_path) == [
        (0, 1, False),
        *((number, *call) for number, call in enumerate(replayed, start=1)),
    ]
    line = line_of("dist.all_reduce(torch.ones(size))")
    places = [event.place.line or "" for event in events(tmp_path, "collective")[1:3]]
    assert all(place.endswith(f"test_cuda_graphs.py:{line}") for place in places)


def line_of(text: str) -> int:
    """The number of the first line of this file with a text."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)
