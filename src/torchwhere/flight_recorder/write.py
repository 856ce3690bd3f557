"""Writes a run as dumps of the flight recorder, one a rank, that PyTorch's own `torchfrtrace`
reads.

Takes a run and a folder. Every entry carries torchwhere's place: in its frame, which `torchfrtrace`
prints, and whole in a key of its own, which it ignores and `read_dumps` reads back. What is written
is what all ranks of a group still have: `torchfrtrace` takes rings that begin at different places
for a fault.

A box knows what was issued and not what was completed, so every state is "scheduled".
`torchfrtrace` matches a message against the whole group; each direction between two ranks is
therefore a group of its own. It knows no place, so that the silent kind of mismatch (same op and
shape, another meaning) stays invisible to it.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.run import BoxRun
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.events import Event, Kind
from torchwhere.core.place import shown
from torchwhere.flight_recorder.schema import RECORDED_DTYPES, RECORDED_OPS

PREFIX = "torchwhere_rank_"
VERSION = "2.10"
_BACKENDS = ("nccl", "gloo", "xccl", "hccl", "rccl")  # those that `torchfrtrace` knows
_OWN = (
    "op",
    "raw_op",
    "group",
    "dtype",
    "shapes",
    "out_shapes",
    "bytes",
    "peer",
    "reduce_op",
    "api",
    "for",
    "async",
)
_DIFFERS = ("step", "call", "rank")  # from step to step, or said elsewhere
# of these it looks at the first tensor alone
_FLATTENED = frozenset({"all_gather", "reduce_scatter", "all_to_all"})
T = TypeVar("T")
Stream = tuple[str, int, int]  # a group; and of a message, from and to, else -1


@dataclass(frozen=True, slots=True)
class WrittenDumps:
    """What was written, and what was not."""

    folder: Path
    ranks: tuple[int, ...]
    entries: int
    left_out: dict[str, int] = field(default_factory=dict)  # why: how many collectives

    def __str__(self) -> str:
        dumps, them = (
            ("1 dump", "it") if len(self.ranks) == 1 else (f"{len(self.ranks)} dumps", "them")
        )
        said = (
            f"{dumps} with {self.entries} entries in {self.folder}. Read {them} with: torchfrtrace"
            f" {self.folder}"
        )
        return said + "".join(
            f"\n  left out: {count} {why}" for why, count in self.left_out.items()
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "ranks": list(self.ranks),
            "entries": self.entries,
            "left_out": self.left_out,
        }


def write_dumps(run: BoxRun, *, folder: str | Path) -> WrittenDumps:
    """Write a run into a folder, which must be new or empty."""
    folder = Path(folder)
    check_empty(folder)
    folder.mkdir(parents=True, exist_ok=True)
    first, entries, left_out = _common_beginnings(run), 0, Counter[str]()
    for rank, box in run.boxes.items():
        dump = _Dump(run, box, first)
        # Protocol 2, as PyTorch writes: no frame, nothing that an old reader would not know. Plain
        # data has no globals.
        (folder / f"{PREFIX}{rank}").write_bytes(pickle.dumps(dump.to_dict(), protocol=2))
        entries += len(dump.entries)
        left_out += dump.left_out
    return WrittenDumps(folder, tuple(sorted(run.boxes)), entries, dict(left_out))


def check_empty(folder: Path) -> None:
    """`torchfrtrace` reads all that is in a folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TorchwhereError(
            f"{folder} is not an empty folder: torchfrtrace would read what is in it. Give"
            " another one"
        )


def _common_beginnings(run: BoxRun) -> dict[tuple[Stream, tuple[int, ...]], int]:
    """Of each stream, the first number that all ranks still have which have any of it."""
    found: dict[tuple[Stream, tuple[int, ...]], int] = {}
    for box in run.boxes.values():
        mine: dict[tuple[Stream, tuple[int, ...]], int] = {}
        for event in box.events(kinds={Kind.COLLECTIVE.label}):
            mine.setdefault(
                (stream(event, box.rank), _members(box, event)), int(event.fields["number"])
            )
        for key, number in mine.items():
            found[key] = max(found.get(key, 0), number)
    return found


def stream(event: Event, rank: int) -> Stream:
    """What a collective is counted in."""
    fields = event.fields
    name, op, peer = str(fields.get("group")), fields.get("op"), fields.get("peer")
    if op not in ("send", "recv"):
        return name, -1, -1
    other = -1 if peer is None else int(peer)
    return (name, rank, other) if op == "send" else (name, other, rank)


def _members(box: Box, event: Event) -> tuple[int, ...]:
    ranks = box.groups().get(str(event.fields.get("group")), {}).get("ranks")
    return tuple(ranks) if isinstance(ranks, list) else ()


class _Dump:
    """One rank's dump in the making."""

    def __init__(
        self, run: BoxRun, box: Box, first: dict[tuple[Stream, tuple[int, ...]], int]
    ) -> None:
        self.run, self.box = run, box
        self.entries: list[dict[str, Any]] = []
        self.left_out: Counter[str] = Counter()
        self._groups: dict[str, dict[str, str]] = {}
        self._ids: dict[str, int] = {}
        self._known: dict[str, Any] = {}
        for event in box.events(kinds={Kind.COLLECTIVE.label}):
            key = stream(event, box.rank)
            if int(event.fields["number"]) < first[key, _members(box, event)]:
                self.left_out["that not all ranks of their group still have"] += 1
                continue
            self._add(event, key)

    def to_dict(self) -> dict[str, Any]:
        newest = dict.fromkeys(self._groups, 0)
        for entry in self.entries:
            newest[entry["process_group"][0]] = entry["collective_seq_id"]
        return {
            "version": VERSION,
            "pg_config": self._groups,
            "comm_lib_version": "",
            "pg_status": {
                str(self._ids[name]): {
                    "last_enqueued_collective": number,
                    "last_started_collective": -1,
                    "last_completed_collective": -1,
                }
                for name, number in newest.items()
            },
            "entries": self.entries,
            "torchwhere": self._own(),
        }

    def _own(self) -> dict[str, Any]:
        """What only torchwhere reads back: its groups, how much was lost, and where the rank is."""
        cursors = self.box.cursors()
        main = [cursor for cursor in cursors if cursor.place.thread == "MainThread"]
        cursor = max(main or cursors, key=lambda each: each.t_ns, default=None)
        groups = [
            {name: group.get(name) for name in ("name", "desc", "ranks", "backend", "mesh_dim")}
            for group in self.box.groups().values()
        ]
        place = cursor.place.to_dict() | {"t_ns": cursor.t_ns} if cursor is not None else None
        return {
            "format": 2,
            "groups": groups,
            "overwritten": self.box.counts.overwritten,
            "place": place,
        }

    def _add(self, event: Event, key: Stream) -> None:
        fields, (name, source, destination) = event.fields, key
        op = str(fields.get("op"))
        is_p2p = source != destination
        members = list(_members(self.box, event))
        if not members or (is_p2p and min(source, destination) < 0):
            self.left_out["of a group or a sender that is not known"] += 1
            return
        if not is_p2p and op not in RECORDED_OPS:
            self.left_out["of a kind that torchfrtrace does not know"] += 1
            return
        desc = str(fields.get("group_desc") or "")
        if is_p2p:
            name, desc = f"{name}:{source}->{destination}", f"{desc} {source}->{destination}"
            members = sorted({source, destination})
            one, other = members.index(source), members.index(destination)
            recorded = f"send {one}->{other}" if op == "send" else f"recv {other}<-{one}"
        else:
            recorded = RECORDED_OPS[op]
        self._groups.setdefault(name, {"name": name, "desc": desc, "ranks": str(members)})
        pg_id = self._ids.setdefault(name, len(self._ids))
        self.entries.append(self._entry(event, recorded, (name, desc), pg_id, is_p2p))

    def _entry(
        self, event: Event, recorded: str, group: tuple[str, str], pg_id: int, is_p2p: bool
    ) -> dict[str, Any]:
        fields, number = event.fields, int(event.fields["number"]) + 1
        inputs, outputs = map(self._once, _sizes(recorded, fields))
        dtype = RECORDED_DTYPES.get(str(fields.get("dtype")), str(fields.get("dtype")))
        backend = next(
            (known for known in _BACKENDS if known in str(fields.get("backend"))), _BACKENDS[0]
        )
        return {
            "frames": self._frames(event),
            "record_id": len(self.entries),
            "pg_id": pg_id,
            "process_group": self._once(group),
            "thread_id": "0",
            "thread_name": event.place.thread or "",
            "collective_seq_id": number,
            "p2p_seq_id": number if is_p2p else 0,
            "op_id": len(self.entries) + 1,
            "profiling_name": self._once(f"{backend}:{recorded}"),
            "time_created_ns": event.t_ns,
            "input_sizes": inputs,
            "input_dtypes": self._once([dtype] * len(inputs)),
            "output_sizes": outputs,
            "output_dtypes": self._once([dtype] * len(outputs)),
            "state": "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": False,
            "timeout_ms": 0,
            "is_p2p": is_p2p,
            "torchwhere": {
                "same": self._same(event),
                **{name: getattr(event.place, name) for name in ("step", "call")},
            }
            | {"number": fields.get("number")},
        }

    def _same(self, event: Event) -> dict[str, Any]:
        """Of a call, all that it has in common with those of other steps."""
        same = {
            name: value for name, value in event.place.to_dict().items() if name not in _DIFFERS
        }
        same |= {name: event.fields.get(name) for name in _OWN}
        return self._once(same)

    def _once(self, thing: T) -> T:
        """One object for all that are the same: a pickle refers to it, and is a third as long."""
        known: T = self._known.setdefault(repr(thing), thing)
        return known

    def _frames(self, event: Event) -> list[dict[str, Any]]:
        """One frame: the user's line, in what torchwhere knows that a stack does not."""
        place = event.place
        where = place.pass_ if place.module is None else f"{place.pass_} of {shown(place.module)}"
        key = place.line, where + (f", step {place.step}" if place.step is not None else "")
        return self._once([_frame(*key)])


def _sizes(recorded: str, fields: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Sizes as the flight recorder has them: of lists of tensors, which its tool does not
    understand, one tensor of all."""
    inputs = fields.get("shapes") or []
    outputs = fields.get("out_shapes") or inputs
    if recorded in _FLATTENED:
        inputs, outputs = (
            [_whole(shapes)] if len(shapes) > 1 else shapes for shapes in (inputs, outputs)
        )
    return inputs, outputs


def _whole(shapes: list[list[int]]) -> list[int]:
    """`[2, 4]` for two tensors of `[4]`; for tensors of several shapes, how many numbers they
    have."""
    return (
        [len(shapes), *shapes[0]]
        if all(shape == shapes[0] for shape in shapes)
        else [sum(map(math.prod, shapes))]
    )


def _frame(line: str | None, name: str) -> dict[str, Any]:
    file, _, number = (line or "").rpartition(":")
    return {"name": name, "filename": file or "?", "line": int(number) if number.isdigit() else 0}
