"""A snapshot: what the monitor of one host tells that of another, who has no way to read the boxes.

Takes a transcript and what was seen of the processes, gives a few KB a rank. Of each rank it holds
the last `CALLS` collectives (and the last few of every stream), how many it has counted in all,
where it is and how it ended; nothing else of the box. A snapshot stands for itself: it refers to
none before it. Head and lists are JSON, the calls plain arrays, all of it compressed and sealed
with a CRC; `opening.py` reads it and trusts nothing in it.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.events import Event
from torchwhere.diagnose.calls.encode import CallBatch, Encoder, RankSummary, StreamSlice
from torchwhere.diagnose.calls.keys import CallSite, Group
from torchwhere.processes.status import ProcessStatus

MAGIC = b"TWLETTR1"
SEAL = struct.Struct("<8sII")  # magic, length and CRC of what follows
HEAD = struct.Struct("<I")  # length of the JSON head, then the arrays
ARRAYS = ("codes", "steps", "records", "ticks", "pairs")
CALLS = 1024  # of a rank
MOST_BYTES = 4 << 20  # of a snapshot
_OF_A_STREAM = 8  # are kept, however long ago
_MOST_TEXT = 2000  # of an exception
_MOST_FIELDS = 8
_META = ("rank", "world_size", "run_id", "store", "restart", "started_ns", "folder", "counted")


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """What one host has to say."""

    host: str
    batch: CallBatch
    statuses: Mapping[int, ProcessStatus] = field(default_factory=dict)
    answers: int = 0  # the number of the word it answers; 0: it was not asked
    is_last: bool = False  # its processes are gone: there will be no other one
    is_cut: bool = False  # a rank has issued more than is told
    ahead_ns: int = 0  # how far its clock is ahead of the reader's
    read_ns: int = 0  # its wall clock when the boxes were read


def transcribe(boxes: Iterable[Box], *, calls: int = CALLS) -> tuple[CallBatch, bool]:
    """What boxes say of their last `calls` collectives each; and whether that is less than they
    have."""
    whole = Encoder().encode(boxes)
    kept = [_newest(whole, said, calls) for said in whole.rank_summaries]
    return _without(whole, kept), sum(map(len, kept)) < len(whole.codes)


def encode_snapshot(snapshot: HostSnapshot) -> bytes:
    """As bytes to be sent."""
    batch = snapshot.batch
    arrays = [np.ascontiguousarray(getattr(batch, name)) for name in ARRAYS]
    head = json.dumps(_head(snapshot, arrays), separators=(",", ":")).encode()
    body = HEAD.pack(len(head)) + head + b"".join(map(planes, arrays))
    data = zlib.compress(body, 6)
    return SEAL.pack(MAGIC, len(data), zlib.crc32(data)) + data


def planes(array: npt.NDArray[Any]) -> bytes:
    """All first bytes of an array, then all second ones: the upper ones of times and numbers hardly
    change, and pack well."""
    little = array.astype(array.dtype.newbyteorder("<")).reshape(-1)
    return little.view(np.uint8).reshape(little.size, little.itemsize).T.tobytes()


# -- cutting ---------------------------------------------------------------------------------------


def _newest(whole: CallBatch, said: RankSummary, calls: int) -> npt.NDArray[np.int64]:
    """Where the calls of a rank stand that are kept, part by part."""
    parts = [part for part in said.parts if part.length]
    if not parts:
        return np.empty(0, np.int64)
    begin, end = parts[0].at, parts[-1].at + parts[-1].length
    records = whole.records[begin:end]
    least = int(np.partition(records, -calls)[-calls]) if len(records) > calls else 0
    found = []
    for part in parts:
        newer = int((whole.records[part.at : part.at + part.length] >= least).sum())
        stays = max(newer, min(part.length, _OF_A_STREAM))
        found.append(np.arange(part.at + part.length - stays, part.at + part.length))
    return np.concatenate(found)


def _without(whole: CallBatch, kept: Sequence[npt.NDArray[np.int64]]) -> CallBatch:
    """A transcript of some of the calls, with what these refer to and no more."""
    chosen = np.concatenate(kept) if kept else np.empty(0, np.int64)
    pairs: list[npt.NDArray[Any]] = []
    codes: list[npt.NDArray[Any]] = []
    rank_summaries, at, pairs_at = [], 0, 0
    for said, own in zip(whole.rank_summaries, kept, strict=True):
        used, renamed = np.unique(whole.codes[own], return_inverse=True)
        pairs.append(whole.pairs[said.pairs_at + used.astype(np.int64)])
        codes.append(renamed)
        rank_summaries.append(said._replace(parts=_parts(said, own, at), pairs_at=pairs_at))
        at, pairs_at = at + len(own), pairs_at + len(used)
    table = np.concatenate(pairs) if pairs else np.empty((0, 2), np.int32)
    signatures, call_sites = np.unique(table[:, 0]), np.unique(table[:, 1])
    known = {int(old): new for new, old in enumerate(signatures)}
    return CallBatch(
        [
            said._replace(parts=tuple(_renamed(part, known) for part in said.parts))
            for said in rank_summaries
        ],
        (np.concatenate(codes) if codes else np.empty(0)).astype(
            np.uint16 if pairs_at < 1 << 16 else np.uint32
        ),
        whole.steps[chosen],
        whole.records[chosen],
        whole.ticks[chosen],
        np.stack(
            [np.searchsorted(signatures, table[:, 0]), np.searchsorted(call_sites, table[:, 1])],
            axis=1,
        ).astype(np.int32),
        whole.groups,
        [whole.signatures[number] for number in signatures],
        [whole.call_sites[number] for number in call_sites],
    )


def _parts(said: RankSummary, own: npt.NDArray[np.int64], at: int) -> tuple[StreamSlice, ...]:
    found = []
    for part in said.parts:
        stays = int(((own >= part.at) & (own < part.at + part.length)).sum())
        found.append(
            part._replace(first=part.first + part.length - stays, at=at, length=stays)
            if part.length
            else part
        )
        at += stays
    return tuple(found)


def _renamed(part: StreamSlice, known: Mapping[int, int]) -> StreamSlice:
    return part._replace(signature=known.get(part.signature, -1))


# -- as JSON ---------------------------------------------------------------------------------------


def _head(snapshot: HostSnapshot, arrays: Sequence[npt.NDArray[Any]]) -> dict[str, Any]:
    batch = snapshot.batch
    return {
        "host": snapshot.host,
        "answers": snapshot.answers,
        "is_last": snapshot.is_last,
        "is_cut": snapshot.is_cut,
        "ahead_ns": snapshot.ahead_ns,
        "read_ns": snapshot.read_ns,
        "statuses": {rank: seen.to_dict() for rank, seen in snapshot.statuses.items()},
        "arrays": [[array.dtype.itemsize, array.size] for array in arrays],
        "groups": [_group(group) for group in batch.groups],
        "signatures": [[signature.text, signature.group] for signature in batch.signatures],
        "call_sites": [_call_site(call_site) for call_site in batch.call_sites],
        "ranks": [_statement(said) for said in batch.rank_summaries],
    }


def _group(group: Group) -> list[Any]:
    return [group.name, runs(group.ranks), group.desc, group.backend, group.mesh_dim]


def runs(ranks: Sequence[int]) -> list[list[int]]:
    """Ranks as [first, how many, how far apart]: the world is one of these, a row of a mesh too."""
    found: list[list[int]] = []
    for rank in ranks:
        last = found[-1] if found else None
        if last is not None and last[1] == 1 and rank != last[0]:
            last[1:] = [2, rank - last[0]]
        elif last is not None and last[1] > 1 and rank == last[0] + last[1] * last[2]:
            last[1] += 1
        else:
            found.append([rank, 1, 0])
    return found


def _call_site(call_site: CallSite) -> list[Any]:
    return [
        *call_site.site_id,
        call_site.call,
        call_site.graph,
        call_site.thread,
        str(call_site.certainty),
        call_site.param,
        call_site.is_async,
        call_site.is_shadow,
    ]


def _statement(said: RankSummary) -> dict[str, Any]:
    place = said.place.to_dict() if said.place is not None else None
    fields = said._asdict() | {
        "label": _label(said.label),
        "parts": [[*part.key, *part[1:]] for part in said.parts],
    }
    last = [*said.last[0], said.last[1]] if said.last is not None else None
    group_creations = [
        [*made[:4], made.place.to_dict(), made.is_made] for made in said.group_creations
    ]
    events = {"end": _event(said.end), "exceptions": [_event(event) for event in said.exceptions]}
    return fields | {"last": last, "place": place, "group_creations": group_creations} | events


def _label(label: BoxSummary) -> dict[str, Any]:
    meta = {name: label.meta[name] for name in _META if name in label.meta}
    problems = [problem[:_MOST_TEXT] for problem in label.problems[:_MOST_FIELDS]]
    return {
        "path": str(label.path),
        "rank": label.rank,
        "run": list(label.run),
        "last_ns": label.last_ns,
        "lacks_counts": label.lacks_counts or not label.is_readable,
        "meta": meta,
        "counts": asdict(label.counts),
        "problems": problems,
    }


def _event(event: Event | None) -> dict[str, Any] | None:
    if event is None:
        return None
    # What a program has written into its box may be of any size; the texts of it are what a verdict
    # says.
    texts = [
        (name, value[:_MOST_TEXT]) for name, value in event.fields.items() if isinstance(value, str)
    ]
    place, fields = event.place.to_dict(), dict(texts[:_MOST_FIELDS])
    return {
        "kind": event.kind,
        "number": event.number,
        "t_ns": event.t_ns,
        "place": place,
        "fields": fields,
    }
