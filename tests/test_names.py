"""Names of modules and parameters: as in the user's state_dict, whatever happens to the model."""

from __future__ import annotations

import gc
import json
import re
import weakref
from time import process_time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torchwhere
from models import Block, Model, batch
from rank_pool import Pool
from torchwhere.api.names import UnknownNameError, names_of_live_models
from torchwhere.model.module_names import NameTable
from torchwhere.model.module_walk import walk
from torchwhere.model.wrappers import topmost


def test_names_are_those_of_the_state_dict() -> None:
    """Every parameter and module has the name it has in state_dict."""
    model = Model()
    table = NameTable()
    table.add_root(model)
    assert {table.param_names(param)[0] for param in model.parameters()} == set(model.state_dict())
    assert table.module_names(model.layers[1].up) == ["layers.1.up"]


def test_modules_added_later_are_found() -> None:
    """A module that was added after the names were taken (an adapter) is found on demand."""
    model = Model()
    table = NameTable()
    table.add_root(model)
    model.layers[0].adapter = nn.Linear(8, 8)
    assert table.module_names(model.layers[0].adapter) == ["layers.0.adapter"]
    assert table.param_names(model.layers[0].adapter.weight) == ["layers.0.adapter.weight"]


def test_a_foreign_module_has_no_name() -> None:
    """A module of no known model has no name, and a second lookup does not walk the model again."""
    table = NameTable()
    table.add_root(Model())
    stranger = nn.Linear(1, 1)
    assert table.module_names(stranger) == []
    assert table.module_names(stranger) == []
    assert table.param_names(stranger.weight) == []


def test_names_do_not_keep_a_model_alive() -> None:
    """The table holds modules weakly and drops deleted ones."""
    table = NameTable()
    model = Model()
    table.add_root(model)
    assert table.modules
    del model
    gc.collect()
    assert table.modules == {}
    assert len(table.params) == 0


def test_a_module_that_contains_itself_and_many_aliases() -> None:
    """Cycles end, and a module that is shared very often does not multiply the names below it."""
    ring = nn.Module()
    ring.me = ring
    assert 1 <= len(list(walk(ring))) < 20
    shared = nn.Module()
    for _ in range(20):
        outer = nn.Module()
        outer.a, outer.b = shared, shared
        shared = outer
    assert len(list(walk(shared))) < 1000


def test_a_deep_model_needs_no_recursion() -> None:
    """A chain of 20,000 modules is named."""
    deep = leaf = nn.Module()
    for _ in range(20_000):
        leaf.next = nn.Module()
        leaf = leaf.next
    assert sum(1 for _ in walk(deep)) == 20_001


def test_topmost_finds_the_root_of_a_part() -> None:
    """The root of a module that is called alone is found from the objects that hold it."""
    model = Model()
    assert topmost(model.layers[1].up) is model
    assert topmost(model) is model


def test_modules_held_in_a_plain_list_and_made_on_the_fly() -> None:
    """An unregistered module is shown by its class, below the module that called it; its children
    have names."""
    seen = []

    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.blocks = [Block()]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](x) * self.weight

    model = nn.Sequential(Hides())
    model[0].blocks[0].up.register_forward_hook(lambda *_: seen.append(torchwhere.where().module))
    with torchwhere.watch(model):
        model(batch())
    assert seen == ["0.<Block>.up"]


def test_a_second_model_has_its_class_as_prefix() -> None:
    """A second model and a loss beside the given model are distinguished by their class, in angle
    brackets."""
    seen = []
    model, other = Model(), Model(depth=1)
    for module in (model.head, other.head):
        module.register_forward_hook(lambda *_: seen.append(torchwhere.where().module))
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda *_: seen.append(torchwhere.where().module))
    with torchwhere.watch(model):
        loss(other(batch()), model(batch()))
    assert seen == ["<Model>.head", "head", "<MSELoss>"]


# -- names(model) ----------------------------------------------------------------------------------


class Tied(Model):
    """A model with a tied parameter, a tied module, buffers and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.scale = nn.Parameter(torch.ones(1))
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.head.weight
        self.again = self.layers[0]
        self.norm = nn.BatchNorm1d(8)


def test_both_ways() -> None:
    """A module, parameter or buffer leads to all its names, and each name back to it."""
    model = Tied()
    names = torchwhere.names(model)
    assert names[model.head.weight] == ["head.weight", "tied.weight"]
    assert names[model.layers[0].up] == ["layers.0.up", "again.up"]
    assert names[model.norm.running_mean] == ["norm.running_mean"]
    assert names[model] == [""]
    for thing in (*model.modules(), *model.parameters(), *model.buffers()):
        assert all(names[name] is thing for name in names[thing])
    assert {name for name, _ in model.named_parameters()} <= {name for name, _ in names}
    assert len(names) == len([*model.modules(), *model.parameters(), *model.buffers()])
    assert names.model is model
    assert model.head in names
    assert "head.weight" in names
    assert "nope" not in names
    assert 3 not in names


def test_what_is_not_in_the_model() -> None:
    """The strict lookup raises a KeyError with a readable text; the lenient one returns None or an
    empty list."""
    model, stranger = Tied(), nn.Linear(2, 3)
    names = torchwhere.names(model)
    texts = {
        "layer.0.up": (
            "Tied has no module, parameter or buffer 'layer.0.up'; did you mean 'layers.0.up'?"
        ),
        "zzz": "Tied has no module, parameter or buffer 'zzz'",
        "head.weight.x": (
            "Tied has no module, parameter or buffer 'head.weight.x'; did you mean 'head.weight'?"
        ),
        stranger: (
            "this Linear is not part of Tied; call torchwhere.names() with the model that it"
            " belongs to"
        ),
        stranger.weight: (
            "this Parameter of shape (3, 2) is not part of Tied; "
            "call torchwhere.names() with the model that it belongs to"
        ),
    }
    for key, text in texts.items():
        with pytest.raises(KeyError) as raised:
            names[key]  # type: ignore[call-overload]
        assert str(raised.value) == text
        assert isinstance(raised.value, UnknownNameError)
    assert names.get("zzz") is None
    assert names.get(stranger) == []
    with pytest.raises(KeyError, match=r"^this Parameter of shape"):
        names.facts(stranger.weight)
    del model
    gc.collect()
    with pytest.raises(KeyError, match=r"^the model \(Tied\) of these names was deleted$"):
        names["head"]
    assert repr(names) == "<Names of Tied, deleted: 0 modules, 0 parameters, 0 buffers>"


@pytest.mark.parametrize("thing", [None, "model", Model, [Model()], torch.ones(1)])
def test_names_of_something_else(thing: Any) -> None:
    """An object that is not a module raises a TypeError that says what to pass."""
    with pytest.raises(TypeError) as raised:
        torchwhere.names(thing)
    assert (
        str(raised.value)
        == f"names(model): expected a torch.nn.Module, got {type(thing).__name__}. "
        "Pass the model, or the wrapper that DDP, FSDP, torch.compile or DeepSpeed made."
    )
    names = torchwhere.names(Model())
    with pytest.raises(
        TypeError,
        match=r"^names\[...\]: expected a name, a module, a parameter or a buffer, got int$",
    ):
        names[3]  # type: ignore[call-overload]
    model = Model()
    with pytest.raises(
        TypeError,
        match=r"^facts\('head'\): expected a parameter or a buffer; that is a module \(Linear\)$",
    ):
        torchwhere.names(model).facts("head")


def test_names_hold_nothing_alive() -> None:
    """Neither the names nor their caches keep a model, or a replaced part of it, in memory."""
    model = Model()
    names = torchwhere.names(model)
    assert names in names_of_live_models()
    part = weakref.ref(model.head)
    model.head = nn.Linear(8, 2)
    gc.collect()
    assert part() is None
    assert names["head.weight"] is model.head.weight
    whole = weakref.ref(model)
    del model
    gc.collect()
    assert whole() is None
    assert names not in names_of_live_models()


def test_facts_of_a_plain_model() -> None:
    """Shape, dtype, device, numel and aliases of every parameter and buffer are listed; without
    sharding there are no sharding facts."""
    model = Tied().to(torch.bfloat16)
    model.norm.weight.requires_grad_(False)
    names = torchwhere.names(model)
    found = names.facts("tied.weight")
    assert (found.name, found.aliases, found.kind) == ("tied.weight", ("head.weight",), "parameter")
    assert (found.shape, found.local_shape, found.numel, found.local_numel) == (
        (8, 8),
        (8, 8),
        64,
        64,
    )
    assert (found.dtype, found.device, found.requires_grad) == ("bfloat16", "cpu", True)
    assert (found.id, found.zero_status, found.placements, found.mesh, found.unit, found.flat) == (
        None,
    ) * 6
    assert not found.is_sharded
    assert names.facts(model.head.weight).name == "head.weight"
    assert not names.facts(model.norm.weight).requires_grad
    assert [each.name for each in names.parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    assert [each.name for each in names.buffers()] == [name for name, _ in model.named_buffers()]
    assert sum(each.numel for each in names.parameters()) == sum(
        param.numel() for param in model.parameters()
    )


def test_names_as_text_and_as_data() -> None:
    """The text is a table with one line per entry and without empty columns; the data is a
    dictionary for JSON."""
    names = torchwhere.names(model := Tied())
    lines = str(names).splitlines()
    assert lines[0] == repr(names) == "<Names of Tied: 8 modules, 9 parameters, 3 buffers>"
    assert lines[1].split() == ["name", "type", "shape", "numel", "dtype", "device", "also"]
    assert re.split(r"  +", lines[2]) == ["<root>", "Tied"]
    assert re.split(r"  +", next(line for line in lines if line.startswith("head.weight"))) == [
        *("head.weight", "parameter", "[8, 8]", "64", "float32", "cpu", "tied.weight")
    ]
    assert len(lines) == 2 + len(names)
    data = json.loads(json.dumps(names.to_dict()))
    assert data["model"] == "Tied"
    assert {"name": "layers.0", "class": "Block", "aliases": ["again"]} in data["modules"]
    assert [each["name"] for each in data["parameters"]] == [
        name for name, _ in model.named_parameters()
    ]
    assert data["buffers"][0]["kind"] == "buffer"


def test_naming_many_modules_is_linear() -> None:
    """The CPU time to name a model grows at most linearly with its modules."""
    with torch.device("meta"):
        small, large = (
            nn.Sequential(*(nn.Linear(1, 1) for _ in range(count))) for count in (1_000, 10_000)
        )

    def seconds(model: nn.Module) -> float:
        def once() -> float:
            start = process_time()
            torchwhere.names(model)
            return process_time() - start

        return min(once() for _ in range(3))

    assert seconds(large) < 30 * seconds(small)


# -- wrapped, compiled, sharded --------------------------------------------------------------------


def test_names_survive_compiling_and_checkpointing() -> None:
    """Names taken before the model is wrapped stay valid, for the wrappers too; the wrapped model
    has the same names."""
    model = Model()
    before, weight = torchwhere.names(model), model.layers[0].up.weight
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    compiled = torch.compile(model, backend="eager")
    for names in (before, torchwhere.names(compiled)):
        assert names[weight] == ["layers.0.up.weight"]
        assert names["layers.0.up.weight"] is weight
        assert names[compiled] == names[model] == [""]
        assert names[model.layers[0]] == ["layers.0"]
        assert names["_orig_mod.layers.0._checkpoint_wrapped_module.up.weight"] is weight
        assert "_orig_mod" not in str(names)
        assert names.model is model


def test_names_survive_ddp(one_rank: None) -> None:
    """DDP changes no name, and a second DDP around the same model finds the same names."""
    model = Model()
    names = torchwhere.names(DistributedDataParallel(model))
    gc.collect()
    again = DistributedDataParallel(model)
    assert names[again] == [""]
    assert names["module.head.weight"] is model.head.weight
    assert [name for name, _ in names if "module" in name] == []


def _fsdp1(use_orig_params: bool) -> dict[str, Any]:
    model = Model()
    names = torchwhere.names(model)
    options: dict[str, Any] = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    model.layers[0] = FullyShardedDataParallel(model.layers[0], **options)
    wrapped = FullyShardedDataParallel(model, **options)
    in_forward: list[Any] = []
    model.layers[0].register_forward_hook(
        lambda *_: in_forward.append(names.facts("layers.0.up.weight").to_dict())
    )
    facts = {
        name: names.facts(name).to_dict()
        for name in ("layers.0.up.weight", "layers.0.up.bias", "head.bias")
    }
    wrapped(batch()).sum().backward()
    flat = wrapped._handle.flat_param
    return {
        "facts": facts,
        "in forward": in_forward[0],
        "after": names.facts("layers.0.up.weight").to_dict(),
        "flat": names.facts(flat).to_dict(),
        "names of flat": names[flat],
        "back": names[names[flat][0]] is flat,
        "wrapper": names[wrapped],
        "described": [torchwhere.describe(flat), torchwhere.describe(names["layers.0.up.weight"])],
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1(two_ranks: Pool, use_orig_params: bool) -> None:
    """FSDP1 with and without original parameters has the right names, full and local shapes, units
    and flat parameters, before, during and after gathering."""
    answers = two_ranks.run(_fsdp1, use_orig_params, checks_itself=True)
    for answer in answers:
        for name, unit in (
            ("layers.0.up.weight", "layers.0"),
            ("layers.0.up.bias", "layers.0"),
            ("head.bias", ""),
        ):
            found = answer["facts"][name]
            assert (found["name"], found["unit"], found["kind"]) == (name, unit, "parameter")
            assert found["shape"] == ((8, 8) if name.endswith("weight") else (8,))
            assert found["flat"] == (f"{unit}._flat_param" if unit else "_flat_param")
            assert found["placements"] == ("Shard(flat)",)
        assert answer["in forward"]["shape"] == answer["after"]["shape"] == (8, 8)
        assert (
            answer["in forward"]["local_shape"]
            == answer["facts"]["layers.0.up.weight"]["local_shape"]
        )
        assert answer["wrapper"] == [""]
        flat = answer["flat"]
        assert (flat["name"], flat["kind"], answer["names of flat"]) == (
            "_flat_param",
            "flat parameter",
            ["_flat_param"],
        )
        assert answer["back"]
        assert flat["holds"] == tuple(
            name for name, _ in Model().named_parameters() if not name.startswith("layers.0")
        )
        assert flat["local_numel"] == -(-flat["numel"] // 2)
        assert answer["described"][0].startswith(
            "flat parameter _flat_param: [216] float32 cpu, [108] on this rank, holds "
        )
        if use_orig_params:
            assert answer["described"][1].startswith(
                "parameter layers.0.up.weight: [8, 8] float32 cpu"
            )
    for name, numel in (("layers.0.up.weight", 64), ("layers.0.up.bias", 8), ("head.bias", 8)):
        assert sum(answer["facts"][name]["local_numel"] for answer in answers) == numel


def _fsdp2_and_tp() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "dp"))
    model = Model()
    names, old = torchwhere.names(model), model.layers[0].up.weight
    parallelize_module(
        model.layers[1], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    before = {found.name: found.to_dict() for found in names.parameters()}
    in_forward: list[Any] = []
    model.layers[0].up.register_forward_hook(
        lambda *_: in_forward.append(
            (names[model.layers[0].up.weight], names.facts("layers.0.up.weight").to_dict())
        )
    )
    model(batch()).sum().backward()
    return {
        "before": before,
        "in forward": in_forward[0],
        "old": names.get(old),
        "new": names[model.layers[0].up.weight],
        "described": torchwhere.describe(model.head.weight),
        "table": str(names),
    }


def test_fsdp2_and_tensor_parallel(two_ranks: Pool) -> None:
    """FSDP2 and tensor parallel replace parameters: names lead to the new ones, with placements,
    mesh and unit, and gathered ones have the same facts."""
    for answer in two_ranks.run(_fsdp2_and_tp):
        assert list(answer["before"]) == [name for name, _ in Model().named_parameters()]
        plain, parallel = (
            answer["before"]["layers.0.up.weight"],
            answer["before"]["layers.1.down.weight"],
        )
        assert (plain["shape"], plain["local_shape"], plain["mesh"]) == ((8, 8), (4, 8), "dp=2")
        assert (plain["placements"], plain["unit"], plain["numel"], plain["local_numel"]) == (
            ("Shard(0)",),
            "layers.0",
            64,
            32,
        )
        assert (parallel["mesh"], parallel["unit"]) == ("tp=1 x dp=2", "layers.1") or parallel[
            "mesh"
        ] == "dp=2 x tp=1"
        assert sorted(parallel["placements"]) == ["Shard(0)", "Shard(1)"]
        assert answer["before"]["head.weight"]["unit"] == ""
        assert answer["in forward"] == (["layers.0.up.weight"], plain)
        assert answer["new"] == ["layers.0.up.weight"]
        assert answer["old"] == []  # it belongs to no model any more
        assert (
            answer["described"]
            == "DTensor parameter head.weight: [8, 8] float32 cpu, [4, 8] on this rank, Shard(0) on"
            " dp=2, requires grad"
        )
        assert "on dp=2: Shard(0), unit layers.0" in answer["table"]
