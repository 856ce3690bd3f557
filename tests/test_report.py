"""The data of the report: every section, for real runs, for a thousand ranks and for damaged boxes."""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import random
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import synthetic_boxes
import torchwhere
from models import Model, batch
from rank_pool import Pool
from synthetic_boxes import LATE_NS, RANKS, VICTIM, Made, made_once, make
from synthetic_job import TP, Job
from torchwhere import TorchwhereError
from torchwhere.blackbox.file_format import EntryType
from torchwhere.blackbox.file_names import box_name
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import Kind
from torchwhere.core.place import PASS_LABELS, Pass
from torchwhere.diagnose.calls.job_calls import calls_of_run, load_calls, load_calls_with
from torchwhere.diagnose.clocks import host_clocks
from torchwhere.diagnose.report import collectives, modules, ranks, steps, texts
from torchwhere.diagnose.report.digest import Digest, step_times
from torchwhere.diagnose.report.log import log
from torchwhere.diagnose.report.report import Report, make_report
from torchwhere.diagnose.report.spans import module_times
from torchwhere.pipeline.report import report_json, report_on
from torchwhere.pipeline.verdict import diagnose_run
from torchwhere.render import fact_text as report_text

GOLDEN = Path(__file__).parent / "golden" / "report-shape.json"
STEPS = 6
MS = 1_000_000


# -- a real run ------------------------------------------------------------------------------------


def _train(folder: Path) -> None:
    """Train six steps with module events, phases, notes, recomputation and two groups of a mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.checkpoint import checkpoint

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank, model = dist.get_rank(), Model(depth=3)
    with torchwhere.watch(model, out=folder, module_events=True):
        for step in range(STEPS):
            torchwhere.step(step)
            with torchwhere.phase("forward"):
                x = batch()
                for layer in model.layers:
                    x = checkpoint(layer, x, use_reentrant=False)
                with torchwhere.phase("loss"):
                    loss = model.head(x).sum()
            loss.backward()
            dist.all_reduce(torch.ones(256), group=mesh["dp"].get_group())
            dist.all_reduce(torch.ones(64), group=mesh["tp"].get_group())
            dist.all_reduce(torch.ones(64), group=mesh["tp"].get_group())
            torchwhere.note(f"loss {1.5 + (rank == 3 and step == 4)}")
            if rank == 2 and step == 3:
                torchwhere.note("skipped a batch")
        torchwhere.step(STEPS)
    dist.barrier()


@pytest.fixture(scope="module")
def folder(four_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    four_ranks.run(_train, folder)
    return folder


@pytest.fixture(scope="module")
def real(folder: Path) -> dict[str, Any]:
    return report_json(report_on(folder))


def rows_by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report["modules"]["rows"]}


def test_calls_of_modules(real: dict[str, Any]) -> None:
    """Calls are counted over ranks, steps and folded layers, separately for forward and
    recomputation; the rows are in the order of the model."""
    rows = rows_by_name(real)
    assert list(rows) == [
        "<root>",
        "layers.0-2",
        "layers.0-2.up",
        "layers.0-2.down",
        "head",
        modules.OUTSIDE,
    ]
    assert [rows["layers.0-2"][name] for name in ("depth", "parent", "times", "ranks")] == [
        1,
        0,
        3,
        4,
    ]
    assert rows["layers.0-2.up"]["parent"] == 1
    calls = {
        name: {pass_: cell["calls"] for pass_, cell in row["cells"].items()}
        for name, row in rows.items()
    }
    expected = 3 * STEPS * 4
    assert (
        calls["layers.0-2"]
        == calls["layers.0-2.up"]
        == {"forward": expected, "recompute": expected}
    )
    assert calls["head"] == {"forward": STEPS * 4}
    assert (real["modules"]["has_time"], real["modules"]["note"]) == (
        True,
        report_text.ONLY_FORWARD,
    )
    assert real["modules"]["passes"] == ["forward", "recompute", "outside"]


def test_time_of_modules_adds_up(real: dict[str, Any]) -> None:
    """In each pass, the time of a module is its own time plus the times of the modules inside it."""
    rows = rows_by_name(real)
    for pass_ in ("forward", "recompute"):
        layer, up, down = (
            rows[f"layers.0-2{leaf}"]["cells"][pass_] for leaf in ("", ".up", ".down")
        )
        assert layer["ms"] > up["ms"] > 0
        assert layer["self_ms"] + up["ms"] + down["ms"] == pytest.approx(layer["ms"], abs=0.01)
        assert up["self_ms"] == up["ms"]


def test_collectives_of_groups(real: dict[str, Any]) -> None:
    """Each group has every call with its bytes, step, line and arrivals, and the bytes of one rank
    in each step."""
    groups = {(group["group"], tuple(group["members"])): group for group in real["collectives"]}
    assert {key for key in groups if key[0] != "default"} == {
        *(("dp", pair) for pair in ((0, 2), (1, 3))),
        *(("tp", pair) for pair in ((0, 1), (2, 3))),
    }
    tp = groups["tp", (2, 3)]
    assert [(row["number"], row["step"]) for row in tp["rows"]] == [
        (number, number // 2) for number in range(2 * STEPS)
    ]
    assert {
        (row["op"], row["bytes"], row["arrived"], row["of"], row["differs"]) for row in tp["rows"]
    } == {("all_reduce", 256, 2, 2, False)}
    assert len({row["line"] for row in tp["rows"]}) == 2
    assert all("test_report.py:" in row["line"] for row in tp["rows"])
    assert groups["dp", (0, 2)]["bytes_per_step"] == [[step, 1024] for step in range(STEPS)]
    assert (real["more_groups"], tp["first_difference"], tp["size"], tp["count"]) == (0, None, 2, 2)
    assert tp["window"] == f"numbers 0 to {2 * STEPS - 1}; arrival by the wall clock of the host"


def test_skew_matches_the_matrix(real: dict[str, Any]) -> None:
    """The skew of a call is the lateness of its last rank; the lateness of its first rank is 0."""
    for group in real["collectives"]:
        late = dict(zip(group["matrix"]["ranks"], group["matrix"]["ms"], strict=True))
        for column, row in enumerate(group["rows"]):
            assert late[row["first_rank"]][column] == 0
            assert (
                late[row["last_rank"]][column]
                == row["skew_ms"]
                == max(lateness[column] for lateness in late.values())
            )


def test_steps_and_phases(real: dict[str, Any]) -> None:
    """The report has all complete steps of all ranks, phases with counts over ranks, and the times of
    each phase by rank."""
    assert real["steps"]["steps"] == list(range(STEPS))
    assert [(row["ranks"], row["rank"], row["count"]) for row in real["steps"]["rows"]] == [
        (str(r), r, 1) for r in range(4)
    ]
    assert all(0 < ms < 60_000 for row in real["steps"]["rows"] for ms in row["ms"])
    middle = sorted(row["ms"][2] for row in real["steps"]["rows"])[1:3]
    assert real["steps"]["median_ms"][2] == pytest.approx(sum(middle) / 2, abs=0.002)
    phases = {row["name"]: row for row in real["phases"]["rows"]}
    assert {name: (row["depth"], row["count"], row["ranks"]) for name, row in phases.items()} == {
        "forward": (0, 4 * STEPS, 4),
        "forward/loss": (1, 4 * STEPS, 4),
    }
    heat = real["phases"]["heat"]
    assert (heat["phases"], heat["ranks"]) == (["forward", "forward/loss"], ["0", "1", "2", "3"])
    assert sum(heat["ms"][0]) == pytest.approx(phases["forward"]["total_ms"], abs=0.01)
    slowest = phases["forward"]["slowest_rank"]
    assert heat["ms"][0][slowest] == phases["forward"]["max_rank_ms"] == max(heat["ms"][0])


def test_ranks(real: dict[str, Any]) -> None:
    """Every rank has its state, its step, its last collective and its group in each mesh
    dimension."""
    columns = real["ranks"]
    assert (columns["rank"], real["world_size"]) == ([0, 1, 2, 3], 4)
    assert [columns["states"][state] for state in columns["state"]] == ["finished"] * 4
    assert (columns["step"], columns["behind"], columns["behind_calls"]) == (
        [STEPS] * 4,
        [0] * 4,
        [0] * 4,
    )
    assert [columns["lasts"][last] for last in columns["last"]] == ["all_reduce on tp (256 B)"] * 4
    assert columns["last_number"] == [2 * STEPS - 1] * 4
    assert {mesh["name"]: mesh["of"] for mesh in columns["meshes"]} == {
        "dp": [0, 1, 0, 1],
        "tp": [0, 0, 1, 1],
    }
    assert min(columns["age_ms"]) == 0
    assert len(set(columns["pid"])) == 4


def test_log_side_by_side(real: dict[str, Any]) -> None:
    """Equal notes of ranks share a row; a note of only one rank and a note with another value are
    marked."""
    rows, first = real["log"]["rows"], real["log"]["first_difference"]
    assert real["log"]["ranks"] == [0, 1, 2, 3]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 3, 4, 5, STEPS]
    assert rows[first] == {
        "step": 3,
        "cells": [None, None, ["note", "skipped a batch"], None],
        "differs": True,
        "how": "flow",
    }
    assert [row["how"] for row in rows] == [None, None, None, None, "flow", "value", None, None]
    assert rows[5]["cells"] == [["note", "loss 1.5"]] * 3 + [["note", "loss 2.5"]]
    assert rows[-1]["cells"] == [["end", "stop"]] * 4


def test_details_settings_and_layout(real: dict[str, Any]) -> None:
    """The report has the last events of a rank, with times before now, the layout as text, and the
    settings of the run."""
    detail = real["details"]["2"]
    assert len(detail["events"]) == 30
    times = [event[0] for event in detail["events"]]
    assert times == sorted(times)
    assert times[-1] <= 0
    assert [event[1:3] for event in detail["events"][-2:]] == [["step_begin", ""], ["end", "stop"]]
    assert (detail["report"]["state"], detail["detail"]) == ("finished", "stop")
    assert [cohort["ranks"] for cohort in real["layout"]["cohorts"]] == ["0-3"]
    assert any("layers.0-2 x3" in line for line in real["layout"]["cohorts"][0]["lines"])
    assert real["layout"]["difference"][0] == "all ranks are laid out alike"
    expected = {
        "world size": 4,
        "boxes": 4,
        "hosts": 1,
        "module events": "on",
        "torch": torch.__version__,
    }
    assert {name: real["settings"][name] for name in expected} == expected
    assert real["verdict"]["headline"].startswith(f"All 4 ranks have finished. Last step {STEPS}")


def shape(value: Any) -> Any:
    """Return the fields and types of a JSON value; of a list, the different shapes of its items."""
    if isinstance(value, dict):
        is_by_rank = value and all(key.isdigit() for key in value)
        return (
            {"<rank>": shape(next(iter(value.values())))}
            if is_by_rank
            else {key: shape(value[key]) for key in value}
        )
    if isinstance(value, list):
        shapes = [shape(item) for item in value]
        return [item for at, item in enumerate(shapes) if item not in shapes[:at]]
    return (
        "number"
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        else type(value).__name__
    )


def test_shape_of_the_json(real: dict[str, Any]) -> None:
    """The JSON has the fields and types that the page uses."""
    cells = {pass_: cell for row in real["modules"]["rows"] for pass_, cell in row["cells"].items()}
    report = real | {"verdict": sorted(real["verdict"]), "settings": sorted(real["settings"])}
    report["modules"] = real["modules"] | {"rows": [real["modules"]["rows"][0] | {"cells": cells}]}
    report["details"] = {
        "0": real["details"]["0"] | {"report": sorted(real["details"]["0"]["report"])}
    }
    text = json.dumps(
        {
            key: value if key in ("verdict", "settings") else shape(value)
            for key, value in report.items()
        },
        indent=1,
        sort_keys=True,
    )
    if os.environ.get("TORCHWHERE_REGENERATE"):
        GOLDEN.write_text(text + "\n")
    assert text + "\n" == GOLDEN.read_text()


# -- boxes made by hand ----------------------------------------------------------------------------


class Span(NamedTuple):
    """A module record: enter (+1) or exit (-1) of a module, on a thread."""

    sign: int
    module: str
    pass_: Pass = Pass.FORWARD
    thread: int = 0
    step: int = 0


def write(
    folder: Path,
    spans: list[Span],
    *,
    rank: int = 0,
    world: int = 1,
    ms: int = 1,
    records: int = 4096,
) -> Path:
    """Write a box of module records, `ms` milliseconds apart."""
    meta = {"rank": rank, "world_size": world, "started_ns": 1, "host": "node"}
    box = BoxWriter(folder / box_name(rank), meta=meta, records=records)
    for number, span in enumerate(spans):
        kind = Kind.MODULE_ENTER if span.sign > 0 else Kind.MODULE_EXIT
        module = box.intern(EntryType.MODULE, span.module)
        box.record(kind, 10**9 + number * ms * MS, span.pass_, 0, span.thread, span.step, module, 0)
    box.close()
    return folder


def times_in(path: Path) -> dict[tuple[str | None, str], tuple[int, ...]]:
    """Return the calls, and total and own milliseconds, of each module and pass."""
    box = read_box(path / box_name(0))
    times = module_times(box.records, None)
    assert times is not None
    keys = zip(
        map(box.name, times.modules), map(PASS_LABELS.__getitem__, times.passes), strict=True
    )
    return {
        key: (row[0], row[1] // MS, row[2] // MS)
        for key, row in zip(keys, times.numbers.T.tolist(), strict=True)
    }


def called(name: str, *inner: list[Span], **options: Any) -> list[Span]:
    return [
        Span(1, name, **options),
        *(span for spans in inner for span in spans),
        Span(-1, name, **options),
    ]


def test_time_of_nested_calls(tmp_path: Path) -> None:
    """The own time of a call excludes the calls inside it; passes are counted separately."""
    again = called("a", called("a.b", pass_=Pass.RECOMPUTE), pass_=Pass.RECOMPUTE)
    write(tmp_path, [*called("", called("a", called("a.b"), called("a.b"))), *again])
    assert times_in(tmp_path) == {
        ("", "forward"): (1, 7, 2),
        ("a", "forward"): (1, 5, 3),
        ("a.b", "forward"): (2, 2, 2),
        ("a", "recompute"): (1, 3, 2),
        ("a.b", "recompute"): (1, 1, 1),
    }


def test_time_of_calls_on_threads(tmp_path: Path) -> None:
    """Calls of different threads are paired separately, in any order of their records."""
    first, second = called("a", called("a.b")), called("a", called("a.b"), thread=1)
    second = [span._replace(thread=1) for span in second]
    write(tmp_path, [span for pair in zip(first, second, strict=True) for span in pair])
    assert times_in(tmp_path) == {("a", "forward"): (2, 12, 8), ("a.b", "forward"): (2, 4, 4)}


def test_time_of_a_module_inside_itself(tmp_path: Path) -> None:
    """The time of a module that is called inside itself, directly or not, is not counted twice; its
    own time is complete."""
    write(tmp_path, called("a", called("b", called("a")), called("a")))
    assert times_in(tmp_path) == {("a", "forward"): (3, 7, 5), ("b", "forward"): (1, 3, 2)}


def test_shape_inference_does_not_count(tmp_path: Path) -> None:
    """A call that only infers shapes counts neither as a call nor as time."""
    write(tmp_path, [*called("a", pass_=Pass.SHAPE_INFERENCE), *called("a")])
    assert times_in(tmp_path) == {("a", "forward"): (1, 1, 1)}


def test_time_of_incomplete_calls(tmp_path: Path) -> None:
    """A call that has not ended, or whose begin the ring has lost, has no time; the calls inside it
    have times."""
    spans = [*called("", called("a"), called("b")), Span(1, ""), *called("a"), Span(1, "b")]
    write(tmp_path, spans, records=len(spans) - 3)
    assert times_in(tmp_path) == {
        ("", "forward"): (1, 0, 0),
        ("a", "forward"): (1, 1, 1),
        ("b", "forward"): (2, 1, 1),
    }


def naive(spans: list[Span]) -> dict[tuple[str | None, str], tuple[int, ...]]:
    """Compute the times with a stack for each thread, one record at a time."""
    sums_by_key: dict[tuple[str | None, str], list[int]] = {}
    stacks: dict[int, list[list[Any]]] = {}
    for now, span in enumerate(spans):
        stack, key = stacks.setdefault(span.thread, []), (span.module, PASS_LABELS[span.pass_])
        sums = sums_by_key.setdefault(key, [0, 0, 0])
        if span.sign > 0:
            sums[0] += 1
            stack.append([key, now, 0])
            continue
        _, begun, inside = stack.pop()
        sums[1] += 0 if any(outer[0] == key for outer in stack) else now - begun
        sums[2] += now - begun - inside
        if stack:
            stack[-1][2] += now - begun
    return {key: tuple(sums) for key, sums in sums_by_key.items()}


@pytest.mark.parametrize("seed", range(4))
def test_time_of_any_calls(seed: int, tmp_path: Path) -> None:
    """For random calls on several threads, the times equal those of a stack for each thread."""
    dice = random.Random(seed)
    spans: list[Span] = []
    stacks: dict[int, list[Span]] = {0: [], 1: [], 2: []}
    for _ in range(600):
        thread = dice.choice(list(stacks))
        if stacks[thread] and dice.random() < 0.5:
            spans.append(stacks[thread].pop()._replace(sign=-1))
        else:
            span = Span(1, dice.choice("abcd"), dice.choice([Pass.FORWARD, Pass.RECOMPUTE]), thread)
            stacks[thread].append(span)
            spans.append(span)
    spans += [span._replace(sign=-1) for stack in stacks.values() for span in reversed(stack)]
    write(tmp_path, spans)
    assert times_in(tmp_path) == naive(spans)


def test_one_rank_without_steps_and_groups(tmp_path: Path) -> None:
    """The report on one process without steps and groups has its module calls, and nothing else."""
    model = Model()
    with torchwhere.watch(model, out=tmp_path, module_events=True):
        model(batch())
    report = report_json(report_on(tmp_path))
    assert (report["world_size"], report["ranks"]["state"], report["collectives"]) == (1, [0], [])
    assert (report["steps"]["steps"], report["steps"]["rows"], report["phases"]["rows"]) == (
        [],
        [],
        [],
    )
    assert report["modules"]["rows"][0]["cells"]["forward"]["calls"] == 1
    assert report["ranks"]["last"] == report["ranks"]["last_number"] == [None]


def test_without_module_events(tmp_path: Path) -> None:
    """If module times were not recorded, the report says how to record them."""
    make(Job(8, steps=2, records=256), tmp_path)
    section = report_json(report_on(tmp_path))["modules"]
    assert (section["has_time"], section["note"]) == (False, report_text.NO_TIMES)
    assert "--module-events" in report_text.NO_TIMES
    assert {cell["ms"] for row in section["rows"] for cell in row["cells"].values()} == {None}


def test_a_step_that_was_run_twice(tmp_path: Path) -> None:
    """If a step number occurs twice, the last one counts; a step that has not ended has no time."""
    box = BoxWriter(tmp_path / box_name(0), meta={"rank": 0, "world_size": 1}, records=64)
    for at, (kind, step) in enumerate(
        [("B", 7), ("E", 7), ("B", 8), ("E", 8), ("B", 7), ("E", 7), ("B", 9)]
    ):
        box.record(
            Kind.STEP_BEGIN if kind == "B" else Kind.STEP_END, 10**9 + at**2 * MS, 0, 0, 0, step
        )
    box.close()
    numbers, took = step_times(read_box(tmp_path / box_name(0)).records)
    assert (numbers.tolist(), (took // MS).tolist()) == ([7, 8], [9, 5])


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)
    elif isinstance(value, str):
        yield value


def test_hostile_names(tmp_path: Path) -> None:
    """Names are not changed, only cut at 300 characters: the page escapes them."""
    names = [
        "<script>alert(1)</script>",
        "\x1b[31mred\x1b[0m",
        "right\u202eleft",
        "two\nlines",
        "a" * 10_000,
    ]
    write(tmp_path, [span for name in names for span in called(name)], world=2)
    with BoxWriterOf(tmp_path, rank=1) as box:
        for name in names:
            box.record(
                Kind.NOTE,
                10**9,
                0,
                0,
                0,
                0,
                0,
                0,
                box.intern(EntryType.LINE, name),
                extra=box.text(json.dumps({"text": name})),
            )
    report = report_json(report_on(tmp_path))
    shown = [row["name"] for row in report["modules"]["rows"]]
    assert set(names[:4]) <= set(shown)
    assert "a" * 300 + "…" in shown
    assert [row["cells"][1] for row in report["log"]["rows"]] == [
        ["note", texts.cut(name)] for name in names
    ]
    assert max(map(len, texts_in(report | {"verdict": None}))) <= texts.MOST_CHARACTERS + 1


class BoxWriterOf:
    """A box of one of two ranks, which is closed at the end of the block."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._box = BoxWriter(
            folder / box_name(rank),
            meta={"rank": rank, "world_size": 2, "started_ns": 1},
            records=64,
        )

    def __enter__(self) -> BoxWriter:
        return self._box

    def __exit__(self, *_: object) -> None:
        self._box.close()


def test_files_of_logs(tmp_path: Path) -> None:
    """Lines of log files are side by side after the events; a rank without a file is not a
    difference."""
    write(tmp_path, called("a"), world=3)
    for rank in (1, 2):
        write(tmp_path, called("a"), rank=rank, world=3)
    (tmp_path / "log_rank_0.txt").write_text("begin\nloss 1.0\nend\n")
    (tmp_path / "log_rank_1.txt").write_text("begin\nloss 2.0\nskipped\nend\n")
    section = report_json(report_on(tmp_path))["log"]
    assert [
        (row["how"], [cell and cell[1] for cell in row["cells"]]) for row in section["rows"]
    ] == [
        (None, ["begin", "begin", None]),
        ("value", ["loss 1.0", "loss 2.0", None]),
        ("flow", [None, "skipped", None]),
        (None, ["end", "end", None]),
    ]
    assert section["first_difference"] == 2


def test_lost_notes_are_not_a_difference(tmp_path: Path) -> None:
    """Notes of steps that the ring of one rank has lost are shown, but not as a difference."""
    for rank, records in ((0, 64), (1, 16)):
        box = BoxWriter(
            tmp_path / box_name(rank), meta={"rank": rank, "world_size": 2}, records=records
        )
        for step in range(40):
            box.record(
                Kind.NOTE,
                10**9 + step,
                0,
                0,
                0,
                step,
                extra=box.text(json.dumps({"text": "saved"})),
            )
        box.close()
    rows = log({rank: read_box(tmp_path / box_name(rank)) for rank in (0, 1)}, {}).rows
    assert (len(rows), [row.step for row in rows if row.how]) == (40, [])
    assert [row.step for row in rows if row.cells[1] is None] == list(range(24))


def test_graphs(tmp_path: Path) -> None:
    """Each compiled graph has its count over ranks, its time, its first step and the reasons of its
    recompilations."""
    for rank in range(2):
        with BoxWriterOf(tmp_path, rank=rank) as box:
            for graph, step, because in (
                ("0/0", 0, None),
                ("0/10", 5, "size mismatch\nUser stack"),
                ("0/2", 4, None),
            ):
                fields = {"part": "forward"} | ({"because": because} if because else {})
                graph_id, extra = (
                    box.intern(EntryType.GRAPH, graph),
                    box.text(json.dumps({"x": 1})) and box.text(json.dumps(fields)),
                )
                box.record(
                    Kind.COMPILE_BEGIN, 10**9, 0, 0, 0, step, 0, 0, 0, 0, graph_id, 0, 0, extra
                )
                if graph != "0/2":
                    box.record(
                        Kind.COMPILE_END,
                        10**9 + (3 + rank) * MS,
                        0,
                        0,
                        0,
                        step,
                        0,
                        0,
                        0,
                        0,
                        graph_id,
                    )
    graphs = report_json(report_on(tmp_path))["graphs"]
    same = {"part": "forward", "rank": 0, "ranks": 2, "count": 2}
    assert graphs == [
        same | {"name": "0/0", "recompiles": 0, "reasons": [], "step": 0, "ms": 4.0},
        same | {"name": "0/2", "recompiles": 2, "reasons": [], "step": 4, "ms": None},
        same
        | {"name": "0/10", "recompiles": 10, "reasons": ["size mismatch"], "step": 5, "ms": 4.0},
    ]


# -- a thousand ranks ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Returns the boxes of a job, which are written once."""
    return made_once(tmp_path_factory.mktemp, records=256)


@pytest.fixture(scope="module")
def large(made: Made) -> dict[str, Any]:
    return report_json(report_on(made("missing")))


def test_ranks_of_a_large_job(large: dict[str, Any]) -> None:
    """Every column has an item for each rank; the culprit is marked; each rank has a group in all
    three dimensions."""
    ranks_of_job = large["ranks"]
    names = (
        "rank",
        "state",
        "step",
        "behind",
        "behind_calls",
        "place",
        "last",
        "last_number",
        "host",
        "pid",
        "age_ms",
    )
    assert {len(ranks_of_job[name]) for name in names} == {RANKS}
    states = [ranks_of_job["states"][state] for state in ranks_of_job["state"]]
    assert [rank for rank, state in enumerate(states) if state == "running"] == [VICTIM]
    assert ranks_of_job["behind_calls"][VICTIM] >= 1
    assert (
        ranks_of_job["places"][ranks_of_job["place"][VICTIM]]
        == "backward of layers.12.mlp.up, train.py:50"
    )
    assert len(ranks_of_job["hosts"]) == RANKS // 8
    groups = {mesh["name"]: len(mesh["groups"]) for mesh in ranks_of_job["meshes"]}
    assert groups == {"tp": RANKS // TP, "dp": 8 * TP, "pp": RANKS // 8}


def test_a_large_report_is_bounded(large: dict[str, Any]) -> None:
    """The report has a number per rank in each column, and otherwise a fixed number of rows."""
    assert len(json.dumps(large, separators=(",", ":"), allow_nan=False)) < 1_500_000
    assert len(large["collectives"]) == collectives.MOST_GROUPS
    assert large["more_groups"] > 1000
    assert all(
        len(group["matrix"]["ranks"]) <= collectives.MOST_RANKS for group in large["collectives"]
    )
    assert len(large["details"]) == 64
    assert str(VICTIM) in large["details"]
    assert len(large["steps"]["rows"]) == steps.MOST_ROWS
    assert sum(row["count"] for row in large["steps"]["rows"]) == RANKS
    assert (large["steps"]["rows"][1]["ranks"], large["log"]["ranks"][-1] < RANKS) == ("4-7", True)


def test_the_groups_of_a_large_job(large: dict[str, Any]) -> None:
    """The group of the verdict comes first, then a group of the culprit; the shown groups include
    every dimension."""
    first = large["collectives"][0]
    assert str(VICTIM) in first["group"]
    assert (
        first["rows"][-1]["arrived"],
        first["rows"][-1]["of"],
        first["rows"][-1]["skew_ms"],
    ) == (1, 2, None)
    assert VICTIM in (large["collectives"][1]["members"] or [VICTIM])
    assert {group["group"] for group in large["collectives"]} >= {"default", "tp", "dp"}
    world = next(group for group in large["collectives"] if group["group"] == "default")
    assert (world["members"], world["count"], world["size"]) == (None, RANKS, RANKS)
    assert f"arrival by the aligned clocks of {RANKS // 8} hosts" in world["window"]
    assert "the last of" in first["window"] or first["first"] == 0


def test_layers_fold_over_stages_and_rings_that_wrapped(large: dict[str, Any]) -> None:
    """Eight stages of four layers are one row, although every ring begins in the middle of a step and
    the last step is incomplete."""
    assert (
        "the rings of 1,024 ranks have wrapped: only calls that all rings still hold were compared"
        in large["missing"]
    )
    names = [row["name"] for row in large["modules"]["rows"]]
    assert "layers.0-31" in names
    row = next(row for row in large["modules"]["rows"] if row["name"] == "layers.0-31.mlp.down")
    assert (row["times"], row["ranks"], list(row["cells"])) == (32, RANKS, ["forward"])
    assert (
        row["cells"]["forward"]["bytes"] == row["cells"]["forward"]["collectives"] * 2 * 4096 * 8192
    )


def test_a_difference_is_marked(made: Made) -> None:
    """For a rank with another shape, the report lists the number, the ranks and the calls, marks the
    row, and puts the group first."""
    report = report_json(report_on(made("shape", ranks=64)))
    victim, first = VICTIM % 64, report["collectives"][0]
    assert (first["group"], victim in first["members"]) == ("tp", True)
    difference = first["first_difference"]
    assert (difference["in"], [cohort["count"] for cohort in difference["cohorts"]]) == (
        "signature",
        [TP - 1, 1],
    )
    assert difference["cohorts"][1]["ranks"] == [victim]
    assert "[4096, 8191]" in difference["cohorts"][1]["what"]
    assert [row["number"] for row in first["rows"] if row["differs"]] == [difference["number"]]
    assert {group["first_difference"] for group in report["collectives"][1:]} == {None}


def test_a_straggler_is_marked(made: Made) -> None:
    """A rank that is late in every step is named, and late in the matrix of its group."""
    report = report_json(report_on(made("straggler", ranks=64, steps=14, records=1024)))
    victim = VICTIM % 64
    assert report["steps"]["stragglers"] == [victim]
    group = next(
        group
        for group in report["collectives"]
        if group["group"] == "tp" and victim in group["members"]
    )
    late = group["matrix"]["ms"][group["matrix"]["ranks"].index(victim)]
    assert max(late) == pytest.approx(LATE_NS / MS, rel=0.05)
    assert {row["last_rank"] for row in group["rows"] if row["skew_ms"] > 20} == {victim}


def test_slow_ranks_without_waits(tmp_path: Path) -> None:
    """If ranks do not wait for each other, a slow rank is found by many slow steps, not by a single
    one."""
    for rank in range(4):
        box = BoxWriter(tmp_path / box_name(rank), meta={"rank": rank, "world_size": 4}, records=64)
        now = 10**9
        for step in range(12):
            box.record(Kind.STEP_BEGIN, now, 0, 0, 0, step)
            now += (50 if rank == 2 or (rank == 1 and step == 6) else 10) * MS
            box.record(Kind.STEP_END, now, 0, 0, 0, step)
        box.close()
    section = report_json(report_on(tmp_path))["steps"]
    assert (section["stragglers"], section["median_ms"]) == ([2], [10.0] * 6 + [30.0] + [10.0] * 5)
    assert [row["ms"][6] for row in section["rows"]] == [10.0, 50.0, 50.0, 10.0]


def test_clocks_of_hosts_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is five seconds ahead changes neither the skew nor the age of the ranks of its
    host."""
    of_rank = synthetic_boxes._meta

    def ahead(job: Job, rank: int) -> dict[str, Any]:
        meta = of_rank(job, rank)
        return meta | {"clock_offset_ns": meta["clock_offset_ns"] + 5000 * MS * (rank // 8 == 3)}

    monkeypatch.setattr(synthetic_boxes, "_meta", ahead)
    make(Job(64, steps=20, records=1024), tmp_path)
    report = report_json(report_on(tmp_path))
    world = next(group for group in report["collectives"] if group["group"] == "default")
    assert world["window"].endswith("arrival by the aligned clocks of 8 hosts")
    assert max(row["skew_ms"] for row in world["rows"]) < 1
    assert max(report["ranks"]["age_ms"]) < 100
    assert all(-1000 < event[0] <= 0.01 for event in report["details"]["27"]["events"])


def test_too_many_hosts_to_align(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With too many hosts to align, wall clocks are compared, and the window says so."""
    monkeypatch.setattr(host_clocks, "MOST_HOSTS", 7)
    make(Job(64, steps=2, records=256), tmp_path)
    world = next(
        group
        for group in report_json(report_on(tmp_path))["collectives"]
        if group["group"] == "default"
    )
    assert world["window"].endswith("the wall clocks of 8 hosts, not aligned: they add to the skew")


def test_workers_give_the_same_report(made: Made) -> None:
    """A report from boxes that workers read equals one from boxes read in this process."""
    folder = made("missing")

    def report(processes: int) -> str:
        run, job_calls, digests = load_calls_with(Digest, folder, processes=processes)
        verdict = diagnose_run(run, {}, stall_s=10, job_calls=job_calls)
        made_at = datetime(2026, 1, 1, tzinfo=UTC)
        made_report = make_report(
            run, job_calls=job_calls, verdict=verdict, digests=digests, made_at=made_at
        )
        return json.dumps(made_report.to_dict())

    assert report(2) == report(0)


def test_a_report_without_digests(made: Made) -> None:
    """Without digests the report has the data of the calls, and no steps."""
    run, job_calls = load_calls(made("missing", ranks=64))
    report = make_report(
        run, job_calls=job_calls, verdict=diagnose_run(run, {}, stall_s=10, job_calls=job_calls)
    )
    assert isinstance(report, Report)
    assert (report.steps.rows, report.phases.ms, report.modules.has_time) == ((), (), False)
    assert len(report.ranks.rank) == 64
    assert report.modules.rows
    assert repr(report) == f"<Report on 64 ranks: {report.headline}>"


def test_work_is_linear_in_ranks(made: Made) -> None:
    """Four times as many ranks take at most 4.4 times as many function calls."""
    work = {}
    for count in (256, RANKS):
        profile = cProfile.Profile()
        folder = made("missing", ranks=count)
        run, job_calls, digests = load_calls_with(Digest, folder, processes=0)
        verdict = diagnose_run(run, {}, stall_s=10, job_calls=job_calls)
        profile.runcall(make_report, run, job_calls=job_calls, verdict=verdict, digests=digests)
        work[count] = int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    assert work[RANKS] / work[256] < 1.1 * RANKS / 256, work


def test_progress_is_reported(made: Made) -> None:
    """`on_progress` gets the number of boxes read so far, and of all."""
    calls: list[tuple[int, int]] = []
    report_on(made("missing"), on_progress=lambda done, of: calls.append((done, of)))
    assert calls[-1] == (RANKS, RANKS)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


# -- what is missing or damaged --------------------------------------------------------------------


def test_damaged_boxes(made: Made, tmp_path: Path) -> None:
    """The report lists a missing box, a box cut in its counters, one cut before its names, one of
    random bytes, and ignores other files."""
    shutil.copytree(made("missing", ranks=16), tmp_path / "run")
    boxes = tmp_path / "run"
    (boxes / "rank3.box").unlink()
    os.truncate(boxes / "rank5.box", 6000)
    os.truncate(boxes / "rank6.box", 30_000)
    (boxes / "rank7.box").write_bytes(random.Random(0).randbytes(5000))
    (boxes / "verdict.json").write_text("{")
    (boxes / "log_rank_x.txt").write_text("whose?")
    report = report_json(report_on(boxes))
    states = [report["ranks"]["states"][state] for state in report["ranks"]["state"]]
    assert [rank for rank, state in enumerate(states) if state == ranks.UNKNOWN] == [3, 5, 6, 7]
    assert report["ranks"]["places"][report["ranks"]["place"][3]] == ranks.UNKNOWN
    assert any(
        sentence.startswith("14 of 16 ranks are watched: no box of ranks 3, 7")
        for sentence in report["missing"]
    )
    assert any("rank 5: cut short" in sentence for sentence in report["missing"])
    assert (report["ranks"]["host"][3], report["ranks"]["pid"][3]) != (
        report["ranks"]["host"][2],
        report["ranks"]["pid"][2],
    )
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize("seed", range(6))
def test_any_damage(seed: int, folder: Path, tmp_path: Path) -> None:
    """Real boxes with random damage give a report or a clear message."""
    dice = random.Random(seed)
    shutil.copytree(folder, tmp_path / "run")
    for path in (tmp_path / "run").glob("*.box"):
        data = bytearray(path.read_bytes())
        used = len(data) if dice.random() < 0.3 else 200_000
        for _ in range(dice.choice([1, 30, 3000])):
            data[dice.randrange(min(used, len(data)))] = dice.randrange(256)
        path.write_bytes(data[: dice.randrange(len(data))] if dice.random() < 0.3 else data)
    try:
        report = report_json(report_on(tmp_path / "run"))
    except TorchwhereError as error:
        if not str(error).startswith("none of the 4 boxes in "):
            raise
        return
    json.dumps(report, allow_nan=False)
    assert {int(rank) for rank in report["details"]} <= set(report["ranks"]["rank"])


def test_boxes_of_an_earlier_run(made: Made, tmp_path: Path) -> None:
    """Boxes of another run in the folder are reported and not counted."""
    shutil.copytree(made("missing", ranks=16), tmp_path / "run")
    meta = {"rank": 40, "world_size": 64, "run_id": "before", "started_ns": 5, "host": "old"}
    BoxWriter(tmp_path / "run" / box_name(40), meta=meta, records=64).close()
    report = report_json(report_on(tmp_path / "run"))
    assert report["missing"][-1] == "1 box of earlier runs or restarts in the same folder: left out"
    assert (report["world_size"], "old" in report["ranks"]["hosts"]) == (16, False)


def test_nothing_to_read(tmp_path: Path) -> None:
    """An empty folder is an error that says so."""
    with pytest.raises(TorchwhereError, match=r"holds no black box \(\*\.box\)"):
        report_on(tmp_path)


def test_calls_of_whole_boxes(folder: Path) -> None:
    """Boxes in memory give the calls of all steps, and those within a range of steps."""
    run = torchwhere.read_run(folder)
    counted = list(calls_of_run(run).count_calls(dict.fromkeys(run.boxes, (1, 2))))
    assert sum(int(rank_counts.counts.sum()) for rank_counts in counted) == 4 * 3 * STEPS
    assert sum(int(rank_counts.within.sum()) for rank_counts in counted) == 4 * 3 * 2
