"""Opens a snapshot, which came over a network from anybody.

Takes bytes, gives a `HostSnapshot`, or a `InvalidSnapshot` that says why. It never raises: sizes
are bounded before anything is unpacked, every value has the type and the range that whoever reads
transcripts relies on, and nothing in a snapshot is ever run. A snapshot is good as a whole or not
at all.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.box import Counts
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.events import KIND_LABELS, Event
from torchwhere.core.place import Certainty, Place
from torchwhere.diagnose.calls.encode import CallBatch, GroupCreation, RankSummary, StreamSlice
from torchwhere.diagnose.calls.keys import CallSite, Group, Signature, Signatures, StreamKey
from torchwhere.processes.status import ProcessStatus
from torchwhere.snapshots.encode import ARRAYS, HEAD, MAGIC, MOST_BYTES, SEAL, HostSnapshot

_MOST_UNPACKED = 64 << 20
_MOST_RANKS = 1 << 20  # as many as a counter can tell apart
_MOST_MADE = 64  # of a group in the making
_MOST_MEMBERS = 4 << 20  # of all groups together
_MOST_NUMBER = 1 << 62
_MOST_TICK_NS = 1 << 24  # a ring of two thousand years
_MOST_TEXT = 1 << 20
_MOST_FRAMES = 256
_DTYPES = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InvalidSnapshot:
    """A snapshot that is none."""

    reason: str


class _InvalidError(Exception):
    """What makes a snapshot none."""


def decode_snapshot(data: bytes) -> HostSnapshot | InvalidSnapshot:
    try:
        return _snapshot(data)
    except _InvalidError as wrong:
        return InvalidSnapshot(str(wrong))
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
    host, ahead_ns = _text(head["host"], most=256), _int(head["ahead_ns"], low=-_MOST_NUMBER)
    signatures = [_signature(each, len(groups)) for each in _list(head["signatures"])]
    call_sites = [_call_site(each) for each in _list(head["call_sites"])]
    rank_summaries = [
        _statement(each, host, ahead_ns) for each in _list(head["ranks"], most=_MOST_RANKS)
    ]
    codes, steps, records, ticks, pairs = arrays
    batch = CallBatch(
        rank_summaries, codes, steps, records, ticks, pairs, groups, signatures, call_sites
    )
    _check(batch)
    ranks = {said.label.rank for said in rank_summaries}
    _need(len(ranks) == len(rank_summaries), "a rank is in it twice")
    statuses = {
        int(rank): _status(value, ahead_ns) for rank, value in _dict(head["statuses"]).items()
    }
    _need(statuses.keys() <= ranks, "it has seen a rank of which it says nothing")
    return HostSnapshot(
        host=host,
        batch=batch,
        statuses=statuses,
        answers=_int(head["answers"]),
        is_last=_bool(head["is_last"]),
        is_cut=_bool(head["is_cut"]),
        ahead_ns=ahead_ns,
        read_ns=max(0, _int(head.get("read_ns", 0)) - ahead_ns),
    )


def _unpacked(data: bytes) -> tuple[dict[str, Any], bytes]:
    _need(len(data) <= SEAL.size + MOST_BYTES, f"larger than {MOST_BYTES} bytes")
    _need(
        len(data) >= SEAL.size and data[: len(MAGIC)] == MAGIC,
        "not a snapshot, or of another version",
    )
    _, length, crc = SEAL.unpack_from(data)
    body = data[SEAL.size :]
    _need(length == len(body), "cut short")
    _need(zlib.crc32(body) == crc, "damaged")
    unpacking = zlib.decompressobj()
    try:
        whole = unpacking.decompress(body, _MOST_UNPACKED)
    except zlib.error:
        raise _InvalidError("damaged") from None
    _need(
        unpacking.eof and not unpacking.unused_data,
        f"more than {_MOST_UNPACKED} bytes when unpacked",
    )
    _need(len(whole) >= HEAD.size, "no head")
    (head_bytes,) = HEAD.unpack_from(whole)
    _need(head_bytes <= len(whole) - HEAD.size, "no head")
    return _dict(json.loads(whole[HEAD.size : HEAD.size + head_bytes])), whole[
        HEAD.size + head_bytes :
    ]


def _arrays(shapes: Any, data: bytes) -> list[npt.NDArray[Any]]:
    """The calls: four arrays of one length, then the pairs that their codes stand for."""
    found, at = [], 0
    for name, (width, size) in zip(ARRAYS, _list(shapes), strict=True):
        dtype = np.dtype(_DTYPES[_int(width)])
        _need(_int(size) * dtype.itemsize <= len(data) - at, f"{name} are cut short")
        rows = np.frombuffer(data, np.uint8, count=size * width, offset=at).reshape(width, size)
        found.append(np.ascontiguousarray(rows.T).view(dtype).reshape(-1))
        at += size * dtype.itemsize
    _need(at == len(data), "something comes after its end")
    *calls, pairs = found
    _need(len({len(array) for array in calls}) == 1, "its arrays are not of one length")
    _need(pairs.dtype.itemsize == 4 and len(pairs) % 2 == 0, "pairs are not pairs")
    return [*calls, pairs.astype(np.int32).reshape(-1, 2)]


# -- words -----------------------------------------------------------------------------------------


def _groups(values: Any) -> list[Group]:
    found, members = [], 0
    for name, ranks, desc, backend, mesh_dim in _list(values):
        members += sum(_int(count) for _, count, _ in _list(ranks))
        _need(members <= _MOST_MEMBERS, "its groups are too large")
        found.append(
            Group(
                _text(name),
                _members(ranks),
                _text(desc),
                _text_or_none(backend),
                _text_or_none(mesh_dim),
            )
        )
    return found


def _members(runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    found: list[int] = []
    for first, count, step in runs:
        step = _int(step, low=-_MOST_RANKS, high=_MOST_RANKS)
        for end in (_int(first), first + (count - 1) * step):
            _int(end, high=_MOST_RANKS)
        found += [first + step * index for index in range(count)]
    return tuple(found)


def _signature(value: Any, groups: int) -> Signature:
    text, group = value
    found, _ = Signatures().read(_text(text))
    _need(found is not None, "something in it is no collective")
    assert found is not None
    return found._replace(group=_int(group, high=groups))


def _call_site(value: Any) -> CallSite:
    module, pass_, line, beneficiary, call, graph, thread, certainty, param, is_async, is_shadow = (
        value
    )
    site_id = (
        _text_or_none(module),
        _int(pass_, high=256),
        _text_or_none(line),
        _text_or_none(beneficiary),
    )
    named = (_text_or_none(graph), _text_or_none(thread))
    flagged = _bool(is_async), _bool(is_shadow)
    return CallSite(
        site_id, _or_none(_int, call), *named, Certainty(certainty), _text_or_none(param), *flagged
    )


# -- ranks -----------------------------------------------------------------------------------------


def _statement(value: Any, host: str, ahead_ns: int) -> RankSummary:
    said = _dict(value)
    label = _label(_dict(said["label"]), host, ahead_ns)
    since, last = _or_none(_int, said["in_collective_since_ns"]), said["last"]
    return RankSummary(
        label=label,
        parts=tuple(_part(each) for each in _list(said["parts"])),
        last=(_key(last[:3]), _int(last[3])) if last is not None else None,
        end=_event(said["end"], ahead_ns) if said["end"] is not None else None,
        exceptions=tuple(_event(each, ahead_ns) for each in _list(said["exceptions"], most=64)),
        place=_or_none(_place, said["place"]),
        in_collective_since_ns=since - ahead_ns if since is not None else None,
        unnamed=tuple(map(_int, _list(said["unnamed"])))
        if said.get("unnamed") is not None
        else None,
        group_creations=tuple(
            _group_creation(each, ahead_ns)
            for each in _list(said.get("group_creations", []), most=64)
        ),
        is_compiling=_bool(said["is_compiling"]),
        last_line=_text_or_none(said["last_line"]),
        steppers=tuple(map(_text, _list(said["steppers"], most=256))),
        steps_per_s=_or_none(_float, said["steps_per_s"]),
        last_step=_or_none(_int, said["last_step"]),
        start_ns=_int(said["start_ns"]) - ahead_ns,
        tick_ns=_int(said["tick_ns"], low=1, high=_MOST_TICK_NS),
        **{name: _int(said[name]) for name in ("pairs_at", "records", "record", "step")},
    )


def _group_creation(value: Any, ahead_ns: int) -> GroupCreation:
    op, number, ranks, since_ns, place, is_made = _list(value)
    members = (
        tuple(_int(rank, high=_MOST_RANKS) for rank in _list(ranks, most=_MOST_MADE))
        if ranks is not None
        else None
    )
    return GroupCreation(
        _text(op), _int(number), members, _int(since_ns) - ahead_ns, _place(place), _bool(is_made)
    )


def _label(value: dict[str, Any], host: str, ahead_ns: int) -> BoxSummary:
    meta, counts = _dict(value["meta"]), _dict(value["counts"])
    rank, (run_id, restart) = _int(value["rank"], high=_MOST_RANKS), value["run"]
    known = {
        "rank": rank,
        "world_size": _int(meta["world_size"], low=1, high=_MOST_RANKS + 1),
        "run_id": _text(run_id),
        "store": _text(meta.get("store", "")),
        "restart": _int(restart),
        "started_ns": _int(meta.get("started_ns", 0)) - ahead_ns,
        "folder": _text(meta.get("folder", "")),
        "counted": {
            _text(name): _int(count) for name, count in _dict(meta.get("counted", {})).items()
        },
        "source_host": host,  # not "host": nobody here can look at its process
    }
    return BoxSummary(
        path=Path(f"{host}:{_text(value['path'])}"),
        rank=rank,
        run=(run_id, restart),
        is_readable=True,
        last_ns=_int(value["last_ns"]) - ahead_ns,
        lacks_counts=_bool(value["lacks_counts"]),
        checksum=0,  # as of a file that is not here: nobody tries to read it again
        meta=known,
        counts=Counts(**{each.name: _int(counts[each.name]) for each in fields(Counts)}),
        problems=tuple(_text(each) for each in _list(value["problems"], most=64)),
    )


def _part(value: Any) -> StreamSlice:
    *key, issued, first, at, length, signature = value
    return StreamSlice(
        _key(key), _int(issued), _int(first), _int(at), _int(length), _int(signature, low=-1)
    )


def _key(value: Any) -> StreamKey:
    group, source, destination = value
    return StreamKey(
        _int(group),
        _int(source, low=-1, high=_MOST_RANKS),
        _int(destination, low=-1, high=_MOST_RANKS),
    )


def _event(value: Any, ahead_ns: int) -> Event:
    said = _dict(value)
    _need(said["kind"] in KIND_LABELS, "an event of no known kind")
    told = {_text(name): _text(text) for name, text in _dict(said["fields"]).items()}
    return Event(
        said["kind"],
        _int(said["number"]),
        _int(said["t_ns"]) - ahead_ns,
        _place(said["place"]),
        told,
    )


def _place(value: Any) -> Place:
    said = _dict(value)
    texts = {
        name: _text_or_none(said[name]) for name in ("module", "line", "graph", "thread", "param")
    }
    return Place(
        rank=_int(said["rank"], low=-1, high=_MOST_RANKS),
        step=_or_none(_int, said["step"]),
        pass_=_text(said["pass"]),
        call=_or_none(_int, said["call"]),
        certainty=Certainty(said["certainty"]),
        **texts,
    )


def _status(value: Any, ahead_ns: int) -> ProcessStatus:
    seen = ProcessStatus.from_dict(_dict(value))
    stack = tuple(line[:_MOST_TEXT] for line in seen.stack[:_MOST_FRAMES])
    alive_ns, gone_ns, stack_ns = (
        _int(moment - ahead_ns) if moment is not None else None
        for moment in (seen.alive_ns, seen.gone_ns, seen.stack_ns)
    )
    return replace(seen, stack=stack, alive_ns=alive_ns, gone_ns=gone_ns, stack_ns=stack_ns)


def _check(batch: CallBatch) -> None:
    """That whoever follows a number comes to something."""
    pairs, codes = batch.pairs, batch.codes
    is_known = (pairs >= 0) & (pairs < [len(batch.signatures), len(batch.call_sites)])
    _need(bool(is_known.all()), "a call of which it does not say what it is")
    for said in batch.rank_summaries:
        told: set[StreamKey] = set()
        for part in said.parts:
            _need(part.key.group < len(batch.groups), "a collective of no group")
            _need(
                part.signature < len(batch.signatures), "a call of which it does not say what it is"
            )
            _need(
                part.at + part.length <= len(codes) and part.first + part.length <= _MOST_NUMBER,
                "calls that are not there",
            )
            own = codes[part.at : part.at + part.length]
            _need(
                said.pairs_at + int(own.max(initial=0)) < max(len(pairs), 1),
                "a call of which it does not say what it is",
            )
            _need(not len(own) or len(pairs) > 0, "a call of which it does not say what it is")
            _need(part.key not in told, "a stream is in it twice")
            told.add(part.key)
        last = said.last
        is_there = last is None or any(
            part.key == last[0] and 0 <= last[1] - part.first < part.length for part in said.parts
        )
        _need(is_there, "a last call that is not there")


# -- values ----------------------------------------------------------------------------------------


def _need(is_so: bool, reason: str) -> None:
    if not is_so:
        raise _InvalidError(reason)


def _int(value: Any, *, low: int = 0, high: int = _MOST_NUMBER) -> int:
    _need(type(value) is int and low <= value < high, "a number that cannot be")
    return int(value)


def _float(value: Any) -> float:
    _need(type(value) in (int, float) and math.isfinite(value), "a number that cannot be")
    return float(value)


def _bool(value: Any) -> bool:
    _need(type(value) is bool, "neither yes nor no")
    return bool(value)


def _text(value: Any, *, most: int = _MOST_TEXT) -> str:
    _need(isinstance(value, str) and len(value) <= most, "a text that is none, or too long")
    return str(value)


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def _list(value: Any, *, most: int = _MOST_RANKS) -> list[Any]:
    _need(isinstance(value, list) and len(value) <= most, "a list that is none, or too long")
    return list(value)


def _dict(value: Any) -> dict[str, Any]:
    _need(isinstance(value, dict), "an object that is none")
    return dict(value)


def _or_none(read: Callable[[Any], T], value: Any) -> T | None:
    return None if value is None else read(value)
