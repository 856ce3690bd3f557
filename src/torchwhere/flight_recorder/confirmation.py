"""Finds calls that ended without proof that they completed: they may have been aborted.

The watchdog of a rank looks at all calls ten times a second, and retires those that are complete.
If a communicator is aborted, its calls end too, and the recorder shows them as completed. So a
call is confirmed if the watchdog retired it within its timeout, or counts it as completed in the
status of the group. A call that ended a moment before the dump needs no confirmation: the watchdog
had no time for it.

Takes dumps one by one, gives a `Confirmation` of each; `unconfirmed_ranks` compares those of all
ranks. Limit: an aborted call that the watchdog retired within its timeout looks complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchwhere.core.grouping import grouped
from torchwhere.flight_recorder.dump import Dump
from torchwhere.flight_recorder.dump_entry import DumpEntry

# Five times the interval of the watchdog. In the recorded dumps of jobs that progress, such a call
# was issued at most 0.2 s before; in those of an aborted communicator, 0.85 s.
_MOMENT_NS = 500_000_000


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The last calls of one rank in each group that are confirmed, and those that are not."""

    confirmed: Mapping[str, int] = field(default_factory=dict)  # numbers of collectives
    collectives: Mapping[str, int] = field(default_factory=dict)  # the last unconfirmed one
    messages: frozenset[str] = frozenset()  # groups with unconfirmed messages
    # groups whose calls are not listed: issued and completed ones, by the status
    unlisted: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # by group: when the watchdog saw the end of the last call that it retired within its timeout
    retired_ns: Mapping[str, int] = field(default_factory=dict)
    # whether calls ended that the watchdog has not seen: since it last looked, or it is stuck
    has_new_ends: bool = False
    lists_all: bool = True  # whether it lists the last call of each group that its status counts


def confirmation_of(dump: Dump) -> Confirmation:
    """What a dump shows about the end of its calls; empty for gloo, which records no end."""
    if dump.is_of_gloo or dump.own is not None:
        return Confirmation()
    confirmed: dict[tuple[str, bool], int] = {}
    ended: dict[tuple[str, bool], int] = {}
    mixed = {entry.group for entry in dump.entries if entry.is_p2p}
    listed: dict[str, int] = {}
    names = dump.group_names
    status = {names.get(pg_id, f"#{pg_id}"): known for pg_id, known in dump.status.items()}
    for entry in dump.entries:
        listed[entry.group] = max(listed.get(entry.group, -1), entry.seq)
        if entry.state != "completed":  # also inside a batch: the entry that ends it has the state
            continue
        completed = status.get(entry.group, (-1, -1, -1))[2] if entry.group not in mixed else -1
        stream = entry.group, entry.is_p2p
        if _is_confirmed(entry, completed):
            confirmed[stream] = max(confirmed.get(stream, -1), entry.seq)
        elif not _is_recent(entry, dump.made_ns):
            ended[stream] = max(ended.get(stream, -1), entry.seq)
    open_ends = {stream for stream in ended if ended[stream] > confirmed.get(stream, -1)}
    return Confirmation(
        {group: number for (group, is_p2p), number in confirmed.items() if not is_p2p},
        {group: ended[group, is_p2p] for group, is_p2p in open_ends if not is_p2p},
        frozenset(group for group, is_p2p in open_ends if is_p2p),
        unlisted={
            group: (issued, completed)
            for group, (issued, _, completed) in status.items()
            if issued > max(completed, listed.get(group, -1))
        },
        lists_all=all(issued <= listed.get(group, -1) for group, (issued, _, _) in status.items()),
        retired_ns=_retired_ns(dump.entries),
        has_new_ends=_has_new_ends(dump, {g: status[g][2] for g in status if g not in mixed}),
    )


def _retired_ns(entries: list[DumpEntry]) -> dict[str, int]:
    retired_ns: dict[str, int] = {}
    for entry in entries:
        if entry.state == "completed" and entry.is_retired and _is_confirmed(entry, -1):
            retired_ns[entry.group] = max(retired_ns.get(entry.group, 0), entry.completed_ns)
    return retired_ns


def _has_new_ends(dump: Dump, completed: dict[str, int]) -> bool:
    """Whether calls ended after the last one that the watchdog counted, by group. A dump of active
    calls does not list them: its first listed call is a later one."""
    if not dump.lists_only_active:
        return any(
            entry.state == "completed"
            and not entry.is_retired
            and entry.seq > completed.get(entry.group, -1)
            for entry in dump.entries
        )
    later = [entry for entry in dump.entries if entry.seq > completed.get(entry.group, entry.seq)]
    first = {entry.group: entry.seq for entry in reversed(later)}
    return any(first[group] > completed[group] + 1 for group in first)


def _is_confirmed(entry: DumpEntry, completed: int) -> bool:
    timeout_ns, took_ns = entry.timeout_ms * 1_000_000, entry.completed_ns - entry.t_ns
    if entry.t_ns and timeout_ns and took_ns >= timeout_ns:
        return False  # it timed out
    return entry.is_retired or entry.seq <= completed


def _is_recent(entry: DumpEntry, written_ns: int | None) -> bool:
    """Whether a call was issued a moment before the dump was written. The recorder discovers the
    end of a call that is not retired when it writes the dump."""
    end_ns = entry.completed_ns or written_ns or 0
    return 0 < entry.t_ns <= end_ns < entry.t_ns + _MOMENT_NS


def unconfirmed_ranks(
    ranks: Mapping[int, Confirmation], status: Mapping[int, Mapping[str, tuple[int, int, int]]]
) -> tuple[int, ...]:
    """The ranks with calls that no rank confirms. `status`: of the groups of each rank."""
    by_group = grouped(
        (group, known) for of_rank in status.values() for group, known in of_rank.items()
    )
    confirmed: dict[str, int] = {}
    for own in ranks.values():
        for group, number in own.confirmed.items():
            confirmed[group] = max(confirmed.get(group, -1), number)
    return tuple(
        rank
        for rank, own in ranks.items()
        if own.messages
        or any(number > confirmed.get(group, -1) for group, number in own.collectives.items())
        or not all(_is_completed_elsewhere(by_group.get(group, [])) for group in own.unlisted)
    )


def _is_completed_elsewhere(of_ranks: list[tuple[int, int, int]]) -> bool:
    """Whether the watchdog of a rank saw the last call complete, and all have issued as many.

    A status counts messages like collectives. Each rank has its own number of them; two ranks that
    only send to each other have the same.
    """
    issued, completed = {last for last, _, _ in of_ranks}, {last for _, _, last in of_ranks}
    return len(of_ranks) > 2 and len(issued) == 1 and max(completed) in issued
