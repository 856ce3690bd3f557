"""Checks the calls of one group, or the messages of one pair, number by number.

Takes the numbered calls of each rank, gives the first number at which their shapes, dtypes or
operations differ although they must be equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from torchwhere.diagnose.diff.sequences import NumberedCalls


class ComparedCall(NamedTuple):
    """The call of one rank in a collective, or in a message."""

    record: int
    step: int
    agreed: int  # the id of what all ranks must agree on


def first_mismatch(calls: Mapping[int, NumberedCalls]) -> dict[int, ComparedCall] | None:
    """The calls, by rank, of the first number at which the ranks do not agree."""
    if len(calls) < 2:
        return None
    first, *others = calls.values()
    if all(
        np.array_equal(other.numbers, first.numbers) and np.array_equal(other.agreed, first.agreed)
        for other in others
    ):
        return None
    numbers = np.concatenate([of_rank.numbers for of_rank in calls.values()])
    agreed = np.concatenate([of_rank.agreed for of_rank in calls.values()])
    order = np.argsort(numbers, kind="stable")
    numbers, agreed = numbers[order], agreed[order]
    starts = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
    wrong = np.flatnonzero(
        np.minimum.reduceat(agreed, starts) != np.maximum.reduceat(agreed, starts)
    )
    if not len(wrong):
        return None
    number = int(numbers[starts[wrong[0]]])
    return {
        rank: ComparedCall(
            int(of_rank.records[at]), int(of_rank.steps[at]), int(of_rank.agreed[at])
        )
        for rank, of_rank in calls.items()
        for at in np.flatnonzero(of_rank.numbers == number)[:1]
    }
