"""A gloo job that torchwhere does not watch. Its ranks read the names of scenes from stdin.

In each scene the last rank does something else than the others, until the file `release` exists.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

RELEASE = Path("release")


class SlowFiles(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        while not RELEASE.exists():
            time.sleep(0.01)
        return index


def loader() -> None:
    list(DataLoader(SlowFiles(), num_workers=1, multiprocessing_context="fork"))


def lock() -> None:
    guard = threading.Lock()
    holder = threading.Thread(target=hold, args=(guard,))
    holder.start()
    time.sleep(0.1)
    with guard:
        holder.join()


def hold(guard: threading.Lock) -> None:
    with guard:
        while not RELEASE.exists():
            time.sleep(0.01)


def loop() -> None:
    while not RELEASE.exists():
        sum(range(1000))


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def steps(pause_s: float) -> None:
    """A job that progresses: steps with a collective, until all ranks see the file."""
    while True:
        sum(range(10_000))
        time.sleep(pause_s)
        done = torch.tensor(float(RELEASE.exists()))
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        if done:
            return


def arrive() -> None:
    Path(f"arrived{dist.get_rank()}").touch()


def main() -> None:
    dist.init_process_group("gloo")
    is_last = dist.get_rank() == dist.get_world_size() - 1
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    dist.barrier()
    print("ready", flush=True)
    for line in sys.stdin:
        scene, _, call = line.strip().partition(" ")
        if scene in ("steps", "late"):
            arrive()
            steps(0.4 if scene == "late" and is_last else 0.0)
        elif is_last:
            arrive()
            {"loader": loader, "lock": lock, "loop": loop, "stop": stop}[scene]()
        else:
            arrive()
        if call == "all_reduce":
            dist.all_reduce(torch.ones(1))
        elif call == "wait":
            work = dist.all_reduce(torch.ones(1), async_op=True)
            work.wait()
        elif call == "backward":
            model(torch.ones(1, 4)).sum().backward()
        dist.barrier()
        print("ready", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
