"""`python -m bench.nccl_variables [--ranks 4]`: what the variables that `torchwhere run` sets cost.

Times an all_reduce with and without the timing of NCCL, and with and without the flight recorder.
torch reads the size of the recorder once, so each size has its own processes, which start together
and take turns to measure. It reads the timing for each group: every process has a group of each
kind and alternates between them. Four ranks share one GPU as in `tests/nccl_jobs.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.ranks import rank_variables

TIMING, BUFFER = "TORCH_NCCL_ENABLE_TIMING", "TORCH_FR_BUFFER_SIZE"
SIZES = ("0", "2000")
BLOCKS, CALLS = 20, 100
WARM_UP = 4  # blocks
ELEMENTS = 1 << 12
FIRST_CORE = 2
_FIRST_PORT = 29700
_TIMEOUT_S = 90


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.nccl_variables")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turn:
        _measure(Path(arguments.turn))
        return
    sizes = SIZES * arguments.rounds
    answers = _answers(sizes, arguments.ranks)
    print(f"{arguments.ranks} ranks: us for an all_reduce to be issued, and to be done")
    for size in SIZES:
        of_size = [answer for other, answer in zip(sizes, answers, strict=True) if other == size]
        for timing in ("0", "1"):
            issued, done = zip(*(answer[timing] for answer in of_size), strict=True)
            medians = f"{statistics.median(issued):7.1f} {statistics.median(done):7.1f}"
            spread = f"issued {min(issued):.1f} to {max(issued):.1f}"
            print(f"{BUFFER}={size:5} {TIMING}={timing} {medians}  {spread}")


def _answers(sizes: tuple[str, ...], ranks: int) -> list[dict[str, tuple[float, float]]]:
    """What rank 0 of each job measured, in the order of `sizes`."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [_start(Path(folder, str(turn)), size, ranks) for turn, size in enumerate(sizes)]
        until = time.monotonic() + _TIMEOUT_S
        while len(list(Path(folder).iterdir())) < ranks * len(jobs) and time.monotonic() < until:
            time.sleep(0.02)
        Path(folder, "0").touch()
        texts = [[rank.communicate(timeout=_TIMEOUT_S)[0] for rank in job] for job in jobs]
    return [json.loads(of_ranks[0]) for of_ranks in texts]


def _start(turn: Path, size: str, ranks: int) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "bench.nccl_variables", "--turn", str(turn)]
    environment = os.environ | {BUFFER: size, TIMING: "0"}
    port = _FIRST_PORT + int(turn.name)
    return [
        subprocess.Popen(
            command,
            env=environment | rank_variables(rank, ranks, port),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def _measure(turn: Path) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    x = torch.zeros(ELEMENTS, device=device)
    groups: dict[str, Any] = {"0": dist.group.WORLD}
    os.environ[TIMING] = "1"
    groups["1"] = dist.new_group(list(range(dist.get_world_size())))
    for group in groups.values():
        dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    turn.with_suffix(f".ready-{dist.get_rank()}").touch()
    while not turn.exists():
        time.sleep(0.02)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(FIRST_CORE + dist.get_rank()) % len(cores)]})
    blocks: dict[str, list[tuple[float, float]]] = {timing: [] for timing in groups}
    for _ in range(BLOCKS):
        for timing, group in groups.items():
            blocks[timing].append(_block(x, group))
    turn.with_name(str(int(turn.name) + 1)).touch()
    medians = {
        timing: [statistics.median(column) for column in zip(*times[WARM_UP:], strict=True)]
        for timing, times in blocks.items()
    }
    print(json.dumps(medians), flush=True)
    os._exit(0)  # the groups need no clean-up


def _block(x: Any, group: Any) -> tuple[float, float]:
    """Microseconds for a call to be issued, and to be done."""
    import torch
    import torch.distributed as dist

    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        dist.all_reduce(x, group=group)
    issued = time.perf_counter()
    torch.cuda.synchronize()
    done = time.perf_counter()
    return (issued - begin) / CALLS * 1e6, (done - begin) / CALLS * 1e6


if __name__ == "__main__":
    main()
