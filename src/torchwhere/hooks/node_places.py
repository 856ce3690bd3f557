"""Finds the module calls that made many autograd nodes: `Locator.place_ids_of_node` for a million
numbers at once.

Takes the sequence numbers of nodes, returns `Places`. Usually the thread that made the graph calls
this. If several threads could have made a node, the calling thread is assumed, and the answer is
`inferred`.
"""

from __future__ import annotations

from collections.abc import Iterable
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchwhere.blackbox.file_format import NO_CALL
from torchwhere.core.place import Certainty, Pass
from torchwhere.hooks.locate import Locator
from torchwhere.hooks.threads import LOG_LENGTH, LOG_MASK, Track
from torchwhere.model.backward_graph import CERTAINTIES, Places
from torchwhere.model.graph_walk import ACCUMULATE_GRAD_SEQ, holds_saved, roots_of, walk

_INFERRED, _EXACT = CERTAINTIES.index(Certainty.INFERRED), CERTAINTIES.index(Certainty.EXACT)


def places(locator: Locator, sequence: NDArray[np.uint64]) -> Places:
    """The places of the nodes with these numbers."""
    here = locator.threads.here()
    tracks = sorted(
        locator.threads.logged(),
        key=lambda track: (track is not here, track.name != "MainThread", track.number),
    )
    answer = Places.unknown(len(sequence))
    is_made = sequence != ACCUMULATE_GRAD_SEQ
    claims = [(track, *_claim(track, sequence)) for track in tracks]
    is_within = [is_made & has & (sequence < track.newest()) for track, _, has in claims]
    makers = (
        np.sum(is_within, axis=0, dtype=np.int64)
        if is_within
        else np.zeros(len(sequence), np.int64)
    )
    modules: dict[str | None, int] = {None: 0}
    for (track, packed, has), inside in zip(claims, is_within, strict=True):
        own = np.flatnonzero((inside | (is_made & has & (makers == 0))) & (answer.certainty == 0))
        _name(locator, track, packed[own], own, answer, modules)
    answer.certainty[(makers > 1) & (answer.certainty == _EXACT)] = _INFERRED
    return answer._replace(modules=list(modules))


def _claim(
    track: Track, sequence: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """For each number, the packed place of the call that the thread ran at that number, and whether
    the log has it."""
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
    packed_places: NDArray[np.uint64],
    rows_of: NDArray[np.int64],
    answer: Places,
    modules: dict[str | None, int],
) -> None:
    distinct, at = np.unique(packed_places, return_inverse=True)
    rows = []
    for packed in distinct.tolist():
        place_ids = locator.place_ids_of_packed(packed, track, Pass.BACKWARD)
        module = locator.text_of(place_ids.module) if place_ids.module else None
        call = -1 if module is None or place_ids.call == NO_CALL else place_ids.call
        rows.append(
            (
                modules.setdefault(module, len(modules)),
                call,
                _INFERRED if place_ids.flags else _EXACT,
            )
        )
    table = np.array(rows, np.int64).reshape(len(rows), 3)[at]
    answer.module[rows_of], answer.call[rows_of], answer.certainty[rows_of] = table.T


# -- the node that raised an exception -------------------------------------------------------------
# Found from the exception itself, also after the engine has returned. The frames of the traceback
# hold the arguments of the Python code: the node of a custom function (`ctx`), or the tensors that
# backward was called on. An error in a kernel of torch leaves no such frame. Then the progress of
# the engine tells the node.

_ENGINE = "_engine_run_backward"
_MOST_NODES = 100_000


def node_that_raised(error: BaseException) -> tuple[Any, bool]:
    """The node, and whether it is certain; None for an exception that passed through no
    backward."""
    node, outputs = None, None
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_name == _ENGINE:
            outputs = frame.f_locals.get("t_outputs", outputs)
        elif outputs is not None:
            nodes = [
                value
                for value in list(frame.f_locals.values())
                if isinstance(value, torch.autograd.graph.Node)
            ]
            node = nodes[-1] if nodes else node
    if node is None and outputs is not None:
        return frontier(outputs), False
    return node, node is not None


def frontier(outputs: Iterable[Any]) -> Any:
    """The node that the engine has reached. It runs the highest number first and frees the saved
    tensors of a node after it has run.

    So the highest node that still holds its saved tensors has raised, or the next lower node has.
    """
    pending = [node for node in walk(roots_of(outputs)).nodes[:_MOST_NODES] if holds_saved(node)]
    return max(pending, key=lambda node: int(node._sequence_nr()), default=None)
