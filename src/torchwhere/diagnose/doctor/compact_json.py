"""The ranks of a verdict as JSON: all of them whole where they are few; of many, one whole for all
that are like it.

16,384 whole reports would be more than anybody reads, and tens of megabytes. Of a job with more
than `MOST_WHOLE` ranks, the culprits and one rank of each kind are whole, and everyone else has
`state`, `step` and `like`: the rank whose report stands for its own. In what the two are the same
is said once, in `alike_in`: in all but the step as long as there are few enough kinds of ranks, in
less where there are too many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchwhere.diagnose.doctor.verdict import RankReport

MOST_WHOLE = 256
_CULPRITS = 64  # that are whole, of thousands
_ALIKE_IN = (
    ("state", "pass", "module", "call", "line", "detail", "op", "group", "number"),
    ("state", "pass", "module", "line", "detail", "op", "group"),
    ("state", "pass", "module", "op"),
    ("state", "pass", "op"),
    ("state",),
)


def folded(ranks: Mapping[int, RankReport], culprits: Iterable[int]) -> dict[str, Any]:
    """`ranks` of a verdict; and `alike_in`, where not all of them are whole."""
    in_order = sorted(ranks.items())
    if len(ranks) <= MOST_WHOLE:
        return {"ranks": {str(rank): report.to_dict() for rank, report in in_order}}
    names, heads = _heads(in_order)
    whole = {rank for rank in list(culprits)[:_CULPRITS] if rank in ranks} | set(heads.values())
    found: dict[str, Any] = {}
    for rank, report in in_order:
        if rank in whole:
            found[str(rank)] = report.to_dict()
        else:
            found[str(rank)] = {
                "state": str(report.state),
                "step": report.place.step,
                "like": heads[_key(report, names)],
            }
    return {"ranks": found, "alike_in": list(names)}


def _heads(
    ranks: list[tuple[int, RankReport]],
) -> tuple[tuple[str, ...], dict[tuple[Any, ...], int]]:
    """In what ranks are told apart, and the first rank of each kind."""
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
