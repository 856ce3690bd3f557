"""The attribution cases that need ranks: real processes over gloo, two unless the case needs
more."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchwhere
from models import Model, batch
from rank_pool import Pool

GLOO_HAS_ALL_TO_ALL = torch.__version__ >= "2.12"


def collectives(folder: Path) -> list[dict[str, Any]]:
    """What this rank recorded, as JSON gives it."""
    run = torchwhere.read_run(folder)
    box = run.boxes[dist.get_rank()]
    assert not box.problems
    assert box.counts.torn == 0
    return [event.to_dict() for event in box.events(kinds={"collective"})]


def brief(event: dict[str, Any], *keys: str) -> tuple[Any, ...]:
    return tuple(event[key] for key in keys)


def group_up() -> None:
    """All ranks' boxes are written before anybody reads: reading needs every rank's file to be
    there."""
    dist.barrier()


# -- C3 --------------------------------------------------------------------------------------------


def _all_kinds(folder: Path) -> list[dict[str, Any]]:
    import torch.distributed._functional_collectives as functional

    rank, world = dist.get_rank(), dist.get_world_size()
    peer = 1 - rank
    x, wide = torch.ones(4), torch.ones(4 * world)
    with torchwhere.watch(out=folder):
        dist.all_reduce(x, dist.ReduceOp.MAX)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, src=1)
        dist.reduce(x, dst=1)
        dist.all_gather([torch.empty(4) for _ in range(world)], x)
        dist.all_gather_into_tensor(torch.empty(4 * world), x)
        dist.reduce_scatter(torch.empty(4), [torch.ones(4) for _ in range(world)])
        dist.reduce_scatter_tensor(torch.empty(4), wide)
        dist.gather(x, [torch.empty(4) for _ in range(world)] if rank == 0 else None, dst=0)
        dist.scatter(
            torch.empty(4), [torch.ones(4) for _ in range(world)] if rank == 0 else None, src=0
        )
        dist.all_to_all_single(torch.empty(4 * world), wide)
        if GLOO_HAS_ALL_TO_ALL:
            dist.all_to_all(
                [torch.empty(2) for _ in range(world)], [torch.ones(2) for _ in range(world)]
            )
        dist.barrier()
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=30))
        (dist.send if rank == 0 else dist.recv)(x, peer)
        works = [dist.isend(x, peer), dist.irecv(torch.empty(4), peer)]
        [work.wait() for work in works]
        ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.empty(4), peer)]
        [work.wait() for work in dist.batch_isend_irecv(ops)]
        dist.all_gather_object([None] * world, {"rank": rank})
        dist.broadcast_object_list([rank], src=0)
        with dist._coalescing_manager():
            dist.all_reduce(x)
            dist.all_reduce(wide)
        functional.all_reduce(x, "sum", dist.group.WORLD).sum()
        functional.all_gather_into_tensor_coalesced([x, wide], dist.group.WORLD)[0].sum()
        y = torch.ones(4, requires_grad=True)
        functional.all_gather_tensor_autograd(y, 0, dist.group.WORLD).pow(2).sum().backward()
        dist.all_reduce_coalesced([x, wide])
    group_up()
    return collectives(folder)


_ONE = [[4]]
_WORLD = [[4], [4]]


def test_c3_every_collective(two_ranks: Pool, tmp_path: Path) -> None:
    """Each c10d op is recorded once, with group, number, dtype, shapes, bytes, and peer where there
    is one."""
    first, _ = two_ranks.run(_all_kinds, tmp_path)
    expected = [
        # op, shapes, bytes, async, peer
        ("all_reduce", _ONE, 16, False, None),
        ("all_reduce", _ONE, 16, True, None),
        ("broadcast", _ONE, 16, False, 1),
        ("reduce", _ONE, 16, False, 1),
        ("all_gather", _ONE, 32, False, None),
        ("all_gather_into_tensor", _ONE, 32, False, None),
        ("reduce_scatter", _WORLD, 32, False, None),
        ("reduce_scatter_tensor", [[8]], 32, False, None),
        ("gather", _ONE, 32, False, 0),
        ("scatter", _WORLD, 32, False, 0),
        ("all_to_all_single", [[8]], 32, False, None),
        ("all_to_all", [[2], [2]], 16, False, None),
        ("barrier", [], 0, False, None),
        ("monitored_barrier", [], 0, False, None),
        ("send", _ONE, 16, False, 1),
        ("send", _ONE, 16, True, 1),
        ("recv", _ONE, 16, True, 1),
        ("send", _ONE, 16, True, 1),
        ("recv", _ONE, 16, True, 1),
        ("all_gather", [[1]], 16, False, None),  # the sizes of the objects
        ("all_gather", None, None, False, None),  # the objects
        ("broadcast", [[1]], 8, False, 0),
        ("broadcast", None, None, False, 0),
        ("all_reduce_coalesced", [[4], [8]], 48, False, None),
        ("all_reduce", _ONE, 16, True, None),
        ("all_gather_into_tensor_coalesced", [[4], [8]], 96, True, None),
        ("all_gather_into_tensor", _ONE, 32, True, None),
        ("reduce_scatter_tensor", [[8]], 32, True, None),
        ("all_reduce_coalesced", [[4], [8]], 48, False, None),
    ]
    if not GLOO_HAS_ALL_TO_ALL:
        expected = [row for row in expected if row[0] != "all_to_all"]
    assert [event["op"] for event in first] == [row[0] for row in expected]
    for event, (op, shapes, nbytes, is_async, peer) in zip(first, expected, strict=True):
        assert brief(event, "op", "async", "peer") == (op, is_async, peer)
        if shapes is not None:
            assert brief(event, "shapes", "bytes") == (shapes, nbytes)
        assert event["raw_op"].startswith("c10d::")
        assert (event["dtype"] is None) == ("barrier" in op)
        assert event["group_ranks"] == [0, 1]
        assert brief(event, "group_desc", "backend") == ("default_pg", "gloo")
        assert "test_conformance_ranks.py:" in event["line"]
    assert first[0]["reduce_op"] == "max"
    assert first[1]["reduce_op"] == "sum"
    assert "all_gather_object" in {event["api"] for event in first}
    assert first[-2]["pass"] == "backward"


def test_c3_numbers_match_between_ranks(two_ranks: Pool, tmp_path: Path) -> None:
    """The n-th collective of a group has the number n on every rank; messages are counted per pair
    and direction."""
    ranks = two_ranks.run(_all_kinds, tmp_path)
    streams = []
    for events in ranks:
        whole = [
            (e["number"], e["op"], e["shapes"], e["bytes"])
            for e in events
            if e["op"] not in ("send", "recv")
        ]
        start = whole[0][0]
        assert [number for number, *_ in whole] == list(range(start, start + len(whole)))
        streams.append(whole)
    same = [row[:2] for row in streams[0]]
    assert same == [row[:2] for row in streams[1]]
    sent = {
        rank: [e["number"] for e in events if e["op"] == "send"]
        for rank, events in enumerate(ranks)
    }
    received = {
        rank: [e["number"] for e in events if e["op"] == "recv"]
        for rank, events in enumerate(ranks)
    }
    assert sent == {0: [0, 1, 2], 1: [0, 1]}
    assert received == {0: [0, 1], 1: [0, 1, 2]}


def _late_watch(folder: Path) -> list[int]:
    """One rank begins to watch a collective later than the other."""
    x = torch.ones(1)
    if dist.get_rank() == 0:
        torchwhere.start(out=folder)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        torchwhere.start(out=folder)
    dist.all_reduce(x)
    torchwhere.stop()
    group_up()
    return [event["number"] for event in collectives(folder)]


def test_c3_ranks_that_begin_to_watch_at_different_moments_agree(
    two_ranks: Pool, tmp_path: Path
) -> None:
    """Numbers continue the group's own count, so a late watcher gives the same number to the same
    collective."""
    first, second = two_ranks.run(_late_watch, tmp_path)
    assert len(first) == 2
    assert first[1:] == second


def _groups(folder: Path) -> list[dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh

    before = dist.new_group([0, 1], group_desc="made before")
    with torchwhere.watch(out=folder):
        after = dist.new_group([0, 1], group_desc="made after")
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        dist.all_reduce(torch.ones(1), group=mesh.get_group("dp"))
        dist.all_reduce(torch.ones(1), group=mesh.get_group("tp"))
    group_up()
    found = list(torchwhere.read_run(folder).boxes[dist.get_rank()].groups().values())
    dist.destroy_process_group(before)
    dist.destroy_process_group(after)
    return found


def test_c3_group_table_is_complete(two_ranks: Pool, tmp_path: Path) -> None:
    """Groups are known whether made before or after the watch began, used or not, with ranks,
    backend and mesh dimension."""
    for rank, groups in enumerate(two_ranks.run(_groups, tmp_path)):
        by_desc = {group["desc"]: group for group in groups}
        assert {"default_pg", "made before", "made after", "mesh_tp"} <= set(by_desc)
        assert by_desc["mesh_tp"]["ranks"] == [rank]
        assert by_desc["mesh_tp"]["mesh_dim"] == "tp"
        assert [group["ranks"] for group in groups if group["mesh_dim"] == "dp"] == [[0, 1]]
        assert {group["backend"] for group in groups} == {"gloo"}


# -- C4, FSDP --------------------------------------------------------------------------------------


def _fsdp2(folder: Path) -> list[dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = Model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with torchwhere.watch(out=folder):
        model(batch().requires_grad_()).sum().backward()
    group_up()
    return collectives(folder)


def test_c4_fsdp2(two_ranks: Pool, tmp_path: Path) -> None:
    """An all-gather has the running module as issuer and the unit it gathers as beneficiary; a
    reduce-scatter its unit."""
    for events in two_ranks.run(_fsdp2, tmp_path):
        assert [brief(e, "op", "pass", "module", "for") for e in events] == [
            ("all_gather_into_tensor", "forward", "", ""),
            ("all_gather_into_tensor", "forward", "layers.0", "layers.0"),
            ("all_gather_into_tensor", "forward", "layers.1", "layers.1"),
            ("all_gather_into_tensor", "backward", "head", "layers.1"),
            ("all_gather_into_tensor", "backward", "layers.1.down", "layers.0"),
            ("reduce_scatter_tensor", "backward", "layers.1", "layers.1"),
            ("reduce_scatter_tensor", "backward", "layers.0", "layers.0"),
            ("reduce_scatter_tensor", "backward", "", ""),
        ]
        assert {e["certainty"] for e in events} == {"exact"}


def _fsdp1(folder: Path) -> list[dict[str, Any]]:
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    model = Model()
    for index, layer in enumerate(model.layers):
        model.layers[index] = Fsdp(layer, device_id=torch.device("cpu"), use_orig_params=True)
    wrapped = Fsdp(model, device_id=torch.device("cpu"), use_orig_params=True)
    with torchwhere.watch(out=folder):
        wrapped(batch()).sum().backward()
    group_up()
    return collectives(folder)


def test_c4_and_c11_fsdp1(two_ranks: Pool, tmp_path: Path) -> None:
    """FSDP1's wrappers leave nothing in names, and its gathers and reductions name their unit."""
    for events in two_ranks.run(_fsdp1, tmp_path):
        gathers = [e for e in events if e["op"].startswith("all_gather")]
        forward = [(e["module"], e["for"]) for e in gathers if e["pass"] == "forward"]
        assert forward == [("", ""), ("layers.0", "layers.0"), ("layers.1", "layers.1")]
        reductions = [e["for"] for e in events if e["op"] == "reduce_scatter_tensor"]
        assert sorted(reductions) == ["", "layers.0", "layers.1"]
        assert all(e["pass"] == "backward" for e in events if e["op"] == "reduce_scatter_tensor")
        assert all(e["module"] is not None for e in events)


# -- C5, compiled ----------------------------------------------------------------------------------


def _compiled(folder: Path, backend: str) -> dict[str, Any]:
    import torch._dynamo as dynamo
    import torch.distributed._functional_collectives as functional
    from torch._dynamo.utils import counters

    dynamo.reset()
    counters.clear()

    def step(x: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        return functional.all_gather_tensor_autograd(y * x, 0, dist.group.WORLD).pow(2).sum()

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    x = torch.ones(4, requires_grad=True)
    with torchwhere.watch(out=folder):
        compiled(x).backward()
        compiled(x).backward()
    inside = dict(counters["stats"]), dict(counters["graph_break"])
    with dynamo.config.patch(error_on_recompile=True):
        compiled(x)
    unchanged = (dict(counters["stats"]), dict(counters["graph_break"])) == inside
    group_up()
    kinds = [
        event.to_dict() for event in torchwhere.read_run(folder).boxes[dist.get_rank()].events()
    ]
    return {
        "graphs": inside[0].get("unique_graphs"),
        "breaks": inside[1],
        "unchanged": unchanged,
        "collectives": collectives(folder),
        "compilations": [
            brief(e, "kind", "what") for e in kinds if e["kind"].startswith("compile")
        ],
    }


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_c5_compiled_under_a_watch(two_ranks: Pool, tmp_path: Path, backend: str) -> None:
    """A function first compiled under a watch is compiled as usual and stays so; its collectives
    name the graph."""
    for answer in two_ranks.run(_compiled, tmp_path, backend):
        assert answer["graphs"] == 1
        assert answer["breaks"] == {}
        assert answer["unchanged"]
        ops = [(e["op"], e["pass"], e["module"]) for e in answer["collectives"]]
        forward = [("all_reduce", "outside", None), ("all_gather_into_tensor", "outside", None)]
        backward = [("reduce_scatter_tensor", "backward", None), ("all_reduce", "backward", None)]
        assert ops == (forward + backward) * 2
        assert {e["graph"] for e in answer["collectives"]} == {"0/0"}
        assert ("compile_begin", "0/0") in answer["compilations"]
        assert ("compile_end", "0/0") in answer["compilations"]


# -- C15, DDP --------------------------------------------------------------------------------------


def _ddp(folder: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    from torch.nn.parallel import DistributedDataParallel as Ddp

    model = Ddp(Model(width=64, depth=3), **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torchwhere.watch(out=folder):
        for _ in range(5):
            model(batch(64)).sum().backward()
            optimizer.step()
    group_up()
    return collectives(folder)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0.03},
        {"bucket_cap_mb": 0.03, "find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ],
    ids=["one bucket", "buckets", "unused", "view"],
)
def test_c15_ddp_buckets(two_ranks: Pool, tmp_path: Path, options: dict[str, Any]) -> None:
    """Each all-reduce was issued by the parameter that completed its bucket, for the bucket's
    parameters, in every step."""
    names = {name for name, _ in Model(width=64, depth=3).named_parameters()}
    for events in two_ranks.run(_ddp, tmp_path, options):
        gradients = [
            e
            for e in events
            if e["op"] == "all_reduce" and e["dtype"] == "float32" and e["pass"] == "backward"
        ]
        assert gradients
        for step in range(5):
            of_step = [e for e in gradients if e["step"] == step]
            assert sorted(name for e in of_step for name in e["for"]) == sorted(names)
            for event in of_step:
                assert event["param"] in event["for"]
                assert event["param"].startswith(f"{event['module']}.")
        if "bucket_cap_mb" in options:
            assert len([e for e in gradients if e["step"] == 4]) > 1


def _ddp_hook(folder: Path) -> list[dict[str, Any]]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel as Ddp

    model = Ddp(Model())
    model.register_comm_hook(None, fp16_compress_hook)
    with torchwhere.watch(out=folder):
        model(batch()).sum().backward()
    group_up()
    return collectives(folder)


def test_c15_ddp_with_a_comm_hook(two_ranks: Pool, tmp_path: Path) -> None:
    """A reduction launched by a communication hook names the parameters of the bucket the hook was
    given."""
    names = {name for name, _ in Model().named_parameters()}
    for events in two_ranks.run(_ddp_hook, tmp_path):
        (reduction,) = [e for e in events if e["dtype"] == "float16"]
        assert set(reduction["for"]) == names


def _ddp_without_a_wrapper(folder: Path) -> list[dict[str, Any]]:
    from torch.distributed._composable.replicate import replicate

    model = replicate(Model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torchwhere.watch(out=folder):
        for _ in range(3):
            model(batch()).sum().backward()
            optimizer.step()
    group_up()
    return collectives(folder)


def _ddp_static(folder: Path) -> list[dict[str, Any]]:
    """Of two models, so that the one whose buckets are reduced at the end of a backward is not the
    only one there is."""
    from torch.nn.parallel import DistributedDataParallel as Ddp

    models = [Ddp(Model(width), static_graph=True, bucket_cap_mb=0.002) for width in (8, 16)]
    optimizer = torch.optim.SGD(models[1].parameters(), 0.1)
    with torchwhere.watch(models[1], out=folder):
        models[0](batch()).sum().backward()
        for _ in range(3):
            models[1](batch(16)).sum().backward()
            optimizer.step()
    group_up()
    return [
        event
        for event in collectives(folder)
        if event["bytes"] != sum(p.nbytes for p in models[0].parameters())
    ]


@pytest.mark.parametrize(
    "job", [_ddp_without_a_wrapper, _ddp_static], ids=["replicate", "static graph"]
)
def test_c15_ddp_of_other_kinds(two_ranks: Pool, tmp_path: Path, job: Any) -> None:
    """The gradients of all parameters are reduced in every step, the first too, wherever DDP keeps
    its reducer."""
    names = {name for name, _ in Model().named_parameters()}
    for events in two_ranks.run(job, tmp_path):
        gradients = [
            e
            for e in events
            if e["op"] == "all_reduce" and e["dtype"] == "float32" and e["pass"] == "backward"
        ]
        for step in range(3):
            reduced = [
                name for e in gradients if e["step"] == step for name in e["for"] or ["unknown"]
            ]
            assert sorted(reduced) == sorted(names)


def _gone_while_watched(folder: Path) -> dict[str, Any]:
    import gc
    import weakref

    from torch.nn.parallel import DistributedDataParallel as Ddp

    def threads() -> int:
        gc.collect()
        return len(list(Path("/proc/self/task").iterdir()))

    with torchwhere.watch(out=folder):
        model = Ddp(Model())
        for _ in range(3):
            model(batch()).sum().backward()
        params = [weakref.ref(param) for param in model.parameters()]
        del model
        before, numbers = threads(), 3
        for _ in range(numbers):
            group = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(1), group=group)
            dist.destroy_process_group(group)
            del group
        after = threads()
    group_up()
    return {
        "params": [ref() is not None for ref in params],
        "threads": after - before,
        "numbers": [event["number"] for event in collectives(folder)[-numbers:]],
    }


def test_what_the_job_lets_go_of_is_gone(two_ranks: Pool, tmp_path: Path) -> None:
    """While watched: the parameters of a DDP model that is deleted, and the threads of a process
    group that is destroyed."""
    for answer in two_ranks.run(_gone_while_watched, tmp_path):
        assert not any(answer["params"])
        assert answer["threads"] <= 0
        assert answer["numbers"] == [0, 0, 0]


# -- C16, tensor parallel --------------------------------------------------------------------------


def _tensor_parallel(folder: Path) -> list[dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = Model(depth=1)
    parallelize_module(model.layers[0], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with torchwhere.watch(model, out=folder):
        model(batch().requires_grad_()).sum().backward()
    group_up()
    return collectives(folder)


def test_c16_tensor_parallel(two_ranks: Pool, tmp_path: Path) -> None:
    """The forward all-reduce is the row-parallel linear's own, the backward one the column-parallel
    linear's."""
    for events in two_ranks.run(_tensor_parallel, tmp_path):
        reductions = [e for e in events if e["op"] == "all_reduce"]
        assert [brief(e, "pass", "module") for e in reductions] == [
            ("forward", "layers.0.down"),
            ("backward", "layers.0.up"),
        ]
        assert {e["mesh_dim"] for e in reductions} == {"tp"}


# -- C18, pipelines --------------------------------------------------------------------------------


def _squared(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).pow(2).sum()


def _pipeline(folder: Path, schedule: str) -> dict[str, Any]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, world = dist.get_rank(), dist.get_world_size()
    stage_module = nn.ModuleDict({"block": Model(depth=1).layers[0]})
    stage_module.forward = lambda x: stage_module["block"](x)
    stage = PipelineStage(stage_module, rank, world, torch.device("cpu"))
    runner = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule](
        stage, n_microbatches=4, loss_fn=_squared
    )
    places: list[Any] = []
    stage_module["block"].up.register_full_backward_pre_hook(
        lambda *_: places.append(torchwhere.where())
    )
    with torchwhere.watch(stage_module, out=folder):
        if rank == 0:
            runner.step(batch(rows=8))
        else:
            runner.step(target=batch(rows=8))
    group_up()
    return {
        "events": collectives(folder),
        "backward": [(p.pass_, p.module, p.call) for p in places],
    }


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_c18_pipeline(two_ranks: Pool, tmp_path: Path, schedule: str) -> None:
    """A microbatch is a call of the stage, in forward and in backward; each message has its
    peer."""
    first, last = two_ranks.run(_pipeline, tmp_path, schedule)
    for answer, peer in ((first, 1), (last, 0)):
        # A pipeline may first run a microbatch to find out shapes: that one is no call.
        microbatches = [
            place for place in answer["backward"] if place != ("backward", "block.up", None)
        ]
        assert microbatches == [("backward", "block.up", call) for call in range(4)]
        messages = [e for e in answer["events"] if e["op"] in ("send", "recv")]
        assert {e["peer"] for e in messages} == {peer}
    sends = [e["number"] for e in first["events"] if e["op"] == "send" and e["dtype"] == "float32"]
    receives = [
        e["number"] for e in last["events"] if e["op"] == "recv" and e["dtype"] == "float32"
    ]
    assert sends == receives
    assert len(sends) >= 4


# -- C20, C22 --------------------------------------------------------------------------------------


def _from_a_thread(folder: Path) -> list[dict[str, Any]]:
    import threading

    class Reduces(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            helper = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)), name="helper")
            helper.start()
            helper.join()
            return x * 1

    with torchwhere.watch(model := nn.Sequential(Reduces()), out=folder):
        model(batch())
    group_up()
    return collectives(folder)


def test_c20_collective_from_another_thread(two_ranks: Pool, tmp_path: Path) -> None:
    """A collective from another thread has that thread's place, never the main thread's module."""
    for events in two_ranks.run(_from_a_thread, tmp_path):
        assert [brief(e, "pass", "module", "thread") for e in events] == [
            ("outside", None, "helper")
        ]


def _raises_after_collectives(folder: Path) -> list[str]:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("after two reductions")

    notes: list[str] = []
    with torchwhere.watch(model := nn.Sequential(Raises()), out=folder):
        for _ in range(2):
            dist.all_reduce(torch.ones(1))
        try:
            model(batch())
        except ValueError as error:
            notes = error.__notes__
    group_up()
    return notes


def test_c22_note_has_the_last_collectives(two_ranks: Pool, tmp_path: Path) -> None:
    """The note on an exception names this rank and the last collectives."""
    for rank, notes in enumerate(two_ranks.run(_raises_after_collectives, tmp_path)):
        (note,) = notes
        assert note.startswith(f"torchwhere: rank {rank}, step 0, forward of 0, ")
        assert note.count("all_reduce #") == 2
