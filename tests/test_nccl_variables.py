"""The variables of NCCL that `torchwhere run` sets: which ones, when, and what it prints."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from torchwhere.blackbox.summary import BoxSummary
from torchwhere.commands.begin_watch import set_nccl_variables
from torchwhere.flight_recorder.evidence import find_dumps
from torchwhere.recorder import nccl_variables
from torchwhere.recorder.nccl_variables import missing_variables

NAMES = (
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_FR_DUMP_TEMP_FILE",
)
OLDER_NAMES = (
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
)
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
SCRIPT = f"""
import os
print("MINE", sorted(name for name in os.environ if name in {NAMES}))
"""


def test_what_is_missing(tmp_path: Path) -> None:
    """An environment without these variables gets all of them, and not the timing of NCCL, which
    makes FSDP slower."""
    variables = missing_variables({"PATH": "/bin"}, tmp_path, torch_version="2.9.0")
    assert tuple(variables) == NAMES
    assert variables["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/flight_recorder_rank_"


def test_an_older_torch(tmp_path: Path) -> None:
    """A torch before 2.9 reads only the older names of the flight recorder, so they are set too."""
    variables = missing_variables({}, tmp_path, torch_version="2.8.0+cu128")
    assert variables.keys() == {*NAMES, *OLDER_NAMES}
    for name, older in zip((NAMES[0], NAMES[2]), OLDER_NAMES, strict=True):
        assert variables[name] == variables[older]
        assert not missing_variables({older: "0"}, tmp_path, torch_version="2.8.0").keys() & {name}


@pytest.mark.parametrize("name", NAMES + OLDER_NAMES)
def test_what_the_user_has_set(name: str, tmp_path: Path) -> None:
    """A variable that the user has set, also to 0 or by its older name, is not set again."""
    missing = missing_variables({name: "0"}, tmp_path, torch_version="2.13.0")
    assert len(missing) == len(NAMES) - 1
    assert name not in missing


def test_the_doctor_finds_the_dumps(tmp_path: Path) -> None:
    """A dump that torch writes where the variable says is found in the folder of the run, also if
    the folder was copied."""
    prefix = missing_variables({}, tmp_path)["TORCH_FR_DUMP_TEMP_FILE"]
    Path(f"{prefix}2").write_bytes(b"dump")
    meta = {"rank": 2, "started_ns": time.time_ns()}
    box = BoxSummary(tmp_path / "rank2.box", 2, ("", 0), True, 0, False, 0, meta)
    assert find_dumps({2: box}, tmp_path) == {2: Path(f"{prefix}2")}


@pytest.mark.parametrize(("rank", "lines"), [(None, 1), ("0", 1), ("3", 0)])
def test_one_line(
    rank: str | None,
    lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where there is a GPU, all ranks set the variables, and the first one prints one line."""
    monkeypatch.setattr(nccl_variables, "_may_use_nccl", lambda: True)
    for name in (*NAMES, *OLDER_NAMES, ERROR_HANDLING, "RANK"):
        monkeypatch.setenv(name, "")  # so that the end of the test removes it
        monkeypatch.delenv(name)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    set_nccl_variables(str(tmp_path))
    assert os.environ.items() >= missing_variables({}, tmp_path).items()
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == lines
    assert all(f"{NAMES[0]}=2000 " in line and "--no-env" in line for line in printed)
    set_nccl_variables(str(tmp_path))  # now nothing is missing
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "rank", "has_gpu", "lines"),
    [
        ("1", "0", True, 1),
        ("1", "3", True, 0),
        ("3", "0", True, 0),
        (None, "0", True, 0),
        ("1", "0", False, 0),
    ],
)
def test_the_mode_that_torchrun_sets(
    value: str | None,
    rank: str,
    has_gpu: bool,
    lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first rank prints once that dumps may be lost, and what to do. It changes nothing."""
    monkeypatch.setattr(nccl_variables, "_may_use_nccl", lambda: has_gpu)
    for name in NAMES:
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv(ERROR_HANDLING, value or "")
    if value is None:
        monkeypatch.delenv(ERROR_HANDLING)
    set_nccl_variables(str(tmp_path))
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == lines
    assert all(f"{ERROR_HANDLING} is 1" in line and "set it to 3" in line for line in printed)
    assert os.environ.get(ERROR_HANDLING) == value


@pytest.mark.skipif(dist.is_nccl_available(), reason="for a torch without NCCL")
@pytest.mark.parametrize("options", [(), ("--no-env",)])
def test_without_a_gpu(options: tuple[str, ...], tmp_path: Path) -> None:
    """A job on the CPU keeps its environment, and prints nothing about it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    inherited = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-m", "torchwhere", "run", "--no-monitor", *options, "train.py"],
        cwd=tmp_path,
        env=inherited,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout == "MINE []\n"
    assert "NCCL" not in done.stderr
