"""Sentences on a job that torchwhere does not watch: what the stacks of its ranks show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torchwhere.core.grouping import grouped
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.core.sanitize import plural
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.stacks import user_line
from torchwhere.diagnose.stack_hang import (
    AllBlocked,
    AllWait,
    AwaitedRanks,
    GoneRanks,
    NoHangSeen,
    ObservedJob,
    OpenWait,
    PartlyBlocked,
)
from torchwhere.diagnose.stack_position import WAITS_FOR_ONE, PositionKind
from torchwhere.gpus.labels import gpu_label
from torchwhere.gpus.samples import gpus_of
from torchwhere.processes.observation import HelperObservation
from torchwhere.processes.py_spy import Refusal
from torchwhere.processes.status import STOPPED
from torchwhere.render.verdict_text.phrases import (
    agree,
    all_ranks_text,
    in_place,
    more_text,
    rank_detail_text,
    subject_text,
)

_MOST_RANKS = 4  # with their own line
_MOST_HELPERS = 4
_MOST_COHORTS = 8
_STATES = {"R": "running", "S": "sleeping", "D": "blocked in the kernel"}
_STATES |= dict.fromkeys(STOPPED, "stopped by a signal")
NOT_WATCHED = (
    "torchwhere was not watching: steps, modules and the order of collectives are not known. To"
    " watch the next run, start it with: torchwhere run --out run/ train.py"
)
STACKS_SHOW = "The stacks show:"
PROBLEMS: dict[str, str] = {
    Refusal.NOT_INSTALLED: "py-spy is not installed (pip install py-spy)",
    Refusal.NO_PERMISSION: (
        "no permission to read the process. Run torchwhere as root or with CAP_SYS_PTRACE, or"
        " allow it: echo 0 | sudo tee /proc/sys/kernel/yama/ptrace_scope"
    ),
    Refusal.UNSUPPORTED: (
        "py-spy does not read this interpreter (update it: pip install -U py-spy), or the process"
        " was not ready"
    ),
    Refusal.TIMEOUT: "py-spy did not answer in time",
    Refusal.STOPPED: "the process is stopped",
}
_PEERS_NOT_KNOWN = (
    "Likely cause: a rank waits for a rank that does not answer it, or the network. No rank is"
    " named: stacks do not show which ranks wait for which."
)
_EXIT_NOT_KNOWN = (
    "It is not known whether the job finished or failed, or which rank exited first: see the output"
    " of the job and of its launcher."
)
_FLIGHT_RECORDER = (
    "What is queued on the devices is not known. Start the next job with `torchwhere run`: its"
    " boxes show it. Or set TORCH_NCCL_DEBUG_INFO_PIPE_FILE for dumps of the flight recorder, and"
    " TORCH_NCCL_ENABLE_TIMING=1, which costs time."
)


# -- findings --------------------------------------------------------------------------------------


def awaited_ranks_text(cause: AwaitedRanks, context: Context) -> list[str]:
    ranks = subject_text(cause.ranks)
    is_are = agree(cause.ranks, "is", "are")
    lines = [f"{ranks} {is_are} {_reason_text(cause)}."]
    lines += _waits_text(context, cause.job)
    for rank in cause.ranks[:_MOST_RANKS]:
        is_inside = cause.job.positions[rank].op is not None
        instead = " instead" if cause.job.calls and not is_inside else ""
        lines += _rank_text(context, cause.job, rank, instead=instead)
    lines += more_text(cause.ranks, _MOST_RANKS)
    return lines + _unclear_text(cause.job, cause.job.unclear)


def _reason_text(cause: AwaitedRanks) -> str:
    is_stopped = all(cause.job.positions[rank].kind is PositionKind.STOPPED for rank in cause.ranks)
    if is_stopped:
        return "stopped by a signal, and cannot continue"
    job = cause.job
    if not job.calls:
        return f"blocked, while {ranks_phrase(job.on_device)} wait for their devices"
    wait = agree(job.waiting, "waits", "wait")
    ops = " or ".join(_op_text(op) for op in dict.fromkeys(call.op for call in job.calls))
    return f"not in {ops} in which {ranks_phrase(job.waiting)} {wait}"


def _op_text(op: str) -> str:
    """`the all_reduce`, `the collective of the backward`."""
    return f"the {op.removeprefix('a ')}"


def open_wait_text(cause: OpenWait, context: Context) -> list[str]:
    job = cause.job
    waiting = (*job.waiting, *job.on_device)
    verb = agree(waiting, "waits", "wait")
    lines = [f"{subject_text(sorted(waiting))} {verb}, and it is not known for which rank."]
    lines += _waits_text(context, job)
    for rank in job.elsewhere[:_MOST_RANKS]:
        lines += _rank_text(context, job, rank)
    lines += _unclear_text(job, job.unclear)
    if job.unseen:
        it_was = agree(job.unseen, "it was", "they were")
        lines.append(
            f"Look at {ranks_phrase(job.unseen)} first: {it_was} not found on the hosts that"
            " torchwhere looked at."
        )
    if any(job.positions[rank].is_long_work for rank in job.elsewhere):
        lines.append("If a rank saves, compiles or imports, the others wait until it is done.")
    return [*lines, _FLIGHT_RECORDER] if job.on_device else lines


def all_wait_text(cause: AllWait, context: Context) -> list[str]:
    count, calls = len(cause.job.ranks), cause.job.calls
    waits = _waits_text(context, cause.job)
    if len(calls) > 1:
        return [
            f"All {count} ranks wait for other ranks, in {len(calls)} different calls.",
            *waits,
            (
                "Likely cause: ranks took different code paths, or issued the calls of several"
                " groups in different orders. No rank is named: stacks do not show the order of"
                " calls."
            ),
        ]
    op = calls[0].op
    all_wait = f"{all_ranks_text(count, single='waits', several='wait')} in {op}, at the same line."
    if op in WAITS_FOR_ONE:
        return [all_wait, *waits, _PEERS_NOT_KNOWN]
    return [
        f"{all_wait} No rank is elsewhere.",
        *waits,
        (
            "Likely cause: the network or a device; or ranks are in calls of different steps or"
            " groups at that line, which stacks do not show."
        ),
    ]


def all_blocked_text(cause: AllBlocked, context: Context) -> list[str]:
    count = len(cause.job.ranks)
    blocked = all_ranks_text(count, single="is blocked", several="are blocked")
    return [
        f"{blocked}, and none waits in a collective.",
        *_places_text(context, cause.job, cause.job.ranks),
    ]


def gone_ranks_text(cause: GoneRanks, context: Context) -> list[str]:
    left = set(cause.job.ranks).difference(cause.ranks)
    if not left:
        exited = all_ranks_text(len(cause.ranks), single="exited", several="exited")
    else:
        exited = f"{subject_text(cause.ranks)} exited"
    lines = [
        f"{exited} while torchwhere looked at the job.",
        *_places_text(context, cause.job, left),
    ]
    return lines if cause.are_awaited else [*lines, _EXIT_NOT_KNOWN]


def no_hang_seen_text(cause: NoHangSeen, context: Context) -> list[str]:
    job = cause.job
    ran = all_ranks_text(len(job.ranks), single="ran", several="ran")
    return [
        f"No hang seen in {job.seconds:.0f} seconds: {ran[0].lower()}{ran[1:]}.",
        *_places_text(context, job, job.ranks),
        "It is not known whether steps progress: an endless loop on all ranks looks the same.",
    ]


def partly_blocked_text(cause: PartlyBlocked, context: Context) -> list[str]:
    job = cause.job
    ranks = set(job.ranks).difference(cause.blocked, cause.unknown)
    lines = ["No rank waits in a collective."]
    if cause.blocked:
        ranks_text = subject_text(cause.blocked)
        lines.append(f"{ranks_text} did not run for {job.seconds:.0f} s:")
        lines += _places_text(context, job, cause.blocked)
    if ranks:
        lines.append(f"{subject_text(sorted(ranks))} ran:")
        lines += _places_text(context, job, ranks)
    return lines + _unclear_text(job, cause.unknown)


# -- parts -----------------------------------------------------------------------------------------


def _waits_text(context: Context, job: ObservedJob) -> list[str]:
    lines = []
    for call in job.calls[:_MOST_COHORTS]:
        place = in_place(context.place(call.ranks[0]))
        op = f" in {call.op}" if len(job.calls) > 1 else ""
        lines.append(f"  waiting: {ranks_phrase(call.ranks)},{op} {place}")
    if job.on_device:
        place = in_place(context.place(job.on_device[0]))
        lines.append(f"  waiting for their devices: {ranks_phrase(job.on_device)}, {place}")
    return lines + _gpus_text(context, job.on_device)


def _gpus_text(context: Context, ranks: Sequence[int]) -> list[str]:
    """The GPUs of ranks that wait for them, if NVML knows them."""
    return [
        f"  rank {rank} uses {gpu_label(gpu)}"
        for rank in ranks[:_MOST_RANKS]
        for gpu in gpus_of(context.run.summaries[rank].meta, context.gpus)
    ]


def _rank_text(context: Context, job: ObservedJob, rank: int, *, instead: str = "") -> list[str]:
    """Where a rank is, what it does, and its helpers if it waits for data."""
    position = job.positions[rank]
    parts = [in_place(context.place(rank))]
    lines = dict.fromkeys((position.library_line, position.forward_line))
    inner = "; ".join(line for line in lines if line is not None)
    if inner:
        parts.append(f"({inner})")
    text = f"  rank {rank} is{instead} {' '.join(parts)}: {rank_detail_text(context, rank)}"
    observation = job.ranks[rank]
    helpers = observation.helpers[:_MOST_HELPERS]
    return [text, *(f"    {_helper_text(helper, observation.folder)}" for helper in helpers)]


def _helper_text(helper: HelperObservation, folder: str) -> str:
    innermost = user_line(helper.stack) or next(iter(helper.stack), "")
    line = innermost.removeprefix(f"{folder}/") or "an unknown place"
    activity = _STATES.get(helper.state or "", "in an unknown state")
    return f"its {helper.kind}, process {helper.pid}, is at {line}: {activity}"


def _places_text(context: Context, job: ObservedJob, ranks: Iterable[int]) -> list[str]:
    """The ranks by place: `  ranks 0-3: at train.py:9, in all_reduce`."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        position = job.positions[rank]
        activity = f"in {position.op}"
        if position.kind is PositionKind.DEVICE:
            activity = "waiting for its device"
        elif position.kind is not PositionKind.COLLECTIVE:
            activity = rank_detail_text(context, rank)
        text = f"{in_place(context.place(rank))}, {activity}"
        by_text.setdefault(text, []).append(rank)
    lines = [f"  {ranks_phrase(same)}: {text}" for text, same in by_text.items()]
    left_out = len(lines) - _MOST_COHORTS
    return lines if left_out <= 0 else [*lines[:_MOST_COHORTS], f"  and {left_out} other places"]


def _unclear_text(job: ObservedJob, ranks: Sequence[int]) -> list[str]:
    """Ranks that may be in the collective or not."""
    without_stack = [rank for rank in ranks if job.ranks[rank].main is None]
    in_native = [rank for rank in ranks if job.ranks[rank].main is not None]
    lines = []
    if in_native:
        line = job.positions[in_native[0]].line or "an unknown line"
        lines.append(
            f"  {ranks_phrase(in_native)}: in native code at {line}; it is not known whether this"
            " is a collective"
        )
    if without_stack:
        lines.append(f"  {ranks_phrase(without_stack)}: no stack, see below")
    return lines


# -- what is not known -----------------------------------------------------------------------------


def unknown_text(job: ObservedJob) -> list[str]:
    """What the stacks of a job do not show."""
    lines = [NOT_WATCHED]
    if any(observation.is_assumed for observation in job.ranks.values()):
        lines.append(
            "the processes have no rank variables: their ranks are assumed from the order in which"
            " they started, and whether there are more ranks is not known"
        )
    problems = grouped(
        (problem_text(observation.problem), rank)
        for rank, observation in sorted(job.ranks.items())
        if observation.problem is not None
    )
    for problem, ranks in problems.items():
        lines.append(f"stacks of {ranks_phrase(ranks)}: {problem}")
    native = [
        rank for rank, observation in job.ranks.items() if observation.native_problem is not None
    ]
    if native:
        lines.append(
            f"native frames of {ranks_phrase(native)}: waits in C++ below the last Python line"
        )
    times = [observation.seen_ns for observation in job.ranks.values()]
    apart_s = (max(times) - min(times)) / 1e9 if times else 0.0
    if apart_s > max(60.0, job.seconds):
        hosts = len({observation.host for observation in job.ranks.values()})
        lines.append(
            f"torchwhere looked at the {plural(hosts, 'host')} at different times, up to"
            f" {apart_s:.0f} s apart: ranks may have moved in between"
        )
    return lines


def problem_text(problem: str) -> str:
    """Why py-spy could not read a process, and what to do."""
    return PROBLEMS.get(problem, PROBLEMS[Refusal.UNSUPPORTED])


def old_dumps_text(paths: Sequence[Path]) -> list[str]:
    """Say that dumps are older than the first look, and how to read them."""
    if not paths:
        return []
    return [
        (
            f"{plural(len(paths), 'dump')} of the flight recorder in {paths[0].parent}, older than"
            " the first look: read with torchwhere doctor --flight-recorder"
        )
    ]
