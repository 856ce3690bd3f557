"""`python -m bench.ranks --ranks 4 --model fsdp2 --batch 16`: what a watch adds to a step of GPT-2
with several ranks on one GPU.

Blocks of steps alternate in all ranks at the same time: unwatched, watched, watched without device
progress, and unwatched again. `--without` leaves out a part of the device progress, to find what
costs time: the ranks then run a changed copy of the package with its own native extension.
`--device cpu` uses gloo and a tiny model: it shows that the script works, and no cost that matters.

The ranks share the GPU as in `tests/nccl_jobs.py`, through a daemon of MPS if the machine has one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "src" / "torchwhere"
_TIMEOUT = timedelta(minutes=5)  # of a collective


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the device progress, and the change of a source file that leaves it out."""

    meaning: str
    file: str
    pattern: str
    replacement: str


PARTS = {
    "places": Part(
        "no marks at places",
        "native/place_marks.h",
        r"inline void mark_place\([^)]*\) \{",
        r"\g<0> return;",
    ),
    "collectives": Part(
        "no marks at collectives and replays",
        "native/device_progress.h",
        r"void mark\([^)]*\) noexcept \{",
        r"\g<0> return;",
    ),
    "streams": Part(
        "no marks at waits for the streams of FSDP",
        "native/stream_waits.h",
        r"inline bool marks_streams\([^)]*\) \{",
        r"\g<0> return false;",
    ),
    "polling": Part(
        "marks are read once a second",
        "native/device_events.h",
        r"(HARVEST_EVERY = std::chrono::milliseconds)\(\d+\)",
        r"\1(1000)",
    ),
}


def main() -> int:
    arguments = _parse()
    if arguments.rank:
        _measure(arguments)
        return 0
    if arguments.device == "cuda" and not _has_cuda():
        print("bench.ranks: torch sees no CUDA device here; try --device cpu", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = _with_package(arguments.without, folder)
        is_shared = arguments.device == "cuda" and arguments.ranks > 1
        daemon: AbstractContextManager[dict[str, str]] = (
            mps(folder) if is_shared else nullcontext({})
        )
        with daemon as variables:
            answers = _answers(arguments.ranks, environment | variables)
    if answers is None:
        print("bench.ranks: a rank failed", file=sys.stderr)
        return 1
    print(json.dumps(answers) if arguments.json else _text(arguments, answers))
    return 0


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _parse() -> argparse.Namespace:
    parts = ", ".join(f"{name} ({part.meaning})" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(prog="python -m bench.ranks")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=20, help="blocks of each kind")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a block")
    parser.add_argument("--without", nargs="+", choices=PARTS, default=[], help=parts)
    parser.add_argument("--json", action="store_true", help="print the seconds of every round")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- all ranks -------------------------------------------------------------------------------------


def copy_without(parts: Sequence[str], to: Path) -> None:
    """Copy the package, without some parts."""
    shutil.copytree(PACKAGE, to, ignore=shutil.ignore_patterns("__pycache__"))
    for name in parts:
        part = PARTS[name]
        file = to / part.file
        text, changes = re.subn(part.pattern, part.replacement, file.read_text())
        if changes != 1:
            raise RuntimeError(f"--without {name}: {part.file} does not have {part.pattern!r} once")
        file.write_text(text)


def _with_package(without: Sequence[str], folder: Path) -> dict[str, str]:
    """Build the native extension of the package that the ranks use. Returns their variables."""
    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    variables = {}
    if without:
        copy_without(without, folder / "changed" / PACKAGE.name)
        paths.insert(0, str(folder / "changed"))
        variables["XDG_CACHE_HOME"] = str(folder / "cache")
    environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "torchwhere", "native"]
    subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
    return environment


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What a rank needs to share one GPU with other ranks: NCCL refuses two of one host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_HOSTID": f"host-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def _answers(ranks: int, environment: dict[str, str]) -> dict[str, Any] | None:
    """What rank 0 measured; None if a rank failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.ranks", "--rank", *sys.argv[1:]],
            env=environment | rank_variables(rank, ranks, port),
            stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                return None
            time.sleep(0.2)
        out = processes[0].communicate()[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        return None
    answers: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answers


def _quit_daemon(variables: dict[str, str]) -> None:
    command = ["nvidia-cuda-mps-control"]
    subprocess.run(command, input="quit\n", text=True, env=os.environ | variables)


@contextmanager
def mps(
    folder: Path, end: Callable[[dict[str, str]], None] = _quit_daemon
) -> Iterator[dict[str, str]]:
    """A daemon that lets the ranks share the GPU, if the machine has one. Gives the variables of
    its clients; `end` gets them too, and ends the daemon."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        print("without MPS the ranks take turns on the GPU", file=sys.stderr)
        yield {}
        return
    variables = {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }
    for path in variables.values():
        Path(path).mkdir()
    subprocess.run([control, "-d"], env=os.environ | variables, check=True)
    try:
        yield variables
    finally:
        end(variables)


def _text(arguments: argparse.Namespace, answers: dict[str, Any]) -> str:
    from bench.contenders import AGAIN, NO_DEVICE, TORCHWHERE, UNWATCHED

    seconds = answers["seconds"]
    unwatched = seconds[UNWATCHED]
    marks = "Python only" if answers["marks"] is None else f"{answers['marks']:.0f} marks in a step"
    without = f", without {', '.join(arguments.without)}" if arguments.without else ""
    return "\n".join(
        [
            (
                f"{arguments.ranks} ranks, {arguments.model}, batch {arguments.batch}, "
                f"sequence {arguments.sequence}, {arguments.device}{without}: "
                f"{statistics.median(unwatched) * 1e3:.1f} ms per step unwatched, "
                f"{marks}, {len(unwatched)} rounds"
            ),
            f"  added by torchwhere: {_added(unwatched, seconds[TORCHWHERE])}",
            f"  without device progress: {_added(unwatched, seconds[NO_DEVICE])}",
            f"  nothing (unwatched, a second time): {_added(unwatched, seconds[AGAIN])}",
        ]
    )


def _added(unwatched: Sequence[float], seconds: Sequence[float]) -> str:
    """The share that is added to a step: the median of the rounds, and their quartiles."""
    added = [(b / a - 1) * 100 for a, b in zip(unwatched, seconds, strict=True)]
    # of one round: the round itself
    quartiles = statistics.quantiles(added * 2 if len(added) == 1 else added, method="inclusive")
    low, median, high = quartiles
    return f"{median:.1f} % (quartiles {low:.1f} and {high:.1f})"


# -- one rank --------------------------------------------------------------------------------------


def _measure(arguments: argparse.Namespace) -> None:
    """Run all rounds on this rank, and print the seconds of each block."""
    import torch
    import torch.distributed as dist

    from bench import data_parallel, rounds
    from bench.contenders import AGAIN, CONTENDERS, NO_DEVICE, TORCHWHERE, UNWATCHED
    from bench.workloads import Job, Workload
    from torchwhere.native.load import SWITCH, native

    os.environ[SWITCH] = "1"
    torch.set_num_threads(1)
    device = arguments.device
    if device == "cuda":
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0), timeout=_TIMEOUT)
    else:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    size = data_parallel.GPT2_124M if device == "cuda" else data_parallel.TINY
    size = replace(size, batch=arguments.batch, sequence=arguments.sequence)

    def make() -> AbstractContextManager[Job]:
        job = data_parallel.training(getattr(data_parallel, arguments.model), size, device)
        return nullcontext(replace(job, finish=lambda: _meet(job.finish)))

    workload = Workload(
        "ranks",
        "ranks",
        make,
        steps=arguments.steps,
        clock=time.perf_counter,
        forks=False,
        budget_s=math.inf,  # all ranks run the same number of rounds
    )
    names = (UNWATCHED, TORCHWHERE, NO_DEVICE, AGAIN)
    contenders = [contender for contender in CONTENDERS if contender.name in names]
    times = rounds.run(workload, contenders, most_rounds=arguments.rounds)
    for of_contender in times:
        if of_contender.error:
            sys.exit(f"{of_contender.contender}: {of_contender.error}")
    extension = native()
    marked = None if extension is None else int(extension.device_status()["marked"])
    answers = {
        "seconds": {of_contender.contender: of_contender.seconds for of_contender in times},
        "marks": None if marked is None else marked / (workload.steps + workload.warm_steps),
    }
    print(json.dumps(answers), flush=True)
    dist.barrier()
    os._exit(0)  # gloo sometimes aborts the process when its group is destroyed


def _meet(finish: Callable[[], None]) -> None:
    """Wait until all ranks have finished: their blocks begin together. Without that, the quartiles
    are three times as far apart."""
    import torch.distributed as dist

    finish()
    dist.barrier()
    finish()


if __name__ == "__main__":
    sys.exit(main())
