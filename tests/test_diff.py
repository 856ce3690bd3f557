"""Where ranks diverge: healthy runs of every kind have no difference, and planted differences are
found at their place."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchwhere
from models import Model, batch
from rank_pool import Pool
from synthetic_boxes import make
from synthetic_job import Job
from torchwhere import TorchwhereError, cli
from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import EntryType
from torchwhere.blackbox.file_names import box_name
from torchwhere.blackbox.run import read_run
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import Kind
from torchwhere.core.place import Pass
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.diff.cohorts import Cohorts, Comparison
from torchwhere.diagnose.diff.comparison import Diff, diff, find_logs
from torchwhere.diagnose.diff.log_lines import Stripper, patterns, skeleton, stripped
from torchwhere.diagnose.diff.logs import ranks_of, rejoined
from torchwhere.render.diff import diff_lines
from torchwhere.render.lines import as_text

GOLDEN = Path(__file__).parent / "golden"


def compared(folder: Path, **options: Any) -> Diff:
    return diff(torchwhere.read_run(folder), **options)


# -- real runs -------------------------------------------------------------------------------------


@contextmanager
def training(model: nn.Module, folder: Path) -> Iterator[Callable[[], None]]:
    """A watched training; yields a function that does one step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()

    def step() -> None:
        with torchwhere.phase("forward"):
            loss = model(batch(seed=rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with torchwhere.watch(model, out=folder):
        yield step
    dist.barrier()


def _ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(Model())


def _fsdp2() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def _hsdp() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _tensor_parallel() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def _train(kind: str, folder: Path) -> None:
    torch.manual_seed(0)
    make = {"ddp": _ddp, "fsdp2": _fsdp2, "hsdp": _hsdp, "tp": _tensor_parallel}[kind]
    with training(make(), folder) as step:
        for _ in range(3):
            step()


def _squared(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).pow(2).sum()


def _pipeline(folder: Path, stages: int, planted: bool = False) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh(
        "cpu", (stages, dist.get_world_size() // stages), mesh_dim_names=("pp", "dp")
    )
    at = mesh.get_local_rank("pp")
    torch.manual_seed(0)
    module = nn.ModuleDict({f"layer{at}": Model().layers[0]})
    module.forward = lambda x: module[f"layer{at}"](x)
    stage = PipelineStage(module, at, stages, torch.device("cpu"), group=mesh.get_group("pp"))
    runner = Schedule1F1B(stage, n_microbatches=4, loss_fn=_squared)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with torchwhere.watch(module, out=folder, module_events=True):
        for number in range(3):
            if at == 0:
                runner.step(batch(rows=8))
            else:
                runner.step(**({"target": batch(rows=8)} if at == stages - 1 else {}))
            if planted and dist.get_rank() == 3 and number == 1:
                torchwhere.note("a second look")
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()


def _ring(folder: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    with torchwhere.watch(out=folder):
        for number in range(3):
            torchwhere.step(number)
            block, other = torch.ones(4), torch.ones(4)
            sends = [
                dist.P2POp(dist.isend, block, (rank + 1) % world),
                dist.P2POp(dist.irecv, other, (rank - 1) % world),
            ]
            for work in dist.batch_isend_irecv(sends):
                work.wait()
    dist.barrier()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp", "tp"])
def test_healthy_runs_have_no_difference(four_ranks: Pool, tmp_path: Path, kind: str) -> None:
    """Ranks of DDP, FSDP2, HSDP and tensor parallel over data parallel do the same, each relative
    to its own groups."""
    four_ranks.run(_train, kind, tmp_path, checks_itself=True)
    found = compared(tmp_path)
    assert found.events is not None
    assert found.events.divergences == ()
    assert found.is_equal
    assert (found.events.cohorts, found.events.steps, found.events.remarks) == (
        ((0, 1, 2, 3),),
        (0, 3),
        (),
    )
    assert found.events.compared > 80


@pytest.mark.parametrize(
    ("stages", "said"), [(4, "rank 0; rank 1; rank 2; rank 3"), (2, "ranks 0-1; ranks 2-3")]
)
def test_stages_of_a_pipeline_differ_by_design(
    four_ranks: Pool, tmp_path: Path, stages: int, said: str
) -> None:
    """Pipeline stages are recognized by their messages and compared within each stage: no
    difference."""
    four_ranks.run(_pipeline, tmp_path, stages, checks_itself=True)
    found = compared(tmp_path)
    assert found.is_equal
    assert found.events is not None
    (remark,) = found.events.remarks
    assert (
        remark
        == f"{stages} pipeline stages, which differ by design (first in step 0: module_enter of"
        f" {said.partition(';')[0]}): {said}"
    )


def test_a_replica_that_differs_from_its_own_stage(four_ranks: Pool, tmp_path: Path) -> None:
    """In a pipeline with replicas, a rank that differs from the other replica of its stage is
    found."""
    four_ranks.run(_pipeline, tmp_path, 2, True, checks_itself=True)
    found = compared(tmp_path)
    assert found.events is not None
    (divergence,) = found.events.divergences
    assert (
        divergence.kind,
        divergence.step,
        [version.ranks for version in divergence.versions],
    ) == ("flow", 1, [(2,), (3,)])
    assert found.events.cohorts == ((0, 1), (2,), (3,))
    assert divergence.versions[0].entry is None
    assert divergence.minority.entry is not None
    assert divergence.minority.entry.text == "note a second look"


def test_a_ring_has_no_stages(four_ranks: Pool, tmp_path: Path) -> None:
    """Ranks that pass messages around a ring all do the same, each relative to its position."""
    four_ranks.run(_ring, tmp_path)
    found = compared(tmp_path)
    assert found.is_equal
    assert found.events is not None
    assert (found.events.cohorts, found.events.remarks) == (((0, 1, 2, 3),), ())


def _planted(folder: Path) -> None:
    """Rank 2 leaves a note after step 1; everything else is the same."""
    torch.manual_seed(0)
    with training(_ddp(), folder) as step:
        for number in range(3):
            step()
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == 2 and number == 1:
                torchwhere.note("overflow", scale=0.5)


def test_a_rank_with_an_extra_note(four_ranks: Pool, tmp_path: Path) -> None:
    """An extra note on one rank is found at its place; the steps after it are equal again."""
    four_ranks.run(_planted, tmp_path)
    found = compared(tmp_path)
    assert found.events is not None
    assert found.events.cohorts == ((0, 1, 3), (2,))
    (divergence,) = found.events.divergences
    assert [version.ranks for version in divergence.versions] == [(0, 1, 3), (2,)]
    assert (divergence.step, divergence.versions[0].entry) == (2, None)
    entry = divergence.minority.entry
    assert entry is not None
    assert entry.event is not None
    assert (entry.event.kind, entry.event.fields) == ("note", {"text": "overflow", "scale": 0.5})
    assert "they differ only in this step (1 of 4)" in divergence.remarks


# -- boxes written by hand -------------------------------------------------------------------------

WORLD = {
    "name": "0",
    "desc": "default_pg",
    "mesh_dim": None,
    "backend": "gloo",
    "ranks": [0, 1, 2, 3],
}


class Rank:
    """Writes the box of one rank."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        world: int = 4,
        records: int = 4096,
        groups: Iterable[Any] = (WORLD,),
    ) -> None:
        meta = {"rank": rank, "world_size": world, "started_ns": 0, "host": f"node{rank}"}
        self.box = BoxWriter(folder / box_name(rank), meta=meta, records=records)
        self.box.intern(EntryType.THREAD, "0\tMainThread")
        self.box.intern(EntryType.THREAD, "1\tloader")
        self.rank, self.step, self.numbers = rank, 0, dict[Any, int]()
        for group in groups:
            self.box.intern(EntryType.GROUP, json.dumps(group))
        self.record(Kind.STEP_BEGIN)

    def record(
        self,
        kind: Kind,
        *,
        thread: int = 0,
        line: int = 1,
        module: str | None = None,
        subject: int = 0,
        extra: int = 0,
    ) -> None:
        named = 0 if module is None else self.box.intern(EntryType.MODULE, module)
        where = self.box.intern(EntryType.LINE, f"train.py:{line}")
        pass_ = Pass.OUTSIDE if module is None else Pass.FORWARD
        self.box.record(
            kind, 1, pass_, 0, thread, self.step, named, 0, where, 0, subject, 0, 0, extra
        )

    def call(
        self,
        op: str = "all_reduce",
        shape: int = 8,
        *,
        group: str = "0",
        line: int = 5,
        module: str = "layer",
        **more: Any,
    ) -> Rank:
        fields = {
            "op": op,
            "group": group,
            "dtype": "float32",
            "shapes": [[shape]],
            "out_shapes": [],
            "bytes": 4 * shape,
            "peer": None,
        }
        number = self.numbers[group, more.get("peer"), op in ("send", "recv")] = (
            self.numbers.get((group, more.get("peer"), op in ("send", "recv")), -1) + 1
        )
        thread = more.pop("thread", 0)
        what = self.box.intern(EntryType.COLLECTIVE, json.dumps(fields | more))
        self.record(
            Kind.COLLECTIVE, thread=thread, line=line, module=module, subject=what, extra=number
        )
        return self

    def note(self, text: str, **options: Any) -> Rank:
        self.record(Kind.NOTE, extra=self.box.text(json.dumps({"text": text})), **options)
        return self

    def next_step(self) -> Rank:
        self.record(Kind.STEP_END)
        self.step += 1
        self.record(Kind.STEP_BEGIN)
        return self

    def end(self, reason: str = "exit 0") -> None:
        self.record(Kind.END, extra=self.box.text(json.dumps({"reason": reason})))
        self.box.close()

    def killed(self) -> None:
        self.box.close()


def events(folder: Path, **options: Any) -> Comparison:
    found = compared(folder, **options).events
    assert found is not None
    return found


def briefly(found: Comparison) -> list[Any]:
    """For each divergence: kind, step, and the entry and line of each version."""
    return [
        (
            divergence.kind,
            divergence.step,
            [
                (
                    version.ranks,
                    version.entry
                    and (
                        version.entry.text,
                        version.entry.event and version.entry.event.place.line,
                    ),
                )
                for version in divergence.versions
            ],
        )
        for divergence in found.divergences
    ]


def test_another_branch(tmp_path: Path) -> None:
    """A rank that takes another branch is found there, with the events before it; later steps are
    compared again."""
    for number in range(4):
        rank = Rank(tmp_path, number)
        for step in range(4):
            (
                rank.call(line=4).call("broadcast", line=9)
                if number == 1 and step == 2
                else rank.call(line=4).call(line=5)
            )
            if number == 3 and step == 3:
                rank.call(line=11)
            rank.call(line=6).next_step()
        rank.end()
    found = events(tmp_path)
    assert found.cohorts == ((0, 2), (1,), (3,))
    assert briefly(found) == [
        (
            "flow",
            2,
            [
                ((0, 2, 3), ("collective all_reduce", "train.py:5")),
                ((1,), ("collective broadcast", "train.py:9")),
            ],
        ),
        (
            "flow",
            3,
            [
                ((0, 2), ("collective all_reduce", "train.py:6")),
                ((3,), ("collective all_reduce", "train.py:11")),
            ],
        ),
    ]
    first, second = found.divergences
    assert [entry.event and entry.event.place.line for entry in first.before] == [
        "train.py:1",
        "train.py:1",
        "train.py:4",
    ]
    assert first.remarks == ("they differ only in this step (1 of 5)",)
    assert (
        second.remarks[0] == "in step 3 rank 3 had 4 collective events on default; ranks 0, 2 had 3"
    )


@pytest.mark.parametrize(
    "odd",
    [{"shape": 9}, {"dtype": "float16"}, {"reduce_op": "max"}, {"op": "reduce", "peer": 1}],
    ids=["shape", "dtype", "reduction", "root"],
)
def test_ranks_of_a_group_must_agree(tmp_path: Path, odd: dict[str, Any]) -> None:
    """Another shape, dtype, reduction or root on one rank of a collective is a difference, at its
    place."""
    usual = {"op": "reduce", "peer": 0} if "peer" in odd else {}
    for number in range(4):
        rank = Rank(tmp_path, number)
        for step in range(3):
            rank.call(**usual).call(
                **usual | odd if number == 2 and step == 1 else usual
            ).next_step()
        rank.end()
    (divergence,) = events(tmp_path).divergences
    assert (divergence.step, [version.ranks for version in divergence.versions]) == (
        1,
        [(0, 1, 3), (2,)],
    )
    assert divergence.kind == ("flow" if "peer" in odd else "group")
    assert divergence.minority.entry is not None
    assert divergence.minority.entry.event is not None
    place = divergence.minority.entry.event.place
    assert (place.step, place.pass_, place.module, place.line) == (
        1,
        "forward",
        "layer",
        "train.py:5",
    )


def test_groups_may_differ_from_each_other(tmp_path: Path) -> None:
    """Shapes must be equal within a group: sibling groups may have other data, and only members
    have a group's events."""
    tp = [
        {"name": f"tp{at}", "desc": "mesh_tp", "mesh_dim": "tp", "ranks": [2 * at, 2 * at + 1]}
        for at in (0, 1)
    ]
    extra = {"name": "x", "desc": "evaluators", "mesh_dim": None, "ranks": [0, 1]}
    for number in range(4):
        own = tp[number // 2]
        rank = Rank(tmp_path, number, groups=[WORLD, own, *([extra] if number < 2 else [])])
        rank.call(shape=8 + number // 2, group=str(own["name"]))
        if number < 2:
            rank.call("barrier", group="x")
        rank.call("all_to_all_single", shape=number).call(
            "gather", peer=0, out_shapes=[[8]] * 4 if number == 0 else []
        )
        rank.end()
    assert events(tmp_path).divergences == ()


def test_two_ends_of_a_message_must_agree(tmp_path: Path) -> None:
    """A message whose recv does not match its send is a difference; the lines of both ends may
    differ."""
    for number in range(2):
        rank = Rank(tmp_path, number, world=2, groups=[WORLD | {"ranks": [0, 1]}])
        for step in range(3):
            if number == 0:
                rank.call("send", peer=1, line=10)
            else:
                rank.call("recv", peer=0, line=20, shape=9 if step == 1 else 8)
            rank.next_step()
        rank.end()
    assert briefly(events(tmp_path)) == [
        (
            "group",
            1,
            [
                ((0,), ("collective send", "train.py:10")),
                ((1,), ("collective recv", "train.py:20")),
            ],
        )
    ]


def test_a_rank_that_ends_early(tmp_path: Path) -> None:
    """A rank that exits before the others diverges from them; a killed rank is compared up to its
    last event."""
    for number in range(4):
        rank = Rank(tmp_path, number)
        for _ in range({1: 2, 3: 2}.get(number, 3)):
            rank.call().call(line=6).next_step()
        if number == 1:
            rank.call()
            rank.killed()
        else:
            rank.end("exit 1" if number == 3 else "exit 0")
    found = events(tmp_path)
    assert found.cohorts == ((0, 1, 2), (3,))
    assert found.remarks == ("rank 1 has not ended: compared up to its last event",)
    (divergence,) = found.divergences
    assert (divergence.step, [version.ranks for version in divergence.versions]) == (
        2,
        [(0, 1, 2), (3,)],
    )
    assert divergence.minority.entry is None
    assert [entry.text for entry in divergence.minority.after] == ["end exit 1"]


def test_all_were_killed_at_once(tmp_path: Path) -> None:
    """Ranks that were killed in the middle of a step are not blamed for their position in it."""
    for number in range(4):
        rank = Rank(tmp_path, number)
        rank.call().call().next_step()
        for _ in range(number):
            rank.call()
        rank.killed()
    found = events(tmp_path)
    assert (found.divergences, found.remarks) == (
        (),
        ("ranks 0-3 have not ended: compared up to their last event",),
    )


def test_rings_that_have_gone_round(tmp_path: Path) -> None:
    """Only steps that are complete in all rings are compared, with a remark; earlier differences
    stay unseen."""
    for number in range(3):
        rank = Rank(tmp_path, number, records=64 if number == 1 else 4096)
        for step in range(40):
            rank.call(line=7 if number == 0 and step in (1, 35) else 5).next_step()
        rank.end()
    found = events(tmp_path)
    assert found.steps == (20, 40)
    assert found.remarks == (
        (
            "compared from step 20: rank 1 recorded no earlier step completely (--records keeps"
            " more)"
        ),
    )
    assert [(divergence.step, divergence.minority.ranks) for divergence in found.divergences] == [
        (35, (0,))
    ]


def test_no_step_in_common(tmp_path: Path) -> None:
    """If no step is complete in all rings, the collectives of a group are still compared, by their
    numbers."""
    for number in range(3):
        rank = Rank(tmp_path, number, records=32)
        for at in range(100):
            rank.call(shape=9 if number == 2 and at == 95 else 8)
        rank.end()
    found = events(tmp_path)
    assert found.remarks == (
        (
            "no step is complete on all ranks: only the collectives of each group were compared,"
            " by number (--records keeps more)"
        ),
    )
    assert [(divergence.kind, divergence.minority.ranks) for divergence in found.divergences] == [
        ("group", (2,))
    ]


def test_texts_that_were_overwritten(tmp_path: Path) -> None:
    """A note whose text was overwritten on one rank is not a different note: the comparison starts
    at the step after it."""
    for number in range(2):
        rank = Rank(tmp_path, number, world=2)
        for step in range(6):
            rank.note("a" * 60_000 if number == 1 and step < 5 else "a", line=3).next_step()
        rank.end()
    found = events(tmp_path)
    assert found.steps is not None
    assert 0 < found.steps[0] < 5
    assert found.remarks == (
        (
            f"compared from step {found.steps[0]}: rank 1 recorded no earlier step completely"
            " (--records keeps more)"
        ),
    )


def test_values_in_notes(tmp_path: Path) -> None:
    """Notes that differ only in values are one difference, and do not hide others."""
    for number in range(4):
        rank = Rank(tmp_path, number)
        for step in range(4):
            rank.note(
                f"[rank{number}] loss {0.5 if number < 3 else 0.25} on cuda:{number} after"
                f" {number} ms"
            )
            rank.call(line=7 if number == 1 and step == 3 else 5).next_step()
        rank.end()
    found = events(tmp_path)
    assert [(p.kind, p.step, [v.ranks for v in p.versions]) for p in found.divergences] == [
        ("value", 0, [(0, 1, 2), (3,)]),
        ("flow", 3, [(0, 2, 3), (1,)]),
    ]
    assert found.cohorts == ((0, 2), (1,), (3,))
    assert events(tmp_path, strip=[r"loss \S+"]).cohorts == ((0, 2, 3), (1,))
    assert events(tmp_path, strip=[r"loss \S+"], ignore=["collective"]).divergences == ()


def test_other_threads_and_compilations(tmp_path: Path) -> None:
    """Events of other threads and compilations have no fixed order: they are left out, with a
    remark."""
    for number in range(3):
        rank = Rank(tmp_path, number, world=3)
        for _ in range(number):
            rank.note("loaded", thread=1)
            rank.record(Kind.COMPILE_BEGIN)
        rank.call().call().call(line=6, thread=1)
        rank.end()
    found = events(tmp_path)
    assert found.divergences == ()
    assert found.remarks == (
        "left out 3 events of other threads, which have no fixed order",
        "graphs compiled: rank 1 1, rank 2 2; the others 0",
    )


def test_damaged_boxes(tmp_path: Path) -> None:
    """Boxes with bytes changed anywhere are compared as far as they can be read: never an
    exception."""
    example(tmp_path)
    whole = (tmp_path / box_name(1)).read_bytes()
    used = [at for at, byte in enumerate(whole) if byte]
    choose = random.Random(0)
    for _ in range(60):
        damaged = bytearray(whole)
        for at in choose.sample(used, 20):
            damaged[at] = choose.randrange(256)
        (tmp_path / box_name(1)).write_bytes(
            damaged[: choose.choice([len(whole), len(whole) - choose.randrange(5000)])]
        )
        assert compared(tmp_path).to_dict()
        assert torchwhere.phases(tmp_path).to_dict()


def test_only_some_ranks(tmp_path: Path) -> None:
    """With ranks given, the others are not compared."""
    for number in range(4):
        rank = Rank(tmp_path, number)
        rank.call(line=9 if number == 3 else 5)
        rank.end()
    assert events(tmp_path).cohorts == ((0, 1, 2), (3,))
    assert events(tmp_path, ranks={0, 2}).cohorts == ((0, 2),)


def test_many_ranks(tmp_path: Path) -> None:
    """Among 200 ranks in numbered groups of 8, the rank that differs is found, and ranks that each
    differ are separate cohorts."""
    for number in range(200):
        own = {
            "name": str(1000 + number // 8),
            "desc": "undefined",
            "mesh_dim": None,
            "ranks": list(range(number // 8 * 8, number // 8 * 8 + 8)),
        }
        rank = Rank(
            tmp_path,
            number,
            world=200,
            records=128,
            groups=[WORLD | {"ranks": list(range(200))}, own],
        )
        for step in range(10):
            for line in range(3):
                rank.call(group=str(own["name"]), line=line).call(
                    line=50 if (number, step, line) == (77, 6, 1) else 40
                )
            rank.next_step()
        if number >= 190:
            rank.note(f"{'abcdefghij'[number - 190]} is odd")
        rank.end()
    found = events(tmp_path)
    assert [(p.step, len(p.versions)) for p in found.divergences] == [(6, 2), (10, 11)]
    assert found.divergences[0].minority.ranks == (77,)
    assert len(found.cohorts) == 12
    assert found.compared == 200 * (1 + 10 * 8 + 1) + 10


def test_very_many_ranks(tmp_path: Path) -> None:
    """With many boxes only a few are in memory at a time; an event that a running job has
    overwritten is marked."""
    make(Job(288, steps=2, records=128, fault="shape", victim=3), tmp_path)
    before, seen = live_boxes(), []

    def tell(done: int, total: int) -> None:
        if done % 96 == 0:
            seen.append(live_boxes() - before)
        if done == total:  # all boxes have been read
            for rank in (3, 4):
                shutil.copy(tmp_path / "rank200.box", tmp_path / f"rank{rank}.box")

    found = diff(read_run(tmp_path, on_progress=tell)).events
    assert found is not None
    assert len(seen) >= 6
    assert max(seen) < 20
    told = [
        (version.ranks, version.entry)
        for divergence in found.divergences
        for version in divergence.versions
    ]
    assert {entry.text for ranks, entry in told if ranks[0] == 3 and entry} == {
        "overwritten since it was compared"
    }
    assert "overwritten since it was compared" in as_text(diff_lines(Diff(None, found), width=None))


def live_boxes() -> int:
    return sum(isinstance(one, Box) for one in gc.get_objects())


# -- logs ------------------------------------------------------------------------------------------


def write_logs(
    folder: Path, texts: Iterable[Iterable[str]], name: str = "log_rank_{}.txt"
) -> list[Path]:
    found = []
    for rank, lines in enumerate(texts):
        path = folder / name.format(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))
        found.append(path)
    return found


def logs(folder: Path, texts: Iterable[Iterable[str]], **options: Any) -> Comparison:
    found = diff(None, logs=write_logs(folder, texts), **options).logs
    assert found is not None
    return found


SAID = [
    "[2024-01-02 12:34:56,789] [INFO] [Rank {rank}] start on cuda:{rank} pid={rank}11",
    "name=layers.0.weight id={rank}3 shape=[4, 8] device=cuda:{rank} status=NOT_AVAILABLE",
    "took {rank}.5 ms, object at 0x7f{rank}a2, /tmp/tmpab{rank}2cd34/file",
    "[{rank}] done",
]


def test_equal_logs(tmp_path: Path) -> None:
    """Ids, devices, addresses, times, processes, ranks and temporary files may differ."""
    found = logs(tmp_path, [[line.format(rank=rank) for line in SAID] for rank in range(4)])
    assert (found.divergences, found.cohorts, found.compared) == ((), ((0, 1, 2, 3),), 16)


def test_another_line(tmp_path: Path) -> None:
    """Ranks diverge at the first different line, each cohort is compared further, and the smaller
    one is the minority."""
    usual = [f"step {number} ok" for number in range(8)]
    more = [*usual[:5], "gradient overflow, skipping", *usual[5:]]
    found = logs(tmp_path, [usual, more, usual, [*usual[:7], "saving", "saved"], usual])
    first, second = found.divergences
    assert [
        (version.ranks, version.entry and version.entry.text) for version in first.versions
    ] == [
        ((0, 2, 3, 4), "step 5 ok"),
        ((1,), "gradient overflow, skipping"),
    ]
    assert [(entry.number, entry.text) for entry in first.before] == [
        (3, "step 2 ok"),
        (4, "step 3 ok"),
        (5, "step 4 ok"),
    ]
    assert first.remarks == ("they agree again after 1 line of rank 1",)
    assert [version.ranks for version in second.versions] == [(0, 2, 4), (3,)]
    assert second.remarks == ("they do not agree again in the next 100 lines",)
    assert found.cohorts == ((0, 2, 4), (1,), (3,))


def test_a_log_that_ends(tmp_path: Path) -> None:
    """A log that is a prefix of the others ends where they go on; an empty one ends at once."""
    found = logs(tmp_path, [["a", "b", "c"], ["a", "b"], ["a", "b", "c"], []])
    assert [
        [(v.ranks, v.entry and v.entry.text) for v in divergence.versions]
        for divergence in found.divergences
    ] == [
        [((0, 1, 2), "a"), ((3,), None)],
        [((0, 2), "c"), ((1,), None)],
    ]


def test_other_values(tmp_path: Path) -> None:
    """Lines that differ only in values are reported once, separately from different lines."""
    texts = [[f"loss {rank + number / 10}" for number in range(5)] for rank in range(3)]
    texts[2].insert(3, "restarting")
    found = logs(tmp_path, texts)
    assert [
        (p.kind, p.versions[0].entry and p.versions[0].entry.number, len(p.versions))
        for p in found.divergences
    ] == [
        ("value", 1, 3),
        ("flow", 4, 2),
    ]
    assert logs(tmp_path, texts, strip=[r"loss \S+"], ignore=["^restarting$"]).divergences == ()


def test_lines_that_overwrite_themselves(tmp_path: Path) -> None:
    """Only the last state of a progress bar counts, as on a terminal; the number of updates does
    not."""
    bars = ["50%|## | 1/2 [00:01<00:01,  1.2it/s]", "100%|####| 2/2 [00:02<00:00,  1.1it/s]"]
    found = logs(
        tmp_path, [["a", "\r".join(bars)], ["a", "\r" + bars[1].replace("1.1", "3.4") + "\r"]]
    )
    assert found.divergences == ()


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    """A log may contain any bytes."""
    paths = write_logs(tmp_path, [["same"], ["same"]])
    paths[0].write_bytes(b"same\n\xff\x00\n")
    paths[1].write_bytes(b"same\n\xfe\x1b[2J\n")
    found = diff(None, logs=paths).logs
    assert found is not None
    assert len(found.divergences) == 1
    lines = ["".join(text for text, _ in line) for line in diff_lines(Diff(found, None), width=60)]
    assert all(line.isprintable() for line in lines)


def test_whose_log_it_is(tmp_path: Path) -> None:
    """The rank is the number after `rank`, else the only number in which the names differ."""
    assert ranks_of([Path("run7/rank_0.log"), Path("run7/rank_12.log")]) == {
        0: Path("run7/rank_0.log"),
        12: Path("run7/rank_12.log"),
    }
    assert list(ranks_of([Path(f"job5/attempt_0/{rank}/stdout.log") for rank in (0, 1, 10)])) == [
        0,
        1,
        10,
    ]
    with pytest.raises(
        TorchwhereError,
        match=r"^cannot find the rank of a\.log: the file names must differ in one number",
    ):
        ranks_of([Path("a.log"), Path("b.log")])
    with pytest.raises(
        TorchwhereError, match=r"^two logs of rank 1: rank1\.out and rank1\.err\. Choose with"
    ):
        ranks_of([Path("rank1.out"), Path("rank1.err")])


def test_where_logs_are(tmp_path: Path) -> None:
    """Logs are those in the run's folder, those of another folder, or those of a pattern."""
    write_logs(tmp_path, [["a"]] * 2)
    write_logs(tmp_path / "elastic", [["a"]] * 3, "{}/stdout.log")
    assert [path.name for path in find_logs(tmp_path, None)] == ["log_rank_0.txt", "log_rank_1.txt"]
    assert len(find_logs(tmp_path, str(tmp_path / "elastic"))) == 3
    assert len(find_logs(tmp_path, str(tmp_path / "elastic" / "*" / "*.log"))) == 3
    assert find_logs(tmp_path / "elastic", None) == []
    with pytest.raises(TorchwhereError, match=r"^--logs .*nothing\*: there is no such file$"):
        find_logs(tmp_path, str(tmp_path / "nothing*"))


# -- the parts -------------------------------------------------------------------------------------


MAY_DIFFER = [
    (
        "[rank3]: Traceback (most recent call last):",
        "[rank<n>]: Traceback (most recent call last):",
    ),
    (
        "local_rank=3 global_rank: 7 log_rank_2.txt",
        "local_rank=<n> global_rank: <n> log_rank_<n>.txt",
    ),
    ("param id=140 ids", "param id=<n> ids"),
    ("<Linear at 0x7f3a> on cuda:1, gpu 2", "<Linear at <address>> on cuda:<n>, gpu <n>"),
    ("2024-01-02T03:04:05.678Z and 03:04:05", "<time> and <time>"),
    ("Tue Jan  2 03:04:05 2024: ok", "<time>: ok"),
    ("I0102 03:04:05.678901 4242 reducer.cpp:12] x", "<time> reducer.cpp:12] x"),
    ("node1:123:456 [0] NCCL INFO ring", "<process> NCCL INFO ring"),
    ("took 12.5 ms, 3s, 1h2m3s, 1.5 seconds", "took <n>, <time>, <time>, <time>"),
    ("step_time=0.25 samples 4", "step_time=<n> samples 4"),
    ("12.5 samples/sec, 3.1s/it", "<time>, <time>"),
    ("tcp://10.0.0.12:29500 localhost:1234 port 80", "tcp://<host> <host> port <n>"),
    ("/tmp/abc123/model.pt tmpx1y2z3w4", "<tmp>/model.pt <tmp>"),
    ("run 123e4567-e89b-12d3-a456-426614174000", "run <id>"),
    ("at 1700000000.25 and 1700000000", "at <time> and <time>"),
    # these stay: names, versions, shapes, values, code lines
    (
        "layers.0.weight torch 2.13.0 [4, 8] loss 0.5 train.py:12 0:10",
        "layers.0.weight torch 2.13.0 [4, 8] loss 0.5 train.py:12 0:10",
    ),
]


def test_what_may_differ() -> None:
    """Each kind of text that may differ becomes a placeholder; everything else stays."""
    assert [stripped(text) for text, _ in MAY_DIFFER] == [expected for _, expected in MAY_DIFFER]


def test_what_is_a_value() -> None:
    """Values are numbers that do not belong to a name, a version or a code line."""
    text = 'layers.0.w 2.13.0 loss -0.5e-3 nan [4, 8] 5% train.py:12 File "a.py", line 3, x1'
    assert (
        skeleton(text) == 'layers.0.w 2.13.0 loss # # [#, #] #% train.py:12 File "a.py", line 3, x1'
    )


def test_the_rank_and_host_of_a_line() -> None:
    """A rank's own number before its lines, and its host, may differ; other numbers there may
    not."""
    strip = Stripper(3, "node-17", patterns([r"loss=\S+"]))
    assert strip("[3] hello from node-17: loss=0.5") == "[<n>] hello from <host>: <->"
    assert strip("3: hello") == "<n>: hello"
    assert strip("[4] hello") == "[4] hello"
    with pytest.raises(
        ValueError,
        match=(
            r"^'\(' is not a regular expression: missing \), unterminated subpattern at position 0$"
        ),
    ):
        patterns(["("])


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Nd", "Cc"]), max_size=20)
PIECES = st.lists(
    st.one_of(
        WORDS,
        st.sampled_from(
            [
                "rank 3",
                "id=5",
                "cuda:1",
                "0x1f",
                "12:30:00",
                "3.5 ms",
                "took 5",
                "/tmp/x",
                "1700000000",
                "10.0.0.1",
                " ",
                "7",
            ]
        ),
    ),
    max_size=8,
).map(" ".join)


@settings(max_examples=300, deadline=None)
@given(text=PIECES)
def test_stripping_twice_changes_nothing(text: str) -> None:
    """Stripping is idempotent, for any text around it; the same holds for values."""
    once = stripped(text)
    assert stripped(once) == once
    assert skeleton(skeleton(once)) == skeleton(once)


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.sampled_from(["loss", "step", "ok:", "x"]), max_size=4),
    a=st.integers(0, 10**6),
    b=st.integers(0, 10**6),
)
def test_ids_never_matter_and_values_always_do(words: list[str], a: int, b: int) -> None:
    """Texts that differ only in ids are equal; texts that differ in a value are not equal, but
    match without values."""
    text = " ".join([*words, "id={} on cuda:{} rank {} value [{}]"])
    assert stripped(text.format(a, a, a, 1)) == stripped(text.format(b, b, b, 1))
    one, other = stripped(text.format(1, 1, 1, a)), stripped(text.format(1, 1, 1, b))
    assert (one == other) == (a == b)
    assert skeleton(one) == skeleton(other)


@settings(max_examples=200, deadline=None)
@given(places=st.lists(st.dictionaries(st.integers(0, 7), st.integers(0, 2)), max_size=8))
def test_cohorts_are_only_split(places: list[dict[int, int]]) -> None:
    """Every rank is in one cohort; cohorts are split only where ranks have different items, and
    never merged."""
    cohorts, parted = Cohorts([range(8)]), set()
    for place in places:
        before = {rank: cohort for cohort in cohorts.all for rank in cohort}
        told = cohorts.split(place)
        after = {rank: cohort for cohort in cohorts.all for rank in cohort}
        assert sorted(after) == list(range(8))
        for one in range(8):
            for other in range(one):
                if one in place and other in place and place[one] != place[other]:
                    parted.add((one, other))
                assert before[one] == before[other] or after[one] != after[other]
        for versions in told:
            assert [len(version) for version in versions] == sorted(
                map(len, versions), reverse=True
            )
    assert all(after[one] != after[other] for one, other in parted) if places else not parted


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_rejoined_logs(one: list[str], other: list[str]) -> None:
    """Two equal consecutive lines in both logs, after the fewest skipped lines; None without
    any."""
    pairs = [
        (a, b)
        for a in range(len(one) - 1)
        for b in range(len(other) - 1)
        if one[a : a + 2] == other[b : b + 2]
    ]
    found = rejoined(one, other)
    assert found == (None if not pairs else found)
    assert found is None or (found in pairs and sum(found) == min(map(sum, pairs)))


def test_ranks_as_text() -> None:
    """Consecutive ranks are folded, and very long lists are cut."""
    assert ranks_phrase([3]) == "rank 3"
    assert ranks_phrase([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert ranks_phrase(range(0, 40, 2), most=8) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"


# -- the command -----------------------------------------------------------------------------------


def example(folder: Path) -> None:
    """Four ranks: rank 2 takes another branch in step 1 and notes it; rank 3 has another shape in
    step 2."""
    for number in range(4):
        rank = Rank(folder, number)
        for step in range(3):
            rank.call("all_gather_into_tensor", 1024, line=40, module="layers.0")
            rank.call("all_gather_into_tensor", 1024, line=40, module="layers.1")
            if number == 2 and step == 1:
                rank.note("loss is nan, skipping the step", line=44)
            else:
                rank.call(shape=4096 if number != 3 or step != 2 else 2048, line=42, module="head")
            rank.next_step()
        rank.end()
    usual = [
        "[INFO] [Rank {rank}] start, pid={rank}17",
        "step 0: loss 2.5",
        "step 1: loss 2.25",
        "step 2: loss 2.0",
        "done in {rank}.5 s",
    ]
    odd = [*usual[:2], "step 1: loss nan", "skipping step 1", *usual[3:]]
    write_logs(
        folder,
        [[line.format(rank=rank) for line in (odd if rank == 2 else usual)] for rank in range(4)],
    )


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["diff", *arguments])
    done = capsys.readouterr()
    return code, done.out, done.err


@pytest.mark.parametrize("width", [None, 80])
def test_how_it_looks(tmp_path: Path, width: int | None) -> None:
    """The whole report, in a pipe and in a narrow terminal."""
    example(tmp_path)
    found = diff(torchwhere.read_run(tmp_path), logs=find_logs(tmp_path, None))
    lines = ["".join(text for text, _ in line) for line in diff_lines(found, width=width)]
    assert width is None or max(map(len, lines)) <= width
    path, text = GOLDEN / f"diff-{width or 'pipe'}.txt", "\n".join(lines) + "\n"
    if os.environ.get("TORCHWHERE_REGENERATE"):
        path.write_text(text)
    assert text == path.read_text()


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 1 if ranks differ, 0 if not, and 2 with a sentence if there is nothing to
    compare."""
    example(tmp_path)
    code, out, err = run_command(capsys, str(tmp_path))
    assert (code, err) == (1, "")
    assert "rank 2 diverges from ranks 0-1, 3 in step 1" in out
    assert run_command(capsys, str(tmp_path), "--rank", "0", "--rank", "1")[0] == 0
    for arguments, said in {
        (
            "--rank",
            "0",
        ): "nothing to compare: there are neither boxes nor logs of two ranks or more",
        ("--rank", "0", "--rank", "9"): f"{tmp_path} has no box of rank 9; it has ranks 0-3",
        ("--logs", "nowhere/*"): "--logs nowhere/*: there is no such file",
        (
            "--strip",
            "(",
        ): "'(' is not a regular expression: missing ), unterminated subpattern at position 0",
    }.items():
        assert run_command(capsys, str(tmp_path), *arguments) == (2, "", f"torchwhere: {said}\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run_command(capsys, str(empty))[:2] == (2, "")


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` is one object with everything: cohorts, divergences with events and lines,
    remarks."""
    example(tmp_path)
    code, out, _ = run_command(capsys, str(tmp_path), "--json")
    found = json.loads(out)
    assert (code, found["equal"], sorted(found)) == (1, False, ["equal", "events", "logs"])
    assert (
        sorted(found["events"])
        == sorted(found["logs"])
        == ["cohorts", "compared", "partings", "ranks", "remarks", "steps"]
    )
    assert found["events"]["cohorts"] == [[0, 1], [2], [3]]
    divergence = found["events"]["partings"][0]
    assert sorted(divergence) == ["before", "kind", "remarks", "step", "versions"]
    assert [version["ranks"] for version in divergence["versions"]] == [[0, 1, 3], [2]]
    assert divergence["versions"][0]["entry"]["event"]["line"] == "train.py:42"
    assert found["logs"]["partings"][0]["versions"][1]["entry"] == {
        "number": 3,
        "text": "step 1: loss nan",
    }
    assert found == diff(torchwhere.read_run(tmp_path), logs=find_logs(tmp_path, None)).to_dict()


def test_logs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with logs and no box is compared by its logs; logs may lie elsewhere."""
    write_logs(tmp_path / "logs", [["a"], ["a"], ["b"]], "{}/stdout.log")
    code, out, _ = run_command(
        capsys, str(tmp_path), "--logs", str(tmp_path / "logs" / "*" / "stdout.log")
    )
    assert code == 1
    assert out.splitlines()[:2] == [
        "events: nothing to compare",
        "logs of 3 ranks, 3 lines: 2 cohorts: 0-1; 2",
    ]
    assert (
        run_command(capsys, str(tmp_path), "--logs", str(tmp_path / "logs"), "--ignore", "[ab]")[0]
        == 0
    )


def test_needs_no_torch(tmp_path: Path) -> None:
    """The comparison works without torch."""
    example(tmp_path)
    code = (
        f"import sys; from torchwhere.cli import main; code = main(['diff', {str(tmp_path)!r}]); "
    )
    code += "assert 'torch' not in sys.modules; sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search(
        r"^logs of 4 ranks, 21 lines: 2 cohorts: 0-1, 3; 2$", done.stdout, re.MULTILINE
    )
