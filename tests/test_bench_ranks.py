"""The script that measures several ranks: it runs on a CPU, and its switches match the sources."""

from __future__ import annotations

import filecmp
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bench.ranks import PACKAGE, PARTS, copy_without

ROOT = PACKAGE.parents[1]
RESULT = re.compile(
    r"2 ranks, (\w+), batch 1, sequence 16, cpu.*: \d+\.\d ms per step unwatched,"
    r" (0 marks in a step|Python only), 2 rounds\n"
    r"  added by torchwhere: -?\d+\.\d % \(quartiles -?\d+\.\d and -?\d+\.\d\)\n"
    r"  without device progress: -?\d+\.\d % .*\n"
    r"  nothing \(unwatched, a second time\): -?\d+\.\d % .*\n"
)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_left_out(name: str, tmp_path: Path) -> None:
    """A switch changes one file of the copy, and nothing in the package."""
    copy_without([name], tmp_path / "torchwhere")
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file()]
    sources = [str(file) for file in files if "__pycache__" not in file.parts]
    same, different, missing = filecmp.cmpfiles(PACKAGE, tmp_path / "torchwhere", sources, False)
    assert different == [PARTS[name].file]
    assert (len(same), missing) == (len(sources) - 1, [])


@pytest.mark.parametrize(
    ("model", "options"), [("ddp", ()), ("fsdp2", ("--without", "places", "polling"))]
)
def test_on_a_cpu(model: str, options: tuple[str, ...]) -> None:
    """Two ranks on gloo measure a tiny model."""
    command = ["--device", "cpu", "--ranks", "2", "--sequence", "16", "--rounds", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.ranks", "--model", model, *command, "--steps", "1", *options],
        cwd=ROOT,
        env=os.environ | {"CXX": "no-compiler"},  # a build takes long, and this is not about it
        capture_output=True,
        text=True,
        timeout=300,
    )
    match = RESULT.fullmatch(done.stdout)
    assert match, done.stdout + done.stderr
    assert match[1] == model
    assert ("without places, polling" in done.stdout) == bool(options)


def test_a_rank_that_fails() -> None:
    """If a rank fails, the script ends the others and says so."""
    command = [sys.executable, "-m", "bench.ranks", "--device", "cpu", "--ranks", "2"]
    done = subprocess.run(
        [*command, "--batch", "-1", "--rounds", "1"],
        cwd=ROOT,
        env=os.environ | {"CXX": "no-compiler"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "bench.ranks: a rank failed" in done.stderr
