"""Real CUDA graphs: the collectives in them count once for each replay, and the device's progress
through replays is known.

`make test-gpu` runs this file. It needs one NVIDIA GPU, and is skipped elsewhere. The jobs
`replay_healthy` and `replay_skipped` of `nccl_jobs.py` have four ranks.
"""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed import _functional_collectives as functional

import torchwhere
from models import Model, batch
from torchwhere.api import watch
from torchwhere.blackbox.device import device_state, device_times
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.replays import NO_ROW, replay_rows
from torchwhere.core.events import Event
from torchwhere.native.build import build
from torchwhere.native.load import SWITCH

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.checks_itself,  # NCCL keeps threads
]

DDP_WARM_UP = 11  # backwards before a capture, says the documentation of CUDA graphs


@pytest.fixture
def one_gpu() -> Iterator[None]:
    hook = sys.excepthook
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    yield
    dist.destroy_process_group()
    sys.excepthook = hook


def events(folder: Path, *kinds: str) -> list[Event]:
    return list(torchwhere.read_run(folder).events(kinds=set(kinds)))


def sizes(folder: Path) -> list[tuple[int, bool]]:
    """The first size of each collective, and whether it was replayed. Checks that the numbers have
    no gap."""
    collectives = events(folder, "collective")
    numbers = [event.fields["number"] for event in collectives]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return [
        (event.fields["shapes"][0][0], event.fields.get("replayed", False)) for event in collectives
    ]


def captured(x: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph that reduces a tensor and a part of it, and doubles it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
        dist.all_reduce(x[:2])
        x.mul_(2)
    return graph


def test_replays_count(one_gpu: None, tmp_path: Path) -> None:
    """Collectives of a graph are issued by each replay, not by the capture; the graph computes the
    same as without a watch."""
    x = torch.ones(4, device="cuda")
    with torchwhere.watch(out=tmp_path):
        graph = captured(x)
        graph.replay()
        dist.all_reduce(torch.ones(3, device="cuda"))
        graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [4.0] * 4
    assert sizes(tmp_path) == [(4, True), (2, True), (3, False), (4, True), (2, True)]
    begin, end, *replays = events(tmp_path, "capture_begin", "capture_end", "replay")
    assert begin.fields["cuda_graph"] == end.fields["cuda_graph"] == 0
    assert end.fields["collectives"] == 2
    assert [replay.fields["collectives"] for replay in replays] == [2, 2]
    assert "test_gpu_graphs.py" in begin.fields["captured_at"]
    assert {replay.place.line for replay in replays} != {begin.place.line}


def test_device_progress(one_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has reached and finished the collectives of replays that it has run, and has not
    reached those of a replay behind a long kernel."""
    build()
    monkeypatch.setenv(SWITCH, "1")
    x = torch.ones(4, device="cuda")
    torchwhere.start(out=tmp_path)
    try:
        graph = captured(x)
        graph.replay()
        torch.cuda.synchronize()
        torch.cuda._sleep(int(1.8e9 * 3))
        graph.replay()
        time.sleep(0.5)
        box = read_box(next(tmp_path.glob("*.box")))
    finally:
        torch.cuda.synchronize()
        torchwhere.stop()
    replays = replay_rows(box)
    rows = [row for row in range(len(replays)) if replays[row] != NO_ROW]
    reached, done = device_times(box)
    assert [(reached[row] > 0, done[row] > 0) for row in rows] == [(True, True)] * 2 + [
        (False, False)
    ] * 2
    state = device_state(box)
    assert state is not None
    assert state.unreached == tuple(int(box.records["number"][row]) for row in rows[2:])


def test_a_graph_from_before(
    one_gpu: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph that was captured before the watch has unknown contents, and the log says so."""
    graph = captured(torch.ones(4, device="cuda"))
    with caplog.at_level(logging.WARNING, "torchwhere"), torchwhere.watch(out=tmp_path):
        graph.replay()
        graph.replay()
    torch.cuda.synchronize()
    assert events(tmp_path, "collective") == []
    assert [event.fields["collectives"] for event in events(tmp_path, "replay")] == [None, None]
    assert sum("captured before the watch" in message for message in caplog.messages) == 1


def test_a_watch_keeps_no_graph(one_gpu: None, tmp_path: Path) -> None:
    """A graph that the job deletes is freed during the watch, and another graph with its id starts
    from nothing."""
    with torchwhere.watch(out=tmp_path):
        graph = captured(torch.ones(4, device="cuda"))
        alive = weakref.ref(graph)
        del graph
        gc.collect()
        assert alive() is None
        session = watch.current()
        assert session is not None
        assert not session.cuda_graph_hook.graphs._graphs
    original = torch.cuda.CUDAGraph.replay
    assert "torchwhere" not in original.__module__
    assert original.__code__.co_freevars == ("__class__",)


class Reduced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.linear(rows)
        reduced: torch.Tensor = differentiable.all_reduce(hidden)
        return reduced


def test_make_graphed_callables(one_gpu: None, tmp_path: Path) -> None:
    """A graphed module replays one graph in its forward and one in its backward; both count."""
    model, rows = Reduced().cuda(), torch.randn(4, 8, device="cuda")
    with torchwhere.watch(model, out=tmp_path):
        graphed = torch.cuda.make_graphed_callables(model, (rows,))
        before = len(sizes(tmp_path))
        for _ in range(3):
            graphed(rows).sum().backward()
        torch.cuda.synchronize()
    after = events(tmp_path, "collective")[before:]
    assert len(after) == 6
    assert all(event.fields["replayed"] for event in after)
    assert [event.place.pass_ for event in after] == ["forward", "backward"] * 3


def test_ddp_in_a_graph(one_gpu: None, tmp_path: Path) -> None:
    """A whole step of DDP in a graph: each replay counts its reductions, with their parameters."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model = nn.parallel.DistributedDataParallel(Model(64, 3).cuda(), bucket_cap_mb=0.03)
    rows = batch(64).cuda()
    with torchwhere.watch(model, out=tmp_path):
        with torch.cuda.stream(stream):
            for _ in range(DDP_WARM_UP):
                model(rows).sum().backward()
        torch.cuda.synchronize()
        before = len(events(tmp_path, "collective"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            model(rows).sum().backward()
        assert len(events(tmp_path, "collective")) == before
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
    after = events(tmp_path, "collective")[before:]
    names = sorted(name for name, _ in model.module.named_parameters())
    half = len(after) // 2
    assert half > 1
    for reductions in (after[:half], after[half:]):
        assert sorted(name for event in reductions for name in event.fields["for"]) == names
        assert all(event.fields["replayed"] for event in reductions)


def test_no_synchronisation(one_gpu: None, tmp_path: Path) -> None:
    """Nothing that a watch does for a replay waits for the device."""
    x = torch.ones(4, device="cuda")
    with torchwhere.watch(out=tmp_path):
        graph = captured(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert len(events(tmp_path, "replay")) == 5


def test_reduce_overhead(one_gpu: None, tmp_path: Path) -> None:
    """`torch.compile(mode="reduce-overhead")` captures and replays: after the warm-up each call
    counts the collective in it once."""

    def step(rows: torch.Tensor) -> torch.Tensor:
        reduced = functional.all_reduce(rows * 2, "sum", dist.group.WORLD)
        return functional.wait_tensor(reduced) + 1

    compiled, rows = torch.compile(step, mode="reduce-overhead"), torch.ones(8, device="cuda")
    with torchwhere.watch(out=tmp_path):
        for _ in range(3):  # eager, captured and replayed, replayed
            compiled(rows)
        before = len(sizes(tmp_path))
        for _ in range(4):
            result = compiled(rows)
        assert result.tolist() == [3.0] * 8
    after = events(tmp_path, "collective")[before:]
    assert len(after) == 4
    assert all(event.fields["replayed"] for event in after)
    assert len({event.place.line for event in after}) == 1


# After a capture that failed, the random numbers of torch fail in this process: it has its own.
FAILED_CAPTURE = """
import sys
import torch, torch.distributed as dist, torchwhere

dist.init_process_group(
    "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
)
x = torch.ones(4, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
with torchwhere.watch(out=sys.argv[1]):
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            dist.all_reduce(x)
            torch.cuda.synchronize()  # not allowed during a capture
    except RuntimeError:
        print("failed")
    dist.all_reduce(x[:3])
dist.destroy_process_group()
"""


def test_a_failed_capture(tmp_path: Path) -> None:
    """After a capture that failed, collectives count as before."""
    done = subprocess.run(
        [sys.executable, "-c", FAILED_CAPTURE, tmp_path / "run"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "failed\n", done.stderr
    assert sizes(tmp_path / "run") == [(3, False)]
    (end,) = events(tmp_path / "run", "capture_end")
    assert end.fields["error"]
