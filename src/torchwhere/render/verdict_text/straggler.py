"""Sentences on ranks that are late repeatedly."""

from __future__ import annotations

from typing import Any

from torchwhere.core.place import shown
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.lost_between import Moment
from torchwhere.diagnose.doctor.rules.straggler import LateRanks
from torchwhere.diagnose.doctor.stack_samples import SampledPlace
from torchwhere.diagnose.doctor.stragglers import Straggler
from torchwhere.render.verdict_text.exits import ended_text
from torchwhere.render.verdict_text.phrases import agree, subject_text


def late_ranks_text(cause: LateRanks, context: Context) -> list[str]:
    """The sentences on the ranks; if the job is over, also that: lateness did not end it."""
    has_own_end = cause.ended_unfinished and not context.exits.ended_externally
    return straggler_text(cause.straggler) + (ended_text(context) if has_own_end else [])


def straggler_text(late: Straggler) -> list[str]:
    """How late the ranks are, what it costs, and where they lose the time."""
    subjects = subject_text(late.ranks)
    if late.on_device:
        subjects = f"The {agree(late.ranks, 'device', 'devices')} of {ranks_phrase(late.ranks)}"
    lines = [
        (
            f"{subjects} {agree(late.ranks, 'is', 'are')} late by"
            f" {_delay_text(late)}: this costs the job {late.share:.0%} of its time."
            f"{_clocks_text(late)}{_cpu_text(late)}"
        )
    ]
    if late.after is not None and late.before is not None:
        subject = agree(late.ranks, "It", f"Rank {late.rank}, for example,")
        phase = f"in phase {late.phase}, " if late.phase else ""
        between = f"between {moment_text(late.after)} and {moment_text(late.before)}"
        lines.append(f"{subject} loses the time {phase}{between}.")
    if late.sampled is not None:
        whose = agree(late.ranks, "its", f"rank {late.rank}'s")
        lines.append(sampled_text(late.sampled, whose=whose))
    return lines


_PART_TEXTS = {
    "data": ", while it loads data",
    "checkpoint": ", while it saves a checkpoint",
    "evaluation": ", while it evaluates",
}


def sampled_text(place: SampledPlace, *, whose: str) -> str:
    """`71 of 90 samples of its stack are in tokenize (data.py:40), module layers.3.`"""
    module = "" if place.module is None else f", module {shown(place.module)}"
    inside = "" if place.inside is None else f", inside {place.inside}"
    return (
        f"{place.count} of {place.of} samples of {whose} stack are in"
        f" {place.function} ({place.line}){module}{inside}{_PART_TEXTS.get(place.part, '')}."
    )


def _delay_text(late: Straggler) -> str:
    rounds = "steps" if late.group is None else f'collectives of group "{late.group}"'
    since = f"step {late.since_step}" if late.group is None else f"#{late.since_number}"
    return (
        f"{late.late_s * 1e3:.3g} ms in {late.steps} of the last {late.of_steps} {rounds}, since"
        f" {since}"
    )


def _clocks_text(late: Straggler) -> str:
    if not late.unsure_s:
        return ""
    return f" The host clocks were aligned to about {late.unsure_s * 1e3:.2g} ms."


def _cpu_text(late: Straggler) -> str:
    if not late.lacks_cpu:
        return ""
    subject = agree(late.ranks, "It", f"Rank {late.rank}")
    return (
        f" {subject} waited for a CPU {late.queued:.0%} of the time: something else runs on the"
        " CPUs it may use."
    )


def moment_text(moment: Moment) -> str:
    """`all_reduce in backward of layers.0 at train.py:9`."""
    where = "" if moment.module is None else f" in {moment.pass_} of {shown(moment.module)}"
    return f"{moment.action}{where}" + (f" at {moment.line}" if moment.line else "")


def late_ranks_facts(cause: LateRanks) -> dict[str, Any]:
    """The facts of JSON that are texts."""
    after, before = cause.straggler.after, cause.straggler.before
    return {
        "after": moment_text(after) if after is not None else None,
        "before": moment_text(before) if before is not None else None,
    }
