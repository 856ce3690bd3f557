"""Makes the frame of a wrapper look like a frame of the function that it wraps.

torch finds the user's line in a stack by file name: `DebugMode`, FX, `torch.export`, dynamo and
anomaly mode skip or mark the files of torch. `warnings` and `logging` report the frame that
`stacklevel` counts to, and filters match the module of its globals. A frame in a file of
torchwhere looks like the user's code to all of them. So the wrapper gets the file, the name, the
line and the globals of the function that it wraps, and stacks read as in an unwatched job.

The function that is shown differently must not use globals of its own module: it finds those of
the other one. Builtins and closure variables work.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

# Kinds of entries in `co_linetable` (Objects/locations.md of CPython, since Python 3.11).
_WITHOUT_COLUMNS, _WITH_COLUMNS = 13, 14
_MAX_UNITS = 8  # code units that one entry covers


def shown_as(original: Any, *, calling: str = "") -> Callable[[Function], Function]:
    """Returns a decorator that makes frames of a function look like frames of `original`.

    Args:
        original: The function that the decorated one wraps. If it is not written in Python, the
            decorator changes nothing.
        calling: A name that `original` calls. The frame is always shown at that call; at the
            first line of `original` if there is no such call.
    """
    original = getattr(original, "__func__", original)

    def decorate(function: Function) -> Function:
        if not isinstance(original, FunctionType):
            return function
        wrapper = cast(FunctionType, function)
        shown = FunctionType(
            _shown_code(wrapper.__code__, original.__code__, calling),
            original.__globals__,
            closure=wrapper.__closure__,
        )
        shown.__doc__ = original.__doc__
        return cast(Function, shown)

    return decorate


def _shown_code(code: CodeType, original: CodeType, calling: str) -> CodeType:
    return code.replace(
        co_filename=original.co_filename,
        co_name=original.co_name,
        co_qualname=original.co_qualname,
        co_firstlineno=original.co_firstlineno,
        co_linetable=_line_table(
            len(code.co_code) // 2, original.co_firstlineno, _position(original, calling)
        ),
    )


def _position(code: CodeType, calling: str) -> dis.Positions:
    """The position of the first call of a name; of the first line if there is none."""
    is_loaded = False
    for instruction in dis.get_instructions(code):
        is_loaded = is_loaded or instruction.argval == calling
        if is_loaded and instruction.opname.startswith("CALL") and instruction.positions:
            return instruction.positions
    return dis.Positions(code.co_firstlineno, code.co_firstlineno)


def _line_table(units: int, first_line: int, position: dis.Positions) -> bytes:
    """A `co_linetable` that gives every instruction the same position."""
    line = position.lineno or first_line
    kind, columns = _WITHOUT_COLUMNS, b""
    if position.col_offset is not None and position.end_col_offset is not None:
        kind = _WITH_COLUMNS
        columns = (
            _varint((position.end_lineno or line) - line)
            + _varint(position.col_offset + 1)
            + _varint(position.end_col_offset + 1)
        )
    table = bytearray()
    line_before = first_line
    for start in range(0, units, _MAX_UNITS):
        length = min(_MAX_UNITS, units - start)
        table.append(0x80 | kind << 3 | (length - 1))
        table += _signed_varint(line - line_before) + columns
        line_before = line
    return bytes(table)


def _varint(value: int) -> bytes:
    chunks = bytearray()
    while value >= 0x40:
        chunks.append(0x40 | value & 0x3F)
        value >>= 6
    chunks.append(value)
    return bytes(chunks)


def _signed_varint(value: int) -> bytes:
    return _varint(-value << 1 | 1 if value < 0 else value << 1)
