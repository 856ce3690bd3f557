"""Runs a function in a forked child and returns its result: what the function leaves behind ends
with the child.

Two children begin with the same memory, so they differ only in what they run. This does not work
with CUDA, whose contexts do not survive a fork.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

_TIMEOUT_S = 120  # a child that takes longer hangs


def call(function: Callable[[], float]) -> float:
    """Return what `function` returns in a child. Raises RuntimeError with the function's exception,
    or with the exit code of the child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(function, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if not answer:
        raise RuntimeError(f"the process ended with status {os.waitstatus_to_exitcode(status)}")
    result = json.loads(answer)
    if isinstance(result, str):
        raise RuntimeError(result)
    return float(result)


def _answer(function: Callable[[], float], writing: int) -> None:
    signal.alarm(_TIMEOUT_S)
    try:
        answer: float | str = function()
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    os.write(writing, json.dumps(answer).encode())
    os._exit(0)
