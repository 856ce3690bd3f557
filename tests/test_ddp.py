"""Several DDP instances in one process, in threads of their own."""

from __future__ import annotations

from warm_python import WarmPython

TWO_THREADS = """
import threading
import torch, torch.distributed as dist, torchwhere
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
is_reducing, is_over = threading.Event(), threading.Event()
outcomes = []

def wait_for_the_other(state, bucket):
    is_reducing.set()
    outcomes.append(is_over.wait(120))
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future

def first():
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(None, wait_for_the_other)
    model(torch.ones(1, 2)).sum().backward()

def second():
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    is_reducing.wait()
    model(torch.ones(1, 2)).sum().backward()
    is_over.set()

with torchwhere.watch():
    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(outcomes)
dist.destroy_process_group()
"""


def test_a_backward_waits_for_no_other_thread(warm: WarmPython) -> None:
    """A backward begins although another thread holds the lock of its own DDP instance, and waits
    there for this thread."""
    done = warm.run("-c", TWO_THREADS)
    assert done.stdout == "[True]\n", done.stderr
