"""`ModTracker` of `torch.distributed._tools.mod_tracker` and `ModuleTracker` of
`torch.utils.module_tracker`.

Same names, arguments, results and texts; the answers come from the engine. `parents` is found when
it is asked for, so a module call costs what watching costs and no more. Names begin with the class
of the model, as in the originals; a wrapper (DDP, FSDP1, compile, checkpoint) leaves nothing in
them. Each thread has the modules it is in itself.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from torchwhere.api import watch
from torchwhere.drop_in.compile_safe import Hook, ModuleFilter, PostForward, compile_safe_hooks
from torchwhere.drop_in.tracker_hooks import TrackerHooks, running_backward
from torchwhere.hooks import _torch
from torchwhere.hooks.listeners import ModuleCall, ModuleEntry
from torchwhere.model.module_names import NameTable
from torchwhere.model.module_walk import walk
from torchwhere.recorder.session import Session

__all__ = ["ModTracker", "ModuleTracker"]

_GLOBAL = "Global"
_MOST_SHOWN = 1 << 12
# under way at once, one inside another; more are left over from backwards that raised
_MOST_BACKWARDS = 16
# how the engine names what is not part of the model
_NAMED_BY_CLASS = re.compile(r"<([^<>#]*)(?:#\d+)?>")


class ModuleTracker(TrackerHooks):
    """Says which modules are running, in forward or in backward: `parents`, by name, always with
    "Global"; and `is_bw`."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._session: Session | None = None
        self._names = NameTable()
        # by `_get_mod_name`
        self._asked: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._root_class = ""
        # from the engine's names to those shown
        self._shown: dict[frozenset[str], frozenset[str]] = {}
        # `.names`: of the call that a user's backward hook is about
        self._in_hook = threading.local()

    @property
    def parents(self) -> set[str]:
        """The names of the modules that the calling thread is in, and "Global"."""
        names: frozenset[str] | None = getattr(self._in_hook, "names", None)
        return {_GLOBAL, *self._entered} | (self._running() if names is None else names)

    @property
    def is_bw(self) -> bool:
        """Whether the calling thread is in a backward."""
        return running_backward() != -1

    def get_known_fqn(self, mod: nn.Module) -> str | None:
        """The name of a module that was called, or belongs to a model that was; None for any
        other."""
        if not isinstance(mod, nn.Module):
            raise TypeError(
                f"get_known_fqn(mod): expected a torch.nn.Module, got {type(mod).__name__}"
            )
        if self._session is not None:
            name = self._session.modules.name_of(mod)
        else:
            name = next(iter(self._names.known_names(mod)), None)
        return self._asked.get(mod) if name is None else self._fqn(name)

    def _get_mod_name(self, mod: nn.Module) -> str:
        """The name of any module. One that is not known yet is the root of a model: its class names
        it.

        torch's DebugMode and CommDebugMode call this.
        """
        name = self.get_known_fqn(mod)
        if name is None:
            name = type(mod).__name__
            self._asked.update((part, fqn) for fqn, part in walk(mod, prefix=name))
        return name

    @_torch.unseen
    def _running(self) -> frozenset[str]:
        session = self._session
        if session is None:
            return frozenset()
        try:
            names = session.listeners.call_chains.names_here()
            if names not in self._shown:
                self._shown = {} if len(self._shown) >= _MOST_SHOWN else self._shown
                self._shown[names] = frozenset(map(self._fqn, names))
            return self._shown[names]
        except Exception as error:
            session.listeners.errors(error)
            return frozenset()

    def _fqn(self, name: str) -> str:
        """From the engine's name, relative to the model, to one that begins with the model's
        class."""
        if self._session is not None:
            self._root_class = self._session.modules.root_class
        at = name.rfind("<")
        if at >= 0:
            return _NAMED_BY_CLASS.sub(r"\1", name[at:])
        return f"{self._root_class}.{name}" if name else self._root_class

    def __enter__(self) -> Self:
        watch.start()
        self._depth += 1
        self._session = watch.current()
        return self

    def __exit__(self, *_error: object) -> None:
        self._remove_handles()
        if self._depth == 0:  # a subclass that was never entered here: it registered hooks itself
            return
        self._depth -= 1
        if self._depth == 0 and self._session is not None:
            self._names, self._session = self._session.modules.names, None
            self._shown = {}
        watch.stop()


class _Call:
    """One call of a module, for the user's hooks in backward, and how far the running backward is
    with it."""

    __slots__ = (
        "expected",
        "gradients",
        "has_outputs",
        "is_open",
        "module",
        "names",
        "nodes",
        "number",
        "task",
    )

    def __init__(
        self, module: nn.Module, names: frozenset[str], number: int, inputs: list[torch.Tensor]
    ) -> None:
        self.module = weakref.ref(module)
        self.names = names
        self.number = number
        # that need a gradient
        self.nodes = [tensor.grad_fn or get_gradient_edge(tensor).node for tensor in inputs]
        self.has_outputs = False
        self.task: int | None = None  # the backward that reached it last
        self.is_open = False  # its post_bw_hook is due
        self.gradients: list[torch.Tensor | None] = []
        self.expected = 0  # gradients of inputs that are still to come

    def begin(self, task: int) -> None:
        self.task, self.is_open = task, True
        self.gradients = [None] * len(self.nodes)
        self.expected = sum(map(_will_run, self.nodes))

    def end(self) -> tuple[Any, ...]:
        """What the post_bw_hook is given."""
        gradients, self.gradients, self.is_open = self.gradients, [], False
        return (gradients,) if self.nodes else ()


class ModTracker(ModuleTracker):
    """`ModuleTracker`, and with hooks of the user's before and after each module's forward and
    backward."""

    # as a listener of the engine's: hooks in backward are given gradients, which it does not have
    wants_backward = False

    def __init__(self) -> None:
        super().__init__()
        self.is_active = False
        self._hooks: dict[str, Callable[..., Any]] = {}
        self._calls = threading.local()  # `.open`: the calls this thread is in, for backward
        self._count = 0
        # of each backward: calls whose post_bw_hook comes at its end
        self._late: dict[int, list[_Call]] = {}
        self._on_leaves: list[Any] = []  # hooks on tensors that outlive their graph

    def register_user_hooks(
        self,
        pre_fw_hook: Callable[..., Any] | None = None,
        post_fw_hook: Callable[..., Any] | None = None,
        pre_bw_hook: Callable[..., Any] | None = None,
        post_bw_hook: Callable[..., Any] | None = None,
    ) -> None:
        """Have hooks called: `pre_fw_hook(module, input)`, `post_fw_hook(module, input, output)`,
        `pre_bw_hook(module, grad_output)`, `post_bw_hook(module, grad_input)`. One of each at a
        time.

        In backward the module is None if it is gone. What a hook raises propagates.
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
        """Forget all user hooks."""
        self._hooks.clear()
        self._listen()

    @staticmethod
    @contextmanager
    def compile_safe_hooks(
        model: nn.Module,
        pre_fw_hook: Hook | None = None,
        post_fw_hook: PostForward | None = None,
        pre_bw_hook: Hook | None = None,
        post_bw_hook: Hook | None = None,
        module_filter: ModuleFilter | None = None,
    ) -> Iterator[None]:
        """Hooks at the boundaries of all modules below `model`, which a compiled graph calls too.

        `pre_fw_hook(fqn, inputs)`, `post_fw_hook(fqn, inputs, outputs)`, `pre_bw_hook(fqn,
        grad_outputs)`, `post_bw_hook(fqn, grad_inputs)`, each with tuples of tensors. Nothing of a
        tracker's takes part in it.
        """
        with compile_safe_hooks(
            model,
            pre_fw_hook=pre_fw_hook,
            post_fw_hook=post_fw_hook,
            pre_bw_hook=pre_bw_hook,
            post_bw_hook=post_bw_hook,
            module_filter=module_filter,
        ):
            yield

    def __enter__(self) -> Self:
        super().__enter__()
        self._listen()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._listen()
        if self._depth == 0:
            while self._on_leaves:
                self._on_leaves.pop().remove()
            self._late.clear()

    def _listen(self) -> None:
        """Be told of modules while there are hooks to call, and only then."""
        is_wanted = bool(self._hooks) and self._depth > 0
        if is_wanted != self.is_active:
            self.is_active = is_wanted
            self._calls = threading.local()  # what was entered before is left unheard
            (watch.listen if is_wanted else watch.unlisten)(self)

    # -- forward -----------------------------------------------------------------------------------

    def entered(self, entry: ModuleEntry) -> None:
        if entry.call is not None and not _is_compiled():
            self._tell("pre_fw_hook", entry.own, entry.args)
            self._opened().append(self._hook_inputs(entry) if self._goes_backward(entry) else None)

    def left(self, entry: ModuleEntry, output: Any) -> None:
        if entry.call is not None and not _is_compiled():
            opened = self._opened()
            call = opened.pop() if opened else None
            self._tell("post_fw_hook", entry.own, entry.args, output)
            if call is not None:
                self._hook_outputs(call, output)

    def _opened(self) -> list[_Call | None]:
        opened: list[_Call | None] | None = getattr(self._calls, "open", None)
        if opened is None:
            opened = self._calls.open = []
        return opened

    def _goes_backward(self, entry: ModuleEntry) -> bool:
        """Whether backward will run the nodes of this call: not those of a recomputation, unless it
        is a reentrant one."""
        has_hook = "pre_bw_hook" in self._hooks or "post_bw_hook" in self._hooks
        return (
            has_hook
            and torch.is_grad_enabled()
            and (not self.is_bw or entry.track.is_reentrant(entry.track.top))
        )

    def _hook_inputs(self, entry: ModuleEntry) -> _Call:
        """Before the forward: of two modules given the same tensor the outer one hears of its
        gradient first."""
        self._count += 1
        tensors = _needing_gradients((entry.args, entry.kwargs))
        call = _Call(entry.own, self._running(), self._count, tensors)
        for index, tensor in enumerate(tensors):
            self._hook(tensor, partial(self._passed, call, index))
        return call

    def _hook_outputs(self, call: _Call, output: Any) -> None:
        tensors = _needing_gradients(output)
        call.has_outputs = bool(tensors)
        for tensor in tensors:
            self._hook(tensor, partial(self._reached, call))

    def _hook(self, tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
        handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        if tensor.is_leaf:
            self._on_leaves.append(handle)

    # -- backward ----------------------------------------------------------------------------------

    def _reached(self, call: _Call, grad: torch.Tensor) -> None:
        """The gradient of an output is there: of the first one, if there are several."""
        task = running_backward()
        if call.task != task:
            self._begin(call, task)
            with self._about(call):
                self._tell("pre_bw_hook", call.module(), (grad,))

    def _passed(self, call: _Call, index: int, grad: torch.Tensor) -> None:
        """The gradient of an input is there."""
        task = running_backward()
        if call.task != task:
            # not reached in this backward: the tensor outlived the graph of the call
            if call.has_outputs:
                return
            self._begin(call, task)
        call.gradients[index] = grad
        call.expected -= 1
        if call.expected == 0 and call.is_open:
            self._end(call)

    def _begin(self, call: _Call, task: int) -> None:
        """What has not ended by itself ends with the backward: nothing else tells the end of a call
        without inputs."""
        call.begin(task)
        if task not in self._late:
            queue = _torch.private("queue_callback")
            if queue is not None:
                queue(partial(self._backward_ended, task))
            self._late[task] = []
            while len(self._late) > _MOST_BACKWARDS:
                del self._late[next(iter(self._late))]
        self._late[task].append(call)

    def _backward_ended(self, task: int) -> None:
        # the last made first
        for call in sorted(self._late.pop(task, ()), key=lambda late: -late.number):
            if call.is_open:
                self._end(call)

    def _end(self, call: _Call) -> None:
        with self._about(call):
            self._tell("post_bw_hook", call.module(), call.end())

    @contextmanager
    def _about(self, call: _Call) -> Iterator[None]:
        before, self._in_hook.names = getattr(self._in_hook, "names", None), call.names
        try:
            yield
        finally:
            self._in_hook.names = before

    def _user_hook(self, name: str) -> Callable[..., Any] | None:
        return self._hooks.get(name)

    def _tell(self, name: str, *args: Any) -> None:
        hook = self._hooks.get(name)
        if hook is not None and self.is_active:
            hook(*args)

    def backward_entered(self, module: nn.Module | None, call: ModuleCall) -> None:
        """Part of being a listener; not wanted."""

    def backward_left(self, module: nn.Module | None, call: ModuleCall) -> None:
        """Part of being a listener; not wanted."""


def _is_compiled() -> bool:
    """Whether this runs in a module that `torch.compile(module)` made. As in the original, its
    hooks are not called then."""
    in_compiled = _torch.private("in_compiled_module")
    return in_compiled is not None and bool(in_compiled())


def _will_run(node: Any) -> bool:
    """Whether the backward that is running runs a node. torch will not say of a leaf in
    `autograd.grad`: assume so."""
    will_run = _torch.private("will_run")
    try:
        return will_run is None or bool(will_run(node))
    except RuntimeError:
        return True


def _needing_gradients(value: Any) -> list[torch.Tensor]:
    """The tensors in a nested structure that need a gradient, in order; in dataclasses too, which
    pytrees do not open."""
    found: list[torch.Tensor] = []
    pending, seen = [value], set()
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            found += [item] if item.requires_grad else []
        elif type(item) in (tuple, list):
            pending += reversed(item)
        elif type(item) is dict:
            pending += reversed(item.values())
        elif dataclasses.is_dataclass(item):
            if id(item) not in seen and not isinstance(item, type):  # one may hold itself
                seen.add(id(item))
                pending += [
                    getattr(item, field.name, None) for field in reversed(dataclasses.fields(item))
                ]
        elif item is not None:
            leaves = tree_leaves(item)
            pending += reversed(leaves) if len(leaves) != 1 or leaves[0] is not item else ()
    return found
