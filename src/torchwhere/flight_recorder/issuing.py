"""Finds collectives that a CPU is just issuing: the recorder shows them as completed.

The recorder makes an entry before the CUDA events of the call are recorded on the stream, and an
event that was never recorded counts as reached. A CPU can be inside a launch for as long as the
job hangs: a stream takes about 1,000 launches and then blocks, and so does a first call that
connects to its peers. The watchdog counts a call as enqueued only after its launch, so the status
of the group shows such a call.

Takes the entries and the status of one dump, gives the entries with the states that their calls
have. Limits: a status is read a moment before the entries. If the job progresses, a call may have
been launched and completed in between, and counts as pending: it was issued a moment before the
dump was written, so `diagnose/dump_age.py` keeps it from being called a hang. The status of a group
with messages counts them too, so it shows nothing about collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torchwhere.flight_recorder.dump_entry import DumpEntry


def without_false_ends(
    entries: Iterable[DumpEntry], status: Mapping[int, tuple[int, int, int]]
) -> list[DumpEntry]:
    """The entries, with calls that a CPU is just issuing as pending. `status`: enqueued, started
    and completed calls, by `pg_id`."""
    entries = list(entries)
    with_messages = {entry.pg_id for entry in entries if entry.is_p2p}
    enqueued = {pg_id: of_group[0] for pg_id, of_group in status.items()}
    return [
        replace(entry, state="scheduled")
        if entry.state == "completed"
        and not entry.is_retired
        and entry.pg_id not in with_messages
        and entry.seq > enqueued.get(entry.pg_id, entry.seq)
        else entry
        for entry in entries
    ]
