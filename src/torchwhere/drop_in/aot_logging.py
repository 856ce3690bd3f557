"""Drop-in for `torch/_functorch/_aot_autograd/logging_utils.py`: same names, arguments, results and
texts.

The names of graphs are stored where AOTAutograd stores them, so torch and this module always agree.
Better than the original: after a graph that is tracked inside another one, the outer one has its
name again; the hooks for stack traces work after a backward that raised, and they use the lines
that `torchwhere.forward_lines()` recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.fx import traceback as fx_traceback

from torchwhere.drop_in.tracker_hooks import running_backward
from torchwhere.hooks import _torch, line_log
from torchwhere.model.graph_walk import nodes_of, roots_of

__all__ = [
    "callback_set",  # noqa: F822 - `__getattr__` gives it
    "describe_input",
    "format_guard_bug_msg",
    "get_aot_compilation_context",
    "get_aot_graph_name",
    "get_graph_being_compiled",
    "graph_being_compiled",  # noqa: F822 - `__getattr__` gives it
    "model_name",  # noqa: F822 - `__getattr__` gives it
    "nth_graph",  # noqa: F822 - `__getattr__` gives it
    "set_model_name",
    "setup_stacktrace_preservation_hooks",
    "setup_stacktrace_preservation_hooks_from_tensors",
    "track_graph_compiling",
]

_Stack = list[str]

# The name of the model, the graphs being compiled, and the number of compiled graphs.
_VARIABLES: dict[str, Any] = {"model_name": "model", "graph_being_compiled": [], "nth_graph": 0}


def _naming() -> Any:
    """Return the object with the variables: the module of AOTAutograd, if it has all of them."""
    torchs = _torch.imported("aot_naming")
    is_usable = all(hasattr(torchs, name) for name in _VARIABLES)
    return torchs if is_usable else SimpleNamespace(**_VARIABLES)


_names = _naming()


def __getattr__(name: str) -> Any:
    """Return the current value of a variable of the original module."""
    if name in _VARIABLES:
        return getattr(_names, name)
    # True if the running backward restores the stack trace at its end
    if name == "callback_set":
        return running_backward() in _restoring
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def set_model_name(name: str) -> None:
    """Set the name of the model whose graphs are compiled from now on.

    Example:
        >>> set_model_name("decoder")
        >>> get_aot_graph_name()
        'decoder__0_forward_3'
    """
    _names.model_name = name


def get_aot_compilation_context() -> tuple[list[str], str, int]:
    """Return the graphs being compiled, the model's name, and the number of compiled graphs."""
    return list(_names.graph_being_compiled), _names.model_name, _names.nth_graph


def get_aot_graph_name() -> str:
    """Return the name of the graph being compiled, for example `model__0_forward_3`."""
    graphs, model, count = get_aot_compilation_context()
    return f"{model}__{'_'.join(graphs)}_{count}"


get_graph_being_compiled = get_aot_graph_name


@contextmanager
def track_graph_compiling(aot_config: Any, graph_name: str) -> Iterator[None]:
    """Set the graph being compiled to `<aot_id>_<graph_name>` while the block runs.

    The end of the block counts the graph, also after an exception.

    Example:
        >>> with track_graph_compiling(aot_config, "forward"):
        ...     log.info("compiling %s", get_aot_graph_name())
    """
    outer = _names.graph_being_compiled
    _names.graph_being_compiled = [f"{aot_config.aot_id}_{graph_name}"]
    context = _tracing_context()
    before = getattr(context, "aot_graph_name", None)
    if context is not None:
        context.aot_graph_name = _names.graph_being_compiled
    try:
        yield
    finally:
        _names.nth_graph += 1
        _names.graph_being_compiled = outer
        latest = _tracing_context()
        if context is not None and latest is not None:
            latest.aot_graph_name = before


def _tracing_context() -> Any:
    """Return the object where dynamo looks for the name; None while dynamo traces nothing."""
    tracing = _torch.private("tracing_context")
    return tracing.try_get() if tracing is not None else None


# -- stack traces ----------------------------------------------------------------------------------


def setup_stacktrace_preservation_hooks(roots: Sequence[Node | None]) -> None:
    """Set fx's stack trace, while a node behind `roots` runs in backward, to that of the forward
    code that made the node."""
    for node in nodes_of(roots):
        _preserve(node, _stack_of(node))


def setup_stacktrace_preservation_hooks_from_tensors(outputs: Any) -> None:
    """Do the same for the nodes behind tensors."""
    values = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    setup_stacktrace_preservation_hooks(roots_of(tensors))


def _stack_of(node: Any) -> _Stack:
    """Return the stack that anomaly mode stored; without one, the recorded line as one frame."""
    stack: _Stack = node.metadata.get("traceback_", [])
    if stack:
        return stack
    line, _ = line_log.find(node._sequence_nr())
    return [] if line is None else [f'  File "{line.file}", line {line.line}, in {line.function}\n']


def _preserve(node: Any, forward_stack: _Stack) -> None:
    number = node._sequence_nr()
    accumulating = [*forward_stack, fx_traceback.GRADIENT_ACC_SPECIAL_STACK]

    def before(_gradients: Any) -> None:
        _restore_afterwards()
        fx_traceback.set_stack_trace(forward_stack)
        fx_traceback.set_grad_fn_seq_nr(number)
        _mark_backward("_mark_autograd_backward")

    def after(_inputs: Any, _outputs: Any) -> None:
        fx_traceback.set_stack_trace(accumulating)
        fx_traceback.reset_grad_fn_seq_nr()
        _mark_backward("_reset_autograd_backward")

    node.register_prehook(before)
    node.register_hook(after)


def _mark_backward(name: str) -> None:
    """Tell fx whether a backward is being traced, which newer versions of torch ask for."""
    mark = getattr(fx_traceback, name, None)
    if mark is not None:
        mark()


_restoring: set[int] = set()  # ids of backwards that restore the stack trace at their end


def _restore_afterwards() -> None:
    """Restore the stack trace at the end of the running backward.

    Registered once for each backward: one that raises runs no callbacks, and must not disturb the
    next one.
    """
    task, queue = running_backward(), _torch.private("queue_callback")
    if task in _restoring or queue is None:
        return
    stack = fx_traceback.format_stack()

    def restore() -> None:
        _restoring.discard(task)
        fx_traceback.set_stack_trace(stack)

    _restoring.add(task)
    queue(restore)


# -- texts -----------------------------------------------------------------------------------------


def describe_input(i: int, aot_config: Any) -> str:
    """Return `parameter/buffer 3` or `input 0`. `torchwhere.graphs()[id].describe(i)` has names."""
    lifted = aot_config.num_params_buffers
    return f"parameter/buffer {i}" if i < lifted else f"input {i - lifted}"


def format_guard_bug_msg(aot_config: Any, expected: str) -> str:
    """Return the message for a graph whose assumption at compile time is false at run time."""
    return (
        f"At compilation time, graph {aot_config.aot_id} was compiled under the assumption that"
        f" {expected}, but at runtime this was not the case.  This indicates a guard bug in"
        " AOTAutograd or Dynamo, please file a bug to PyTorch."
    )
