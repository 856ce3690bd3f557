"""The ranks of a verdict as JSON: complete for small jobs, with one complete report per kind of
rank for large ones.

16,384 complete reports would be tens of megabytes. In a job with more than `MOST_WHOLE` ranks, the
culprits and one rank of each kind are complete; all others have `state`, `step` and `like`: the
rank whose report represents theirs. `alike_in` lists the fields in which the two are equal: all but
the step if there are few kinds of ranks, fewer fields otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchwhere.diagnose.doctor.verdict import RankReport

MOST_WHOLE = 256
_CULPRITS = 64  # most culprits that are complete
_ALIKE_IN = (
    ("state", "pass", "module", "call", "line", "detail", "op", "group", "number"),
    ("state", "pass", "module", "line", "detail", "op", "group"),
    ("state", "pass", "module", "op"),
    ("state", "pass", "op"),
    ("state",),
)


def folded(ranks: Mapping[int, RankReport], culprits: Iterable[int]) -> dict[str, Any]:
    """`ranks` of a verdict, and `alike_in` if not all of them are complete."""
    in_order = sorted(ranks.items())
    if len(ranks) <= MOST_WHOLE:
        return {"ranks": {str(rank): report.to_dict() for rank, report in in_order}}
    names, heads = _heads(in_order)
    whole = {rank for rank in list(culprits)[:_CULPRITS] if rank in ranks} | set(heads.values())
    reports: dict[str, Any] = {}
    for rank, report in in_order:
        if rank in whole:
            reports[str(rank)] = report.to_dict()
        else:
            reports[str(rank)] = {
                "state": str(report.state),
                "step": report.place.step,
                "like": heads[_key(report, names)],
            }
    return {"ranks": reports, "alike_in": list(names)}


def _heads(
    ranks: list[tuple[int, RankReport]],
) -> tuple[tuple[str, ...], dict[tuple[Any, ...], int]]:
    """The fields that distinguish kinds of ranks, and the first rank of each kind."""
    for names in _ALIKE_IN:
        heads: dict[tuple[Any, ...], int] = {}
        for rank, report in ranks:
            heads.setdefault(_key(report, names), rank)
            if len(heads) > MOST_WHOLE:
                break
        else:
            break
    return names, heads


def _key(report: RankReport, names: tuple[str, ...]) -> tuple[Any, ...]:
    place, last = report.place, report.last or {}
    return tuple([_GET[name](report, place, last) for name in names])


_GET: dict[str, Any] = {
    "state": lambda report, place, last: report.state,
    "pass": lambda report, place, last: place.pass_,
    "module": lambda report, place, last: place.module,
    "call": lambda report, place, last: place.call,
    "line": lambda report, place, last: place.line,
    "detail": lambda report, place, last: report.detail,
    "op": lambda report, place, last: last.get("op"),
    "group": lambda report, place, last: last.get("group"),
    "number": lambda report, place, last: last.get("number"),
}
