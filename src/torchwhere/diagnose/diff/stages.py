"""Finds the pipeline stage of each rank from its messages. Takes sequences, gives stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from torchwhere.diagnose.diff.sequences import EventSequence


def stages_of(sequences: Iterable[EventSequence]) -> dict[int, int]:
    """The pipeline stage of each rank, from the first message of its steps.

    A rank that starts its steps with a recv is the stage after the sender. All stages are 0 if
    ranks send no messages in most steps, or if all ranks start alike, as in a ring.
    """
    sources: dict[int, int | None] = {}  # by rank: the sender of the message it waits for first
    for sequence in sequences:
        steps = len(np.unique(sequence.steps))
        first_step = sequence.steps[0] if steps else 0
        usual = Counter(
            (op, peer) for step, op, peer in sequence.messages if step >= first_step
        ).most_common(1)
        sources[sequence.rank] = None
        for (op, peer), count in usual:
            if op == "recv" and count * 2 >= steps:
                sources[sequence.rank] = peer
    return {rank: _depth(rank, sources) for rank in sources}


def _depth(rank: int, sources: Mapping[int, int | None]) -> int:
    seen: list[int] = []
    at: int | None = rank
    while at is not None and at not in seen:
        seen.append(at)
        at = sources.get(at)
    return 0 if at is not None else len(seen) - 1  # a ring leads back to its start
