"""The recipes for launchers: a test runs the commands of each page whose launcher is installed."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from test_startup import BIN, ENVIRONMENT, MAIN, TRAIN

RECIPES = Path(__file__).parent.parent / "docs" / "recipes"
SPAWNS = f"""{TRAIN}
import torch.multiprocessing as mp

def work(rank):
    train(rank, 2, f"file://{{os.getcwd()}}/store")

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""
SCRIPTS = {"torchrun": MAIN, "accelerate": MAIN, "deepspeed": MAIN, "spawn": SPAWNS}
ON_CPU = {"DS_ACCELERATOR": "cpu"}  # instead of GPUs
NOT_RUN = {"slurm", "kubernetes", "torchtitan", "megatron"}  # test_startup.py runs mpirun
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d+(\.\d+)?")


def blocks(page: Path, kind: str) -> list[str]:
    return [text for name, text in BLOCK.findall(page.read_text()) if name == kind]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_commands_of_a_recipe(name: str, tmp_path: Path) -> None:
    """The commands of a recipe watch both ranks of a job, and print what the page shows."""
    if find_spec(name) is None and name in ("accelerate", "deepspeed"):
        pytest.skip(f"{name} is not installed")
    (tmp_path / "train.py").write_text(SCRIPTS[name])
    page = RECIPES / f"{name}.md"
    shown = blocks(page, "text")[0]
    variables = {key: value for key, value in ENVIRONMENT.items() if key != "TORCHWHERE_OUT"}
    for commands in blocks(page, "sh"):
        done = subprocess.run(
            ["bash", "-e", "-c", commands],
            cwd=tmp_path,
            env=variables | ON_CPU | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert NUMBER.sub("N", shown) in NUMBER.sub("N", done.stdout)


def test_untested_recipes_say_so() -> None:
    """Each recipe for a launcher is run by a test, or says that it is not tested."""
    for name in NOT_RUN:
        text = (RECIPES / f"{name}.md").read_text()
        assert "This page is not tested" in text, name
        assert "TORCHWHERE_OUT" in text, name
    assert {path.stem for path in RECIPES.glob("*.md")} >= NOT_RUN | SCRIPTS.keys()
