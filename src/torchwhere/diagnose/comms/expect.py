"""Checks the collectives against the expectations of a test.

Takes `Comms` and the arguments of `comms.expect` (`all_reduce=2`, `bytes__le=1000`,
`module="head"`), gives an `Expectation`. An unknown name is a ValueError that suggests similar
ones: without the error, a misspelt op would always count 0.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torchwhere.core.place import ROOT
from torchwhere.diagnose.comms.tree import PASSES, Comms, is_within

# The public names of all collectives. A newer torch may add some. A test compares the list with
# the installed torch.
OPS = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
# since torch 2.13
_NEW_NAMES = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
QUANTITIES = ("bytes", "calls", "others")  # totals; `others`: calls of ops without an expectation
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
    """One expected number and the actual one."""

    quantity: str
    sign: str
    expected: int
    actual: int
    holds: bool


@dataclass(frozen=True, slots=True)
class Expectation:
    """The checks of one `expect` call, and the collectives they looked at."""

    checks: tuple[Check, ...]
    filters: dict[str, str]
    filtered: Comms
    everything: Comms

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)


@dataclass(frozen=True, slots=True)
class KnownNames:
    """All modules and groups of the program, also those without a collective."""

    modules: Collection[str] = ()
    groups: Collection[str] = ()


def check(
    comms: Comms, *, filters: Mapping[str, str | None], wanted: Mapping[str, Any], names: KnownNames
) -> Expectation:
    """Compare the collectives with the wanted numbers."""
    active = {name: value for name, value in filters.items() if value is not None}
    for name in ("module", "for_"):
        if active.get(name) == ROOT:
            active[name] = ""
    _check_filters(active, comms, names)
    conditions = [_parsed(name, value, comms) for name, value in wanted.items()]
    if not conditions:
        raise ValueError(
            "expect(): nothing is expected; say for example expect(all_reduce=2) or"
            " expect(calls__le=10)"
        )
    filtered = comms.only(**active)
    named = {quantity for quantity, _, _ in conditions}
    checks = tuple(_checked(condition, filtered, named) for condition in conditions)
    return Expectation(checks, active, filtered, comms)


def _parsed(name: str, value: Any, comms: Comms) -> tuple[str, str, int]:
    """Split `all_reduce__le=4` into quantity, operator and number."""
    quantity, _, suffix = name.rpartition("__") if "__" in name else (name, "", "eq")
    if suffix not in _OPERATORS:
        raise ValueError(
            f"expect({name}=...): no operator __{suffix}; there are"
            f" {_list(f'__{operator_name}' for operator_name in _OPERATORS)}"
        )
    quantity = _NEW_NAMES.get(quantity, quantity)
    quantities = {*OPS, *QUANTITIES, *comms.counts}
    if quantity not in quantities:
        raise ValueError(
            f"expect({name}=...): no collective"
            f" {quantity!r}{_close(quantity, quantities) or f'; there are {_list(quantities)}'}"
        )
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expect({name}={value!r}): expected a whole number")
    if value < 0:
        raise ValueError(f"expect({name}={value}): expected a number of 0 or more")
    return quantity, suffix, value


def _checked(condition: tuple[str, str, int], comms: Comms, named: set[str]) -> Check:
    quantity, suffix, expected = condition
    sign, compare = _OPERATORS[suffix]
    counts = comms.counts
    if quantity == "bytes":
        actual = comms.bytes
    elif quantity == "calls":
        actual = counts.total()
    elif quantity == "others":
        actual = sum(count for op, count in counts.items() if op not in named)
    else:
        actual = counts[quantity]
    return Check(quantity, sign, expected, actual, compare(actual, expected))


def _check_filters(filters: Mapping[str, Any], comms: Comms, names: KnownNames) -> None:
    for name, value in filters.items():
        if not isinstance(value, str):
            raise TypeError(f"expect({name}={value!r}): expected a name")
    pass_, group = filters.get("pass_"), filters.get("group")
    if pass_ is not None and pass_ not in PASSES:
        raise ValueError(f"expect(pass_={pass_!r}): no such pass; there are {_list(PASSES)}")
    groups = {*names.groups, *comms.groups}
    if group is not None and group not in groups:
        raise ValueError(f"expect(group={group!r}): no such group; there are {_list(groups)}")
    modules = {*names.modules, *(name for name, _, _ in comms.walk() if name is not None)}
    for name in ("module", "for_"):
        value = filters.get(name)
        if value and not any(is_within(module, value) for module in modules):
            raise ValueError(f"expect({name}={value!r}): no such module{_close(value, modules)}")


def _close(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
