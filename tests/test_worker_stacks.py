"""The workers of ranks: found by their parents, and asked for their stacks. Real DataLoaders."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from test_own_processes import ENVIRONMENT, free_port
from torchwhere.blackbox.run import read_run
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.processes import py_spy
from torchwhere.processes.status import ProcessStatus, WorkerStatus
from torchwhere.processes.workers import workers_of
from torchwhere.render.verdict import verdict_text
from warm_python import WarmPython

# The dataset of rank 1 blocks at its third item, in a worker.
TRAIN = """
import os, sys, time
import torch, torch.distributed as dist

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if os.environ["RANK"] == "1" and index == 2:
            time.sleep(1000)  # blocks
        return torch.ones(2)

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = "tcp://localhost:" + sys.argv[1]
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
for batch in torch.utils.data.DataLoader(Data(), batch_size=1, num_workers=1):
    dist.all_reduce(batch)
"""


def wait_for_verdict(folder: Path, kind: str) -> Verdict:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if len([*folder.glob("rank*.box")]) == 2:
            verdict = diagnose_folder(folder, stall_s=1.0)
            if verdict.kind == kind and verdict.culprits:
                return verdict
        time.sleep(0.2)
    raise AssertionError(f"no verdict {kind}: {verdict_text(diagnose_folder(folder))}")


@pytest.mark.parametrize("has_py_spy", [False, True])
def test_hang_in_data_loading(
    warm: WarmPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_py_spy: bool
) -> None:
    """If a rank waits for its DataLoader, the verdict has the stack of the worker with the line of
    the dataset, also without py-spy. The worker does not outlive the test."""
    if has_py_spy and py_spy.program() is None:
        pytest.skip("py-spy is not installed")
    if not has_py_spy:
        monkeypatch.setattr(py_spy, "program", lambda: None)
    (tmp_path / "train.py").write_text(TRAIN)
    command = ("-m", "torchwhere", "run", "--no-monitor", "--out", "run", "train.py", free_port())
    programs = [
        warm.start(*command, cwd=tmp_path, env=ENVIRONMENT | {"RANK": str(rank), "WORLD_SIZE": "2"})
        for rank in range(2)
    ]
    workers = []
    try:
        verdict = wait_for_verdict(tmp_path / "run", "missing")
        workers = workers_of({program.pid for program in programs})
    finally:
        for program in programs:
            program.kill()
        for worker in workers:
            worker.kill()
        for program in programs:
            program.end()
    assert verdict.culprits == (1,)
    (worker,) = verdict.ranks[1].workers
    assert worker.name == "DataLoader worker"
    line = TRAIN.splitlines().index("            time.sleep(1000)  # blocks") + 1
    assert worker.stack[0] == f"{tmp_path / 'train.py'}:{line} in __getitem__"
    text = verdict_text(verdict)
    assert f"stack of process {worker.pid}, a DataLoader worker of rank 1, innermost first:" in text
    assert sorted(read_run(tmp_path / "run").boxes) == [0, 1]
    # a doctor that comes when the job is gone has the stack from the first one
    later = diagnose_folder(tmp_path / "run", stall_s=1.0)
    assert later.ranks[1].workers == verdict.ranks[1].workers


def test_workers_in_a_file() -> None:
    """The workers of a status survive the way through JSON, and wrong values are left out."""
    worker = WorkerStatus(7, "DataLoader worker", "S", ("a.py:1 in f",))
    status = ProcessStatus(alive=True, stack=("b.py:2 in g",), stack_ns=5, workers=(worker,))
    values = status.to_dict()
    values["workers"] = [*map(dict, values["workers"]), {"pid": "x"}, 3]
    assert ProcessStatus.from_dict(values) == status
    # a lead monitor passes the statuses of other hosts on without JSON
    assert ProcessStatus.from_dict(status.to_dict()) == status
    assert status.shortened(frames=1, characters=4).workers[0].stack == ("a.py",)
    # the workers are those of the newer stack
    assert ProcessStatus(alive=False).after(status).workers == (worker,)
