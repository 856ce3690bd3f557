"""Writes a run as dumps of the flight recorder, one for each rank, for PyTorch's `torchfrtrace`.

Takes a run and a folder. Every entry carries torchwhere's place: in its frame, which `torchfrtrace`
prints, and in a key of its own, which `torchfrtrace` ignores and `read_dumps` reads back. Writes
only calls that all ranks of a group still hold: `torchfrtrace` reports rings that begin at
different calls as a fault.

A box records issued calls and not completed ones, so every state is "scheduled". `torchfrtrace`
matches a message against the whole group; therefore each direction between two ranks gets its own
group. It does not know places, so it cannot find a silent mismatch (same op and shape, different
meaning).
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torchwhere.blackbox.box import SIGNATURE_KEYS, Box, training_cursor
from torchwhere.blackbox.run import BoxRun
from torchwhere.blackbox.string_table import StreamName, ranks_of, stream_ends
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.events import Event, Kind
from torchwhere.core.place import shown
from torchwhere.core.sanitize import plural
from torchwhere.flight_recorder.schema import RECORDED_DTYPES, RECORDED_OPS

PREFIX = "torchwhere_rank_"
VERSION = "2.10"
_BACKENDS = ("nccl", "gloo", "xccl", "hccl", "rccl")  # those that `torchfrtrace` knows
_OWN_FIELDS = (*SIGNATURE_KEYS, "for", "async")
_VARYING = ("step", "call", "rank")  # differ from step to step, or are stored elsewhere
# `torchfrtrace` compares only their first tensor
_FLATTENED = frozenset({"all_gather", "reduce_scatter", "all_to_all"})
T = TypeVar("T")
StreamOfRanks = tuple[StreamName, tuple[int, ...]]  # with the members of the group


@dataclass(frozen=True, slots=True)
class WrittenDumps:
    """A summary of written dumps.

    Attributes:
        folder: The folder with the dumps.
        ranks: The ranks that have a dump.
        entries: The number of entries in all dumps.
        left_out: The number of collectives that were left out, by reason.
    """

    folder: Path
    ranks: tuple[int, ...]
    entries: int
    left_out: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        count = len(self.ranks)
        text = (
            f"{plural(count, 'dump')} with {self.entries} entries in {self.folder}. Read"
            f" {'it' if count == 1 else 'them'} with: torchfrtrace {self.folder}"
        )
        left_out = [f"\n  left out: {number} {why}" for why, number in self.left_out.items()]
        return text + "".join(left_out)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as values for JSON."""
        return {
            "folder": str(self.folder),
            "ranks": list(self.ranks),
            "entries": self.entries,
            "left_out": self.left_out,
        }


def write_dumps(run: BoxRun, *, folder: str | Path) -> WrittenDumps:
    """Write a run as flight recorder dumps, which `torchfrtrace` reads.

    Args:
        run: The run, from `torchwhere.read_run`.
        folder: The folder for the dumps. It must be new or empty.

    Raises:
        TorchwhereError: The folder is not empty.

    Example:
        print(write_dumps(torchwhere.read_run("run/"), folder="dumps/"))
    """
    folder = Path(folder)
    check_empty(folder)
    folder.mkdir(parents=True, exist_ok=True)
    first, entries, left_out = _common_beginnings(run), 0, Counter[str]()
    for rank, box in run.boxes.items():
        dump = _Dump(run, box, first)
        # Protocol 2, as PyTorch writes: no frames, so that old readers can read it. Plain data
        # needs no globals.
        (folder / f"{PREFIX}{rank}").write_bytes(pickle.dumps(dump.to_dict(), protocol=2))
        entries += len(dump.entries)
        left_out += dump.left_out
    return WrittenDumps(folder, tuple(sorted(run.boxes)), entries, dict(left_out))


def check_empty(folder: Path) -> None:
    """Require an empty folder, since `torchfrtrace` reads all files of it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TorchwhereError(
            f"{folder} is not an empty folder: torchfrtrace would read the files in it. Choose"
            " another folder"
        )


def _common_beginnings(run: BoxRun) -> dict[StreamOfRanks, int]:
    """For each stream the first number that all its ranks still hold."""
    latest: dict[StreamOfRanks, int] = {}
    for box in run.boxes.values():
        firsts: dict[StreamOfRanks, int] = {}
        for event in box.events(kinds={Kind.COLLECTIVE.label}):
            key = _stream(event, box.rank), _members(box, event)
            firsts.setdefault(key, int(event.fields["number"]))
        for key, number in firsts.items():
            latest[key] = max(latest.get(key, 0), number)
    return latest


def _stream(event: Event, rank: int) -> StreamName:
    """The stream in which a collective is numbered."""
    fields = event.fields
    peer = -1 if fields.get("peer") is None else int(fields["peer"])
    ends = stream_ends(str(fields.get("op")), rank=rank, peer=peer)
    return StreamName(str(fields.get("group")), *ends)


def _members(box: Box, event: Event) -> tuple[int, ...]:
    return ranks_of(box.groups().get(str(event.fields.get("group")), {}).get("ranks"))


class _Dump:
    """Builds the dump of one rank."""

    def __init__(self, run: BoxRun, box: Box, first: dict[StreamOfRanks, int]) -> None:
        self.run, self.box = run, box
        self.entries: list[dict[str, Any]] = []
        self.left_out: Counter[str] = Counter()
        self._groups: dict[str, dict[str, str]] = {}
        self._ids: dict[str, int] = {}
        self._shared: dict[str, Any] = {}
        for event in box.events(kinds={Kind.COLLECTIVE.label}):
            key = _stream(event, box.rank)
            if int(event.fields["number"]) < first[key, _members(box, event)]:
                self.left_out["that not all ranks of their group still hold"] += 1
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
        """The data that only torchwhere reads back: groups, lost records, the rank's place."""
        cursor = training_cursor(self.box, self.box.cursors())
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

    def _add(self, event: Event, key: StreamName) -> None:
        fields, (name, source, destination) = event.fields, key
        op = str(fields.get("op"))
        is_p2p = source != destination
        members = list(_members(self.box, event))
        if not members or (is_p2p and min(source, destination) < 0):
            self.left_out["of an unknown group or sender"] += 1
            return
        if not is_p2p and op not in RECORDED_OPS:
            self.left_out["of a kind that torchfrtrace does not know"] += 1
            return
        desc = str(fields.get("group_desc") or "")
        if is_p2p:
            name, desc = f"{name}:{source}->{destination}", f"{desc} {source}->{destination}"
            members = sorted({source, destination})
            from_, to = members.index(source), members.index(destination)
            recorded = f"send {from_}->{to}" if op == "send" else f"recv {to}<-{from_}"
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
        recorded_backend = str(fields.get("backend"))
        backend = next((name for name in _BACKENDS if name in recorded_backend), _BACKENDS[0])
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
                "step": event.place.step,
                "call": event.place.call,
                "number": fields.get("number"),
            },
        }

    def _same(self, event: Event) -> dict[str, Any]:
        """The data of a call that repeats in other steps."""
        place = event.place.to_dict()
        same = {name: value for name, value in place.items() if name not in _VARYING}
        same |= {name: event.fields.get(name) for name in _OWN_FIELDS}
        return self._once(same)

    def _once(self, value: T) -> T:
        """One object for equal values: the pickle refers to it and is a third as long."""
        shared: T = self._shared.setdefault(repr(value), value)
        return shared

    def _frames(self, event: Event) -> list[dict[str, Any]]:
        """One frame: the user's line, with torchwhere's place as the function name."""
        place = event.place
        where = place.pass_ if place.module is None else f"{place.pass_} of {shown(place.module)}"
        key = place.line, where + (f", step {place.step}" if place.step is not None else "")
        return self._once([_frame(*key)])


def _sizes(recorded: str, fields: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Sizes as the flight recorder writes them. `torchfrtrace` does not read lists of tensors: they
    become one tensor."""
    inputs = fields.get("shapes") or []
    outputs = fields.get("out_shapes") or inputs
    if recorded in _FLATTENED:
        inputs, outputs = (
            [_whole(shapes)] if len(shapes) > 1 else shapes for shapes in (inputs, outputs)
        )
    return inputs, outputs


def _whole(shapes: list[list[int]]) -> list[int]:
    """`[2, 4]` for two tensors of `[4]`; the number of elements for tensors of several shapes."""
    if all(shape == shapes[0] for shape in shapes):
        return [len(shapes), *shapes[0]]
    return [sum(map(math.prod, shapes))]


def _frame(line: str | None, name: str) -> dict[str, Any]:
    file, _, number = (line or "").rpartition(":")
    return {"name": name, "filename": file or "?", "line": int(number) if number.isdigit() else 0}
