"""Compares the events of many boxes in program order, never by a clock.

Takes boxes, gives a `Comparison`. An event faces the event of the other ranks with the same step,
kind, group and number within them: a rank with an extra event is aligned again in the next step.
The calls of each group and each pair of ranks are also compared by number, since there shapes,
dtypes and operations must be equal. Pipeline stages differ by design and are compared within each
stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.core.grouping import grouped
from torchwhere.core.results import Fact
from torchwhere.diagnose.diff import alignment
from torchwhere.diagnose.diff.alignment import ClassDifference, Position
from torchwhere.diagnose.diff.cohorts import (
    MOST_DIVERGENCES,
    Cohorts,
    ComparedCall,
    ComparedItem,
    Comparison,
    Divergence,
    Version,
    first_mismatch,
    in_order,
)
from torchwhere.diagnose.diff.facts import (
    DifferingSteps,
    EventCounts,
    GraphCounts,
    NoCommonStep,
    NotEnded,
    OtherThreads,
    PipelineStages,
    WindowStarts,
)
from torchwhere.diagnose.diff.sequences import EventSequence, EventStream, Patterns, read_sequences

_CONTEXT = 3  # equal events before a divergence
_AFTER = 2


def compare_events(
    boxes: Mapping[int, Box], ranks: Sequence[int], *, strip: Patterns = (), ignore: Patterns = ()
) -> Comparison:
    """Find where the events of some ranks diverge."""
    sequences, streams = read_sequences(boxes, ranks, strip=strip, ignore=ignore)
    first, facts = _window(sequences)
    facts += _facts(sequences)
    sequences = [sequence.from_step(first) for sequence in sequences]
    search = _EventSearch(sequences, streams)
    divergences = [*search.divergences(), *search.mismatches()]
    divergences.sort(key=lambda placed: placed[0])
    last = max(
        (int(sequence.steps[-1]) for sequence in sequences if len(sequence.steps)), default=None
    )
    return Comparison(
        ranks=tuple(sequence.rank for sequence in sequences),
        compared=sum(len(sequence.flow) for sequence in sequences),
        cohorts=search.cohorts.all,
        divergences=tuple(divergence for _, divergence in divergences[:MOST_DIVERGENCES]),
        steps=None if last is None else (first, last),
        facts=(*facts, *search.facts),
    )


def _window(sequences: Sequence[EventSequence]) -> tuple[int, list[Fact]]:
    """The first step that all ranks recorded completely, and the remark about it."""
    firsts = {
        sequence.rank: sequence.first_step
        for sequence in sequences
        if sequence.first_step is not None
    }
    first = max(firsts.values(), default=0)
    if not any(sequence.is_cut or sequence.first_step != first for sequence in sequences):
        return first, []
    late = tuple(rank for rank, step in firsts.items() if step == first)
    if any(len(sequence.steps) and int(sequence.steps[-1]) >= first for sequence in sequences):
        return first, [WindowStarts(first, late)]
    return first, [NoCommonStep()]


def _facts(sequences: Sequence[EventSequence]) -> Iterator[Fact]:
    running = tuple(sequence.rank for sequence in sequences if not sequence.has_ended)
    if running:
        yield NotEnded(running)
    left_out = sum(sequence.left_out for sequence in sequences)
    if left_out:
        yield OtherThreads(left_out)
    compiled = Counter(sequence.compiled for sequence in sequences)
    if len(compiled) > 1:
        usual = compiled.most_common(1)[0][0]
        others = ((s.rank, s.compiled) for s in sequences if s.compiled != usual)
        yield GraphCounts(usual, tuple(others))


class _EventSearch:
    """Finds the divergences of some sequences."""

    def __init__(self, sequences: Sequence[EventSequence], streams: dict[int, EventStream]) -> None:
        self._sequences = {sequence.rank: sequence for sequence in sequences}
        self._streams = streams
        self._classes = alignment.rank_classes(sequences)
        self.facts: list[Fact] = []
        self._by_design: list[ClassDifference] = []  # differences between pipeline stages
        self._findings = self._find(stages_of(sequences))
        self.cohorts = self._cohorts_at(None)

    def _find(self, stages: Mapping[int, int]) -> list[ClassDifference]:
        all_classes = [range(len(self._classes))]
        if len(set(stages.values())) < 2:
            return self._diverge(all_classes, self._streams)
        # Messages differ from stage to stage: they are left out when all ranks are compared. A
        # difference between whole stages is by design.
        without_p2p = [n for n, stream in self._streams.items() if not stream.is_p2p]
        findings = self._diverge(all_classes, without_p2p)
        self._by_design = [
            finding
            for finding in findings
            if finding.kind == "flow" and self._keeps_stages_whole(stages, finding)
        ]
        findings = [finding for finding in findings if finding not in self._by_design]
        if self._by_design:
            self.facts.append(self._stages_fact(stages))
        return findings or self._diverge(self._classes_by_stage(stages), self._streams)

    def _diverge(
        self, apart: Iterable[Iterable[int]], compared: Iterable[int]
    ) -> list[ClassDifference]:
        return alignment.diverge(self._classes, self._streams, Cohorts(apart), compared=compared)

    def _keeps_stages_whole(self, stages: Mapping[int, int], finding: ClassDifference) -> bool:
        """Whether no stage is in two versions."""
        of_version = [{stages[rank] for rank in self._ranks(sides)} for sides in finding.versions]
        return sum(map(len, of_version)) == len(set().union(*of_version))

    def _classes_by_stage(self, stages: Mapping[int, int]) -> list[list[int]]:
        """Indexes of the rank classes of each stage. Ranks of a class have equal messages, so they
        are of one stage."""
        by_stage = grouped(
            (stages[rank_class.ranks[0]], side) for side, rank_class in enumerate(self._classes)
        )
        return list(by_stage.values())

    def _stages_fact(self, stages: Mapping[int, int]) -> PipelineStages:
        by_stage = grouped((stage, rank) for rank, stage in stages.items())
        aligned, versions = self._by_design[0].aligned, self._by_design[0].versions
        side = next(side for sides in versions for side in sides if side in aligned.of_class)
        at = aligned.of_class[side].at
        (entry,) = _entries(self._classes[side].sequence, at, at + 1)
        return PipelineStages(
            stages=tuple(tuple(by_stage[stage]) for stage in sorted(by_stage)),
            step=aligned.step,
            first_event=entry.text,
            first_ranks=tuple(self._classes[side].ranks),
        )

    def _cohorts_at(self, position: Position | None) -> Cohorts:
        """The cohorts of ranks at a position; None for the end."""
        cohorts = Cohorts([sorted(self._sequences)])
        for finding in [*self._findings, *self._by_design]:
            if position is None or finding.aligned.position <= position:
                versions = enumerate(finding.versions)
                cohorts.split({rank: at for at, sides in versions for rank in self._ranks(sides)})
        return cohorts

    def _ranks(self, sides: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(rank for side in sides for rank in self._classes[side].ranks))

    # -- events ------------------------------------------------------------------------------------

    def divergences(self) -> Iterator[tuple[Position, Divergence]]:
        for finding in self._findings[:MOST_DIVERGENCES]:
            versions = sorted(
                finding.versions, key=lambda sides: (-len(self._ranks(sides)), self._ranks(sides))
            )
            aligned = finding.aligned
            side = next(side for sides in versions for side in sides if side in aligned.of_class)
            at = aligned.of_class[side].at
            before = _entries(self._classes[side].sequence, at - _CONTEXT, at)
            facts = self._going_on(versions, finding) if finding.kind == "flow" else ()
            shown = tuple(self._version(sides, finding) for sides in versions)
            yield (
                aligned.position,
                Divergence(finding.kind, aligned.step, before, shown, tuple(facts)),
            )

    def _version(self, sides: Sequence[int], finding: ClassDifference) -> Version:
        rank_class, ranks = self._classes[sides[0]], self._ranks(sides)
        event = finding.aligned.of_class.get(sides[0])
        if event is None:
            at = rank_class.resumes_at(finding.aligned)
            return Version(ranks, None, _entries(rank_class.sequence, at, at + _AFTER))
        entry, *after = _entries(rank_class.sequence, event.at, event.at + 1 + _AFTER)
        return Version(ranks, entry, tuple(after))

    def _going_on(
        self, versions: Sequence[Sequence[int]], finding: ClassDifference
    ) -> Iterator[Fact]:
        """Event counts of the first and the last version in the step, and the steps they differ
        in."""
        aligned = finding.aligned
        most, least = (self._classes[sides[0]] for sides in (versions[0], versions[-1]))
        most_events, least_events = (
            side.count(aligned.step, aligned.stream) for side in (most, least)
        )
        if most_events != least_events:
            stream = self._streams[aligned.stream]
            yield EventCounts(
                step=aligned.step,
                kind=stream.kind.label,
                group=stream.group,
                minority=self._ranks(versions[-1]),
                minority_events=least_events,
                majority=self._ranks(versions[0]),
                majority_events=most_events,
            )
        steps = sorted(set(most.sequence.steps.tolist()) & set(least.sequence.steps.tolist()))
        differing = [
            step
            for step in steps
            if _of_step(most.sequence, step) != _of_step(least.sequence, step)
        ]
        if len(steps) > 1 and differing:
            yield DifferingSteps(len(differing), len(steps), differing[0], differing[-1])

    # -- collectives -------------------------------------------------------------------------------

    def mismatches(self) -> Iterator[tuple[Position, Divergence]]:
        """The first call of each group or pair of ranks that should agree and does not. Ranks that
        diverged before it are not compared."""
        by_stream = grouped(
            (stream, rank)
            for rank, sequence in self._sequences.items()
            for stream in sequence.calls
        )
        cohorts = self.cohorts.all
        for stream, ranks in by_stream.items():
            reported: list[dict[int, ComparedCall]] = []
            subsets = [ranks]
            if not stream.is_p2p:
                # A rank that diverged has other numbers from there on. It must not hide a
                # mismatch among the other ranks.
                subsets += [[rank for rank in ranks if rank in cohort] for cohort in cohorts]
            for subset in subsets:
                calls = first_mismatch({r: self._sequences[r].calls[stream] for r in subset})
                if calls is None or calls in reported:
                    continue
                position = self._position(min(calls), calls[min(calls)])
                if self._are_together(position, calls, is_p2p=stream.is_p2p):
                    reported.append(calls)
                    yield position, self._mismatch(calls, position)

    def _position(self, rank: int, call: ComparedCall) -> Position:
        sequence = self._sequences[rank]
        before = int(np.searchsorted(sequence.records, call.record)) - int(
            np.searchsorted(sequence.steps, call.step)
        )
        return call.step, max(0, before)

    def _are_together(
        self, position: Position, calls: Mapping[int, ComparedCall], *, is_p2p: bool
    ) -> bool:
        """Whether ranks that disagree were in one cohort until then."""
        if is_p2p:  # sender and receiver differ anyway: look for an earlier divergence
            return not any(
                finding.kind == "flow" and finding.aligned.position <= position
                for finding in self._findings
            )
        agreed = {rank: call.agreed for rank, call in calls.items()}
        splits = self._cohorts_at(position).split(agreed)
        self.cohorts.split(agreed)
        return bool(splits)

    def _mismatch(self, calls: Mapping[int, ComparedCall], position: Position) -> Divergence:
        by_version = grouped((call.agreed, rank) for rank, call in calls.items())
        versions = tuple(
            Version(ranks, _entry(self._sequences[ranks[0]], calls[ranks[0]].record))
            for ranks in in_order(map(tuple, by_version.values()))
        )
        rank = versions[0].ranks[0]
        sequence = self._sequences[rank]
        at = int(np.searchsorted(sequence.records, calls[rank].record))
        return Divergence("group", position[0], _entries(sequence, at - _CONTEXT, at), versions)


def _entries(sequence: EventSequence, start: int, stop: int) -> tuple[ComparedItem, ...]:
    return tuple(
        _entry(sequence, int(record)) for record in sequence.records[max(0, start) : max(0, stop)]
    )


def _entry(sequence: EventSequence, record: int) -> ComparedItem:
    event = sequence.event(record)
    if event is None:
        return ComparedItem(record, "overwritten since it was compared")
    detail = str(event.fields.get("op") or event.detail)
    return ComparedItem(event.number, f"{event.kind} {detail}".rstrip(), event)


def _of_step(sequence: EventSequence, step: int) -> tuple[bytes, ...]:
    chosen = sequence.steps == step
    order = np.argsort(sequence.streams[chosen], kind="stable")
    return sequence.streams[chosen][order].tobytes(), sequence.flow[chosen][order].tobytes()


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
