"""The message of a failed test on collectives: what was expected, what was found, and where.

Takes an `Expectation` or the differences to a snapshot, gives one text. Long lists are cut: the
first rows are enough to begin with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len

from torchwhere.core.place import shown
from torchwhere.core.units import amount
from torchwhere.diagnose.comms.expect import Check, Expectation
from torchwhere.diagnose.comms.outline import params_text
from torchwhere.diagnose.comms.snapshot import CommsDifference, SnapshotRow
from torchwhere.diagnose.comms.tree import Comms, CommsKey, CommsSum
from torchwhere.render.lines import plain

_MOST_ROWS = 40
_MOST_LINES = 3  # of the user's code for one row
_PREPOSITIONS = {"module": "in", "pass_": "in", "group": "on", "for_": "for"}


def failure(expectation: Expectation) -> str:
    """Why an expectation does not hold."""
    where = "".join(
        f" {_PREPOSITIONS[name]} {plain(shown(value))}"
        for name, value in expectation.filters.items()
    )
    checks = sorted(expectation.checks, key=lambda check: check.holds)
    lines = [f"the collectives{where} are not as expected:"]
    lines += _aligned([_check_row(check) for check in checks])
    lines.append(f"found{where}:")
    lines += _comms_lines(expectation.filtered)
    has_none = expectation.filters and not expectation.filtered.counts
    if has_none and expectation.everything.counts:
        lines += ["found elsewhere:", *_comms_lines(expectation.everything)]
    return "\n".join(lines)


def _check_row(check: Check) -> list[str]:
    return [
        "",
        check.quantity,
        f"{check.sign} {check.expected:,}",
        f"found {check.actual:,}",
        "as expected" if check.holds else "WRONG",
    ]


def _comms_lines(comms: Comms) -> list[str]:
    rows = [_comms_row(module, key, counter) for module, key, counter in comms.walk()]
    return _aligned(rows[:_MOST_ROWS]) + _rest(rows) if rows else ["  no collectives"]


def _rest(rows: Sequence[object]) -> list[str]:
    return [f"  … and {len(rows) - _MOST_ROWS} more rows"] if len(rows) > _MOST_ROWS else []


def _comms_row(module: str | None, key: CommsKey, counter: CommsSum) -> list[str]:
    lines = ", ".join(map(plain, list(counter.lines)[:_MOST_LINES])) + (
        " …" if len(counter.lines) > _MOST_LINES else ""
    )
    count, op, *rest = _cells(SnapshotRow(module, *key, counter.count, counter.bytes))
    return ["", count, op, _place(module, key.pass_), *rest, f"at {lines}" if lines else ""]


def _place(module: str | None, pass_: str) -> str:
    if module is not None:
        return f"{pass_} of {plain(shown(module))}"
    return "outside any module" if pass_ == "outside" else f"{pass_}, outside any module"


def _cells(row: SnapshotRow) -> list[str]:
    """The cells that a row of collectives and a row of a snapshot share."""
    beneficiary = row.beneficiary
    named = params_text(beneficiary) if isinstance(beneficiary, tuple) else shown(beneficiary)
    return [
        f"{row.count} x",
        plain(row.op),
        amount(row.bytes) if row.bytes else "",
        f"on {plain(row.group)}",
        "" if beneficiary in (None, row.module) else f"for {plain(named)}",
    ]


def difference_text(path: object, differences: Sequence[CommsDifference]) -> str:
    """How the collectives differ from a snapshot."""
    rows = [line for difference in differences for line in _difference_lines(difference)]
    lines = [f"the collectives differ from those of {path} (- expected, + found)"]
    lines += rows[:_MOST_ROWS] + _rest(rows)
    lines.append(
        "If the new collectives are right: run once with TORCHWHERE_REGENERATE=1, or call"
        " expect_same_as(path, regenerate=True)."
    )
    return "\n".join(lines)


def _difference_lines(difference: CommsDifference) -> Iterator[str]:
    yield f"  {_place(difference.module, difference.pass_)}"
    rows = [*_signed("-", difference.expected), *_signed("+", difference.actual)]
    yield from (f"  {line}" for line in _aligned(rows))


def _signed(sign: str, rows: Iterable[SnapshotRow]) -> list[list[str]]:
    return [["", sign, *_cells(row)] for row in rows]


def _aligned(rows: list[list[str]]) -> list[str]:
    """Align the cells of rows. The first cell of each row is empty: a margin."""
    widths = [max(map(cell_len, cells)) for cells in zip(*rows, strict=True)]
    padded = (
        "  ".join(
            cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)
        )
        for row in rows
    )
    return [line.rstrip() for line in padded]
