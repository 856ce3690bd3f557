"""Gives equal values equal ids, so that they can be compared as integers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Interner(Generic[T]):
    """Numbers distinct values 0, 1, 2 ... in the order in which they first appear.

    `Interner(["unknown"])` reserves id 0 for the value `"unknown"`.
    """

    def __init__(self, reserved: Iterable[T] = ()) -> None:
        self._ids: dict[T, int] = {}
        self._values: list[T] = []
        for value in reserved:
            self.id_of(value)

    def id_of(self, value: T) -> int:
        """Returns the id of a value; a new value gets the next free id."""
        value_id = self._ids.get(value)
        if value_id is None:
            value_id = self._ids[value] = len(self._values)
            self._values.append(value)
        return value_id

    def __getitem__(self, value_id: int) -> T:
        return self._values[value_id]

    def __iter__(self) -> Iterator[T]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
