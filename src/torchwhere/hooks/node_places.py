"""Which module call made each of many autograd nodes: the answer of `Locator.spot_of_node`, for a
million numbers at once.

Takes the sequence numbers of nodes, gives `Places`. Asked from the thread that made the graph, as a
rule: where several threads could have made a node, it is the one that asks, and the answer is
`inferred`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchwhere.blackbox.file_format import NO_CALL
from torchwhere.core.place import Certainty, Pass
from torchwhere.hooks.locate import Locator
from torchwhere.hooks.threads import LOG_LENGTH, LOG_MASK, Track
from torchwhere.model.backward_graph import ACCUMULATE_GRAD_SEQ, CERTAINTIES, Places

_INFERRED, _EXACT = CERTAINTIES.index(Certainty.INFERRED), CERTAINTIES.index(Certainty.EXACT)


def places(locator: Locator, sequence: NDArray[np.uint64]) -> Places:
    """Where the nodes with these numbers were made."""
    here = locator.threads.here()
    tracks = sorted(
        locator.threads.logged(),
        key=lambda track: (track is not here, track.name != "MainThread", track.number),
    )
    found = Places.unknown(len(sequence))
    is_made = sequence != ACCUMULATE_GRAD_SEQ
    claims = [(track, *_claim(track, sequence)) for track in tracks]
    is_within = [is_made & has & (sequence < track.newest()) for track, _, has in claims]
    makers = (
        np.sum(is_within, axis=0, dtype=np.int64)
        if is_within
        else np.zeros(len(sequence), np.int64)
    )
    modules: dict[str | None, int] = {None: 0}
    for (track, words, has), inside in zip(claims, is_within, strict=True):
        mine = np.flatnonzero((inside | (is_made & has & (makers == 0))) & (found.certainty == 0))
        _name(locator, track, words[mine], mine, found, modules)
    found.certainty[(makers > 1) & (found.certainty == _EXACT)] = _INFERRED
    return found._replace(modules=list(modules))


def _claim(
    track: Track, sequence: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """For each number the packed of the call that was running on a thread when it got to it, and
    whether its log knows."""
    count = min(track.count, LOG_LENGTH)
    order = np.arange(track.count - count, track.count) & LOG_MASK
    seqs, marks = (
        np.frombuffer(track.seqs, np.uint64)[order],
        np.frombuffer(track.marks, np.uint64)[order],
    )
    at = np.searchsorted(seqs, sequence, side="right")
    return marks[np.maximum(at, 1) - 1], at > 0


def _name(
    locator: Locator,
    track: Track,
    words: NDArray[np.uint64],
    which: NDArray[np.int64],
    found: Places,
    modules: dict[str | None, int],
) -> None:
    distinct, at = np.unique(words, return_inverse=True)
    rows = []
    for packed in distinct.tolist():
        spot = locator.spot_of_packed(packed, track, Pass.BACKWARD)
        module = locator.text_of(spot.module) if spot.module else None
        call = -1 if module is None or spot.call == NO_CALL else spot.call
        rows.append(
            (modules.setdefault(module, len(modules)), call, _INFERRED if spot.flags else _EXACT)
        )
    table = np.array(rows, np.int64).reshape(len(rows), 3)[at]
    found.module[which], found.call[which], found.certainty[which] = table.T
