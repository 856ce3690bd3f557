"""Tries the native part out: a small DDP job is trained unwatched, watched by Python's code and
watched natively.

The parameters must come out the same in all three, and the same events be recorded in both watches.
Runs in a process of its own (`torchwhere native --check`): a library that crashes takes this
process with it, and no job.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchwhere
from torchwhere.core.errors import TorchwhereError
from torchwhere.native.load import SWITCH, library, native

_STEPS = 8  # the native part learns from the first ones
_WIDTH = 8
_LAYERS = 4
_TIMES = ("t_ns", "duration_ns")


def try_out() -> None:
    """Raises `TorchwhereError` where the native part is not there, or does not do what Python's
    code does."""
    torch.set_num_threads(1)
    os.environ[SWITCH] = "1"
    part = native()
    if part is None:
        raise TorchwhereError(
            f"there is no native part to check at {library()}: `torchwhere native` builds it"
        )
    with tempfile.TemporaryDirectory() as folder:
        expected = _train(nullcontext())
        plainly, by_python = _watched(Path(folder) / "python", is_native=False)
        natively, by_native = _watched(Path(folder) / "native", is_native=True)
    if not _are_equal(expected, plainly) or not _are_equal(expected, natively):
        raise TorchwhereError("the native part changes what is trained")
    if _has_gloo() and not part.recorded():
        raise TorchwhereError("the native part does not see DDP's reductions")
    if by_python != by_native:
        raise TorchwhereError(
            "the native part records something else than Python:"
            f" {_first_difference(by_python, by_native)}"
        )


def _first_difference(by_python: list[dict[str, Any]], by_native: list[dict[str, Any]]) -> str:
    """What differs in the first event that does, and which that is."""
    for expected, found in zip(by_python, by_native, strict=False):
        if expected != found:
            differs = {
                key: (expected.get(key), found.get(key))
                for key in expected | found
                if expected.get(key) != found.get(key)
            }
            return f"({differs}, {expected['kind']})"
    return "more, or less"


def _watched(folder: Path, *, is_native: bool) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """The trained parameters, and what was recorded, apart from its time."""
    os.environ[SWITCH] = str(int(is_native))
    trained = _train(torchwhere.watch(out=folder, module_events=True))
    events = [event.to_dict() for event in torchwhere.read_run(folder).events()]
    return trained, [
        {key: value for key, value in event.items() if key not in _TIMES} for event in events
    ]


def _train(watch: AbstractContextManager[Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        *(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(_LAYERS))
    )
    with _process_group():
        if _has_gloo():
            model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0001)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch:
            for _ in range(_STEPS):
                model(torch.rand(2, _WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@contextmanager
def _process_group() -> Iterator[None]:
    """One of this process alone, where torch has one to offer."""
    if not _has_gloo():
        yield
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def _has_gloo() -> bool:
    return dist.is_available() and dist.is_gloo_available()
