"""The function in which a CPU waits for its device, from a stack and the source of its line."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from test_nccl_runs import unpacked
from torchwhere.blackbox.live_box import LiveBox
from torchwhere.blackbox.live_names import NameReader
from torchwhere.diagnose.doctor.device_wait import device_wait
from torchwhere.diagnose.live.ranks import LiveRanks
from torchwhere.pipeline.verdict import diagnose_folder

SOURCE = """\
def train(model, rows, losses):
    loss = model(rows).sum()
    value = loss.item()
    losses.append(loss.item())
    print(f"{loss.item():.3f}")
    a, b = loss.item(), rows.cpu()
    value = loss.mean().item()
    rows = rows.to(
        "cuda"
    )
    loss.backward()


def check(loss):
    return loss.tolist()
"""


@pytest.fixture
def meta(tmp_path: Path) -> dict[str, Any]:
    """The header of a box whose process started after the source was written."""
    (tmp_path / "train.py").write_text(SOURCE)
    return {"started_ns": time.time_ns() + 10**9, "folder": str(tmp_path)}


@pytest.mark.parametrize(
    ("line", "function", "expected"),
    [
        (3, "train", ".item()"),
        (4, "train", ".item()"),  # `append` runs after it
        (5, "train", ".item()"),
        (6, "train", None),  # one of two
        (7, "train", None),  # `mean` may wait, because the queue of the device is full
        (8, "train", ".to()"),
        (9, "train", ".to()"),
        (11, "train", None),  # not a method that waits
        (3, "check", None),  # another file: line 3 is not in that function
        (15, "check", ".tolist()"),
        (99, "train", None),
    ],
)
def test_a_method_in_c(
    meta: dict[str, Any], line: int, function: str, expected: str | None
) -> None:
    """The source shows which method the innermost line calls, or the answer is None. If the device
    has reached all marks, only a method that returns at once for a tensor of the CPU waits for it.
    """
    stack = (f"train.py:{line} in {function}", "train.py:40 in <module>")
    assert device_wait(stack, meta, pending=1) == expected
    may_be_on_cpu = expected in (".to()", ".tolist()")
    assert device_wait(stack, meta, pending=0) == (None if may_be_on_cpu else expected)


def test_source_that_has_changed(meta: dict[str, Any], tmp_path: Path) -> None:
    """Source that was written after the process started may not be what runs."""
    meta["started_ns"] = (tmp_path / "train.py").stat().st_mtime_ns - 1
    assert device_wait(("train.py:3 in train",), meta, pending=1) is None


def test_unreadable_source(meta: dict[str, Any], tmp_path: Path) -> None:
    """A file that is gone, is not Python or is not a file gives no answer and no error."""
    (tmp_path / "broken.py").write_text("def (")
    for where in ("gone.py:3", "broken.py:1", "/dev/zero:1", "<string>:1", "nothing", "\0:1"):
        assert device_wait((f"{where} in train",), meta, pending=1) is None
    assert device_wait((), meta, pending=1) is None


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("/venv/lib/site-packages/torch/cuda/__init__.py:1162", "synchronize()"),
        ("/venv/lib/site-packages/torch/cuda/streams.py:241", "synchronize()"),
        ("/venv/lib/site-packages/torch/accelerator/__init__.py:190", "synchronize()"),
        ("/venv/lib/site-packages/torch/distributed/x.py:9", None),  # waits for other ranks
        ("/home/me/train.py:9", None),  # a function of the user
    ],
)
def test_synchronize(meta: dict[str, Any], where: str, expected: str | None) -> None:
    stack = (f"{where} in synchronize", "train.py:3 in train")
    assert device_wait(stack, meta, pending=0) == expected


def test_recorded_ranks(tmp_path: Path) -> None:
    """The doctor and `top` say that the CPU of a rank waits for its device."""
    runs = unpacked("nccl_faults.txz", tmp_path / "all")
    verdict = diagnose_folder(runs / "opposite_groups", stall_s=4)
    both = next(line for line in str(verdict).splitlines() if "CPU: " in line)
    begin = "  rank 2: CPU: waiting in synchronize(), outside any module, faulty_jobs.py:138,"
    assert both.startswith(begin)
    path = runs / "opposite_groups" / "rank2.box"
    live, live_box = LiveRanks(), LiveBox(path, NameReader())
    live_box.look()
    now_ns = live_box.moved_ns + 60 * 10**9
    live.add(live_box, now_s=60, now_ns=now_ns)
    (rank,) = live.now([2], {}, now_s=60)  # while its process runs
    assert rank.device is not None
    assert rank.device.to_dict()["cpu_waits_in"] == "synchronize()"
