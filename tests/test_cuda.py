"""What only a CUDA device can show: no added synchronisation, and collectives launched from the
engine's own threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchwhere
from models import Model, batch
from torchwhere.native.build import build

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.checks_itself,  # NCCL keeps threads
]

# Trains a model without a watch, with one, and with module events. Prints a hash for each.
TRAINING = """
import hashlib, sys
from contextlib import nullcontext

import torch, torch.distributed as dist, torchwhere
from torch import nn
from torch.distributed.fsdp import fully_shard

kind, device, tests = sys.argv[1:]
sys.path.insert(0, tests)
from models import Model, batch

backend = "nccl" if device == "cuda" else "gloo"
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
torch.use_deterministic_algorithms(True)


def wrapped():
    model = Model(64, 3).to(device)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.03)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def trained(watch):
    torch.manual_seed(0)
    model = wrapped()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    rows = batch(64).to(device)
    digest = hashlib.sha256()
    with watch:
        for _ in range(20):
            loss = model(rows).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            digest.update(loss.detach().cpu().numpy().tobytes())
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        digest.update(whole.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


print("HASH", trained(nullcontext()))
for is_verbose in (False, True):
    print("HASH", trained(torchwhere.watch(out=f"run{is_verbose}", module_events=is_verbose)))
dist.destroy_process_group()
"""


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


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_training_is_bit_identical(kind: str, native: str, tmp_path: Path) -> None:
    """Losses and parameters are bit-identical with and without a watch, also with module events."""
    if native == "1":
        build()
    # cuBLAS reads its variable when the process begins
    settings = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHWHERE_NATIVE": native}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, kind, "cuda", Path(__file__).parent],
        cwd=tmp_path,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=300,
    )
    hashes = [line for line in done.stdout.splitlines() if line.startswith("HASH")]
    assert len(hashes) == 3, done.stderr
    assert len(set(hashes)) == 1
    assert all([*tmp_path.glob(f"run{is_verbose}/*.box")] for is_verbose in (False, True))
