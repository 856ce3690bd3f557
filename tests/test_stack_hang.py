"""What the stacks of a job show that torchwhere does not watch: verdicts, positions, files of several
hosts, dumps and GPUs."""

from __future__ import annotations

import inspect
import json
import os
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from fake_nvml import FakeNvml
from test_flight_recorder import four
from torchwhere.cli import main
from torchwhere.diagnose.stack_hang import ObservedJob, find_stack_hang
from torchwhere.diagnose.stack_position import (
    MESSAGE,
    STORE,
    UNNAMED,
    PositionKind,
    position_of,
)
from torchwhere.pipeline.attach import (
    AttachedJob,
    copy_dumps,
    diagnose_attached,
    saved_dumps,
    with_host_evidence,
)
from torchwhere.processes.observation import RankObservation, ThreadStack
from torchwhere.processes.observation_files import write_observations
from torchwhere.render.other_hosts import other_hosts_lines
from torchwhere.render.verdict import verdict_text

# -- verdicts --------------------------------------------------------------------------------------

TORCH = "/env/lib/python3.11/site-packages/torch"
ALL_REDUCE = (
    f"{TORCH}/distributed/distributed_c10d.py:2900 in all_reduce",
    f"{TORCH}/distributed/c10d_logger.py:81 in wrapper",
    "/job/train.py:20 in <module>",
)
BARRIER = (f"{TORCH}/distributed/distributed_c10d.py:4900 in barrier", "/job/train.py:30 in main")
LOCK = ("/usr/lib/python3.11/threading.py:327 in wait", "/job/train.py:12 in main")
LINE = ("/job/train.py:15 in main",)
SAVING = (f"{TORCH}/serialization.py:900 in save", "/job/train.py:40 in main")
OTHER_LOCK = ("/usr/lib/python3.11/threading.py:327 in wait", "/job/train.py:13 in main")
RECV_WORK = (
    "gloo::transport::tcp::UnboundBuffer::waitRecv",
    "c10d::ProcessGroupGloo::RecvWork::wait",
)
STORE_WAIT = (
    "c10d::detail::SocketImpl::waitForInput",
    "c10d::TCPStore::wait",
    "pybind11::cpp_function::initialize<{lambda(c10d::Store&)#1}>",
)
RECV = (f"{TORCH}/distributed/distributed_c10d.py:2500 in recv", "/job/train.py:50 in main")


def rank(
    number: int,
    stack: tuple[str, ...],
    *,
    still: bool = True,
    native: tuple[str, ...] = (),
    **fields: Any,
) -> RankObservation:
    values: dict[str, Any] = {"world_size": 4, "local_world_size": 4, "state": "S"} | fields
    return RankObservation(
        rank=number,
        pid=100 + number,
        host="a",
        seen_ns=10**18,
        seconds=30.0,
        folder="/job",
        main=ThreadStack(
            "MainThread", stack, native, has_run=not still, is_same=still, has_native=bool(native)
        ),
        **values,
    )


def polling(number: int, *, run_s: float = 0.001) -> RankObservation:
    """A rank that was at one line all the time, and woke up now and then."""
    observation = rank(number, LOCK)
    assert observation.main is not None
    return replace(observation, main=replace(observation.main, has_run=True, run_s=run_s))


def job_of(*stacks: tuple[str, ...] | RankObservation) -> ObservedJob:
    ranks = [
        rank(i, stack) if isinstance(stack, tuple) else stack for i, stack in enumerate(stacks)
    ]
    return ObservedJob({observation.rank: observation for observation in ranks})


@pytest.mark.parametrize(
    ("job", "kind", "culprits", "certainty"),
    [
        (job_of(ALL_REDUCE, ALL_REDUCE, LOCK, ALL_REDUCE), "missing", (2,), "inferred"),
        (job_of(ALL_REDUCE, ALL_REDUCE, LOCK, LOCK), "missing", (2, 3), "inferred"),
        (job_of(ALL_REDUCE, BARRIER, LOCK, ALL_REDUCE), "missing", (2,), "inferred"),
        (job_of(RECV, RECV, LOCK, rank(3, LINE, still=False)), "missing", (), "unknown"),
        (job_of(ALL_REDUCE, ALL_REDUCE, LINE, ALL_REDUCE), "missing", (), "unknown"),
        (
            job_of(rank(0, SAVING, still=False), ALL_REDUCE, ALL_REDUCE, ALL_REDUCE),
            "missing",
            (),
            "unknown",
        ),
        (job_of(ALL_REDUCE, ALL_REDUCE), "missing", (), "unknown"),
        (job_of(ALL_REDUCE, ALL_REDUCE, ALL_REDUCE, ALL_REDUCE), "together", (), "inferred"),
        (job_of(ALL_REDUCE, BARRIER, ALL_REDUCE, BARRIER), "deadlock", (), "inferred"),
        (job_of(LOCK, LOCK, LOCK, LOCK), "together", (), "inferred"),
        (job_of(LOCK, *(rank(i, LINE, still=False) for i in (1, 2, 3))), "healthy", (), "unknown"),
        (
            job_of(*(rank(i, ALL_REDUCE, still=False) for i in range(4))),
            "healthy",
            (),
            "inferred",
        ),
        (
            job_of(*(rank(i, LINE, native=("cudaStreamSynchronize",)) for i in range(4))),
            "missing",
            (),
            "unknown",
        ),
        (
            job_of(LOCK, *(rank(i, LINE, native=("cudaStreamSynchronize",)) for i in (1, 2, 3))),
            "missing",
            (0,),
            "inferred",
        ),
        (job_of(rank(0, ALL_REDUCE, state=None), ALL_REDUCE), "dead", (0,), "inferred"),
        (
            job_of(*(rank(i, ALL_REDUCE, state=None) for i in range(4))),
            "dead",
            (),
            "unknown",
        ),
        (
            job_of(rank(0, LINE, state=None), *(rank(i, LINE, still=False) for i in (1, 2, 3))),
            "dead",
            (),
            "unknown",
        ),
        (
            job_of(ALL_REDUCE, BARRIER, rank(2, LINE, still=False), ALL_REDUCE),
            "missing",
            (),
            "unknown",
        ),
        (job_of(ALL_REDUCE, BARRIER, polling(2), ALL_REDUCE), "missing", (2,), "inferred"),
        (job_of(ALL_REDUCE, BARRIER, polling(2, run_s=0.9), BARRIER), "missing", (), "unknown"),
        (
            job_of(ALL_REDUCE, ALL_REDUCE, ALL_REDUCE, rank(3, LINE, still=False)),
            "missing",
            (3,),
            "inferred",
        ),
        (
            job_of(ALL_REDUCE, ALL_REDUCE, LOCK, rank(3, LINE, still=False)),
            "missing",
            (),
            "unknown",
        ),
        (
            job_of(LOCK, OTHER_LOCK, *(rank(i, LINE, native=RECV_WORK) for i in (2, 3))),
            "missing",
            (),
            "unknown",
        ),
        (
            job_of(LOCK, *(rank(i, LINE, native=STORE_WAIT) for i in (1, 2, 3))),
            "missing",
            (0,),
            "inferred",
        ),
        (
            job_of(rank(0, LINE, native=STORE_WAIT), ALL_REDUCE, ALL_REDUCE, ALL_REDUCE),
            "deadlock",
            (),
            "inferred",
        ),
    ],
    ids=[
        "one rank elsewhere",
        "two ranks elsewhere",
        "several collectives, one rank elsewhere",
        "messages, two ranks elsewhere",
        "in native code",
        "saving",
        "ranks of other hosts",
        "all in one collective",
        "all in two collectives",
        "all in a lock",
        "one in a lock",
        "all run",
        "all wait for devices",
        "one does not wait for its device",
        "exited",
        "all exited",
        "exited, others run",
        "several collectives, one rank works",
        "several collectives, one rank waits and polls",
        "several collectives, one rank works at one line",
        "one collective, one rank works",
        "one collective, one rank works and one is blocked",
        "messages in native code, two ranks elsewhere",
        "the store, one rank elsewhere",
        "the store and a collective",
    ],
)
def test_verdicts_from_stacks(
    job: ObservedJob, kind: str, culprits: tuple[int, ...], certainty: str
) -> None:
    """A rank is named only if the stacks are clear, and a job is never healthy for certain."""
    finding = find_stack_hang(job)
    assert (finding.kind, finding.culprits, finding.certainty) == (kind, culprits, certainty)
    verdict = diagnose_attached(AttachedJob(job.ranks))
    text = verdict_text(verdict)
    assert "HEALTHY" not in text
    assert "torchwhere was not watching" in text


def test_a_native_wait() -> None:
    """A wait in C++ below the user's line or a backward is a collective only if native frames show
    it. Python code that spins at one line has none."""
    spinning = rank(0, LINE)
    assert spinning.main is not None
    backward = (f"{TORCH}/autograd/graph.py:829 in _engine_run_backward", "/job/train.py:9 in main")
    native = ("pthread_cond_wait", "c10d::Reducer::finalize_backward()")
    kinds = [
        position_of(observation).kind
        for observation in (
            rank(0, backward, native=native),
            rank(0, backward, native=("at::native::mm",)),
            rank(0, backward),
            rank(0, LINE, native=("c10d::Work::wait",)),
            rank(0, backward, still=False),
            replace(spinning, main=replace(spinning.main, has_run=True, has_native=True)),
        )
    ]
    assert kinds == [
        PositionKind.COLLECTIVE,
        PositionKind.ELSEWHERE,
        PositionKind.UNCLEAR,
        PositionKind.COLLECTIVE,
        PositionKind.ELSEWHERE,
        PositionKind.ELSEWHERE,
    ]


def test_a_native_wait_has_a_name() -> None:
    """Native frames tell a wait for a message and for the store from a wait in a collective, and a
    collective that asks the store is a collective."""
    first_call = (*STORE_WAIT[:2], "c10d::ProcessGroupNCCL::broadcastUniqueNCCLID")
    ops = [
        position_of(rank(0, LINE, native=native)).op
        for native in (("c10d::Work::wait",), RECV_WORK, STORE_WAIT, first_call)
    ]
    assert ops == [UNNAMED, MESSAGE, STORE, UNNAMED]


def test_all_ranks_wait_for_messages() -> None:
    """If all ranks wait in messages at one line, a rank may wait for the wrong one: the text does
    not blame the network alone."""
    for stack, native in ((RECV, ()), (LINE, RECV_WORK)):
        job = job_of(*(rank(i, stack, native=native) for i in range(4)))
        text = verdict_text(diagnose_attached(AttachedJob(job.ranks)))
        assert "No rank is elsewhere" not in text
        assert "stacks do not show which ranks wait for which" in text


def test_the_names_of_collectives() -> None:
    """A stack shows each collective of this torch by its name."""
    for name in distributed_c10d.__all__:
        function = getattr(distributed_c10d, name)
        is_function = type(function) is FunctionType
        if is_function and "async_op" in inspect.signature(function).parameters:
            stack = (f"{TORCH}/distributed/distributed_c10d.py:9 in {name}", *LINE)
            assert position_of(rank(0, stack)).op == name


def test_a_collective_in_another_thread() -> None:
    """A rank whose main thread waits for a thread that is in a collective waits in it too."""
    observation = rank(0, LOCK, others=(ThreadStack("saver", BARRIER, has_run=False),))
    position = position_of(observation)
    assert (position.kind, position.op, position.thread) == ("collective", "barrier", "saver")
    assert position.is_waiting


def test_lines_of_frameworks_and_modules() -> None:
    """Under a trainer, the line of the framework and that of the forward are known too."""
    stack = (
        f"{TORCH}/nn/modules/linear.py:125 in forward",
        "/env/lib/python3.11/site-packages/net/model.py:31 in Block.forward",
        f"{TORCH}/nn/modules/module.py:1700 in _call_impl",
        "/env/lib/python3.11/site-packages/transformers/trainer.py:2322 in training_step",
        "/job/train.py:7 in <module>",
    )
    position = position_of(rank(0, stack))
    assert position.line == "train.py:7"
    assert position.library_line == position.forward_line == "net/model.py:31 in Block.forward"


def test_damaged_observations() -> None:
    """Values of the wrong type in a file count as unknown; an entry without a rank is left out."""
    observation = rank(1, ALL_REDUCE)
    assert RankObservation.from_dict(json.loads(json.dumps(observation.to_dict()))) == observation
    wrong = {name: ["x"] for name in observation.to_dict()}
    assert RankObservation.from_dict(wrong) is None
    assert RankObservation.from_dict(wrong | {"rank": 3}) == RankObservation(3, 0, "", 0, 0.0)


# -- several hosts ---------------------------------------------------------------------------------


def test_hosts_are_judged_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rank that the ranks of one host wait for is found in the file of the other host."""
    observations = [
        rank(i, LOCK if i == 3 else ALL_REDUCE, local_world_size=2, job="17") for i in range(4)
    ]
    write_observations(tmp_path, observations[:2])
    assert main(["attach", "--read", str(tmp_path)]) == 1
    alone = capsys.readouterr().out
    write_observations(tmp_path, [replace(entry, host="b") for entry in observations[2:]])
    assert main(["attach", "--read", str(tmp_path), "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert alone.startswith("NOT KNOWN  2 ranks, no progress for 30 s\n")
    assert "Look at ranks 2-3 first: they were not found" in alone
    assert (
        f"  srun --overlap --jobid 17 --nodes N --ntasks-per-node 1 torchwhere attach --all --out {tmp_path}\n"
        in alone
    )
    assert (verdict["kind"], verdict["culprits"]) == ("missing", [3])
    assert "other_hosts" not in verdict


def test_other_hosts() -> None:
    """If ranks were not seen, the lines for ssh, Slurm and Kubernetes are printed."""
    lines = other_hosts_lines([4, 5], job="17", out="/shared/run")
    assert lines[0].startswith("Ranks 4-5 may be on other hosts.")
    assert lines[1] == "  ssh HOST torchwhere attach --all --out /shared/run"
    assert lines[2].startswith("  srun --overlap --jobid 17 ")
    assert lines[3].startswith("  kubectl exec POD -- torchwhere attach --all --out /tmp/run")
    assert lines[-1] == "  torchwhere attach --read /shared/run"
    assert other_hosts_lines([], job="", out=None) == []


# -- flight recorder and GPUs ----------------------------------------------------------------------


def test_dumps_of_the_flight_recorder(tmp_path: Path) -> None:
    """A rank with a pipe is asked for a new dump. Dumps show the order of collectives, which stacks
    do not: their verdict counts, with the stacks."""
    paths = {"dump": str(tmp_path / "nccl_trace_rank_"), "pipe": str(tmp_path / "pipe")}
    host = socket.gethostname()
    ranks = [
        replace(
            rank(i, LINE, native=("cudaStreamSynchronize",)),
            host=host,
            flight_recorder=paths,
            seen_ns=time.time_ns(),
        )
        for i in range(4)
    ]
    recorders = [recorder.call(state="started") for recorder in four()]
    recorders[2].entries.pop()
    for recorder in recorders[1:]:
        recorder.write(tmp_path)
    os.mkfifo(tmp_path / "pipe0.pipe")
    descriptor = os.open(tmp_path / "pipe0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as pipe:

        def serve() -> None:
            while not pipe.read(128):
                time.sleep(0.01)
            recorders[0].write(tmp_path)

        listener = threading.Thread(target=serve)
        listener.start()
        job = with_host_evidence(
            AttachedJob({observation.rank: observation for observation in ranks})
        )
        listener.join()
    verdict = diagnose_attached(job)
    text = verdict_text(verdict)
    assert sorted(job.dumps or {}) == [0, 1, 2, 3]
    assert (verdict.kind, verdict.culprits) == ("missing", (2,))
    assert "Rank 2 never issued all_reduce of float32 [4], #5" in text
    assert "The stacks show:" in text
    assert verdict.ranks[0].stack == LINE
    (tmp_path / "run").mkdir()
    copy_dumps(job, tmp_path / "run")
    assert sorted(saved_dumps(tmp_path / "run", job.ranks)) == [0, 1, 2, 3]


def test_old_dumps(tmp_path: Path) -> None:
    """Dumps from before the first look name no rank: the job may have progressed since."""
    recorders = [recorder.call(state="started") for recorder in four()]
    recorders[2].entries.pop()
    for recorder in recorders:
        recorder.write(tmp_path)
    now_ns = time.time_ns() + 60 * 10**9
    ranks = {
        i: replace(rank(i, LINE, native=("cudaStreamSynchronize",)), seen_ns=now_ns)
        for i in range(4)
    }
    dumps = {i: tmp_path / f"nccl_trace_rank_{i}" for i in range(4)}
    verdict = diagnose_attached(AttachedJob(ranks, (), dumps))
    assert verdict.culprits == ()
    assert verdict.missing_data[-1] == (
        f"4 dumps of the flight recorder in {tmp_path}, older than the first look: read with"
        " torchwhere doctor --flight-recorder"
    )


def test_gpus_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for its device is shown with the GPU that NVML says it uses."""
    nvml = FakeNvml()
    nvml.pids = [100, 103]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    ranks = {
        i: replace(
            rank(i, LINE, native=("cudaStreamSynchronize",)),
            host=socket.gethostname(),
            seen_ns=time.time_ns(),
        )
        for i in range(4)
    }
    verdict = diagnose_attached(with_host_evidence(AttachedJob(ranks)))
    lines = [line for line in verdict.explanation if " uses GPU " in line]
    assert [line[:18] for line in lines] == ["  rank 0 uses GPU ", "  rank 3 uses GPU "]
    assert "97% busy" in lines[0]
