"""`python -m bench.nccl_variables [--ranks 4]`: what the variables that `torchwhere run` sets cost.

Times an all_reduce with and without the timing of NCCL and with and without the flight recorder.
torch reads these variables once, so each measurement has processes of its own. They all start
together and measure in turns. Four ranks share one GPU as in `tests/nccl_jobs.py`.
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

SETTINGS = {
    "neither": {"TORCH_NCCL_ENABLE_TIMING": "0", "TORCH_FR_BUFFER_SIZE": "0"},
    "timing": {"TORCH_NCCL_ENABLE_TIMING": "1", "TORCH_FR_BUFFER_SIZE": "0"},
    "buffer": {"TORCH_NCCL_ENABLE_TIMING": "0", "TORCH_FR_BUFFER_SIZE": "2000"},
    "both": {"TORCH_NCCL_ENABLE_TIMING": "1", "TORCH_FR_BUFFER_SIZE": "2000"},
    "neither, again": {"TORCH_NCCL_ENABLE_TIMING": "0", "TORCH_FR_BUFFER_SIZE": "0"},
}
BLOCKS, CALLS = 16, 100
ELEMENTS = 1 << 12
_FIRST_PORT = 29700
_TIMEOUT_S = 90


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.nccl_variables")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turn:
        _measure(Path(arguments.turn))
        return
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
    for _ in range(arguments.rounds):
        for name, both in _round(arguments.ranks).items():
            times[name].append(both)
            print(name, both, file=sys.stderr, flush=True)
    print(f"{arguments.ranks} ranks: µs for an all_reduce to be issued, and to be done")
    for name, pairs in times.items():
        columns = [[pair[at] for pair in pairs] for at in range(2)]
        medians = (f"{statistics.median(column):8.1f}" for column in columns)
        rounds = [tuple(round(value, 1) for value in pair) for pair in pairs]
        print(f"{name:16}", *medians, "   rounds:", *rounds)


def _round(ranks: int) -> dict[str, tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        jobs = [_start(Path(folder), turn, ranks) for turn in range(len(SETTINGS))]
        until = time.monotonic() + _TIMEOUT_S
        while len(list(Path(folder).iterdir())) < ranks * len(jobs) and time.monotonic() < until:
            time.sleep(0.02)
        Path(folder, "0").touch()
        answers = [
            job.communicate(timeout=_TIMEOUT_S)[0] for processes in jobs for job in processes
        ]
    return {name: tuple(json.loads(answers[at * ranks])) for at, name in enumerate(SETTINGS)}


def _start(folder: Path, turn: int, ranks: int) -> list[subprocess.Popen[str]]:
    settings = list(SETTINGS.values())[turn]
    command = [sys.executable, "-m", "bench.nccl_variables", "--turn", str(folder / str(turn))]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_FIRST_PORT + turn)}
    network = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return [
        subprocess.Popen(
            command,
            env=os.environ
            | settings
            | address
            | network
            | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "NCCL_HOSTID": f"host-{rank}"},
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
    turn.with_suffix(f".ready-{dist.get_rank()}").touch()
    while not turn.exists():
        time.sleep(0.02)
    blocks = [_block(x) for _ in range(BLOCKS)]
    dist.barrier()
    torch.cuda.synchronize()
    turn.with_name(str(int(turn.name) + 1)).touch()
    issued, done = ([block[at] / CALLS * 1e6 for block in blocks[3:]] for at in range(2))
    print(json.dumps([statistics.median(issued), statistics.median(done)]), flush=True)
    os._exit(0)


def _block(x: object) -> tuple[float, float]:
    import torch
    import torch.distributed as dist

    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        dist.all_reduce(x)
    issued = time.perf_counter()
    torch.cuda.synchronize()
    return issued - begin, time.perf_counter() - begin


if __name__ == "__main__":
    main()
