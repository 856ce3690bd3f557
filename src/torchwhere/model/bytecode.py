"""Reads from dynamo's bytecode what it passes to a compiled graph: the inputs of the graph, in
order, as expressions of the function's variables.

Dynamo turns a function into code that loads parameters and tensors
(`self._modules['up']._parameters['weight']`, `x`), calls the graph with them and stores the
results. The code before the call has no branches. It is interpreted here on names instead of
values, up to the call; nothing is executed. For an instruction that this module does not know, the
result is None, never a guess.
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
_NO_EFFECT = (
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
# since 3.13 a callable is pushed before the NULL that takes the place of its `self`
_NULL_LAST = sys.version_info >= (3, 13)
_METHOD_BIT = sys.version_info >= (3, 12)  # LOAD_ATTR took over LOAD_METHOD


@dataclass(frozen=True, slots=True)
class Expression:
    """A variable, and the attributes and keys that lead from it to a value."""

    base: str
    steps: tuple[tuple[str, Any], ...] = ()  # ("." or "[", attribute or key)

    def then(self, access: str, key: Any) -> Expression:
        return Expression(self.base, (*self.steps, (access, key)))

    def __str__(self) -> str:
        return self.base + "".join(
            f".{key}" if access == "." else f"[{key!r}]" for access, key in self.steps
        )

    @property
    def module_tensor(self) -> tuple[str, str] | None:
        """If the variable is a module and the value one of its parameters or buffers: `parameter`
        or `buffer`, and the name in that module. None for any other value."""
        kinds = [_HOLDERS[key] for access, key in self.steps if access == "." and key in _HOLDERS]
        if len(kinds) * 2 != len(self.steps) or not kinds or not kinds[-1]:
            return None
        return kinds[-1], ".".join(str(key) for access, key in self.steps if access == "[")


class _Null:
    """The value that Python pushes in place of a missing `self`."""


class _UnknownCodeError(Exception):
    """This module does not know an instruction."""


def graph_name(code: CodeType) -> str | None:
    """The global name of the graph that a function made by dynamo calls; None if it calls none."""
    return next((name for name in code.co_names if name.startswith(GRAPH_NAME)), None)


def graph_inputs(code: CodeType) -> list[Expression] | None:
    """The arguments that `code` passes to its graph; None if they cannot be found."""
    machine = _BytecodeMachine()
    try:
        for instruction in dis.get_instructions(code):
            inputs = machine.run(instruction)
            if inputs is not None:
                return inputs
    except (_UnknownCodeError, IndexError):
        return None
    return None


class _BytecodeMachine:
    """Interprets instructions on a stack of expressions instead of values."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.variables: dict[str, Any] = {}

    def run(self, instruction: dis.Instruction) -> list[Expression] | None:
        """Interpret one instruction. Returns the arguments if it is the call of the graph."""
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
        elif name not in _NO_EFFECT:
            self._move(name, instruction)
        return None

    def _move(self, name: str, instruction: dis.Instruction) -> None:
        """Interpret an instruction that only moves values."""
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
                argument if isinstance(argument, Expression) else Expression(repr(argument))
                for argument in arguments
            ]
        size = _size(function, arguments)
        self.stack.append(size or Expression(f"{function}({', '.join(map(str, arguments))})"))
        return None


def _size(function: Any, arguments: list[Any]) -> Expression | None:
    """The expression of a dynamic size, which dynamo passes as a number: for `call_size(x, 0)` it
    is `x.size(0)`."""
    if (
        isinstance(function, Expression)
        and function.steps[-1:] == ((".", "call_size"),)
        and len(arguments) == 2
    ):
        return Expression(f"{arguments[0]}.size({arguments[1]})")
    return None


def _followed(value: Any, access: str, key: Any) -> Expression:
    if not isinstance(value, Expression):
        raise _UnknownCodeError(f"{access} of {type(value).__name__}")
    return value.then(access, key)
