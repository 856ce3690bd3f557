"""Workloads with DDP and FSDP2: buckets of a tiny model on a CPU; on a GPU, steps of GPT-2 124M in
bf16, and collectives of NCCL. One rank; `bench.ranks` uses several.

With batch 1 the GPU waits for the CPU, so a step shows what watching costs the CPU. Batch 8 keeps
the GPU busy. With one rank, DDP still all-reduces its buckets, and FSDP2 skips its collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from bench.contenders import (
    AGAIN,
    COMM_DEBUG_ANEW,
    MOD_TRACKER,
    MODULE_EVENTS,
    NO_DEVICE,
    PYTHON,
    PYTHON_EVENTS,
    TORCHWHERE,
    UNWATCHED,
)
from bench.gpt2 import GPT2, Size
from bench.workloads import Job, Workload, training_step

BUCKETS = 20
NCCL_COLLECTIVES = 250  # per step
GPT2_124M = Size(layers=12, heads=12, width=768, vocabulary=50257, sequence=1024, batch=1)
THIN = Size(layers=12, heads=2, width=32, vocabulary=64, sequence=16, batch=1)
TINY = Size(layers=2, heads=2, width=32, vocabulary=64, sequence=16, batch=1)


def ddp(model: GPT2, device: str) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    model = model.to(torch.bfloat16)
    return DistributedDataParallel(model, device_ids=[0] if device == "cuda" else None)


def fsdp2(model: GPT2, device: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


@contextmanager
def job(wrap: Callable[[GPT2, str], nn.Module], size: Size, device: str = "cuda") -> Iterator[Job]:
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield training(wrap, size, device)
    finally:
        dist.destroy_process_group()


def training(wrap: Callable[[GPT2, str], nn.Module], size: Size, device: str) -> Job:
    """Train a GPT-2 in the process group of this process."""
    torch.manual_seed(0)
    model = wrap(GPT2(size).to(device), device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    finish = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    return Job(training_step(model, size, optimizer, device), model, finish)


@contextmanager
def _buckets() -> Iterator[Job]:
    """One bucket for each layer: DDP reduces it inside backward, where the place costs more to find
    than in forward."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(BUCKETS)))
    model, x = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.001), torch.ones(1, 64)
    try:
        yield Job(lambda: model(x).sum().backward(), model)
    finally:
        dist.destroy_process_group()


@contextmanager
def _fsdp2_without_a_network() -> Iterator[Job]:
    """FSDP2 on a fake process group of four ranks. The tensors are small, so that the CPU time of
    modules and collectives is most of the step, as in a step on a GPU that waits for its CPU."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield training(fsdp2, THIN, "cpu")
    finally:
        dist.destroy_process_group()


def _workload(wrap: Callable[[GPT2, str], nn.Module], batch: int) -> Workload:
    name, size = wrap.__name__, replace(GPT2_124M, batch=batch)
    title = f"{name.upper()}, batch {batch}, %"
    return Workload(
        f"{name}_batch{batch}",
        title,
        partial(job, wrap, size),
        steps=10,
        clock=time.perf_counter,
        forks=False,
        budget_s=45,
    )


CPU = (
    Workload(
        "buckets",
        "DDP bucket, us each",
        _buckets,
        steps=50,
        units=BUCKETS,
        contenders=(
            UNWATCHED,
            TORCHWHERE,
            MODULE_EVENTS,
            PYTHON,
            PYTHON_EVENTS,
            MOD_TRACKER,
            COMM_DEBUG_ANEW,
            AGAIN,
        ),
        clock=time.thread_time,
        forks=False,  # gloo has threads, which a fork loses
        budget_s=20,
    ),
    Workload(
        "fsdp2",
        "FSDP2, % of a thin step",
        _fsdp2_without_a_network,
        steps=4,
        warm_steps=3,
        contenders=(
            UNWATCHED,
            TORCHWHERE,
            MODULE_EVENTS,
            PYTHON,
            PYTHON_EVENTS,
            MOD_TRACKER,
            AGAIN,
        ),
        budget_s=40,
    ),
)


@contextmanager
def _nccl_collectives() -> Iterator[Job]:
    """On one rank NCCL launches no kernel: the time is that of the CPU, and of the marks."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    tensor = torch.ones(1, device="cuda")

    def step() -> None:
        for _ in range(NCCL_COLLECTIVES):
            dist.all_reduce(tensor)
        torch.cuda.synchronize()

    try:
        yield Job(step)
    finally:
        dist.destroy_process_group()


CUDA = (
    Workload(
        "nccl",
        "all_reduce, us each",
        _nccl_collectives,
        steps=8,
        units=NCCL_COLLECTIVES,
        contenders=(UNWATCHED, TORCHWHERE, NO_DEVICE, PYTHON, AGAIN),
        clock=time.perf_counter,
        forks=False,
        budget_s=20,
    ),
    *(_workload(wrap, batch) for wrap in (ddp, fsdp2) for batch in (1, 8)),
)
