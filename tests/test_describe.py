"""`describe(anything)`: one line that says what an object is and where it belongs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchwhere
from models import Model, batch
from rank_pool import Pool
from torchwhere import describe
from torchwhere.model import watched


def test_modules_and_tensors_of_no_known_model() -> None:
    """Without a watch and without `names`, the line has class, shape, dtype and device, and says
    that no model is known."""
    model = Model()
    assert describe(model) == "module of no known model: Model, 10 parameters of 360 elements"
    assert describe(nn.ReLU()) == "module of no known model: ReLU"
    assert (
        describe(model.head.weight)
        == "parameter of no known model: [8, 8] float32 cpu, requires grad"
    )
    assert describe(torch.ones(2, 3, dtype=torch.int8, device="meta")) == "tensor: [2, 3] int8 meta"
    assert (
        describe(model(batch())) == "tensor: [4, 8] float32 cpu, requires grad, from AddmmBackward0"
    )


def test_names_of_models_that_were_asked_about() -> None:
    """After `names(model)` everything in the model has its name as long as the model lives,
    including later additions."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    torchwhere.names(model)
    linear = "Linear(in_features=8, out_features=8, bias=True)"
    assert describe(model) == "module <root>: Sequential, 4 parameters of 88 elements"
    assert describe(model[0]) == f"module 0: {linear}, 2 parameters of 72 elements"
    assert (
        describe(model[0].weight)
        == "parameter 0.weight (also 2.weight): [8, 8] float32 cpu, requires grad"
    )
    assert describe(model[1].running_mean) == "buffer 1.running_mean: [8] float32 cpu"
    model.append(nn.Linear(8, 1))
    assert describe(model[3].bias) == "parameter 3.bias: [1] float32 cpu, requires grad"
    assert describe(torch.compile(model)).startswith(
        "module <root>: OptimizedModule around Sequential, "
    )


def test_autograd_nodes() -> None:
    """A node has its operation; a gradient accumulator its parameter; under a watch the module call
    that created it."""
    model = Model()
    before = model(batch())
    assert describe(before.grad_fn) == "node AddmmBackward0"
    with torchwhere.watch(model):
        first, second = model(batch()), model(batch())
        assert describe(second.grad_fn) == "node AddmmBackward0 of head call 1"
        assert (
            describe(first)
            == "tensor: [4, 8] float32 cpu, requires grad, from AddmmBackward0 of head"
        )
        assert describe((first + second).grad_fn) == "node AddBackward0, made outside any module"
        assert describe(before.grad_fn) == "node AddmmBackward0 of an unknown module call"
        leaf = first.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        assert (
            describe(leaf)
            == "node AccumulateGrad into parameter head.bias: [8] float32 cpu, requires grad"
        )
        assert describe(model.layers[1].up).startswith("module layers.1.up: Linear(")
    assert watched.running() is None
    assert describe(first.grad_fn) == "node AddmmBackward0"

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return 2 * grad

    assert (
        describe(Double.apply(torch.ones(1, requires_grad=True)).grad_fn) == "node DoubleBackward"
    )
    done = checkpoint(model, batch().requires_grad_(), use_reentrant=True)
    done.sum().backward()
    assert describe(done.grad_fn) == "node CheckpointFunctionBackward"  # freed by now


def test_describing_changes_nothing() -> None:
    """A module that was described before it became part of the model has its name in a later
    watch."""
    model, adapter = Model(), nn.Linear(8, 8)
    seen = []
    adapter.register_forward_hook(lambda *_: seen.append(torchwhere.where().module))
    with torchwhere.watch(model):
        assert describe(adapter).startswith("module of no known model: Linear(")
        assert describe(adapter.weight).startswith("parameter of no known model: ")
        model.layers.append(adapter)
        assert describe(adapter.weight).startswith("parameter layers.2.weight: ")
        model(batch())
    assert seen == ["layers.2"]


def test_groups_and_meshes(one_rank: None) -> None:
    """A group has its backend and ranks, a mesh its dimensions and this rank's position; a wrapper
    its content."""
    assert (
        describe(dist.group.WORLD) == "process group default (0): gloo, rank 0; this is its rank 0"
    )
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    assert describe(mesh) == "device mesh dp=1 x tp=1 on cpu, rank 0; this rank is at dp=0, tp=0"
    assert (
        describe(init_device_mesh("cpu", (1,))) == "device mesh 1 on cpu, rank 0; this rank is at 0"
    )
    tensor = distribute_tensor(torch.ones(4, 2), mesh["dp"], [Shard(0)])
    assert describe(tensor) == "DTensor: [4, 2] float32 cpu, Shard(0) on dp=1"
    model = Model()
    torchwhere.names(model)
    assert describe(DistributedDataParallel(model)) == (
        "module <root>: DistributedDataParallel around Model, 10 parameters of 360 elements"
    )


def _describe_groups() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    own = dist.new_group([1])
    others = dist.new_group([0, 1], group_desc="everybody")
    found = [describe(mesh), describe(others)]
    if dist.get_rank() == 1:
        found.append(describe(own))
    half = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    return [*found, describe(half), describe(dist.GroupMember.NON_GROUP_MEMBER)]


def test_groups_and_meshes_of_real_ranks(two_ranks: Pool) -> None:
    """Every rank reports the ranks, its own index, and its part of a sharded tensor."""
    for rank, found in enumerate(two_ranks.run(_describe_groups)):
        assert found[0] == f"device mesh dp=2 on cpu, ranks 0-1; this rank is at dp={rank}"
        assert found[1].startswith("process group everybody (")
        assert found[1].endswith(f"): gloo, ranks 0-1; this is its rank {rank}")
        if rank == 1:
            assert found[2].endswith(": gloo, rank 1; this is its rank 0")
        assert found[-2] == "DTensor: [4, 2] float32 cpu, [2, 2] on this rank, Shard(0) on dp=2"


def test_a_destroyed_world(capfd: pytest.CaptureFixture[str]) -> None:
    """Groups, meshes and sharded tensors of a destroyed world are described as they were."""
    import sys

    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh, group = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")), dist.group.WORLD
    tensor = distribute_tensor(torch.ones(4, 2), mesh["dp"], [Shard(0)])
    dist.destroy_process_group()
    sys.excepthook = hook
    assert describe(group) == "process group that was destroyed"
    assert (
        describe(mesh)
        == "device mesh dp=1 x tp=1 on cpu, rank 0; its process groups were destroyed"
    )
    assert describe(tensor) == "DTensor: [4, 2] float32 cpu, Shard(0) on dp=1, which was destroyed"


class _Loud:
    def __repr__(self) -> str:
        return "two\nlines   and spaces"


class _Broken(nn.Module):
    def extra_repr(self) -> str:
        raise RuntimeError("no")


class _Hostile(nn.Module):
    def parameters(self, recurse: bool = True) -> Any:
        raise RuntimeError("no\nno")


@pytest.mark.parametrize(
    ("thing", "line"),
    [
        (None, "None"),
        (3, "int: 3"),
        (int, "class builtins.int"),
        (_Loud(), "_Loud: two lines and spaces"),
        ([1] * 99, "list: [1, 1, 1, 1, 1, 1, ...]"),
        (_Broken(), "module of no known model: _Broken"),
        (_Hostile(), "_Hostile, which could not be described (RuntimeError: no no)"),
    ],
)
def test_anything_else(thing: Any, line: str) -> None:
    """Any object gets one line, also one whose `repr` raises."""
    assert describe(thing) == line


def test_one_short_line() -> None:
    """The line stays short for an object with a long text."""
    assert len(describe("x" * 100_000)) < 250
    assert len(describe(torch.optim.SGD(Model().parameters(), 0.1))) < 250
