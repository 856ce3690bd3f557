"""Tests the native extension: trains a small DDP job, which also reduces its loss, without a watch,
with a watch in Python, and with a watch that uses the extension.

All three must give the same parameters, and both watches must record the same events. Runs in a
separate process (`torchwhere native --check`): a library that crashes ends this process and no job.
"""

from __future__ import annotations

import gc
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

_STEPS = 8  # the extension learns from the first steps
_WIDTH = 8
_LAYERS = 4
_TIMES = ("t_ns", "duration_ns")


def try_out() -> None:
    """Test the native extension.

    Raises:
        TorchwhereError: If it is missing, or does not do the same as the Python code.
    """
    torch.set_num_threads(1)
    os.environ[SWITCH] = "1"
    extension = native()
    if extension is None:
        raise TorchwhereError(
            f"the native extension is missing ({library()}): build it with `torchwhere native`"
        )
    with tempfile.TemporaryDirectory() as folder:
        expected = _train(nullcontext())
        with_python, python_events = _watched(Path(folder) / "python", is_native=False)
        with_native, native_events = _watched(Path(folder) / "native", is_native=True)
    if not _are_equal(expected, with_python) or not _are_equal(expected, with_native):
        raise TorchwhereError("the native extension changes the trained parameters")
    if _has_gloo() and not extension.recorded():
        raise TorchwhereError("the native extension does not record all-reduces")
    if python_events != native_events:
        raise TorchwhereError(
            "the native extension does not record the same as Python:"
            f" {_first_difference(python_events, native_events)}"
        )


def _first_difference(
    python_events: list[dict[str, Any]], native_events: list[dict[str, Any]]
) -> str:
    """Return the fields that differ in the first event that differs, and its kind."""
    for expected, actual in zip(python_events, native_events, strict=False):
        if expected != actual:
            fields = {
                key: (expected.get(key), actual.get(key))
                for key in expected | actual
                if expected.get(key) != actual.get(key)
            }
            return f"({fields}, {expected['kind']})"
    return f"{len(python_events)} events in Python, {len(native_events)} natively"


def _watched(folder: Path, *, is_native: bool) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Return the trained parameters, and the recorded events without their times."""
    os.environ[SWITCH] = str(int(is_native))
    trained = _train(torchwhere.watch(out=folder, module_events=True))
    events = [event.to_dict() for event in torchwhere.read_run(folder).events()]
    return trained, [
        {key: value for key, value in event.items() if key not in _TIMES} for event in events
    ]


def _train(watch: AbstractContextManager[Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    # Free the model before the group. Else DDP frees the group with the GIL held, and waits for a
    # thread of gloo, which may need the GIL to free a tensor.
    with _process_group():
        try:
            return _train_model(watch)
        finally:
            gc.collect()


def _train_model(watch: AbstractContextManager[Any]) -> list[torch.Tensor]:
    model: nn.Module = nn.Sequential(
        *(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(_LAYERS))
    )
    if _has_gloo():
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch:
        for _ in range(_STEPS):
            loss = model(torch.rand(2, _WIDTH)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if _has_gloo():
                dist.all_reduce(loss.detach())
    return [parameter.detach().clone() for parameter in model.parameters()]


def _are_equal(params: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(param, other) for param, other in zip(params, others, strict=True))


@contextmanager
def _process_group() -> Iterator[None]:
    """A process group with this process as its only rank, if torch has gloo."""
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
