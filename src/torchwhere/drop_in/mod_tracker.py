"""Drop-ins for `ModTracker` of `torch.distributed._tools.mod_tracker` and `ModuleTracker` of
`torch.utils.module_tracker`.

Same names, arguments, results and texts; the hooks of a watch give the answers. `parents` is
computed on access, so a module call costs what watching costs and no more. Names begin with the
class of the model, as in the originals; a wrapper (DDP, FSDP1, compile, checkpoint) does not appear
in them. Each thread sees only the modules that it runs itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch.autograd.graph import get_gradient_edge

from torchwhere.api import watch
from torchwhere.drop_in.compile_safe import compile_safe_hooks
from torchwhere.drop_in.module_tracker import ModuleTracker
from torchwhere.drop_in.tracker_hooks import TrackedCall, needing_gradients, running_backward
from torchwhere.hooks import _torch
from torchwhere.hooks.listeners import Listener, ModuleEntry

__all__ = ["ModTracker", "ModuleTracker"]

# Backwards run inside one another. More than this many are left over from backwards that raised.
_MAX_BACKWARDS = 16


class _ThreadCalls(threading.local):
    """The calls that this thread is in; None for a call that goes through no backward."""

    def __init__(self) -> None:
        self.open: list[TrackedCall | None] = []


class ModTracker(ModuleTracker, Listener):
    """A `ModuleTracker` that also calls user hooks before and after the forward and backward of
    each module.

    Example:
        >>> tracker = ModTracker()
        >>> tracker.register_user_hooks(pre_fw_hook=lambda module, args: print(tracker.parents))
        >>> with tracker:
        ...     model(x).sum().backward()
    """

    # It does not listen to backward: those reports have no gradients, which the user's hooks need.

    def __init__(self) -> None:
        super().__init__()
        self._calls = _ThreadCalls()
        self._count = 0
        # by backward: calls whose post_bw_hook runs at its end, if it has not run before
        self._reached_calls: dict[int, list[TrackedCall]] = {}
        self._on_leaves: list[Any] = []  # handles of hooks on tensors that outlive their graph

    def register_user_hooks(
        self,
        pre_fw_hook: Callable[..., Any] | None = None,
        post_fw_hook: Callable[..., Any] | None = None,
        pre_bw_hook: Callable[..., Any] | None = None,
        post_bw_hook: Callable[..., Any] | None = None,
    ) -> None:
        """Register hooks, at most one of each kind at a time.

        Args:
            pre_fw_hook: Called as `pre_fw_hook(module, input)`.
            post_fw_hook: Called as `post_fw_hook(module, input, output)`.
            pre_bw_hook: Called as `pre_bw_hook(module, grad_output)`.
            post_bw_hook: Called as `post_bw_hook(module, grad_input)`.

        In backward, `module` is None if it no longer exists. Exceptions of a hook propagate.

        Raises:
            TypeError: If a hook is not callable.
            AssertionError: If a hook of that kind is registered already.
        """
        given = {
            "pre_fw_hook": pre_fw_hook,
            "post_fw_hook": post_fw_hook,
            "pre_bw_hook": pre_bw_hook,
            "post_bw_hook": post_bw_hook,
        }
        hooks = {name: hook for name, hook in given.items() if hook is not None}
        for name, hook in hooks.items():
            if not callable(hook):
                raise TypeError(
                    f"register_user_hooks({name}=): expected a function, got {type(hook).__name__}"
                )
            if name in self._hooks:
                raise AssertionError(
                    f"Only one {name} can be registered at a time Clear the existing hook by"
                    " calling ``clear_user_hooks`` before registering a new one"
                )
        self._hooks |= hooks
        self._listen()

    def clear_user_hooks(self) -> None:
        """Remove all user hooks."""
        self._hooks.clear()
        self._listen()

    compile_safe_hooks = staticmethod(compile_safe_hooks)

    def __enter__(self) -> Self:
        """Begin to track modules and to call the hooks."""
        super().__enter__()
        self._listen()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._listen()
        if self._depth == 0:
            while self._on_leaves:
                self._on_leaves.pop().remove()
            self._reached_calls.clear()

    def _listen(self) -> None:
        """Listen to module calls, but only while there are hooks to call."""
        is_wanted = bool(self._hooks) and self._depth > 0
        if is_wanted != self.is_active:
            self.is_active = is_wanted
            self._calls = _ThreadCalls()  # calls that are running now get no end
            (watch.listen if is_wanted else watch.unlisten)(self)

    # -- forward -----------------------------------------------------------------------------------

    def entered(self, entry: ModuleEntry) -> None:
        """Call the pre_fw_hook, and prepare the backward hooks."""
        if entry.call is not None and not _is_compiled():
            self._call_hook("pre_fw_hook", entry.own, entry.args)
            call = self._hook_inputs(entry) if self._goes_backward(entry) else None
            self._calls.open.append(call)

    def left(self, entry: ModuleEntry, output: Any) -> None:
        """Call the post_fw_hook, and prepare the backward hooks."""
        if entry.call is not None and not _is_compiled():
            call = self._calls.open.pop() if self._calls.open else None
            self._call_hook("post_fw_hook", entry.own, entry.args, output)
            if call is not None:
                self._hook_outputs(call, output)

    def _goes_backward(self, entry: ModuleEntry) -> bool:
        """Whether backward will run the nodes of this call. It does not run those of a
        recomputation, unless it is a reentrant one."""
        has_hook = "pre_bw_hook" in self._hooks or "post_bw_hook" in self._hooks
        return (
            has_hook
            and torch.is_grad_enabled()
            and (not self.is_bw or entry.track.is_reentrant(entry.track.top))
        )

    def _hook_inputs(self, entry: ModuleEntry) -> TrackedCall:
        """Put hooks on the inputs. This runs before the forward: so, if two modules get the same
        tensor, the hook of the outer one runs first."""
        self._count += 1
        tensors = needing_gradients((entry.args, entry.kwargs))
        nodes = [tensor.grad_fn or get_gradient_edge(tensor).node for tensor in tensors]
        call = TrackedCall(weakref.ref(entry.own), self._running(), self._count, nodes)
        for index, tensor in enumerate(tensors):
            self._hook(tensor, partial(self._passed, call, index))
        return call

    def _hook_outputs(self, call: TrackedCall, output: Any) -> None:
        tensors = needing_gradients(output)
        call.has_outputs = bool(tensors)
        for tensor in tensors:
            self._hook(tensor, partial(self._reached, call))

    def _hook(self, tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
        handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        if tensor.is_leaf:
            self._on_leaves.append(handle)

    # -- backward ----------------------------------------------------------------------------------

    def _reached(self, call: TrackedCall, grad: torch.Tensor) -> None:
        """Handle the gradient of an output; only the first of several counts."""
        task = running_backward()
        if call.task != task:
            self._begin(call, task)
            with self._about(call):
                self._call_hook("pre_bw_hook", call.module(), (grad,))

    def _passed(self, call: TrackedCall, index: int, grad: torch.Tensor) -> None:
        """Handle the gradient of an input."""
        task = running_backward()
        if call.task != task:
            # This backward did not reach the call: the tensor outlived the graph of the call.
            if call.has_outputs:
                return
            self._begin(call, task)
        call.gradients[index] = grad
        call.expected -= 1
        if call.expected == 0 and call.is_open:
            self._end(call)

    def _begin(self, call: TrackedCall, task: int) -> None:
        """Open a call. If it does not end before, it ends with the backward: only that tells the
        end of a call without inputs."""
        call.begin(task)
        if task not in self._reached_calls:
            queue = _torch.private("queue_callback")
            if queue is not None:
                queue(partial(self._backward_ended, task))
            self._reached_calls[task] = []
            while len(self._reached_calls) > _MAX_BACKWARDS:
                del self._reached_calls[next(iter(self._reached_calls))]
        self._reached_calls[task].append(call)

    def _backward_ended(self, task: int) -> None:
        # the latest call first
        calls = self._reached_calls.pop(task, [])
        for call in sorted(calls, key=lambda call: call.number, reverse=True):
            if call.is_open:
                self._end(call)

    def _end(self, call: TrackedCall) -> None:
        with self._about(call):
            self._call_hook("post_bw_hook", call.module(), call.end())

    @contextmanager
    def _about(self, call: TrackedCall) -> Iterator[None]:
        before, self._in_hook.names = getattr(self._in_hook, "names", None), call.names
        try:
            yield
        finally:
            self._in_hook.names = before

    def _call_hook(self, name: str, *args: Any) -> None:
        if self.is_active and name in self._hooks:
            self._hooks[name](*args)


def _is_compiled() -> bool:
    """Whether this runs inside `torch.compile(module)`. As in the original, no hooks run there."""
    in_compiled = _torch.private("in_compiled_module")
    return in_compiled is not None and bool(in_compiled())
