"""Where a backward goes through a module: the span from the first to the last autograd node that a
call of it made.

Before the engine starts, every node that it is going to run is counted for the call that made it
and for all calls around that one. A hook on each node then knows the first node of a call, and the
last. So nothing depends on what a module takes or gives, on which thread a node runs, or in which
order. A gradient is accumulated inside the call that used the parameter.

The hooks are there for one backward, and only while somebody listens. They are given gradients,
look at none and change none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from torchwhere.hooks import _torch
from torchwhere.hooks.call_chain import Made
from torchwhere.hooks.listeners import Listener, Listeners, ModuleCall, Owner
from torchwhere.hooks.locate import ACCUMULATE_GRAD_SEQ
from torchwhere.hooks.threads import Track
from torchwhere.model.graph_walk import walk


class Span:
    """One call in one backward."""

    __slots__ = ("above", "call", "is_open", "left", "owner", "told")

    def __init__(self, owner: Owner, call: ModuleCall, above: Span | None) -> None:
        self.owner = owner
        self.call = call
        self.above = above
        # of its nodes, and of the spans right inside it: those that have not begun, or ended
        self.left = 0
        self.is_open = False
        self.told: list[Listener] = []
        if above is not None:
            above.left += 1


def spans_of(
    listeners: Listeners, track: Track, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> BackwardSpans | None:
    """What listeners are to be told of a backward, from the arguments of the engine; None if that
    is nothing.

    A backward that is compiled (compiled autograd) would take hooks of its nodes into its graph,
    and one that a compiler runs on fake tensors is not the job's: both are left alone.
    """
    if not listeners.of_backward or _torch.private("compiled_autograd") or _is_fake():
        return None
    spans = BackwardSpans(listeners, track)
    inputs = tuple(args[3]) if len(args) > 3 and args[3] is not None else ()
    try:
        return (
            spans
            if spans.prepare(outputs, inputs, accumulates=bool(kwargs.get("accumulate_grad")))
            else None
        )
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
        self._task_id = _torch.private("graph_task_id") or (lambda: 0)

    # -- before ------------------------------------------------------------------------------------

    def prepare(self, outputs: Iterable[Any], inputs: Iterable[Any], *, accumulates: bool) -> bool:
        """Count the nodes and put the hooks; whether there is any call to tell of."""
        nodes, edges = _graph_of(outputs)
        will_run = _needed(nodes, edges, inputs, accumulates=accumulates) if inputs else set(nodes)
        # of each node that accumulates: who runs last before it
        last_users: dict[Any, tuple[int, Span | None]] = {}
        for node in nodes:
            seq = node._sequence_nr()
            if node in will_run and seq != ACCUMULATE_GRAD_SEQ:
                span = self._span_of(seq)
                self._count(node, span)
                for following in edges[node]:
                    if following._sequence_nr() == ACCUMULATE_GRAD_SEQ and following in will_run:
                        last_users[following] = min(
                            last_users.get(following, (seq, span)), (seq, span), key=_number
                        )
        for node, (_, span) in last_users.items():
            self._count(node, span)
        return bool(self._nodes)

    def _span_of(self, seq: int) -> Span | None:
        made = self._made_by(seq, self._track)
        return self._span(made) if made is not None else None

    def _span(self, made: Made) -> Span | None:
        """The span of a call, or of the nearest one around it that was listened to.

        Not beyond a recomputation: the backward that asked for it has entered the calls around.
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
            if ended:  # its end is that of these calls; a hook added now is still called
                self._handles.append(
                    self._nodes[index].register_hook(partial(self._node_ended, ended))
                )
        except Exception as error:
            self._listeners.errors(error)
            return
        for each in begun:
            self._tell_entered(each)

    def _is_ours(self) -> bool:
        """Another backward may run the same node: one inside this one, or one on another thread."""
        task = self._task_id()
        if self._task is None and self._listeners.backwards.setdefault(task, self) is self:
            self._task = task
        return task == self._task

    def _pass(self, span: Span) -> tuple[list[Span], list[Span]]:
        """Note that a node begins to run: the calls that begin with it, outermost first, and those
        that end with it."""
        begun: list[Span] = []
        ended: list[Span] = []
        with self._lock:
            each: Span | None = span
            while each is not None and not each.is_open:
                each.is_open = True
                begun.insert(0, each)
                each = each.above
            self._open += begun
            each = span
            while each is not None:
                each.left -= 1
                if each.left:
                    break
                ended.append(each)
                each = each.above
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
                span.told.append(listener)
                listener.backward_entered(module, span.call)

    def _tell_left(self, span: Span) -> None:
        """All who were told of its beginning are told of its end, whatever one of them raises."""
        if span in self._open:
            self._open.remove(span)
        while span.told:
            listener = span.told.pop()
            try:
                if listener.is_active:
                    listener.backward_left(span.owner(), span.call)
            except BaseException:
                self._tell_left(span)
                raise

    # -- after -------------------------------------------------------------------------------------

    @_torch.unseen
    def close(self) -> None:
        """Take the hooks away, and end what an exception cut short, the innermost first, whatever a
        callback raises."""
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


def _is_fake() -> bool:
    fake_mode = _torch.private("fake_mode")
    return fake_mode is not None and fake_mode() is not None


def _number(user: tuple[int, Span | None]) -> int:
    return user[0]


def _graph_of(outputs: Iterable[Any]) -> tuple[list[Any], dict[Any, list[Any]]]:
    """Every node of the graph behind some tensors, and which nodes each leads to."""
    nodes, starts, targets = walk(_node_of(output) for output in outputs)
    following = [nodes[target] for target in targets.tolist()]
    bounds = starts.tolist()
    return nodes, {
        node: following[begin:end]
        for node, begin, end in zip(nodes, bounds, bounds[1:], strict=False)
    }


def _node_of(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.grad_fn
    return getattr(output, "node", None)


def _needed(
    nodes: list[Any], edges: dict[Any, list[Any]], inputs: Iterable[Any], *, accumulates: bool
) -> set[Any]:
    """The nodes that the engine runs if only these inputs are asked for: those that lead to one.

    The node of an input itself is run by `backward(inputs=)`; `grad()` takes the gradient just
    before it.
    """
    edge = torch.autograd.graph.get_gradient_edge
    wanted = {
        edge(i).node if isinstance(i, torch.Tensor) else i.node
        for i in inputs
        if getattr(i, "requires_grad", True)
    }
    users: dict[Any, list[Any]] = {}
    for node in nodes:
        for following in edges[node]:
            users.setdefault(following, []).append(node)
    found = set(wanted) if accumulates else set()
    pending = list(wanted)
    while pending:
        for user in users.get(pending.pop(), ()):
            if user not in found:
                found.add(user)
                pending.append(user)
    return found
