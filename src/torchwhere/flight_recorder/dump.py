"""Reads one dump of the flight recorder: pickle or JSON, of any backend, complete or cut short.

Takes a file, gives a `Dump`. Raises only `RefusedFileError`, for a file that is not a dump or not
safe. Malformed entries are left out and counted. All values of a `Dump` have checked types and
bounds: a dump may come from anywhere.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchwhere.blackbox.file_format import COUNTER_RANKS
from torchwhere.flight_recorder.dump_entry import (
    DumpEntry,
    MalformedEntryError,
    lenient_number,
    read_entry,
)
from torchwhere.flight_recorder.issuing import without_false_ends
from torchwhere.flight_recorder.limits import (
    CAPS,
    CutShortError,
    RefusedFileError,
    is_number,
    is_text,
)
from torchwhere.flight_recorder.unpickle import loads

_OLDEST, _NEWEST = (2, 4), (2, 10)
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})")
_RANKS = re.compile(r"\[\s*(\d{1,7}(?:\s*,\s*\d{1,7})*)?\s*\]")  # never `eval`
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}


@dataclass(slots=True)
class Dump:
    """The content of one rank's file."""

    rank: int
    path: Path
    version: str = ""
    # name: description, members
    groups: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    # pg_id: enqueued, started, completed; -1: none
    status: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    entries: list[DumpEntry] = field(default_factory=list)
    malformed: int = 0  # entries that were left out
    has_frames: bool = False
    cut: str | None = None  # why it is incomplete
    own: dict[str, Any] | None = None  # torchwhere's own data, if it wrote the dump
    written_ns: int | None = None  # the time of the file; later than the dump if it is a copy

    @property
    def is_of_gloo(self) -> bool:
        return any(entry.backend == "gloo" for entry in self.entries)

    @property
    def made_ns(self) -> int | None:
        """When its rank made it, or later. None if that is not known.

        The recorder looks at the events of calls that are not retired when it makes a dump. The
        file may be seconds later: the recorder finds the names of all frames before it is written.
        """
        seen_ns = max((entry.seen_ns for entry in self.entries if not entry.is_retired), default=0)
        times_ns = [
            time_ns for time_ns in (self.written_ns, seen_ns or None) if time_ns is not None
        ]
        return min(times_ns, default=None)

    @property
    def lists_only_active(self) -> bool:
        """Whether it lists only calls in flight, as the watchdog often writes it: a call that it
        does not list is complete."""
        if self.own is not None or self.is_of_gloo or not (self.entries or self.status):
            return False
        is_whole = bool(self.entries) and self.entries[0].record_id == 0 and not self._has_gaps
        return not is_whole and all(entry.state != "completed" for entry in self.entries)

    @property
    def _has_gaps(self) -> bool:
        """Whether entries were left out between the first and the last one.

        The recorder never completes the entries inside a batch, so a dump of active calls lists
        them from the first batch on. It leaves out the entries that end a complete batch.
        """
        span = self.entries[-1].record_id - self.entries[0].record_id + 1
        return span > len(self.entries) + self.malformed

    @property
    def has_timing(self) -> bool:
        """Whether it shows which calls the device has reached (TORCH_NCCL_ENABLE_TIMING)."""
        return any(started >= 0 for _, started, _ in self.status.values()) or any(
            entry.state == "started" for entry in self.entries
        )

    @property
    def group_names(self) -> dict[int, str]:
        """The names of groups by `pg_id`, as far as known.

        A `pg_id` is local to its rank. Entries show it. Otherwise it follows from the order in
        which the rank created its groups, which is the order of their numbers. The default group
        is always the first one.
        """
        listed = {entry.pg_id: entry.group for entry in self.entries}
        numbers = [name for name in self.groups if name.isascii() and name.isdigit()]
        created = dict(enumerate(sorted(numbers, key=lambda name: (len(name), name))))
        are_all_numbered = len(created) == len(self.groups)
        if are_all_numbered and listed.items() <= created.items():
            return created
        return ({0: "0"} if "0" in self.groups else {}) | listed

    @property
    def has_lost(self) -> bool:
        """Whether older entries are lost: the ring wrapped or was reset."""
        if self.lists_only_active:
            return False
        listed = {entry.pg_id for entry in self.entries}
        return bool(self.entries and self.entries[0].record_id) or any(
            pg_id not in listed for pg_id in self.status
        )


def read_dump(path: Path, rank: int) -> Dump:
    """Read one file. Raises `RefusedFileError` if nothing in it can be used."""
    try:
        with path.open("rb") as file:
            data = file.read(CAPS.bytes + 1)
            written_ns = os.fstat(file.fileno()).st_mtime_ns
    except OSError as error:
        raise RefusedFileError(f"cannot be read: {error.strerror}") from error
    dump = parse_dump(data, rank, path=path)
    dump.written_ns = written_ns
    return dump


def parse_dump(data: bytes, rank: int, *, path: Path = Path("<bytes>")) -> Dump:
    dump = Dump(rank, path)
    try:
        value = _plain(data)
    except CutShortError as error:
        value, dump.cut = error.partial, str(error)
        if not isinstance(value.get("entries"), list):
            raise
    if not isinstance(value, dict):
        raise RefusedFileError(f"not a dump: it holds a {type(value).__name__} instead of a dict")
    if "version" not in value or not {"entries", "pg_config"} & set(value):
        raise RefusedFileError(
            "not a dump of the flight recorder: it has no version, or neither entries nor groups"
        )
    dump.version = _version(value["version"])
    entries = value.get("entries", [])  # a JSON dump without entries has no such key
    if not isinstance(entries, list):
        raise RefusedFileError(
            "not a dump of the flight recorder: its entries are"
            f" {'null' if entries is None else f'a {type(entries).__name__}'}, not a list"
        )
    dump.groups, dump.status = _groups(value.get("pg_config")), _status(value.get("pg_status"))
    own = value.get("torchwhere")
    dump.own = own if isinstance(own, dict) else None
    _read_entries(dump, entries)
    return dump


def _plain(data: bytes) -> Any:
    if len(data) > CAPS.bytes:
        raise RefusedFileError(
            f"larger than {CAPS.bytes >> 20} MiB, which is more than any dump needs"
        )
    if not data:
        raise RefusedFileError("empty: its rank has not written it yet")
    if data[:1] == b"\x80":
        return loads(data)
    for magic, name in _COMPRESSED.items():
        if data.startswith(magic):
            raise RefusedFileError(f"compressed with {name}: decompress it first")
    if data.lstrip()[:1] == b"{":
        return _json(data)
    raise RefusedFileError("neither a pickle nor JSON")


def _json(data: bytes) -> Any:
    # The parser allocates what it finds, so this counts first. Brackets inside strings count too,
    # which does no harm.
    if data.count(b"[") + data.count(b"{") > CAPS.containers or data.count(b",") > CAPS.items:
        raise RefusedFileError(
            f"more than {CAPS.containers} lists and dicts, or {CAPS.items} items"
        )
    try:
        return json.loads(data.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise RefusedFileError(f"a text that is not UTF-8, at byte {error.start}") from None
    except RecursionError:
        raise RefusedFileError("JSON that is nested too deep") from None
    except ValueError as error:
        raise RefusedFileError(f"JSON that is cut short or damaged: {str(error)[:100]}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


# -- groups and status -----------------------------------------------------------------------------


def _version(value: Any) -> str:
    match = _VERSION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise RefusedFileError("not a dump of the flight recorder: its version is not a number")
    number = int(match[1]), int(match[2])
    if number < _OLDEST or number[0] != _NEWEST[0]:
        raise RefusedFileError(
            f"a dump of version {value}; torchwhere reads versions 2.4 (torch 2.6) and later"
        )
    return str(value)


def _groups(value: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    groups = {}
    for name, group in value.items() if isinstance(value, dict) else ():
        members = _ranks(group.get("ranks")) if isinstance(group, dict) else ()
        if members and is_text(name):
            desc = group.get("desc")
            groups[name] = (desc if is_text(desc) else "", members)
    return groups


def _ranks(value: Any) -> tuple[int, ...]:
    """The members of a group in its order; empty if malformed. Dumps write the list as a
    string."""
    if isinstance(value, str):
        match = _RANKS.fullmatch(value)
        value = [int(rank) for rank in match[1].split(",")] if match and match[1] else []
    if not isinstance(value, list) or not all(is_number(rank, COUNTER_RANKS) for rank in value):
        return ()
    return tuple(value) if len(set(value)) == len(value) else ()


def _status(value: Any) -> dict[int, tuple[int, int, int]]:
    statuses = {}
    for pg_id, status in value.items() if isinstance(value, dict) else ():
        if isinstance(status, dict) and pg_id.isascii() and pg_id.isdigit() and len(pg_id) < 10:
            statuses[int(pg_id)] = (
                lenient_number(status.get("last_enqueued_collective")),
                lenient_number(status.get("last_started_collective")),
                lenient_number(status.get("last_completed_collective")),
            )
    return statuses


# -- entries ---------------------------------------------------------------------------------------


def _read_entries(dump: Dump, values: list[Any]) -> None:
    lines: dict[int, str | None] = {}
    for value in values:
        try:
            entry = read_entry(value, lines)
        except MalformedEntryError:
            dump.malformed += 1
            continue
        dump.entries.append(entry)
        dump.has_frames = dump.has_frames or bool(value.get("frames"))
    dump.entries.sort(key=lambda entry: entry.record_id)
    if dump.own is None:
        dump.entries = without_false_ends(dump.entries, dump.status)
