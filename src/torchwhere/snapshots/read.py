"""Reads the snapshots in the folder of a run: statuses of its processes and calls of its ranks.

A monitor writes two files (`write.py`): `monitor-<host>.json` with the last statuses of the
processes, and `monitor-<host>.snapshot` with the last content of their boxes. A stalled rank writes
`stall-<host>.*`, and `doctor` writes `doctor-<host>.*` when it finds a problem in a running job.
They serve a diagnosis after the job has ended, or when a box is lost or cut. A damaged file, and
one of an earlier run in the same folder, is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchwhere.blackbox.file_names import box_name
from torchwhere.blackbox.run import RunSummary
from torchwhere.blackbox.summary import BoxSummary, started_ns
from torchwhere.diagnose.calls.encode import RankSummary
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.processes.status import ProcessStatus
from torchwhere.snapshots.decode import InvalidSnapshot, decode_snapshot
from torchwhere.snapshots.encode import MOST_BYTES, SEAL, HostSnapshot

MONITOR, STALL, DOCTOR = "monitor", "stall", "doctor"
_SOURCES = (STALL, DOCTOR, MONITOR)  # a monitor looks until the end, so it overrides the others
SNAPSHOT_SUFFIX = ".snapshot"
_FIRST_ENCODER = -3  # encoder number of the first snapshot; the others follow downwards


def saved_statuses(folder: Path) -> dict[int, dict[str, Any]]:
    """The saved statuses of all hosts by rank."""
    saved: dict[int, dict[str, Any]] = {}
    for path in _files(folder, ".json"):
        try:
            ranks = json.loads(path.read_text())["ranks"].items()
            statuses = {int(rank): value for rank, value in ranks if isinstance(value, dict)}
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            continue
        for rank, value in statuses.items():
            saved[rank] = _with_exit(value, saved.get(rank, {}))
    return saved


def _files(folder: Path, suffix: str) -> list[Path]:
    """The files of all sources in a folder; later ones override earlier ones."""
    names = [f"{source}-*{suffix}" for source in _SOURCES]
    return [path for name in names for path in sorted(folder.glob(name))]


def _with_exit(value: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A status, completed by another source that has found the process gone."""
    is_newer = other.get("alive") is False and value.get("alive") is True
    if not is_newer or any(other.get(name) != value.get(name) for name in ("run", "pid", "host")):
        return value
    status = ProcessStatus.from_dict(dict(other)).after(ProcessStatus.from_dict(value))
    return value | status.to_dict()


def is_of(run: RunSummary[Any], rank: int, saved: Mapping[str, Any]) -> bool:
    """Whether a saved status is about a process of this run, not of an earlier one."""
    if rank in run.summaries:
        return saved.get("pid") in (None, run.summaries[rank].meta.get("pid"))
    return saved.get("run") in (None, list(_identity(run))) and 0 <= rank < run.world_size


def summaries_of(
    saved: Mapping[int, Mapping[str, Any]], run: RunSummary[Any]
) -> dict[int, BoxSummary]:
    """Summaries for ranks without a box, from their saved statuses: enough to look for their
    processes."""
    identity = _identity(run)
    return {
        rank: BoxSummary(
            path=run.folder / box_name(rank),
            rank=rank,
            run=identity,
            is_readable=False,
            last_ns=0,
            lacks_counts=True,
            checksum=0,
            meta=dict(value),
        )
        for rank, value in saved.items()
        if rank not in run.summaries
    }


def _identity(run: RunSummary[Any]) -> tuple[str, int]:
    """Run id and restart count."""
    identity: tuple[str, int] = next(iter(run.summaries.values())).run
    return identity


# -- calls of ranks --------------------------------------------------------------------------------


def fill_from_snapshots(run: RunSummary[Any], job_calls: JobCalls) -> JobCalls:
    """Add the calls of ranks whose box is lost or cut from snapshots.

    Returns a copy with these ranks in `JobCalls.from_snapshot`, or `job_calls` itself if there are
    none. If a snapshot was read after the last call of all other ranks, it also shows the last call
    of its ranks. Otherwise its ranks are in `JobCalls.stale`: the calls until then count, but later
    ones are unknown.
    """
    wanted = [rank for rank in range(run.world_size) if _is_incomplete(job_calls, rank)]
    if not wanted or len(wanted) == run.world_size:
        return job_calls
    moved_ns = _last_call_ns(job_calls, without=wanted)
    filled, stale = job_calls.copy(), set[int]()
    for number, snapshot in enumerate(_snapshots(run)):
        chosen = {
            summary.box_summary.path: summary
            for summary in snapshot.batch.rank_summaries
            if _is_better(run, filled, wanted, summary)
        }
        filled.add_batch(snapshot.batch, encoder=_FIRST_ENCODER - number, wanted=chosen)
        ranks = {summary.box_summary.rank for summary in chosen.values()}
        stale -= ranks
        if snapshot.read_ns < moved_ns:
            stale |= ranks
    filled.by_rank = dict(sorted(filled.by_rank.items()))
    changed = [
        rank for rank in wanted if filled.by_rank.get(rank) is not job_calls.by_rank.get(rank)
    ]
    filled.from_snapshot, filled.stale = frozenset(changed), frozenset(stale)
    return filled if changed else job_calls


def _last_call_ns(job_calls: JobCalls, *, without: list[int]) -> int:
    """Time of the last call of all ranks but these; 0 if there is none."""
    times = [0]
    for rank, rank_calls in job_calls.by_rank.items():
        last = rank_calls.last if rank not in without else None
        if last is not None:
            times.append(rank_calls.issued_ns(*last))
    return max(times)


def _is_incomplete(job_calls: JobCalls, rank: int) -> bool:
    rank_calls = job_calls.by_rank.get(rank)
    if rank_calls is None:
        return True
    return rank_calls.box_summary.counts.torn_entries > 0 or rank_calls.has_lost_its_newest


def _is_better(
    run: RunSummary[Any], filled: JobCalls, wanted: list[int], summary: RankSummary
) -> bool:
    """Whether a snapshot has more calls of a rank than the box or an earlier snapshot."""
    box = summary.box_summary
    if box.rank not in wanted or box.lacks_counts or box.run != _identity(run):
        return False
    rank_calls = filled.by_rank.get(box.rank)
    if rank_calls is None:
        return True
    return summary.records > 0 and box.last_ns >= rank_calls.box_summary.last_ns


def _snapshots(run: RunSummary[Any]) -> list[HostSnapshot]:
    """The snapshots of this run, oldest first: later ones override earlier ones."""
    first_ns = min(map(started_ns, run.summaries.values()))
    snapshots = [snapshot for snapshot in _decoded(run.folder) if snapshot.read_ns >= first_ns]
    return sorted(snapshots, key=lambda snapshot: snapshot.read_ns)


def _decoded(folder: Path) -> Iterator[HostSnapshot]:
    for path in _files(folder, SNAPSHOT_SUFFIX):
        try:
            with path.open("rb") as file:
                snapshot = decode_snapshot(file.read(SEAL.size + MOST_BYTES + 1))
        except OSError:
            continue
        if not isinstance(snapshot, InvalidSnapshot):
            yield snapshot
