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
from torchwhere.core.place import Certainty
from torchwhere.native import build as building

HERE = Path(__file__).parent
MIB = 1 << 20
HELD, WIDE = 64 * MIB, 256 * MIB
# The first step after these parts of the job: memory grows; it is steady; it grows in every third
# step; the allocator fails.
GROWING, STEADY, RISING, FAILING = 30, 40, 64, 74
CALLS = 1000
JOB = f"""
import ctypes, json, sys, time
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

class Many(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Identity()
    def forward(self, x):
        begin_ns, looks = time.monotonic_ns(), allocator.looks()
        for _ in range({CALLS}):
            x = self.first(x)
        return allocator.looks() - looks, time.monotonic_ns() - begin_ns

model, many = Net(), Many()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
readings = {{}}
with torchwhere.watch(out=sys.argv[2]):
    for step in range({FAILING}):
        if step == 4:
            assert part.memory_begin("privateuseone", 0, 24)
            readings["before"] = part.memory_now()
            allocator.initialize()
        if step < {GROWING} or {STEADY} <= step < {RISING} and step % 3 == 0:
            held += {HELD}
            amounts(held)
        if step in ({GROWING} - 1, {STEADY} - 1):
            readings[f"looks in step {{step}}"] = many(torch.ones(1))
        if step == {RISING}:
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
    allocator = build_allocator(folder)
    environment = os.environ | {
        "TORCHWHERE_NATIVE": "1",
        "XDG_CACHE_HOME": str(library.parent.parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(allocator), str(folder / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), memory_samples(read_box(folder / "run" / "rank0.box"))


def build_allocator(folder: Path) -> Path:
    """Compile `counting_allocator.cpp` as the native extension is compiled."""
    shared, source = folder / "allocator.so", HERE / "counting_allocator.cpp"
    command = building._command(building.check_tools(), "c++20", shared)
    command = [part for part in command if part != "-fvisibility=hidden"]
    command[command.index(str(building.SOURCES / "native.cpp"))] = str(source)
    subprocess.run(command, check=True, timeout=400)
    return shared


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
    steady = [sample for sample in job[1] if GROWING < (sample.step or 0) < STEADY]
    assert steady
    for sample in steady:
        assert (sample.peak_bytes, sample.peak_is_exact) == (HELD * GROWING, False)


def test_samples_are_rare_while_memory_is_steady(job: tuple[Any, list[MemorySample]]) -> None:
    """While the peak rises, each change of place takes a sample. While memory is steady, samples
    are at least 0.5 ms apart."""
    looks, _ = job[0][f"looks in step {GROWING - 1}"]
    assert looks >= CALLS
    looks, took_ns = job[0][f"looks in step {STEADY - 1}"]
    assert looks <= took_ns / 500_000 + 1


def test_a_peak_after_skipped_samples_is_inferred(job: tuple[Any, list[MemorySample]]) -> None:
    """If the peak rises after a steady step, the amount is exact. The place is either the module in
    which it rose, or marked as inferred."""
    rising = [s for s in job[1] if STEADY <= (s.step or 0) < RISING and (s.step or 0) % 3 == 0]
    assert len(rising) > 5
    held = HELD * GROWING
    for sample in rising:
        held += HELD
        assert (sample.peak_bytes, sample.peak_is_exact) == (held + WIDE, True)
    places = [sample.peak_place for sample in rising if sample.peak_place is not None]
    exact = [place for place in places if place.certainty is Certainty.EXACT]
    assert {place.module for place in exact} <= {"wide"}
    assert len(exact) < len(places)


def test_the_allocator_is_only_read(job: tuple[Any, list[MemorySample]]) -> None:
    """Nothing is read before the job has initialised the allocator, nothing is ever reset, and an
    allocator that fails is not asked again."""
    printed, samples = job
    held = HELD * (GROWING + (RISING - STEADY) // 3)
    assert printed["before"] is None
    assert printed["now"] == [held, 2 * held, held + WIDE]
    assert printed["after"] is None
    assert printed["resets"] == 0
    assert max(sample.step or 0 for sample in samples) < RISING
