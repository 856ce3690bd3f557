"""Reads untrusted pickles of plain data safely.

Takes bytes, gives dicts, lists, tuples, strings, numbers, booleans and None. A pickle is a program;
the interpreter here knows only the instructions that build plain data, and refuses every other one
with its byte position. It imports and calls nothing, whatever the file contains. It allocates
nothing because a file announces it: a string is cut out of the bytes that are there. `Caps` limits
work, memory and depth.

Limits: keys are strings, tuples hold no containers, and a container never changes after its first
reuse, so that nothing contains itself. Dumps of the flight recorder need no more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from torchwhere.flight_recorder.limits import CAPS, Caps, CutShortError, RefusedFileError

_BINGET, _LONG_BINPUT, _BININT1, _STOP = ord("h"), ord("r"), ord("K"), ord(".")
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
_LONG_BYTES = 16  # of an integer; a dump needs 8
_TEXTS = frozenset({str})
_ATOMS = frozenset({str, int, float, bool, type(None)})
_EXECUTES = {
    ord("c"): "imports something",
    0x93: "imports something",
    ord("R"): "calls something",
    ord("b"): "changes an object's state",
    ord("i"): "imports and calls something",
    ord("o"): "calls something",
    0x81: "makes an object",
    0x92: "makes an object",
    0x82: "uses a registered extension",
    0x83: "uses a registered extension",
    0x84: "uses a registered extension",
    ord("P"): "asks for an object from outside",
    ord("Q"): "asks for an object from outside",
}
_U16, _U32, _U64 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_I32, _F64 = struct.Struct("<i"), struct.Struct(">d")


def loads(data: bytes, *, caps: Caps = CAPS) -> Any:
    """The value of a pickle.

    Raises:
        RefusedFileError: The pickle is damaged, too large, or more than plain data.
        CutShortError: The file ends before its value does.
    """
    if len(data) > caps.bytes:
        raise RefusedFileError(f"{len(data)} bytes; at most {caps.bytes} are read")
    machine = _PickleMachine(data, caps)
    try:
        return machine.run()
    except _EndOfDataError:
        raise CutShortError(
            f"cut short: it ends at byte {len(data)}, in the middle of its data", machine.salvaged()
        ) from None


class _EndOfDataError(Exception):
    """The data ends in the middle of a value."""


class _PickleMachine:
    """Runs one pickle."""

    __slots__ = (
        "at",
        "caps",
        "containers",
        "data",
        "marks",
        "memo",
        "ready",
        "shared",
        "stack",
        "weights",
    )

    def __init__(self, data: bytes, caps: Caps) -> None:
        self.data, self.caps, self.at = data, caps, 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []  # the stacks below the open marks
        self.memo: dict[int, Any] = {}
        # memo entries that can be pushed as they are, with their weights
        self.ready: dict[int, tuple[Any, int]] = {}
        # Reused containers, by id: items when written out, and depth. They never change again.
        self.weights: dict[int, tuple[int, int]] = {}
        self.containers = 0
        self.shared = 0

    def run(self) -> Any:
        """The hot path. Handles the most frequent instructions of dumps here: memo reads and
        writes, small numbers. Everything else, and every special case, goes through the table."""
        data, memo, ready = self.data, self.memo, self.ready
        end, most = len(self.data), self.caps.memo
        if data[:1] != b"\x80":
            raise RefusedFileError("not a pickle: it does not begin with a protocol")
        at, stack = 0, self.stack
        for _ in range(self.caps.items):
            if at >= end:
                raise _EndOfDataError
            code = data[at]
            if code == _BINGET and at + 1 < end and (entry := ready.get(data[at + 1])) is not None:
                stack.append(entry[0])
                self.shared += entry[1]
                at += 2
            elif code == _LONG_BINPUT and at + 4 < end and stack and len(memo) < most:
                index = data[at + 1] | data[at + 2] << 8 | data[at + 3] << 16 | data[at + 4] << 24
                self.remember(index, stack[-1])
                at += 5
            elif code == _BININT1 and at + 1 < end:
                stack.append(data[at + 1])
                at += 2
            elif code in _CONSTANTS:
                stack.append(_CONSTANTS[code])
                at += 1
            elif code == _STOP:
                self.at = at + 1
                return self._result()
            else:
                self.at = at + 1
                _TABLE[code](self)
                at, stack = self.at, self.stack
        raise RefusedFileError(f"more than {self.caps.items} instructions")

    def refuse(self, why: str) -> RefusedFileError:
        return RefusedFileError(f"{why}, at byte {max(self.at - 1, 0)}")

    def _result(self) -> Any:
        self.add(0)  # checks what the hot path added
        if self.marks or len(self.stack) != 1:
            raise self.refuse("it ends with its data incomplete")
        if self.at != len(self.data):
            raise self.refuse(f"{len(self.data) - self.at} bytes after its end")
        value = self.stack[0]
        if type(value) in (dict, list):
            self.weigh(value)
        return value

    def salvaged(self) -> dict[str, Any]:
        """The complete part of an unfinished dict: its complete values, and the complete items of
        the list that it was building."""
        levels = [*self.marks, self.stack]
        if not levels[0] or type(levels[0][0]) is not dict:
            return {}
        complete, pending = dict(levels[0][0]), levels[1] if len(levels) > 1 else []
        pairs = list(zip(pending[::2], pending[1::2], strict=False))
        for index, (key, value) in enumerate(pairs):
            is_open = len(levels) > 2 and index == len(pairs) - 1 and len(pending) % 2 == 0
            if type(key) is not str:
                continue
            if not is_open:
                complete[key] = value
            elif type(value) is list:
                complete[key] = [*value, *(levels[2] if len(levels) == 3 else levels[2][:-1])]
        return complete

    # -- bytes -------------------------------------------------------------------------------------

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise _EndOfDataError
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    # -- values ------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if not self.stack:
            raise self.refuse("it takes a value that is not there")
        return self.stack.pop()

    def text(self, length: int) -> None:
        raw = self.take(length)
        try:
            self.stack.append(raw.decode())
        except UnicodeDecodeError:
            raise self.refuse("a text that is not UTF-8") from None

    def long(self) -> None:
        length = self.take(1)[0]
        if length > _LONG_BYTES:
            raise self.refuse(f"an integer of {length} bytes")
        self.stack.append(int.from_bytes(self.take(length), "little", signed=True))

    def protocol(self) -> None:
        version = self.take(1)[0]
        if self.at != 2 or not 2 <= version <= 5:
            raise self.refuse(f"pickle protocol {version}" if self.at == 2 else "a second protocol")

    # -- containers --------------------------------------------------------------------------------

    def container(self, made: Any) -> None:
        self.containers += 1
        if self.containers > self.caps.containers:
            raise self.refuse(f"more than {self.caps.containers} lists, dicts and tuples")
        self.stack.append(made)

    def mark(self) -> None:
        if len(self.marks) >= self.caps.depth:
            raise self.refuse(f"nested deeper than {self.caps.depth}")
        self.marks.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        if not self.marks:
            raise self.refuse("it closes a mark that it has not opened")
        items, self.stack = self.stack, self.marks.pop()
        return items

    def make_tuple(self, items: list[Any]) -> None:
        if not _ATOMS.issuperset(map(type, items)):
            raise self.refuse("a tuple that holds a container")
        self.container(tuple(items))

    def make_tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise self.refuse("it takes a value that is not there")
        items = self.stack[-count:]
        del self.stack[-count:]
        self.make_tuple(items)

    def target(self, kind: type, name: str) -> Any:
        target = self.stack[-1] if self.stack else None
        if type(target) is not kind:
            raise self.refuse(f"it fills a {name} that is not there")
        if id(target) in self.weights:
            raise self.refuse(
                f"it changes a {name} that it has used already, or that contains itself"
            )
        return target

    def extend(self, items: list[Any]) -> None:
        self.target(list, "list").extend(items)

    def update(self, items: list[Any]) -> None:
        target, keys = self.target(dict, "dict"), items[::2]
        if len(items) % 2:
            raise self.refuse("a key without a value")
        if not _TEXTS.issuperset(map(type, keys)):
            odd = next(key for key in keys if type(key) is not str)
            raise self.refuse(f"a key that is not a text but {type(odd).__name__}")
        target.update(zip(keys, items[1::2], strict=True))

    def append_one(self) -> None:
        self.extend([self.pop()])

    def set_one(self) -> None:
        value, key = self.pop(), self.pop()
        self.update([key, value])

    # -- memo --------------------------------------------------------------------------------------

    def put(self, index: int) -> None:
        if not self.stack:
            raise self.refuse("it stores a value that is not there")
        self.remember(index, self.stack[-1])
        if len(self.memo) > self.caps.memo:
            raise self.refuse(f"more than {self.caps.memo} values in its memo")

    def remember(self, index: int, value: Any) -> None:
        self.memo[index] = value
        if type(value) is str:
            self.ready[index] = value, 0
        elif index in self.ready:
            del self.ready[index]

    def get(self, index: int) -> None:
        if index not in self.ready:
            if index not in self.memo:
                raise self.refuse(f"it reads memo {index}, which it has not written")
            value = self.memo[index]
            is_container = type(value) is dict or type(value) is list
            self.ready[index] = value, self.weigh(value)[0] if is_container else 0
        value, weight = self.ready[index]
        self.stack.append(value)
        self.add(weight)

    def add(self, weight: int) -> None:
        self.shared += weight
        if self.shared > self.caps.items:
            raise self.refuse(f"more than {self.caps.items} items, with shared values written out")

    def weigh(self, container: Any) -> tuple[int, int]:
        """The number of items of a container when written out, and its depth. It may not change
        from here on."""
        weighed = self.weights.get(id(container))
        if weighed is not None:
            return weighed
        self.weights[id(container)] = 1, 1
        weight, depth, deepest, level = 1, 0, 1, [container]
        while level:
            depth += 1
            below = []
            for outer in level:
                weight += len(outer)
                for item in outer.values() if type(outer) is dict else outer:
                    if type(item) is dict or type(item) is list:
                        weighed = self.weights.get(id(item))
                        if weighed is None:
                            below.append(item)
                        else:
                            weight, deepest = weight + weighed[0], max(deepest, depth + weighed[1])
            level, deepest = below, max(deepest, depth)
            if deepest > self.caps.depth:
                raise self.refuse(f"nested deeper than {self.caps.depth}")
        self.weights[id(container)] = weight, deepest
        return weight, deepest


def _refuser(code: int) -> Callable[[_PickleMachine], None]:
    def refuse(machine: _PickleMachine) -> None:
        if code in _EXECUTES:
            raise machine.refuse(
                f"it {_EXECUTES[code]}: no dump does that, and torchwhere never executes it"
            )
        raise machine.refuse(f"instruction 0x{code:02x}, which no dump has")

    return refuse


_KNOWN: dict[int, Callable[[_PickleMachine], None]] = {
    0x80: _PickleMachine.protocol,
    0x95: lambda m: m.number(_U64) and None,  # a frame: its length is not needed
    ord("("): _PickleMachine.mark,
    ord("}"): lambda m: m.container({}),
    ord("]"): lambda m: m.container([]),
    ord(")"): lambda m: m.make_tuple([]),
    ord("t"): lambda m: m.make_tuple(m.since_mark()),
    0x85: lambda m: m.make_tuple_of(1),
    0x86: lambda m: m.make_tuple_of(2),
    0x87: lambda m: m.make_tuple_of(3),
    ord("e"): lambda m: m.extend(m.since_mark()),
    ord("a"): _PickleMachine.append_one,
    ord("u"): lambda m: m.update(m.since_mark()),
    ord("s"): _PickleMachine.set_one,
    ord("X"): lambda m: m.text(m.number(_U32)),
    0x8C: lambda m: m.text(m.take(1)[0]),
    0x8D: lambda m: m.text(m.number(_U64)),
    ord("K"): lambda m: m.push(m.take(1)[0]),
    ord("M"): lambda m: m.push(m.number(_U16)),
    ord("J"): lambda m: m.push(m.number(_I32)),
    0x8A: _PickleMachine.long,
    ord("G"): lambda m: m.push(m.number(_F64)),
    ord("q"): lambda m: m.put(m.take(1)[0]),
    ord("r"): lambda m: m.put(m.number(_U32)),
    0x94: lambda m: m.put(len(m.memo)),
    ord("h"): lambda m: m.get(m.take(1)[0]),
    ord("j"): lambda m: m.get(m.number(_U32)),
}
_TABLE = [_KNOWN.get(code) or _refuser(code) for code in range(256)]
