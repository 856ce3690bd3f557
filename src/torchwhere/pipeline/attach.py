"""Diagnoses a job that torchwhere does not watch, from what was seen of its processes.

Takes observations of ranks, live or read from files. The doctor gets them as boxes without records,
so that a verdict has the same form and the same texts as that on a recorded run. Dumps of the
flight recorder, if the job writes them, show the order of collectives, which stacks do not: then
their verdict counts, and the stacks are added.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.run import RunSummary
from torchwhere.core.atomic_file import write_errors
from torchwhere.core.errors import TorchwhereError
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.examine import Diagnosis, examine
from torchwhere.diagnose.doctor.finding import Cause
from torchwhere.diagnose.doctor.verdict import NO_FAULT, Verdict, VerdictKind
from torchwhere.diagnose.dump_facts import DumpCaveat
from torchwhere.diagnose.stack_hang import (
    AllWait,
    AwaitedRanks,
    ObservedJob,
    OpenWait,
    find_stack_hang,
)
from torchwhere.flight_recorder.dumps import read_files
from torchwhere.flight_recorder.evidence import ask_for_dumps, find_dumps
from torchwhere.flight_recorder.verdict import diagnose_dumps
from torchwhere.gpus.nvml import look_at_gpus
from torchwhere.gpus.samples import HostGpus
from torchwhere.processes.observation import RankObservation
from torchwhere.render.verdict_text.assemble import verdict_of
from torchwhere.render.verdict_text.stacks import (
    STACKS_SHOW,
    old_dumps_text,
    problem_text,
    unknown_text,
)

_DUMP = "flight_recorder_rank_"  # the name of a copied dump, without the rank


@dataclass(slots=True, repr=False)
class ProcessBox(Box):
    """A box without records, for a rank that torchwhere does not watch."""

    seen_ns: int = 0

    @property
    def last_ns(self) -> int:
        return self.seen_ns


@dataclass(frozen=True)
class AttachedJob:
    """The ranks of a job that were seen, the GPUs of their hosts, and their dumps."""

    ranks: Mapping[int, RankObservation]
    gpus: Sequence[HostGpus] = ()
    dumps: Mapping[int, Path] | None = None  # by rank

    def boxes(self) -> dict[int, ProcessBox]:
        """A box without records for each rank: what its process is."""
        return {
            rank: ProcessBox(
                Path(f"process {observation.pid}"),
                _meta(rank, observation),
                seen_ns=observation.seen_ns,
            )
            for rank, observation in self.ranks.items()
        }


def check_readable(ranks: Sequence[RankObservation]) -> None:
    """Raise `TorchwhereError` if no stack could be read, and no state explains the hang."""
    if all(
        observation.problem is not None and not observation.status.is_stopped
        for observation in ranks
    ):
        raise TorchwhereError(f"cannot read the stacks: {problem_text(ranks[0].problem or '')}")


def with_host_evidence(job: AttachedJob) -> AttachedJob:
    """The same with the GPUs of this host, and with dumps of its ranks, which are asked for new
    ones. A job without a hang is left alone."""
    if find_stack_hang(ObservedJob(job.ranks)).kind is VerdictKind.HEALTHY:
        return job
    host_gpus, devices = look_at_gpus([observation.pid for observation in job.ranks.values()])
    ranks = {
        rank: replace(observation, devices=devices.get(observation.pid, ()))
        for rank, observation in job.ranks.items()
    }
    boxes = job.boxes()
    ask_for_dumps(boxes, since_ns=time.time_ns())
    gpus = (host_gpus,) if host_gpus is not None else ()
    return AttachedJob(ranks, gpus, find_dumps(boxes, None))


def copy_dumps(job: AttachedJob, folder: Path) -> None:
    """Copy the dumps into a folder, so that another machine can diagnose them."""
    with write_errors(folder):
        for rank, path in (job.dumps or {}).items():
            shutil.copy2(path, folder / f"{_DUMP}{rank}")  # with its time


def saved_dumps(folder: Path, ranks: Mapping[int, RankObservation]) -> dict[int, Path]:
    """The dumps that `copy_dumps` has copied."""
    paths = {rank: folder / f"{_DUMP}{rank}" for rank in ranks}
    return {rank: path for rank, path in paths.items() if path.is_file()}


def diagnose_attached(job: AttachedJob) -> Verdict:
    """Find what is wrong with a job, from stacks and dumps.

    Example:
        observations = observe(all_ranks(), stall_s=30.0)
        job = AttachedJob({observation.rank: observation for observation in observations})
        print(diagnose_attached(job))
    """
    observed = ObservedJob(job.ranks)
    context, finding = _context(job), find_stack_hang(observed)
    verdict = verdict_of(Diagnosis(context, finding))
    positions = {
        str(rank): position.to_dict() | _process_facts(job.ranks[rank])
        for rank, position in observed.positions.items()
    }
    verdict = replace(
        verdict,
        collective=_collective(finding.cause),
        missing_data=(*unknown_text(observed), *verdict.missing_data),
        facts=verdict.facts | {"observed_s": round(observed.seconds, 1), "processes": positions},
    )
    is_hang = verdict.kind is not VerdictKind.HEALTHY
    return _with_dumps(verdict, job) if job.dumps and is_hang else verdict


def _context(job: AttachedJob) -> Context:
    run = RunSummary(Path(), job.boxes(), noun="process")
    statuses = {rank: observation.status for rank, observation in job.ranks.items()}
    now_ns = max(observation.seen_ns for observation in job.ranks.values())
    return examine(run, statuses=statuses, now_ns=now_ns, gpus=job.gpus).context


def _collective(cause: Cause) -> dict[str, object] | None:
    """The collective that most ranks wait in, for JSON."""
    calls = cause.job.calls if isinstance(cause, AwaitedRanks | OpenWait | AllWait) else ()
    return {"op": calls[0].op, "number": None, "group": None} if calls else None


def _process_facts(observation: RankObservation) -> dict[str, object]:
    return {
        "pid": observation.pid,
        "host": observation.host,
        "process_state": observation.state,
        "waits_in": observation.waits_in,
        "cpu_s": round(observation.main.run_s, 3) if observation.main is not None else None,
    }


def _meta(rank: int, observation: RankObservation) -> dict[str, object]:
    return {
        "rank": rank,
        "world_size": observation.world_size,
        "host": observation.host,
        "pid": observation.pid,
        "folder": observation.folder,
        "started_ns": observation.started_ns,
        "flight_recorder": observation.flight_recorder,
        "devices": list(observation.devices),
    }


def _with_dumps(verdict: Verdict, job: AttachedJob) -> Verdict:
    """The verdict of the dumps if they show a hang, with the stacks of this verdict.

    Dumps from before the first look do not count: the job may have progressed since.
    """
    first_ns = min(
        observation.seen_ns - int(observation.seconds * 1e9) for observation in job.ranks.values()
    )
    files = job.dumps or {}
    new = {rank: path for rank, path in files.items() if path.stat().st_mtime_ns >= first_ns}
    old = old_dumps_text([path for rank, path in files.items() if rank not in new])
    verdict = replace(verdict, missing_data=(*verdict.missing_data, *old))
    if not new:
        return verdict
    try:
        of_dumps = diagnose_dumps(read_files(Path(), [("", *file) for file in sorted(new.items())]))
    except TorchwhereError as error:
        caveat = str(DumpCaveat(str(error)))
        return replace(verdict, missing_data=(*verdict.missing_data, caveat))
    is_stopped = any(observation.status.is_stopped for observation in job.ranks.values())
    missing_data = (*verdict.missing_data, *of_dumps.missing_data)
    facts = verdict.facts | of_dumps.facts
    if of_dumps.kind in NO_FAULT or is_stopped:
        return replace(verdict, missing_data=missing_data, facts=facts)
    return replace(
        of_dumps,
        explanation=(*of_dumps.explanation, STACKS_SHOW, *verdict.explanation),
        ranks=verdict.ranks,
        stalled_s=verdict.stalled_s,
        missing_data=missing_data,
        facts=facts,
    )
