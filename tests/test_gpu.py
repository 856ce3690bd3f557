"""Four NCCL ranks on one GPU: what the doctor says while they run, after they were killed, and from
dumps of the flight recorder alone.

`make test-gpu` runs this file. It needs one NVIDIA GPU, and is skipped elsewhere.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from bench import ranks

from nccl_jobs import DUMPS, JOBS
from torchwhere.blackbox.device import device_state, device_times
from torchwhere.blackbox.reader import read_box
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.events import Kind
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.flight_recorder.verdict import consult_dumps
from torchwhere.native.build import build
from torchwhere.native.load import SWITCH
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.recorder.nccl_variables import missing_variables

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.checks_itself,
]

HERE = Path(__file__).parent
STALL_S = 5.0
RUNS_S = 80.0  # a job ends by itself after this long
FOUND_S = 45.0
DUMPED_S = 10.0  # a rank that can write dumps has done so after this long
HEALTHY_S = 25.0  # a job without a fault is judged after this long
AT_ONCE = 3
WORLD = 4


def _kill_daemon(variables: dict[str, str]) -> None:
    """Kill the daemon with these variables and its server. Kernels that do not end would keep them. The
    daemons of other jobs stay."""
    pipe = variables["CUDA_MPS_PIPE_DIRECTORY"]
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            is_daemon = (entry / "comm").read_text().startswith("nvidia-cuda-mps")
            if is_daemon and pipe.encode() in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


mps = partial(ranks.mps, end=_kill_daemon)


def dumping(folder: Path) -> dict[str, str]:
    """The variables that `torchwhere run` sets, with this folder for what the watchdog writes."""
    watchdog = folder / "watchdog"
    watchdog.mkdir(parents=True)
    variables = missing_variables({}, watchdog)
    return {
        name: str(watchdog / "rank_") if name.endswith("TEMP_FILE") else value
        for name, value in variables.items()
    }


def dumped(folder: Path) -> list[Path]:
    """Ask the ranks for dumps. Returns the folders with dumps, also those of the watchdog."""
    (folder / ".dump").write_text(str(time.time() + 1))
    (folder / ".dump").rename(folder / "dump")
    until = time.monotonic() + DUMPED_S
    while time.monotonic() < until and len([*folder.glob("dumps/active/rank_*")]) < WORLD:
        time.sleep(0.2)
    return [kind for kind in sorted((folder / "dumps").iterdir()) if [*kind.glob("rank_*")]]


@contextmanager
def running(name: str, folder: Path) -> Iterator[Path]:
    """A job, and the folder of its run. No launcher ends the ranks when one of them exits."""
    run = folder / "run"
    command = [sys.executable, HERE / "nccl_jobs.py", name, run, str(RUNS_S)]
    # a client that fails or is killed would end the other clients of the daemon too
    ends = JOBS[name][1].fails or JOBS[name][1].kind == "dead"
    shared = nullcontext({}) if ends else mps(folder)
    with shared as environment, (folder / "log.txt").open("w") as log:
        environment |= dumping(folder / "dumps") | job_variables()
        ranks = [
            subprocess.Popen(
                command,
                env=os.environ | environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,
                stderr=log,
            )
            for rank in range(WORLD)
        ]
        try:
            yield run
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.wait()


def job_variables() -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        SWITCH: "1",
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def verdict_of(run: Path, kind: str) -> Verdict:
    """The first verdict of this kind, or the last of another one."""
    lasts_s = HEALTHY_S if kind == "healthy" else FOUND_S
    until, verdict = time.monotonic() + lasts_s, None
    while time.monotonic() < until:
        time.sleep(2)
        try:
            verdict = diagnose_folder(run, stall_s=STALL_S)
        except TorchwhereError:
            continue  # it has not started
        if verdict.kind == kind and kind != "healthy":
            break
    assert verdict is not None
    return verdict


@pytest.mark.parametrize("options", [(), ("--no-env",)])
def test_variables(options: tuple[str, ...], tmp_path: Path) -> None:
    """`torchwhere run` sets the variables of NCCL and prints one line, unless `--no-env` is
    given."""
    (tmp_path / "train.py").write_text("import os; print(os.environ.get('TORCH_FR_BUFFER_SIZE'))")
    inherited = {name: value for name, value in os.environ.items() if "TORCH_" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "torchwhere", "run", "--no-monitor", *options, "train.py"],
        cwd=tmp_path,
        env=inherited,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout == ("None\n" if options else "2000\n")
    assert done.stderr.count("TORCH_FR_DUMP_TEMP_FILE=") == (0 if options else 1)


class Verdicts(NamedTuple):
    """What the doctor says about one job. A failed test prints all of it."""

    run: Path  # kept after a failure: the boxes show why
    live: Verdict
    after_kill: Verdict
    dumps: dict[str, Verdict]  # by the kind of dump


def selected(request: pytest.FixtureRequest) -> list[str]:
    """The jobs of those tests of this file that run: `-k` leaves out the others."""
    items = [item for item in request.session.items if item.path == request.path]
    params = (
        item.callspec.params
        for item in items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    )
    return list(dict.fromkeys(values["name"] for values in params if "name" in values))


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Verdicts]]]:
    """The verdicts on each job: live, after all processes were killed, and from dumps alone."""
    build()
    folder = tmp_path_factory.mktemp("jobs")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(_diagnose, name, folder / name) for name in selected(request)}
        pool.shutdown(cancel_futures=True)


def _diagnose(name: str, folder: Path) -> Verdicts:
    folder.mkdir()
    with running(name, folder) as run:
        live = verdict_of(run, JOBS[name][1].kind)
        kinds = dumped(folder)
    dumps = {}
    for kind in kinds:
        with suppress(TorchwhereError):  # the watchdog did not finish any dump
            dumps[kind.name] = consult_dumps(kind)
    return Verdicts(run, live, diagnose_folder(run, stall_s=STALL_S), dumps)


@pytest.mark.parametrize("name", JOBS)
def test_fault(name: str, verdicts: dict[str, Future[Verdicts]]) -> None:
    """The doctor names the fault and the rank, while the job runs and after it was killed."""
    expected = JOBS[name][1]
    run, live, after_kill, _ = verdicts[name].result()
    assert (live.kind, live.culprits) == (expected.kind, expected.culprits), (run, live)
    assert bool(live.facts.get("on_device")) == expected.on_device, (run, live)
    assert ("out_of_memory" in live.facts) == (name == "out_of_memory"), (run, live)
    kind = "dead" if expected.kind == "healthy" else expected.kind
    if expected.kind != "straggler":
        found = after_kill.kind, after_kill.culprits
        assert found == (kind, expected.culprits), (run, after_kill)


@pytest.mark.parametrize("name", JOBS)
def test_dumps(name: str, verdicts: dict[str, Future[Verdicts]]) -> None:
    """From dumps alone the doctor names the rank, or no rank. Processes that failed may have
    written none."""
    expected = JOBS[name][1]
    run, *_, dumps = verdicts[name].result()
    assert expected.fails or dumps.keys() >= DUMPS.keys(), run
    for kind, verdict in dumps.items():
        allowed = expected.allows(verdict.kind, verdict.culprits, verdict.certainty)
        assert allowed, (run, kind, verdict)


def test_places_without_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of the device is known in a job of one process that issues no collective."""
    import torchwhere

    build()
    monkeypatch.setenv(SWITCH, "1")
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    torchwhere.start(out=tmp_path)
    try:
        for _ in range(20):
            model(torch.ones(8, 64, device="cuda")).sum().backward()
            optimizer.step()
        torch.cuda.synchronize()
        time.sleep(0.2)
    finally:
        torchwhere.stop()
    box = read_box(tmp_path / "rank0.box")
    state = device_state(box)
    assert state is not None
    assert state.place is not None
    assert state.place.step is not None
    assert state.place.step >= 19
    begins = box.records["kind"] == int(Kind.STEP_BEGIN)
    assert np.count_nonzero(device_times(box)[0][begins]) >= 19
