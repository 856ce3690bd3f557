"""Rule: the splits of an all_to_all do not match: a rank sends another one more or fewer elements
than that rank expects.

Compares the last call of each group that all of its ranks have issued. Gloo crashes on such a call;
NCCL hangs or fills tensors with wrong data. It is unknown which rank of a pair is wrong, unless one
rank is in all mismatched pairs. Where the split sizes were not recorded (late in a job that never
repeats them), their sums may still differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.core.place import Certainty
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import CallRef, Cause, Finding
from torchwhere.diagnose.doctor.verdict import VerdictKind

OP = "all_to_all_single"
_MOST_RANKS = 2048  # of a group whose pairs are compared
MOST_PAIRS = 8  # in the JSON and in the text


@dataclass(frozen=True, slots=True)
class UnmatchedSplits(Cause):
    """A call whose sent and expected element counts differ."""

    key: StreamKey
    number: int
    ranks: tuple[int, ...]
    pairs: tuple[tuple[int, int, int, int], ...]  # from, to, sent, taken
    sent: int
    taken: int

    @property
    def culprits(self) -> tuple[int, ...]:
        """The rank that is in all pairs; both ranks of a single pair; else no rank."""
        ends = [{source, destination} for source, destination, _, _ in self.pairs]
        common = set.intersection(*ends) if ends else set()
        return tuple(sorted(common))


def find_unmatched_splits(context: Context) -> Finding | None:
    splits = unmatched_splits(context.job_calls)
    if splits is None:
        return None
    names = ("from", "to", "sent", "taken")
    pairs = [dict(zip(names, pair, strict=True)) for pair in splits.pairs[:MOST_PAIRS]]
    return Finding(
        VerdictKind.MISMATCH,
        splits,
        culprits=splits.culprits,
        call=CallRef(splits.key, splits.number, splits.ranks[0]),
        certainty=Certainty.INFERRED,
        facts={
            "differs_in": ["splits"],
            "pairs": pairs,
            "sent": splits.sent,
            "taken": splits.taken,
        },
    )


def unmatched_splits(job_calls: JobCalls) -> UnmatchedSplits | None:
    """The first mismatched call among the last calls of the ranks; None if all match or data is
    missing."""
    lasts = dict.fromkeys(rank_calls.last for rank_calls in job_calls.by_rank.values())
    mismatched = (_compared(job_calls, *last) for last in lasts if last is not None)
    return next((call for call in mismatched if call is not None), None)


def _compared(job_calls: JobCalls, key: StreamKey, number: int) -> UnmatchedSplits | None:
    ranks = job_calls.group(key).ranks
    fields = []
    for rank in ranks:
        of_rank = _fields(job_calls, rank, key, number)
        if of_rank is None:
            return None
        fields.append(of_rank)
    sent = sum(math.prod(_shape(of_rank, "shapes")) for of_rank in fields)
    taken = sum(math.prod(_shape(of_rank, "out_shapes")) for of_rank in fields)
    pairs = _unequal(ranks, fields) if len(ranks) <= _MOST_RANKS else ()
    if not pairs and sent == taken:
        return None
    return UnmatchedSplits(key, number, ranks, pairs, sent, taken)


def _unequal(
    ranks: tuple[int, ...], fields: list[dict[str, Any]]
) -> tuple[tuple[int, int, int, int], ...]:
    """The pairs of ranks that differ; none if the splits of a rank are unknown."""
    sends = [_parts(of_rank, "shapes", "splits", len(ranks)) for of_rank in fields]
    takes = [_parts(of_rank, "out_shapes", "out_splits", len(ranks)) for of_rank in fields]
    parts = [part for part in (*sends, *takes) if part is not None]
    if len(parts) < 2 * len(ranks) or not parts:
        return ()
    sent, taken = np.stack(parts[: len(ranks)]), np.stack(parts[len(ranks) :]).T
    return tuple(
        (ranks[i], ranks[j], int(sent[i, j]), int(taken[i, j]))
        for i, j in np.argwhere(sent != taken).tolist()
    )


def _fields(job_calls: JobCalls, rank: int, key: StreamKey, number: int) -> dict[str, Any] | None:
    """The fields of an all_to_all with one tensor on each side; None for any other call."""
    rank_calls = job_calls.by_rank.get(rank)
    calls = rank_calls.calls.get(key) if rank_calls is not None else None
    if calls is None or calls.at(number) is None or calls.of(number)[0].op != OP:
        return None
    fields = job_calls.shared_ids.parsed(calls.of(number)[0].text)
    has_shapes = isinstance(fields, dict) and _shape(fields, "shapes")
    return fields if has_shapes and _shape(fields, "out_shapes") else None


def _shape(fields: dict[str, Any], name: str) -> list[int]:
    """The shape of the only tensor; empty if there is no such tensor."""
    shapes = fields.get(name)
    shape = shapes[0] if isinstance(shapes, list) and len(shapes) == 1 else None
    return shape if isinstance(shape, list) and all(isinstance(size, int) for size in shape) else []


def _parts(
    fields: dict[str, Any], shape_name: str, name: str, ranks: int
) -> npt.NDArray[np.int64] | None:
    """The elements to or from each rank; None if they were not recorded or are not valid."""
    shape, splits = _shape(fields, shape_name), fields.get(name)
    if not isinstance(splits, list) or not all(isinstance(size, int) for size in splits):
        return None
    if not splits and shape[0] % ranks == 0:
        splits = [shape[0] // ranks] * ranks
    return np.array(splits, np.int64) * math.prod(shape[1:]) if len(splits) == ranks else None
