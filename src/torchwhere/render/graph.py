"""The autograd graph as people read it: text with repeats folded, DOT, HTML.

The text has a line for each operation, from the tensors asked about to the leaves; what is drawn to
the left of it says what is skipped over (`│`, ending at `└`) and what repeats (`12 x ┌`). Leaves,
and what only turns a leaf (`TBackward0`), stand on the line of the operation that uses them. Names
and shapes come from the user's program: they are shown made harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from torchwhere.core.place import shown
from torchwhere.render.folds import Fold, NumberedNames, Step, fold

_FARTHEST = 40  # rows; an edge over more is told by number alone
# What shows a leaf in another shape or type: not worth a line of its own.
_TURNING = {
    f"{op}Backward0"
    for op in (
        "T",
        "Transpose",
        "Permute",
        "View",
        "UnsafeView",
        "Expand",
        "Unsqueeze",
        "ToCopy",
        "Alias",
    )
}
_MANY = 4  # edges into a row
_MOST_SHAPES = 3
_GAP = "  "


class Graph(Protocol):
    """What is shown: `backward.BackwardGraph`."""

    @property
    def roots(self) -> tuple[int, ...]: ...
    @property
    def starts(self) -> NDArray[np.uint32]: ...
    @property
    def targets(self) -> NDArray[np.uint32]: ...
    @property
    def ops(self) -> list[str]: ...
    @property
    def op(self) -> NDArray[np.uint32]: ...
    @property
    def outputs(self) -> list[Any]: ...
    @property
    def output(self) -> NDArray[np.uint32]: ...
    @property
    def places(self) -> Any: ...
    @property
    def lines(self) -> list[str | None]: ...
    @property
    def line(self) -> NDArray[np.uint32]: ...
    @property
    def leaves_named(self) -> dict[int, tuple[str, ...]]: ...
    @property
    def freed(self) -> int: ...
    def __len__(self) -> int: ...


# -- texts -----------------------------------------------------------------------------------------


def plain(text: object) -> str:
    found = str(text)
    return (
        found
        if found.isprintable()
        else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in found)
    )


def shape_text(shapes: Sequence[Any]) -> str:
    return " ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes)


def node_text(node: Any) -> str:
    """One node in one line."""
    parts = [
        f"#{node.number} {node.op}",
        shape_text(node.shapes),
        node.param or ("a leaf" if node.is_leaf else ""),
    ]
    if node.module is not None and not node.is_leaf:
        parts.append(f"in {shown(node.module)}{f' call {node.call}' if node.call else ''}")
    parts += [
        f"at {node.line}" if node.line else "",
        "→ " + ", ".join(map(str, node.following)) if node.following else "",
    ]
    return plain(" ".join(part for part in parts if part))


def summary(graph: Graph) -> str:
    """How much there is."""
    named = sum(map(bool, graph.leaves_named.values()))
    unnamed = len(graph.leaves_named) - named
    parts = [_plural(len(graph), "node"), _plural(len(graph.targets), "edge")]
    parts += [_plural(named, "parameter")] if named else []
    parts += [_plural(unnamed, "leaf without a name", "leaves without a name")] if unnamed else []
    parts += (
        [f"backward has run: {_plural(graph.freed, 'node')} freed what they saved"]
        if graph.freed
        else []
    )
    return ", ".join(parts)


def _plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


# -- the nodes that get a line ---------------------------------------------------------------------


class _Rows(NamedTuple):
    """The nodes that get a line, top to bottom; `following` are rows, `leaves` the texts of the
    leaves that a node uses."""

    nodes: list[int]
    following: list[list[int]]
    leaves: list[str]


def _rows(graph: Graph) -> _Rows:
    starts, targets = graph.starts.tolist(), graph.targets.tolist()
    uses = np.bincount(graph.targets, minlength=len(graph)).tolist()
    roots = set(graph.roots)
    inline = {leaf: (leaf, "") for leaf in graph.leaves_named if leaf not in roots}
    turning = {number for number, op in enumerate(graph.ops) if op in _TURNING}
    for node in np.flatnonzero(np.isin(graph.op, list(turning))).tolist():
        following = targets[starts[node] : starts[node + 1]]
        if (
            len(following) == 1
            and following[0] in graph.leaves_named
            and uses[node] == 1
            and node not in roots
        ):
            inline[node] = following[0], _op(graph, node)
    nodes = [node for node in range(len(graph)) if node not in inline]
    at = {node: row for row, node in enumerate(nodes)}
    below = [targets[starts[node] : starts[node + 1]] for node in nodes]
    return _Rows(
        nodes,
        [sorted({at[node] for node in following if node in at}) for following in below],
        [
            _leaves_text(graph, node, [inline[n] for n in following if n in inline])
            for node, following in zip(nodes, below, strict=True)
        ],
    )


def _leaves_text(graph: Graph, node: int, leaves: Sequence[tuple[int, str]]) -> str:
    """The leaves that a node uses, those of its own module by their short names."""
    module = graph.places.modules[graph.places.module[node]]
    texts = []
    for leaf, via in leaves:
        names = graph.leaves_named[leaf]
        name = names[0] if names else f"leaf #{leaf}"
        own = name.removeprefix(f"{module}.") if module else name
        texts.append(
            (name if "." in own else own) + (f" ({via.removesuffix('Backward0')})" if via else "")
        )
    return ", ".join(dict.fromkeys(texts))


def _op(graph: Graph, node: int) -> str:
    return str(graph.ops[graph.op[node]])


def _module(graph: Graph, node: int) -> str:
    module, call = graph.places.modules[graph.places.module[node]], int(graph.places.call[node])
    return "" if module is None else shown(module) + (f" call {call}" if call > 0 else "")


# -- text ------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    number: str
    drawn: str  # the operation, and what is left of it
    module: str = ""
    shape: str = ""
    line: str = ""
    more: str = ""


class _Page:
    """Makes the lines of one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.rows = _rows(graph)
        texts = [
            (_module(graph, node), leaves)
            for node, leaves in zip(self.rows.nodes, self.rows.leaves, strict=True)
        ]
        known = {pair: NumberedNames.of(map(plain, pair)) for pair in set(texts)}
        self._names = [known[pair] for pair in texts]

    def folded(self) -> list[int | Fold]:
        return fold(
            _keys(self.graph, self.rows, self._names), [names.numbers for names in self._names]
        )

    def lines(self, items: Sequence[int | Fold], inside: tuple[Fold, ...] = ()) -> list[_Line]:
        """The lines of rows and folds. Folds are nested a few deep at most, so this may recurse."""
        found: list[_Line] = []
        skipped: list[int] = []  # rows that an edge leads to, over what comes before them
        for item in items:
            first = item if isinstance(item, int) else item.start
            last = item if isinstance(item, int) else item.end - 1
            lines = (
                [self._line(item, inside)] if isinstance(item, int) else self._repeat(item, inside)
            )
            guides = "".join("└ " if row == first else "│ " for row in skipped)
            skipped = [row for row in skipped if row > last]
            found.append(lines[0]._replace(drawn=guides + lines[0].drawn))
            found += [
                line._replace(drawn=guides.replace("└", " ") + line.drawn) for line in lines[1:]
            ]
            below = self.rows.following[last]
            skipped += [
                row for row in below if last + 1 < row <= last + _FARTHEST and row not in skipped
            ]
        return found

    def _repeat(self, item: Fold, inside: tuple[Fold, ...]) -> list[_Line]:
        lines = self.lines(item.items, (*inside, item))
        times = f"{item.times:,} x "
        if len(lines) == 1:
            return [lines[0]._replace(drawn=times + lines[0].drawn)]
        sides = [
            times + "┌ ",
            *[" " * len(times) + "│ "] * (len(lines) - 2),
            " " * len(times) + "└ ",
        ]
        return [
            line._replace(drawn=side + line.drawn) for side, line in zip(sides, lines, strict=True)
        ]

    def _line(self, row: int, inside: tuple[Fold, ...]) -> _Line:
        graph, node = self.graph, self.rows.nodes[row]
        module, leaves = self._names[row].spanned(self._steps(row, inside))
        below = self.rows.following[row]
        edges = (
            "→ " + ", ".join(str(self.rows.nodes[b]) for b in below)
            if below and below != [row + 1]
            else ""
        )
        line = plain(graph.lines[graph.line[node]] or "")
        if node in graph.leaves_named:
            leaves = ", ".join(graph.leaves_named[node])
        more = _GAP.join(plain(part) for part in (leaves, edges) if part)
        return _Line(
            str(node), plain(_op(graph, node)), plain(module), _shapes(graph, node), line, more
        )

    def _steps(self, row: int, inside: tuple[Fold, ...]) -> list[list[Step]]:
        """How each number in a row's names goes on, in the repeats in which it does."""
        numbers = self._names[row].numbers
        steps: list[list[Step]] = [[] for _ in numbers]
        for each in inside:
            following = self._names[row + each.period].numbers
            for found, number, now in zip(steps, numbers, following, strict=True):
                if now != number:
                    found.append(Step(now - number, each.times))
        return steps


def _keys(graph: Graph, rows: _Rows, names: Sequence[NumberedNames]) -> list[Any]:
    """What two rows have in common if one repeats the other: all but the numbers in their names.

    The rows it leads to are told by distance, but those that many lead to by where they are.
    """
    uses = np.bincount(
        [row for following in rows.following for row in following], minlength=len(rows.nodes)
    )
    return [
        (
            int(graph.op[node]),
            int(graph.output[node]),
            int(graph.line[node]),
            names[row].key,
            tuple(below - row if uses[below] < _MANY else -below for below in rows.following[row]),
        )
        for row, node in enumerate(rows.nodes)
    ]


def text(graph: Graph, *, lines: int | None) -> str:
    """The summary, and the lines aligned below it."""
    page = _Page(graph)
    items = page.folded()
    found = page.lines(items[:lines])[:lines]
    widths = [max((len(line[at]) for line in found), default=0) for at in range(5)]
    texts = [f"behind {_plural(len(graph.roots), 'tensor')}: {summary(graph)}"]
    for line in found:
        cells = [
            line.number.rjust(widths[0]),
            *(line[at].ljust(widths[at]) for at in (1, 2, 3, 4) if widths[at]),
            line.more,
        ]
        texts.append(_GAP.join(cells).rstrip())
    if lines is not None and (len(items) > lines or len(found) == lines < len(page.rows.nodes)):
        texts.append(f"… cut after {lines:,} lines; text(lines=None) has them all")
    return "\n".join(texts)


def _shapes(graph: Graph, node: int) -> str:
    shapes, dtype = graph.outputs[graph.output[node]]
    listed = shape_text(shapes[:_MOST_SHAPES]) + (
        f" and {len(shapes) - _MOST_SHAPES} more" if len(shapes) > _MOST_SHAPES else ""
    )
    return listed if dtype in (None, "float32") else f"{listed} {dtype}"


def html(graph: Graph) -> str:
    """For notebooks."""
    # it brings rich, which a training process need not load
    from torchwhere.render import html as page

    return page.fragment(page.lines([(line, "")] for line in text(graph, lines=500).splitlines()))


# -- DOT -------------------------------------------------------------------------------------------


def dot(graph: Graph) -> str:
    """For Graphviz: leaves are boxes, edges go the way of the gradients."""
    lines = ["digraph backward {", '  node [shape=ellipse, fontname="monospace"];']
    for node in range(len(graph)):
        names = graph.leaves_named.get(node)
        label = [
            _op(graph, node),
            _module(graph, node) if names is None else ", ".join(names),
            _shapes(graph, node),
        ]
        look = "" if names is None else ", shape=box"
        lines.append(f'  n{node} [label="{_quoted(label)}"{look}];')
    starts, targets = graph.starts.tolist(), graph.targets.tolist()
    for node in range(len(graph)):
        lines += [f"  n{node} -> n{target};" for target in targets[starts[node] : starts[node + 1]]]
    return "\n".join([*lines, "}"])


def _quoted(parts: Sequence[str]) -> str:
    return "\\n".join(
        plain(part).replace("\\", "\\\\").replace('"', '\\"') for part in parts if part
    )
