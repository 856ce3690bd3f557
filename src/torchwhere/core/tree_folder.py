"""Folds the tree of a model layout while it is built: equal modules become one node, numbered
siblings with equal nodes one branch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torchwhere.core.model_layout import Branch, Node, is_number


class TreeFolder:
    """Creates the nodes of one tree, children first.

    Linear in the number of modules: it compares nodes by the identity of their children, which are
    already folded.
    """

    def __init__(self) -> None:
        self._nodes: dict[object, Node] = {}

    def node(self, cls: str, *, children: Iterable[tuple[str, Node]], **facts: Any) -> Node:
        folded = tuple(_folded(children))
        key = (cls, *sorted(facts.items()), tuple((b.name, b.count, id(b.node)) for b in folded))
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(cls, children=folded, **facts)
        return node


def _folded(children: Iterable[tuple[str, Node]]) -> Iterator[Branch]:
    run: Branch | None = None
    for name, node in children:
        if run is not None and run.node is node and _follows(run, name):
            run = Branch(run.name, node, run.count + 1)
            continue
        if run is not None:
            yield run
        run = Branch(name, node)
    if run is not None:
        yield run


def _follows(run: Branch, name: str) -> bool:
    is_numbered = is_number(name) and is_number(run.name)
    return is_numbered and int(name) == int(run.name) + run.count
