"""Compiled graphs as people read them: a table, and one graph with its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchwhere.render.graph import plain

_GAP = "  "
_HEADINGS = (
    "graph",
    "kind",
    "function",
    "line",
    "model",
    "backend",
    "ops",
    "inputs",
    "seconds",
    "again",
    "because",
)
_UNNAMED = "model"  # what AOTAutograd calls a model that was given no name
_RIGHT = ("ops", "seconds", "again")


def table_text(graphs: Sequence[Any]) -> str:
    """A line for each graph; columns in which nothing stands are left out. `again`: how often it
    had been compiled before."""
    if not graphs:
        return "no compiled graphs"
    rows = [_HEADINGS, *map(_row, graphs)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEADINGS))]
    shown = [at for at in range(len(_HEADINGS)) if any(row[at] for row in rows[1:])]
    return "\n".join(
        _GAP.join(_cell(row[at], widths[at], _HEADINGS[at]) for at in shown).rstrip()
        for row in rows
    )


def _cell(text: str, width: int, heading: str) -> str:
    return text.rjust(width) if heading in _RIGHT else text.ljust(width)


def _row(graph: Any) -> tuple[str, ...]:
    return (
        graph.id,
        graph.kind if graph.is_live else f"{graph.kind}, dropped",
        plain(graph.function),
        plain(graph.line or ""),
        "" if graph.model == _UNNAMED else plain(graph.model),
        plain(graph.backend or ""),
        "" if graph.ops is None else str(graph.ops),
        inputs_text(graph.inputs),
        "" if graph.seconds is None else f"{graph.seconds:.2f}",
        str(graph.recompiled) if graph.recompiled and graph.kind != "backward" else "",
        plain(graph.reason or ""),
    )


def table_html(graphs: Sequence[Any]) -> str:
    # it brings rich, which a training process need not load
    from torchwhere.render import html as page
    from torchwhere.render.text import Column

    columns = [Column(heading, right=heading in _RIGHT, optional=True) for heading in _HEADINGS]
    return page.fragment(
        page.table(columns, map(_row, graphs)) if graphs else page.said(table_text(graphs))
    )


def inputs_text(inputs: Sequence[Any] | None) -> str:
    """How many of each kind."""
    if inputs is None:
        return ""
    kinds = [each.kind for each in inputs]
    counts = [
        (kind, kinds.count(kind)) for kind in ("parameter", "buffer", "input") if kind in kinds
    ]
    return ", ".join(f"{count} {kind}{'s' * (count != 1)}" for kind, count in counts)


def graph_text(graph: Any) -> str:
    """One graph: what is known of it, and its inputs one below the other."""
    first = [
        f"graph {graph.id}",
        graph.kind,
        f"of {plain(graph.function)}",
        f"({plain(graph.line)})" if graph.line else "",
    ]
    lines = [" ".join(part for part in first if part)]
    if graph.reason:
        lines.append(f"  compiled again because {plain(graph.reason)}")
    width = len(str(len(graph.inputs or ())))
    lines += [f"  {each.number:>{width}}  {plain(each)}" for each in graph.inputs or ()]
    return "\n".join(lines)


def graph_html(graph: Any) -> str:
    from torchwhere.render import html as page

    return page.fragment(page.lines([(line, "")] for line in graph_text(graph).splitlines()))
