"""Names of modules and parameters: as in the user's state_dict, whatever happens to the model."""

from __future__ import annotations

import gc

import torch
from torch import nn

import torchwhere
from models import Block, Model, batch
from torchwhere.inspect.names import NameTable, topmost, walk


def test_names_are_those_of_the_state_dict() -> None:
    """Every parameter and module has the name it has in state_dict."""
    model = Model()
    table = NameTable()
    table.add_root(model)
    assert {table.param_names(param)[0] for param in model.parameters()} == set(model.state_dict())
    assert table.module_names(model.layers[1].up) == ["layers.1.up"]


def test_modules_added_later_are_found() -> None:
    """A module added after the names were taken (an adapter) is found when it is asked for."""
    model = Model()
    table = NameTable()
    table.add_root(model)
    model.layers[0].adapter = nn.Linear(8, 8)
    assert table.module_names(model.layers[0].adapter) == ["layers.0.adapter"]
    assert table.param_names(model.layers[0].adapter.weight) == ["layers.0.adapter.weight"]


def test_a_stranger_has_no_name() -> None:
    """A module of no known model has no name, and asking again does not walk the model again."""
    table = NameTable()
    table.add_root(Model())
    stranger = nn.Linear(1, 1)
    assert table.module_names(stranger) == []
    assert table.module_names(stranger) == []
    assert table.param_names(stranger.weight) == []


def test_names_do_not_keep_a_model_alive() -> None:
    """The table holds modules weakly and forgets what is gone."""
    table = NameTable()
    model = Model()
    table.add_root(model)
    assert table.modules
    del model
    gc.collect()
    assert table.modules == {}
    assert table.params == {}


def test_a_module_that_contains_itself_and_many_aliases() -> None:
    """Cycles end, and a module shared very often does not multiply the names below it."""
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
    """The root of a module that is called on its own is found from who holds it."""
    model = Model()
    assert topmost(model.layers[1].up) is model
    assert topmost(model) is model


def test_modules_held_in_a_plain_list_and_made_on_the_fly() -> None:
    """A module that is registered nowhere is shown by its class, below the module that called it."""
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
    assert seen == ["0.<Block>.<Linear>"]


def test_a_second_model_has_its_class_as_prefix() -> None:
    """Beside the model given, another model and a loss are told apart by their class, in angle brackets."""
    seen = []
    model, other = Model(), Model(depth=1)
    for module in (model.head, other.head):
        module.register_forward_hook(lambda *_: seen.append(torchwhere.where().module))
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda *_: seen.append(torchwhere.where().module))
    with torchwhere.watch(model):
        loss(other(batch()), model(batch()))
    assert seen == ["<Model>.head", "head", "<MSELoss>"]
