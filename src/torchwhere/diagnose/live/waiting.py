"""Who waits for whom, by the counts alone: a rank that stands still in a collective which others
have not issued yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torchwhere.blackbox.live_box import Issued, LiveBox


@dataclass(frozen=True, slots=True)
class Waiting:
    """For whom each rank waits, and who is to blame: those waited for who do not wait
    themselves."""

    waits: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def blamed(self) -> frozenset[int]:
        # thousands may wait for the same thousands
        shared = {id(others): others for others in self.waits.values()}
        awaited = {other for others in shared.values() for other in others}
        return frozenset(awaited - set(self.waits) or awaited)  # in a circle, everybody

    def of(self, ranks: set[int]) -> Waiting:
        """Those of some ranks alone."""
        return Waiting({rank: others for rank, others in self.waits.items() if rank in ranks})


def who_waits(glances: Mapping[int, LiveBox], still: Iterable[int]) -> Waiting:
    """Of the ranks that stand still, those whose last collective others of its group have yet to
    issue."""
    behind: dict[tuple[object, int], tuple[int, ...]] = {}  # many wait in the same one
    found = {}
    for rank in still:
        issued = glances[rank].issued()
        if issued is None:
            continue
        key = issued.stream, issued.number
        if key not in behind:
            behind[key] = _behind(issued, glances)
        if behind[key]:
            found[rank] = behind[key]
    return Waiting(found)


def _behind(issued: Issued, glances: Mapping[int, LiveBox]) -> tuple[int, ...]:
    """Who has not issued it. Of ranks without a box nothing is known."""
    stream = issued.stream
    members = (stream.source, stream.destination) if stream.source >= 0 else issued.group.ranks
    return tuple(
        rank
        for rank in members
        if rank in glances and glances[rank].counts().get(stream, 0) <= issued.number
    )
