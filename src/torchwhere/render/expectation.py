"""The text of a test that failed: what was expected of the collectives, what was found, and where
each came from.

Takes a `Expectation` or the differences to a snapshot, gives one text. Long lists are cut: the
first rows are enough to begin with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len

from torchwhere.core.place import shown
from torchwhere.diagnose.comms.expect import Check, Expectation
from torchwhere.diagnose.comms.outline import params_text
from torchwhere.diagnose.comms.snapshot import CommsDifference, SnapshotRow
from torchwhere.diagnose.comms.tree import Beneficiary, Comms, CommsKey, CommsSum
from torchwhere.render.text import amount, plain

_MOST_ROWS = 40
_MOST_LINES = 3  # of the user's code for one row
_WORDS = {"module": "in", "pass_": "in", "group": "on", "for_": "for"}


def failure(verdict: Expectation) -> str:
    """Why an expectation does not hold."""
    where = "".join(
        f" {_WORDS[name]} {plain(shown(value))}" for name, value in verdict.filters.items()
    )
    said = [f"the collectives{where} are not as expected:"]
    checks = sorted(verdict.checks, key=lambda check: check.holds)
    said += _aligned([_check_row(check) for check in checks])
    said.append(f"found{where}:")
    said += _found(verdict.filtered)
    if verdict.filters and not verdict.filtered.counts and verdict.everything.counts:
        said += ["found elsewhere:", *_found(verdict.everything)]
    return "\n".join(said)


def _check_row(check: Check) -> list[str]:
    return [
        "",
        check.quantity,
        f"{check.sign} {check.expected:,}",
        f"found {check.actual:,}",
        "as expected" if check.holds else "WRONG",
    ]


def _found(comms: Comms) -> list[str]:
    rows = [_found_row(module, key, counter) for module, key, counter in comms.walk()]
    return _aligned(rows[:_MOST_ROWS]) + _rest(rows) if rows else ["  no collectives"]


def _rest(rows: Sequence[object]) -> list[str]:
    return [f"  … and {len(rows) - _MOST_ROWS} more rows"] if len(rows) > _MOST_ROWS else []


def _found_row(module: str | None, key: CommsKey, counter: CommsSum) -> list[str]:
    lines = ", ".join(map(plain, list(counter.lines)[:_MOST_LINES])) + (
        " …" if len(counter.lines) > _MOST_LINES else ""
    )
    what = _what(key.op, key.group, key.beneficiary, counter.count, counter.bytes, module)
    return ["", *what[:2], _place(module, key.pass_), *what[2:], f"at {lines}" if lines else ""]


def _place(module: str | None, pass_: str) -> str:
    if module is not None:
        return f"{pass_} of {plain(shown(module))}"
    return "outside any module" if pass_ == "outside" else f"{pass_}, outside any module"


def _what(
    op: str, group: str, beneficiary: Beneficiary, count: int, nbytes: int, module: str | None
) -> list[str]:
    """The cells that a row found and a row of a snapshot share."""
    named = params_text(beneficiary) if isinstance(beneficiary, tuple) else shown(beneficiary)
    return [
        f"{count} x",
        plain(op),
        amount(nbytes) if nbytes else "",
        f"on {plain(group)}",
        "" if beneficiary in (None, module) else f"for {plain(named)}",
    ]


def difference_text(path: object, differences: Sequence[CommsDifference]) -> str:
    """How the collectives differ from a snapshot."""
    said = [f"the collectives are not those of {path} (- expected, + found)"]
    rows = [line for difference in differences for line in _difference_lines(difference)]
    said += rows[:_MOST_ROWS] + _rest(rows)
    said.append(
        "If this is right now: run once with TORCHWHERE_REGENERATE=1, or call expect_same_as(path,"
        " regenerate=True)."
    )
    return "\n".join(said)


def _difference_lines(difference: CommsDifference) -> Iterator[str]:
    yield f"  {_place(difference.module, difference.pass_)}"
    rows = [*_signed("-", difference.expected), *_signed("+", difference.found)]
    yield from (f"  {line}" for line in _aligned(rows))


def _signed(sign: str, rows: Iterable[SnapshotRow]) -> list[list[str]]:
    return [
        ["", sign, *_what(row.op, row.group, row.beneficiary, row.count, row.bytes, row.module)]
        for row in rows
    ]


def _aligned(rows: list[list[str]]) -> list[str]:
    """Rows with their cells below each other. The first cell of each is empty: a margin."""
    widths = [max(map(cell_len, cells)) for cells in zip(*rows, strict=True)]
    padded = (
        "  ".join(
            cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)
        )
        for row in rows
    )
    return [line.rstrip() for line in padded]
