"""Real ranks: processes over gloo, started once and used by many tests.

`Pool.run(function, *args)` calls a top-level function of a test file on every rank, with the
process group up, and gives the list of its results. Each call is checked for leaks on every rank;
one that brings in libraries which leave things of their own checks itself, around the watch
(`checks_itself=True`).
"""

from __future__ import annotations

import datetime
import gc
import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

TIMEOUT_S = int(os.environ.get("RANK_TIMEOUT_S", "120"))  # DeepSpeed compiles an op the first time


class RankError(AssertionError):
    """A rank raised; the text is its traceback."""


class Pool:
    def __init__(self, world: int) -> None:
        self.world = world
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "leaks"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world, port, theirs, list(sys.path))
            process = context.Process(
                target=_serve, args=arguments, daemon=True, name=f"rank{rank}of{self.world}"
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, function: Callable[..., Any], *args: Any, checks_itself: bool = False
    ) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, args, checks_itself))
        answers = [self._answer(rank) for rank in range(self.world)]
        failed = [
            f"rank {rank}:\n{answer[1]}" for rank, answer in enumerate(answers) if not answer[0]
        ]
        if failed:
            raise RankError("\n".join(failed))
        return [answer[1] for answer in answers]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        if not self._pipes:
            return False, "ended, because another rank did not answer"
        try:
            if self._pipes[rank].poll(TIMEOUT_S):
                answer: tuple[bool, Any] = self._pipes[rank].recv()
                return answer
            problem = f"no answer within {TIMEOUT_S} s"
        except EOFError:
            problem = "the process died"
        self.close()
        return False, problem

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []


def _serve(rank: int, world: int, port: int, pipe: Any, path: list[str]) -> None:
    sys.path[:] = path
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch
    import torch.distributed as dist

    import leaks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    while True:
        try:
            module, qualname, args, checks_itself = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            function = getattr(importlib.import_module(module), qualname)
            # what is there already: the two looks below collect the rest, and that would take half
            # a second
            gc.freeze()
            before = leaks.snapshot()
            result = function(*args)
            left = leaks.differences(before, leaks.snapshot())
            assert checks_itself or not left, f"left behind: {left}"
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
