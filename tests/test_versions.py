"""Private names of torch: each is checked at the start; without one, its hook says what does not
work, and the rest works."""

from __future__ import annotations

import importlib
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchwhere
from models import Model, batch
from torchwhere.drop_in.comm_mode import CommDebugMode
from torchwhere.hooks import _torch


def _import_lazy() -> None:
    """Import the modules that a job may import: lazy names resolve only then."""
    for module in {name.comes_with for name in _torch.NAMES.values()}:
        importlib.import_module(module)


def test_this_torch_has_every_name() -> None:
    """On a torch that is supported, no private name is missing."""
    _import_lazy()
    assert {
        key: name.path for key, name in _torch.NAMES.items() if _torch.private(key) is None
    } == {}


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A torch that lacks one name."""
    whole = _torch.resolve

    def lacking(key: str) -> None:
        path = _torch.NAMES[key].path
        _torch._eager.cache_clear()
        monkeypatch.setattr(
            _torch, "resolve", lambda p, lazy=False: None if p == path else whole(p, lazy=lazy)
        )

    yield lacking
    monkeypatch.undo()
    _torch._eager.cache_clear()


@pytest.mark.parametrize("key", _torch.NAMES)
def test_without_a_name_the_rest_works(
    key: str, without: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, one_rank: None
) -> None:
    """Without a name the training is bit-identical; what does not work is logged once; nothing else
    fails."""

    def train() -> list[float]:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for step in range(3):
            loss = model(batch(seed=step)).pow(2).mean()
            loss.backward()
            optimizer.step()
            dist.all_reduce(torch.ones(1))
            losses.append(loss.item())
        return losses

    _import_lazy()
    expected = train()
    without(key)
    name = _torch.NAMES[key]
    listing = CommDebugMode() if name.hook == "ops" else nullcontext()  # only there do ops count
    with caplog.at_level(logging.WARNING), torchwhere.watch(out=tmp_path), listing:
        assert train() == expected
        place = torchwhere.where()
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"torchwhere: this torch has no {name.path}: {name.without}"]
    assert place.pass_ == "outside"
    collectives = list(torchwhere.read_run(tmp_path).events(kinds={"collective"}))
    assert len(collectives) == (
        0 if key in ("dispatch_key", "keyset_after", "all_schemas", "unbox_group") else 3
    )
