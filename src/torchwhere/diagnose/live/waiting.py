"""Which ranks wait for which, from the counters alone: a stalled rank waits for the ranks that have
not reached the last collective that it has reached. A CPU reaches a collective when it issues it; a
collective on a device is reached when the device comes to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torchwhere.blackbox.issued import Issued
from torchwhere.blackbox.live_box import LiveBox


@dataclass(frozen=True, slots=True)
class Waiting:
    """The ranks that each rank waits for."""

    waits: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def blamed(self) -> frozenset[int]:
        """Ranks that others wait for and that do not wait themselves; in a cycle, all of it."""
        # thousands of ranks may share one tuple of thousands
        shared = {id(others): others for others in self.waits.values()}
        awaited = {other for others in shared.values() for other in others}
        return frozenset(awaited - set(self.waits) or awaited)

    def of(self, ranks: set[int]) -> Waiting:
        """Only the waits of these ranks."""
        return Waiting({rank: others for rank, others in self.waits.items() if rank in ranks})


def waiting_ranks(boxes: Mapping[int, LiveBox], still: Iterable[int]) -> Waiting:
    """The ranks among `still` whose last collective other members have not reached."""
    behind: dict[tuple[object, int], tuple[int, ...]] = {}  # many ranks wait in the same call
    waits = {}
    for rank in still:
        issued = boxes[rank].arrived()
        if issued is None:
            continue
        key = issued.stream, issued.number
        if key not in behind:
            behind[key] = _behind(issued, boxes)
        if behind[key]:
            waits[rank] = behind[key]
    return Waiting(waits)


def _behind(issued: Issued, boxes: Mapping[int, LiveBox]) -> tuple[int, ...]:
    """Members that have not reached the call. Ranks without a box are unknown and left out."""
    stream = issued.stream
    members = (stream.source, stream.destination) if stream.source >= 0 else issued.group.ranks
    return tuple(
        rank
        for rank in members
        if rank in boxes and boxes[rank].counts().get(stream, 0) <= issued.number
    )
