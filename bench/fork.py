"""Runs a function in a forked child and gives what it returned: whatever it leaves behind ends with
the child.

The child has the very memory of its parent, so that two children differ by nothing but what they
ran. Not for CUDA, whose contexts do not survive a fork.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

_PATIENCE_S = 120  # a child that takes longer is stuck


def call(function: Callable[[], float]) -> float:
    """What `function` returns in a child. Raises RuntimeError with what it raised there, or with
    how it died."""
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
    found = json.loads(answer)
    if isinstance(found, str):
        raise RuntimeError(found)
    return float(found)


def _answer(function: Callable[[], float], writing: int) -> None:
    signal.alarm(_PATIENCE_S)
    try:
        answer: float | str = function()
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    os.write(writing, json.dumps(answer).encode())
    os._exit(0)
