"""Reads exit records and exceptions: how a rank ended, and whether it ended by itself.

A `KeyboardInterrupt` on several ranks was not raised by one of them. On a single rank it may have
been, unless others had waited long for that rank: a rank that hangs in Python is often the only one
that Ctrl-C can interrupt. A rank that catches SIGTERM says so in its exit record; most ranks do not
catch it and leave no record.
"""

from __future__ import annotations

import re

from torchwhere.core.errors import FAILED
from torchwhere.core.events import Event
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.waits import waiting_for, waits
from torchwhere.processes.stacks import IN_NATIVE_THREAD

_NEARBY = 64  # records before a call in which an exception may be its cause
WATCH_ENDED = "stop"  # end reason of a watch whose process continues
_INTERRUPT = "KeyboardInterrupt"
_TERMINATED = re.compile(
    r"(?:exit|exception: SystemExit:) (?:143|-15)|exception: .*(?:\bSIGTERM|\bsignal:? 15\b).*",
    re.IGNORECASE | re.DOTALL,
)
# Messages of gloo, NCCL and the store when the process of a peer is gone, or has aborted the
# communicator. Timeouts have others.
_CANNOT_CONNECT = (
    "connectFullMesh failed|connection refused|timed out connecting|client socket has timed out"
)
_CONNECTING = re.compile(_CANNOT_CONNECT, re.IGNORECASE)
_PEER_LOST = re.compile(
    r"closed by peer|connection reset|connection closed|connection was likely closed|broken"
    r" pipe|remote process exited|communicator (?:was|has been) aborted|ncclRemoteError"
    rf"|{_CANNOT_CONNECT}",
    re.IGNORECASE,
)
# Messages of a collective that timed out.
_TIMED_OUT = re.compile(
    r"timed out waiting \d+ ?ms for|collective operation timeout|failed to pass"
    r" monitoredBarrier|wait timeout",
    re.IGNORECASE,
)
# A failure that a checkpoint raises again on all ranks, with the ranks that it came from.
_OF_RANKS = re.compile(
    r"Exception ranks:dict_keys\(\[([\d, ]+)\]\)|^Traceback .*\(RANK (\d+)\)$", re.MULTILINE
)
_OUT_OF_MEMORY = re.compile(
    r"\bMemoryError\b|OutOfMemoryError|\bout of memory\b|can't allocate memory|cannot allocate"
    r" memory",
    re.IGNORECASE,
)


# -- messages --------------------------------------------------------------------------------------


def is_lost_peer(message: str) -> bool:
    """Whether a message says that the process of a peer was gone."""
    return _PEER_LOST.search(message) is not None


def is_timeout(message: str) -> bool:
    """Whether a message says that a collective timed out."""
    return _TIMED_OUT.search(message) is not None


def is_failed_connection(message: str) -> bool:
    """Whether a message says that a rank could not connect to a peer."""
    return _CONNECTING.search(message) is not None


def is_out_of_memory(message: str) -> bool:
    return _OUT_OF_MEMORY.search(message.partition("\n")[0]) is not None


def is_unexplained_abort(message: str) -> bool:
    """Whether a thread without Python ended a process, and left no message."""
    return message.endswith(IN_NATIVE_THREAD) and "\n" not in message


def named_ranks(message: str) -> set[int]:
    """The ranks that raised an exception first, if its message names them."""
    return {
        int(rank) for match in _OF_RANKS.finditer(message) for rank in re.findall(r"\d+", match[0])
    }


# -- records ---------------------------------------------------------------------------------------


def ended_well(end: Event) -> bool:
    return str(end.fields.get("reason")) in (WATCH_ENDED, "exit", "exit 0")


def last_exception(rank_calls: RankCalls) -> str | None:
    """The text of an exception that is a rank's last record."""
    error = rank_calls.exception
    if error is None or error.number != rank_calls.rank_summary.records - 1:
        return None
    return str(error.fields.get("text"))


def was_terminated(rank_calls: RankCalls) -> bool:
    """Whether the exit record of a rank says that SIGTERM ended it."""
    end = rank_calls.end
    return end is not None and _TERMINATED.fullmatch(str(end.fields.get("reason"))) is not None


def interrupted(job_calls: JobCalls, *, waited_s: float) -> dict[int, int]:
    """The ranks that were ended from outside, and when, by their wall clocks.

    A single rank counts only if others had waited for it longer than `waited_s`: it hung before.
    """
    interrupted_ns = {
        rank: t_ns
        for rank, rank_calls in job_calls.by_rank.items()
        if (t_ns := _interrupted_ns(rank_calls)) is not None
    }
    if len(interrupted_ns) > 1 or not interrupted_ns:
        return interrupted_ns
    ((rank, t_ns),) = interrupted_ns.items()
    others = waiting_for(waits(job_calls), [rank])
    since = [
        issued
        for wait in others
        if (issued := job_calls.by_rank[wait.rank].issued_ns(wait.key, wait.number))
    ]
    return interrupted_ns if t_ns - min(since, default=t_ns) > waited_s * 1e9 else {}


def _interrupted_ns(rank_calls: RankCalls) -> int | None:
    end, error = rank_calls.end, rank_calls.exception
    reason = str(end.fields.get("reason")) if end is not None else ""
    has_interrupt = error is not None and str(error.fields.get("text")).startswith(_INTERRUPT)
    if error is not None and has_interrupt and (end is None or FAILED in reason):
        return error.t_ns
    is_external = reason.startswith(f"{FAILED}{_INTERRUPT}") or was_terminated(rank_calls)
    return end.t_ns if end is not None and is_external else None


def survived_exception(rank_calls: RankCalls, record: int) -> Event | None:
    """An exception shortly before a record that the rank survived."""
    near = [
        error
        for error in rank_calls.rank_summary.exceptions
        if record - _NEARBY <= error.number < record
    ]
    return near[-1] if near else None
