"""Encodes a snapshot: what the boxes and processes of one host show, in a few KB for each rank.

Monitors send snapshots to each other, because a host may not be able to read the boxes of another,
and save them in the folder of the run. For each rank, a snapshot holds the last `CALLS` collectives
(and the last few of every stream), the total counts, its place, and how it ended. It does not refer
to earlier snapshots. Head and lists are JSON, the calls plain arrays; the whole is compressed and
has a CRC. `decode.py` reads snapshots and trusts nothing in them.
"""

from __future__ import annotations

import json
import socket
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.string_table import Group
from torchwhere.blackbox.summary import JOB_KEYS, BoxSummary
from torchwhere.core.events import Event
from torchwhere.diagnose.calls.encode import CallBatch, Encoder, RankSummary, StreamSlice
from torchwhere.diagnose.calls.keys import CallSite
from torchwhere.gpus.samples import HostGpus
from torchwhere.processes.status import ProcessStatus
from torchwhere.snapshots.checked import as_json, encode_device

VERSION = 2
MAGIC = b"TWSNAP%02d" % VERSION
SEAL = struct.Struct("<8sII")  # magic, then length and CRC of the rest
HEAD = struct.Struct("<I")  # length of the JSON head; the head and the arrays follow
ARRAYS = ("codes", "steps", "records", "ticks", "delays", "pairs")
CALLS = 1024  # of a rank
MOST_BYTES = 4 << 20  # of a snapshot
_STREAM_CALLS = 8  # of each stream, even if they are old
_MAX_TEXT = 2000  # of an exception
_MAX_FIELDS = 8


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """State of the ranks of one host."""

    host: str
    batch: CallBatch
    statuses: Mapping[int, ProcessStatus] = field(default_factory=dict)
    answers: int = 0  # number of the lead's request that it answers; 0: not requested
    is_last: bool = False  # its processes are gone: no other snapshot follows
    is_cut: bool = False  # a rank has issued more calls than the snapshot holds
    ahead_ns: int = 0  # how far its clock is ahead of the reader's clock
    read_ns: int = 0  # its wall clock when the boxes were read
    gpus: HostGpus | None = None  # as its monitor sampled them


def recent_calls(boxes: Iterable[Box], *, calls: int = CALLS) -> tuple[CallBatch, bool]:
    """The last `calls` collectives of each box, and whether a box holds more."""
    whole = Encoder().encode(boxes)
    chosen_calls = [_newest(whole, summary, calls) for summary in whole.rank_summaries]
    return _selected(whole, chosen_calls), sum(map(len, chosen_calls)) < len(whole.codes)


def encode_boxes(boxes: Mapping[int, Box], **facts: Any) -> bytes:
    """A snapshot of this host's boxes with as many calls as fit. `facts` are the other fields of
    `HostSnapshot`."""
    calls, host = CALLS, socket.gethostname()
    while True:
        batch, is_cut = recent_calls(boxes.values(), calls=calls)
        data = encode_snapshot(HostSnapshot(host, batch, is_cut=is_cut, **facts))
        if len(data) <= MOST_BYTES or calls <= 1:
            return data
        calls //= 2


def encode_snapshot(snapshot: HostSnapshot) -> bytes:
    batch = snapshot.batch
    arrays = [np.ascontiguousarray(getattr(batch, name)) for name in ARRAYS]
    head = json.dumps(_head(snapshot, arrays), separators=(",", ":")).encode()
    body = HEAD.pack(len(head)) + head + b"".join(map(planes, arrays))
    data = zlib.compress(body, 6)
    return SEAL.pack(MAGIC, len(data), zlib.crc32(data)) + data


def planes(array: npt.NDArray[Any]) -> bytes:
    """All first bytes of an array, then all second ones: the upper bytes of times and numbers
    rarely change, so they compress well."""
    little = array.astype(array.dtype.newbyteorder("<")).reshape(-1)
    return little.view(np.uint8).reshape(little.size, little.itemsize).T.tobytes()


# -- selecting calls -------------------------------------------------------------------------------


def _newest(whole: CallBatch, summary: RankSummary, calls: int) -> npt.NDArray[np.int64]:
    """Indices of the calls of a rank that the snapshot keeps, stream by stream."""
    slices = [part for part in summary.parts if part.length]
    if not slices:
        return np.empty(0, np.int64)
    records = whole.records[slices[0].at : slices[-1].at + slices[-1].length]
    oldest = int(np.partition(records, -calls)[-calls]) if len(records) > calls else 0
    chosen_calls = []
    for part in slices:
        end = part.at + part.length
        newer = int((whole.records[part.at : end] >= oldest).sum())
        chosen_calls.append(np.arange(end - max(newer, min(part.length, _STREAM_CALLS)), end))
    return np.concatenate(chosen_calls)


def _selected(whole: CallBatch, chosen_calls: Sequence[npt.NDArray[np.int64]]) -> CallBatch:
    """A batch of the kept calls, with only the signatures and call sites that they use."""
    chosen = np.concatenate([np.empty(0, np.int64), *chosen_calls])
    pairs: list[npt.NDArray[Any]] = [np.empty((0, 2), np.int32)]
    codes: list[npt.NDArray[Any]] = [np.empty(0, np.int64)]
    summaries, at, pairs_at = [], 0, 0
    for summary, own in zip(whole.rank_summaries, chosen_calls, strict=True):
        used, renumbered = np.unique(whole.codes[own], return_inverse=True)
        pairs.append(whole.pairs[summary.pairs_at + used.astype(np.int64)])
        codes.append(renumbered)
        summaries.append(summary._replace(parts=_slices(summary, own, at), pairs_at=pairs_at))
        at, pairs_at = at + len(own), pairs_at + len(used)
    table = np.concatenate(pairs)
    signatures, signature_ids = np.unique(table[:, 0], return_inverse=True)
    call_sites, call_site_ids = np.unique(table[:, 1], return_inverse=True)
    new_ids = {int(old): new for new, old in enumerate(signatures)}
    return CallBatch(
        [_with_signatures(summary, new_ids) for summary in summaries],
        np.concatenate(codes).astype(np.uint16 if pairs_at < 1 << 16 else np.uint32),
        whole.steps[chosen],
        whole.records[chosen],
        whole.ticks[chosen],
        whole.delays[chosen],
        np.stack([signature_ids, call_site_ids], axis=1).astype(np.int32),
        whole.groups,
        [whole.signatures[number] for number in signatures],
        [whole.call_sites[number] for number in call_sites],
    )


def _slices(summary: RankSummary, own: npt.NDArray[np.int64], at: int) -> tuple[StreamSlice, ...]:
    """The streams of a rank, reduced to the kept calls."""
    slices = []
    for part in summary.parts:
        length = int(((own >= part.at) & (own < part.at + part.length)).sum())
        if part.length:
            first = part.first + part.length - length
            part = part._replace(first=first, at=at, length=length)
        slices.append(part)
        at += length
    return tuple(slices)


def _with_signatures(summary: RankSummary, new_ids: Mapping[int, int]) -> RankSummary:
    slices = [part._replace(signature=new_ids.get(part.signature, -1)) for part in summary.parts]
    return summary._replace(parts=tuple(slices))


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
        "gpus": snapshot.gpus.to_dict() if snapshot.gpus is not None else None,
        "statuses": {rank: seen.to_dict() for rank, seen in snapshot.statuses.items()},
        "arrays": [[array.dtype.itemsize, array.size] for array in arrays],
        "groups": [_group(group) for group in batch.groups],
        "signatures": [[signature.text, signature.group] for signature in batch.signatures],
        "call_sites": [_call_site(call_site) for call_site in batch.call_sites],
        "ranks": [_rank_summary(summary) for summary in batch.rank_summaries],
    }


def _group(group: Group) -> list[Any]:
    return [group.name, rank_runs(group.ranks), group.desc, group.backend, group.mesh_dim]


def rank_runs(ranks: Sequence[int]) -> list[list[int]]:
    """Ranks as [first, count, step]: the default group and a row of a mesh are one run each."""
    runs: list[list[int]] = []
    for rank in ranks:
        last = runs[-1] if runs else None
        if last is not None and last[1] == 1 and rank != last[0]:
            last[1:] = [2, rank - last[0]]
        elif last is not None and last[1] > 1 and rank == last[0] + last[1] * last[2]:
            last[1] += 1
        else:
            runs.append([rank, 1, 0])
    return runs


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
        call_site.is_replayed,
        call_site.is_on_device,
    ]


def _rank_summary(summary: RankSummary) -> dict[str, Any]:
    last = summary.last
    return summary._asdict() | {
        "box_summary": _box_summary(summary.box_summary),
        "parts": [[*part.key, *part[1:]] for part in summary.parts],
        "last": [*last[0], last[1]] if last is not None else None,
        "place": as_json(summary.place),
        "group_creations": [
            [*creation[:4], creation.place.to_dict(), creation.is_made]
            for creation in summary.group_creations
        ],
        "device": encode_device(summary.device),
        "end": _event(summary.end),
        "exceptions": [_event(event) for event in summary.exceptions],
    }


def _box_summary(box: BoxSummary) -> dict[str, Any]:
    return {
        "path": str(box.path),
        "rank": box.rank,
        "run": list(box.run),
        "last_ns": box.last_ns,
        "lacks_counts": box.lacks_counts or not box.is_readable,
        "meta": {name: box.meta[name] for name in JOB_KEYS if name in box.meta},
        "counts": asdict(box.counts),
        "problems": [problem[:_MAX_TEXT] for problem in box.problems[:_MAX_FIELDS]],
    }


def _event(event: Event | None) -> dict[str, Any] | None:
    if event is None:
        return None
    # A program may write fields of any size into its box; a verdict only uses the texts.
    texts = [
        (name, value[:_MAX_TEXT]) for name, value in event.fields.items() if isinstance(value, str)
    ]
    return {
        "kind": event.kind,
        "number": event.number,
        "t_ns": event.t_ns,
        "place": event.place.to_dict(),
        "fields": dict(texts[:_MAX_FIELDS]),
    }
