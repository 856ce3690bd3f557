"""Whether the collectives are as a test says they must be.

Takes `Comms` and what is asked of it in the words of `comms.expect` (`all_reduce=2`,
`bytes__le=1000`, `module="head"`), gives a `Expectation`. A word that means nothing is a ValueError
that names the close ones: a misspelt op would count 0 for ever.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torchwhere.core.place import ROOT
from torchwhere.diagnose.comms.tree import PASSES, Comms, is_within

# The public names of all collectives, less what a newer torch may add. A test holds it against
# torch itself.
OPS = (
    *(
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
    ),
    *(
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "gather",
    ),
    *(
        "monitored_barrier",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    ),
    *("scatter", "send"),
)
# since torch 2.13
_NEWER = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
QUANTITIES = ("bytes", "calls", "others")  # in all; and calls of the ops that were not named
FILTERS = ("module", "pass_", "group", "for_")
_OPERATORS: dict[str, tuple[str, Callable[[int, int], bool]]] = {
    "eq": ("==", operator.eq),
    "ne": ("!=", operator.ne),
    "le": ("<=", operator.le),
    "lt": ("<", operator.lt),
    "ge": (">=", operator.ge),
    "gt": (">", operator.gt),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was expected, and what was found."""

    what: str
    sign: str
    value: int
    found: int
    holds: bool


@dataclass(frozen=True, slots=True)
class Expectation:
    """What was expected of which collectives."""

    checks: tuple[Check, ...]
    filters: dict[str, str]
    looked_at: Comms  # what the filters left
    everything: Comms

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)


@dataclass(frozen=True, slots=True)
class KnownNames:
    """The names there are, whether they had to do with a collective or not."""

    modules: Collection[str] = ()
    groups: Collection[str] = ()


def check(
    found: Comms, *, filters: Mapping[str, str | None], wanted: Mapping[str, Any], names: KnownNames
) -> Expectation:
    """Hold the collectives against what is wanted."""
    kept = {name: value for name, value in filters.items() if value is not None}
    for name in ("module", "for_"):
        if kept.get(name) == ROOT:
            kept[name] = ""
    _check_filters(kept, found, names)
    asked = [_parsed(name, value, found) for name, value in wanted.items()]
    if not asked:
        raise ValueError(
            "expect(): nothing is expected; say for example expect(all_reduce=2) or"
            " expect(calls__le=10)"
        )
    looked_at = found.only(**kept)
    named = {what for what, _, _ in asked}
    checks = tuple(_checked(what, suffix, value, looked_at, named) for what, suffix, value in asked)
    return Expectation(checks, kept, looked_at, found)


def _parsed(name: str, value: Any, found: Comms) -> tuple[str, str, int]:
    """`all_reduce__le=4` in its three parts."""
    what, _, suffix = name.rpartition("__") if "__" in name else (name, "", "eq")
    if suffix not in _OPERATORS:
        raise ValueError(
            f"expect({name}=...): no operator __{suffix}; there are"
            f" {_list(f'__{one}' for one in _OPERATORS)}"
        )
    what = _NEWER.get(what, what)
    known = {*OPS, *QUANTITIES, *found.counts}
    if what not in known:
        raise ValueError(
            f"expect({name}=...): no collective"
            f" {what!r}{_close(what, known) or f'; there are {_list(known)}'}"
        )
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expect({name}={value!r}): expected a whole number")
    if value < 0:
        raise ValueError(f"expect({name}={value}): expected a number of 0 or more")
    return what, suffix, value


def _checked(what: str, suffix: str, value: int, looked_at: Comms, named: set[str]) -> Check:
    sign, holds = _OPERATORS[suffix]
    counts = looked_at.counts
    if what == "bytes":
        number = looked_at.bytes
    elif what == "calls":
        number = counts.total()
    elif what == "others":
        number = sum(count for op, count in counts.items() if op not in named)
    else:
        number = counts[what]
    return Check(what, sign, value, number, holds(number, value))


def _check_filters(filters: Mapping[str, Any], found: Comms, names: KnownNames) -> None:
    for name, value in filters.items():
        if not isinstance(value, str):
            raise TypeError(f"expect({name}={value!r}): expected a name")
    pass_, group = filters.get("pass_"), filters.get("group")
    if pass_ is not None and pass_ not in PASSES:
        raise ValueError(f"expect(pass_={pass_!r}): no such pass; there are {_list(PASSES)}")
    groups = {*names.groups, *found.groups}
    if group is not None and group not in groups:
        raise ValueError(f"expect(group={group!r}): no such group; there are {_list(groups)}")
    modules = {*names.modules, *(name for name, _, _ in found.walk() if name is not None)}
    for name in ("module", "for_"):
        value = filters.get(name)
        if value and not any(is_within(one, value) for one in modules):
            raise ValueError(f"expect({name}={value!r}): no such module{_close(value, modules)}")


def _close(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
