"""Drop-in for `torch/_functorch/_aot_autograd/logging_utils.py`: same names, arguments, results and
texts.

Names live where AOTAutograd keeps them, so that both see the same: what torch compiles has its name
here, and what is tracked here has its name in torch. Better than the original: a graph tracked
inside another gives the outer one its name back; the hooks for stack traces work again after a
backward that raised, and know the lines that `torchwhere.forward_lines()` recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.fx import traceback as fx_traceback

from torchwhere.drop_in.aot_state import Naming
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

_naming = Naming()

_Stack = list[str]


_KEPT_BY_TORCH = {"graph_being_compiled": "graphs", "model_name": "model", "nth_graph": "count"}


def __getattr__(name: str) -> Any:
    """Return the current value of a variable of the original module."""
    if name in _KEPT_BY_TORCH:
        return getattr(_naming, _KEPT_BY_TORCH[name])
    # True while the running backward will restore the stack trace at its end
    if name == "callback_set":
        return _running_task() in _restoring
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def set_model_name(name: str) -> None:
    """Name the model whose graphs are compiled from now on."""
    _naming.model = name


def get_aot_compilation_context() -> tuple[list[str], str, int]:
    """The graphs being compiled, the model's name, and how many graphs were compiled so far."""
    return list(_naming.graphs), _naming.model, _naming.count


def get_aot_graph_name() -> str:
    """The name of the graph being compiled: `model__0_forward_3`."""
    return f"{_naming.model}__{'_'.join(_naming.graphs)}_{_naming.count}"


get_graph_being_compiled = get_aot_graph_name


@contextmanager
def track_graph_compiling(aot_config: Any, graph_name: str) -> Iterator[None]:
    """While inside, the graph being compiled is `<aot_id>_<graph_name>`."""
    with _naming.compiling(f"{aot_config.aot_id}_{graph_name}"):
        yield


# -- stack traces ----------------------------------------------------------------------------------


def setup_stacktrace_preservation_hooks(roots: Sequence[Node | None]) -> None:
    """While a node behind `roots` runs in backward, fx's current stack trace is that of the forward
    which made it."""
    for node in nodes_of(roots):
        _preserve(node, _stack_of(node))


def setup_stacktrace_preservation_hooks_from_tensors(outputs: Any) -> None:
    """The same for the nodes behind tensors."""
    listed = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
    setup_stacktrace_preservation_hooks(
        roots_of([one for one in listed if isinstance(one, torch.Tensor)])
    )


def _stack_of(node: Any) -> _Stack:
    """What anomaly mode has noted; else the line that was recorded, as one frame."""
    noted: _Stack = node.metadata.get("traceback_", [])
    written, _ = (None, False) if noted else line_log.find(node._sequence_nr())
    return (
        [f'  File "{written.file}", line {written.line}, in {written.function}\n']
        if written is not None
        else noted
    )


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
    """Newer torch also notes that what is traced is a backward."""
    mark = getattr(fx_traceback, name, None)
    if mark is not None:
        mark()


_restoring: set[int] = set()  # runs of the engine that will put back the stack trace they found


def _restore_afterwards() -> None:
    """Once for each run of the engine: one that raises never gets to its callbacks, and must not be
    in the way of the next."""
    task, queue = _running_task(), _torch.private("queue_callback")
    if task in _restoring or queue is None:
        return
    found = fx_traceback.format_stack()

    def put_back() -> None:
        _restoring.discard(task)
        fx_traceback.set_stack_trace(found)

    _restoring.add(task)
    queue(put_back)


def _running_task() -> int:
    """Return the id of the backward that runs on this thread, or -1."""
    task_id = _torch.private("graph_task_id")
    return int(task_id()) if task_id is not None else -1


# -- texts -----------------------------------------------------------------------------------------


def describe_input(i: int, aot_config: Any) -> str:
    """`parameter/buffer 3` or `input 0`. For names: `torchwhere.graphs()[id].describe(i)`."""
    lifted = aot_config.num_params_buffers
    return f"parameter/buffer {i}" if i < lifted else f"input {i - lifted}"


def format_guard_bug_msg(aot_config: Any, expected: str) -> str:
    """What to say when a graph was compiled on an assumption that does not hold when it runs."""
    return (
        f"At compilation time, graph {aot_config.aot_id} was compiled under the assumption that"
        f" {expected}, but at runtime this was not the case.  This indicates a guard bug in"
        " AOTAutograd or Dynamo, please file a bug to PyTorch."
    )
