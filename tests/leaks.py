"""What a watch could leave behind, as one comparable snapshot: hooks, kernels, patches, threads,
handlers, descriptors."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections import Counter
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as optim_optimizer
from torch.utils.data import dataloader

_SET_BY_OTHERS = (
    "PYTEST_",
    "TORCHINDUCTOR_",
    "TORCH_",
    "TRITON_",
    "KINETO_",
    "ACCELERATE_",
    "DS_",
    "TOKENIZERS_",
    "_TORCH",
)

_THREADS_OF_OTHERS = ("tqdm_monitor", "ThreadPoolExecutor")  # inductor's


def snapshot() -> dict[str, Any]:
    gc.collect()
    return {
        "patches": (
            nn.Module.__call__,
            torch.autograd._engine_run_backward,
            torch.autograd.graph._engine_run_backward,
        ),
        "patches of torch.distributed": (
            dist.init_process_group,
            c10d.init_process_group,
            c10d._new_group_with_tag,
        ),
        "patches of data and checkpoints": (
            dataloader._BaseDataLoaderIter.__next__,
            dataloader.DataLoader.__iter__,
            torch.save,
            torch.serialization.save,
        ),
        "patches of CUDA graphs": [
            vars(torch.cuda.CUDAGraph)[name]
            for name in ("capture_begin", "capture_end", "replay", "reset")
        ],
        "global module hooks": [
            len(getattr(nn_module, name))
            for name in sorted(vars(nn_module))
            if name.startswith("_global_") and name.endswith("hooks")
        ],
        "optimizer hooks": (
            len(optim_optimizer._global_optimizer_pre_hooks),
            len(optim_optimizer._global_optimizer_post_hooks),
        ),
        "kernels": _kernels(),
        "modes": torch._C._len_torch_dispatch_stack(),
        "import hooks": [type(finder).__name__ for finder in sys.meta_path],
        "compile callbacks": _compile_callbacks(),
        "threads": _threads(),
        "signal handlers": [
            _handler(number)
            for number in (signal.SIGBUS, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV)
        ],
        "files": _boxes_open(),
        "hooks of Python": (
            sys.excepthook,
            sys.unraisablehook,
            threading.excepthook,
            sys.getprofile(),
            sys.gettrace(),
        ),
        "environment": {k: v for k, v in os.environ.items() if not k.startswith(_SET_BY_OTHERS)},
    }


def _kernels() -> list[str]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in _collectives() if has(name, "BackendSelect")]


@cache
def _collectives() -> list[str]:
    """Once: to go through all the schemas there are takes 10 ms, and every test is looked at
    twice."""
    schemas = torch._C._jit_get_all_schemas()
    return sorted(
        {
            schema.name
            for schema in schemas
            if schema.name.startswith(("c10d::", "_c10d_functional::", "_dtensor::"))
        }
    )


def _compile_callbacks() -> tuple[int, int]:
    callback = sys.modules.get("torch._dynamo.callback")
    if callback is None:
        return 0, 0
    handler = callback.callback_handler
    ours = [
        c
        for c in (*handler.start_callbacks, *handler.end_callbacks)
        if "torchwhere" in getattr(c, "__module__", "")
    ]
    return len(ours), 0


def _handler(number: int) -> str:
    """The handler as the kernel knows it: ours is installed below Python's own bookkeeping."""
    with open("/proc/self/status") as status:
        caught = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt"))
    return f"{number}: {signal.getsignal(number)!r}, caught {bool(caught >> (number - 1) & 1)}"


def _boxes_open() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if ".box" in target:
            found.append(target)
    with open("/proc/self/maps") as maps:
        found += [line.split()[-1] for line in maps if line.rstrip().endswith(".box")]
    return found


def _threads() -> list[str]:
    return sorted(
        thread.name
        for thread in threading.enumerate()
        if not thread.name.startswith(_THREADS_OF_OTHERS)
    )


def wait_for_threads(before: dict[str, Any], *, most_s: float = 5.0) -> None:
    """Wait for new threads that are about to end. A DataLoader does not wait for the threads that
    feed its workers."""
    deadline = time.monotonic() + most_s
    while Counter(_threads()) - Counter(before["threads"]) and time.monotonic() < deadline:
        time.sleep(0.01)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    left = []
    for key, was in before.items():
        now = after[key]
        if key == "threads":  # one that has ended since, for example of a browser, is not left
            was, now = [], list((Counter(now) - Counter(was)).elements())
        if was != now and isinstance(was, dict):
            was, now = (
                {k: v for k, v in one.items() if other.get(k) != v}
                for one, other in ((was, now), (now, was))
            )
        if was != now:
            left.append(f"{key}: {was!r} became {now!r}")
    return left
