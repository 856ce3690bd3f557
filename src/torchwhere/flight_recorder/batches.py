"""Finds the states of calls in one dump, also of those inside a batch.

The recorder never completes the entries inside a batch: the entry that ends the batch has the
state. A dump of active calls leaves that entry out if the batch is complete, and still lists the
entries inside it.

Takes a dump, gives the state of each of its entries. Limit: a batch of one message looks like a
message without a batch. Then the status of the group decides, and the other messages of the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torchwhere.flight_recorder.dump import Dump
from torchwhere.flight_recorder.dump_entry import DumpEntry

_Key = tuple[str, bool, int]  # group, whether it is a message, number


def _key(entry: DumpEntry) -> _Key:
    return entry.group, entry.is_p2p, entry.seq


class BatchStates:
    """The states of the entries of a dump."""

    def __init__(self, dump: Dump, status: Mapping[str, tuple[int, int, int]]) -> None:
        """`status`: of each group, its last enqueued, started and completed call."""
        self._lists_only_active = dump.lists_only_active
        self._status = status
        self._ends = {_key(entry): entry.state for entry in dump.entries if entry.is_end_of_batch}
        self._parts = Counter(map(_key, dump.entries))
        self._last = _key(dump.entries[-1]) if dump.entries else None
        kinds = {(entry.group, entry.is_p2p) for entry in dump.entries}
        # their status mixes the numbers of messages and collectives
        self._mixed = {group for group, is_p2p in kinds if not is_p2p and (group, True) in kinds}
        self._batched = self._groups_with_batches(dump.entries)

    def _groups_with_batches(self, entries: list[DumpEntry]) -> set[str]:
        """Groups whose messages are all in batches.

        The calls of a rank after a pending message are mostly pending too. So if several pending
        messages are each followed by a complete call, these calls are the ends of batches.
        """
        listed = {entry.record_id for entry in entries}
        before_gaps = Counter(
            entry.group
            for entry in entries[:-1]
            if entry.is_p2p and entry.record_id + 1 not in listed
        )
        with_ends = {group for group, is_p2p, _ in self._ends if is_p2p}
        return with_ends | {group for group, count in before_gaps.items() if count > 1}

    def state(self, entry: DumpEntry) -> str:
        """The state of an entry; that of its batch, if it is in one.

        gloo records no states: a call that is not retired is pending.
        """
        if entry.backend == "gloo":
            return "completed" if entry.is_retired else "scheduled"
        state = self._ends.get(_key(entry), entry.state)
        if state != "scheduled" or not self._lists_only_active:
            return state
        return "completed" if self._is_complete(entry) else state

    def _is_complete(self, entry: DumpEntry) -> bool:
        """Whether a listed call of a dump of active calls is complete."""
        enqueued, _, completed = self._status.get(entry.group, (-1, -1, -1))
        if entry.seq <= completed and entry.group not in self._mixed:
            return True
        # the recorder counts a batch as enqueued with its end
        is_open = _key(entry) == self._last and enqueued == entry.seq - 1
        if is_open or _key(entry) in self._ends:
            return False
        is_inside = entry.is_p2p and (entry.group in self._batched or 0 <= enqueued == completed)
        return is_inside or self._parts[_key(entry)] > 1
