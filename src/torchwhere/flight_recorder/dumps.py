"""Reads a folder of dumps, one for each rank, as a run: boxes that the doctor can diagnose.

Takes a folder, gives `Dumps`. The rank is the number at the end of a file's name. Some work needs
all ranks: the members of groups that gloo does not name, numbers that no rank has recorded,
messages with a lost beginning, the common folder of all lines. `caveats` lists what dumps lack.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import COUNTER_RANKS, EntryType
from torchwhere.blackbox.run import BoxRun
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.worker_pool import Progress
from torchwhere.diagnose.dump_facts import (
    DumpFact,
    GlooLimits,
    GroupLost,
    MessagesLost,
    NoStacks,
    OnlyActiveCalls,
    OnlyIssuedCalls,
    OtherDumps,
    WrappedRings,
)
from torchwhere.flight_recorder.dump_box import Account, DumpBox
from torchwhere.flight_recorder.load import read_all

_FILE = re.compile(
    r"(?P<prefix>.*?)(?P<rank>\d{1,7})(?:\.(?:json|pickle|pkl))?", re.IGNORECASE | re.DOTALL
)
_DEFAULT = "0"  # the name of the default group
_MOST_ABSENT = 1024
_HOW_TO = "Flight recorder dumps are files whose names end in a rank, such as nccl_trace_rank_0"


@dataclass(slots=True)
class Dumps(BoxRun):
    """The dumps of one job, and facts about what they lack."""

    noun: str = "dump"
    facts: list[DumpFact] = field(default_factory=list)

    @property
    def dumps(self) -> dict[int, DumpBox]:
        return cast("dict[int, DumpBox]", self.boxes)

    @property
    def cut(self) -> list[int]:
        """Ranks with an incomplete dump: their progress is unknown."""
        return [rank for rank, box in self.dumps.items() if box.is_cut]

    @property
    def pending(self) -> list[int]:
        """Ranks with a collective or message that is known to be incomplete."""
        return [rank for rank, box in self.dumps.items() if box.pending]

    @property
    def unwatched(self) -> list[int]:
        """Ranks without a dump, or with an empty one."""
        return sorted([*self.missing, *(r for r, box in self.dumps.items() if box.is_blank)])

    @property
    def shows_pending(self) -> bool:
        """Whether the dumps show what is pending. gloo records a failed collective like a completed
        one, so there nothing pending proves nothing."""
        boxes = self.dumps.values()
        if any(box.is_own for box in boxes):
            return False
        return bool(self.pending) or all(box.has_states for box in boxes)

    @property
    def moment_ns(self) -> int | None:
        """The latest time in the dumps, if a collective was pending then, or may have been.

        gloo records a failed collective like a completed one. A rank without a dump is a likely
        reason for a failure.
        """
        may_be = bool(self.missing) and any(
            box.is_of_gloo and not box.is_own for box in self.dumps.values()
        )
        if not self.pending and not may_be:
            return None
        return _newest_ns(self.dumps.values()) or None

    def without(self, ranks: Iterable[int]) -> Dumps:
        """A copy without some ranks. Their dumps count as unreadable."""
        removed = set(ranks)
        left = {rank: box for rank, box in self.boxes.items() if rank not in removed}
        unreadable = [box for rank, box in self.boxes.items() if rank in removed]
        return replace(self, boxes=left, unreadable=[*self.unreadable, *unreadable])

    def caveats(self) -> list[str]:
        # Not super(): `slots=True` makes a new class, which the closure of super() does not know.
        return [*BoxRun.caveats(self), *map(str, self.facts)]


def read_dumps(folder: str | Path, *, on_progress: Progress | None = None) -> Dumps:
    """Read a folder of dumps. Raises `TorchwhereError` if none can be read."""
    folder = Path(folder)
    if not folder.is_dir():
        raise TorchwhereError(f"there is no folder {folder}. {_HOW_TO}")
    files = _files(folder)
    if not files:
        raise TorchwhereError(f"{folder} holds no dump. {_HOW_TO}")
    return read_files(folder, files, on_progress=on_progress)


def read_files(
    folder: Path,
    files: list[tuple[str, int, Path]],
    *,
    on_progress: Progress | None = None,
) -> Dumps:
    """Read files as dumps. Each is given by the prefix of its name, its rank and its path."""
    boxes: dict[str, dict[int, DumpBox]] = defaultdict(dict)
    unreadable: list[Box] = []
    earlier: list[Path] = []
    results = read_all([(rank, path) for _, rank, path in files], on_progress=on_progress)
    for (prefix, rank, path), box in zip(files, results, strict=True):
        if isinstance(box, str):
            unreadable.append(Box(path=path, problems=[f"refused: {box}"]))
            continue
        newer, older = box, boxes[prefix].get(rank)
        if older is not None:
            if _newest_ns([newer]) < _newest_ns([older]):
                newer, older = older, newer
            earlier.append(older.path)
        boxes[prefix][rank] = newer
    if not boxes:
        first = unreadable[0]
        raise TorchwhereError(
            f"none of the {len(files)} files in {folder} can be read. {first.path.name}:"
            f" {first.problems[0]}"
        )
    chosen = max(
        boxes, key=lambda prefix: (_newest_ns(boxes[prefix].values()), len(boxes[prefix]), prefix)
    )
    earlier += [
        box.path for prefix, others in boxes.items() if prefix != chosen for box in others.values()
    ]
    return _together(folder, dict(sorted(boxes[chosen].items())), earlier, unreadable)


def _files(folder: Path) -> list[tuple[str, int, Path]]:
    """Files that may be dumps: prefix, rank, path. Only plain files: reading a pipe never ends."""
    files = []
    for where, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            match, path = _FILE.fullmatch(name), Path(where, name)
            if match is None or name.startswith(".") or not path.is_file():
                continue
            if int(match["rank"]) < COUNTER_RANKS:
                files.append((match["prefix"], int(match["rank"]), path))
    return files


def _newest_ns(boxes: Iterable[DumpBox]) -> int:
    return max((int(box.records["t_ns"].max()) for box in boxes if len(box.records)), default=0)


# -- all ranks together ----------------------------------------------------------------------------


def _together(
    folder: Path, boxes: dict[int, DumpBox], earlier: list[Path], unreadable: list[Box]
) -> Dumps:
    facts = _facts(boxes)
    if earlier:
        facts.append(OtherDumps(len(earlier)))
    groups = _members(boxes)
    world = 1 + max([*boxes, *(rank for _, ranks in groups for rank in ranks)])
    for box in boxes.values():
        box.meta["world_size"] = world
    _doubt_completion(boxes)
    _add_status(boxes)
    facts += _number(boxes, groups)
    facts += _forget_lost_messages(boxes)
    _shorten_lines(boxes)
    return Dumps(
        folder=folder, boxes=dict(boxes), earlier=earlier, unreadable=unreadable, facts=facts
    )


def _members(boxes: dict[int, DumpBox]) -> list[tuple[str, tuple[int, ...]]]:
    """Every group with its ranks. If no dump has the members: all ranks for the default group, the
    users for another one."""
    users: dict[str, list[int]] = defaultdict(list)
    for rank, box in boxes.items():
        for name in box.accounts:
            if box.members(name) is None:
                users[name].append(rank)
    for name, ranks in users.items():
        for rank in boxes if name == _DEFAULT else ranks:
            members = _all_ranks(boxes) if name == _DEFAULT else tuple(ranks)
            boxes[rank].add_group(name, members, desc=boxes[ranks[0]].descs[name])
    return sorted(
        {
            (name, tuple(group["ranks"]))
            for box in boxes.values()
            for name, group in box.groups().items()
        }
    )


def _all_ranks(boxes: dict[int, DumpBox]) -> tuple[int, ...]:
    """All ranks up to the last one with a dump, also those without one, unless their number is
    absurd."""
    count = max(boxes) + 1
    return tuple(range(count)) if count <= _MOST_ABSENT + 2 * len(boxes) else tuple(boxes)


def _doubt_completion(boxes: dict[int, DumpBox]) -> None:
    """Count completed collectives as pending if no watchdog has confirmed them, and another rank
    has not completed them."""
    first: dict[str, dict[int, int]] = defaultdict(dict)  # pending number, by group and rank
    for rank, box in boxes.items():
        for call in box.pending:
            if call.ends is None:
                first[call.group].setdefault(rank, call.number)
    for rank, box in boxes.items():
        for call in box.unconfirmed:
            numbers = first.get(call.group, {}).items()
            if any(number <= call.number and other != rank for other, number in numbers):
                box.doubt(call)


def _add_status(boxes: dict[int, DumpBox]) -> None:
    """Add the status of each group to what the entries show.

    Not in groups with messages: their status mixes the numbers of messages and collectives.
    """
    with_messages = {group for box in boxes.values() for group, *_ in box.messages}
    with_roots = {
        name for box in boxes.values() for name, account in box.accounts.items() if account.has_root
    }
    for box in boxes.values():
        for name, (issued, started, completed) in box.status.items() if box.has_states else ():
            if name in with_messages:
                continue
            account = box.accounts.setdefault(name, Account())
            account.issued = max(account.issued, issued)
            account.started = max(account.started, started)
            if box.lists_only_active:
                account.completed = max(account.completed, completed)
            if box.lists_only_active and name not in with_roots:
                account.joined = max(account.joined, completed)


def _number(boxes: dict[int, DumpBox], groups: list[tuple[str, tuple[int, ...]]]) -> list[DumpFact]:
    """Number the collectives of every group from 0, as boxes do. Numbers that gloo counts and does
    not record are skipped."""
    rows = {rank: _rows_by_group(box) for rank, box in boxes.items()}
    facts: list[DumpFact] = []
    for name, ranks in groups:
        with_dump = [
            rank for rank in ranks if rank in boxes and boxes[rank].members(name) in (ranks, None)
        ]
        users = [
            rank
            for rank in with_dump
            if name in boxes[rank].accounts and boxes[rank].members(name) is not None
        ]
        if not users:
            continue
        listing = [rank for rank in users if name in rows[rank]]
        numbers = [boxes[rank].records["extra"][rows[rank][name]] for rank in listing]
        has_gaps = not all(boxes[rank].has_states for rank in users)
        numbering = _Numbering.of(numbers) if has_gaps else _Numbering(None, 0)
        for rank, old in zip(listing, numbers, strict=True):
            boxes[rank].records["extra"][rows[rank][name]] = numbering.new(old)
        for rank in users:
            _renumber_account(boxes[rank].accounts[name], numbering)
        facts += _count(boxes, name, with_dump, users)
    return facts


def _rows_by_group(box: DumpBox) -> dict[str, Any]:
    """The rows of each group's collectives; messages are numbered already."""
    rows: dict[str, list[Any]] = defaultdict(list)
    for call_id in np.unique(box.records["subject"]):
        signature = box.value(int(call_id))
        if signature["op"] not in ("send", "recv"):
            rows[signature["group"]].append(np.flatnonzero(box.records["subject"] == call_id))
    return {name: np.sort(np.concatenate(parts)) for name, parts in rows.items()}


@dataclass(frozen=True, slots=True)
class _Numbering:
    """Numbers the collectives of a group from 0."""

    recorded: Any  # the numbers that a rank has recorded, if only these count
    first: int  # the new number of the first of them

    @classmethod
    def of(cls, numbers: list[Any]) -> _Numbering:
        recorded = np.unique(np.concatenate(numbers).astype(np.int64))
        return cls(recorded, max(0, int(recorded[0]) - 1))

    def new(self, old: Any) -> Any:
        if self.recorded is None:
            return old - 1
        return self.first + np.searchsorted(self.recorded, old)


def _renumber_account(account: Account, numbering: _Numbering) -> None:
    for progress in ("issued", "started", "completed", "joined"):
        value = getattr(account, progress)
        if value >= 0:
            setattr(account, progress, int(numbering.new(value)))


def _count(
    boxes: dict[int, DumpBox], name: str, with_dump: list[int], users: list[int]
) -> list[DumpFact]:
    """Set the counter of each rank: at least the collectives that others have completed, since
    these need all ranks."""
    joined = max(boxes[rank].accounts[name].joined for rank in users) + 1
    most = max(boxes[rank].accounts[name].issued for rank in users) + 1
    issued = {rank: boxes[rank].issued(name) for rank in with_dump}
    group = boxes[users[0]].groups()[name]
    for rank in with_dump:
        box, count = boxes[rank], issued[rank]
        group_id = box.add_group(name, tuple(group["ranks"]), desc=group.get("desc"))
        box.dump_counters[group_id, -1, -1] = max(most if count is None else count, joined)
    lost = tuple(
        rank for rank in with_dump if issued[rank] is None and not boxes[rank].lists_only_active
    )
    return [GroupLost(lost, name, most - 1)] if lost else []


def _forget_lost_messages(boxes: dict[int, DumpBox]) -> list[DumpFact]:
    """Remove the peer of messages that cannot be matched: messages count from the first one, and
    one side has lost it."""
    lost = {(group, rank) for rank, box in boxes.items() for group in box.lost_messages}
    for rank, box in boxes.items():
        for call_id in np.unique(box.records["subject"]):
            signature = box.value(int(call_id))
            group, ends = signature["group"], (rank, signature["peer"])
            if signature["op"] in ("send", "recv") and any((group, end) in lost for end in ends):
                blank = box.intern(EntryType.COLLECTIVE, json.dumps(signature | {"peer": None}))
                box.records["subject"][box.records["subject"] == call_id] = blank
    rings = {rank for _, rank in lost if not boxes[rank].lists_only_active}
    return [MessagesLost(tuple(sorted(rings)))] if rings else []


def _shorten_lines(boxes: dict[int, DumpBox]) -> None:
    """Make the paths of files relative to their common folder, as in boxes."""
    foreign = [box for box in boxes.values() if not box.is_own]
    lines = [
        (box, entry_id, text)
        for box in foreign
        for entry_id, (entry_type, text) in box.names.items()
        if entry_type == EntryType.LINE
    ]
    files = {text.rpartition(":")[0] for _, _, text in lines}
    folders = {os.path.dirname(file) for file in files if file.startswith("/")}
    root = os.path.commonpath(folders) if folders else ""
    if len(root) > 1:
        for box, entry_id, text in lines:
            box.names[entry_id] = int(EntryType.LINE), text.removeprefix(f"{root}/")


# -- what dumps lack -------------------------------------------------------------------------------


def _facts(boxes: dict[int, DumpBox]) -> list[DumpFact]:
    foreign = [box for box in boxes.values() if not box.is_own]
    facts: list[DumpFact] = []
    if any(box.is_of_gloo for box in foreign):
        facts.append(GlooLimits())
    has_entries = any(len(box.records) for box in foreign)
    if has_entries and not any(box.has_frames for box in foreign):
        facts.append(NoStacks())
    if foreign:
        facts.append(OnlyIssuedCalls())
    wrapped = sum(bool(box.counts.overwritten) for box in boxes.values())
    if wrapped:
        facts.append(WrappedRings(wrapped))
    only_active = [rank for rank, box in boxes.items() if box.lists_only_active]
    if only_active:
        facts.append(OnlyActiveCalls(tuple(only_active)))
    return facts
