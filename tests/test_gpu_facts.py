"""What only a GPU can show: its identity, NVML samples, memory of each step, out of memory.

`make test-gpu` runs this file. It needs one NVIDIA GPU, and is skipped elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import torchwhere
from memory_jobs import PEAK_BYTES, VICTIM, Net, train
from torchwhere.blackbox.memory import memory_samples
from torchwhere.blackbox.reader import read_box
from torchwhere.gpus.nvml import open_nvml
from torchwhere.gpus.samples import read_gpus
from torchwhere.monitor.gpu_sampler import GpuSampler
from torchwhere.native.build import build
from torchwhere.pipeline.verdict import diagnose_folder

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.checks_itself,
]

HERE = Path(__file__).parent
JOB_S = 90.0


@pytest.fixture(params=["python", "native"])
def is_native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the native extension records."""
    is_wanted: bool = request.param == "native"
    if is_wanted:
        build()
    monkeypatch.setenv("TORCHWHERE_NATIVE", str(int(is_wanted)))
    return is_wanted


def test_watching_creates_no_context(tmp_path: Path) -> None:
    """A job that does not use the GPU does not use it with torchwhere either."""
    code = f"""
import torch, torchwhere
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with torchwhere.watch(out={str(tmp_path)!r}):
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert "devices" not in read_box(tmp_path / "rank0.box").meta


def test_a_box_names_its_device(is_native: bool, tmp_path: Path) -> None:
    """The box has the UUID and the PCI address under which NVML lists the device."""
    pytest.importorskip("pynvml")
    with torchwhere.watch(out=tmp_path):
        train(Net().cuda(), steps=2)
    (device,) = read_box(tmp_path / "rank0.box").meta["devices"]
    nvml = open_nvml()
    gpus = {gpu.uuid: gpu for gpu in nvml.gpus()}
    nvml.close()
    assert device["uuid"].lower() in gpus
    assert device["pci"] in ("", gpus[device["uuid"].lower()].pci)


def test_memory_of_each_step(is_native: bool, tmp_path: Path) -> None:
    """Each step has a record with the allocator's numbers; the native extension knows the module
    of the peak."""
    torch.cuda.reset_peak_memory_stats()
    model, ends = Net().cuda(), []
    with torchwhere.watch(out=tmp_path):
        train(model, steps=5)
        ends.append(torch.cuda.memory_allocated())
    samples = memory_samples(read_box(tmp_path / "rank0.box"))
    assert [sample.step for sample in samples] == [0, 1, 2, 3, 4]
    assert all(sample.reserved_bytes >= sample.allocated_bytes > 0 for sample in samples)
    # later the allocator's peak does not rise, so the peaks of these steps are not exact
    exact = [sample for sample in samples if sample.peak_is_exact]
    assert exact[0].step == 0
    assert all((sample.peak_bytes or 0) > PEAK_BYTES for sample in exact)
    places = {(place.module, place.pass_) for sample in exact if (place := sample.peak_place)}
    assert places == ({("wide", "forward")} if is_native else {(None, "outside")})
    assert samples[-1].allocated_bytes >= ends[0] - (1 << 20)


def test_the_peak_of_the_job_stays(is_native: bool, tmp_path: Path) -> None:
    """torchwhere does not reset the peak that the job reads."""
    torch.cuda.reset_peak_memory_stats()
    large = torch.ones(2 * PEAK_BYTES, dtype=torch.uint8, device="cuda")
    del large
    before = torch.cuda.max_memory_allocated()
    with torchwhere.watch(out=tmp_path):
        train(Net().cuda(), steps=3)
    assert torch.cuda.max_memory_allocated() == before >= 2 * PEAK_BYTES


def test_nvml_samples(tmp_path: Path) -> None:
    """The sampler writes what NVML knows about the GPUs of this host."""
    pytest.importorskip("pynvml")
    sampler = GpuSampler(tmp_path, every_s=0.3)
    sampler.start()
    rows = torch.randn(4096, 4096, device="cuda")
    until = time.monotonic() + 2
    while time.monotonic() < until:
        rows = (rows @ rows).clamp(-1, 1)
        torch.cuda.synchronize()
    sampler.stop()
    (host,) = read_gpus(tmp_path)
    assert host.problem is None
    samples = host.gpus[0].samples
    assert len(samples) > 2
    assert all(sample.sm_mhz and sample.temperature_c for sample in samples)
    assert any(sample.busy_percent for sample in samples)
    assert host.gpus[0].total_bytes
    assert samples[-1].used_bytes


def run_out_of_memory(folder: Path) -> None:
    """Run the job under `torchwhere run`, which starts a monitor, until it has failed."""
    arguments = ["--standalone", "--nproc-per-node", "2", "-m", "torchwhere", "run"]
    with (folder.parent / "log.txt").open("w") as log:
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *arguments,
                *("--out", str(folder), str(HERE / "memory_jobs.py")),
            ],
            env=os.environ | {"TORCHWHERE_NATIVE": "1"},
            stdout=log,
            stderr=log,
            timeout=JOB_S,
            check=False,
        )


def test_out_of_memory(tmp_path: Path) -> None:
    """The verdict says which rank ran out of memory, what grew since when, and where the peak
    was."""
    build()
    run_out_of_memory(tmp_path / "run")
    verdict = diagnose_folder(tmp_path / "run")
    assert (verdict.kind, verdict.culprits) == ("dead", (VICTIM,)), verdict
    (fact,) = verdict.facts["out_of_memory"]
    assert fact["report"]["tried_bytes"] in (PEAK_BYTES, 64 << 20)
    assert fact["growth"]["to_bytes"] > 2 * fact["growth"]["from_bytes"]
    assert fact["peak"]["place"]["module"] == "wide"
