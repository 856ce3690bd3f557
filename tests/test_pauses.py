"""Pauses of a healthy job are not hangs: ranks that save, compile, evaluate or start while others
wait for them. A rank that hangs inside such work is reported, later."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchwhere
from diagnosing import diagnose
from rank_pool import Pool
from test_monitor import launch_ranks
from test_top import START_NS, S, Writer
from torchwhere.blackbox.run import read_run
from torchwhere.core.stall import wait_limit_s
from torchwhere.diagnose.doctor.stacks import Activity, is_evaluating, long_work
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.processes.status import ProcessStatus
from torchwhere.render.top import verdict_sentence
from torchwhere.render.verdict import verdict_json, verdict_text
from torchwhere.top.poller import RunPoller
from warm_python import WarmPython

LIB = "/venv/lib/python3.11/site-packages"
# `--stall 3`: a wait is a hang after 3 s, and a pause after 15 s.
STALL = ("--stall", "3")

SLOW_FILE = """
class SlowFile:
    "A file on a slow file system: the first write takes long."
    def __init__(self, seconds):
        self.seconds = seconds
    def write(self, data):
        end, self.seconds = time.monotonic() + self.seconds, 0
        while time.monotonic() < end:
            time.sleep(0.05)  # a signal may end a longer sleep early
        return len(data)
    def flush(self):
        pass
"""

# Rank 0 saves three times: briefly, briefly, and for argv[2] seconds.
SAVES = (
    """
import sys, time
import torch, torch.distributed as dist
"""
    + SLOW_FILE
    + """
dist.init_process_group("gloo")
for seconds in (0.3, 0.3, float(sys.argv[2])):
    for step in range(3):
        dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 0:
        torch.save({"weight": torch.ones(4)}, SlowFile(seconds))
    dist.barrier()
for step in range(3):
    dist.all_reduce(torch.ones(4))
print("done")
dist.destroy_process_group()
"""
)

# All ranks compile; rank 1 takes argv[2] seconds longer than rank 0.
COMPILES = """
import sys, time
import torch, torch.distributed as dist

def backend(graph, inputs):
    time.sleep(4 + dist.get_rank() * float(sys.argv[2]))
    return graph

dist.init_process_group("gloo")
compiled = torch.compile(lambda x: x + 1, backend=backend)
dist.barrier()
for step in range(4):
    dist.all_reduce(compiled(torch.ones(4)))
print("done")
dist.destroy_process_group()
"""

# Rank 0 evaluates for argv[2] seconds, in a function or in the loop itself; the others wait.
EVALUATES = """
import sys, time
import torch, torch.distributed as dist

def evaluate(model):
    time.sleep(float(sys.argv[2]))

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
for step in range(4):
    dist.all_reduce(model(torch.ones(4)).detach())
if dist.get_rank() == 0:
    EVALUATION
dist.barrier()
print("done")
dist.destroy_process_group()
"""
IN_THE_LOOP = """end = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end:
        model(torch.ones(4))
        time.sleep(0.1)"""


@pytest.mark.parametrize(
    ("script", "pause"),
    [
        pytest.param(SAVES, "saving", id="save"),
        pytest.param(COMPILES, "compiling", id="compile"),
        pytest.param(EVALUATES.replace("EVALUATION", "evaluate(model)"), "evaluating", id="eval"),
        pytest.param(
            EVALUATES.replace("EVALUATION", IN_THE_LOOP), "running modules", id="eval in the loop"
        ),
    ],
)
def test_a_pause_is_not_a_hang(warm: WarmPython, tmp_path: Path, script: str, pause: str) -> None:
    """While a rank does work that takes long in a healthy job, the monitor says so in one line: it
    reports no hang, and does not end the job."""
    options = (*STALL, "--end-with", "SIGKILL")
    done = launch_ranks(warm, tmp_path, 0, *options, late_s=7, script=script)
    assert (done.returncode, done.stdout.count("done")) == (0, 2), done.stderr
    assert done.stderr.count(f"torchwhere: Paused: {pause}. No progress for ") == 1
    assert "this is called a hang after 15 s." in done.stderr
    assert "HANG" not in done.stderr
    assert [*(tmp_path / "run").glob("verdict*")] == []


def test_a_hang_in_a_save(warm: WarmPython, tmp_path: Path) -> None:
    """A rank that is stuck in torch.save is reported after five times `--stall`, and the verdict
    says that this is longer than a save may take and how long earlier saves took."""
    options = ("--stall", "2", "--end-with", "SIGKILL")
    done = launch_ranks(warm, tmp_path, 0, *options, script=SAVES)
    assert done.returncode != 0
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert (verdict["kind"], verdict["culprits"]) == ("missing", [0])
    assert verdict["stalled_s"] >= 10
    assert verdict["ranks"]["0"]["detail"] == "saving a checkpoint"
    assert (
        "A pause for saving may last 10 s, and this one lasts longer: the longest earlier wait at"
        " this call took 0." in verdict["text"]
    )


# Rank 0 pauses until the monitor has reported it, and then for the same time, twice.
PAUSES_AGAIN = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
lasted = None
for epoch in range(3):
    for step in range(3):
        dist.all_reduce(torch.ones(4))
    begin = time.monotonic()
    while dist.get_rank() == 0 and not (
        os.path.exists("run/verdict.json") if epoch == 0 else time.monotonic() - begin > lasted
    ):
        time.sleep(0.05)
    dist.barrier()
    lasted = lasted or time.monotonic() - begin
print("done")
dist.destroy_process_group()
"""


def test_a_pause_that_the_job_has_had_before(warm: WarmPython, tmp_path: Path) -> None:
    """A wait that nothing explains is a hang the first time. The same wait at the same line is not,
    up to twice as long."""
    done = launch_ranks(warm, tmp_path, 0, *STALL, script=PAUSES_AGAIN)
    assert (done.returncode, done.stdout.count("done")) == (0, 2)
    history = (tmp_path / "run" / "verdicts.jsonl").read_text().splitlines()
    assert [json.loads(line).get("passed", False) for line in history] == [False, True]


# -- doctor and top --------------------------------------------------------------------------------


class ExaminedFile:
    """A slow file whose writer examines the job while the others wait."""

    def __init__(self, folder: str, seconds: float) -> None:
        self.folder = folder
        self.seconds = seconds
        self.seen: list[Any] = []

    def write(self, data: bytes) -> int:
        if self.seconds:
            time.sleep(self.seconds)
            self.seconds = 0
            verdict = diagnose_folder(self.folder)
            run = RunPoller(self.folder).poll()
            sentence = verdict_sentence(verdict_json(verdict), run)
            self.seen = [verdict_text(verdict), str(verdict.kind), verdict.facts, sentence]
        return len(data)

    def flush(self) -> None:
        pass


def save_on_one_rank(folder: str) -> Any:
    """Ten steps; then rank 1 saves and examines the job while rank 0 waits."""
    file = ExaminedFile(folder, seconds=6)
    with torchwhere.watch(out=folder):
        for _ in range(10):
            torchwhere.step()
            dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 1:
            torch.save({"weight": torch.ones(4)}, file)
        dist.barrier()
    return file.seen


def test_doctor_and_top_show_a_pause(two_ranks: Pool, tmp_path: Path) -> None:
    """Before `--stall` is over, the doctor and the screen say what the awaited rank does, by the
    stack that it has saved itself."""
    text, kind, facts, sentence = two_ranks.run(save_on_one_rank, str(tmp_path))[1]
    title, paused, wait, work = text.splitlines()[:4]
    assert title.startswith("PAUSED: SAVING  2 ranks, step 9, no progress for ")
    assert paused.startswith("Paused: saving. No progress for ")
    assert "s; this is called a hang after 150 s. Last step 9" in paused
    assert wait.startswith("Rank 0 has waited for rank 1 for ")
    assert wait.endswith(" s, in barrier.")
    assert work.startswith("  rank 1 is saving, outside any module, ")
    assert (kind, facts["paused"]["activity"], facts["paused"]["ranks"]) == (
        "healthy",
        "saving",
        [1],
    )
    assert sentence.startswith("paused: saving, no progress for ")


# -- the start of a job ----------------------------------------------------------------------------

STARTS = """
import os, sys, time
import torch, torch.distributed as dist

if sys.argv[1] == os.environ["RANK"]:
    START
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
print("done")
dist.destroy_process_group()
"""
COMPUTES = """end = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)"""


@pytest.mark.parametrize("start", ["import slow_module", COMPUTES], ids=["import", "computation"])
def test_a_slow_start(warm: WarmPython, tmp_path: Path, start: str) -> None:
    """A rank that imports modules or computes before it calls init_process_group is starting, while
    the other rank waits there for longer than `--stall`."""
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(10)\n")
    script = STARTS.replace("START", start)
    done = launch_ranks(warm, tmp_path, 1, *STALL, late_s=10, script=script)
    assert (done.returncode, done.stdout.count("done")) == (0, 2), done.stderr
    assert "HANG" not in done.stderr
    assert "torchwhere: Starting. No progress for " in done.stderr
    assert [*(tmp_path / "run").glob("verdict*")] == []


def test_a_rank_that_never_starts(warm: WarmPython, tmp_path: Path) -> None:
    """A rank that sleeps before init_process_group is reported after `--stall`."""
    script = STARTS.replace("START", "time.sleep(1000)")
    options = (*STALL, "--end-with", "SIGKILL")
    launch_ranks(warm, tmp_path, 1, *options, script=script)
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert (verdict["kind"], verdict["culprits"]) == ("missing", [1])
    assert verdict["text"].splitlines()[1] == (
        "Rank 1 never called init_process_group, where rank 0 waits."
    )
    assert 3 <= verdict["stalled_s"] < 15


# -- a rank at work --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moved_s", "now_s", "activity"),
    [(2.9, 6, None), (3.1, 6, None), (30, 32, "running modules")],
)
def test_a_rank_at_work(tmp_path: Path, moved_s: float, now_s: int, activity: str | None) -> None:
    """A rank that enters modules while others wait is at work; a rank that entered one only before
    or at the beginning of the wait is not."""
    writers = [Writer(tmp_path, rank) for rank in range(2)]
    for writer in writers:
        writer.issue("all_reduce", 1)
    writers[0].issue("all_reduce", 3)
    writers[1].enter("layers.0", moved_s)
    for writer in writers:
        writer.box.close()
    run, now_ns = read_run(tmp_path), START_NS + now_s * S
    status = ProcessStatus(alive=True, state="S", alive_ns=now_ns)
    verdict = diagnose(run, statuses=dict.fromkeys(run.boxes, status), now_ns=now_ns)
    assert verdict.facts.get("paused", {}).get("activity") == activity


# -- on a device -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("waited_s", "kind"), [(40, "healthy"), (160, "together")])
def test_all_ranks_save(tmp_path: Path, waited_s: int, kind: str) -> None:
    """With NCCL a rank goes on while its collective runs. Ranks that have all issued the same
    collective and then save are paused; after five times `--stall` they hang together."""
    for rank in range(2):
        writer = Writer(tmp_path, rank)
        writer.issue("all_reduce", 1)
        writer.box.close()
    run, now_ns = read_run(tmp_path), START_NS + (1 + waited_s) * S
    status = ProcessStatus(alive=True, state="R", alive_ns=now_ns)
    without_stack = diagnose(
        run, statuses=dict.fromkeys(run.boxes, status), now_ns=now_ns, is_suspicion=True
    )
    assert without_stack.kind == "together"
    stack = (f"{LIB}/torch/serialization.py:1010 in save", "/home/me/train.py:1 in main")
    saving = replace(status, stack=stack)
    verdict = diagnose(run, statuses=dict.fromkeys(run.boxes, saving), now_ns=now_ns)
    assert verdict.kind == kind


# -- the policy ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("earlier_s", "is_pause", "limit_s"),
    [
        (0.0, False, 30.0),
        (0.0, True, 150.0),
        (20.0, False, 40.0),
        (20.0, True, 150.0),
        (100.0, True, 200.0),
        (1000.0, False, 1600.0),
    ],
)
def test_limits(earlier_s: float, is_pause: bool, limit_s: float) -> None:
    """A pause may last five times `--stall`; a wait twice as long as before, and at most ten minutes
    longer."""
    assert wait_limit_s(30.0, earlier_s=earlier_s, is_pause=is_pause) == limit_s


@pytest.mark.parametrize(
    ("frame", "work"),
    [
        (f"{LIB}/torch/serialization.py:1010 in save", Activity.SAVING),
        (f"{LIB}/torch/distributed/checkpoint/state_dict_saver.py:9 in save", Activity.SAVING),
        (f"{LIB}/safetensors/torch.py:9 in save_file", Activity.SAVING),
        (f"{LIB}/transformers/trainer.py:9 in _save_checkpoint", Activity.SAVING),
        ("/home/me/train.py:9 in save_model", Activity.SAVING),
        (f"{LIB}/torch/serialization.py:1500 in load", Activity.LOADING_CHECKPOINT),
        (f"{LIB}/transformers/modeling_utils.py:9 in from_pretrained", Activity.LOADING_CHECKPOINT),
        (f"{LIB}/torch/_dynamo/convert_frame.py:9 in compile_inner", Activity.COMPILATION),
        (f"{LIB}/torch/utils/checkpoint.py:9 in checkpoint", None),
        (f"{LIB}/torch/autograd/function.py:9 in save_for_backward", None),
        ("/home/me/saved_model/train.py:9 in main", None),
    ],
)
def test_long_work(frame: str, work: Activity | None) -> None:
    """Frames of saving, loading and compiling are recognized below other frames; activation
    checkpoints are not checkpoints."""
    assert long_work(("/home/me/files.py:3 in write", frame, "/home/me/train.py:1 in main")) is work


@pytest.mark.parametrize(
    ("frame", "is_evaluation"),
    [
        ("/home/me/train.py:9 in evaluate", True),
        ("/home/me/train.py:9 in run_validation", True),
        (f"{LIB}/lightning/pytorch/loops/evaluation_loop.py:9 in run", True),
        (f"{LIB}/transformers/trainer.py:9 in evaluation_loop", True),
        (f"{LIB}/torch/distributed/rendezvous.py:9 in _validate_timeout", False),
        ("/home/me/train.py:9 in retrieval", False),
    ],
)
def test_evaluation(frame: str, is_evaluation: bool) -> None:
    """A function of the script or of a trainer evaluates by its name; functions of torch do not."""
    assert is_evaluating((frame, "/home/me/train.py:1 in main")) is is_evaluation
