"""Reads a folder of dumps, one a rank, as a run: boxes that the doctor examines like any others.

Takes a folder, gives `Dumps`. A rank is the number at the end of a file's name, whatever stands
before it. Some things show only when all ranks are seen: members of groups that gloo does not name,
numbers that no rank has recorded, messages whose beginning is lost, the folder that all lines have
in common. What cannot be known is said in `caveats`.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import COUNTER_RANKS, EntryType
from torchwhere.blackbox.run import BoxRun
from torchwhere.core.errors import TorchwhereError
from torchwhere.flight_recorder.load import Progress, read_all
from torchwhere.flight_recorder.to_boxes import DumpBox
from torchwhere.flight_recorder.unpickle import CAPS, Caps

_FILE = re.compile(
    r"(?P<prefix>.*?)(?P<rank>\d{1,7})(?:\.(?:json|pickle|pkl))?", re.IGNORECASE | re.DOTALL
)
_DEFAULT = "0"  # the name of the default group
_MOST_ABSENT = 1024
_HOW_TO = "Flight recorder dumps are files whose names end in a rank, as nccl_trace_rank_0"


@dataclass(slots=True)
class Dumps(BoxRun):
    """One job's dumps, and what is not in them."""

    noun: ClassVar[str] = "dump"
    notes: list[str] = field(default_factory=list)

    @property
    def dumps(self) -> dict[int, DumpBox]:
        return cast("dict[int, DumpBox]", self.boxes)

    @property
    def cut(self) -> list[int]:
        """Ranks whose dump is not whole: how far they have come is not known."""
        return [rank for rank, box in self.dumps.items() if box.is_cut]

    @property
    def pending(self) -> list[int]:
        """Ranks that have a collective which is known not to be done."""
        return [
            rank
            for rank, box in self.dumps.items()
            if any(each.is_pending for each in box.accounts.values())
        ]

    @property
    def moment_ns(self) -> int | None:
        """The last moment that the dumps know of, if something was pending then, or may have been.

        gloo says of a collective that failed what it says of one that was done. A rank that left no
        dump is likely why.
        """
        may_be = bool(self.missing) and any(
            box.is_of_gloo and not box.is_own for box in self.dumps.values()
        )
        return _newest_ns(self.dumps.values()) or None if self.pending or may_be else None

    def without(self, ranks: Iterable[int]) -> Dumps:
        """The same without some ranks, of which only what is wrong with their dumps is kept."""
        removed = set(ranks)
        left = {rank: box for rank, box in self.boxes.items() if rank not in removed}
        unreadable = [
            *self.unreadable,
            *(box for rank, box in self.boxes.items() if rank in removed),
        ]
        return Dumps(self.folder, left, self.earlier, unreadable, self.notes)

    def caveats(self) -> list[str]:
        return [*BoxRun.caveats(self), *self.notes]


def read_dumps(
    folder: str | Path, *, caps: Caps = CAPS, on_progress: Progress | None = None
) -> Dumps:
    """Read a folder of dumps. Raises `TorchwhereError` when there is none that can be read."""
    folder = Path(folder)
    if not folder.is_dir():
        raise TorchwhereError(f"there is no folder {folder}. {_HOW_TO}")
    files = _files(folder)
    if not files:
        raise TorchwhereError(f"{folder} holds no dump. {_HOW_TO}")
    return read_files(folder, files, caps=caps, on_progress=on_progress)


def read_files(
    folder: Path,
    files: list[tuple[str, int, Path]],
    *,
    caps: Caps = CAPS,
    on_progress: Progress | None = None,
) -> Dumps:
    """Read some files as dumps: what stands before the rank in the name, the rank, the file."""
    boxes: dict[str, dict[int, DumpBox]] = defaultdict(dict)
    unreadable: list[Box] = []
    earlier: list[Path] = []
    read = read_all([(rank, path) for _, rank, path in files], caps, on_progress=on_progress)
    for (prefix, rank, path), box in zip(files, read, strict=True):
        if isinstance(box, str):
            unreadable.append(Box(path=path, problems=[f"refused: {box}"]))
            continue
        known = boxes[prefix].get(rank)
        if known is not None:
            box, known = (box, known) if _newest_ns([box]) >= _newest_ns([known]) else (known, box)
            earlier.append(known.path)
        boxes[prefix][rank] = box
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
    """What may be a dump: prefix, rank, path. Only plain files: a pipe would never end."""
    found = []
    for where, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            match, path = _FILE.fullmatch(name), Path(where, name)
            if (
                match
                and not name.startswith(".")
                and int(match["rank"]) < COUNTER_RANKS
                and path.is_file()
            ):
                found.append((match["prefix"], int(match["rank"]), path))
    return found


def _newest_ns(boxes: Iterable[DumpBox]) -> int:
    return max((int(box.records["t_ns"].max()) for box in boxes if len(box.records)), default=0)


# -- all ranks together ----------------------------------------------------------------------------


def _together(
    folder: Path, boxes: dict[int, DumpBox], earlier: list[Path], unreadable: list[Box]
) -> Dumps:
    notes = _notes(boxes)
    if earlier:
        notes.append(
            f"{len(earlier)} other dumps in the folder, older or of another name, were left out"
        )
    groups = _members(boxes)
    world = 1 + max([*boxes, *(rank for _, ranks in groups for rank in ranks)])
    for box in boxes.values():
        box.meta["world_size"] = world
    notes += _number(boxes, groups)
    notes += _forget_lost_messages(boxes)
    _shorten_lines(boxes)
    return Dumps(
        folder=folder, boxes=dict(boxes), earlier=earlier, unreadable=unreadable, notes=notes
    )


def _members(boxes: dict[int, DumpBox]) -> list[tuple[str, tuple[int, ...]]]:
    """Every group with its ranks. Where no dump names them: of the default group everybody, of
    another one its users."""
    users: dict[str, list[int]] = defaultdict(list)
    for rank, box in boxes.items():
        for name in box.accounts:
            if box.members(name) is None:
                users[name].append(rank)
    for name, ranks in users.items():
        for rank in boxes if name == _DEFAULT else ranks:
            members = _everybody(boxes) if name == _DEFAULT else tuple(ranks)
            boxes[rank].add_group(name, members, desc=boxes[ranks[0]].descs[name])
    return sorted(
        {
            (name, tuple(group["ranks"]))
            for box in boxes.values()
            for name, group in box.groups().items()
        }
    )


def _everybody(boxes: dict[int, DumpBox]) -> tuple[int, ...]:
    """All ranks up to the last one that has a dump; those in between that have none too, unless the
    numbers are absurd."""
    count = max(boxes) + 1
    return tuple(range(count)) if count <= _MOST_ABSENT + 2 * len(boxes) else tuple(boxes)


def _number(boxes: dict[int, DumpBox], groups: list[tuple[str, tuple[int, ...]]]) -> list[str]:
    """Number the collectives of every group from 0, as boxes do, without the numbers that nobody
    has recorded."""
    rows = {rank: _rows_by_group(box) for rank, box in boxes.items()}
    notes = []
    for name, ranks in groups:
        heard = [
            rank for rank in ranks if rank in boxes and boxes[rank].members(name) in (ranks, None)
        ]
        used = [
            rank for rank in heard if name in rows[rank] and boxes[rank].members(name) is not None
        ]
        if not used:
            continue
        seen = np.unique(
            np.concatenate(
                [boxes[rank].records["extra"][rows[rank][name]] for rank in used]
            ).astype(np.int64)
        )
        first = int(seen[0]) - (0 if seen[0] == 0 else 1)
        for rank in used:
            chosen = rows[rank][name]
            boxes[rank].records["extra"][chosen] = first + np.searchsorted(
                seen, boxes[rank].records["extra"][chosen]
            )
            _renumber_account(boxes[rank], name, seen, first)
        notes += _count(boxes, name, heard, used)
    return notes


def _rows_by_group(box: DumpBox) -> dict[str, Any]:
    """Where the collectives of each group are among the records; messages are numbered already."""
    found: dict[str, list[Any]] = defaultdict(list)
    for what in np.unique(box.records["subject"]):
        signature = box.value(int(what))
        if signature["op"] not in ("send", "recv"):
            found[signature["group"]].append(np.flatnonzero(box.records["subject"] == what))
    return {name: np.sort(np.concatenate(parts)) for name, parts in found.items()}


def _renumber_account(box: DumpBox, name: str, seen: Any, first: int) -> None:
    account = box.accounts[name]
    for word in ("issued", "started", "completed", "joined"):
        value = getattr(account, word)
        if value >= 0:
            setattr(account, word, first + int(np.searchsorted(seen, value)))


def _count(boxes: dict[int, DumpBox], name: str, heard: list[int], used: list[int]) -> list[str]:
    """Say how far each rank has come: at least as far as what others have completed, which takes
    all of them."""
    joined = max(boxes[rank].accounts[name].joined for rank in used) + 1
    most = max(boxes[rank].accounts[name].issued for rank in used) + 1
    silent = [rank for rank in heard if rank not in used and boxes[rank].has_lost]
    group = boxes[used[0]].groups()[name]
    for rank in heard:
        box = boxes[rank]
        own = box.accounts[name].issued + 1 if rank in used else most if rank in silent else 0
        group_id = box.add_group(name, tuple(group["ranks"]), desc=group.get("desc"))
        box.dump_tallies[group_id, -1, -1] = max(own, joined)
    return [
        f'{_ranks(silent)}: nothing of group "{name}" is left in the ring; whether it came to'
        f" #{most - 1} there is not known"
    ] * bool(silent)


def _forget_lost_messages(boxes: dict[int, DumpBox]) -> list[str]:
    """Messages are counted from the first one on. Where that is lost on one side, they cannot be
    matched with the other's."""
    lost = {(group, rank) for rank, box in boxes.items() for group in box.lost_messages}
    for rank, box in boxes.items():
        for what in np.unique(box.records["subject"]):
            signature = box.value(int(what))
            group, ends = signature["group"], (rank, signature["peer"])
            if signature["op"] in ("send", "recv") and any((group, end) in lost for end in ends):
                blank = box.intern(EntryType.COLLECTIVE, json.dumps(signature | {"peer": None}))
                box.records["subject"][box.records["subject"] == what] = blank
    ranks = sorted({rank for _, rank in lost})
    return [
        f"{_ranks(ranks)}: the first sends and receives are no longer in the ring; they were not"
        " matched"
    ] * bool(lost)


def _shorten_lines(boxes: dict[int, DumpBox]) -> None:
    """Say files from the folder on that all of them have in common, as boxes do."""
    foreign = [box for box in boxes.values() if not box.is_own]
    files = {
        text.rpartition(":")[0]
        for box in foreign
        for sort, text in box.names.values()
        if sort == EntryType.LINE
    }
    folders = {os.path.dirname(file) for file in files if file.startswith("/")}
    root = os.path.commonpath(folders) if folders else ""
    if len(root) > 1:
        for box in foreign:
            lines = {
                entry_id: text
                for entry_id, (sort, text) in box.names.items()
                if sort == EntryType.LINE
            }
            box.names |= {
                entry_id: (int(EntryType.LINE), text.removeprefix(f"{root}/"))
                for entry_id, text in lines.items()
            }


# -- what dumps cannot say -------------------------------------------------------------------------


def _notes(boxes: dict[int, DumpBox]) -> list[str]:
    said = []
    gloo = [rank for rank, box in boxes.items() if box.is_of_gloo and not box.is_own]
    if gloo:
        said.append(
            "gloo's recorder keeps no sends and receives, no members of groups and no completion,"
            " and calls a reduce_scatter an all_reduce: a fault that shows only there is not seen"
        )
    foreign = [rank for rank, box in boxes.items() if not box.is_own]
    if foreign and not any(boxes[rank].has_frames for rank in foreign):
        said.append("the dumps have no stacks: lines are not known (JSON dumps never have them)")
    if foreign:
        said.append(
            "dumps say what was issued, not where a rank is now; modules, passes, steps, roots and"
            " reduce ops are not in them"
        )
    wrapped = [rank for rank, box in boxes.items() if box.counts.overwritten]
    if wrapped:
        said.append(
            f"the rings of {len(wrapped)} ranks have wrapped: only what all of them still have was"
            " compared"
        )
    return said


def _ranks(ranks: list[int]) -> str:
    said = ", ".join(map(str, ranks[:8])) + (
        f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    )
    return f"rank{'s' * (len(ranks) > 1)} {said}"
