"""Layouts in black boxes: written once, read without torch, compared over ranks, and shown by
`torchwhere layout`."""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchwhere
from models import Model, batch
from rank_pool import Pool
from torchwhere.blackbox import stored_layouts as packing
from torchwhere.blackbox.file_format import ENTRY_MOST_BYTES, EntryType
from torchwhere.blackbox.file_names import box_name
from torchwhere.blackbox.reader import parse_box, read_box
from torchwhere.blackbox.run import read_run
from torchwhere.blackbox.stored_layouts import layouts_in, pack
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.cli import main
from torchwhere.core.model_layout import Branch, Layout, Mesh, Node, Param, Unit
from torchwhere.diagnose.layout.layouts import Layouts, compare, layouts
from torchwhere.hooks import layouts as layout_hook
from torchwhere.render.layout import layouts_lines

GOLDEN = Path(__file__).parent / "golden"


def assert_golden(name: str, text: str) -> None:
    path = GOLDEN / f"layouts-{name}.txt"
    if os.environ.get("TORCHWHERE_REGENERATE"):
        path.write_text(text)
    assert text == path.read_text()


# -- layouts made by hand: FSDP2 over dp, with tensor parallel -------------------------------------


def part(size: int, ranks: int, at: int) -> int:
    each = -(-size // ranks)
    return max(0, min(each, size - each * at))


def made(
    rank: int, *, dp: int = 2, tp: int = 2, rows: int = 10, stage: int | None = None, depth: int = 4
) -> Layout:
    """The layout of a rank as `inspect` would make it: uneven over dp, even over tp."""
    at_dp, at_tp = divmod(rank % (dp * tp), tp)
    first = rank - rank % (dp * tp)
    last = first + dp * tp - 1
    along_dp = (
        f"{first + at_tp}-{last - tp + 1 + at_tp}:{tp}"
        if dp > 2
        else f"{first + at_tp}, {first + at_tp + tp}"
    )
    along_tp = f"{first + at_dp * tp}-{first + at_dp * tp + tp - 1}"
    mesh = Mesh((dp, tp), ("dp", "tp"), "cuda", f"{first}-{last}", (along_dp, along_tp))
    held = part(rows, dp, at_dp)
    weight = Param(
        "weight",
        (rows, 8),
        (held, 8 // tp),
        "float32",
        rows * 32,
        held * 32 // tp,
        mesh=0,
        unit=0,
        device="cuda",
    )
    weight = dataclasses.replace(weight, placements=("Shard(0)", "Shard(1)"))
    fsdp = Unit(
        "FSDP2", 0, (), (("param", "bfloat16"),), "after forward", params=1, bytes=rows * 32
    )
    block = Node("Block", units=(fsdp,), params=(weight,))
    pipe = (
        ()
        if stage is None
        else (Unit("pipeline stage", settings=(("stage", stage), ("stages", 2))),)
    )
    root = Node(
        "Model",
        units=(*pipe, fsdp),
        params=(weight,),
        children=(Branch("layers", Node("List", children=(Branch("0", block, depth),))),),
    )
    return Layout(rank, dp * tp, (Branch("", root),), (mesh,))


def changed(layout: Layout, at: int, **facts: Any) -> Layout:
    """The same with one layer whose parameter differs."""
    root = layout.roots[0].node
    (layers,) = root.children
    (run,) = layers.node.children
    weight = dataclasses.replace(run.node.params[0], **facts)
    other = dataclasses.replace(run.node, params=(weight,))
    runs = (
        Branch("0", run.node, at),
        Branch(str(at), other),
        Branch(str(at + 1), run.node, run.count - at - 1),
    )
    blocks = dataclasses.replace(layers.node, children=runs)
    return dataclasses.replace(
        layout, roots=(Branch("", dataclasses.replace(root, children=(Branch("layers", blocks),))),)
    )


def write(folder: Path, found: Layout, *more: Layout) -> None:
    box = BoxWriter(
        folder / box_name(found.rank),
        meta={"rank": found.rank, "world_size": found.world_size},
        records=16,
    )
    for number, layout in enumerate((found, *more)):
        box.intern_many(EntryType.LAYOUT, pack(number, layout.to_dict()))
    box.close()


def text_of(found: Layouts) -> str:
    return "".join(
        "".join(text for text, _ in line) + "\n" for line in layouts_lines(found, width=None)
    )


# -- in the box ------------------------------------------------------------------------------------


def _train(folder: Path, change: bool) -> tuple[dict[str, Any], int]:
    from torch.distributed.fsdp import fully_shard

    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchwhere.watch(out=folder):
        for _ in range(3):
            model(batch()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if change:
            model.head.weight.requires_grad_(False)
        expected = torchwhere.layout(model).to_dict()
    dist.barrier()
    return expected, len(layouts_in(read_box(folder / box_name(dist.get_rank()))))


def test_a_watch_keeps_the_layout(two_ranks: Pool, tmp_path: Path) -> None:
    """After the first step the box has the layout of the model, found by itself and as `layout`
    gives it, and only once."""
    answers = two_ranks.run(_train, tmp_path, False)
    found = layouts(read_run(tmp_path))
    assert found.is_alike
    assert (found.missing, found.changed) == ([], [])
    for rank, (expected, count) in enumerate(answers):
        assert count == 1
        assert layouts_in(read_run(tmp_path).boxes[rank]) == [expected]
    assert [cohort.ranks for cohort in found.cohorts] == [[0, 1]]


def test_a_layout_that_changed(two_ranks: Pool, tmp_path: Path) -> None:
    """A layout that changed after the first step is written again at the end; the last one counts,
    with a remark."""
    answers = two_ranks.run(_train, tmp_path, True)
    assert [count for _, count in answers] == [2, 2]
    found = layouts(read_run(tmp_path))
    assert found.changed == [0, 1]
    assert found.cohorts[0].layout == Layout.from_dict(answers[0][0])
    assert (
        "the layout of ranks 0-1 changed after the first step; this is the last layout"
        in text_of(found)
    )


def _train_differently(folder: Path) -> None:
    model = Model()
    if dist.get_rank() == 1:  # a mistake that training itself does not notice
        model.layers[1].up.weight.requires_grad_(False)
        model.head.double()
    replicated = nn.parallel.DistributedDataParallel(model.layers[0])
    with torchwhere.watch(model, out=folder):
        replicated(batch()).sum().backward()
        torchwhere.step(1)
    dist.barrier()


def test_real_ranks_that_differ(two_ranks: Pool, tmp_path: Path) -> None:
    """Two real ranks with different parameters: the first difference names the parameter, the
    others follow."""
    two_ranks.run(_train_differently, tmp_path)
    found = layouts(read_run(tmp_path))
    assert not found.is_alike
    assert [str(difference) for difference in found.cohorts[1].differences] == [
        "layers.1.up.weight: requires_grad is False, elsewhere True",
        "head.weight: dtype is float64, elsewhere float32",
        "head.bias: dtype is float64, elsewhere float32",
    ]


def _train_on_a_mesh(folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model(width=10, depth=3)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    if dist.get_rank() == 3:
        model.head.adapter = nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchwhere.watch(model, out=folder):
        model(batch(width=10)).sum().backward()
        optimizer.step()
    dist.barrier()


def test_a_real_mesh_with_one_rank_that_differs(four_ranks: Pool, tmp_path: Path) -> None:
    """FSDP2 and tensor parallel over four ranks, one with an adapter that the others do not have:
    as docs/layout.md shows."""
    four_ranks.run(_train_on_a_mesh, tmp_path)
    assert_golden("mesh", text_of(layouts(read_run(tmp_path))))


def test_wrappers_around_the_watched_model(one_rank: None, tmp_path: Path) -> None:
    """The model is given to the watch before it is wrapped: the layout has the wrapper's unit all
    the same."""
    model = Model()
    with torchwhere.watch(model, out=tmp_path):
        replicated = nn.parallel.DistributedDataParallel(model)
        replicated(batch()).sum().backward()
        torchwhere.step(1)
    (data,) = layouts_in(read_box(tmp_path / "rank0.box"))
    assert [unit.kind for _, unit in Layout.from_dict(data).units()] == ["DDP"]


def test_a_job_without_steps(tmp_path: Path) -> None:
    """Without a step (inference) the layout is written when the watch ends; a loss without
    parameters is not a model."""
    with torchwhere.watch(out=tmp_path):
        nn.MSELoss()(Model()(batch()), torch.zeros(4, 8))
    model = Model()
    with torchwhere.watch(out=tmp_path):
        nn.MSELoss()(model(batch()), torch.zeros(4, 8))
    (data,) = layouts_in(read_run(tmp_path).boxes[0])
    assert Layout.from_dict(data) == torchwhere.layout(model)


def test_pipeline_stage_in_the_box(one_rank: None, tmp_path: Path) -> None:
    """A watched module that is a pipeline stage is known as one."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(Model(), 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss())
    with torchwhere.watch(out=tmp_path):
        schedule.step(batch(), target=batch())
    (data,) = layouts_in(read_run(tmp_path).boxes[0])
    assert [unit.kind for _, unit in Layout.from_dict(data).units()] == ["pipeline stage"]


def test_an_error_never_reaches_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A layout that cannot be read is logged once and not tried again; the job goes on."""
    tries = []

    def fails(models: object) -> Layout:
        tries.append(models)
        raise RuntimeError("no such attribute in this torch")

    monkeypatch.setattr(layout_hook, "layout_of", fails)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, logger="torchwhere"), torchwhere.watch(out=tmp_path):
        for _ in range(3):
            model(batch()).sum().backward()
            optimizer.step()
    assert len(tries) == 1
    (record,) = caplog.records
    assert (
        record.getMessage()
        == "torchwhere: the hook for layouts failed (RuntimeError: no such attribute in this"
        " torch). The training is not affected; after 3 failures torchwhere removes this hook."
    )


def test_nothing_is_taken_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch in memory stores no layout: no reader could get it."""
    monkeypatch.setattr(layout_hook, "layout_of", lambda models: pytest.fail("taken"))
    with torchwhere.watch():
        Model()(batch())
        torchwhere.step(1)


# -- the format ------------------------------------------------------------------------------------


def layouts_by_the_page(path: Path) -> list[Any]:
    """Written from docs/format.md alone: number, part, count and data with tabs between; base64,
    zlib, JSON."""
    parts: dict[int, dict[int, str]] = {}
    counts = {}
    for sort, payload in read_box(path).names.values():
        if sort == 12:
            number, at, count, data = payload.split("\t")
            parts.setdefault(int(number), {})[int(at)] = data
            counts[int(number)] = int(count)
    whole = [number for number in sorted(parts) if len(parts[number]) == counts[number]]
    data = ["".join(parts[number][at] for at in range(counts[number])) for number in whole]
    return [json.loads(zlib.decompress(base64.b64decode(one))) for one in data]


def test_large_layouts_are_cut_into_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout larger than an entry may be goes into several, and the page is enough to read it."""
    assert packing._PART_BYTES + 100 < ENTRY_MOST_BYTES
    monkeypatch.setattr(packing, "_PART_BYTES", 1000)
    found = torchwhere.layout(
        nn.ModuleDict({f"m{i * 7919 % 997}": nn.Linear(1, 1 + i) for i in range(500)})
    )
    assert len(pack(0, found.to_dict())) > 3
    write(tmp_path, found, made(0))
    assert layouts_by_the_page(tmp_path / "rank0.box") == layouts_in(
        read_box(tmp_path / "rank0.box")
    )
    assert layouts_in(read_box(tmp_path / "rank0.box"))[0] == found.to_dict()
    assert Layout.from_dict(layouts_in(read_box(tmp_path / "rank0.box"))[0]) == found


def test_damaged_layouts_are_left_out(tmp_path: Path) -> None:
    """A part that is missing, cut or made up loses that layout and no other, and never raises."""
    box = BoxWriter(tmp_path / "rank0.box", meta={"rank": 0, "world_size": 1}, records=16)
    (good,) = pack(1, made(0).to_dict())
    fields = good.split("\t")
    wrong = [
        "",
        "x",
        "1\t2\t3",
        "0\t0\t2\tabc",
        "2\t0\t1\t" + fields[3][:-8],
        "3\t0\t1\t!!!",
        "-1\t0\t1\t",
        "²\t0\t1\t",
    ]
    wrong += [
        f"4\t0\t1\t{base64.b64encode(zlib.compress(text)).decode()}"
        for text in (b"[1]", b"{", b"\xff")
    ]
    box.intern_many(EntryType.LAYOUT, [*wrong, good])
    box.close()
    assert layouts_in(read_box(tmp_path / "rank0.box")) == [made(0).to_dict()]
    data = (tmp_path / "rank0.box").read_bytes()
    assert layouts_in(parse_box(data[:-20])) == []


# -- comparing -------------------------------------------------------------------------------------


def test_differences_by_design_are_not_counted() -> None:
    """Uneven shards and the ranks of groups differ by design: the layouts are equal, with a
    remark."""
    found = compare(made(rank, rows=9) for rank in range(4))
    assert found.is_alike
    assert [cohort.ranks for cohort in found.cohorts] == [[0, 1, 2, 3]]
    assert found.expected == [
        "the groups along dp have different ranks: 0, 2; 1, 3",
        "the groups along tp have different ranks: 0-1; 2-3",
        "5 parameters are not sharded evenly: weight is [5, 4] on ranks 0-1; [4, 4] on ranks 2-3",
    ]
    assert (found.disagreements, found.remarks) == ([], [])


def test_what_must_not_differ_is_found() -> None:
    """A rank whose dtype differs in one layer is a cohort of its own, with that parameter as the
    first difference."""
    found = compare(
        changed(made(rank), 2, dtype="bfloat16") if rank == 3 else made(rank) for rank in range(4)
    )
    assert not found.is_alike
    assert [cohort.ranks for cohort in found.cohorts] == [[0, 1, 2], [3]]
    (difference,) = found.cohorts[1].differences
    assert str(difference) == "layers.2.weight: dtype is bfloat16, elsewhere float32"
    assert difference.to_dict() == {
        "where": "layers.2.weight",
        "what": "dtype",
        "here": "bfloat16",
        "there": "float32",
    }


BOTH = "Shard(0), Shard(1) (dp=2 x tp=2 on cuda)"
SAID_OF_PARAMETERS = [
    ({"shape": (11, 8)}, "weight: shape is [11, 8], elsewhere [10, 8]"),
    ({"requires_grad": False}, "weight: requires_grad is False, elsewhere True"),
    ({"unit": None}, "weight: managing unit is none, elsewhere number 0 around it"),
    ({"device": "cpu"}, "weight: device is cpu, elsewhere cuda"),
    ({"tied": "weight"}, "weight: tied to is weight, elsewhere nothing"),
    (
        {"placements": ("Shard(0)",)},
        f"weight: placements is Shard(0) (dp=2 x tp=2 on cuda), elsewhere {BOTH}",
    ),
    ({"mesh": None}, f"weight: placements is Shard(0), Shard(1) (no mesh), elsewhere {BOTH}"),
    ({"name": "kernel"}, "kernel: parameter is there, elsewhere missing"),
]


@pytest.mark.parametrize(("facts", "expected"), SAID_OF_PARAMETERS)
def test_differences_of_a_parameter(facts: dict[str, Any], expected: str) -> None:
    """Every fact of a parameter that should be the same is compared, and named."""
    found = compare([made(0), made(1), changed(made(2), 1, **facts)])
    assert str(found.cohorts[1].differences[0]) == f"layers.1.{expected}"


def swapped(layout: Layout, **facts: Any) -> Layout:
    root = dataclasses.replace(layout.roots[0].node, **facts)
    return dataclasses.replace(layout, roots=(Branch("", root),))


def test_differences_of_units_and_modules() -> None:
    """Units, their policies, classes, and modules that only some ranks have are compared too."""
    root = made(2).roots[0].node
    (fsdp,) = root.units

    def first(**facts: Any) -> str:
        return str(compare([made(0), made(1), swapped(made(2), **facts)]).cohorts[1].differences[0])

    assert first(cls="Net") == "<root>: class is Net, elsewhere Model"
    assert first(units=()) == "<root>: unit is none, elsewhere FSDP2"
    assert first(units=(Unit("DDP"),)) == "<root>: unit is DDP, elsewhere FSDP2"
    reshard = dataclasses.replace(fsdp, reshard="after backward")
    assert (
        first(units=(reshard,))
        == "FSDP2 unit <root>: reshard is after backward, elsewhere after forward"
    )
    half = dataclasses.replace(fsdp, dtypes=(("param", "float16"),))
    assert first(units=(half,)) == "FSDP2 unit <root>: param dtype is float16, elsewhere bfloat16"
    assert first(children=()) == "layers: module is missing, elsewhere List"
    more = (*root.children, Branch("extra", Node("Linear")))
    assert first(children=more) == "extra: module is Linear, elsewhere missing"
    deeper = made(2, depth=6).roots[0].node.children
    assert first(children=deeper) == "layers.4-5: module is Block, elsewhere missing"


def test_bytes_and_paddings_of_units_are_a_ranks_own() -> None:
    """The bytes and padding of a unit on a rank are not a difference; neither is the folding of its
    layers."""
    layout = made(1)
    padded = [
        dataclasses.replace(unit, local_bytes=7, padding_bytes=3, state_bytes=9)
        for unit in layout.roots[0].node.units
    ]
    other = swapped(changed(layout, 2, local_shape=(1, 4), local_bytes=16), units=tuple(padded))
    assert [cohort.ranks for cohort in compare([made(0), other]).cohorts] == [[0, 1]]


def test_pipeline_stages_are_cohorts_by_design() -> None:
    """Ranks are compared only within their stage; a remark lists the stages."""
    ranks = [made(rank, stage=rank // 4, depth=4 + rank // 4) for rank in range(8)]
    found = compare(ranks)
    assert found.is_alike
    assert [(cohort.stages, cohort.ranks) for cohort in found.cohorts] == [
        ((0,), [0, 1, 2, 3]),
        ((1,), [4, 5, 6, 7]),
    ]
    assert (
        found.expected[0]
        == "each pipeline stage has its own modules: stage 0 on ranks 0-3; stage 1 on ranks 4-7"
    )
    ranks[6] = changed(ranks[6], 1, dtype="float64")
    found = compare(ranks)
    assert [(cohort.ranks, len(cohort.differences)) for cohort in found.cohorts] == [
        ([0, 1, 2, 3], 0),
        ([4, 5, 7], 0),
        ([6], 1),
    ]


def test_ranks_that_disagree_about_a_group() -> None:
    """Who is in a group must fit together: a rank that is not in its own, and two that say
    different things, are found."""
    ranks = [made(rank) for rank in range(4)]
    mesh = dataclasses.replace(ranks[3].meshes[0], groups=("1, 3", "1, 3"))
    found = compare([*ranks[:3], dataclasses.replace(ranks[3], meshes=(mesh,))])
    assert not found.is_alike
    assert "along tp rank 2 records the group 2-3, but rank 3 records 1, 3" in found.disagreements
    mesh = dataclasses.replace(ranks[3].meshes[0], groups=("1, 3", "0-1"))
    found = compare([*ranks[:3], dataclasses.replace(ranks[3], meshes=(mesh,))])
    assert (
        "rank 3 records ranks 0-1 as its group along tp, but is not one of them"
        in found.disagreements
    )


def test_shards_that_differ_from_their_placements() -> None:
    """A shard that differs from its placements is a remark; it may be intended, and the layouts
    stay equal."""
    found = compare(
        changed(made(rank), 1, local_shape=(3, 4)) if rank == 2 else made(rank) for rank in range(4)
    )
    assert found.is_alike
    assert found.remarks == [
        "rank 2 holds [3, 4] of layers.1.weight [10, 8]; Shard(0), Shard(1) gives [5, 4]"
    ]


def test_ten_thousand_ranks() -> None:
    """Many ranks, each with its own shards and groups, are one cohort; the time is linear in their
    number."""

    def seconds(count: int) -> float:
        ranks = [made(rank, dp=count // 4, tp=4, rows=count * 3 + 1) for rank in range(count)]
        ranks[count // 2] = changed(ranks[count // 2], 1, dtype="float64")
        start = time.process_time()
        found = compare(ranks)
        assert [len(cohort.ranks) for cohort in found.cohorts] == [count - 1, 1]
        assert found.disagreements == []
        assert len(text_of(found).splitlines()) < 25
        return time.process_time() - start

    assert seconds(10_000) < 40 * min(seconds(1000) for _ in range(2))


def test_many_cohorts() -> None:
    """If every rank differs, the text stays short, and the JSON has everything."""
    found = compare(swapped(made(rank), cls=f"Model{rank}") for rank in range(200))
    assert len(found.cohorts) == 200
    assert len(found.to_dict()["cohorts"]) == 200
    assert len(text_of(found).splitlines()) < 60
    assert "and 179 more groups of ranks that differ; see --json" in text_of(found)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The boxes of four ranks; the last has another dtype in a layer, and one more thing."""
    for rank in range(3):
        write(tmp_path, made(rank, rows=9))
    last = changed(made(3, rows=9), 1, dtype="bfloat16", requires_grad=False)
    write(tmp_path, made(3, rows=9), last)
    return tmp_path


def test_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tree of the largest cohort, then the differing ranks with their first difference, then
    differences by design."""
    assert main(["layout", str(folder)]) == 0
    assert_golden("differ", capsys.readouterr().out)


def test_command_for_one_rank(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--rank` shows the layout as that rank has it."""
    assert main(["layout", str(folder), "--rank", "3"]) == 0
    assert_golden("rank-3", capsys.readouterr().out)


def test_command_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` is one object with everything: cohorts with their layouts and differences, and the
    remarks."""
    assert main(["layout", str(folder), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["is_alike"], found["changed"], found["missing"]) == (False, [3], [])
    assert [cohort["ranks"] for cohort in found["cohorts"]] == [[0, 1, 2], [3]]
    assert [one["what"] for one in found["cohorts"][1]["differences"]] == ["dtype", "requires_grad"]
    assert Layout.from_dict(found["cohorts"][0]["layout"]) == made(0, rows=9)
    assert any("not sharded evenly" in text for text in found["expected"])


def test_command_needs_no_torch(folder: Path) -> None:
    """The command works without torch."""
    code = (
        "import sys; sys.modules['torch'] = None\nfrom torchwhere.cli import"
        f" main\nsys.exit(main(['layout', {str(folder)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stderr) == (0, "")
    assert "not laid out alike" in done.stdout


def test_boxes_without_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of which no rank has a layout says when one is recorded; a rank without one is
    named."""
    for rank in range(2):
        BoxWriter(
            tmp_path / box_name(rank), meta={"rank": rank, "world_size": 2}, records=16
        ).close()
    assert main(["layout", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == f"torchwhere: {tmp_path} holds no layout. A layout is recorded at the end of the first step"
        " of a model with parameters, or at the end of the watch: this job ended earlier, or an"
        " older torchwhere recorded it.\n"
    )
    write(tmp_path, dataclasses.replace(made(1), world_size=2))
    assert main(["layout", str(tmp_path)]) == 0
    assert "no layout of rank 0" in capsys.readouterr().out


def test_a_layout_of_a_newer_writer(tmp_path: Path) -> None:
    """A layout with unknown keys counts as missing, with a remark, and nothing raises."""
    box = BoxWriter(tmp_path / "rank0.box", meta={"rank": 0, "world_size": 1}, records=16)
    box.intern_many(
        EntryType.LAYOUT,
        pack(0, {"rank": 0, "world_size": 1, "roots": [{"kind": "of another sort"}]}),
    )
    box.close()
    assert layouts(read_run(tmp_path)).missing == [0]


def test_the_page_shows_the_golden_texts() -> None:
    """docs/layout.md shows what the command prints."""
    page = (Path(__file__).parent.parent / "docs" / "layout.md").read_text()
    for name in ("layout-hsdp", "layouts-mesh"):
        assert (GOLDEN / f"{name}.txt").read_text() in page
