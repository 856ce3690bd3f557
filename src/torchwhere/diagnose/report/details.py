"""The ranks that the report shows in detail: culprits, one rank of each state and place, others.

Takes a run and its verdict, chooses the ranks, and gives the stack, the last events and the rank
report of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.memory import memory_samples
from torchwhere.blackbox.run import RunSummary, read_again
from torchwhere.core.grouping import grouped
from torchwhere.core.results import plain_fields
from torchwhere.diagnose.clocks.host_clocks import HostClocks
from torchwhere.diagnose.doctor.verdict import RankReport, Verdict
from torchwhere.diagnose.report.texts import cut, event_text, milliseconds, place_text
from torchwhere.gpus.labels import gpu_label, memory_label
from torchwhere.gpus.samples import HostGpus, gpus_of

MOST_RANKS = 64
_MOST_CULPRITS = 32
_LAST_EVENTS = 30
_MOST_STACK = 64


@dataclass(frozen=True, slots=True)
class Detail:
    """The details of one rank."""

    report: RankReport | None
    # ms before the newest record of all ranks, kind, text, place
    events: tuple[tuple[float, str, str, str], ...]
    memory: str | None = None  # of its device, at the end of its last step
    gpus: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        report = self.report
        return {
            "stack": [cut(line) for line in report.stack[:_MOST_STACK]] if report else [],
            "detail": cut(report.detail) if report and report.detail is not None else None,
            **plain_fields(self, "events", "memory"),
            "gpus": [cut(gpu) for gpu in self.gpus],
            "report": _cut_all(report.to_dict() | {"stack": []}) if report else None,
        }


def _cut_all(value: Any) -> Any:
    """Cut the texts and lists of a nested value."""
    if isinstance(value, dict):
        return {key: _cut_all(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cut_all(inner) for inner in value[:MOST_RANKS]]
    return cut(value) if isinstance(value, str) else value


def chosen_ranks(run: RunSummary[Any], verdict: Verdict) -> list[int]:
    """The ranks to show: culprits, one rank of each state and place (the most common first),
    members of the verdict's group, and others up to the limit."""
    places = [(rank, report.state, report.place) for rank, report in verdict.ranks.items()]
    kinds = grouped(
        ((state, place.pass_, place.module, place.full_line), rank) for rank, state, place in places
    )
    by_size = sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    heads = [ranks[0] for ranks in by_size]
    members = (verdict.collective or {}).get("group_ranks")
    near = members if isinstance(members, list) else []
    in_order = [
        *verdict.culprits[:_MOST_CULPRITS],
        *heads[: _MOST_CULPRITS // 2],
        *near,
        *heads,
        *verdict.culprits,
        *run.boxes,
    ]
    return [rank for rank in dict.fromkeys(in_order) if rank in run.boxes][:MOST_RANKS]


def read_boxes(run: RunSummary[Any], ranks: Iterable[int]) -> dict[int, Box]:
    """Read the boxes of some ranks again; one that was deleted is left out."""
    return {box.rank: box for box in read_again(run, ranks)}


def details(
    boxes: Mapping[int, Box],
    verdict: Verdict,
    when: HostClocks,
    *,
    newest_ns: int,
    gpus: Sequence[HostGpus] = (),
) -> dict[int, Detail]:
    return {
        rank: Detail(
            verdict.ranks.get(rank),
            _last_events(box, when, newest_ns),
            _memory(box),
            tuple(map(gpu_label, gpus_of(box.meta, gpus))),
        )
        for rank, box in sorted(boxes.items())
    }


def _memory(box: Box) -> str | None:
    samples = memory_samples(box)
    return memory_label(samples[-1]) if samples else None


def _last_events(
    box: Box, when: HostClocks, newest_ns: int
) -> tuple[tuple[float, str, str, str], ...]:
    return tuple(
        (
            milliseconds(when.aligned_ns(box.rank, event.t_ns) - newest_ns),
            event.kind,
            event_text(event),
            place_text(event.place),
        )
        for event in box.events(last=_LAST_EVENTS)
    )
