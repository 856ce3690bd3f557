"""Where a real GPU is: `where(device=True)`, and the note on an error of the device.

It needs one NVIDIA GPU, and is skipped elsewhere. Each test runs one script in its own process: a
device-side assert leaves a process that cannot use its GPU any more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.checks_itself,
]

START = """
import os, time
import torch, torch.distributed as dist, torchwhere

torch.cuda.set_device(0)
dist.init_process_group("nccl", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)
x = torch.ones(8, device="cuda")
"""

BEHIND = (
    START
    + """
with torchwhere.watch(out="run"):
    torchwhere.step(1)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    time.sleep(0.3)
    print(torchwhere.where(device=True))
    torch.cuda._sleep(int(3e9))
    torchwhere.step(2)
    dist.all_reduce(x)
    dist.all_reduce(x)
    time.sleep(0.3)
    print(torchwhere.where(device=True))
    torch.cuda.synchronize()
    time.sleep(0.3)
    print(torchwhere.where(device=True))
"""
)

ASSERT = (
    START
    + """
with torchwhere.watch(out="run"):
    torchwhere.step(1)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    time.sleep(0.3)
    x[torch.tensor([99], device="cuda")].sum()
    dist.all_reduce(x)
    x.sum().item()
"""
)


def printed(script: str, folder: Path) -> str:
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env=os.environ | {"TORCHWHERE_NATIVE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(done.stdout, done.stderr)
    return done.stdout + done.stderr


def test_where(tmp_path: Path) -> None:
    """`where(device=True)` shows what the GPU has reached, and how far it is behind, without a
    wait."""
    lines = printed(BEHIND, tmp_path).splitlines()
    reached, behind, at_the_end = (line for line in lines if line.startswith("CPU: "))
    assert "GPU: after all_reduce #0 of group default" in reached
    assert reached.endswith("step 1")
    assert behind.endswith("(1 step and 2 collectives behind)")  # a wait would end with 0
    assert "GPU: after all_reduce #2 of group default" in at_the_end
    assert at_the_end.endswith("step 2")


def test_note_on_a_device_assert(tmp_path: Path) -> None:
    """The traceback of a device-side assert says what the GPU had reached before it."""
    text = printed(ASSERT, tmp_path)
    assert "device-side assert triggered" in text
    assert "torchwhere: the GPU had reached: after all_reduce #0 of group default" in text
