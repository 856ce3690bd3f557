"""Lays the events of many ranks side by side: what has the same step, kind, group and order in it
stands at one spot.

Takes traces, gives the spots where not all ranks have the same, in the order of the program, and
`part`, which follows cohorts of ranks through them. Ranks whose events are all alike are laid down
once; what all have in common is not looked at one by one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from torchwhere.core.events import Kind
from torchwhere.diagnose.diff.cohorts import Cohorts
from torchwhere.diagnose.diff.traces import EventSequence, EventStream, Numbers

Position = tuple[int, int]  # the step, and how many events of the step come before
_NOTHING = 0  # in the place of an event


@dataclass(slots=True)
class RankClass:
    """Ranks whose events are all alike. Columns have an item for each event, sorted by step, stream
    and order."""

    ranks: list[int]
    sequence: EventSequence  # of one of them
    steps: Numbers
    streams: Numbers
    nth: Numbers  # the how manieth of its stream in its step
    at: Numbers  # where it is in the trace
    in_step: Numbers  # how many events of its step come before it

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]) if len(self.steps) else -1

    def index(self, step: int, stream: int, nth: int) -> int | None:
        """Where in the trace an event is, None if it is not."""
        found = np.flatnonzero((self.steps == step) & (self.streams == stream) & (self.nth == nth))
        return int(self.at[found[0]]) if len(found) else None

    def count(self, step: int, stream: int) -> int:
        return int(((self.steps == step) & (self.streams == stream)).sum())

    def resumes(self, spot: AlignedEvents) -> int:
        """Where in the trace it goes on if it has nothing at a spot."""
        before = self.index(spot.step, spot.stream, spot.nth - 1) if spot.nth else None
        first = int(np.searchsorted(self.sequence.steps, spot.step))
        return (
            before + 1
            if before is not None
            else min(first + spot.position[1], len(self.sequence.records))
        )

    def may_lack(self, step: int, stream: EventStream) -> bool:
        """Whether having nothing there means nothing: it had not come so far, or is in no such
        group."""
        has_not_come_so_far = not self.sequence.has_ended and step >= self.last_step
        return has_not_come_so_far or (
            stream.kind is Kind.COLLECTIVE and stream.group not in self.sequence.groups
        )


@dataclass(frozen=True, slots=True)
class AlignedEvents:
    """Events of several ranks that are compared with each other. By the index of the likes: their
    flow, value, and index."""

    step: int
    stream: int
    nth: int
    position: Position
    has: dict[int, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Finding:
    """Some who were together have different things at a spot; the versions are indices of likes."""

    kind: str  # flow or value
    spot: AlignedEvents
    versions: list[list[int]]


def likes(sequences: Iterable[EventSequence]) -> list[RankClass]:
    """The traces, those together that are all alike, most ranks first."""
    found: dict[tuple[Hashable, ...], RankClass] = {}
    for sequence in sequences:
        # stable: within a stream the order of the program
        order = np.lexsort((sequence.streams, sequence.steps))
        steps, streams = sequence.steps[order], sequence.streams[order]
        key = (
            *(
                column[order].tobytes()
                for column in (sequence.steps, sequence.streams, sequence.flow, sequence.value)
            ),
        )
        known = found.get((key, sequence.has_ended, sequence.groups))
        if known is not None:
            known.ranks.append(sequence.rank)
            continue
        in_step = _since_change(sequence.steps)[order] if len(order) else order
        nth = _since_change(steps, streams)
        found[key, sequence.has_ended, sequence.groups] = RankClass(
            [sequence.rank], sequence, steps, streams, nth, order, in_step
        )
    return sorted(found.values(), key=lambda one: (-len(one.ranks), one.ranks))


def _since_change(*columns: Numbers) -> Numbers:
    """For each row how many came before it since a column changed."""
    count = len(columns[0])
    changes = np.ones(count, bool)
    changes[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    rows = np.arange(count)
    return rows - np.maximum.accumulate(np.where(changes, rows, 0))


def spots(sides: Sequence[RankClass]) -> Iterator[AlignedEvents]:
    """Where not all have the same, in the order of the program."""
    columns = [
        np.concatenate(found)
        for found in zip(
            *(
                (
                    one.steps,
                    one.streams,
                    one.nth,
                    one.sequence.flow[one.at],
                    one.sequence.value[one.at],
                    one.at,
                    one.in_step,
                )
                for one in sides
            ),
            strict=True,
        )
    ]
    side = np.repeat(np.arange(len(sides)), [len(one.steps) for one in sides])
    order = np.lexsort((side, columns[2], columns[1], columns[0]))
    steps, streams, nth, flow, value, at, in_step = (column[order] for column in columns)
    side = side[order]
    if not len(order):
        return
    starts = np.flatnonzero(_since_change(steps, streams, nth) == 0)
    ends = np.append(starts[1:], len(order))
    differs = ends - starts < len(sides)
    for column in (flow, value):
        differs |= np.minimum.reduceat(column, starts) != np.maximum.reduceat(column, starts)
    # The place of a spot is that of its event on those who are the most.
    chosen = np.flatnonzero(differs)
    first = starts[chosen]
    for one in chosen[np.lexsort((side[first], in_step[first], steps[first]))]:
        start, end = int(starts[one]), int(ends[one])
        step, rows = (
            int(steps[start]),
            (column[start:end].tolist() for column in (side, flow, value, at)),
        )
        has = {who: (what, how, where) for who, what, how, where in zip(*rows, strict=True)}
        yield AlignedEvents(
            step, int(streams[start]), int(nth[start]), (step, int(in_step[start])), has
        )


def part(
    sides: Sequence[RankClass],
    streams: dict[int, EventStream],
    cohorts: Cohorts,
    *,
    heeded: Iterable[int],
) -> list[Finding]:
    """Follow the cohorts of `sides` (by index) through all spots of the streams that are heeded:
    where they part."""
    found: list[Finding] = []
    wanted, values_differ = set(heeded), False
    for spot in spots(sides):
        if not cohorts.can_part:
            break
        if spot.stream not in wanted:
            continue
        found += [
            Finding("flow", spot, versions)
            for versions in cohorts.part(_has(spot, sides, streams[spot.stream]))
        ]
        if not values_differ and any(how for _, how, _ in spot.has.values()):
            differing = _differing_values(spot, cohorts)
            values_differ = bool(differing)
            found += [Finding("value", spot, differing)] if differing else []
    return found


def _has(
    spot: AlignedEvents, sides: Sequence[RankClass], stream: EventStream
) -> dict[int, Hashable]:
    has: dict[int, Hashable] = {who: what for who, (what, _, _) in spot.has.items()}
    for who, one in enumerate(sides):
        if who not in has and not one.may_lack(spot.step, stream):
            has[who] = _NOTHING
    return has


def _differing_values(spot: AlignedEvents, cohorts: Cohorts) -> list[list[int]]:
    for cohort in cohorts.all:
        versions: dict[int, list[int]] = {}
        for who in cohort:
            if who in spot.has:
                versions.setdefault(spot.has[who][1], []).append(who)
        if len(versions) > 1:
            return list(versions.values())
    return []
