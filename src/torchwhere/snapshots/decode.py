"""Decodes a snapshot, which may come over the network from anywhere.

Takes bytes and returns a `HostSnapshot`, or an `InvalidSnapshot` with the reason. It never raises.
It limits sizes before it unpacks anything, checks the type and range of every value that readers of
a `CallBatch` rely on, and never executes anything. One invalid value makes the whole snapshot
invalid.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.ring import Counts
from torchwhere.blackbox.string_table import Group
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.events import KIND_LABELS, Event
from torchwhere.core.place import Certainty, Place
from torchwhere.diagnose.calls.encode import CallBatch, GroupCreation, RankSummary, StreamSlice
from torchwhere.diagnose.calls.keys import CallSite, Signature, SignatureParser, StreamKey
from torchwhere.processes.status import ProcessStatus
from torchwhere.snapshots.checked import (
    MAX_NUMBER,
    MAX_RANKS,
    MAX_TEXT,
    InvalidError,
    bool_,
    decode_device,
    decode_devices,
    decode_gpus,
    dict_,
    float_,
    int_,
    ints_,
    list_,
    need,
    or_none,
    text_,
    text_or_none,
    time_or_0,
)
from torchwhere.snapshots.encode import (
    ARRAYS,
    HEAD,
    MAGIC,
    MOST_BYTES,
    SEAL,
    VERSION,
    HostSnapshot,
)

_MAX_UNPACKED = 64 << 20
_MAX_CREATED = 64  # ranks of a group that is being created
_MAX_MEMBERS = 4 << 20  # of all groups together
_MAX_TICK_NS = 1 << 24  # a ring of two thousand years
_MAX_FRAMES = 256
_DTYPES = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_VERSIONED = re.compile(rb"TWSNAP(\d\d)|TWLETTR(1)")
_UNKNOWN_CALL = "a call has no signature or call site"


@dataclass(frozen=True, slots=True)
class InvalidSnapshot:
    """The reason why some bytes are not a snapshot."""

    reason: str


def decode_snapshot(data: bytes) -> HostSnapshot | InvalidSnapshot:
    try:
        return _snapshot(data)
    except InvalidError as error:
        return InvalidSnapshot(str(error))
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        return InvalidSnapshot(f"not a snapshot: {type(error).__name__}")


def _snapshot(data: bytes) -> HostSnapshot:
    head, rest = _unpacked(data)
    arrays = _arrays(head["arrays"], rest)
    groups = _groups(head["groups"])
    host, ahead_ns = text_(head["host"], most=256), int_(head["ahead_ns"], low=-MAX_NUMBER)
    signatures = [_signature(value, len(groups)) for value in list_(head["signatures"])]
    call_sites = [_call_site(value) for value in list_(head["call_sites"])]
    summaries = [_rank_summary(value, host, ahead_ns) for value in list_(head["ranks"])]
    batch = CallBatch(
        summaries, **arrays, groups=groups, signatures=signatures, call_sites=call_sites
    )
    _check(batch)
    ranks = {summary.box_summary.rank for summary in summaries}
    need(len(ranks) == len(summaries), "it lists a rank twice")
    statuses = {
        int(rank): _status(value, ahead_ns) for rank, value in dict_(head["statuses"]).items()
    }
    need(statuses.keys() <= ranks, "it has the status of a rank that it does not list")
    return HostSnapshot(
        host=host,
        batch=batch,
        statuses=statuses,
        answers=int_(head["answers"]),
        is_last=bool_(head["is_last"]),
        is_cut=bool_(head["is_cut"]),
        ahead_ns=ahead_ns,
        read_ns=max(0, int_(head.get("read_ns", 0)) - ahead_ns),
        gpus=decode_gpus(head.get("gpus"), ahead_ns),
    )


def _unpacked(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The JSON head, and the bytes of the arrays."""
    need(len(data) <= SEAL.size + MOST_BYTES, f"larger than {MOST_BYTES} bytes")
    _check_version(data)
    need(len(data) >= SEAL.size, "not a snapshot")
    _, length, crc = SEAL.unpack_from(data)
    body = data[SEAL.size :]
    need(length == len(body), "cut short")
    need(zlib.crc32(body) == crc, "damaged")
    inflater = zlib.decompressobj()
    try:
        whole = inflater.decompress(body, _MAX_UNPACKED)
    except zlib.error:
        raise InvalidError("damaged") from None
    is_whole = inflater.eof and not inflater.unused_data
    need(is_whole, f"more than {_MAX_UNPACKED} bytes when unpacked")
    need(len(whole) >= HEAD.size, "no head")
    (head_bytes,) = HEAD.unpack_from(whole)
    end = HEAD.size + head_bytes
    need(end <= len(whole), "no head")
    return dict_(json.loads(whole[HEAD.size : end])), whole[end:]


def _check_version(data: bytes) -> None:
    magic = data[: len(MAGIC)]
    if magic == MAGIC:
        return
    match = _VERSIONED.fullmatch(magic)
    if match is None:
        raise InvalidError("not a snapshot")
    version = int(match[1] or match[2])
    age = "an older" if version < VERSION else "a newer"
    raise InvalidError(
        f"written by {age} torchwhere (format {version}); this version reads format {VERSION}."
        " Install the same version on all hosts and record the run again."
    )


def _arrays(shapes: Any, data: bytes) -> dict[str, npt.NDArray[Any]]:
    """The calls: five arrays of one length, and the pairs that their codes refer to."""
    arrays, at = [], 0
    for name, (width, size) in zip(ARRAYS, list_(shapes), strict=True):
        dtype = np.dtype(_DTYPES[int_(width)])
        need(int_(size) * dtype.itemsize <= len(data) - at, f"{name} are cut short")
        rows = np.frombuffer(data, np.uint8, count=size * width, offset=at).reshape(width, size)
        arrays.append(np.ascontiguousarray(rows.T).view(dtype).reshape(-1))
        at += size * dtype.itemsize
    need(at == len(data), "there are bytes after its end")
    *calls, pairs = arrays
    need(len({len(array) for array in calls}) == 1, "its arrays differ in length")
    need(pairs.dtype.itemsize == 4 and len(pairs) % 2 == 0, "its pairs are incomplete")
    rows_of_pairs: npt.NDArray[Any] = pairs.astype(np.int32).reshape(-1, 2)
    return dict(zip(ARRAYS, [*calls, rows_of_pairs], strict=True))


# -- groups, signatures, call sites ----------------------------------------------------------------


def _groups(values: Any) -> list[Group]:
    groups, members = [], 0
    for name, runs, desc, backend, mesh_dim in list_(values):
        members += sum(int_(count) for _, count, _ in list_(runs))
        need(members <= _MAX_MEMBERS, "its groups are too large")
        group = Group(
            text_(name),
            _members(runs),
            text_(desc),
            text_or_none(backend),
            text_or_none(mesh_dim),
        )
        groups.append(group)
    return groups


def _members(runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    ranks: list[int] = []
    for first, count, step in runs:
        int_(step, low=-MAX_RANKS, high=MAX_RANKS)
        int_(first, high=MAX_RANKS)
        int_(first + (count - 1) * step, high=MAX_RANKS)
        ranks += [first + step * index for index in range(count)]
    return tuple(ranks)


def _signature(value: Any, groups: int) -> Signature:
    description, group = value
    signature, _ = SignatureParser().parse(text_(description))
    if signature is None:
        raise InvalidError("a signature is not a collective")
    return signature._replace(group=int_(group, high=groups))


def _call_site(value: Any) -> CallSite:
    module, pass_, line, beneficiary, call, graph, thread, certainty, param, *flags = value
    # a snapshot from before the last fields lacks them
    is_async, is_shadow, is_replayed, is_on_device = flags + [False] * (4 - len(flags))
    site_id = (
        text_or_none(module),
        int_(pass_, high=256),
        text_or_none(line),
        text_or_none(beneficiary),
    )
    return CallSite(
        site_id,
        or_none(int_, call),
        text_or_none(graph),
        text_or_none(thread),
        Certainty(certainty),
        text_or_none(param),
        bool_(is_async),
        bool_(is_shadow),
        bool_(is_replayed),
        bool_(is_on_device),
    )


# -- ranks -----------------------------------------------------------------------------------------


def _rank_summary(value: Any, host: str, ahead_ns: int) -> RankSummary:
    data = dict_(value)
    since_ns, last, end = or_none(int_, data["in_collective_since_ns"]), data["last"], data["end"]
    creations = list_(data.get("group_creations", []), most=64)
    place = or_none(_place, data["place"])
    return RankSummary(
        box_summary=_box_summary(dict_(data["box_summary"]), host, ahead_ns),
        parts=tuple(map(_stream_slice, list_(data["parts"]))),
        last=(_stream_key(last[:3]), int_(last[3])) if last is not None else None,
        end=_event(end, ahead_ns) if end is not None else None,
        exceptions=tuple(_event(event, ahead_ns) for event in list_(data["exceptions"], most=64)),
        place=place,
        in_collective_since_ns=since_ns - ahead_ns if since_ns is not None else None,
        moved_ns=time_or_0(data.get("moved_ns", 0), ahead_ns),
        unnamed=or_none(ints_, data.get("unnamed")),
        group_creations=tuple(_group_creation(creation, ahead_ns) for creation in creations),
        uses_device=bool_(data.get("uses_device", False)),
        device=decode_device(data.get("device"), ahead_ns, cpu=place, place=_place),
        is_compiling=bool_(data["is_compiling"]),
        has_unknown_replays=bool_(data.get("has_unknown_replays", False)),
        last_line=text_or_none(data["last_line"]),
        steppers=tuple(map(text_, list_(data["steppers"], most=256))),
        steps_per_s=or_none(float_, data["steps_per_s"]),
        last_step=or_none(int_, data["last_step"]),
        start_ns=int_(data["start_ns"]) - ahead_ns,
        tick_ns=int_(data["tick_ns"], low=1, high=_MAX_TICK_NS),
        **{name: int_(data[name]) for name in ("pairs_at", "records", "record", "step")},
    )


def _group_creation(value: Any, ahead_ns: int) -> GroupCreation:
    op, number, ranks, since_ns, place, is_made = list_(value)
    members = None if ranks is None else ints_(ranks, most=_MAX_CREATED, high=MAX_RANKS)
    return GroupCreation(
        text_(op), int_(number), members, int_(since_ns) - ahead_ns, _place(place), bool_(is_made)
    )


def _box_summary(value: dict[str, Any], host: str, ahead_ns: int) -> BoxSummary:
    meta, counts = dict_(value["meta"]), dict_(value["counts"])
    rank, (run_id, restart) = int_(value["rank"], high=MAX_RANKS), value["run"]
    counted = dict_(meta.get("counted", {}))
    checked_meta = {
        "rank": rank,
        "rank_is_assumed": bool_(meta.get("rank_is_assumed", False)),
        "world_size": int_(meta["world_size"], low=1, high=MAX_RANKS + 1),
        "run_id": text_(run_id),
        "store": text_(meta.get("store", "")),
        "restart": int_(restart),
        "started_ns": int_(meta.get("started_ns", 0)) - ahead_ns,
        "folder": text_(meta.get("folder", "")),
        "counted": {text_(name): int_(count) for name, count in counted.items()},
        "devices": decode_devices(meta.get("devices", [])),
        "source_host": host,  # not "host": its process is not visible here
    }
    return BoxSummary(
        path=Path(f"{host}:{text_(value['path'])}"),
        rank=rank,
        run=(run_id, restart),
        is_readable=True,
        last_ns=int_(value["last_ns"]) - ahead_ns,
        lacks_counts=bool_(value["lacks_counts"]),
        checksum=0,  # as for a file that does not exist here: it is not read again
        meta=checked_meta,
        counts=Counts(**{field.name: int_(counts[field.name]) for field in fields(Counts)}),
        problems=tuple(map(text_, list_(value["problems"], most=64))),
    )


def _stream_slice(value: Any) -> StreamSlice:
    *key, issued, first, at, length, signature = value
    return StreamSlice(
        _stream_key(key), int_(issued), int_(first), int_(at), int_(length), int_(signature, low=-1)
    )


def _stream_key(value: Any) -> StreamKey:
    group, source, destination = value
    return StreamKey(
        int_(group),
        int_(source, low=-1, high=MAX_RANKS),
        int_(destination, low=-1, high=MAX_RANKS),
    )


def _event(value: Any, ahead_ns: int) -> Event:
    data = dict_(value)
    need(data["kind"] in KIND_LABELS, "an event has an unknown kind")
    return Event(
        data["kind"],
        int_(data["number"]),
        int_(data["t_ns"]) - ahead_ns,
        _place(data["place"]),
        {text_(name): text_(content) for name, content in dict_(data["fields"]).items()},
    )


def _place(value: Any) -> Place:
    data = dict_(value)
    names = ("module", "line", "framework_line", "graph", "thread", "param")
    return Place(
        rank=int_(data["rank"], low=-1, high=MAX_RANKS),
        step=or_none(int_, data["step"]),
        pass_=text_(data["pass"]),
        call=or_none(int_, data["call"]),
        certainty=Certainty(data["certainty"]),
        # a snapshot from before `framework_line` lacks it
        **{name: text_or_none(data.get(name)) for name in names},
    )


def _status(value: Any, ahead_ns: int) -> ProcessStatus:
    status = ProcessStatus.from_dict(dict_(value))

    def on_this_clock(t_ns: int | None) -> int | None:
        return None if t_ns is None else int_(t_ns - ahead_ns)

    return replace(
        status.shortened(frames=_MAX_FRAMES, characters=MAX_TEXT),
        alive_ns=on_this_clock(status.alive_ns),
        gone_ns=on_this_clock(status.gone_ns),
        stack_ns=on_this_clock(status.stack_ns),
    )


# -- consistency -----------------------------------------------------------------------------------


def _check(batch: CallBatch) -> None:
    """Check that every id refers to something."""
    pairs = batch.pairs
    is_known = (pairs >= 0) & (pairs < [len(batch.signatures), len(batch.call_sites)])
    need(bool(is_known.all()), _UNKNOWN_CALL)
    for summary in batch.rank_summaries:
        for part in summary.parts:
            _check_slice(batch, part, summary.pairs_at)
        keys = {part.key for part in summary.parts}
        need(len(keys) == len(summary.parts), "it lists a stream twice")
        last = summary.last
        has_last = last is None or any(
            part.key == last[0] and 0 <= last[1] - part.first < part.length
            for part in summary.parts
        )
        need(has_last, "the last call of a rank is missing")


def _check_slice(batch: CallBatch, part: StreamSlice, pairs_at: int) -> None:
    need(part.key.group < len(batch.groups), "a collective has no group")
    need(part.signature < len(batch.signatures), _UNKNOWN_CALL)
    is_inside = part.at + part.length <= len(batch.codes)
    need(is_inside and part.first + part.length <= MAX_NUMBER, "calls of a stream are missing")
    codes = batch.codes[part.at : part.at + part.length]
    need(pairs_at + int(codes.max(initial=0)) < max(len(batch.pairs), 1), _UNKNOWN_CALL)
    need(len(batch.pairs) > 0 or not len(codes), _UNKNOWN_CALL)
