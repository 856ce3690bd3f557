"""How a live model is distributed over the ranks: every kind of layout over real ranks, and its
text.

TORCHWHERE_REGENERATE=1 writes the golden texts anew; look at the difference before you keep it.
"""

from __future__ import annotations

import os
import re
import sys
import time
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchwhere
from models import Block, Model, batch
from rank_pool import Pool
from torchwhere.core.model_layout import Layout, Param, Unit
from torchwhere.core.rank_text import ranks_from_text, ranks_to_text

GOLDEN = Path(__file__).parent / "golden"
CPU = torch.device("cpu")


def assert_golden(name: str, text: str) -> None:
    path = GOLDEN / f"layout-{name}.txt"
    if os.environ.get("TORCHWHERE_REGENERATE"):
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text()


def read(layouts: list[dict[str, Any]]) -> list[Layout]:
    return [Layout.from_dict(data) for data in layouts]


def param(layout: Layout, name: str) -> Param:
    return dict(layout.params())[name]


def unit(layout: Layout, name: str = "") -> Unit:
    (found,) = [unit for where, unit in layout.units() if where == name]
    return found


# -- without ranks ---------------------------------------------------------------------------------


def test_a_plain_model() -> None:
    """An unmodified model has every parameter with shape, type and bytes, whole, in no unit."""
    model = Model(depth=3)
    model.head.bias.requires_grad_(False)
    found = torchwhere.layout(model)
    assert [name for name, _ in found.params()] == [name for name, _ in model.named_parameters()]
    assert param(found, "layers.2.up.weight") == Param(
        "weight", (8, 8), (8, 8), "float32", 256, 256, device="cpu"
    )
    assert not param(found, "head.bias").requires_grad
    assert found.bytes == found.local_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert (found.rank, found.world_size, found.meshes, list(found.units())) == (0, 1, (), [])
    assert repr(found) == "Layout(rank 0 of 1: Model; 2,016 of 2,016 bytes here)"
    assert_golden("plain", str(found))


def test_alike_siblings_are_one_branch() -> None:
    """Numbered siblings with the same layout are folded; one that differs in a single fact stands
    alone."""
    model = Model(depth=6)
    model.layers[2].down.weight.requires_grad_(False)
    (layers,) = [b for b in torchwhere.layout(model).roots[0].node.children if b.name == "layers"]
    assert [(branch.label, branch.count) for branch in layers.node.children] == [
        ("0-1", 2),
        ("2", 1),
        ("3-5", 3),
    ]
    assert layers.node.children[0].node is layers.node.children[2].node
    assert len(list(torchwhere.layout(model).modules())) == len(list(model.modules()))


def test_tied_and_shared_are_counted_once() -> None:
    """A tied parameter and a shared module have their bytes at their first place, and a reference
    elsewhere."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.ReLU())
    model[1].weight = model[0].weight
    model.append(model[0])
    found = torchwhere.layout(model)
    assert (param(found, "1.weight").tied, found.bytes, found.roots[0].node.count) == (
        "0.weight",
        64,
        1,
    )
    assert dict(found.modules())["3"].same_as == "0"
    assert "tied to 0.weight" in str(found)
    assert "the same module as 0" in str(found)


def test_wrappers_leave_nothing_in_names() -> None:
    """Activation checkpointing and compile wrappers do not appear in names."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Model()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    assert [name for name, _ in torchwhere.layout(model).params()] == [
        name for name, _ in Model().named_parameters()
    ]


def test_a_class_with_the_name_of_a_wrapper() -> None:
    """A user's class that is named like a wrapper of torch is an ordinary module."""

    class DataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    DataParallel.__qualname__ = "DataParallel"
    names = [name for name, _ in torchwhere.layout(DataParallel()).params()]
    assert names == ["module.weight", "module.bias"]


def test_several_models() -> None:
    """A list of models is one layout; names in the second and third begin with their class."""
    found = torchwhere.layout([Model(), nn.Linear(1, 1), nn.Linear(1, 1)])
    names = [name for name, _ in found.params()]
    assert names[0] == "layers.0.up.weight"
    assert names[-4:] == [
        "<Linear>.weight",
        "<Linear>.bias",
        "<Linear#2>.weight",
        "<Linear#2>.bias",
    ]


def test_a_parameter_without_a_shape() -> None:
    """A lazy parameter is listed without a shape."""
    found = torchwhere.layout(nn.LazyLinear(3))
    assert (param(found, "weight").note, param(found, "weight").bytes) == ("no shape yet", 0)


@pytest.mark.parametrize("wrong", [3, None, "model", {"weight": 1}, torch.ones(2)])
def test_not_a_model(wrong: object) -> None:
    """An object that is not a model is a TypeError that says what to pass, also inside a list."""
    message = (
        "layout(model): expected a torch.nn.Module, a pipeline stage or schedule, or a list of"
        f" them, got {type(wrong).__name__}. Pass the model itself, wrapped or not."
    )
    for given_ in (wrong, [wrong]):
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            torchwhere.layout(given_)


def test_no_model() -> None:
    """An empty list is a ValueError."""
    with pytest.raises(ValueError, match=r"^layout\(\[\]\): there is no model in the list$"):
        torchwhere.layout([])


def test_time_is_linear_in_modules() -> None:
    """Eight times the modules take about eight times the CPU time: nothing is quadratic, folded or
    not."""

    def seconds(count: int) -> float:
        alike = [nn.Sequential(nn.Linear(1, 1), nn.ReLU()) for _ in range(count)]
        different = nn.ModuleDict({f"m{i}": nn.Linear(1, 1 + i) for i in range(count // 4)})
        model = nn.Sequential(*alike, different)
        start = time.process_time()
        assert len(str(torchwhere.layout(model)).splitlines()) == 5 + 2 * len(different)
        return time.process_time() - start

    with torch.device("meta"):
        assert seconds(4000) < 24 * min(seconds(500) for _ in range(3))


def test_very_deep() -> None:
    """Modules nested deeper than JSON can be are cut, and the layout says so."""
    model: nn.Module = nn.Linear(1, 1)
    for _ in range(300):
        model = nn.Sequential(model)
    found = torchwhere.layout(model)
    assert Layout.from_dict(found.to_dict()) == found
    assert "more than 100 levels: the rest is left out" in str(found)


# -- as JSON, text and HTML ------------------------------------------------------------------------


def test_from_dict_is_tolerant_and_strict() -> None:
    """Keys of a newer version are skipped and missing ones are empty; anything that is not a layout
    is a ValueError."""
    data = torchwhere.layout(Model()).to_dict()
    data["roots"][0] |= {"colour": "blue"}
    data["roots"][0]["children"][1]["params"][0] |= {"colour": "red"}
    assert Layout.from_dict(data) == torchwhere.layout(Model())
    slim = {
        "rank": 1,
        "world_size": 2,
        "roots": [{"class": "M", "params": [{"name": "w", "shape": [2], "local_shape": [1]}]}],
    }
    assert [name for name, _ in Layout.from_dict(slim).params()] == ["w"]
    for junk in (
        None,
        3,
        [],
        {},
        data | {"roots": [3]},
        data | {"roots": [{"class": "M", "name": "x", "count": 2}]},
    ):
        with pytest.raises(ValueError, match=r"^not the result of Layout\.to_dict\(\) \("):
            Layout.from_dict(junk)


@given(st.lists(st.integers(0, 50), max_size=30))
def test_ranks_as_text(ranks: list[int]) -> None:
    """Any list of ranks comes back from its text as it was."""
    assert ranks_from_text(ranks_to_text(ranks)) == ranks


def test_ranks_text_is_short() -> None:
    """Runs are folded, with and without a step."""
    assert ranks_to_text(range(10_000)) == "0-9999"
    assert ranks_to_text([*range(0, 64, 8), 100, 3]) == "0-56:8, 100, 3"


class Tags(HTMLParser):
    """Counts tags and collects text: what a browser would make of a fragment."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_html_is_whole_and_harmless() -> None:
    """The HTML is one closed fragment without script or links, and a hostile name is text in it, in
    the terminal too."""
    model = Model()
    hostile = "<script>alert(1)</script>\"' onload=\x1b[31m"
    model.add_module(hostile, nn.Linear(2, 2))
    tags = Tags()
    tags.feed(torchwhere.layout(model)._repr_html_())
    assert not tags.open
    assert tags.seen == {"div", "style", "span", "details", "summary"}
    shown = hostile.replace("\x1b", "\N{REPLACEMENT CHARACTER}")
    assert f"{shown}.weight" in tags.texts
    assert "layers.0-1 x2 " in tags.texts
    assert f"{shown}.weight" in str(torchwhere.layout(model))
    assert "\x1b" not in str(torchwhere.layout(model))


# -- FSDP2, HSDP and tensor parallel ---------------------------------------------------------------


def _fsdp2_and_tp() -> tuple[dict[str, Any], str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model(width=10, depth=3)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"], mp_policy=half)
    fully_shard(model, mesh=mesh["dp"])
    before = torchwhere.layout(model)
    return before.to_dict(), str(before)


def test_fsdp2_with_tensor_parallel(four_ranks: Pool) -> None:
    """On a 2x2 mesh: placements on both dimensions, the plan, dtypes, what is resharded when, and
    what each rank holds."""
    answers = four_ranks.run(_fsdp2_and_tp)
    found = read([data for data, _ in answers])
    up = [param(layout, "layers.1.up.weight") for layout in found]
    assert {one.placements for one in up} == {("StridedShard(0, sf=2)", "Shard(0)")}
    assert [one.local_shape for one in up] == [(3, 10), (3, 10), (2, 10), (2, 10)]
    assert {param(layout, "layers.1.down.weight").placements for layout in found} == {
        ("Shard(0)", "Shard(1)")
    }
    assert found[3].meshes[up[3].mesh or 0].groups == ("1, 3", "2-3")
    assert [unit(layout, "layers.0").reshard for layout in found] == ["after forward"] * 4
    # the root, although no forward has marked it as such yet
    assert unit(found[0]).reshard == "after backward"
    assert dict(unit(found[0], "layers.2").dtypes) == {"param": "bfloat16", "reduce": "float32"}
    assert (unit(found[0], "layers.2").params, unit(found[0]).params) == (4, 2)
    assert (
        sum(param(layout, "head.weight").local_bytes for layout in found)
        == 2 * param(found[0], "head.weight").bytes
    )
    assert (
        dict(found[0].modules())["layers.0.up"].plan == "ColwiseParallel: Replicate() to Shard(-1)"
    )
    assert_golden("fsdp2-tp", answers[3][1])


def _tensor_parallel() -> tuple[dict[str, Any], str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Model()
    model.add_module("norm", nn.LayerNorm(8))
    inputs = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
    parallelize_module(
        model, mesh, {"layers.0": inputs, "head": ColwiseParallel(), "norm": SequenceParallel()}
    )
    found = torchwhere.layout(model)
    return found.to_dict(), str(found)


def test_tensor_parallel_alone(two_ranks: Pool) -> None:
    """A plan without FSDP: no units, DTensors with their placements, and the styles of modules with
    parameters and without."""
    answers = two_ranks.run(_tensor_parallel)
    found = read([data for data, _ in answers])
    plans = {name: node.plan for name, node in found[0].modules() if node.plan}
    assert plans == {
        "layers.0": "PrepareModuleInput",
        "head": "ColwiseParallel: Replicate() to Shard(-1)",
        "norm": "SequenceParallel: Shard(1)",
    }
    assert list(found[0].units()) == []
    assert [param(layout, "head.bias").local_shape for layout in found] == [(4,), (4,)]
    assert param(found[0], "norm.weight").placements == ("Replicate()",)
    assert param(found[0], "layers.0.up.weight").mesh is None
    assert_golden("tp", answers[1][1])


def _hsdp() -> tuple[dict[str, Any], str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Model(depth=3)
    ignored = {model.layers[2].up.bias}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False, ignored_params=ignored)
    fully_shard(model.head, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    seen = []
    model.layers[1].down.register_forward_pre_hook(lambda *_: seen.append(torchwhere.layout(model)))
    sharded = torchwhere.layout(model)
    model(batch())
    assert seen[0] == sharded, "a gathered unit is described by its shards all the same"
    return sharded.to_dict(), str(sharded)


def test_hsdp(four_ranks: Pool) -> None:
    """A 2x2 mesh that replicates and shards; offloading, an ignored parameter, a unit without
    parameters of its own."""
    answers = four_ranks.run(_hsdp)
    found = read([data for data, _ in answers])
    layer, head = unit(found[1], "layers.0"), unit(found[1], "head")
    assert (layer.kind, layer.placements, layer.reshard, layer.offload) == (
        "FSDP2",
        ("Replicate()", "Shard(0)"),
        "after backward",
        None,
    )
    assert head.offload == "cpu"
    assert found[1].meshes[layer.mesh or 0].dims == ("replicate", "shard")
    assert [layout.meshes[layer.mesh or 0].groups for layout in found] == [
        ("0, 2", "0-1"),
        ("1, 3", "0-1"),
        ("0, 2", "2-3"),
        ("1, 3", "2-3"),
    ]
    assert unit(found[0]).params == 0
    assert param(found[0], "layers.2.up.bias").unit is None
    assert [layout.local_bytes for layout in found] == [found[0].bytes // 2 + 16] * 4
    assert_golden("hsdp", answers[0][1])


def _fsdp2_details() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = Model(width=6)
    model.head.weight = model.layers[1].down.weight
    fully_shard(model.layers[0], mesh=mesh, reshard_after_forward=2)
    fully_shard([model.layers[1], model.head], mesh=mesh)
    return torchwhere.layout(model).to_dict()


def test_fsdp2_in_detail(four_ranks: Pool) -> None:
    """Resharding to fewer ranks, one unit over two modules, a tied parameter in it, uneven shards
    and their padding."""
    found = read(four_ranks.run(_fsdp2_details))
    assert unit(found[0], "layers.0").reshard == "after forward, to 2 ranks"
    assert (unit(found[0], "layers.1").also, unit(found[0], "head").also) == (
        ("head",),
        ("layers.1",),
    )
    assert param(found[0], "head.weight").tied == "layers.1.down.weight"
    assert (unit(found[0], "layers.1").params, unit(found[0], "head").params) == (4, 1)
    weights = [param(layout, "layers.0.up.weight") for layout in found]
    assert [one.local_shape for one in weights] == [(2, 6), (2, 6), (2, 6), (0, 6)]
    assert [unit(layout, "layers.0").padding_bytes for layout in found] == [
        0,
        0,
        0,
        4 * 2 * (12 + 2),
    ]


def _fsdp2_over_checkpoint_wrapper() -> str:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(checkpoint_wrapper(nn.Linear(8, 8)) for _ in range(4)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return str(torchwhere.layout(model))


def test_fsdp2_over_a_checkpoint_wrapper(two_ranks: Pool) -> None:
    """A unit around a checkpointed block does not list itself, and alike units fold."""
    for text in two_ranks.run(_fsdp2_over_checkpoint_wrapper):
        assert "0-3 x4  Linear" in text
        assert ", with " not in text


# -- FSDP1 -----------------------------------------------------------------------------------------


def _fsdp1(strategy: str, use_orig_params: bool) -> tuple[dict[str, Any], str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffload,
        FullyShardedDataParallel,
        MixedPrecision,
        ShardingStrategy,
    )
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = Model()
    model.head.weight = (
        model.layers[0].up.weight if strategy == "SHARD_GRAD_OP" else model.head.weight
    )
    mesh = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        if "HYBRID" in strategy
        else None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = FullyShardedDataParallel(
            model,
            device_id=CPU,
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=None if strategy == "SHARD_GRAD_OP" else ModuleWrapPolicy({Block}),
            use_orig_params=use_orig_params,
            mixed_precision=(
                MixedPrecision(param_dtype=torch.bfloat16) if strategy == "FULL_SHARD" else None
            ),
            cpu_offload=CPUOffload(offload_params=strategy == "NO_SHARD"),
        )
    found = torchwhere.layout(wrapped)
    return found.to_dict(), str(found)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_full_shard(two_ranks: Pool, use_orig_params: bool) -> None:
    """Every parameter is listed by its own name and shape, also if the module no longer holds it,
    with its part of the flat parameter."""
    answers = two_ranks.run(_fsdp1, "FULL_SHARD", use_orig_params)
    found = read([data for data, _ in answers])
    assert [name for name, _ in found[0].params()] == [
        name for name, _ in Model().named_parameters()
    ]
    layer = unit(found[0], "layers.1")
    assert (layer.kind, layer.placements, layer.reshard, layer.params) == (
        "FSDP1",
        ("Shard(flat)",),
        "after forward",
        4,
    )
    assert dict(layer.settings) == {"strategy": "FULL_SHARD", "use_orig_params": use_orig_params}
    assert dict(layer.dtypes) == {"param": "bfloat16"}
    assert param(found[1], "layers.0.down.weight").shape == (8, 8)
    for name, one in found[0].params():
        assert one.local_bytes + param(found[1], name).local_bytes == one.bytes
    assert found[0].local_bytes == found[0].bytes // 2
    if use_orig_params:
        assert_golden("fsdp1", answers[1][1])


def test_fsdp1_other_strategies(two_ranks: Pool) -> None:
    """SHARD_GRAD_OP reshards after backward, and its tied parameter is counted once; NO_SHARD has
    everything whole."""
    grad_op = read([data for data, _ in two_ranks.run(_fsdp1, "SHARD_GRAD_OP", False)])
    assert (unit(grad_op[0]).reshard, dict(unit(grad_op[0]).settings)["strategy"]) == (
        "after backward",
        "SHARD_GRAD_OP",
    )
    assert param(grad_op[0], "head.weight").tied == "layers.0.up.weight"
    assert sum(layout.local_bytes for layout in grad_op) == grad_op[0].bytes == 4 * (4 * 72 + 8)
    whole = read([data for data, _ in two_ranks.run(_fsdp1, "NO_SHARD", True)])
    assert (unit(whole[0]).placements, unit(whole[0]).reshard, unit(whole[0]).offload) == (
        ("Replicate()",),
        None,
        "cpu",
    )
    assert whole[1].local_bytes == whole[1].bytes


def test_fsdp1_hybrid(four_ranks: Pool) -> None:
    """HYBRID_SHARD on a 2x2 mesh replicates over the outer dimension and cuts over the inner
    one."""
    found = read([data for data, _ in four_ranks.run(_fsdp1, "HYBRID_SHARD", True)])
    layer = unit(found[2], "layers.0")
    assert layer.placements == ("Replicate()", "Shard(flat)")
    assert found[2].meshes[layer.mesh or 0].groups == ("0, 2", "2-3")
    assert [layout.local_bytes for layout in found] == [found[0].bytes // 2] * 4


# -- DDP, pipelines --------------------------------------------------------------------------------


def _ddp() -> tuple[dict[str, Any], str]:
    model = Model()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ["head.bias"]
    )
    wrapped = nn.parallel.DistributedDataParallel(
        model, find_unused_parameters=True, bucket_cap_mb=1
    )
    found = torchwhere.layout(wrapped)
    return found.to_dict(), str(found)


def test_ddp(two_ranks: Pool) -> None:
    """DDP replicates everything except the parameters that it ignores."""
    answers = two_ranks.run(_ddp)
    found = read([data for data, _ in answers])
    assert unit(found[0]).kind == "DDP"
    assert dict(unit(found[0]).settings) == {
        "bucket_cap_mb": 1,
        "find_unused_parameters": True,
        "ignored_parameters": 1,
    }
    assert found[0].meshes[0].ranks == "0-1"
    assert (param(found[0], "head.weight").placements, param(found[0], "head.weight").unit) == (
        ("Replicate()",),
        0,
    )
    assert param(found[0], "head.bias").unit is None
    assert_golden("ddp", answers[0][1])


def test_composable_replicate(one_rank: None) -> None:
    """Both kinds of the composable `replicate` are units: the one made of FSDP2's parts, and the
    one made of DDP."""
    from torch.distributed._composable.replicate import replicate as with_ddp
    from torch.distributed._composable.replicate_with_fsdp import replicate as with_fsdp

    model, other = with_fsdp(Model()), with_ddp(Model(), ignored_modules=[])
    assert (unit(torchwhere.layout(model)).kind, unit(torchwhere.layout(other)).kind) == (
        "replicate",
        "DDP",
    )
    other(batch())
    for found in (torchwhere.layout(model), torchwhere.layout(other)):
        assert (unit(found).params, unit(found).placements, found.roots[0].node.cls) == (
            10,
            ("Replicate()",),
            "Model",
        )
        assert param(found, "head.weight").placements == ("Replicate()",)
        assert found.meshes[0].ranks == "0"


def _pipeline() -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B

    rank = dist.get_rank()
    model = nn.Sequential(*(Block() for _ in range(2 + rank)))
    stage = PipelineStage(model, rank, 2, CPU)
    stages = [PipelineStage(Block(), rank + 2 * turn, 4, CPU) for turn in range(2)]
    found = {
        "stage": torchwhere.layout(stage),
        "schedule": torchwhere.layout(ScheduleGPipe(stage, 2)),
        "module": torchwhere.layout(model),
        "interleaved": torchwhere.layout(ScheduleInterleaved1F1B(stages, 2, loss_fn=nn.MSELoss())),
    }
    alone = dist.new_group([rank], use_local_synchronization=True)
    fully_shard(
        stages[0].submod, mesh=torch.distributed.device_mesh.DeviceMesh.from_group(alone, "cpu")
    )
    found["sharded"] = torchwhere.layout(stages)
    return {key: layout.to_dict() for key, layout in found.items()}


def test_pipeline_stages(two_ranks: Pool) -> None:
    """A stage, a schedule and the module of a stage are all recognized as that stage; a rank may
    have several, sharded inside."""
    for rank, answer in enumerate(two_ranks.run(_pipeline)):
        found = {key: Layout.from_dict(data) for key, data in answer.items()}
        assert found["stage"] == found["schedule"] == found["module"]
        stage = unit(found["stage"])
        assert (stage.kind, dict(stage.settings)) == (
            "pipeline stage",
            {"stage": rank, "stages": 2},
        )
        assert found["stage"].roots[0].node.count == 4 * (2 + rank)
        assert [root.name for root in found["interleaved"].roots] == ["", f"<stage {2 + rank}>"]
        kinds = [[one.kind for one in root.node.units] for root in found["sharded"].roots]
        assert kinds == [["pipeline stage", "FSDP2"], ["pipeline stage"]]
        assert param(found["sharded"], "up.weight").unit == 0
        assert f"pipeline stage {rank} (of 0-1) over 2 ranks" in str(found["stage"])


# -- DeepSpeed -------------------------------------------------------------------------------------


def _zero(stage: int) -> tuple[dict[str, Any], dict[str, Any], str]:
    import deepspeed

    torch.manual_seed(0)
    model = Model(width=9)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": stage == 3},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 10,
            "reduce_bucket_size": 100,
        },
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters()
    )
    seen = []
    model.head.register_forward_pre_hook(lambda *_: seen.append(torchwhere.layout(model)))
    rows = batch(width=9).to(torch.bfloat16 if stage == 3 else torch.float32)
    engine.backward(engine(rows).pow(2).mean())
    engine.step()
    found = torchwhere.layout(engine)
    assert list(seen[0].params()) == list(found.params()), (
        "gathered in forward, and described by its parts all the same"
    )
    return found.to_dict(), torchwhere.layout(model).to_dict(), str(found)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_zero(two_ranks: Pool, stage: int) -> None:
    """ZeRO from the engine and from the model alone: what is partitioned, the parts of ZeRO-3, the
    optimizer bytes of this rank."""
    answers = two_ranks.run(_zero, stage, checks_itself=True)
    engines, models = (
        read([answer[0] for answer in answers]),
        read([answer[1] for answer in answers]),
    )
    for found, model in zip(engines, models, strict=True):
        zero = unit(found)
        assert zero.kind == unit(model).kind == f"ZeRO-{stage}"
        assert dict(zero.settings)["sharded"].count(",") == stage - 1
        assert (found.meshes[zero.mesh or 0].ranks, zero.params, dict(zero.dtypes)["master"]) == (
            "0-1",
            10,
            "float32",
        )
        # half of 450 elements, three times: master and two moments
        assert 3 * 4 * 225 <= (zero.state_bytes or 0) < 3 * 4 * 260
        assert list(found.params()) == list(model.params())
    weights = [param(found, "head.weight") for found in engines]
    if stage == 3:
        assert [one.local_shape for one in weights] == [(41,), (40,)]
        assert (weights[0].placements, weights[0].shape, weights[0].dtype) == (
            ("Shard(flat)",),
            (9, 9),
            "bfloat16",
        )
        assert param(engines[0], "head.bias").note == "kept gathered"
        assert sum(found.local_bytes for found in engines) == engines[0].bytes
        assert_golden("zero3", answers[1][2])
    else:
        assert [(one.local_shape, one.placements) for one in weights] == [
            ((9, 9), ("Replicate()",))
        ] * 2


# -- a world that is gone --------------------------------------------------------------------------


def test_a_destroyed_world() -> None:
    """After destroy_process_group a model still has a layout with shapes and placements, and it
    says what is missing."""
    from torch.distributed.fsdp import fully_shard

    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, replicated = Model(), nn.parallel.DistributedDataParallel(Model())
    fully_shard(model.layers[0])
    before = torchwhere.layout(model)
    dist.destroy_process_group()
    sys.excepthook = hook  # torch installs one of its own and leaves it
    after = torchwhere.layout(model)
    assert not before.meshes[0].is_gone
    assert after.meshes[0].is_gone
    assert list(after.params()) == list(before.params())
    assert after.notes == (
        "the process groups are destroyed: the meshes may lack ranks and groups",
    )
    assert "group of 1 rank on cpu: ranks 0, destroyed" in str(after)
    assert (
        torchwhere.layout(replicated).meshes[0].ranks,
        torchwhere.layout(replicated).meshes[0].shape,
    ) == ("", (1,))
