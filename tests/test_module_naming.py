"""Large models are named in parts: how much work a first call does, and that the names are right."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import torchwhere
from torchwhere.api import watch
from torchwhere.model.module_names import NameTable
from torchwhere.model.module_walk import ModuleWalk, name_below, walk
from torchwhere.native import load as loading

LEAVES = 4_998  # in a model of 5,000 modules
FEW = 1_200  # modules that one first call may visit


class Leaf(nn.Module):
    """A module that knows whether it was visited, and where it was called."""

    visited: ClassVar[set[int]] = set()
    places: ClassVar[list[str | None]] = []

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def __getattribute__(self, name: str) -> Any:
        if name in ("__dict__", "_modules", "_parameters"):
            Leaf.visited.add(id(self))
        return super().__getattribute__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Leaf.places.append(torchwhere.where().module)
        return x * self.weight


class Wide(nn.Module):
    """A model of 5,000 modules that calls only some of its layers."""

    def __init__(self, leaves: int = LEAVES) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Leaf() for _ in range(leaves))

    def forward(self, x: torch.Tensor, which: Iterable[int] = ()) -> torch.Tensor:
        for index in which:
            x = self.layers[index](x)
        return x


@pytest.fixture(autouse=True)
def nothing_recorded() -> None:
    Leaf.visited.clear()
    Leaf.places.clear()


@pytest.fixture(params=["python", "native"])
def code_path(
    request: pytest.FixtureRequest, library: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Python code records module calls, or the native extension does."""
    with monkeypatch.context() as patch:
        patch.setenv(loading.SWITCH, "0")
        if request.param == "native":
            patch.setenv("XDG_CACHE_HOME", str(library.parent.parent))
            patch.setenv(loading.SWITCH, "1")
            assert loading.native() is not None
        yield request.param


def visits(model: nn.Module, *args: Any) -> int:
    """The number of leaves that are visited while a model is called."""
    Leaf.visited.clear()
    model(torch.ones(1), *args)
    return len(Leaf.visited)


# -- how much work ---------------------------------------------------------------------------------


def test_a_first_call_visits_few_modules(code_path: str) -> None:
    """The first call of a copy of a large model visits few of its modules, in every step."""
    model = Wide()
    with torchwhere.watch(model):
        counts = [visits(copy.deepcopy(model)) for _ in range(3)]
        torchwhere.step()
        counts += [visits(copy.deepcopy(model)) for _ in range(3)]
    assert max(counts) <= FEW


def test_the_first_model_costs_no_more(code_path: str) -> None:
    """The first model of a watch that was given none is named in parts too."""
    model = Wide()
    with torchwhere.watch():
        assert visits(model) <= FEW


@pytest.mark.parametrize("which", [LEAVES - 1, 2_000])
def test_a_part_visits_few_modules(code_path: str, which: int) -> None:
    """The first call of a part that the walk has not reached visits few modules."""
    with torchwhere.watch():
        model = Wide()
        model(torch.ones(1))
        assert visits(model, [which]) <= FEW
    assert Leaf.places == [f"layers.{which}"]


def test_a_module_made_in_forward_visits_few_modules() -> None:
    """A module that is in no model is not looked for in the whole of a large model."""

    class Makes(Wide):
        def forward(self, x: torch.Tensor, which: Iterable[int] = ()) -> torch.Tensor:
            return nn.Linear(1, 1)(x)  # type: ignore[no-any-return]

    model = Makes()
    with torchwhere.watch(model):
        assert visits(model) <= FEW


def test_frozen_models_visit_few_modules() -> None:
    """The first call of a frozen model does not search all its modules for a trained parameter."""
    frozen = Wide().requires_grad_(False)
    with torchwhere.watch():
        counts = [visits(copy.deepcopy(frozen)) for _ in range(3)]
    assert 0 < max(counts) <= FEW


def test_a_model_is_searched_for_known_models_in_parts() -> None:
    """In the first step, the first call of a model does not search all its modules for parts that
    were called before."""
    with torchwhere.watch():
        nn.Linear(1, 1)(torch.ones(1))
        counts = [visits(Wide()) for _ in range(3)]
    assert 0 < max(counts) <= FEW


def test_a_model_around_a_large_part_visits_few_modules(code_path: str) -> None:
    """A model that contains a large model that was called before visits few modules at its first
    call, and all names are right from then on."""
    with torchwhere.watch():
        part = Wide()
        part(torch.ones(1), [0, 3_000])
        model = nn.Sequential(part)
        assert visits(model) <= FEW
        part(torch.ones(1), [0, 3_000])
    assert Leaf.places == ["layers.0", "layers.3000", "0.layers.0", "0.layers.3000"]


def test_ddp_visits_few_modules(one_rank: None) -> None:
    """The first call of a DDP instance does not list the parameters of its model."""
    with torchwhere.watch():
        model = nn.parallel.DistributedDataParallel(Wide())
        assert visits(model) <= FEW


# -- that the names are right ----------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
def test_all_names_of_a_copy(code_path: str, order: int) -> None:
    """Every module of a large copy has its name, in whatever order they are called."""
    model = Wide()
    indices = list(range(LEAVES))[::order]
    with torchwhere.watch(model), torch.no_grad():
        copy.deepcopy(model)(torch.ones(1), indices)
    assert Leaf.places == [f"<Wide>.layers.{index}" for index in indices]


def test_a_part_that_is_called_by_itself(code_path: str) -> None:
    """A part of a large model that is called outside the model has its name in the model."""
    with torchwhere.watch():
        model = Wide()
        model.layers[LEAVES - 1](torch.ones(1))
        model.layers[1](torch.ones(1))
    assert Leaf.places == [f"layers.{LEAVES - 1}", "layers.1"]


def test_a_part_of_a_later_model_is_found_later(code_path: str) -> None:
    """A module that was called before it became part of a large model has its name in the model as
    soon as the search reaches it, and the names of the model have no prefix from then on."""
    with torchwhere.watch(), torch.no_grad():
        part = Leaf()
        part(torch.ones(1))
        model = Wide()
        model.layers[2_000] = part
        model(torch.ones(1), range(LEAVES))
        before = Leaf.places[1:]
        Leaf.places.clear()
        model(torch.ones(1), range(LEAVES))
    assert before[0] == "<Wide>.layers.0"
    assert before[2_000:] == [f"layers.{index}" for index in range(2_000, LEAVES)]
    assert Leaf.places == [f"layers.{index}" for index in range(LEAVES)]


def test_a_trained_module_in_a_frozen_model_is_found_later() -> None:
    """A large model whose only trained module is in the middle has names without a prefix as soon
    as the search reaches that module, and not the model that is called after it."""
    model = Wide().requires_grad_(False)
    model.layers[2_000].requires_grad_(True)
    with torchwhere.watch(), torch.no_grad():
        model(torch.ones(1), range(LEAVES))
        Wide(1)(torch.ones(1), [0])
        model(torch.ones(1), [0])
    assert Leaf.places[0] == "<Wide>.layers.0"
    assert Leaf.places[2_000:] == [
        *(f"layers.{index}" for index in range(2_000, LEAVES)),
        "<Wide#2>.layers.0",
        "layers.0",
    ]


@pytest.mark.parametrize("trained", [0, LEAVES - 1])
def test_a_trained_module_at_an_end_is_found_at_once(trained: int) -> None:
    """A large model whose first or last module is the only trained one has names without a prefix
    at its first call."""
    model = Wide().requires_grad_(False)
    model.layers[trained].requires_grad_(True)
    with torchwhere.watch(), torch.no_grad():
        model(torch.ones(1), [1])
    assert Leaf.places == ["layers.1"]


def test_parameters_of_a_part_of_a_later_model() -> None:
    """A parameter that had a name in a part has its name in the model once the model is called, and
    no name if the model has replaced it."""
    with torchwhere.watch():
        part, other = Wide(3), Wide(2)
        part(torch.ones(1), range(3)).sum().backward()
        other(torch.ones(1), range(2)).sum().backward()
        model, replaced = nn.Sequential(part), part.layers[2]
        part.layers[2] = Leaf()
        model(torch.ones(1))
        session = watch.current()
        assert session is not None
        names = session.modules.names
        assert names.param_names(part.layers[1].weight) == ["0.layers.1.weight"]
        assert names.param_names(replaced.weight) == []
        assert names.known_names(replaced) == []
        assert names.param_names(other.layers[1].weight) == ["<Wide>.layers.1.weight"]


def test_nested_models_and_wrappers() -> None:
    """Modules deep inside a large model are named after their place, without the parts of
    wrappers."""
    model = nn.Sequential(Wide(300), checkpoint_wrapper(nn.Sequential(Wide(300))))
    with torchwhere.watch(), torch.no_grad():
        model(torch.ones(1))
        model[1][0](torch.ones(1), [299, 0])
    assert Leaf.places == ["1.0.layers.299", "1.0.layers.0"]


def test_a_tied_module() -> None:
    """A tied module that is called before the walk reaches its first name has that name as soon as
    the walk is over."""
    model = Wide()
    model.other = nn.ModuleList([model.layers[LEAVES - 1]])
    with torchwhere.watch(), torch.no_grad():
        model(torch.ones(1))
        model.other[0](torch.ones(1))
        model(torch.ones(1), range(LEAVES - 1))
        model(torch.ones(1), [LEAVES - 1])
    assert Leaf.places[-1] == f"layers.{LEAVES - 1}"


def test_a_module_of_no_place_is_renamed() -> None:
    """A part of a large model that another part calls without having it is named by its class, and
    after its place as soon as the walk reaches it."""

    class Borrows(nn.Module):
        def __init__(self, leaf: nn.Module) -> None:
            super().__init__()
            self.borrowed = [leaf]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.borrowed[0](x)  # type: ignore[no-any-return]

    model = Wide()
    model.borrows = Borrows(model.layers[LEAVES - 1])
    with torchwhere.watch(), torch.no_grad():
        model(torch.ones(1))
        model.borrows(torch.ones(1))
        model(torch.ones(1), range(LEAVES - 1))
        model.borrows(torch.ones(1))
    assert Leaf.places[0] == "borrows.<Leaf>"
    assert Leaf.places[-1] == f"layers.{LEAVES - 1}"


def test_parameters_of_modules_that_were_not_called() -> None:
    """The name of a parameter is found whatever part of its model was called."""
    places = []
    with torchwhere.watch():
        model = Wide()
        model(torch.ones(1))
        weight = model.layers[LEAVES - 1].weight
        weight.register_post_accumulate_grad_hook(lambda _: places.append(torchwhere.where()))
        (weight * 2).sum().backward()
    assert [(place.module, place.param) for place in places] == [
        (f"layers.{LEAVES - 1}", f"layers.{LEAVES - 1}.weight")
    ]


def test_names_that_are_asked_for() -> None:
    """`describe`, and the drop-ins' own question for a name, know every module of a large model."""
    with torchwhere.watch():
        model = Wide()
        model(torch.ones(1))
        session = watch.current()
        assert session is not None
        assert session.modules.name_of(model.layers[LEAVES - 1]) == f"layers.{LEAVES - 1}"
    with torchwhere.watch():
        model(torch.ones(1))
        assert torchwhere.describe(model.layers[LEAVES - 1]).startswith(
            f"module layers.{LEAVES - 1}:"
        )


def test_a_walk_that_is_not_over_keeps_nothing_alive() -> None:
    """A model, and a part of it that is replaced, are freed while the walk over them is not
    over."""
    with torchwhere.watch():
        model = Wide()
        model(torch.ones(1))
        part, whole = weakref.ref(model.layers[LEAVES - 1]), weakref.ref(model)
        model.layers = nn.ModuleList()
        assert part() is None
        del model
        gc.collect()
        assert whole() is None


# -- the walk itself -------------------------------------------------------------------------------


def odd_model() -> nn.Module:
    """Wrappers, tied modules, a module that contains itself, and a missing child."""
    model = nn.Sequential(Wide(5), checkpoint_wrapper(nn.Sequential(Wide(3), nn.ReLU())), Wide(0))
    model.tied = model[0].layers
    model[2].me = model[2]
    model[2].nothing = None
    return model


@pytest.mark.parametrize("part", [1, 2, 3, 7, 1000])
def test_a_walk_in_parts_is_a_walk(part: int) -> None:
    """A walk in parts of any size visits the same modules under the same names as one without a
    stop."""
    model = odd_model()
    in_parts, module_walk = [], ModuleWalk(model, prefix="m")
    while not module_walk.is_over:
        taken = list(module_walk.next(part))
        assert 0 < len(taken) <= part
        in_parts += taken
    assert in_parts == list(walk(model, prefix="m"))


def test_name_below_is_a_name_of_the_walk() -> None:
    """The name that a search finds for a module is one of those that the walk gives it."""
    model = odd_model()
    for _, module in walk(model):
        if module is not model:
            names = [name for name, other in walk(model) if other is module]
            assert name_below(model, module) in names
    assert name_below(model, nn.ReLU()) is None


def test_a_table_in_parts_is_a_table() -> None:
    """Names that are given in parts are those that are given at once."""
    model = nn.Sequential(Wide(200), odd_model(), Wide(200))
    at_once, in_parts = NameTable(), NameTable()
    at_once.add_root(model)
    in_parts.begin_root(model)
    rounds = 0
    while not in_parts.is_complete:
        in_parts.continue_walks()
        rounds += 1
    assert rounds > 3
    assert in_parts.modules == at_once.modules
    for param in model.parameters():
        assert in_parts.param_names(param) == at_once.param_names(param)
