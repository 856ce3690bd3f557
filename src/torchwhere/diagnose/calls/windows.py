"""The part of a stream that all its ranks still have, as matrices: one row for each class of ranks,
one column for each call."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.core.grouping import grouped
from torchwhere.diagnose.calls import stream_calls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.stream_calls import StreamCalls


@dataclass(frozen=True)
class CallWindow:
    """The numbers of a stream that all its ranks still have.

    Ranks that issued the same calls in the same steps form a class. Rows of matrices are classes,
    columns are numbers.
    """

    key: StreamKey
    ranks: tuple[int, ...]
    calls: tuple[StreamCalls, ...]  # of each rank
    first: int
    end: int
    classes: npt.NDArray[np.int64]  # of each rank
    heads: tuple[int, ...]  # index of the first rank of each class

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """How many ranks each class has."""
        return np.bincount(self.classes)

    @cached_property
    def _packed_ids(self) -> npt.NDArray[np.uint64]:
        return np.stack([self.calls[head].packed_ids(self.first, self.end) for head in self.heads])

    @cached_property
    def signature_ids(self) -> npt.NDArray[np.int64]:
        return stream_calls.signature_ids(self._packed_ids)

    @cached_property
    def site_ids(self) -> npt.NDArray[np.int64]:
        return stream_calls.site_ids(self._packed_ids)

    @cached_property
    def steps(self) -> npt.NDArray[np.int64]:
        return np.stack([self.calls[head].steps(self.first, self.end) for head in self.heads])

    @cached_property
    def _in_step(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        flags = [self.calls[head].in_step(self.first, self.end) for head in self.heads]
        is_counted, is_shadow = (np.stack(rows) for rows in zip(*flags, strict=True))
        shadows: npt.NDArray[np.bool_] = np.logical_or.reduce(is_shadow)
        return np.logical_and.reduce(is_counted) & ~shadows, shadows

    @property
    def has_steps(self) -> npt.NDArray[np.bool_]:
        """For each number, whether the recorded step is the call's own on all ranks."""
        return self._in_step[0]

    @property
    def is_shadow(self) -> npt.NDArray[np.bool_]:
        """For each number, whether it is a shadow call on some rank (`CallSite.is_shadow`)."""
        return self._in_step[1]

    @cached_property
    def differs(self) -> npt.NDArray[np.int64]:
        """The columns in which ranks have different call sites. Site 0 differs from no other."""
        low = np.where(self.site_ids > 0, self.site_ids, np.iinfo(np.int64).max).min(axis=0)
        return np.flatnonzero(low < self.site_ids.max(axis=0))

    @cached_property
    def usuals(self) -> npt.NDArray[np.int64]:
        """The call site that most ranks have, for each column."""
        usuals: npt.NDArray[np.int64] = self.site_ids.max(axis=0)
        for column in self.differs.tolist():
            usuals[column] = self.usual(self.site_ids[:, column])
        return usuals

    def odd_at(self, column: int) -> npt.NDArray[np.bool_]:
        """Returns the classes whose call site is not the one that most ranks have."""
        here = self.site_ids[:, column]
        is_odd: npt.NDArray[np.bool_] = (here != self.usuals[column]) & (here > 0)
        return is_odd

    def agrees_at(self, column: int) -> bool:
        here = self.site_ids[:, column]
        return bool(((here == here.max()) | (here == 0)).all())

    def members_of(self, rows: npt.NDArray[np.bool_]) -> tuple[int, ...]:
        """Returns the ranks of some classes."""
        return tuple(
            rank for rank, row in zip(self.ranks, self.classes.tolist(), strict=True) if rows[row]
        )

    def cohorts(self, values: npt.NDArray[Any]) -> tuple[tuple[int, ...], ...]:
        """Groups ranks by the value of their class, the largest group first."""
        by_value = grouped(zip(values[self.classes].tolist(), self.ranks, strict=True))
        largest_first = sorted(by_value.values(), key=lambda cohort: (-len(cohort), cohort[0]))
        return tuple(map(tuple, largest_first))

    def usual(self, values: npt.NDArray[Any]) -> int:
        """Returns the value (not 0) that most ranks have; of several, that of the first rank."""
        counts: dict[int, int] = {}
        for value, size in zip(values.tolist(), self.sizes.tolist(), strict=True):
            if value:
                counts[value] = counts.get(value, 0) + size
        return max(counts, key=lambda value: counts[value])

    def without(self, ranks: Collection[int]) -> CallWindow | None:
        """Returns the window of the other ranks, which may be longer; None if there is none."""
        rest = [
            (rank, calls)
            for rank, calls in zip(self.ranks, self.calls, strict=True)
            if rank not in ranks
        ]
        return call_window(self.key, rest, members=self.ranks)


def call_window(
    key: StreamKey, rank_calls: Sequence[tuple[int, StreamCalls]], *, members: Sequence[int]
) -> CallWindow | None:
    """Compares the calls of the members of a stream.

    Returns None if fewer than two ranks have data, if they have no number in common, or if they are
    messages that all have one signature.
    """
    is_member = frozenset(members)
    rank_calls = [(rank, calls) for rank, calls in rank_calls if rank in is_member]
    if len(rank_calls) < 2:
        return None
    ranks, calls = zip(*rank_calls, strict=True)
    is_message = key.source != key.destination
    if is_message and calls[0].signature_id == calls[1].signature_id >= 0:
        return None
    first = max(own.first for own in calls)
    end = min(own.last for own in calls) + 1
    if first >= end:
        return None
    class_of: dict[bytes, int] = {}
    heads: list[int] = []
    classes = np.empty(len(calls), np.int64)
    for index, own in enumerate(calls):
        content = _content(own, first, end, is_message=is_message)
        number = classes[index] = class_of.setdefault(content, len(class_of))
        if number == len(heads):
            heads.append(index)
    return CallWindow(key, ranks, calls, first, end, classes, tuple(heads))


def _content(calls: StreamCalls, first: int, end: int, *, is_message: bool) -> bytes:
    """Returns what is compared. Of a message only the signature: its ends have different sites."""
    packed_ids = calls.packed_ids(first, end)
    if is_message:
        return stream_calls.signature_ids(packed_ids).tobytes()
    return packed_ids.tobytes() + calls.steps(first, end).tobytes()
