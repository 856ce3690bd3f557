"""Private methods of torch's ModTracker that a subclass calls from its own module hooks.

torch's CommDebugMode is built on such a subclass: it registers the hooks itself and enters and
leaves names with these methods. Where `drop_in.mod_tracker` takes the place of torch's module, that
class must work as before. The tracker's own answers come from the engine and use none of this.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from torchwhere.hooks import _torch

_Hook = Callable[..., None]


def running_backward() -> int:
    """Return the id of the backward that runs on this thread, or -1."""
    task_id = _torch.private("graph_task_id")
    return int(task_id()) if task_id is not None else -1


class TrackerHooks:
    """The names that a subclass is in (`_entered`), and the methods that change them."""

    def __init__(self) -> None:
        self._hooks: dict[str, Callable[..., Any]] = {}  # the hooks of the user
        self._entered: Counter[str] = Counter()
        self._task = -1  # the backward that clears `_entered` when it ends
        self._fw_pre_handle: Any = None  # a subclass sets these two; `_remove_handles` removes them
        self._fw_post_handle: Any = None

    def _get_mod_name(self, mod: nn.Module) -> str:
        raise NotImplementedError

    def _call_user_hook(self, name: str, *args: Any) -> None:
        if name in self._hooks:
            self._hooks[name](*args)

    def _get_append_fn(
        self, w_mod: Callable[[], nn.Module | None], name: str, is_bw: bool
    ) -> _Hook:
        """Return a hook that enters `name`."""

        def append(*gradients: Any) -> None:
            if is_bw:
                self._clear_after_backward()
            self._entered[name] += 1
            if is_bw:
                self._call_user_hook("pre_bw_hook", w_mod(), gradients)

        return append

    def _get_pop_fn(self, w_mod: Callable[[], nn.Module | None], name: str, is_bw: bool) -> _Hook:
        """Return a hook that leaves `name`. Leaving a name twice does nothing: in backward, calls
        need not nest."""

        def pop(*gradients: Any) -> None:
            if is_bw:
                self._call_user_hook("post_bw_hook", w_mod(), gradients)
            self._entered[name] -= 1
            if self._entered[name] <= 0:
                del self._entered[name]

        return pop

    def _fw_post_hook(self, mod: nn.Module, args: Any, output: Any) -> None:
        """Leave a module in forward, and have its backward enter it again."""
        name, w_mod = self._get_mod_name(mod), weakref.ref(mod)
        self._call_user_hook("post_fw_hook", mod, args, output)
        self._get_pop_fn(w_mod, name, False)()
        # as the original: not those inside a dataclass
        tensors = [
            leaf
            for leaf in tree_leaves(output)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if tensors and running_backward() == -1:
            register_multi_grad_hook(tensors, self._get_append_fn(w_mod, name, True), mode="any")

    def _clear_after_backward(self) -> None:
        task, queue = running_backward(), _torch.private("queue_callback")
        if task != self._task and queue is not None:
            self._task = task
            queue(self._entered.clear)

    def _remove_handles(self) -> None:
        for handle in (self._fw_pre_handle, self._fw_post_handle):
            if handle is not None:
                handle.remove()
        self._fw_pre_handle = self._fw_post_handle = None


@dataclasses.dataclass(slots=True, eq=False)
class TrackedCall:
    """One call of a module, and how far the running backward is with it."""

    module: weakref.ref[nn.Module]
    names: frozenset[str]
    number: int
    nodes: list[Any]  # of the inputs that need a gradient
    has_outputs: bool = False
    task: int | None = None  # the backward that reached it last
    is_open: bool = False  # its post_bw_hook has yet to run
    gradients: list[torch.Tensor | None] = dataclasses.field(default_factory=list)
    expected: int = 0  # number of gradients of inputs that have yet to arrive

    def begin(self, task: int) -> None:
        """Note that the backward `task` has reached this call."""
        self.task, self.is_open = task, True
        self.gradients = [None] * len(self.nodes)
        self.expected = sum(map(_will_run, self.nodes))

    def end(self) -> tuple[Any, ...]:
        """Close the call. Returns the arguments for the post_bw_hook."""
        gradients, self.gradients, self.is_open = self.gradients, [], False
        return (gradients,) if self.nodes else ()


def _will_run(node: Any) -> bool:
    """Whether the running backward runs a node. torch does not answer for a leaf in
    `autograd.grad`; then the answer is True."""
    will_run = _torch.private("will_run")
    try:
        return will_run is None or bool(will_run(node))
    except RuntimeError:
        return True


def needing_gradients(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested structure that need a gradient, in order. Also looks into
    dataclasses, which pytrees do not open."""
    tensors: list[torch.Tensor] = []
    pending, visited = [value], set()
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            tensors += [item] if item.requires_grad else []
        elif type(item) in (tuple, list):
            pending += reversed(item)
        elif type(item) is dict:
            pending += reversed(item.values())
        elif dataclasses.is_dataclass(item):
            # a dataclass may contain itself
            if id(item) not in visited and not isinstance(item, type):
                visited.add(id(item))
                pending += [
                    getattr(item, field.name, None) for field in reversed(dataclasses.fields(item))
                ]
        elif item is not None:
            leaves = tree_leaves(item)
            pending += reversed(leaves) if len(leaves) != 1 or leaves[0] is not item else ()
    return tensors
