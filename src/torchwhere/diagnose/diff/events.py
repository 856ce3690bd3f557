"""Where ranks part in what they did: the events of many boxes, compared in the order of the program
and never by a clock.

Takes boxes, gives a `Comparison`. An event is compared with the one of the other ranks that has the
same step, kind and group, and is the same one in that order: a rank that does one thing more is at
one place again with the others in the next step. Every group and every pair of ranks is compared by
itself too, number by number: there shapes, dtypes and operations must be equal. Stages of a
pipeline, which do different things by design, are compared each by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.diagnose.diff import alignment
from torchwhere.diagnose.diff.alignment import Finding, Position
from torchwhere.diagnose.diff.cohorts import (
    MOST_PARTINGS,
    Cohorts,
    ComparedItem,
    Comparison,
    Divergence,
    Version,
    in_order,
    ranks_named,
)
from torchwhere.diagnose.diff.traces import (
    EventSequence,
    EventStream,
    Patterns,
    SharedStream,
    read_sequences,
)

_CONTEXT = 3
_AFTER = 2


def compare_events(
    boxes: Mapping[int, Box], ranks: Sequence[int], *, strip: Patterns = (), ignore: Patterns = ()
) -> Comparison:
    """Where the events of some ranks part."""
    sequences, streams = read_sequences(boxes, ranks, strip=strip, ignore=ignore)
    first, remarks = _window(sequences)
    remarks += _remarks(sequences)
    sequences = [sequence.from_step(first) for sequence in sequences]
    search = _EventSearch(sequences, streams)
    told = sorted([*search.divergences(), *search.mismatches()], key=lambda one: one[0])
    last = max(
        (int(sequence.steps[-1]) for sequence in sequences if len(sequence.steps)), default=None
    )
    return Comparison(
        ranks=tuple(sequence.rank for sequence in sequences),
        compared=sum(len(sequence.flow) for sequence in sequences),
        cohorts=search.cohorts.all,
        divergences=tuple(divergence for _, divergence in told[:MOST_PARTINGS]),
        steps=None if last is None else (first, last),
        remarks=(*remarks, *search.remarks),
    )


# -- what is compared ------------------------------------------------------------------------------


def _window(sequences: Sequence[EventSequence]) -> tuple[int, list[str]]:
    """The first step that all ranks have as a whole, and what to say about it."""
    firsts = {
        sequence.rank: sequence.first_step
        for sequence in sequences
        if sequence.first_step is not None
    }
    first = max(firsts.values(), default=0)
    if not any(sequence.is_cut or sequence.first_step != first for sequence in sequences):
        return first, []
    late = [rank for rank, step in firsts.items() if step == first]
    if any(len(sequence.steps) and int(sequence.steps[-1]) >= first for sequence in sequences):
        return first, [
            f"nothing whole from before step {first} of {ranks_named(late)}: compared from there on"
            " (--records keeps more)"
        ]
    return first, [
        "no step is whole in all rings: only collectives of one group were compared, by number"
        " (--records keeps more)"
    ]


def _remarks(sequences: Sequence[EventSequence]) -> Iterator[str]:
    running = [sequence.rank for sequence in sequences if not sequence.has_ended]
    if running:
        yield f"{ranks_named(running)} had not ended: compared as far as they came"
    left_out = sum(sequence.left_out for sequence in sequences)
    if left_out:
        yield f"{left_out} events of other threads, which come at any time, were left out"
    compiled = Counter(sequence.compiled for sequence in sequences)
    if len(compiled) > 1:
        usual = compiled.most_common(1)[0][0]
        others = [f"{ranks_named([t.rank])} {t.compiled}" for t in sequences if t.compiled != usual]
        yield f"graphs compiled: {', '.join(others[:8])}; the others {usual}"


def stages_of(sequences: Iterable[EventSequence]) -> dict[int, int]:
    """Which stage of a pipeline each rank is, by the first message of its steps.

    One that begins by receiving comes after the one it receives from. All are 0 where ranks send no
    messages in most steps, or where all begin alike, as in a ring.
    """
    first: dict[int, int | None] = {}  # rank to the rank it waits for
    for sequence in sequences:
        steps = len(np.unique(sequence.steps))
        usual = Counter(
            (op, peer)
            for step, op, peer in sequence.messages
            if step >= (sequence.steps[0] if steps else 0)
        ).most_common(1)
        is_regular = bool(usual) and usual[0][1] * 2 >= steps
        first[sequence.rank] = usual[0][0][1] if is_regular and usual[0][0][0] == "recv" else None
    return {rank: _depth(rank, first) for rank in first}


def _depth(rank: int, first: Mapping[int, int | None]) -> int:
    seen: list[int] = []
    at: int | None = rank
    while at is not None and at not in seen:
        seen.append(at)
        at = first.get(at)
    return 0 if at is not None else len(seen) - 1  # a ring leads back to where it began


class ComparedCall(NamedTuple):
    """One rank's part in a collective, or in a message."""

    record: int
    step: int
    agreed: int  # what all must agree on


# -- the search ------------------------------------------------------------------------------------


class _EventSearch:
    """Finds where ranks part, and tells it."""

    def __init__(self, sequences: Sequence[EventSequence], streams: dict[int, EventStream]) -> None:
        self._traces = {sequence.rank: sequence for sequence in sequences}
        self._streams = streams
        self._sides = alignment.likes(sequences)
        self.remarks: list[str] = []
        self._by_design: list[Finding] = []  # what stages of a pipeline differ in
        self._findings = self._find(stages_of(sequences))
        self.cohorts = self._cohorts_until(None)

    def _find(self, stages: Mapping[int, int]) -> list[Finding]:
        if len(set(stages.values())) < 2:
            return self._part([range(len(self._sides))], self._streams)
        # Messages differ from stage to stage. In everything else all ranks are compared with each
        # other; what holds for the whole of each stage is so by design.
        found = self._part(
            [range(len(self._sides))],
            [n for n, stream in self._streams.items() if not stream.is_p2p],
        )
        self._by_design = [
            one for one in found if one.kind == "flow" and self._keeps_whole(stages, one)
        ]
        found = [one for one in found if one not in self._by_design]
        if self._by_design:
            self.remarks.append(self._stages_text(stages))
        return found or self._part(self._sides_by_stage(stages), self._streams)

    def _part(self, apart: Iterable[Iterable[int]], heeded: Iterable[int]) -> list[Finding]:
        return alignment.part(self._sides, self._streams, Cohorts(apart), heeded=heeded)

    def _keeps_whole(self, stages: Mapping[int, int], finding: Finding) -> bool:
        """Whether no stage is in two versions."""
        of_version = [{stages[rank] for rank in self._ranks(sides)} for sides in finding.versions]
        return sum(map(len, of_version)) == len(set().union(*of_version))

    def _sides_by_stage(self, stages: Mapping[int, int]) -> list[list[int]]:
        """Ranks that do all the same, messages too, are of one stage: a message that is received
        first is not sent first."""
        found: dict[int, list[int]] = {}
        for side, one in enumerate(self._sides):
            found.setdefault(stages[one.ranks[0]], []).append(side)
        return list(found.values())

    def _stages_text(self, stages: Mapping[int, int]) -> str:
        ranks = [
            [rank for rank, stage in stages.items() if stage == one]
            for one in sorted(set(stages.values()))
        ]
        listed = "; ".join(map(ranks_named, ranks[:8])) + ("; ..." if len(ranks) > 8 else "")
        spot, versions = self._by_design[0].spot, self._by_design[0].versions
        side = next(side for sides in versions for side in sides if side in spot.has)
        (entry,) = _entries(self._sides[side].sequence, spot.has[side][2], spot.has[side][2] + 1)
        first = (
            f"they first differ in step {spot.step}: {entry.text} of"
            f" {ranks_named(self._sides[side].ranks)}"
        )
        return (
            f"{len(ranks)} stages of a pipeline, which do different things by design ({first}):"
            f" {listed}"
        )

    def _cohorts_until(self, position: Position | None) -> Cohorts:
        """The cohorts of ranks as they are at a position, or in the end."""
        cohorts = Cohorts([sorted(self._traces)])
        for finding in [*self._findings, *self._by_design]:
            if position is None or finding.spot.position <= position:
                cohorts.part(
                    {
                        rank: at
                        for at, sides in enumerate(finding.versions)
                        for rank in self._ranks(sides)
                    }
                )
        return cohorts

    def _ranks(self, sides: Iterable[int]) -> list[int]:
        return sorted(rank for side in sides for rank in self._sides[side].ranks)

    # -- events ------------------------------------------------------------------------------------

    def divergences(self) -> Iterator[tuple[Position, Divergence]]:
        for finding in self._findings[:MOST_PARTINGS]:
            versions = sorted(
                finding.versions, key=lambda sides: (-len(self._ranks(sides)), self._ranks(sides))
            )
            told = [self._version(sides, finding) for sides in versions]
            spot = finding.spot
            shown = next(side for sides in versions for side in sides if side in spot.has)
            before = _entries(
                self._sides[shown].sequence, spot.has[shown][2] - _CONTEXT, spot.has[shown][2]
            )
            remarks = self._afterwards(versions, finding) if finding.kind == "flow" else ()
            yield (
                spot.position,
                Divergence(finding.kind, spot.step, before, tuple(told), tuple(remarks)),
            )

    def _version(self, sides: Sequence[int], finding: Finding) -> Version:
        side, spot = self._sides[sides[0]], finding.spot
        if sides[0] not in spot.has:
            at = side.resumes(spot)
            return Version(
                tuple(self._ranks(sides)), None, _entries(side.sequence, at, at + _AFTER)
            )
        at = spot.has[sides[0]][2]
        (entry,) = _entries(side.sequence, at, at + 1)
        return Version(
            tuple(self._ranks(sides)), entry, _entries(side.sequence, at + 1, at + 1 + _AFTER)
        )

    def _afterwards(self, versions: Sequence[Sequence[int]], finding: Finding) -> Iterator[str]:
        """How much the first and the last version have of it, and how the steps go on."""
        spot = finding.spot
        one, other = (self._sides[sides[0]] for sides in (versions[0], versions[-1]))
        names = [ranks_named(self._ranks(sides)) for sides in (versions[0], versions[-1])]
        counts = [side.count(spot.step, spot.stream) for side in (one, other)]
        if counts[0] != counts[1]:
            stream = self._streams[spot.stream]
            what = f"{stream.kind.label} events{f' on {stream.group}' if stream.group else ''}"
            yield (
                f"in step {spot.step} {names[1]} had {counts[1]} {what}; {names[0]} had {counts[0]}"
            )
        steps = sorted(set(one.sequence.steps.tolist()) & set(other.sequence.steps.tolist()))
        differing = [
            step for step in steps if _of_step(one.sequence, step) != _of_step(other.sequence, step)
        ]
        if len(steps) > 1 and len(differing) == 1:
            yield f"they differ in this step alone, of {len(steps)}"
        elif len(steps) > 1 and differing:
            yield (
                f"they differ in {len(differing)} of {len(steps)} steps: {differing[0]} to"
                f" {differing[-1]}"
            )

    # -- collectives -------------------------------------------------------------------------------

    def mismatches(self) -> Iterator[tuple[Position, Divergence]]:
        """Where the ranks of a group, or the ends of a message, differ in what they must agree on;
        unless they have parted."""
        by_wire: dict[SharedStream, list[int]] = {}
        for rank, sequence in self._traces.items():
            for wire in sequence.calls:
                by_wire.setdefault(wire, []).append(rank)
        together = self.cohorts.all
        for wire, ranks in by_wire.items():
            told: list[dict[int, ComparedCall]] = []
            is_message = wire.source >= 0 or wire.destination >= 0
            # One that has parted has other numbers from there on, and must not hide what differs
            # among the rest.
            for some in [
                ranks,
                *(
                    [rank for rank in ranks if rank in cohort]
                    for cohort in together
                    if not is_message
                ),
            ]:
                found = self._first_mismatch(wire, some)
                if found is not None and found not in told:
                    position = self._position(min(found), found[min(found)])
                    if self._are_together(position, found, is_message=is_message):
                        told.append(found)
                        yield position, self._mismatch(found, position)

    def _first_mismatch(
        self, wire: SharedStream, ranks: Sequence[int]
    ) -> dict[int, ComparedCall] | None:
        """By rank: the record, and what was to agree, of the first number where it does not."""
        if len(ranks) < 2:
            return None
        calls = {rank: self._traces[rank].calls[wire] for rank in ranks}
        first = calls[ranks[0]]
        if all(
            np.array_equal(c.numbers, first.numbers) and np.array_equal(c.agreed, first.agreed)
            for c in calls.values()
        ):
            return None
        numbers = np.concatenate([one.numbers for one in calls.values()])
        agreed = np.concatenate([one.agreed for one in calls.values()])
        order = np.argsort(numbers, kind="stable")
        numbers, agreed = numbers[order], agreed[order]
        starts = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
        wrong = np.flatnonzero(
            np.minimum.reduceat(agreed, starts) != np.maximum.reduceat(agreed, starts)
        )
        if not len(wrong):
            return None
        number, found = int(numbers[starts[wrong[0]]]), {}
        for rank, one in calls.items():
            for at in np.flatnonzero(one.numbers == number)[:1]:
                found[rank] = ComparedCall(
                    int(one.records[at]), int(one.steps[at]), int(one.agreed[at])
                )
        return found

    def _position(self, rank: int, call: ComparedCall) -> Position:
        sequence = self._traces[rank]
        before = int(np.searchsorted(sequence.records, call.record)) - int(
            np.searchsorted(sequence.steps, call.step)
        )
        return call.step, max(0, before)

    def _are_together(
        self, position: Position, found: Mapping[int, ComparedCall], *, is_message: bool
    ) -> bool:
        if is_message:  # its ends need not do the same
            return not any(
                finding.kind == "flow" and finding.spot.position <= position
                for finding in self._findings
            )
        cohorts = self._cohorts_until(position)
        agreed = {rank: call.agreed for rank, call in found.items()}
        parted = cohorts.part(agreed)
        self.cohorts.part(agreed)
        return bool(parted)

    def _mismatch(self, found: Mapping[int, ComparedCall], position: Position) -> Divergence:
        versions: dict[int, list[int]] = {}
        for rank, call in found.items():
            versions.setdefault(call.agreed, []).append(rank)
        told = [
            Version(ranks, _entry(self._traces[ranks[0]], found[ranks[0]].record))
            for ranks in in_order(map(tuple, versions.values()))
        ]
        rank = told[0].ranks[0]
        sequence = self._traces[rank]
        at = int(np.searchsorted(sequence.records, found[rank].record))
        return Divergence("group", position[0], _entries(sequence, at - _CONTEXT, at), tuple(told))


def _entries(sequence: EventSequence, start: int, stop: int) -> tuple[ComparedItem, ...]:
    return tuple(
        _entry(sequence, int(record)) for record in sequence.records[max(0, start) : max(0, stop)]
    )


def _entry(sequence: EventSequence, record: int) -> ComparedItem:
    event = sequence.event(record)
    if event is None:
        return ComparedItem(record, "overwritten since it was compared")
    what = next(
        (
            str(event.fields[key])
            for key in ("op", "text", "reason", "phase", "what")
            if event.fields.get(key)
        ),
        "",
    )
    return ComparedItem(event.number, f"{event.kind} {what}".strip(), event)


def _of_step(sequence: EventSequence, step: int) -> tuple[bytes, ...]:
    chosen = sequence.steps == step
    order = np.argsort(sequence.streams[chosen], kind="stable")
    return sequence.streams[chosen][order].tobytes(), sequence.flow[chosen][order].tobytes()
