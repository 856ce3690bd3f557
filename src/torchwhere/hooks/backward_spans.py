"""Finds the span of a module call in a backward: from the first to the last autograd node that the
call made.

Before the engine starts, this counts every node that it will run, for the call that made the node
and for all calls around it. A hook on each node then knows the first node of a call, and the last.
So nothing depends on the inputs and outputs of a module, on the thread of a node, or on the order.
A gradient is accumulated inside the call that used the parameter.

The hooks exist during one backward, and only while there are listeners. They get gradients, and
neither read nor change them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from torchwhere.core.grouping import grouped
from torchwhere.hooks import _torch
from torchwhere.hooks.call_chain import Made
from torchwhere.hooks.listeners import Listener, Listeners, ModuleCall, Owner
from torchwhere.hooks.threads import Track
from torchwhere.model.graph_walk import ACCUMULATE_GRAD_SEQ, roots_of, walk


@dataclass(slots=True, eq=False)
class Span:
    """One call in one backward."""

    owner: Owner
    call: ModuleCall
    above: Span | None
    # its nodes that have not begun, and the spans directly inside it that have not ended
    left: int = 0
    is_open: bool = False
    # called at its start, not yet at its end
    listeners: list[Listener] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.above is not None:
            self.above.left += 1


def spans_of(
    listeners: Listeners, track: Track, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> BackwardSpans | None:
    """The spans of a backward for the listeners, from the arguments of the engine; None if there
    are none.

    Compiled autograd would take hooks on nodes into its graph, and a backward on fake tensors
    belongs to a compiler: both have no spans.
    """
    if not listeners.of_backward or _torch.private("compiled_autograd"):
        return None
    if _torch.getter("fake_mode")() is not None:
        return None
    spans = BackwardSpans(listeners, track)
    inputs = tuple(args[3]) if len(args) > 3 and args[3] is not None else ()
    try:
        has_calls = spans.prepare(outputs, inputs, accumulates=bool(kwargs.get("accumulate_grad")))
        return spans if has_calls else None
    except Exception as error:
        spans.close()
        listeners.errors(error)
        return None


class BackwardSpans:
    """The spans of one backward: of one run of the engine."""

    def __init__(self, listeners: Listeners, track: Track) -> None:
        self._listeners = listeners
        self._track = track
        self._made_by = listeners.call_chains.made_by
        self._of_call: dict[Made, Span | None] = {}
        self._nodes: list[Any] = []
        self._handles: list[Any] = []
        self._open: list[Span] = []
        self._lock = threading.Lock()
        self._task: int | None = None  # the engine's number of this run
        self._task_id: Callable[[], int] = _torch.getter("graph_task_id", 0)

    # -- before ------------------------------------------------------------------------------------

    def prepare(self, outputs: Iterable[Any], inputs: Iterable[Any], *, accumulates: bool) -> bool:
        """Count the nodes and register the hooks. Returns whether there is a call with a span."""
        nodes, edges = _graph_of(outputs)
        will_run = _needed(nodes, edges, inputs, accumulates=accumulates) if inputs else set(nodes)
        # for each node that accumulates: the last node that runs before it
        last_users: dict[Any, tuple[int, Span | None]] = {}
        for node in nodes:
            seq = node._sequence_nr()
            if node in will_run and seq != ACCUMULATE_GRAD_SEQ:
                made = self._made_by(seq, self._track)
                span = self._span(made) if made is not None else None
                self._count(node, span)
                for following in edges[node]:
                    if following._sequence_nr() == ACCUMULATE_GRAD_SEQ and following in will_run:
                        last_users[following] = min(
                            last_users.get(following, (seq, span)), (seq, span), key=_number
                        )
        for node, (_, span) in last_users.items():
            self._count(node, span)
        return bool(self._nodes)

    def _span(self, made: Made) -> Span | None:
        """The span of a call, or of the nearest call around it that listeners followed.

        Calls outside a recomputation do not count: the backward that started it is inside them.
        """
        if made in self._of_call:
            return self._of_call[made]
        around = self._listeners.call_chains.around(made)
        above = self._span(around) if around is not None else None
        owner = self._listeners.owner(made)
        span = self._of_call[made] = Span(*owner, above) if owner is not None else above
        return span

    def _count(self, node: Any, span: Span | None) -> None:
        if span is not None:
            span.left += 1
            self._handles.append(
                node.register_prehook(partial(self._node_begins, len(self._nodes), span))
            )
            self._nodes.append(node)

    # -- during ------------------------------------------------------------------------------------

    @_torch.unseen
    def _node_begins(self, index: int, span: Span, _gradients: Any) -> None:
        try:
            begun, ended = self._pass(span) if self._is_ours() else ([], [])
            if ended:  # these calls end with this node; the engine still calls a hook added now
                self._handles.append(
                    self._nodes[index].register_hook(partial(self._node_ended, ended))
                )
        except Exception as error:
            self._listeners.errors(error)
            return
        for each_span in begun:
            self._tell_entered(each_span)

    def _is_ours(self) -> bool:
        """Whether this backward runs the node. Another one may run it too: inside this one, or on
        another thread."""
        task = self._task_id()
        if self._task is None and self._listeners.backwards.setdefault(task, self) is self:
            self._task = task
        return task == self._task

    def _pass(self, span: Span) -> tuple[list[Span], list[Span]]:
        """Count a node that begins to run. Returns the spans that begin with it, outermost first,
        and those that end with it."""
        begun: list[Span] = []
        ended: list[Span] = []
        with self._lock:
            current: Span | None = span
            while current is not None and not current.is_open:
                current.is_open = True
                begun.insert(0, current)
                current = current.above
            self._open += begun
            current = span
            while current is not None:
                current.left -= 1
                if current.left:
                    break
                ended.append(current)
                current = current.above
        return begun, ended

    @_torch.unseen
    def _node_ended(self, ended: list[Span], _inputs: Any, _outputs: Any) -> None:
        if self._is_ours():
            for span in ended:
                self._tell_left(span)

    def _tell_entered(self, span: Span) -> None:
        module = span.owner()
        for listener in self._listeners.of_backward:
            if listener.is_active:
                span.listeners.append(listener)
                listener.backward_entered(module, span.call)

    def _tell_left(self, span: Span) -> None:
        """Call all listeners of a span at its end, also if one of them raises."""
        if span in self._open:
            self._open.remove(span)
        while span.listeners:
            listener = span.listeners.pop()
            try:
                if listener.is_active:
                    listener.backward_left(span.owner(), span.call)
            except BaseException:
                self._tell_left(span)
                raise

    # -- after -------------------------------------------------------------------------------------

    @_torch.unseen
    def close(self) -> None:
        """Remove the hooks, and end the spans that an exception cut short, innermost first, also if
        a callback raises."""
        while self._handles:
            self._handles.pop().remove()
        self._nodes.clear()
        self._listeners.backwards.pop(self._task, None)
        try:
            while self._open:
                self._tell_left(self._open[-1])
        except BaseException:
            self.close()
            raise


def _number(user: tuple[int, Span | None]) -> int:
    return user[0]


def _graph_of(outputs: Iterable[Any]) -> tuple[list[Any], dict[Any, list[Any]]]:
    """Every node of the graph of some tensors, and the next nodes of each."""
    nodes, starts, targets = walk(roots_of(outputs))
    following = [nodes[target] for target in targets.tolist()]
    bounds = starts.tolist()
    return nodes, {
        node: following[begin:end]
        for node, begin, end in zip(nodes, bounds, bounds[1:], strict=False)
    }


def _needed(
    nodes: list[Any], edges: dict[Any, list[Any]], inputs: Iterable[Any], *, accumulates: bool
) -> set[Any]:
    """The nodes that the engine runs for these inputs only: those that lead to one.

    `backward(inputs=)` runs the node of an input itself; `grad()` takes the gradient just before
    it.
    """
    edge = torch.autograd.graph.get_gradient_edge
    wanted = {
        edge(i).node if isinstance(i, torch.Tensor) else i.node
        for i in inputs
        if getattr(i, "requires_grad", True)
    }
    users = grouped((following, node) for node in nodes for following in edges[node])
    needed = set(wanted) if accumulates else set()
    pending = list(wanted)
    while pending:
        for user in users.get(pending.pop(), ()):
            if user not in needed:
                needed.add(user)
                pending.append(user)
    return needed
