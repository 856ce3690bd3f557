"""`drop_in.comm_mode` passes the checks of torch's own tests of `CommDebugMode`, and gives right
answers where the original is wrong."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import leaks
import torchwhere
from models import Block, Model, batch
from rank_pool import Pool
from torchwhere.drop_in import comm_mode
from torchwhere.drop_in.comm_mode import CommDebugMode

c10d, functional = torch.ops.c10d, torch.ops.c10d_functional
WORLD = 2


@pytest.fixture
def fake_world() -> Iterator[None]:
    """A fake process group of two ranks. This process is rank 0; rank 1 does not exist, and no call
    waits for it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()
    sys.excepthook = hook  # torch installs one of its own and leaves it


def tensor_parallel(model: nn.Module, prefix: str = "") -> nn.Module:
    plan = {f"{prefix}up": ColwiseParallel(), f"{prefix}down": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)


def forward_counts(mode: CommDebugMode, op: Any) -> dict[str, int]:
    return {
        name: counts["forward"][op]
        for name, counts in mode.comm_module_counts.items()
        if op in counts["forward"]
    }


def backward_counts(mode: CommDebugMode, op: Any) -> dict[str, int]:
    return {
        name: counts["backward"][op]
        for name, counts in mode.comm_module_counts.items()
        if op in counts["backward"]
    }


# -- counting --------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """Functional collectives around a block."""

    def __init__(self, reduce: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.block = Block()
        self.reduce = reduce

    def forward(self, x: torch.Tensor) -> Any:
        x = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
        x = funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)
        return self.reduce(self.block(x))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_functional_collectives(fake_world: None) -> None:
    """A functional collective counts once, under its legacy name, and not again for the c10d op
    below it."""
    for op, reduce in (
        (functional.all_reduce, lambda x: funcol.all_reduce(x, "sum", dist.group.WORLD)),
        (
            functional.all_reduce_coalesced,
            lambda x: funcol.all_reduce_coalesced([x], "sum", dist.group.WORLD),
        ),
    ):
        mode = CommDebugMode()
        with mode:
            Wrapper(reduce)(batch())
        assert mode.get_comm_counts() == {
            op: 1,
            functional.all_gather_into_tensor: 1,
            functional.reduce_scatter_tensor: 1,
        }
        assert mode.get_total_counts() == 3
        assert mode.get_comm_counts()[functional.broadcast] == 0
        assert repr(mode) == "CommDebugMode(get_total_counts()=3)"


def test_functional_variants(fake_world: None) -> None:
    """Legacy, autograd, in-place and coalesced functional ops, and DTensor's own all-to-all, each
    count once."""
    group, x = dist.group.WORLD.group_name, torch.ones(4, 4)
    native = torch.ops._c10d_functional
    calls: list[tuple[Callable[[], Any], Any, int]] = [
        (lambda: functional.all_reduce(x, "sum", "", [0, 1], 2), functional.all_reduce, 1),
        (lambda: native.all_reduce_(x, "sum", group), functional.all_reduce, 1),
        (lambda: native.broadcast(x, 0, group), functional.broadcast, 1),
        (
            lambda: native.all_gather_into_tensor_coalesced([x, x], 2, group),
            functional.all_gather_into_tensor_coalesced,
            1,
        ),
        (
            lambda: torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, group),
            torch.ops._dtensor.shard_dim_alltoall,
            1,
        ),
        (_all_to_all_and_back, functional.all_to_all_single, 2),
    ]
    mode = CommDebugMode()
    for call, op, count in calls:
        with mode:
            call()
        assert mode.get_comm_counts() == {op: count}
    assert mode.comm_module_counts["Global"] == {"forward": {op: 1}, "backward": {op: 1}}


def _all_to_all_and_back() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    funcol.all_to_all_single_autograd(x, [2, 2], [2, 2], dist.group.WORLD).sum().backward()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_c10d_collectives(fake_world: None) -> None:
    """Every c10d collective counts under its own packet; entering the mode again resets the
    counts."""
    x, wide = torch.rand(2, 4), torch.empty(4, 4)
    pair = [x.clone(), x.clone()]
    calls: dict[str, Callable[[], Any]] = {
        "allreduce_": lambda: dist.all_reduce(x),
        "_allgather_base_": lambda: dist.all_gather_into_tensor(wide, x),
        "_reduce_scatter_base_": lambda: dist.reduce_scatter_tensor(x, wide),
        "broadcast_": lambda: dist.broadcast(x, 0),
        "gather_": lambda: dist.gather(x, [x, x], 0),
        "reduce_": lambda: dist.reduce(x, 0),
        "scatter_": lambda: dist.scatter(x, [x, x], 0),
        "allgather_": lambda: dist.all_gather(pair, x),
        "allgather_coalesced_": lambda: dist.all_gather_coalesced([[x], [x]], [x]),
        "allreduce_coalesced_": lambda: dist.all_reduce_coalesced(x),
        "reduce_scatter_": lambda: dist.reduce_scatter(x, pair),
        "alltoall_": lambda: dist.all_to_all([x, x], pair),
        "alltoall_base_": lambda: dist.all_to_all_single(x, x),
        "allgather_into_tensor_coalesced_": lambda: _coalesced(
            lambda: dist.all_gather_into_tensor(wide, x)
        ),
        "reduce_scatter_tensor_coalesced_": lambda: _coalesced(
            lambda: dist.reduce_scatter_tensor(x, wide)
        ),
    }
    assert {getattr(c10d, name) for name in calls} == comm_mode.c10d_collective_ops
    mode = CommDebugMode()
    for name, call in calls.items():
        with mode:
            call()
        assert mode.get_comm_counts() == {getattr(c10d, name): 1}


def _coalesced(call: Callable[[], Any]) -> None:
    with dist._coalescing_manager():
        call()


def test_messages_and_barriers_are_not_counted(fake_world: None) -> None:
    """As in the original, messages and barriers are not counted; `torchwhere.comms` counts them."""
    with torchwhere.comms() as c, CommDebugMode() as mode:
        dist.send(torch.ones(2), 1)
        dist.recv(torch.ones(2), 1)
        dist.barrier()
    assert mode.get_total_counts() == 0
    assert c.counts == {"send": 1, "recv": 1, "barrier": 1}


def test_dtensor_redistribution(fake_world: None) -> None:
    """The collectives that DTensor issues to redistribute count as functional collectives."""
    mesh = init_device_mesh("cpu", (WORLD,))
    whole = distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)], src_data_rank=None)
    mode = CommDebugMode()
    with mode:
        whole.redistribute(mesh, [Replicate()])
    assert mode.get_comm_counts() == {functional.all_gather_into_tensor: 1}
    with mode:
        DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False).sum().full_tensor()
    assert mode.get_comm_counts() == {functional.all_reduce: 1}


def test_fake_tensors(fake_world: None) -> None:
    """With fake tensors, in either order of the modes, collectives and modules are counted, and no
    operation is listed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for modes in ((CommDebugMode(), FakeTensorMode()), (FakeTensorMode(), CommDebugMode())):
        mode = next(entered for entered in modes if isinstance(entered, CommDebugMode))
        with modes[0], modes[1]:
            funcol.all_reduce(Block()(torch.ones(4, 8)), "sum", dist.group.WORLD)
        assert mode.get_comm_counts() == {functional.all_reduce: 1}
        assert list(mode.advanced_module_tracker.module_helper_dict) == [
            "Global",
            "Block",
            "Block.up",
            "Block.down",
        ]
        assert mode.comm_module_operation_counts == {}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("level", [0, 3])
def test_local_tensors_count_as_in_the_original(fake_world: None, level: int) -> None:
    """Under LocalTensorMode, which answers collectives itself, each collective counts once, for its
    module, as in the original."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.tensor.debug import CommDebugMode as Original

    group = dist.group.WORLD
    modes: list[Any] = [Original(), CommDebugMode(noise_level=level)]  # type: ignore[no-untyped-call]
    for mode in modes:
        with LocalTensorMode(WORLD):
            x, wide = torch.ones(2, 4), torch.empty(4, 4)
            weight = torch.ones(4, 8, requires_grad=True)
            mesh = init_device_mesh("cpu", (WORLD,))
            with mode:
                dist.all_reduce(x)
                dist.all_gather_into_tensor(wide, x)
                funcol.all_reduce(x, "sum", group).wait()
                # the mode runs it once for each rank
                functional.all_reduce(x, "sum", "", [0, 1], WORLD)
                torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, group.group_name)
                tensor_parallel(Block())(batch()).sum().backward()
                whole = distribute_tensor(weight, mesh, [Shard(0)])
                whole.redistribute(mesh, [Replicate()]).to_local().sum().backward()
                dist.barrier()
    original, ours = modes
    assert ours.get_comm_counts() == original.get_comm_counts()
    assert ours.get_comm_counts()[functional.all_reduce] == 3
    assert forward_counts(ours, functional.all_reduce) == forward_counts(
        original, functional.all_reduce
    )
    if level:
        names = [[str(op["name"]) for op in _operations(mode)] for mode in modes]
        assert [name for name in names[1] if "c10d" in name] == [
            name for name in names[0] if "c10d" in name
        ]


def _operations(mode: Any) -> list[dict[str, Any]]:
    return [
        op
        for listed in mode.comm_module_operation_counts.values()
        for op in listed["operations_list"]
    ]


def test_a_failed_collective_under_local_tensors(fake_world: None) -> None:
    """A collective that LocalTensorMode refuses does not count, and the next one does."""
    from torch.distributed._local_tensor import LocalTensorMode

    with LocalTensorMode(WORLD):
        x = torch.ones(2, 4)
        with CommDebugMode() as mode:
            with pytest.raises(NotImplementedError):
                dist.reduce(x, 0)
            dist.all_reduce(x)
    assert mode.get_comm_counts() == {c10d.allreduce_: 1}


def test_c10d_operations_are_listed(fake_world: None) -> None:
    """The list of operations has the collectives of c10d, as in the original."""
    from torch.distributed.tensor.debug import CommDebugMode as Original

    modes: list[Any] = [Original(), CommDebugMode()]  # type: ignore[no-untyped-call]
    for mode in modes:
        with mode:
            dist.all_reduce(torch.ones(2))
    assert [str(op["name"]) for op in _operations(modes[1])] == [
        str(op["name"]) for op in _operations(modes[0])
    ]
    assert "c10d.allreduce_.default" in [str(op["name"]) for op in _operations(modes[1])]


def test_nested_modes_count_each_for_itself(fake_world: None) -> None:
    """A mode inside another one counts its own block; the outer one counts everything."""
    with CommDebugMode() as outer:
        dist.all_reduce(torch.ones(2))
        with CommDebugMode() as inner:
            dist.all_reduce(torch.ones(2))
            with inner:
                dist.all_reduce(torch.ones(2))
    assert (outer.get_total_counts(), inner.get_total_counts()) == (3, 1)


def test_other_threads_are_not_counted(fake_world: None) -> None:
    """Like the original, it counts only its own thread: ranks that are threads do not mix."""
    counts = []

    def work(times: int) -> None:
        with CommDebugMode() as mode:
            for _ in range(times):
                funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
                dist.all_reduce(torch.ones(2))
            barrier.wait()
        counts.append(mode.get_total_counts())

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=work, args=(times,)) for times in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(counts) == [2, 4, 6]


# -- modules ---------------------------------------------------------------------------------------


def test_modules_parameters_and_sharding(fake_world: None) -> None:
    """The dicts of the module tracker name all modules that ran, their parameters, and how these
    are sharded."""
    model = tensor_parallel(Block())
    mode = CommDebugMode()
    with mode:
        model(batch()).sum().backward()
    tracker = mode.advanced_module_tracker
    linear = "class 'torch.nn.modules.linear.Linear'"
    assert tracker.module_helper_dict == {
        "Global": {"depth": 0},
        "Block": {"module_type": "class 'models.Block'", "depth": 1},
        "Block.up": {
            "module_type": linear,
            "depth": 2,
            "parameters": {"weight": "(Shard(dim=0),)", "bias": "(Shard(dim=0),)"},
        },
        "Block.down": {
            "module_type": linear,
            "depth": 2,
            "parameters": {"weight": "(Shard(dim=1),)", "bias": "(Replicate(),)"},
        },
    }
    assert tracker.module_parents_dict["Block.up"] == {"Global", "Block", "Block.up"}
    assert tracker.parent_dict == {"Global": ["Block"], "Block": ["Block.up", "Block.down"]}
    assert tracker.module_depth_dict == {"Global": 0, "Block": 1, "Block.up": 2, "Block.down": 2}
    parameters = mode.get_parameter_info()
    assert [(name, *own) for name, own in parameters.items()] == [
        (f"Block.{leaf}", "weight", "bias") for leaf in ("up", "down")
    ]
    assert parameters["Block.up"]["weight"].data_ptr() == model.up.weight.data_ptr()
    assert mode.get_sharding_info() == {
        "Block.up.weight": (Shard(0),),
        "Block.up.bias": (Shard(0),),
        "Block.down.weight": (Shard(1),),
        "Block.down.bias": (Replicate(),),
    }


def test_printed_infos(fake_world: None) -> None:
    """Parameters and sharding are printed as the original prints them, by the mode and by its
    tracker."""
    with CommDebugMode() as mode:
        tensor_parallel(Block())(batch())
    for owner in (mode, mode.advanced_module_tracker):
        with redirect_stdout(io.StringIO()) as out:
            owner.print_sharding_info()
            owner.print_paramater_info()
        lines = out.getvalue().splitlines()
        assert lines[:2] == ["Block.up.weight: (Shard(dim=0),)", "Block.up.bias: (Shard(dim=0),)"]
        assert lines[4].startswith("{'Block.up': {'weight': DTensor(")


def test_entering_again_resets_everything(fake_world: None) -> None:
    """A new block begins with empty counts, modules, parameters and operations, in the same dict
    objects."""
    mode, block = CommDebugMode(), tensor_parallel(Block())
    model = tensor_parallel(tensor_parallel(nn.Sequential(Block(), Block()), "0."), "1.")
    with mode:
        block(batch())
    counts, parameters = mode.get_comm_counts(), mode.get_parameter_info()
    with mode:
        assert len(mode.advanced_module_tracker.module_helper_dict) == 1
        assert mode.get_comm_module_counts() == {"Global": {"forward": {}, "backward": {}}}
        assert (
            mode.get_parameter_info(),
            mode.get_sharding_info(),
            mode.comm_module_operation_counts,
        ) == ({}, {}, {})
        model(batch())
    assert counts is mode.get_comm_counts()
    assert counts == {functional.all_reduce: 2}
    assert list(parameters) == [f"Sequential.{i}.{leaf}" for i in (0, 1) for leaf in ("up", "down")]
    assert len(mode.get_sharding_info()) == 8
    assert forward_counts(mode, functional.all_reduce) == {
        "Global": 2,
        "Sequential": 2,
        **{f"Sequential.{name}": 1 for name in ("0", "0.down", "1", "1.down")},
    }


def test_live_inside_a_forward(fake_world: None) -> None:
    """Inside a module, in forward and backward, the tracker has its name, and the counts so far can
    be read."""
    reports: list[tuple[str, set[str], bool, int]] = []

    class Reporter(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = funcol.all_reduce(x, "sum", dist.group.WORLD)
            report()
            if x.requires_grad:
                x.register_hook(lambda _grad: report())
            return x * 2

    def report() -> None:
        tracker = mode.advanced_module_tracker
        reports.append((tracker.name, tracker.parents, tracker.is_bw, mode.get_total_counts()))

    with CommDebugMode() as mode:
        nn.Sequential(nn.Linear(8, 8), Reporter())(batch()).sum().backward()
    chain = {"Global", "Sequential", "Sequential.1"}
    assert reports == [("Sequential.1", chain, False, 1), ("Sequential.1", chain, True, 1)]
    assert mode.advanced_module_tracker.name == "Global"


# -- where the original has no answer --------------------------------------------------------------


def test_c1_a_module_called_twice(fake_world: None) -> None:
    """A module that is called twice, in one forward or in two steps, is one entry, and nothing
    stays on it."""
    block = tensor_parallel(Block())
    mode = CommDebugMode()
    with mode:
        for _ in range(2):
            block(block(batch())).sum().backward()
    assert forward_counts(mode, functional.all_reduce) == {"Global": 4, "Block": 4, "Block.down": 4}
    assert mode.advanced_module_tracker.parent_dict["Global"] == ["Block"]
    plain = nn.Linear(2, 2)
    with CommDebugMode():
        for _ in range(10):
            plain(torch.ones(1, 2))
    assert (
        len(plain._forward_hooks),
        len(plain._forward_pre_hooks),
        len(plain._backward_pre_hooks),
    ) == (0, 0, 0)


def test_c2_a_forward_that_raises(fake_world: None) -> None:
    """After a forward that raised, the next one counts for the right modules."""
    block = tensor_parallel(Block())
    with CommDebugMode() as mode:
        with pytest.raises(RuntimeError):
            block(torch.ones(3, 3))
        block(batch())
    assert forward_counts(mode, functional.all_reduce) == {"Global": 1, "Block": 1, "Block.down": 1}


def test_c4_fsdp_collectives_are_charged_to_their_units(fake_world: None) -> None:
    """A prefetch counts for the layer that it gathers, and a reduce-scatter for the layer whose
    gradients it reduces."""
    model = Model(depth=3)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    mode = CommDebugMode()
    with mode:
        model(batch()).sum().backward()
    layers = {f"FSDPModel.layers.{i}": 1 for i in range(3)}
    assert forward_counts(mode, c10d._allgather_base_) == {"Global": 4, "FSDPModel": 4, **layers}
    assert backward_counts(mode, c10d._allgather_base_) == {"Global": 3, "FSDPModel": 3, **layers}
    assert backward_counts(mode, c10d._reduce_scatter_base_) == {
        "Global": 4,
        "FSDPModel": 4,
        **layers,
    }
    with CommDebugMode() as forward:
        loss = model(batch()).sum()
    with CommDebugMode() as backward:
        loss.backward()
    assert forward.get_comm_counts() == {c10d._allgather_base_: 4}
    assert backward.get_comm_counts() == {c10d._allgather_base_: 3, c10d._reduce_scatter_base_: 4}


@pytest.mark.parametrize("noise_level", [0, 3])
def test_c5_compilation_is_unchanged(fake_world: None, noise_level: int) -> None:
    """A model that is compiled under the mode is compiled once, stays compiled afterwards, and its
    collectives are counted."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = Wrapped(Block())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    mode = CommDebugMode(noise_level=noise_level)
    try:
        for _ in range(2):
            with mode:
                compiled(batch().requires_grad_()).sum().backward()
            assert mode.get_comm_counts() == {functional.all_reduce: 2}
            assert forward_counts(mode, functional.all_reduce) == {"Global": 1, "Wrapped": 1}
            assert backward_counts(mode, functional.all_reduce) == {"Global": 1, "Wrapped": 1}
            compiled(batch().requires_grad_()).sum().backward()
        listed = mode.comm_module_operation_counts.get("Wrapped", {"operations_list": []})[
            "operations_list"
        ]
        assert any("addmm" in str(op["name"]) for op in listed) == (noise_level > 0)
        assert counters["stats"]["unique_graphs"] == 1
    finally:
        torch._dynamo.reset()


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(self.inner(x), "sum", dist.group.WORLD).relu()


def test_backward_is_charged_to_the_module_of_its_node(fake_world: None) -> None:
    """The all-reduce in the backward of a column-parallel linear counts for that linear, not for
    the last module of the forward."""
    model = nn.Sequential(nn.Linear(8, 8), tensor_parallel(Block()), nn.Linear(8, 8))
    with CommDebugMode() as mode:
        model(batch()).sum().backward()
    op = functional.all_reduce
    assert forward_counts(mode, op) == {
        "Global": 1,
        "Sequential": 1,
        "Sequential.1": 1,
        "Sequential.1.down": 1,
    }
    assert backward_counts(mode, op) == {
        "Global": 1,
        "Sequential": 1,
        "Sequential.1": 1,
        "Sequential.1.up": 1,
    }
    (line,) = [
        op
        for op in mode.comm_module_operation_counts["Sequential.2"]["operations_list"]
        if op["is_bw"]
    ][:1]
    assert "mm" in str(line["name"]) or "t.default" in str(line["name"])


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = tensor_parallel(Block())
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputation(fake_world: None, reentrant: bool) -> None:
    """Recomputed operations are listed as such, and their collectives count in the backward of the
    same modules."""
    model = Checkpointed(reentrant=reentrant)
    with CommDebugMode() as mode:
        model(batch()).sum().backward()
    block = {"Global": 1, "Checkpointed": 1, "Checkpointed.block": 1}
    assert forward_counts(mode, functional.all_reduce) == block | {"Checkpointed.block.down": 1}
    # a non-reentrant checkpoint stops before the last collective, because backward needs no result
    # of it
    up = {"Checkpointed.block.up": 1}
    assert backward_counts(mode, functional.all_reduce) == (
        dict.fromkeys(block, 2) | up | {"Checkpointed.block.down": 1} if reentrant else block | up
    )
    listed = mode.comm_module_operation_counts["Checkpointed.block.up"]["operations_list"]
    again = [str(op["name"]) for op in listed if op["is_activation_checkpointing"]]
    assert again.count("aten.addmm.default") == 2  # on DTensors, and on their local tensors
    assert all(op["is_bw"] for op in listed if op["is_activation_checkpointing"])
    assert not any(
        op["is_activation_checkpointing"]
        for op in mode.comm_module_operation_counts["Checkpointed.first"]["operations_list"]
    )
    table = mode.generate_comm_debug_tracing_table(2)
    assert 2 <= table.count("ACTIVATION CHECKPOINTING") <= 3  # in the block and its linears


def test_backward_alone_under_a_watch(fake_world: None) -> None:
    """A mode around the backward alone has the modules of the forward if a watch recorded them."""
    model = nn.Sequential(nn.Linear(8, 8), tensor_parallel(Block()))
    with torchwhere.watch(model):
        loss = model(batch()).sum()
        with CommDebugMode() as mode:
            loss.backward()
    assert backward_counts(mode, functional.all_reduce) == {"Global": 1, "Sequential.1.up": 1}
    assert "Sequential.1.up" in mode.generate_comm_debug_tracing_table(0)
    loss = model(batch()).sum()
    with mode:
        loss.backward()
    assert backward_counts(mode, functional.all_reduce) == {"Global": 1}


def test_wrappers_and_second_models_have_plain_names(fake_world: None) -> None:
    """A name is the class of the root and the path of the module, without prefixes of wrappers; a
    second model has its own class."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(nn.Linear(8, 8), checkpoint_wrapper(Block()))
    loss, unseen = nn.MSELoss(), nn.Dropout(0.0)
    model[0].register_forward_hook(lambda module, args, result: unseen(result))
    with CommDebugMode() as mode:
        loss(model(batch()), batch()).backward()
    assert list(mode.advanced_module_tracker.module_helper_dict) == [
        # no module contains the Dropout: its name is its class
        *("Global", "Sequential", "Sequential.0", "Dropout"),
        *("Sequential.1", "Sequential.1.up", "Sequential.1.down", "MSELoss"),
    ]
    assert (
        mode.advanced_module_tracker.module_helper_dict["Sequential.1"]["module_type"]
        == "class 'models.Block'"
    )


# -- over gloo -------------------------------------------------------------------------------------


def _ddp_on_a_rank() -> dict[str, int]:
    model = nn.parallel.DistributedDataParallel(Model(depth=2))
    mode = CommDebugMode()
    with mode:
        for _ in range(3):
            model(batch()).sum().backward()
    assert mode.comm_counts[c10d.allreduce_] == 3
    return backward_counts(mode, c10d.allreduce_)


def test_ddp(two_ranks: Pool) -> None:
    """The all-reduces of DDP, which C++ issues, count for the innermost module that contains all
    parameters of the bucket."""
    assert two_ranks.run(_ddp_on_a_rank) == [{"Global": 3, "Model": 3}] * 2


def _train_with_both(kind: str) -> None:
    """Return the totals of a real run over gloo with the drop-in and with the original; messages in
    between count in neither."""
    from torch.distributed.tensor.debug import CommDebugMode as Original

    model: nn.Module = Model(depth=2)
    if kind == "tp":
        for layer in model.layers:
            tensor_parallel(layer)
    else:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    modes: list[Any] = [Original(), CommDebugMode(), CommDebugMode(noise_level=0)]  # type: ignore[no-untyped-call]
    losses = []
    for mode in modes:
        model.zero_grad()
        with mode:
            loss = model(batch(seed=dist.get_rank() if kind == "fsdp" else 0)).sum()
            loss.backward()
            dist.barrier()
        losses.append(loss.item())
    assert modes[0].get_comm_counts() == modes[1].get_comm_counts() == modes[2].get_comm_counts()
    assert modes[0].get_total_counts() == (2 + 1 if kind == "tp" else 3 + 2 + 3)
    assert len(set(losses)) == 1


@pytest.mark.parametrize("kind", ["tp", "fsdp"])
def test_totals_are_those_of_the_original(two_ranks: Pool, kind: str) -> None:
    """On real ranks, with tensor parallelism and FSDP2, the counts and the losses are those of the
    original."""
    two_ranks.run(_train_with_both, kind, checks_itself=True)


# -- texts -----------------------------------------------------------------------------------------


class Layered(nn.Module):
    """A model in which every op is in its own module: for it the original is right in backward
    too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.relu, self.down = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.relu(self.up(x)))


def _tables(make: Callable[[], Any], folder: Path) -> list[str]:
    """Return the tables of levels 0 to 2 and the JSON of level 2, for the same program."""
    torch.manual_seed(0)
    model = tensor_parallel(Layered())
    mode = make()
    with mode:
        model(batch()).sum().backward()
    mode.generate_json_dump(str(folder / "dump.json"), noise_level=2)
    mode.log_comm_debug_tracing_table_to_file(str(folder / "log.txt"), noise_level=1)
    tables = [mode.generate_comm_debug_tracing_table(level) for level in (0, 1, 2)]
    return [*tables, (folder / "log.txt").read_text(), (folder / "dump.json").read_text()]


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_texts_are_those_of_the_original(fake_world: None, tmp_path: Path) -> None:
    """For a model for which the original is right, the tables, the log and the JSON are equal."""
    from torch.distributed.tensor.debug import CommDebugMode as Original

    original, ours = (_tables(make, tmp_path) for make in (Original, CommDebugMode))
    assert ours == original
    assert "\033[1;33m            *c10d_functional.all_reduce: 1\033[0m\n" in ours[0]
    assert "sharding: [(Shard(dim=0),), (Replicate(),), (Shard(dim=1),)]" in ours[1]
    assert "\033" not in ours[3]
    assert json.loads(ours[4])["children"][0]["children"][2]["collectives_forward"] == [
        ["c10d_functional.all_reduce", 1]
    ]


def test_level_3_lists_what_the_program_does(fake_world: None) -> None:
    """Level 3 has the trivial ops too, and no op that reading the parameters caused."""
    model = tensor_parallel(Block())
    with CommDebugMode() as mode:
        model(batch())
    table = re.sub(r"\033\[[0-9;]*m", "", mode.generate_comm_debug_tracing_table())
    assert mode.generate_comm_debug_tracing_table() == mode.generate_comm_debug_tracing_table(3)
    assert re.findall(
        r"\*\*(\S+)", table.partition("Block.up\n")[2].partition("Block.down\n")[0]
    ) == [
        *("aten.view.default", "aten.t.default", "aten.t.default"),
        *("aten.addmm.default", "aten.addmm.default", "aten.view.default"),
    ]


def test_older_names(fake_world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table and the log of older versions of torch exist, in their format."""
    model = tensor_parallel(Block())
    with CommDebugMode() as mode:
        model(batch()).sum().backward()
    line = "\033[1;33m{}*c10d_functional.all_reduce: 1\033[0m\n"
    assert mode.generate_module_tracing_table() == "".join(
        [
            "Global\n",
            line.format("  "),
            "  Block\n",
            line.format("    "),
            "    Block.up\n",
            "    Block.down\n",
            line.format("      "),
        ]
    )
    monkeypatch.chdir(tmp_path)
    mode.log_module_tracing_table_to_file()
    mode.log_comm_debug_tracing_table_to_file()
    mode.generate_json_dump()
    assert (tmp_path / "output.txt").read_text().splitlines()[
        1
    ] == "  *c10d_functional.all_reduce: 1"
    assert (tmp_path / "comm_mode_log.txt").read_text().startswith("Global\n")
    assert json.loads((tmp_path / "comm_mode_log.json").read_text())["fqn"] == "Global"


def test_module_exports() -> None:
    """The other names of the original's modules exist."""
    from torch.distributed.tensor.debug import _comm_mode, visualize_sharding

    for name in (
        "NATIVE_TO_PY_MAPPING",
        "c10d_collective_ops",
        "trivial_ops",
        "funcol_native",
        "funcol_py",
        "c10d_ops",
    ):
        assert getattr(comm_mode, name) == getattr(_comm_mode, name)
    assert comm_mode.visualize_sharding is visualize_sharding
    assert CommDebugMode().comm_registry == _comm_mode.CommDebugMode().comm_registry
    with pytest.raises(
        AttributeError, match=r"^module 'torchwhere.drop_in.comm_mode' has no attribute 'nope'$"
    ):
        comm_mode.nope  # noqa: B018


@pytest.mark.filterwarnings("ignore")
def test_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program in docs/migrating.md prints what the page shows, with the drop-in and with the
    original."""
    page = Path(__file__).parent.parent / "docs" / "migrating.md"
    before, start, section = page.read_text().partition("## torch's `CommDebugMode`")
    section, end, after = section.partition("\n## ")
    program, *shown = re.findall(r"```(?:python|text)\n(.*?)```", section, re.DOTALL)
    changed = program.replace("torchwhere.drop_in.comm_mode", "torch.distributed.tensor.debug")
    assert changed != program
    monkeypatch.chdir(tmp_path)
    # the original replaces this function
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    printed = [_printed(text) for text in (program, changed)]
    if os.environ.get("TORCHWHERE_REGENERATE"):
        for was, now in zip(shown, printed, strict=True):
            section = section.replace(f"```text\n{was}```", f"```text\n{now}```", 1)
        page.write_text(before + start + section + end + after)
    else:
        assert shown == printed


def _printed(program: str) -> str:
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(program, "train.py", "exec"), {"__name__": "__main__"})
    return out.getvalue()


# -- noise levels and what is left behind ----------------------------------------------------------


def test_noise_level_0_lists_no_operations(fake_world: None) -> None:
    """With noise level 0 no dispatch mode sees ops, and a request for a higher level is an error
    that says what to do."""
    mode = CommDebugMode(noise_level=0)
    with mode:
        assert torch._C._len_torch_dispatch_stack() == 0
        tensor_parallel(Block())(batch())
    assert mode.generate_comm_debug_tracing_table(0).count("c10d_functional.all_reduce: 1") == 3
    with pytest.raises(ValueError, match="noise_level") as wrong:
        mode.generate_comm_debug_tracing_table()
    assert (
        str(wrong.value) == "noise_level=3: no operations were listed, because this is a"
        " CommDebugMode(noise_level=0). Ask for noise_level=0, or create it without that argument."
    )


@pytest.mark.parametrize("level", [-1, 4, "2", None, 1.5])
def test_unknown_noise_level(level: Any, tmp_path: Path) -> None:
    """An unknown noise level is a ValueError that lists the known levels."""
    message = (
        f"noise_level={level!r}: expected one of 0 (collectives of each module), 1 (plus operations"
        " on DTensors), 2 (plus all other operations except trivial ones), 3 (plus trivial"
        " operations)"
    )
    mode = CommDebugMode()
    asked: list[Callable[[], Any]] = [
        lambda: mode.generate_comm_debug_tracing_table(level),
        lambda: mode.log_comm_debug_tracing_table_to_file(tmp_path / "log", level),
        lambda: mode.generate_json_dump(tmp_path / "dump", level),
        lambda: CommDebugMode(noise_level=level),
    ]
    for ask in asked:
        with pytest.raises(ValueError, match="noise_level") as wrong:
            ask()
        assert str(wrong.value) == message
    assert list(tmp_path.iterdir()) == []


def test_before_it_is_entered() -> None:
    """A mode that was never entered has no counts and empty tables."""
    mode = CommDebugMode()
    assert (mode.get_total_counts(), mode.get_comm_counts(), mode.get_comm_module_counts()) == (
        0,
        {},
        {},
    )
    assert (mode.generate_comm_debug_tracing_table(), mode.generate_module_tracing_table()) == (
        "",
        "",
    )
    assert mode.advanced_module_tracker.name == ""


def test_nothing_is_left_behind(fake_world: None) -> None:
    """No kernel on a functional op, no mode and no watch is left after the block, also after an
    exception."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    with CommDebugMode():
        assert has("_c10d_functional::all_reduce", "BackendSelect")
    with pytest.raises(ZeroDivisionError), CommDebugMode():
        1 / 0  # noqa: B018
    assert not has("_c10d_functional::all_reduce", "BackendSelect")
    assert not has("_dtensor::shard_dim_alltoall", "BackendSelect")
    assert torchwhere.where().certainty == "unknown"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_modes_begin_and_end_while_threads_issue_collectives(fake_world: None) -> None:
    """While other threads issue collectives, modes and watches begin and end and no call fails; the
    next mode that ends without such threads removes the kernels."""
    name, native = dist.group.WORLD.group_name, torch.ops._c10d_functional
    failed, is_over, none = list[BaseException](), threading.Event(), leaks.snapshot()["kernels"]

    def issue() -> None:
        x, wide = torch.ones(2), torch.empty(4)
        try:
            while not is_over.is_set():
                native.wait_tensor(native.all_reduce(x, "sum", name))
                dist.all_reduce(x)
                native.wait_tensor(native.all_gather_into_tensor(x, WORLD, name))
                dist.all_gather_into_tensor(wide, x)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=issue) for _ in range(2)]
    [thread.start() for thread in threads]
    for _ in range(5):
        with CommDebugMode(noise_level=0):
            time.sleep(0.01)
        with torchwhere.watch():
            for _ in range(3):
                with CommDebugMode(noise_level=0):
                    time.sleep(0.01)
    left = leaks.snapshot()["kernels"]
    is_over.set()
    [thread.join() for thread in threads]
    assert failed == []
    assert {"c10d::allreduce_", "_c10d_functional::all_reduce"} <= set(left) - set(none)
    with CommDebugMode():
        pass
    assert leaks.snapshot()["kernels"] == none


def test_a_fork_inside_a_mode(fake_world: None) -> None:
    """A child that is forked inside a mode can leave that mode and use its own, and no kernel
    stays."""
    none = leaks.snapshot()["kernels"]
    mode = CommDebugMode()
    with mode:
        funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            with CommDebugMode() as own:
                funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
            is_clean = leaks.snapshot()["kernels"] == none
            status = 0 if own.get_total_counts() == mode.get_total_counts() == 1 and is_clean else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
