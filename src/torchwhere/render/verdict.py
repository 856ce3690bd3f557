"""A verdict as a person reads it at 3 a.m., and as JSON."""

from __future__ import annotations

import json
from typing import Any

from torchwhere.diagnose.doctor.verdict import Verdict, VerdictKind

_TITLES = {
    VerdictKind.MISSING: "HANG",
    VerdictKind.MISMATCH: "MISMATCH",
    VerdictKind.DEADLOCK: "DEADLOCK",
    VerdictKind.DEAD: "DEAD",
    VerdictKind.STRAGGLER: "STRAGGLER",
    VerdictKind.TOGETHER: "HANG, ALL TOGETHER",
    VerdictKind.HEALTHY: "HEALTHY",
}


def verdict_lines(verdict: Verdict) -> list[str]:
    steps = [
        report.place.step for report in verdict.ranks.values() if report.place.step is not None
    ]
    head = [f"{len(verdict.ranks)} rank{'s' * (len(verdict.ranks) != 1)}"]
    if steps:
        head.append(
            f"step {min(steps)}"
            if min(steps) == max(steps)
            else f"steps {min(steps)} to {max(steps)}"
        )
    if verdict.stalled_s is not None:
        head.append(f"no progress for {verdict.stalled_s:.0f} s")
    if verdict.certainty == "inferred":
        head.append(f"({verdict.certainty})")
    title = _TITLES[verdict.kind]
    if verdict.certainty == "unknown":
        title = "DEAD, CAUSE NOT KNOWN" if verdict.kind is VerdictKind.DEAD else "NOT KNOWN"
    lines = [f"{title}  {', '.join(head)}", *verdict.explanation]
    common = verdict.last_common
    if common is not None and verdict.kind is not VerdictKind.MISMATCH:
        where = (
            f"{common['pass']} of {common['module']}"
            if common.get("module")
            else common.get("pass")
        )
        call = f"{common.get('op')} #{common.get('number')}"
        step = f"step {common['step']}" if common.get("step") is not None else None
        lines.append(
            "  last in common: " + ", ".join(filter(None, (call, step, where, common.get("line"))))
        )
    for rank in verdict.culprits[:4]:
        report = verdict.ranks.get(rank)
        if report is not None and report.stack:
            lines.append(f"  stack of rank {rank}, innermost first:")
            lines += [f"    {line.rpartition('/site-packages/')[2]}" for line in report.stack[:12]]
    lines += [f"Not known: {sentence}" for sentence in verdict.missing_data]
    return [_inert(line) for line in lines]


def verdict_text(verdict: Verdict) -> str:
    return "\n".join(verdict_lines(verdict))


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The stable object: what the verdict holds, and its text."""
    found: dict[str, Any] = json.loads(
        json.dumps(verdict.to_dict() | {"text": verdict_text(verdict)}, default=str)
    )
    return found


def _inert(line: str) -> str:
    """Names and messages may hold anything; a terminal must not obey them."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line
    )
