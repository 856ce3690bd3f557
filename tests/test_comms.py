"""The tree of collectives: what is counted, what is folded, and how it looks. Boxes are written by
hand, and read as ever."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from torchwhere.blackbox.file_format import EntryType
from torchwhere.blackbox.file_names import box_name
from torchwhere.blackbox.run import read_run
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import Kind
from torchwhere.core.place import Pass
from torchwhere.diagnose.comms.outline import OutlineLine, outline
from torchwhere.diagnose.comms.sums import RunningSums, sums
from torchwhere.diagnose.comms.tree import Comms, comms
from torchwhere.render import text

GOLDEN = Path(__file__).parent / "golden"
WORLD = {"name": "0", "desc": "default_pg", "mesh_dim": None, "backend": "gloo", "ranks": [0, 1]}
GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"


class Call(NamedTuple):
    """A collective to be written into a box."""

    module: str | None
    pass_: Pass
    op: str
    beneficiary: Any = None
    size: int = 1000
    group: str = "0"
    step: int = 0
    line: str | None = None


def write(
    folder: Path,
    calls: Iterable[Call],
    *,
    rank: int = 0,
    groups: Iterable[dict[str, Any]] = (WORLD,),
    records: int = 4096,
) -> None:
    box = BoxWriter(
        folder / box_name(rank),
        meta={"rank": rank, "world_size": 2, "started_ns": 0},
        records=records,
    )
    for group in groups:
        box.intern(EntryType.GROUP, json.dumps(group))
    for number, call in enumerate(calls):
        module = 0 if call.module is None else box.intern(EntryType.MODULE, call.module)
        fields = {
            "op": call.op,
            "raw_op": "c10d::x",
            "group": call.group,
            "dtype": "float32",
            "bytes": call.size,
            "peer": None,
        }
        what = box.intern(EntryType.COLLECTIVE, json.dumps(fields))
        beneficiary = (
            0
            if call.beneficiary is None
            else box.intern(EntryType.BENEFICIARY, json.dumps(call.beneficiary))
        )
        line = 0 if call.line is None else box.intern(EntryType.LINE, call.line)
        box.record(
            Kind.COLLECTIVE,
            number,
            call.pass_,
            0,
            0,
            call.step,
            module,
            0,
            line,
            0,
            what,
            beneficiary,
            0,
            number,
        )
    box.close()


def read(folder: Path, calls: Iterable[Call], **options: Any) -> Comms:
    write(folder, calls, **options)
    return comms(read_run(folder))


def shown(found: Comms, *, width: int | None = None) -> list[str]:
    return ["".join(part for part, _ in line) for line in text.comms_lines(found, width=width)]


def labels(branch: OutlineLine) -> list[Any]:
    """The outline's labels, nested."""
    return [
        [inner.label, labels(inner)] if inner.branches else inner.label for inner in branch.branches
    ]


def transformer(depth: int, *, step: int = 0) -> list[Call]:
    """A step of FSDP2 with tensor parallel: each layer gathers itself, backward prefetches the
    layer before."""
    layers = [f"layers.{i}" for i in range(depth)]
    calls = [Call("", Pass.FORWARD, GATHER, "", 5000, step=step)]
    for name in layers:
        calls.append(Call(name, Pass.FORWARD, GATHER, name, 2000, step=step))
        calls += [
            Call(f"{name}.{leaf}", Pass.FORWARD, REDUCE, size=64, group="tp", step=step)
            for leaf in ("attn.wo", "mlp.down")
        ]
    for name, before in reversed(list(zip(layers, [None, *layers], strict=False))):
        if before:
            calls.append(Call(name, Pass.BACKWARD, GATHER, before, 2000, step=step))
        calls.append(Call(name, Pass.BACKWARD, SCATTER, name, 2000, step=step))
    return [*calls, Call(None, Pass.BACKWARD, SCATTER, "", 5000, step=step)]


TP = {"name": "tp", "desc": "mesh_tp", "mesh_dim": "tp", "backend": "gloo", "ranks": [0, 1]}


# -- counting --------------------------------------------------------------------------------------


def test_counts_bytes_ranks_and_steps(tmp_path: Path) -> None:
    """A counter holds the calls and bytes of all ranks, the ranks, and in how many steps of each it
    happened."""
    calls = [
        Call("head", Pass.FORWARD, REDUCE, size=size, step=step)
        for step in (3, 4, 4)
        for size in (100, 300)
    ]
    write(tmp_path, calls, rank=0)
    write(tmp_path, calls[:2], rank=1)
    found = comms(read_run(tmp_path))
    ((key, counter),) = found.root.children["head"].own.items()
    assert key == ("forward", REDUCE, "default", None)
    assert (counter.count, counter.bytes, counter.ranks, counter.steps, counter.sizes) == (
        8,
        1600,
        {0, 1},
        3,
        {100, 300},
    )
    assert (found.ranks, found.steps, found.groups, found.overwritten) == (
        {0, 1},
        (3, 4),
        {"default": 2},
        {},
    )


def test_only_the_ranks_asked_for(tmp_path: Path) -> None:
    """With ranks given, the others are not counted."""
    write(tmp_path, [Call(None, Pass.OUTSIDE, "barrier")], rank=0)
    write(tmp_path, [Call(None, Pass.OUTSIDE, "barrier")] * 5, rank=1)
    assert comms(read_run(tmp_path), ranks={1}).outside.total().count == 5


def test_outside_any_module_is_not_the_root(tmp_path: Path) -> None:
    """A collective in the root itself and one outside any module are counted apart."""
    found = read(
        tmp_path, [Call("", Pass.FORWARD, GATHER), Call(None, Pass.OUTSIDE, "barrier", size=0)]
    )
    assert [key.op for key in found.root.own] == [GATHER]
    assert [key.op for key in found.outside.own] == ["barrier"]


def test_groups_of_one_mesh_dimension_share_a_label(tmp_path: Path) -> None:
    """A group is called by its mesh dimension, else its description, else its name; siblings of a
    dimension are one."""
    groups = [
        {"name": "1", "mesh_dim": "tp", "ranks": [0, 1]},
        {"name": "2", "mesh_dim": "tp", "ranks": [2, 3]},
    ]
    groups += [{"name": "3", "desc": "undefined"}, {"name": "4", "desc": "mine"}]
    found = read(
        tmp_path,
        [Call("", Pass.FORWARD, REDUCE, group=name) for name in ("1", "2", "3", "4", "5")],
        groups=groups,
    )
    assert [key.group for key in found.root.own] == ["tp", "group 3", "mine", "group 5"]
    assert found.groups == {"tp": 2, "group 3": 0, "mine": 0, "group 5": 0}


def test_overwritten_events_are_reported(tmp_path: Path) -> None:
    """The result reports events that a full ring has lost."""
    found = read(tmp_path, [Call("", Pass.FORWARD, REDUCE)] * 100, records=16)
    assert found.root.total().count == 16
    assert found.overwritten == {0: 84}
    assert (
        shown(found)[-1]
        == "not counted, overwritten in the ring (see --records): 84 older events of rank 0"
    )


def test_no_collectives(tmp_path: Path) -> None:
    """A run without collectives says so."""
    assert shown(read(tmp_path, [])) == ["no collectives were recorded"]


def test_json_is_complete(tmp_path: Path) -> None:
    """The JSON form has every module by its full name, and what each collective is for,
    unshortened."""
    params = ["a.0.weight", "a.0.bias", "a.1.weight"]
    found = json.loads(
        json.dumps(
            read(tmp_path, [Call("a.0", Pass.BACKWARD, REDUCE, params, line="a.py:1")]).to_dict()
        )
    )
    layer = found["root"]["children"][0]["children"][0]
    entry = {"pass": "backward", "op": REDUCE, "group": "default", "for": params}
    assert layer == {
        "module": "a.0",
        "count": 1,
        "bytes": 1000,
        "collectives": [
            entry | {"count": 1, "bytes": 1000, "ranks": [0], "steps": 1, "lines": {"a.py:1": 1}}
        ],
        "children": [],
    }
    assert {key: found[key] for key in ("ranks", "steps", "groups", "overwritten")} == {
        "ranks": [0],
        "steps": [0, 0],
        "groups": {"default": 2},
        "overwritten": {},
    }


def test_counting_one_by_one_is_counting_at_once(tmp_path: Path) -> None:
    """Records counted as they are written give what the whole ring gives, over steps that come and
    go."""
    random = Random(0)
    calls = [
        Call(
            random.choice((None, "", "a", "a.b")),
            random.choice((Pass.FORWARD, Pass.BACKWARD)),
            random.choice((GATHER, REDUCE)),
        )
        for _ in range(500)
    ]
    calls = [
        call._replace(step=at // 50 % 4, line=f"a.py:{at % 3}", size=8 * (at % 2))
        for at, call in enumerate(calls)
    ]
    write(tmp_path, calls)
    box = read_run(tmp_path).boxes[0]
    running = RunningSums()
    for row in box.records:
        running.take(row.tobytes())
    assert running.total == 500
    at_once, one_by_one = sums(box.records), running.sums()
    assert (one_by_one.keys, one_by_one.counts, one_by_one.span) == (
        at_once.keys,
        at_once.counts,
        at_once.span,
    )
    assert one_by_one.key_index.tolist() == at_once.key_index.tolist()
    assert one_by_one.steps.tolist() == at_once.steps.tolist()


def test_views_of_a_run(tmp_path: Path) -> None:
    """Counts by module, pass, group and line, and the counts that a module issued or that
    serve it."""
    calls = [
        Call("a", Pass.FORWARD, GATHER, "b", line="x.py:1"),
        Call("a.c", Pass.BACKWARD, SCATTER, ["a.weight", "d.weight"], group="tp", line="x.py:2"),
        Call("ab", Pass.FORWARD, GATHER),
        Call(None, Pass.OUTSIDE, "barrier", size=0),
    ]
    found = read(tmp_path, calls, groups=[WORLD, TP])
    assert found.counts == {GATHER: 2, SCATTER: 1, "barrier": 1}
    assert found.by_module == {
        "a": {GATHER: 1},
        "a.c": {SCATTER: 1},
        "ab": {GATHER: 1},
        None: {"barrier": 1},
    }
    assert found.by_pass == {
        "forward": {GATHER: 2},
        "backward": {SCATTER: 1},
        "outside": {"barrier": 1},
    }
    assert found.by_group == {"default": {GATHER: 2, "barrier": 1}, "tp": {SCATTER: 1}}
    assert found.by_line == {
        "x.py:1": {GATHER: 1},
        "x.py:2": {SCATTER: 1},
        None: {GATHER: 1, "barrier": 1},
    }
    assert found.bytes == 3000
    assert found.only(module="a").counts == {GATHER: 1, SCATTER: 1}
    assert found.only(module="").counts == {GATHER: 2, SCATTER: 1}
    assert found.only(for_="b").counts == {GATHER: 1}
    assert found.only(for_="a").counts == {SCATTER: 1}
    assert found.only(pass_="outside", group="default").counts == {"barrier": 1}


# -- folding ---------------------------------------------------------------------------------------


def test_layers_that_do_the_same_are_one_line(tmp_path: Path) -> None:
    """Neighbouring layers are folded if they do the same, also when each serves the layer before
    it."""
    found = read(tmp_path, transformer(32), groups=[WORLD, TP])
    leaves = ["attn.wo", "mlp.down"]
    assert labels(outline(found.root)) == [["layers.0", leaves], ["layers.1-31", leaves]]
    folded = outline(found.root).branches[1]
    assert [
        (key.pass_, key.op, key.beneficiary, counter.count, counter.steps)
        for key, counter in folded.entries()
    ] == [
        ("forward", GATHER, "layers.1-31", 31, 1),
        ("backward", GATHER, "layers.0-30", 31, 1),
        ("backward", SCATTER, "layers.1-31", 31, 1),
    ]
    assert outline(found.root).total().count == found.root.total().count


@pytest.mark.parametrize(
    "odd",
    [
        Call("layers.2", Pass.FORWARD, REDUCE, size=999),
        Call("layers.2", Pass.RECOMPUTE, REDUCE),
        Call("layers.2", Pass.FORWARD, REDUCE, "layers.2"),
        Call("layers.2", Pass.FORWARD, REDUCE, group="tp"),
        Call("layers.2.more", Pass.FORWARD, REDUCE),
    ],
    ids=["size", "pass", "beneficiary", "group", "child"],
)
def test_a_layer_that_differs_stands_alone(tmp_path: Path, odd: Call) -> None:
    """A layer that differs in anything that is shown is not folded with its neighbours."""
    calls = [Call(f"layers.{i}", Pass.FORWARD, REDUCE) for i in (0, 1, 3, 4)]
    found = read(tmp_path, [*calls, odd])
    assert [branch.label for branch in outline(found.root).branches] == [
        "layers.0-1",
        "layers.2.more" if odd.module == "layers.2.more" else "layers.2",
        "layers.3-4",
    ]


def test_numbers_are_sorted_as_numbers(tmp_path: Path) -> None:
    """Layers come in the order of their numbers, wherever in a step the ring begins; a gap ends a
    fold."""
    found = read(tmp_path, [Call(f"{i}", Pass.FORWARD, REDUCE) for i in (11, 12, 0, 1, 2, 10)])
    assert labels(outline(found.root)) == ["0-2", "10-12"]


def test_folds_inside_folds(tmp_path: Path) -> None:
    """Equal stages of equal blocks are folded twice, and the span of what they are for with
    them."""
    calls = [
        Call(f"stages.{s}.blocks.{b}", Pass.BACKWARD, GATHER, f"stages.{s}.blocks.{b}")
        for s in (0, 1)
        for b in (0, 1, 2)
    ]
    (branch,) = outline(read(tmp_path, calls).root).branches
    assert (branch.label, branch.name, len(branch.nodes)) == (
        "stages.0-1.blocks.0-2",
        "stages.0-1.blocks.0-2",
        6,
    )
    ((key, counter),) = branch.entries()
    assert (key.beneficiary, counter.count) == ("stages.0-1.blocks.0-2", 6)


def test_parameters_are_shortened(tmp_path: Path) -> None:
    """The parameters of a bucket are shown as first, last and how many."""
    params = [f"layers.{i}.weight" for i in range(9)]
    lines = shown(read(tmp_path, [Call("layers.0", Pass.BACKWARD, REDUCE, params)]))
    assert lines[-1].endswith("layers.0.weight .. layers.8.weight (9 parameters)")


# -- looks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [None, 80, 60])
def test_looks(tmp_path: Path, width: int | None) -> None:
    """The tree of a tensor-parallel FSDP2 run looks as it did, in a pipe and on terminals of 80 and
    60 columns."""
    calls = [Call(None, Pass.OUTSIDE, "broadcast", size=size) for size in (16, 64)]
    calls += [call for step in range(3) for call in transformer(32, step=step)]
    write(
        tmp_path,
        [*calls, Call(None, Pass.OUTSIDE, "barrier", size=0, step=3)],
        rank=0,
        groups=[WORLD, TP],
    )
    write(tmp_path, calls, rank=1, groups=[WORLD, TP])
    lines = shown(comms(read_run(tmp_path)), width=width)
    assert width is None or max(map(len, lines)) <= width
    golden = GOLDEN / f"comms-{width or 'pipe'}.txt"
    if os.environ.get("TORCHWHERE_REGENERATE"):
        golden.write_text("\n".join(lines) + "\n")
    assert lines == golden.read_text().splitlines()


def test_hostile_names_stay_inert(tmp_path: Path) -> None:
    """Escape sequences, line breaks, direction marks and endless names in a program do nothing to
    the terminal."""
    evil = "\x1b]0;owned\x07\x1b[2J\r\n\u202eevil\u2066\x9b31m"
    groups = [{"name": "0", "desc": evil, "ranks": [0]}, TP]
    calls = [
        Call(evil, Pass.FORWARD, evil, evil),
        Call("x" * 100_000, Pass.FORWARD, REDUCE, ["y" * 5000] * 3, group="tp"),
    ]
    calls.append(Call(".".join("z" * 5000), Pass.FORWARD, REDUCE))
    lines = shown(read(tmp_path, calls, groups=groups))
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) < 5000
    assert len(lines) == 5  # the heading, the root, and one line each
    assert json.dumps(comms(read_run(tmp_path)).to_dict()).isascii()
    assert max(map(len, shown(comms(read_run(tmp_path)), width=80))) <= 80


def test_wide_characters_are_aligned_by_cells(tmp_path: Path) -> None:
    """Characters two cells wide move the columns by two."""
    from rich.cells import cell_len

    lines = shown(
        read(tmp_path, [Call("层", Pass.FORWARD, REDUCE), Call("ab", Pass.FORWARD, REDUCE)])
    )
    assert len({cell_len(line) for line in lines[-2:]}) == 1


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KB"),
        (99_940, "99.9 KB"),
        (516_000, "516 KB"),
        (999_600, "1.0 MB"),
        (3e15, "3000.0 TB"),
    ],
)
def test_amount(nbytes: float, said: str) -> None:
    """Bytes are printed with a unit and at most three digits before the point."""
    assert text.amount(nbytes) == said
