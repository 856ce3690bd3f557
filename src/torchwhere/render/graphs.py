"""Compiled graphs as text and HTML: a table of them, and one graph with its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchwhere.core.sanitize import plural, printable
from torchwhere.render.plain_table import PlainTable

_UNNAMED = "model"  # AOTAutograd's name for a model without one
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


def _table(graphs: Sequence[Any]) -> PlainTable:
    rows = [dict(zip(_HEADINGS, _cells(graph), strict=True)) for graph in graphs]
    return PlainTable(_HEADINGS, rows, right=("ops", "seconds", "again"))


def table_text(graphs: Sequence[Any]) -> str:
    """A line for each graph; empty columns are left out.

    `again` is how many times the graph had been compiled before.
    """
    return _table(graphs).text() if graphs else "no compiled graphs"


def table_html(graphs: Sequence[Any]) -> str:
    # Imported here: it loads rich, which a training process does not need.
    from torchwhere.render import html as page

    if not graphs:
        return page.fragment(page.paragraph(table_text(graphs)))
    return page.fragment(_table(graphs).html())


def _cells(graph: Any) -> tuple[str, ...]:
    return (
        graph.id,
        graph.kind if graph.is_live else f"{graph.kind}, dropped",
        printable(graph.function),
        printable(graph.line or ""),
        "" if graph.model == _UNNAMED else printable(graph.model),
        printable(graph.backend or ""),
        "" if graph.ops is None else str(graph.ops),
        inputs_text(graph.inputs),
        "" if graph.seconds is None else f"{graph.seconds:.2f}",
        str(graph.recompiled) if graph.recompiled and graph.kind != "backward" else "",
        printable(graph.reason or ""),
    )


def inputs_text(inputs: Sequence[Any] | None) -> str:
    """How many inputs there are of each kind."""
    kinds = [graph_input.kind for graph_input in inputs or ()]
    return ", ".join(
        plural(kinds.count(kind), kind)
        for kind in ("parameter", "buffer", "input")
        if kind in kinds
    )


def graph_text(graph: Any) -> str:
    """One graph: a title, and its inputs one below the other."""
    title = f"graph {graph.id} {graph.kind} of {printable(graph.function)}"
    lines = [f"{title} ({printable(graph.line)})" if graph.line else title]
    if graph.reason:
        lines.append(f"  compiled again because {printable(graph.reason)}")
    inputs = graph.inputs or ()
    width = len(str(len(inputs)))
    lines += [
        f"  {graph_input.number:>{width}}  {printable(graph_input)}" for graph_input in inputs
    ]
    return "\n".join(lines)


def graph_html(graph: Any) -> str:
    from torchwhere.render import html as page

    return page.text_fragment(graph_text(graph))
