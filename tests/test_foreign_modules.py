"""Names of modules that belong to no known model, and the cost of finding them."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torchwhere
from torchwhere.hooks import enclosing


def names_of(make: Callable[[], nn.Module], *, times: int, keep: bool) -> list[str | None]:
    """The names of modules that are created and called one after the other, outside any other."""
    kept, seen = [], []
    for _ in range(times):
        module = make()
        module.register_forward_hook(lambda *_: seen.append(torchwhere.where().module))
        module(torch.zeros(2))
        if keep:
            kept.append(module)
        del module
    return seen


def test_made_anew_in_every_step() -> None:
    """A loss that is created in every step has one name; those that are alive together have
    numbers."""
    with torchwhere.watch(nn.Linear(2, 2)):
        assert names_of(nn.ReLU, times=5, keep=False) == ["<ReLU>"] * 5
        assert names_of(nn.Tanh, times=4, keep=True) == [
            "<Tanh>",
            "<Tanh#2>",
            "<Tanh#3>",
            "<Tanh#4>",
        ]


def test_a_number_is_given_again() -> None:
    """If the second of three live modules is deleted, the next one takes its number."""
    with torchwhere.watch(nn.Linear(2, 2)):
        kept = [nn.ReLU() for _ in range(3)]
        for module in kept:
            module(torch.zeros(2))
        del module, kept[1]
        assert names_of(nn.ReLU, times=1, keep=False) == ["<ReLU#2>"]


class Pair(nn.Module):
    """Refers to another module, which may refer to it."""

    def __init__(self, other: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def ring(size: int) -> list[Pair]:
    """A cycle of modules, each of which holds the next one."""
    pairs = [Pair() for _ in range(size)]
    for one, following in zip(pairs, [*pairs[1:], pairs[0]], strict=True):
        one.other = following
    return pairs


def test_no_first_call_looks_at_all_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call never asks the garbage collector, which looks at every object of the process."""
    asked: list[str] = []
    for name in ("get_referrers", "get_objects"):
        monkeypatch.setattr(gc, name, lambda *_, name=name: asked.append(name) or [])
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    unseen = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    first = [
        copy.deepcopy(model),
        copy.deepcopy(model),
        nn.Linear(2, 2),
        nn.MSELoss(),
        unseen[1],
        *ring(2),
        *ring(3),
    ]
    with torchwhere.watch(model):
        model(torch.zeros(2))
        for module in first:
            module(*[torch.zeros(2)] * (2 if isinstance(module, nn.MSELoss) else 1))
    assert asked == []


class Counted(dict[str, nn.Module]):
    """The children of a module, which count how often they are looked at."""

    looks = 0

    def values(self) -> Any:
        Counted.looks += 1
        return super().values()


def test_a_search_visits_few_modules() -> None:
    """A large model in scope is not searched completely for the called module."""
    deep = leaf = nn.Module()
    for _ in range(5_000):
        leaf.__dict__["_modules"] = Counted(next=nn.Module())
        leaf = leaf._modules["next"]  # type: ignore[assignment]
    with torchwhere.watch(nn.Linear(2, 2)):
        Counted.looks = 0
        nn.Linear(2, 2)(torch.zeros(2))
    assert 0 < Counted.looks <= 400
    assert deep._modules


def test_a_search_looks_at_few_values() -> None:
    """Only the first of many variables and attributes are searched."""
    looked = 0

    def values() -> Iterator[object]:
        nonlocal looked
        for _ in range(10_000):
            looked += 1
            yield SimpleNamespace(**{f"a{number}": number for number in range(100)})

    assert list(enclosing._modules(values())) == []
    assert looked <= 400


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_modules_that_refer_to_each_other(size: int) -> None:
    """A ring of modules is named, and the search for the model around it ends."""
    seen: list[str | None] = []
    pairs = ring(size)
    pairs[0].register_forward_hook(lambda *_: seen.append(torchwhere.where().module))
    with torchwhere.watch(nn.Linear(2, 2)):
        pairs[0](torch.zeros(2))
    assert len(seen) == 1
    assert (seen[0] or "").startswith("<Pair>")


# -- the model around a part, as the calling frames see it -----------------------------------------


def a_model() -> tuple[nn.Sequential, list[str | None]]:
    model, seen = nn.Sequential(nn.Sequential(nn.Linear(2, 2))), []
    model[0][0].register_forward_hook(lambda *_: seen.append(torchwhere.where().module))
    return model, seen


def call(part: nn.Module) -> None:
    part(torch.zeros(2))


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def train(self) -> None:
        call(self.model[0][0])  # type: ignore[index]


HELD: list[nn.Module] = []


def in_a_variable(model: nn.Sequential) -> None:
    call(model[0][0])


def in_an_attribute(model: nn.Sequential) -> None:
    trainer = Trainer(model)
    del model
    trainer.train()


def in_a_list(model: nn.Sequential) -> None:
    models = [model]
    del model
    call(models[0][0][0])


def in_a_global(model: nn.Sequential) -> None:
    HELD.append(model)
    part = model[0][0]
    del model
    call(part)


def in_a_closure(model: nn.Sequential) -> None:
    def inner() -> None:
        call(model[0][0])

    inner()


@pytest.mark.parametrize(
    "held", [in_a_variable, in_an_attribute, in_a_list, in_a_global, in_a_closure]
)
def test_where_the_model_may_be(held: Callable[[nn.Sequential], None]) -> None:
    """A child is named after its model, wherever the calling frames hold the model."""
    model, seen = a_model()
    models = iter([model])
    del model
    with torchwhere.watch(nn.Linear(2, 2)):
        held(next(models))
    HELD.clear()
    assert seen == ["<Sequential>.0.0"]


def test_a_part_that_is_called_before_its_model_is_seen() -> None:
    """A child called without its model in scope has its class as name; after the model is called,
    it has its name there."""
    model, seen = a_model()
    thread = threading.Thread(target=model[0][0], args=(torch.zeros(2),))
    with torchwhere.watch(nn.Linear(2, 2)):
        thread.start()
        thread.join()
        for _ in range(2):
            model(torch.zeros(2))
    assert seen == ["<Linear>", "<Sequential>.0.0", "<Sequential>.0.0"]


def test_a_part_that_came_to_a_known_model() -> None:
    """A module that is added to the watched model and called alone has its name in the model."""
    model, seen = nn.Sequential(nn.Linear(2, 2)), []
    with torchwhere.watch(model):
        model(torch.zeros(2))
        model.append(nn.Linear(2, 2))
        model[1].register_forward_hook(lambda *_: seen.append(torchwhere.where().module))
        model[1](torch.zeros(2))
    assert seen == ["1"]


def test_variables_live_no_longer() -> None:
    """A variable that is deleted after a search of its frame is freed at once."""
    thing, model = nn.Linear(2, 2), nn.Linear(2, 2)
    ref = weakref.ref(thing)
    with torchwhere.watch(nn.Linear(2, 2)):
        model(torch.zeros(2))
        del thing
        assert ref() is None


def _saves_locals(first: nn.Module, second: int) -> dict[str, Any]:
    saved = locals()
    later = second + 1
    first(torch.zeros(2))
    assert later
    return saved


def _makes_a_variable(first: nn.Module) -> int:
    exec("made = 3")
    first(torch.zeros(2))
    return int(eval("made"))


def test_locals_are_unchanged() -> None:
    """The dictionary from `locals()`, and a variable that `exec` created, are as without a
    watch."""
    alone = _saves_locals(nn.Linear(2, 2), 1), _makes_a_variable(nn.Linear(2, 2))
    with torchwhere.watch(nn.Linear(2, 2)):
        watched = _saves_locals(nn.Linear(2, 2), 1), _makes_a_variable(nn.Linear(2, 2))
    assert [list(alone[0]), alone[1]] == [list(watched[0]), watched[1]]


def test_a_part_of_an_unknown_model_is_found() -> None:
    """A bare module that is part of a model is not treated as created on the fly, whatever other
    classes did before."""
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    with torchwhere.watch(nn.Linear(2, 2)):
        names_of(nn.ReLU, times=5, keep=False)
        seen: list[str | None] = []
        model[1].register_forward_hook(lambda *_: seen.append(torchwhere.where().module))
        model[1](torch.zeros(2))
    assert seen == ["<Sequential>.1"]


class MadeInForward(nn.Module):
    """Makes its activation anew in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: list[str | None] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activation = nn.ReLU()
        activation.register_forward_hook(lambda *_: self.seen.append(torchwhere.where().module))
        y: torch.Tensor = activation(self.linear(x))
        return y


def test_made_in_a_forward() -> None:
    """An activation that is created in a forward is named after the module that creates it, each
    time."""
    model = nn.Sequential(MadeInForward())
    with torchwhere.watch(model):
        for _ in range(5):
            model(torch.zeros(2))
    assert model[0].seen == ["0.<ReLU>"] * 5


def test_nothing_is_kept_alive() -> None:
    """A named module is freed as soon as its owner drops it."""
    with torchwhere.watch(nn.Linear(2, 2)):
        module = nn.ReLU()
        module(torch.zeros(2))
        ref = weakref.ref(module)
        del module
        assert ref() is None
