"""Aligns the events of many ranks by step, stream and order.

Takes event sequences, gives the positions where ranks differ, in program order, and `diverge`,
which splits cohorts of ranks at them. Ranks with equal sequences are aligned once, as a
`RankClass`. Positions that are equal on all ranks are skipped as whole arrays.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchwhere.core.arrays import Ints
from torchwhere.core.events import Kind
from torchwhere.diagnose.diff.cohorts import Cohorts
from torchwhere.diagnose.diff.sequences import EventSequence, EventStream

Position = tuple[int, int]  # the step, and the number of events of the step before it
_NO_EVENT = 0  # instead of a flow id


@dataclass(slots=True)
class RankClass:
    """Ranks with equal sequences. The columns have one item for each event, sorted by step, stream
    and order."""

    ranks: list[int]
    sequence: EventSequence  # of one of them
    steps: Ints
    streams: Ints
    nth: Ints  # number of earlier events of its stream in its step
    at: Ints  # its index in the sequence
    in_step: Ints  # number of earlier events of its step

    def table(self, number: int) -> Ints:
        """The columns of all events as rows of one array: first the number of this class, then
        step, stream, nth, flow, value, at, in_step."""
        flow, value = self.sequence.flow[self.at], self.sequence.value[self.at]
        columns = (self.steps, self.streams, self.nth, flow, value, self.at, self.in_step)
        return np.stack([np.full(len(self.at), number), *columns])

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]) if len(self.steps) else -1

    def index(self, step: int, stream: int, nth: int) -> int | None:
        """The index of an event in the sequence; None if the sequence lacks it."""
        rows = np.flatnonzero((self.steps == step) & (self.streams == stream) & (self.nth == nth))
        return int(self.at[rows[0]]) if len(rows) else None

    def count(self, step: int, stream: int) -> int:
        return int(((self.steps == step) & (self.streams == stream)).sum())

    def resumes_at(self, aligned: AlignedEvents) -> int:
        """The index in the sequence that follows a position where it has no event."""
        if aligned.nth:
            before = self.index(aligned.step, aligned.stream, aligned.nth - 1)
            if before is not None:
                return before + 1
        first = int(np.searchsorted(self.sequence.steps, aligned.step))
        return min(first + aligned.position[1], len(self.sequence.records))

    def may_lack(self, step: int, stream: EventStream) -> bool:
        """Whether a missing event does not count as a difference: the rank did not get that far, or
        is not in the group."""
        if not self.sequence.has_ended and step >= self.last_step:
            return True
        return stream.kind is Kind.COLLECTIVE and stream.group not in self.sequence.groups


class AlignedEvent(NamedTuple):
    """One class's event at a position: its ids, and its index in the sequence."""

    flow: int
    value: int
    at: int


@dataclass(frozen=True, slots=True)
class AlignedEvents:
    """The events that are compared with each other, by index of the rank class."""

    step: int
    stream: int
    nth: int
    position: Position
    of_class: dict[int, AlignedEvent]


@dataclass(frozen=True, slots=True)
class ClassDifference:
    """Rank classes of one cohort differ at a position. `versions` holds indexes of classes."""

    kind: str  # flow or value
    aligned: AlignedEvents
    versions: list[list[int]]


def rank_classes(sequences: Iterable[EventSequence]) -> list[RankClass]:
    """Group equal sequences; the class with the most ranks first."""
    classes: dict[Hashable, RankClass] = {}
    for sequence in sequences:
        # a stable sort: events of one stream stay in program order
        order = np.lexsort((sequence.streams, sequence.steps))
        steps, streams = sequence.steps[order], sequence.streams[order]
        columns = (steps, streams, sequence.flow[order], sequence.value[order])
        content = tuple(column.tobytes() for column in columns)
        key = content, sequence.has_ended, sequence.groups
        if key in classes:
            classes[key].ranks.append(sequence.rank)
            continue
        in_step = _since_change(sequence.steps)[order] if len(order) else order
        nth = _since_change(steps, streams)
        classes[key] = RankClass([sequence.rank], sequence, steps, streams, nth, order, in_step)
    return sorted(
        classes.values(), key=lambda rank_class: (-len(rank_class.ranks), rank_class.ranks)
    )


def _since_change(*columns: Ints) -> Ints:
    """For each row, the number of rows before it since a column changed."""
    count = len(columns[0])
    changes = np.ones(count, bool)
    changes[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    rows = np.arange(count)
    return rows - np.maximum.accumulate(np.where(changes, rows, 0))


def differing_events(classes: Sequence[RankClass]) -> Iterator[AlignedEvents]:
    """The positions where not all classes have the same, in program order."""
    tables = [side.table(number) for number, side in enumerate(classes)]
    table = np.concatenate(tables, axis=1) if tables else np.empty((8, 0), np.int64)
    if not table.size:
        return
    of_class, steps, streams, nth = table[:4]
    table = table[:, np.lexsort((of_class, nth, streams, steps))]
    of_class, steps, streams, nth, flow, value, at, in_step = table
    starts = np.flatnonzero(_since_change(steps, streams, nth) == 0)
    ends = np.append(starts[1:], len(steps))
    differs = ends - starts < len(classes)
    for ids in (flow, value):
        differs |= np.minimum.reduceat(ids, starts) != np.maximum.reduceat(ids, starts)
    # The largest class that has the event determines the position.
    chosen = np.flatnonzero(differs)
    first = starts[chosen]
    for number in chosen[np.lexsort((of_class[first], in_step[first], steps[first]))]:
        start, end = int(starts[number]), int(ends[number])
        step = int(steps[start])
        rows = zip(*(c[start:end].tolist() for c in (of_class, flow, value, at)), strict=True)
        yield AlignedEvents(
            step=step,
            stream=int(streams[start]),
            nth=int(nth[start]),
            position=(step, int(in_step[start])),
            of_class={side: AlignedEvent(*event) for side, *event in rows},
        )


def diverge(
    classes: Sequence[RankClass],
    streams: dict[int, EventStream],
    cohorts: Cohorts,
    *,
    compared: Iterable[int],
) -> list[ClassDifference]:
    """Split the cohorts of `classes` (by index) at each difference in the `compared` streams."""
    findings: list[ClassDifference] = []
    compared_streams, values_differ = set(compared), False
    for aligned in differing_events(classes):
        if not cohorts.can_split:
            break
        if aligned.stream not in compared_streams:
            continue
        flows = _flows(aligned, classes, streams[aligned.stream])
        findings += [
            ClassDifference("flow", aligned, versions) for versions in cohorts.split(flows)
        ]
        values = {side: event.value for side, event in aligned.of_class.items()}
        if not values_differ and any(values.values()):
            versions = cohorts.differing(values)
            values_differ = bool(versions)
            findings += [ClassDifference("value", aligned, versions)] if versions else []
    return findings


def _flows(
    aligned: AlignedEvents, classes: Sequence[RankClass], stream: EventStream
) -> dict[int, Hashable]:
    flows: dict[int, Hashable] = {side: event.flow for side, event in aligned.of_class.items()}
    for side, rank_class in enumerate(classes):
        if side not in flows and not rank_class.may_lack(aligned.step, stream):
            flows[side] = _NO_EVENT
    return flows
