"""The autograd graph as text with folded repeats, as DOT and as HTML.

The text has a line for each operation, from the given tensors to the leaves. Guides on the left
show edges that skip lines (`│`, ending at `└`) and repeats (`12 x ┌`). Leaves, and operations that
only reshape a leaf (`TBackward0`), are printed on the line of the operation that uses them. Names
and shapes come from the user's program, so they are sanitized.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from torchwhere.core.place import shown
from torchwhere.core.sanitize import plural, printable
from torchwhere.render.folds import Fold, NumberedNames, Step, fold
from torchwhere.render.plain_table import aligned

_FARTHEST = 40  # rows; a longer edge is shown only by its number
# These only change the shape or type of a leaf, which is not worth a line.
_RESHAPING = {
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
_MANY = 4  # edges into a row: it is shared, not part of a repeat
_MOST_HTML_LINES = 500
_MOST_SHAPES = 3
_GAP = "  "


class Graph(Protocol):
    """The data that is shown: `backward.BackwardGraph`."""

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


def shape_text(shapes: Sequence[Any]) -> str:
    return " ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes)


def node_text(node: Any) -> str:
    """One node on one line."""
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
    return printable(" ".join(part for part in parts if part))


def summary(graph: Graph) -> str:
    """The size of the graph, on one line."""
    named = sum(map(bool, graph.leaves_named.values()))
    unnamed = len(graph.leaves_named) - named
    parts = [plural(len(graph), "node"), plural(len(graph.targets), "edge")]
    if named:
        parts.append(plural(named, "parameter"))
    if unnamed:
        parts.append(f"{unnamed:,} {'leaf' if unnamed == 1 else 'leaves'} without a name")
    if graph.freed:
        nodes = plural(graph.freed, "node")
        parts.append(f"backward has run and freed the saved tensors of {nodes}")
    return ", ".join(parts)


# -- the nodes that get a line ---------------------------------------------------------------------


class _Rows(NamedTuple):
    """The nodes that get a line, top to bottom.

    `following` holds the rows that each row leads to, `leaves` the text of the leaves it uses.
    """

    nodes: list[int]
    following: list[list[int]]
    leaves: list[str]


def _following(graph: Graph) -> list[list[int]]:
    """The nodes that each node leads to."""
    targets = graph.targets.tolist()
    return [targets[start:end] for start, end in itertools.pairwise(graph.starts.tolist())]


def _rows(graph: Graph) -> _Rows:
    following = _following(graph)
    uses = np.bincount(graph.targets, minlength=len(graph)).tolist()
    roots = set(graph.roots)
    inline = {leaf: (leaf, "") for leaf in graph.leaves_named if leaf not in roots}
    reshaping = [number for number, op in enumerate(graph.ops) if op in _RESHAPING]
    for node in np.flatnonzero(np.isin(graph.op, reshaping)).tolist():
        below = following[node]
        if (
            len(below) == 1
            and below[0] in graph.leaves_named
            and uses[node] == 1
            and node not in roots
        ):
            inline[node] = below[0], _op(graph, node)
    nodes = [node for node in range(len(graph)) if node not in inline]
    at = {node: row for row, node in enumerate(nodes)}
    return _Rows(
        nodes,
        [sorted({at[below] for below in following[node] if below in at}) for node in nodes],
        [
            _leaves_text(graph, node, [inline[leaf] for leaf in following[node] if leaf in inline])
            for node in nodes
        ],
    )


def _leaves_text(graph: Graph, node: int, leaves: Sequence[tuple[int, str]]) -> str:
    """The leaves that a node uses; those of its own module by their short names."""
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
    module = graph.places.modules[graph.places.module[node]]
    if module is None:
        return ""
    call = int(graph.places.call[node])
    return shown(module) + (f" call {call}" if call > 0 else "")


# -- text ------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    number: str
    drawn: str  # the operation, with the guides left of it
    module: str = ""
    shape: str = ""
    line: str = ""
    extra: str = ""  # leaves and edges


class _GraphLines:
    """Makes the lines of one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.rows = _rows(graph)
        texts = [
            (_module(graph, node), leaves)
            for node, leaves in zip(self.rows.nodes, self.rows.leaves, strict=True)
        ]
        numbered = {pair: NumberedNames.of(map(printable, pair)) for pair in set(texts)}
        self._names = [numbered[pair] for pair in texts]

    def folded(self) -> list[int | Fold]:
        return fold(
            _keys(self.graph, self.rows, self._names), [names.numbers for names in self._names]
        )

    def lines(self, items: Sequence[int | Fold], inside: tuple[Fold, ...] = ()) -> list[_Line]:
        """Make the lines of rows and folds. Folds nest only a few levels deep, so it recurses."""
        result: list[_Line] = []
        skipped: list[int] = []  # rows that an edge leads to, over the rows before them
        for item in items:
            if isinstance(item, int):
                first, last, lines = item, item, [self._line(item, inside)]
            else:
                first, last, lines = item.start, item.end - 1, self._repeat(item, inside)
            guides = "".join("└ " if row == first else "│ " for row in skipped)
            skipped = [row for row in skipped if row > last]
            result.append(lines[0]._replace(drawn=guides + lines[0].drawn))
            result += [
                line._replace(drawn=guides.replace("└", " ") + line.drawn) for line in lines[1:]
            ]
            below = self.rows.following[last]
            skipped += [
                row for row in below if last + 1 < row <= last + _FARTHEST and row not in skipped
            ]
        return result

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
        edges = ""
        if below and below != [row + 1]:
            edges = "→ " + ", ".join(str(self.rows.nodes[target]) for target in below)
        line = printable(graph.lines[graph.line[node]] or "")
        if node in graph.leaves_named:
            leaves = ", ".join(graph.leaves_named[node])
        extra = _GAP.join(printable(part) for part in (leaves, edges) if part)
        op = printable(_op(graph, node))
        return _Line(str(node), op, printable(module), _shapes(graph, node), line, extra)

    def _steps(self, row: int, inside: tuple[Fold, ...]) -> list[list[Step]]:
        """How each number in a row's names changes from one repeat to the next."""
        numbers = self._names[row].numbers
        steps: list[list[Step]] = [[] for _ in numbers]
        for repeat in inside:
            following = self._names[row + repeat.period].numbers
            for steps_of_one, number, after in zip(steps, numbers, following, strict=True):
                if after != number:
                    steps_of_one.append(Step(after - number, repeat.times))
        return steps


def _keys(graph: Graph, rows: _Rows, names: Sequence[NumberedNames]) -> list[Any]:
    """A key for each row: equal if one row repeats the other, up to the numbers in their names.

    The rows it leads to count by their distance, but shared ones by their position.
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
    """The summary, and the aligned lines below it."""
    maker = _GraphLines(graph)
    items = maker.folded()
    shown_lines = maker.lines(items[:lines])[:lines]
    texts = [f"behind {plural(len(graph.roots), 'tensor')}: {summary(graph)}"]
    texts += aligned(shown_lines, right=(0,))
    is_cut = lines is not None and (
        len(items) > lines or len(shown_lines) == lines < len(maker.rows.nodes)
    )
    if is_cut:
        texts.append(f"… cut after {lines:,} lines; text(lines=None) prints all")
    return "\n".join(texts)


def _shapes(graph: Graph, node: int) -> str:
    shapes, dtype = graph.outputs[graph.output[node]]
    listed = shape_text(shapes[:_MOST_SHAPES]) + (
        f" and {len(shapes) - _MOST_SHAPES} more" if len(shapes) > _MOST_SHAPES else ""
    )
    return listed if dtype in (None, "float32") else f"{listed} {dtype}"


def html(graph: Graph) -> str:
    """The text as HTML, for notebooks."""
    # Imported here: it loads rich, which a training process does not need.
    from torchwhere.render import html as page

    return page.text_fragment(text(graph, lines=_MOST_HTML_LINES))


# -- DOT -------------------------------------------------------------------------------------------


def dot(graph: Graph) -> str:
    """The graph for Graphviz: leaves are boxes, edges follow the gradients."""
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
    for node, targets in enumerate(_following(graph)):
        lines += [f"  n{node} -> n{target};" for target in targets]
    return "\n".join([*lines, "}"])


def _quoted(parts: Sequence[str]) -> str:
    return "\\n".join(
        printable(part).replace("\\", "\\\\").replace('"', '\\"') for part in parts if part
    )
