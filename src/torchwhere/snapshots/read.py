"""What monitors, witnesses and doctors have kept of a run: what they saw of its processes, and what
its ranks had done.

A monitor writes two files into the folder of a run (`snapshots/write.py`): `monitor-<host>.json`,
the processes as it saw them last, and `monitor-<host>.snapshot`, what their boxes said last. A rank
that has come to rest writes the same, once, `stall-<host>.*`, and a doctor that finds something
wrong with a job that is there, `doctor-<host>.*`. Who comes when all is over, or when a box is gone
or cut, has that to go by. A damaged file is as good as none, and one of an earlier run in the same
folder too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchwhere.blackbox.run import RunSummary
from torchwhere.blackbox.summary import BoxOrSummary, BoxSummary
from torchwhere.diagnose.calls.encode import RankSummary
from torchwhere.diagnose.calls.rank_calls import JobCalls
from torchwhere.diagnose.doctor.waits import has_lost_its_newest
from torchwhere.processes.status import ProcessStatus
from torchwhere.snapshots.decode import InvalidSnapshot, decode_snapshot
from torchwhere.snapshots.encode import MOST_BYTES, SEAL, HostSnapshot

MONITOR, STALL, DOCTOR = "monitor", "stall", "doctor"
SNAPSHOT_SUFFIX = ".snapshot"
_CLERK = -3  # the first of those who have written down what is recalled
_MOST_NAMED = 8


def saved_statuses(folder: Path) -> dict[int, dict[str, Any]]:
    """What was seen, on all hosts: by monitors, who looked until the end, and where there was none,
    by others."""
    found: dict[int, dict[str, Any]] = {}
    for teller in (STALL, DOCTOR, MONITOR):
        for path in sorted(folder.glob(f"{teller}-*.json")):
            try:
                kept = json.loads(path.read_text())["ranks"].items()
                told = {int(rank): value for rank, value in kept if isinstance(value, dict)}
            except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
                continue
            found |= {rank: _with_death(value, found.get(rank, {})) for rank, value in told.items()}
    return found


def _with_death(value: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A process that somebody has found gone is gone, whoever saw it before that."""
    is_newer = other.get("alive") is False and value.get("alive") is True
    if not is_newer or any(other.get(name) != value.get(name) for name in ("run", "pid", "host")):
        return value
    return (
        value | ProcessStatus.from_dict(dict(other)).after(ProcessStatus.from_dict(value)).to_dict()
    )


def is_of(run: RunSummary[Any], rank: int, kept: Mapping[str, Any]) -> bool:
    """Whether what was kept is about a process of this run, not of an earlier one in the same
    folder."""
    if rank in run.summaries:
        return kept.get("pid") in (None, run.summaries[rank].meta.get("pid"))
    return kept.get("run") in (None, list(_identity(run))) and 0 <= rank < run.world_size


def summaries_of(
    kept: Mapping[int, Mapping[str, Any]], run: RunSummary[Any]
) -> dict[int, BoxSummary]:
    """By what was kept of them, ranks without a box can be looked at: is the process there, and how
    did it end."""
    unlabelled = {rank: value for rank, value in kept.items() if rank not in run.summaries}
    identity = _identity(run)
    return {
        rank: BoxSummary(
            run.folder / f"rank{rank}.box", rank, identity, False, 0, True, 0, meta=dict(value)
        )
        for rank, value in unlabelled.items()
    }


def _identity(run: RunSummary[Any]) -> tuple[str, int]:
    found: tuple[str, int] = next(iter(run.summaries.values())).run
    return found


# -- what ranks had done ---------------------------------------------------------------------------


def fill_from_snapshots(run: RunSummary[Any], job_calls: JobCalls) -> tuple[JobCalls, list[str]]:
    """What the boxes say; of ranks whose box is gone or cut, what a monitor had read before; and
    which these are, in words.

    Of a rank about which the monitor read when all others had done what they did last, it is known
    what it did last. Otherwise it is `JobCalls.past`: what it did by then counts, but not that it
    did nothing after.
    """
    wanted = [rank for rank in range(run.world_size) if _is_incomplete(job_calls, rank)]
    if not wanted or len(wanted) == run.world_size:
        return job_calls, []
    lasts = [(said, said.last) for rank, said in job_calls.by_rank.items() if rank not in wanted]
    moved_ns = max((said.issued_ns(*last) for said, last in lasts if last is not None), default=0)
    found, past = job_calls.copy(), set[int]()
    began_ns = min(_started_ns(box) for box in run.summaries.values())
    snapshots = [
        snapshot for snapshot in _snapshots(run) if snapshot.read_ns >= began_ns
    ]  # older: of an earlier run in the same folder
    for number, snapshot in enumerate(snapshots):
        chosen = {
            said.label.path: said
            for said in snapshot.batch.rank_summaries
            if _is_better(run, found, wanted, said)
        }
        found.admit(snapshot.batch, encoder=_CLERK - number, wanted=chosen)
        ranks = {said.label.rank for said in chosen.values()}
        past = past - ranks | (ranks if snapshot.read_ns < moved_ns else set())
    found.by_rank = dict(sorted(found.by_rank.items()))
    recalled = [
        rank for rank in wanted if found.by_rank.get(rank) is not job_calls.by_rank.get(rank)
    ]
    found.recalled, found.past = frozenset(recalled), frozenset(past)
    return (found, _said(recalled, past)) if recalled else (job_calls, [])


def _started_ns(box: BoxOrSummary) -> int:
    return started if isinstance(started := box.meta.get("started_ns"), int) else 0


def _is_incomplete(job_calls: JobCalls, rank: int) -> bool:
    rank_calls = job_calls.by_rank.get(rank)
    return (
        rank_calls is None
        or rank_calls.label.counts.torn_entries > 0
        or has_lost_its_newest(rank_calls)
    )


def _is_better(run: RunSummary[Any], found: JobCalls, wanted: list[int], said: RankSummary) -> bool:
    """Whether a monitor knew more of a rank than can be read now."""
    label = said.label
    if label.rank not in wanted or label.lacks_counts or label.run != _identity(run):
        return False
    known = found.by_rank.get(label.rank)
    return known is None or (said.records > 0 and label.last_ns >= known.label.last_ns)


def _snapshots(run: RunSummary[Any]) -> list[HostSnapshot]:
    """Those that were read first come first: what was read last is what counts."""
    paths = [
        path
        for teller in (STALL, DOCTOR, MONITOR)
        for path in sorted(run.folder.glob(f"{teller}-*{SNAPSHOT_SUFFIX}"))
    ]
    return sorted(_opened(paths), key=lambda snapshot: snapshot.read_ns)


def _opened(paths: list[Path]) -> Iterator[HostSnapshot]:
    for path in paths:
        try:
            with path.open("rb") as file:
                snapshot = decode_snapshot(file.read(SEAL.size + MOST_BYTES + 1))
        except OSError:
            continue
        if not isinstance(snapshot, InvalidSnapshot):
            yield snapshot


def _said(recalled: list[int], past: set[int]) -> list[str]:
    named = ", ".join(map(str, recalled[:_MOST_NAMED])) + (
        " and others" if len(recalled) > _MOST_NAMED else ""
    )
    until = ", and not what it did after that" if past & set(recalled) else ""
    return [f"what rank {named} did is known from what was read of its box before{until}"]
