"""Watching changes nothing: 50 steps with and without a watch give the same bits, in every kind of
training."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchwhere
from models import Model, batch
from rank_pool import Pool

STEPS = 50
_COUNTED = ("stats", "frames", "graph_break", "recompiles")


class Dropping(Model):
    """A model with dropout: the random numbers must be the same too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, training=True)


class Checkpointed(Dropping):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=bool(index % 2))
        return nn.functional.dropout(self.head(x), 0.1, training=True)


def _ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(Dropping(), bucket_cap_mb=0.0005)


def _fsdp1() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    return Fsdp(Dropping(), device_id=torch.device("cpu"), use_orig_params=True)


def _fsdp2() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = Dropping(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _tp() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = {
        f"layers.{i}.{name}": style()
        for i in range(2)
        for name, style in (("up", ColwiseParallel), ("down", RowwiseParallel))
    }
    return parallelize_module(Dropping(), mesh, plan)


def _compiled() -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(nn.parallel.DistributedDataParallel(Dropping()), backend="aot_eager")


KINDS: dict[str, Callable[[], nn.Module]] = {
    "ddp": _ddp,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "tp": _tp,
    "checkpoint": Checkpointed,
    "compile": _compiled,
    "amp": _ddp,
}


def _train(kind: str) -> str:
    """Train for 50 steps, and return a digest of every loss, gradient, parameter and of the random
    state."""
    torch.manual_seed(7)
    model = KINDS[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    digest = hashlib.sha256()
    autocast = (
        torch.autocast("cpu", dtype=torch.bfloat16) if kind == "amp" else contextlib.nullcontext()
    )
    for step in range(STEPS):
        with autocast:
            loss = model(batch(seed=step)).float().pow(2).mean()
        loss.backward()
        digest.update(loss.detach().numpy().tobytes())
        for tensor in _tensors(model):
            digest.update(tensor.detach().float().numpy().tobytes())
        optimizer.step()
        optimizer.zero_grad()
    for tensor in _tensors(model):
        digest.update(tensor.detach().float().numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    return digest.hexdigest()


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    for param in model.parameters():
        for tensor in (param, param.grad):
            if tensor is not None:
                yield tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _both(folder: Path, kind: str) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    if kind == "compile":
        # the first time, dynamo also looks at frames of torch that it then knows to skip
        _train(kind)
    counters.clear()
    plain = _train(kind)
    unwatched = {key: dict(counters[key]) for key in _COUNTED}
    counters.clear()
    with torchwhere.watch(out=folder, module_events=True):
        watched = _train(kind)
        steps = torchwhere.where().step
    counted = {key: dict(counters[key]) for key in _COUNTED}
    dist.barrier()
    events = list(torchwhere.read_run(folder).boxes[dist.get_rank()].events())
    return {
        "plain": plain,
        "watched": watched,
        "steps": steps,
        "same compile": counted == unwatched,
        "events": len(events),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_bit_identical(two_ranks: Pool, tmp_path: Path, kind: str) -> None:
    """Losses, gradients, parameters and random state are the same bits; so are frames, graphs,
    breaks and recompiles."""
    for answer in two_ranks.run(_both, tmp_path, kind):
        assert answer["watched"] == answer["plain"]
        assert answer["same compile"]
        assert answer["steps"] == STEPS
        assert answer["events"] > STEPS
