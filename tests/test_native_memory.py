"""The memory of a device as the native extension records it, with an allocator whose numbers the
test sets (`counting_allocator.cpp`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchwhere.blackbox.memory import MemorySample, memory_samples
from torchwhere.blackbox.reader import read_box
from torchwhere.native import build as building

HERE = Path(__file__).parent
MIB = 1 << 20
HELD, WIDE, GROWING = 64 * MIB, 256 * MIB, 30
JOB = f"""
import ctypes, json, sys
import torch, torchwhere
from torchwhere.native.load import native

allocator, part = ctypes.CDLL(sys.argv[1]), native()
allocator.set.argtypes = [ctypes.c_int64] * 3
allocator.begin()
held = peak = 0

def amounts(most):
    global peak
    peak = max(peak, most)
    allocator.set(held, 2 * held, peak)

class Wide(torch.nn.Module):
    def forward(self, x):
        amounts(held + {WIDE})
        return x

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.wide = torch.nn.Linear(2, 2), Wide()
    def forward(self, x):
        return self.wide(self.first(x))

model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
readings = {{}}
with torchwhere.watch(out=sys.argv[2]):
    for step in range({GROWING} + 20):
        if step == 4:
            assert part.memory_begin("privateuseone", 0, 24)
            readings["before"] = part.memory_now()
            allocator.initialize()
        if step < {GROWING}:
            held += {HELD}
            amounts(held)
        if step == {GROWING} + 10:
            readings["now"] = part.memory_now()
            allocator.fail()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    readings["after"], readings["resets"] = part.memory_now(), allocator.resets()
    part.memory_end()
print(json.dumps(readings))
"""


@pytest.fixture(scope="module")
def job(library: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[MemorySample]]:
    """What the job prints, and the samples in its box."""
    folder = tmp_path_factory.mktemp("memory")
    shared, source = folder / "allocator.so", HERE / "counting_allocator.cpp"
    command = building._command(building.check_tools(), "c++20", shared)
    command = [part for part in command if part != "-fvisibility=hidden"]
    command[command.index(str(building.SOURCES / "native.cpp"))] = str(source)
    subprocess.run(command, check=True, timeout=400)
    environment = os.environ | {
        "TORCHWHERE_NATIVE": "1",
        "XDG_CACHE_HOME": str(library.parent.parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(shared), str(folder / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), memory_samples(read_box(folder / "run" / "rank0.box"))


def test_a_rising_peak_has_its_module(job: tuple[Any, list[MemorySample]]) -> None:
    """In each step in which the allocator's peak rises, the record has the exact peak, and the
    module that the CPU was in."""
    growing = [sample for sample in job[1] if 4 < (sample.step or 0) < GROWING]
    assert len(growing) > 10
    for sample in growing:
        assert sample.step is not None
        held = HELD * (sample.step + 1)
        assert (sample.allocated_bytes, sample.reserved_bytes) == (held, 2 * held)
        assert (sample.peak_bytes, sample.peak_is_exact) == (held + WIDE, True)
        assert sample.peak_place is not None
        assert (sample.peak_place.module, sample.peak_place.pass_) == ("wide", "forward")


def test_a_peak_that_does_not_rise(job: tuple[Any, list[MemorySample]]) -> None:
    """If the allocator's peak does not rise in a step, the peak of the step is a lower bound."""
    steady = [sample for sample in job[1] if (sample.step or 0) > GROWING]
    assert steady
    for sample in steady:
        assert (sample.peak_bytes, sample.peak_is_exact) == (HELD * GROWING, False)


def test_the_allocator_is_only_read(job: tuple[Any, list[MemorySample]]) -> None:
    """Nothing is read before the job has initialised the allocator, nothing is ever reset, and an
    allocator that fails is not asked again."""
    printed, samples = job
    held = HELD * GROWING
    assert printed["before"] is None
    assert printed["now"] == [held, 2 * held, held + WIDE]
    assert printed["after"] is None
    assert printed["resets"] == 0
    assert max(sample.step or 0 for sample in samples) < GROWING + 10
