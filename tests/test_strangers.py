"""Names of modules that belong to no known model, and what it takes to find them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torchwhere


def names_of(make: Callable[[], nn.Module], *, times: int, keep: bool) -> list[str | None]:
    """What modules are called that are made and called one after the other, outside any other."""
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
    """A loss that is made anew has one name; those that are alive together have numbers."""
    with torchwhere.watch(nn.Linear(2, 2)):
        assert names_of(nn.ReLU, times=5, keep=False) == ["<ReLU>"] * 5
        assert names_of(nn.Tanh, times=4, keep=True) == ["<Tanh>", "<Tanh#2>", "<Tanh#3>", "<Tanh#4>"]


def test_a_number_is_given_again() -> None:
    """Of three that are alive the second goes: the next one takes its number."""
    with torchwhere.watch(nn.Linear(2, 2)):
        kept = [nn.ReLU() for _ in range(3)]
        for module in kept:
            module(torch.zeros(2))
        del module, kept[1]
        assert names_of(nn.ReLU, times=1, keep=False) == ["<ReLU#2>"]


def test_nobody_is_searched_for_again_and_again() -> None:
    """Who holds a module is asked for the first two of a class alone: it means a look at every object of the process."""
    asked = []

    def count(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function is gc.get_referrers:
            asked.append(frame.f_code.co_name)

    with torchwhere.watch(nn.Linear(2, 2)):
        names_of(nn.ReLU, times=2, keep=False)
        sys.setprofile(count)
        try:
            names_of(nn.ReLU, times=5, keep=False)
            assert asked == []
            names_of(nn.Tanh, times=1, keep=False)
        finally:
            sys.setprofile(None)
    assert asked


def test_a_part_of_an_unknown_model_is_found() -> None:
    """A bare module that is part of a model is not taken for one made on the fly, whatever came before of other classes."""
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
    """An activation made in a forward is named after the module that makes it, each time."""
    model = nn.Sequential(MadeInForward())
    with torchwhere.watch(model):
        for _ in range(5):
            model(torch.zeros(2))
    assert model[0].seen == ["0.<ReLU>"] * 5


def test_nothing_is_kept_alive() -> None:
    """A module that was named is freed as soon as its owner lets go of it."""
    with torchwhere.watch(nn.Linear(2, 2)):
        module = nn.ReLU()
        module(torch.zeros(2))
        ref = weakref.ref(module)
        del module
        assert ref() is None
