"""What dynamo's code passes to the compiled graph: the inputs of a graph, in order, as expressions
of the function's variables.

Dynamo turns a function into code that gathers parameters and tensors
(`self._modules['up']._parameters['weight']`, `x`), calls the graph with them and puts the results
where they belong. The gathering is straight code: run here on names instead of values, up to the
call. Nothing is executed. Code of a kind that is not known gives None, never a guess.
"""

from __future__ import annotations

import dis
import sys
from dataclasses import dataclass
from types import CodeType
from typing import Any

GRAPH_NAME = "__compiled_fn_"
_HOLDERS = {"_modules": "", "_parameters": "parameter", "_buffers": "buffer"}
_LOADS = (
    "LOAD_FAST",
    "LOAD_FAST_CHECK",
    "LOAD_FAST_BORROW",
    "LOAD_FAST_AND_CLEAR",
    "LOAD_DEREF",
    "LOAD_NAME",
)
_NOTHING = (
    "RESUME",
    "NOP",
    "PRECALL",
    "CACHE",
    "COPY_FREE_VARS",
    "MAKE_CELL",
    "DELETE_FAST",
    "EXTENDED_ARG",
    "NOT_TAKEN",
)
# a callable comes before the NULL that stands for its missing `self`
_NULL_LAST = sys.version_info >= (3, 13)
_METHOD_BIT = sys.version_info >= (3, 12)  # LOAD_ATTR took over LOAD_METHOD


@dataclass(frozen=True, slots=True)
class Expression:
    """A variable and the way from it: attributes and keys."""

    base: str
    steps: tuple[tuple[str, Any], ...] = ()  # ("." or "[", attribute or key)

    def then(self, how: str, what: Any) -> Expression:
        return Expression(self.base, (*self.steps, (how, what)))

    def __str__(self) -> str:
        return self.base + "".join(
            f".{what}" if how == "." else f"[{what!r}]" for how, what in self.steps
        )

    @property
    def held(self) -> tuple[str, str] | None:
        """`parameter` or `buffer`, and its name within the module that the variable is; None for
        anything else."""
        kinds = [_HOLDERS[what] for how, what in self.steps if how == "." and what in _HOLDERS]
        if len(kinds) * 2 != len(self.steps) or not kinds or not kinds[-1]:
            return None
        return kinds[-1], ".".join(str(what) for how, what in self.steps if how == "[")


class _Null:
    """What Python pushes where there is no `self`."""


class _UnknownCodeError(Exception):
    """An instruction that is not understood here."""


def graph_name(code: CodeType) -> str | None:
    """The global name of the graph that a function of dynamo's calls; None if it calls none."""
    return next((name for name in code.co_names if name.startswith(GRAPH_NAME)), None)


def graph_inputs(code: CodeType) -> list[Expression] | None:
    """What `code` passes to its graph; None where that cannot be told."""
    machine = _BytecodeMachine()
    try:
        for instruction in dis.get_instructions(code):
            found = machine.run(instruction)
            if found is not None:
                return found
    except (_UnknownCodeError, IndexError):
        return None
    return None


class _BytecodeMachine:
    """A stack of expressions instead of values."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.variables: dict[str, Any] = {}

    def run(self, instruction: dis.Instruction) -> list[Expression] | None:
        """One instruction; gives the arguments once it is the call of the graph."""
        name, stack = instruction.opname, self.stack
        if name in ("CALL", "CALL_FUNCTION"):
            return self._call(int(instruction.arg or 0))
        if name in _LOADS:
            stack.append(self._variable(str(instruction.argval)))
        elif name == "LOAD_GLOBAL":
            loaded: list[Any] = [_Null] * ((instruction.arg or 0) & 1) + [
                Expression(str(instruction.argval))
            ]
            stack += loaded[::-1] if _NULL_LAST else loaded
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT"):
            stack.append(instruction.argval)
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            stack.append(_followed(stack.pop(), ".", instruction.argval))
            is_method = name == "LOAD_METHOD" or (_METHOD_BIT and (instruction.arg or 0) & 1)
            stack += [_Null] if is_method else []
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]"):
            key = stack.pop()
            stack.append(_followed(stack.pop(), "[", key))
        elif name not in _NOTHING:
            self._move(name, instruction)
        return None

    def _move(self, name: str, instruction: dis.Instruction) -> None:
        """Instructions that only move things about."""
        stack, at = self.stack, int(instruction.arg or 0)
        if name == "STORE_FAST":
            self.variables[str(instruction.argval)] = stack.pop()
        elif name == "COPY":
            stack.append(stack[-at])
        elif name == "SWAP":
            stack[-1], stack[-at] = stack[-at], stack[-1]
        elif name == "PUSH_NULL":
            stack.append(_Null)
        elif name == "POP_TOP":
            stack.pop()
        elif name == "STORE_FAST_LOAD_FAST":
            self.variables[instruction.argval[0]] = stack.pop()
            stack.append(self._variable(instruction.argval[1]))
        elif name in ("LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"):
            stack.extend(map(self._variable, instruction.argval))
        elif name == "STORE_FAST_STORE_FAST":
            for variable in instruction.argval:
                self.variables[variable] = stack.pop()
        else:
            raise _UnknownCodeError(name)

    def _variable(self, name: str) -> Any:
        return self.variables.get(name, Expression(name))

    def _call(self, count: int) -> list[Expression] | None:
        arguments = [self.stack.pop() for _ in range(count)][::-1]
        called = [entry for entry in (self.stack.pop(), self.stack.pop()) if entry is not _Null]
        function = called[-1] if called else None
        if isinstance(function, Expression) and function.base.startswith(GRAPH_NAME):
            return [
                one if isinstance(one, Expression) else Expression(repr(one)) for one in arguments
            ]
        size = _size(function, arguments)
        self.stack.append(size or Expression(f"{function}({', '.join(map(str, arguments))})"))
        return None


def _size(function: Any, arguments: list[Any]) -> Expression | None:
    """A dynamic size is passed as a number: dynamo's own way to say `x.size(0)`."""
    if (
        isinstance(function, Expression)
        and function.steps[-1:] == ((".", "call_size"),)
        and len(arguments) == 2
    ):
        return Expression(f"{arguments[0]}.size({arguments[1]})")
    return None


def _followed(value: Any, how: str, what: Any) -> Expression:
    if not isinstance(value, Expression):
        raise _UnknownCodeError(f"{how} of {type(value).__name__}")
    return value.then(how, what)
