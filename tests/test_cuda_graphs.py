"""CUDA graphs: collectives of a capture count once for each replay.

A CPU has no CUDA graphs. These tests call real gloo collectives, and call the hook as the wrapped
methods of `torch.cuda.CUDAGraph` do. `test_gpu_graphs.py` has the tests with real graphs.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchwhere
from models import Model, batch
from rank_pool import Pool
from torchwhere.api import watch
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.replays import NO_ROW, replay_rows
from torchwhere.core.events import Event
from torchwhere.hooks.cuda_graphs import CudaGraphHook
from torchwhere.pipeline.verdict import diagnose_folder

STEPS, SKIPPED_STEP, VICTIM = 12, 7, 2


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


def calls(folder: Path) -> list[tuple[Any, Any, bool]]:
    """Number, first size and whether it was replayed, of each collective."""
    return [
        (event.fields["number"], event.fields["shapes"][0][0], "replayed" in event.fields)
        for event in events(folder, "collective")
    ]


def line_of(text: str) -> str:
    """The first line of this file with a text, as places show it."""
    lines = Path(__file__).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, start=1) if text in line)
    return f"{Path(__file__).name}:{number}"


# -- records ---------------------------------------------------------------------------------------


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
    assert calls(tmp_path) == [
        (0, 1, False),
        (1, 2, True),
        (2, 3, True),
        (3, 1, False),
        (4, 4, True),
        (5, 2, True),
        (6, 3, True),
    ]
    line = line_of("dist.all_reduce(torch.ones(size))")
    replayed = events(tmp_path, "collective")[1]
    assert (replayed.place.line or "").endswith(line)
    assert list(torchwhere.read_run(tmp_path).boxes[0].counters().values()) == [7]


def test_events(one_rank: None, tmp_path: Path) -> None:
    """A capture and a replay are events with the graph, the place of the CPU, and the number of
    collectives."""
    graph = Graph()
    with torchwhere.watch(out=tmp_path):
        torchwhere.step()
        capture(graph, 2, 3)
        torchwhere.step()
        replay(graph)
    begin, end, replayed = events(tmp_path, "capture_begin", "capture_end", "replay")
    captured_at = begin.fields["captured_at"]
    assert captured_at.endswith(line_of("hook().begins(graph)"))
    assert begin.fields == {"cuda_graph": 0, "captured_at": captured_at}
    assert end.fields == replayed.fields == {**begin.fields, "collectives": 2}
    assert (replayed.place.line or "").endswith(line_of("marks = hook().replays(graph)"))
    assert (begin.place.step, replayed.place.step) == (0, 1)
    assert [event.place.step for event in events(tmp_path, "collective")] == [1, 1]


def test_the_replay_of_a_collective(one_rank: None, tmp_path: Path) -> None:
    """A reader finds the replay that issued a collective, also if another thread records
    between them."""
    graph = Graph()
    with torchwhere.watch(out=tmp_path):
        capture(graph, 2, 3)
        replay(graph)
        dist.all_reduce(torch.ones(1))
        replay(graph)
    box = read_box(next(tmp_path.glob("*.box")))
    kinds = {int(row): box.event(int(row)).kind for row in replay_rows(box) if row != NO_ROW}
    assert list(kinds.values()) == ["replay", "replay"]
    rows = [int(row) for row in replay_rows(box) if row != NO_ROW]
    assert rows == sorted([*kinds, *kinds])
    records = box.records.copy()
    records["thread"][rows[-1] + 1 :: 2] = 7  # every second record after it is of another thread
    box.records = records
    assert replay_rows(box)[rows[-1] + 2] == rows[-1]


def test_a_graph_from_before_the_watch(
    one_rank: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The contents of a graph that was captured before the watch are unknown: the event, the log
    and the verdict say so."""
    graph = Graph()
    with caplog.at_level(logging.WARNING, "torchwhere"), torchwhere.watch(out=tmp_path):
        replay(graph)
        replay(graph)
    unknown = {"cuda_graph": None, "captured_at": None, "collectives": None}
    assert [event.fields for event in events(tmp_path, "replay")] == [unknown, unknown]
    (message,) = caplog.messages
    assert message == (
        "torchwhere: the job replays a CUDA graph that was captured before the watch began. Its"
        " collectives are not recorded. Start the watch before the capture to record them."
    )
    assert (
        "the collectives in CUDA graphs that were captured before the watch, and that rank 0"
        " replayed"
    ) in diagnose_folder(tmp_path).missing_data


def test_a_failed_capture(one_rank: None, tmp_path: Path) -> None:
    """A capture that fails has no contents; collectives count again after it."""
    graph = Graph()
    with torchwhere.watch(out=tmp_path):
        hook().begins(graph)
        dist.all_reduce(torch.ones(2))
        hook().ends(graph, RuntimeError("operation not permitted when stream is capturing"))
        dist.all_reduce(torch.ones(3))
        assert hook().graphs.contents(graph) is None
    assert calls(tmp_path) == [(0, 3, False)]
    (end,) = events(tmp_path, "capture_end")
    assert end.fields["error"] == ("RuntimeError: operation not permitted when stream is capturing")


def test_a_replay_during_a_capture(one_rank: None, tmp_path: Path) -> None:
    """A graph that is replayed during the capture of another one becomes part of it."""
    inner, outer = Graph(), Graph()
    with torchwhere.watch(out=tmp_path):
        capture(inner, 2)
        hook().begins(outer)
        dist.all_reduce(torch.ones(1))
        replay(inner)
        hook().ends(outer)
        replay(outer)
    assert calls(tmp_path) == [(0, 1, True), (1, 2, True)]
    assert [event.fields["cuda_graph"] for event in events(tmp_path, "replay")] == [1]


def test_captures_on_two_threads(one_rank: None, tmp_path: Path) -> None:
    """Two threads that capture at the same time fill their own graphs. A thread without a capture,
    as of the autograd engine, fills the last one."""
    first, second = Graph(), Graph()

    def capture_second() -> None:
        hook().begins(second)
        dist.all_reduce(torch.ones(2))

    with torchwhere.watch(out=tmp_path):
        hook().begins(first)
        for body in (capture_second, lambda: dist.all_reduce(torch.ones(4))):
            thread = threading.Thread(target=body)
            thread.start()
            thread.join()
        dist.all_reduce(torch.ones(3))
        hook().ends(second)
        hook().ends(first)
        replay(first)
        replay(second)
    assert [size for _, size, _ in calls(tmp_path)] == [3, 2, 4]


def test_graphs_that_are_gone(one_rank: None, tmp_path: Path) -> None:
    """A watch keeps no graph alive, and forgets the contents of a graph that was deleted or
    reset."""
    with torchwhere.watch(out=tmp_path):
        graphs = hook().graphs
        deleted, reset = Graph(), Graph()
        capture(deleted, 2)
        capture(reset, 2)
        alive = weakref.ref(deleted)
        del deleted
        gc.collect()
        assert alive() is None
        graphs.forget(reset)
        assert not graphs._graphs
        assert not graphs._alive
        deleted = Graph()
        hook().begins(deleted)  # and never ends
        del deleted
        dist.all_reduce(torch.ones(3))
    assert calls(tmp_path) == [(0, 3, False)]


def test_buckets_of_ddp(one_rank: None, tmp_path: Path) -> None:
    """Each replay of a DDP backward counts its buckets, also those that the native extension
    records by itself."""
    model, graph = DistributedDataParallel(Model(), bucket_cap_mb=0.0005), Graph()
    with torchwhere.watch(model, out=tmp_path):
        for _ in range(5):
            model(batch()).sum().backward()
        before = len(calls(tmp_path))
        hook().begins(graph)
        model(batch()).sum().backward()
        hook().ends(graph)
        assert len(calls(tmp_path)) == before
        replay(graph)
        model(batch()).sum().backward()
    after = events(tmp_path, "collective")[before:]
    replayed, eager = after[: len(after) // 2], after[len(after) // 2 :]
    assert len(replayed) > 1
    assert [event.fields["for"] for event in replayed] == [event.fields["for"] for event in eager]
    assert ["replayed" in event.fields for event in after] == [True] * len(replayed) + [
        False
    ] * len(eager)


def test_comms(one_rank: None) -> None:
    """`comms` counts the collectives of replays, and not those of a capture."""
    graph = Graph()
    with torchwhere.comms() as c:
        capture(graph, 2, 3)
        assert c.counts["all_reduce"] == 0
        replay(graph)
        replay(graph)
    assert c.counts["all_reduce"] == 4


# -- the hook --------------------------------------------------------------------------------------


def test_methods_are_wrapped_and_restored() -> None:
    """A watch wraps the methods of `torch.cuda.CUDAGraph`, and restores them. Stacks show the
    wrappers as torch's own functions."""
    names = ("capture_begin", "capture_end", "replay", "reset")
    before = {name: vars(torch.cuda.CUDAGraph)[name] for name in names}
    with torchwhere.watch():
        for name in names:
            wrapper = vars(torch.cuda.CUDAGraph)[name]
            assert wrapper is not before[name]
            assert wrapper.__code__.co_filename == before[name].__code__.co_filename
            assert wrapper.__name__ == name
    assert {name: vars(torch.cuda.CUDAGraph)[name] for name in names} == before


def test_a_wrapper_of_another_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that another library wrapped during the watch keeps that wrapper."""
    # torch's own method is what the end of the test restores
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", torch.cuda.CUDAGraph.replay)
    with torchwhere.watch():
        ours = torch.cuda.CUDAGraph.replay

        def theirs(graph: Any) -> None:
            ours(graph)

        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", theirs)
    assert torch.cuda.CUDAGraph.replay is theirs


def test_a_hook_that_fails(
    one_rank: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the hook never reaches the job; after three errors the hook is off, and a capture
    that runs is forgotten."""
    with caplog.at_level(logging.WARNING, "torchwhere"), torchwhere.watch(out=tmp_path):
        hook().begins(Graph())
        for _ in range(4):
            hook().begins(None)  # has no weak references
        assert hook().replays(Graph()) is None
        dist.all_reduce(torch.ones(2))
    assert calls(tmp_path) == [(0, 2, False)]
    assert "the hook for CUDA graphs failed" in caplog.messages[0]


# -- the doctor ------------------------------------------------------------------------------------


def job(folder: str, skipped_step: int | None) -> None:
    """Replays a graph of two all-reduces once a step; one rank skips a replay."""
    graph = Graph()
    with torchwhere.watch(out=folder):
        capture(graph, 2, 3)
        for step in range(STEPS):
            torchwhere.step()
            if dist.get_rank() != VICTIM or step != skipped_step:
                replay(graph)


def test_a_skipped_replay(four_ranks: Pool, tmp_path: Path) -> None:
    """A rank that replays a graph once too few is the culprit, and the verdict says in which step
    and after which line."""
    four_ranks.run(job, str(tmp_path), SKIPPED_STEP)
    verdict = diagnose_folder(tmp_path)
    assert (verdict.kind, verdict.culprits) == ("mismatch", (VICTIM,))
    captured, replayed = (
        f"{Path(__file__).parent.name}/{line_of(text)}"
        for text in ("dist.all_reduce(torch.ones(size))", "marks = hook().replays(graph)")
    )
    call = f"all_reduce of float32 [2] in a CUDA graph, outside any module, captured at {captured}"
    assert verdict.explanation == (
        'At #14 of group "default", the ranks are in different steps.',
        f"  ranks 0-1, 3: {call}, step 7",
        f"  rank 2: {call}, step 8",
        (
            "Op, shapes and call sites are the same, but the steps differ. Rank 2 ran ahead in step"
            " 7: it skipped a replay, or counted an extra step (optimizer.step, torchwhere.step)."
        ),
        (
            f"Likely cause: rank 2 took a different code path after the replay at {replayed} (step"
            f" 6). Look at: conditions on rank, step or data before {replayed}."
        ),
    )


def test_all_replay(four_ranks: Pool, tmp_path: Path) -> None:
    """Ranks that replay equally often are healthy."""
    four_ranks.run(job, str(tmp_path), None)
    verdict = diagnose_folder(tmp_path)
    assert (verdict.kind, verdict.culprits) == ("healthy", ())
