"""All_to_all calls whose parts do not fit: one rank sends another as many elements as that one does
not take.

Takes a hearing, looks at the last call of each group that all of it have issued. Gloo crashes on
such a call, NCCL hangs or fills tensors with something else. Of a pair that does not agree it is
not known which side is wrong, unless one rank is in all of them. Where the sizes of the parts were
not recorded, as late in a job that never repeats them, their sums may still differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import JobCalls

_OP = "all_to_all_single"
_MOST_RANKS = 2048  # of a group whose pairs are compared
_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Unfitting:
    """A call in which what is sent is not what is taken, in elements."""

    key: StreamKey
    number: int
    ranks: tuple[int, ...]
    pairs: tuple[tuple[int, int, int, int], ...]  # from, to, sent, taken
    sent: int
    taken: int

    @property
    def culprits(self) -> tuple[int, ...]:
        """The one that is in all pairs; both of a single one; else nobody can tell."""
        ends = [{source, destination} for source, destination, _, _ in self.pairs]
        common = set.intersection(*ends) if ends else set()
        return tuple(sorted(common))

    def facts(self) -> dict[str, Any]:
        names = ("from", "to", "sent", "taken")
        pairs = [dict(zip(names, pair, strict=True)) for pair in self.pairs[:_MOST_SHOWN]]
        return {"differs_in": ["splits"], "pairs": pairs, "sent": self.sent, "taken": self.taken}

    def sentences(self, job_calls: JobCalls) -> tuple[str, ...]:
        said = [
            (
                f'In #{self.number} of group "{job_calls.group(self.key).title}", {_OP}, the send'
                " and receive splits do not match."
            )
        ]
        said += [
            f"  rank {source} sends {sent} elements to rank {destination}, which expects {taken}"
            for source, destination, sent, taken in self.pairs[:_MOST_SHOWN]
        ]
        if len(self.pairs) > _MOST_SHOWN:
            said.append(f"  and {len(self.pairs) - _MOST_SHOWN} more pairs")
        if not self.pairs:
            said.append(
                f"  all ranks together send {self.sent} elements and expect {self.taken}; the boxes"
                " do not show which split is wrong"
            )
        line = job_calls.by_rank[self.ranks[0]].place_of(self.key, self.number)
        where = f" at {line.line}" if line is not None and line.line else ""
        return (
            *said,
            (
                f"Look at: how the split sizes{where} are computed, and whether they change after"
                " the ranks have exchanged them."
            ),
        )


def unfitting(job_calls: JobCalls) -> Unfitting | None:
    """The first such call, of those that somebody issued last; None where all fit, or too little is
    known."""
    lasts = {
        said.last: None
        for said in job_calls.by_rank.values()
        if said.last is not None and _is_one(job_calls, said.rank)
    }
    found = (_compared(job_calls, key, number) for key, number in lasts)
    return next((each for each in found if each is not None), None)


def _is_one(job_calls: JobCalls, rank: int) -> bool:
    said = job_calls.by_rank[rank]
    calls = said.calls.get(said.last[0]) if said.last is not None else None
    return calls is not None and said.last is not None and calls.of(said.last[1])[0].op == _OP


def _compared(job_calls: JobCalls, key: StreamKey, number: int) -> Unfitting | None:
    ranks = job_calls.group(key).ranks
    if not ranks or any(
        rank not in job_calls.by_rank or _fields(job_calls, rank, key, number) is None
        for rank in ranks
    ):
        return None
    said = [_fields(job_calls, rank, key, number) or {} for rank in ranks]
    sent, taken = (
        sum(_elements(each, "shapes") for each in said),
        sum(_elements(each, "out_shapes") for each in said),
    )
    pairs: tuple[tuple[int, int, int, int], ...] = ()
    if len(ranks) <= _MOST_RANKS:
        sends = [_parts(each, "shapes", "splits", len(ranks)) for each in said]
        takes = [_parts(each, "out_shapes", "out_splits", len(ranks)) for each in said]
        pairs = _unequal(ranks, sends, takes)
    return Unfitting(key, number, ranks, pairs, sent, taken) if pairs or sent != taken else None


def _unequal(
    ranks: tuple[int, ...],
    sends: list[npt.NDArray[np.int64] | None],
    takes: list[npt.NDArray[np.int64] | None],
) -> tuple[tuple[int, int, int, int], ...]:
    known = [each for each in (*sends, *takes) if each is not None]
    if len(known) < 2 * len(ranks):
        return ()
    sent, taken = np.stack(known[: len(ranks)]), np.stack(known[len(ranks) :]).T
    return tuple(
        (ranks[i], ranks[j], int(sent[i, j]), int(taken[i, j]))
        for i, j in np.argwhere(sent != taken).tolist()
    )


def _fields(job_calls: JobCalls, rank: int, key: StreamKey, number: int) -> dict[str, Any] | None:
    calls = job_calls.by_rank[rank].calls.get(key)
    if calls is None or calls.at(number) is None or calls.of(number)[0].op != _OP:
        return None
    found = job_calls.shared_ids.parsed(calls.of(number)[0].text)
    return (
        found
        if isinstance(found, dict) and _shape(found, "shapes") and _shape(found, "out_shapes")
        else None
    )


def _shape(fields: dict[str, Any], name: str) -> list[int]:
    """Of the one tensor that there is; empty where there is none."""
    shapes = fields.get(name)
    shape = shapes[0] if isinstance(shapes, list) and len(shapes) == 1 else None
    return shape if isinstance(shape, list) and all(isinstance(size, int) for size in shape) else []


def _elements(fields: dict[str, Any], name: str) -> int:
    return math.prod(_shape(fields, name))


def _parts(
    fields: dict[str, Any], shape_name: str, name: str, ranks: int
) -> npt.NDArray[np.int64] | None:
    """How many elements go to, or come from, each rank; None where that was not recorded, or makes
    no sense."""
    shape, splits = _shape(fields, shape_name), fields.get(name)
    if not isinstance(splits, list) or not all(isinstance(size, int) for size in splits):
        return None
    if not splits and shape[0] % ranks == 0:
        splits = [shape[0] // ranks] * ranks
    return np.array(splits, np.int64) * math.prod(shape[1:]) if len(splits) == ranks else None
