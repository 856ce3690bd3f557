"""Finds the function in which a CPU waits for its device, from the stack of the thread that trains.

A function of torch that is written in Python (`torch.cuda.synchronize`) has a frame. A method in C
(`tensor.item()`) has none: the innermost frame is the line that calls it. The source shows which
call that is, if only one call of the line can be running.
"""

from __future__ import annotations

import ast
import functools
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchwhere.diagnose.doctor.stacks import StackFrame, frames

_SYNCHRONIZE = re.compile(r"/torch/(?!distributed/)")
# methods of a tensor that wait until the device has computed it, or has taken a copy
_METHODS = frozenset({"item", "tolist", "cpu", "to", "cuda", "nonzero"})
# These return at once for a tensor of the CPU: a rank that is in one of them waits for its device.
_INSTANT = frozenset({"item", "cpu"})
_MOST_BYTES = 1 << 20
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def device_wait(stack: tuple[str, ...], meta: Mapping[str, Any], *, pending: int) -> str | None:
    """The function in which a rank waits for its device: `synchronize()`, `.item()`; None if its
    stack does not show that.

    Args:
        stack: The stack, innermost frame first.
        meta: The header of the box of the rank.
        pending: How many marks the device has not reached. Without any, a method may also work on
            a tensor of the CPU; or it waits for what was issued after the last mark.
    """
    first = next(iter(frames(stack)), None)
    if first is None:
        return None
    if first.function == "synchronize" and _SYNCHRONIZE.search(first.where):
        return "synchronize()"
    method = _running_method(first, meta)
    is_wait = method is not None and (pending or method in _INSTANT)
    return f".{method}()" if is_wait else None


def _running_method(frame: StackFrame, meta: Mapping[str, Any]) -> str | None:
    """The method of `_METHODS` that the line of a frame calls; None if that is not certain: another
    call may be running, or the source is gone, has changed since the start, or is another file."""
    name, _, line = frame.where.rpartition(":")
    started_ns, folder = meta.get("started_ns"), meta.get("folder")
    path = Path(str(folder or "."), name)
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    is_source = stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_BYTES
    if not is_source or not line.isdecimal() or not isinstance(started_ns, int):
        return None
    if status.st_mtime_ns > started_ns:
        return None
    return _method_at(path, status.st_mtime_ns, int(line), frame.function)


@functools.lru_cache(maxsize=64)  # many ranks are on the same line
def _method_at(path: Path, _mtime_ns: int, line: int, function: str) -> str | None:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if _function_at(tree, line) != function:
        return None
    calls = list(_calls_at(tree, line))
    waits = [
        (call, call.func.attr)
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS
    ]
    if len(waits) != 1:
        return None
    wait, method = waits[0]
    # A call around it runs after it: by then the device would have reached its marks.
    is_clear = all(wait in ast.walk(call) for call in calls)
    return method if is_clear else None


def _function_at(tree: ast.Module, line: int) -> str:
    """The name of the innermost function that contains a line."""
    inside = [node for node in ast.walk(tree) if isinstance(node, _DEFINITIONS)]
    around = [node for node in inside if node.lineno <= line <= (node.end_lineno or node.lineno)]
    return max(around, key=lambda node: node.lineno).name if around else "<module>"


def _calls_at(tree: ast.Module, line: int) -> Iterator[ast.Call]:
    """The calls of which a line has a part."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno):
            yield node
