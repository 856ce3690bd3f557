"""A box made from a dump: what a box has, and the progress that only dumps record."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from torchwhere.blackbox.box import Box, Cursor
from torchwhere.blackbox.file_format import EntryType
from torchwhere.diagnose.dump_progress import MessageCount, MessageStream, PendingCall
from torchwhere.flight_recorder.confirmation import Confirmation


@dataclass(slots=True)
class Account:
    """The progress of one rank in one group, from its dump. Numbers of collectives; -1: none."""

    issued: int = -1
    started: int = -1
    completed: int = -1
    joined: int = -1  # the last completed one that implies that all ranks have issued it
    has_root: bool = False  # some of its collectives may complete before all ranks have issued them
    is_doubted: bool = False  # some of its collectives may have been aborted


@dataclass(slots=True)
class DumpBox(Box):
    """A box made from a dump."""

    dump_counters: dict[tuple[int, int, int], int] = field(default_factory=dict)
    dump_cursors: list[Cursor] = field(default_factory=list)
    accounts: dict[str, Account] = field(default_factory=dict)
    has_lost: bool = False
    has_states: bool = False  # whether it records completion
    has_frames: bool = False
    is_of_gloo: bool = False
    is_own: bool = False  # written by torchwhere
    is_cut: bool = False
    lost_messages: set[str] = field(default_factory=set)  # groups whose first messages are lost
    lists_only_active: bool = False
    has_timing: bool = False
    made_ns: int | None = None  # when the rank made the dump, or later
    # by group: enqueued, started, completed; messages count too
    status: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    has_all_names: bool = False  # of the groups in `status`
    pending: list[PendingCall] = field(default_factory=list)
    # Collectives of all ranks that were complete when the dump was written, and not when the
    # watchdog last looked.
    unconfirmed: list[PendingCall] = field(default_factory=list)
    doubted: list[PendingCall] = field(default_factory=list)  # those that count as pending
    confirmation: Confirmation = field(default_factory=Confirmation)
    messages: dict[MessageStream, MessageCount] = field(default_factory=dict)
    descs: dict[str, str] = field(default_factory=dict)  # of groups
    group_ids: dict[str, int] = field(default_factory=dict)

    @property
    def is_blank(self) -> bool:
        """Whether it shows nothing of its rank."""
        has_status = bool(self.status) or not self.has_all_names
        return not len(self.records) and not has_status and not self.is_own

    def counters(self) -> dict[tuple[int, int, int], int]:
        return self.dump_counters

    def cursors(self) -> list[Cursor]:
        return self.dump_cursors

    def intern(self, entry_type: EntryType, text: str) -> int:
        entry_id = len(self.names) + 1
        self.names[entry_id] = int(entry_type), text
        return entry_id

    def add_group(self, name: str, ranks: tuple[int, ...], **texts: str | None) -> int:
        """Add a process group; a known one stays as it is."""
        if name not in self.group_ids:
            self.group_ids[name] = self.intern(
                EntryType.GROUP, json.dumps({"name": name, "ranks": ranks, **texts})
            )
            self._groups = None
        return self.group_ids[name]

    def members(self, name: str) -> tuple[int, ...] | None:
        """The ranks of a group; None if this dump does not have it."""
        group = self.groups().get(name)
        return tuple(group["ranks"]) if group is not None else None

    def doubt(self, call: PendingCall) -> None:
        """Count an unconfirmed call as pending: other ranks have not completed it.

        If a communicator is aborted, its calls end, and the recorder shows them as completed.
        """
        self.doubted.append(call)
        self.pending = sorted([*self.pending, call], key=lambda pending: pending.record)
        account = self.accounts[call.group]
        account.is_doubted = True
        account.completed = min(account.completed, call.number - 1)
        account.joined = min(account.joined, call.number - 1)

    def issued(self, name: str) -> int | None:
        """How many collectives of a group the rank has issued; None if the dump does not show
        it."""
        if name in self.accounts:
            return self.accounts[name].issued + 1
        if self.has_lost:
            return None
        # a group with a status that has no account has messages
        is_listed = not self.lists_only_active or (self.has_all_names and name not in self.status)
        return 0 if is_listed else None
