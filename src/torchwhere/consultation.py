"""Brings a run before the doctor: reads its boxes, looks at its processes, asks the suspects for their stacks and dumps.

Everything here reads. What a monitor has kept in the folder counts where nobody can look any more: it saw who died first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchwhere.blackbox.label import pulse_of
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.run import Roster
from torchwhere.clerks import Progress, hear_folder
from torchwhere.collector import nothing_collected
from torchwhere.diagnose.doctor.examination import STALL_S, examine
from torchwhere.diagnose.doctor.sighting import Sighting
from torchwhere.diagnose.doctor.verdict import Verdict, VerdictKind
from torchwhere.diagnose.hearing.testimony import Hearing, heard
from torchwhere.flight_recorder.evidence import with_evidence
from torchwhere.host.processes import look, merged

_CALM = (VerdictKind.HEALTHY, VerdictKind.STRAGGLER)


def consult(folder: str | Path, *, stall_s: float = STALL_S, on_progress: Progress | None = None) -> Verdict:
    """The verdict on the run in a folder, now. `on_progress` is told how many boxes have been read, of how many."""
    with nothing_collected():
        run, hearing = hear_folder(folder, on_progress=on_progress)
        return judge(run, kept_sightings(run.folder), stall_s=stall_s, hearing=hearing)


def judge(
    run: Roster[Any],
    kept: Mapping[int, dict[str, Any]],
    *,
    stall_s: float,
    hearing: Hearing | None = None,
    ask: Callable[[Sequence[int]], Mapping[int, dict[str, Any]]] | None = None,
) -> Verdict:
    """The verdict on a run that was just read. Stacks are asked for only where something is wrong; of `ask`, on other hosts."""
    hearing = hearing if hearing is not None else heard(run)
    kept = {rank: value for rank, value in kept.items() if _is_of(run, rank, value)}
    seen = merged(look(run.labels), kept)
    _read_again(run, hearing, [rank for rank, sighting in seen.items() if sighting.alive is False])
    now_ns = _now(seen)
    verdict = examine(run, sightings=seen, now_ns=now_ns, stall_s=stall_s, is_suspicion=now_ns is not None, hearing=hearing)
    if verdict.kind in _CALM:
        return verdict
    if now_ns is None:
        return with_evidence(verdict, run.labels, run.folder, may_ask=False)
    suspects = tuple(rank for rank in verdict.culprits if rank in run.boxes)[:16] or tuple(run.boxes)[:16]
    kept |= ask(suspects) if ask is not None else {}
    seen = merged(look(run.labels, stacks=suspects), kept)
    verdict = examine(run, sightings=seen, now_ns=now_ns, stall_s=stall_s, hearing=hearing)
    is_there = any(sighting.alive for sighting in seen.values())
    return with_evidence(verdict, run.labels, run.folder, may_ask=is_there)


def _is_of(run: Roster[Any], rank: int, kept: Mapping[str, Any]) -> bool:
    """Whether what was kept is about a process of this run, not of an earlier one in the same folder."""
    return rank not in run.boxes or kept.get("pid") in (None, run.labels[rank].meta.get("pid"))


def _read_again(run: Roster[Any], hearing: Hearing, gone: list[int]) -> None:
    """A process may have written its last words between the reading of its box and the look that found it gone."""
    for rank in gone:
        if rank in run.boxes and pulse_of(run.labels[rank].path) != run.labels[rank].pulse:
            box = read_box(run.labels[rank].path)
            if box.rank == rank:
                hearing.hear(rank, box)


def _now(seen: Mapping[int, Sighting]) -> int | None:
    """The last moment at which a process of the job was seen alive: now, or what a monitor kept; None if nobody ever looked."""
    return max((sighting.alive_ns for sighting in seen.values() if sighting.alive_ns is not None), default=None)


def kept_sightings(folder: Path) -> dict[int, dict[str, Any]]:
    """What monitors saw, of all hosts. A damaged file is as good as none."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("monitor-*.json")):
        try:
            kept = json.loads(path.read_text())
            found |= {int(rank): value for rank, value in kept["ranks"].items() if isinstance(value, dict)}
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            continue
    return found
