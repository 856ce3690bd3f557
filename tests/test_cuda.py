"""What only a CUDA device can show: no added synchronisation, and collectives launched from the
engine's own threads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchwhere
from models import Model, batch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.checks_itself,  # NCCL keeps threads
]


@pytest.fixture
def one_gpu() -> Iterator[None]:
    hook = sys.excepthook
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    yield
    dist.destroy_process_group()
    sys.excepthook = hook


def test_ddp_on_a_device_thread(one_gpu: None, tmp_path: Path) -> None:
    """DDP's reductions come from a thread without a Python stack: parameter, bucket and line are
    known all the same."""
    model = nn.parallel.DistributedDataParallel(Model(64, 3).cuda(), bucket_cap_mb=0.03)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    names = sorted(name for name, _ in model.module.named_parameters())
    with torchwhere.watch(out=tmp_path):
        for _ in range(4):
            model(batch(64).cuda()).sum().backward()
            optimizer.step()
    events = [
        event.to_dict() for event in torchwhere.read_run(tmp_path).events(kinds={"collective"})
    ]
    for step in range(4):
        reductions = [e for e in events if e["step"] == step and e["pass"] == "backward"]
        assert sorted(name for e in reductions for name in e["for"]) == names
        assert all(e["param"] in e["for"] and "test_cuda.py:" in e["line"] for e in reductions)
        assert all(e["thread"] != "MainThread" and e["certainty"] == "exact" for e in reductions)


def test_no_device_synchronisation(one_gpu: None, tmp_path: Path) -> None:
    """Nothing that a watch does waits for the device."""
    model = nn.parallel.DistributedDataParallel(Model(64, 3).cuda())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = batch(64).cuda()
    for _ in range(3):  # DDP itself synchronises when it rebuilds its buckets
        model(rows).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    with torchwhere.watch(out=tmp_path, module_events=True):
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                model(rows).sum().backward()
                optimizer.step()
                torchwhere.note("step", where=str(torchwhere.where()))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(list(torchwhere.read_run(tmp_path).events(kinds={"note"}))) == 5
