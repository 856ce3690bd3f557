"""The figures as one plain table, with no library: it must print where only torch is installed."""

from __future__ import annotations

from collections.abc import Sequence

from bench.contenders import UNWATCHED
from bench.figures import TARGETS, Column, Figure

_WITH_RATIO = "modules"  # where torchwhere's cost stands far enough above the noise to divide by


def render(machine: str, columns: Sequence[Column]) -> str:
    return "\n".join(
        [machine, "", *_table(columns), "", *_remarks(columns), "", *_targets(columns)]
    )


def _table(columns: Sequence[Column]) -> list[str]:
    head, plain = ["added by"], [UNWATCHED + ", ms in all"]
    for column in columns:
        head.append(column.title)
        plain.append(number(column.unwatched_ms))
        if column.key == _WITH_RATIO:
            head.append("times torchwhere")
            plain.append("")
    names = dict.fromkeys(figure.contender for column in columns for figure in column.figures)
    return _aligned([head, plain, *([name, *_cells(name, columns)] for name in names)])


def _cells(contender: str, columns: Sequence[Column]) -> list[str]:
    cells = []
    for column in columns:
        figure = column.of(contender)
        cells.append(_cell(figure))
        if column.key == _WITH_RATIO:
            cells.append(number(figure.times_torchwhere if figure is not None else None))
    return cells


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    if figure.error is not None:
        return f"fails: {figure.error.partition(':')[0]}"
    return f"{number(figure.median)} ±{number(figure.spread)}"


def number(value: float | None) -> str:
    """Three digits or so."""
    if value is None:
        return "-"
    if abs(value) < 10:
        return f"{value:.2f}"
    return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _remarks(columns: Sequence[Column]) -> list[str]:
    lines = [
        (
            "Median of the rounds ± median distance from it; rounds:"
            f" {', '.join(f'{c.key} {c.rounds}' for c in columns)}."
        )
    ]
    lines += [f"{column.remark}." for column in columns if column.remark]
    for column in columns:
        failed = [figure for figure in column.figures if figure.error is not None]
        lines += [f"{figure.contender} on {column.key} fails: {figure.error}" for figure in failed]
    return lines


def _targets(columns: Sequence[Column]) -> list[str]:
    aimed = [
        target for target in TARGETS if any(column.key == target.workload for column in columns)
    ]
    return _aligned(
        [
            ["target", "measured"],
            *([target.text, number(target.measured(columns))] for target in aimed),
        ]
    )
