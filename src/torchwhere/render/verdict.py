"""A verdict as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

from torchwhere.core.sanitize import plural, printable, steps_span
from torchwhere.diagnose.doctor.verdict import NO_FAULT, RankReport, Verdict, VerdictKind

TITLES: dict[str, str] = {  # by kind
    VerdictKind.MISSING: "HANG",
    VerdictKind.MISMATCH: "MISMATCH",
    VerdictKind.DEADLOCK: "DEADLOCK",
    VerdictKind.DEAD: "DEAD",
    VerdictKind.STRAGGLER: "STRAGGLER",
    VerdictKind.TOGETHER: "HANG, ALL TOGETHER",
    VerdictKind.PARTIAL: "NOT ALL RANKS WATCHED",
    VerdictKind.HEALTHY: "HEALTHY",
}
_MOST_STACKS = 4
_MOST_DEVICES = 4
_MOST_WORKER_STACKS = 3
_MOST_FRAMES = 12


def verdict_lines(verdict: Verdict) -> list[str]:
    """The lines of the text: title, explanation, devices, last common collective, stacks, and
    missing data."""
    lines = [_title(verdict), *verdict.explanation, *_device_lines(verdict)]
    if verdict.last_common is not None and verdict.kind is not VerdictKind.MISMATCH:
        lines.append(f"  last in common: {_call_text(verdict.last_common)}")
    for rank in verdict.culprits[:_MOST_STACKS]:
        report = verdict.ranks.get(rank)
        if report is not None and report.stack:
            lines += _stack_lines(f"rank {rank}", report.stack)
            lines += _worker_lines(rank, report)
    lines += [f"Not known: {sentence}" for sentence in verdict.missing_data]
    return [printable(line) for line in lines]


def _stack_lines(owner: str, stack: tuple[str, ...]) -> list[str]:
    frames = [f"    {frame.rpartition('/site-packages/')[2]}" for frame in stack[:_MOST_FRAMES]]
    return [f"  stack of {owner}, innermost first:", *frames]


def _worker_lines(rank: int, report: RankReport) -> list[str]:
    """The stacks of the workers that a rank waits for; equal stacks once."""
    pids: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for worker in report.workers:
        pids.setdefault((worker.name, worker.stack), []).append(worker.pid)
    lines = []
    for (name, stack), alike in list(pids.items())[:_MOST_WORKER_STACKS]:
        owner = f"process {alike[0]}, a {name} of rank {rank}"
        if len(alike) > 1:
            owner += f" ({plural(len(alike), 'worker')} with the same stack)"
        lines += _stack_lines(owner, stack) if stack else [f"  no stack of {owner}"]
    return lines


def _device_lines(verdict: Verdict) -> list[str]:
    """Where the CPUs and the devices of the culprits are, if their devices are known."""
    reports = [(rank, verdict.ranks[rank]) for rank in verdict.culprits if rank in verdict.ranks]
    lines = [f"  rank {rank}: {report.device}" for rank, report in reports if report.device]
    left_out = len(lines) - _MOST_DEVICES
    return [*lines[:_MOST_DEVICES], *([f"  and {left_out} more"] if left_out > 0 else [])]


def _title(verdict: Verdict) -> str:
    places = [report.place for report in verdict.ranks.values()]
    steps = [place.step for place in places if place.step is not None]
    facts = [plural(len(verdict.ranks), "rank")]
    if steps:
        facts.append(steps_span(steps, to=" to "))
    if verdict.stalled_s is not None:
        facts.append(f"no progress for {verdict.stalled_s:.0f} s")
    if verdict.certainty == "inferred":
        facts.append(f"({verdict.certainty})")
    title = TITLES[verdict.kind]
    if verdict.kind in NO_FAULT and verdict.stalled_s is not None:
        title = _standstill_title(verdict.facts.get("paused"))
    if verdict.facts.get("no_hang_seen"):  # stacks do not show that steps progress
        title = "NO HANG SEEN"
    if verdict.certainty == "unknown":
        title = "DEAD, CAUSE NOT KNOWN" if verdict.kind is VerdictKind.DEAD else "NOT KNOWN"
    return f"{title}  {', '.join(facts)}"


def _standstill_title(paused: dict[str, Any] | None) -> str:
    """The title for a running job that makes no progress: a pause, or not yet a hang."""
    if paused is None:
        return "NOT YET A HANG"
    activity = str(paused["activity"]).upper()
    return activity if activity == "STARTING" else f"PAUSED: {activity}"


def _call_text(call: dict[str, Any]) -> str:
    parts: list[str | None] = [f"{call.get('op')} #{call.get('number')}"]
    if call.get("step") is not None:
        parts.append(f"step {call['step']}")
    parts.append(f"{call['pass']} of {call['module']}" if call.get("module") else call.get("pass"))
    parts.append(call.get("line"))
    if call.get("framework_line"):
        parts.append(f"in {call['framework_line']}")
    return ", ".join(part for part in parts if part)


def verdict_text(verdict: Verdict) -> str:
    return "\n".join(verdict_lines(verdict))


def text_lines(verdict: dict[str, Any]) -> list[str]:
    """The lines of the text of a verdict that `verdict_json` returned."""
    return str(verdict.get("text") or "").splitlines()


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as a stable JSON object, with its text."""
    values = verdict.to_dict() | {"text": verdict_text(verdict)}
    decoded: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return decoded
