"""The monitor beside real jobs: it says what is wrong while it is wrong, and keeps it; of sound jobs it says nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchwhere.cli import main
from torchwhere.consultation import consult

SCRIPT = """
import sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
for step in range(6):
    if dist.get_rank() == int(sys.argv[1]) and step == 3:
        while True:
            time.sleep(0.1)
    dist.all_reduce(torch.ones(4))
print("done")
dist.destroy_process_group()
"""


def launch(folder: Path, victim: int, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*torchrun, "-m", "torchwhere", "run", "--out", "run", *options, "train.py", str(victim)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_hang_is_told_and_ended(tmp_path: Path) -> None:
    """A hang is printed by the monitor and kept; asked to, it ends the job; the doctor says the same when all is over."""
    done = launch(tmp_path, 1, "--stall", "2", "--end-with", "SIGKILL")
    assert done.returncode != 0
    assert 'Rank 1 never issued all_reduce of float32 [4], #3 of group "default".' in done.stderr
    assert "ending rank 1" in done.stderr
    kept = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert (kept["kind"], kept["culprits"], kept["certainty"]) == ("missing", [1], "exact")
    assert kept["text"] == (tmp_path / "run" / "verdict.txt").read_text().rstrip("\n")
    assert kept["ranks"]["1"]["line"] == "train.py:9"
    assert kept["ranks"]["0"]["state"] == "waiting"
    verdict = consult(tmp_path / "run", stall_s=2.0)
    assert (verdict.kind, verdict.culprits) == ("missing", (1,))


def test_sound_job_hears_nothing(tmp_path: Path) -> None:
    """Beside a job that does what it should the monitor prints nothing, ends with it, and the doctor calls it healthy."""
    done = launch(tmp_path, -1, "--stall", "5")
    assert (done.returncode, done.stdout.count("done")) == (0, 2)
    assert "torchwhere" not in done.stderr
    assert not (tmp_path / "run" / "verdict.json").exists()
    verdict = consult(tmp_path / "run")
    assert (verdict.kind, verdict.culprits) == ("healthy", ())
    assert verdict.explanation[0].startswith("All 2 ranks have finished.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["monitor", "nowhere"], "there is no folder nowhere. Record one with: torchwhere run --out nowhere train.py"),
        (["doctor", "nowhere"], "there is no folder nowhere. Record one with: torchwhere run --out nowhere train.py"),
    ],
)
def test_bad_folder(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is not there is said, with what to do, and exit code 2."""
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_bad_signal(capsys: pytest.CaptureFixture[str]) -> None:
    """A word that is no signal is refused before anything starts."""
    with pytest.raises(SystemExit):
        main(["monitor", ".", "--end-with", "SIGNOTHING"])
    assert "'SIGNOTHING' is no signal; one is SIGTERM" in capsys.readouterr().err
