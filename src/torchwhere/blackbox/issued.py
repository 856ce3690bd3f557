"""The last collective of a rank, from the counters of its streams and one record."""

from __future__ import annotations

from dataclasses import dataclass

from torchwhere.blackbox.file_format import STREAM_ID_SHIFT, Record, unpack_stream
from torchwhere.blackbox.live_names import BoxNames
from torchwhere.blackbox.string_table import Group, StreamName
from torchwhere.core.events import Kind


@dataclass(frozen=True, slots=True)
class Issued:
    """The last collective that a rank issued."""

    op: str
    group: Group
    number: int
    stream: StreamName


def matched_call(names: BoxNames, record: Record | None, counts: dict[int, int]) -> Issued | None:
    """The collective of a record, if the count of a stream of its group ends with it. `counts` has
    the stream words."""
    if record is None or record.kind != Kind.COLLECTIVE:
        return None
    op, group_name = names.op(record.subject)
    for stream, count in reversed(counts.items()):
        group = names.groups.get(stream >> STREAM_ID_SHIFT)
        if group is not None and group.name == group_name and count == record.extra + 1:
            return Issued(op, group, record.extra, stream_name(names, stream))
    return None


def stream_name(names: BoxNames, stream: int) -> StreamName:
    group_id, source, destination = unpack_stream(stream)
    return StreamName(names.groups[group_id].name, source, destination)
