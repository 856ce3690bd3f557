"""Every private or version-bound torch name that torchwhere touches, each with its reason. Nowhere
else.

`private(key)` gives the object, or None on a torch that lacks it; `missing(sense)` says what that
costs. Names of modules that are expensive to import (dynamo) are only resolved when the job itself
has imported them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True)
class Private:
    """One name: where it is, which sense needs it, why, and what is lost without it."""

    path: str
    sense: str
    why: str
    without: str
    lazy: bool = False  # never import its module for this; use it if the job has
    # lazy: it should be there once the job has imported this
    comes_with: str = "torch._dynamo.callback"


# Versions: all of these were found in torch 2.11, 2.13 (checked by the suite), unless a line says
# otherwise.
NAMES = {
    "sequence_nr": Private(
        "torch._C._autograd._get_sequence_nr",
        "modules",
        "the number the next autograd node of this thread will get: brackets the nodes a module"
        " call makes",
        "places in backward have no module",
    ),
    "wrapped_call": Private(
        "torch.nn.Module._wrapped_call_impl",
        "modules",
        "what `nn.Module.__call__` is unless somebody else has wrapped it: then we do its work in"
        " our own frame",
        "each module call costs one frame more",
    ),
    "call": Private(
        "torch.nn.Module._call_impl",
        "modules",
        "what it calls for a module that was not compiled in place",
        "each module call costs one frame more",
    ),
    "node_sequence_nr": Private(
        "torch.autograd.graph.Node._sequence_nr",
        "modules",
        "the number of a node: which module call made it",
        "places in backward have no module",
    ),
    "group_sequence_nr": Private(
        "torch.distributed.ProcessGroup._get_sequence_number_for_group",
        "collectives",
        "how many collectives a group has done: where our own count begins, so that late watchers"
        " agree",
        "collectives are counted from the start of the watch",
    ),
    "unbox_group": Private(
        "torch.distributed.ProcessGroup.unbox",
        "collectives",
        "the process group behind the argument of a c10d op",
        "collectives are not recorded",
    ),
    "current_node": Private(
        "torch._C._current_autograd_node",
        "modules",
        "the node the engine is running on this thread",
        "places in backward have no module",
    ),
    "graph_task_id": Private(
        "torch._C._current_graph_task_id",
        "modules",
        "not -1 while the engine runs on this thread, also in its final callbacks, where there is"
        " no node",
        "backward on device threads looks like `outside`",
    ),
    "run_backward": Private(
        "torch.autograd.graph._engine_run_backward",
        "backward",
        "every backward() and grad() goes through it: the one place to see a backward begin"
        " and end",
        "the cursor does not show backward, exceptions in backward carry no note",
    ),
    "dispatch_key": Private(
        "torch._C.DispatchKey",
        "collectives",
        "BackendSelect: the first key every c10d op passes that nobody else uses",
        "collectives are not recorded",
    ),
    "keyset_after": Private(
        "torch._C._dispatch_keyset_full_after",
        "collectives",
        "to send a c10d op on its way below our kernel",
        "collectives are not recorded",
    ),
    "all_schemas": Private(
        "torch._C._jit_get_all_schemas",
        "collectives",
        "lists the ops of the c10d namespace, so that a new one is recorded too",
        "collectives are not recorded",
    ),
    "process_groups": Private(
        "torch.distributed.distributed_c10d._world",
        "collectives",
        "the table of all process groups, used or not",
        "groups are known by name only",
    ),
    "new_group": Private(
        "torch.distributed.distributed_c10d._new_group_with_tag",
        "gathering",
        "what every new_group, also of a device mesh, comes down to: all ranks wait for each other"
        " in it",
        "a job that hangs while it makes a process group is not told from one that computes",
    ),
    "replicated": Private(
        "torch.distributed._composable.replicate.DDP",
        "collectives",
        "the class of modules that `replicate()` was applied to",
        "DDP all-reduces of `replicate()` do not name their parameters",
        lazy=True,
        comes_with="torch.distributed._composable.replicate",
    ),
    "replicate": Private(
        "torch.distributed._composable.replicate.replicate",
        "collectives",
        "knows the DDP instance behind such a module",
        "DDP all-reduces of `replicate()` do not name their parameters",
        lazy=True,
        comes_with="torch.distributed._composable.replicate",
    ),
    "bucket_assignment": Private(
        "torch.distributed._compute_bucket_assignment_by_size",
        "collectives",
        "DDP's own bucketing, to name the parameters in a bucket before its logger knows them",
        "DDP all-reduces before the third step do not name their parameters",
    ),
    "step_pre_hook": Private(
        "torch.optim.optimizer.register_optimizer_step_pre_hook",
        "optimizers",
        "hooks for every optimizer's step",
        "steps are not counted by themselves; call torchwhere.step()",
    ),
    "step_post_hook": Private(
        "torch.optim.optimizer.register_optimizer_step_post_hook",
        "optimizers",
        "hooks for every optimizer's step",
        "steps are not counted by themselves; call torchwhere.step()",
    ),
    "eval_frame": Private(
        "torch._C._dynamo.eval_frame",
        "modules",
        "to tell dynamo to step over our wrapper's frame instead of trying to compile it, a counted"
        " graph break",
        "dynamo may count graph breaks at module calls",
    ),
    "fake_mode": Private(
        "torch._guards.active_fake_mode",
        "modules",
        "tells a forward that only finds out shapes from a real one: its calls do not count",
        "call numbers count forwards under fake tensors too",
    ),
    "fake_tensor": Private(
        "torch._subclasses.fake_tensor.FakeTensor",
        "ops",
        "an op on tensors without data is a rehearsal, and not listed",
        "ops on fake tensors are listed too",
    ),
    "dispatch_modes": Private(
        "torch._C._len_torch_dispatch_stack",
        "ops",
        "whether another dispatch mode is on: only then can there be one for fake tensors",
        "ops on fake tensors are listed too",
    ),
    "queue_callback": Private(
        "torch.autograd.Variable._execution_engine.queue_callback",
        "backward",
        "has something called at the end of the backward that is running",
        "ModTracker's post_bw_hook is not called for a module none of whose inputs needs a"
        " gradient",
    ),
    "will_run": Private(
        "torch._C._will_engine_execute_node",
        "backward",
        "whether the backward that is running runs a node: how many gradients to wait for",
        "ModTracker's post_bw_hook may come at the end of the backward",
    ),
    "leaf_function": Private(
        "torch._dynamo.decorators.leaf_function",
        "backward",
        "a function that a compiled graph calls as it is",
        "ModTracker.compile_safe_hooks breaks graphs",
        lazy=True,
    ),
    "in_compiled_module": Private(
        "torch._dynamo.eval_frame._is_in_optimized_module",
        "backward",
        "true inside a module that torch.compile(module) returned: ModTracker calls no user hook"
        " there",
        "ModTracker calls the user's hooks for compiled modules too",
        lazy=True,
    ),
    "compiled_autograd": Private(
        "torch._dynamo.compiled_autograd.compiled_autograd_enabled",
        "backward",
        "true while backwards are compiled: a hook on a node would become part of the graph",
        "backward callbacks may cause recompilations under compiled autograd",
        lazy=True,
    ),
    "compile_callbacks": Private(
        "torch._dynamo.callback.callback_handler",
        "compilation",
        "told when a compilation begins and ends",
        "compilations are not recorded",
        lazy=True,
    ),
    "compile_metrics": Private(
        "torch._dynamo.utils.get_compilation_metrics",
        "compilation",
        "what dynamo notes about its last 64 compilations: how many ops, how long, why again",
        "graphs() does not know sizes, times and reasons of compilations",
        lazy=True,
    ),
    "metrics_context": Private(
        "torch._dynamo.utils.get_metrics_context",
        "compilation",
        "what dynamo notes about the compilation that is under way: why it compiles again",
        "compile_begin events do not say why a function is compiled again",
        lazy=True,
    ),
    "aot_naming": Private(
        "torch._functorch._aot_autograd.logging_utils",
        "compilation",
        "the module where AOTAutograd keeps the names of the model and of the graph it compiles",
        "the graph that AOTAutograd compiles has no name",
        lazy=True,
    ),
    "tracing_context": Private(
        "torch._guards.TracingContext",
        "compilation",
        "where dynamo and AOTAutograd hand each other the name of the graph that is being compiled",
        "drop_in.aot_logging does not tell dynamo the name of the graph",
    ),
    "compile_context": Private(
        "torch._guards.CompileContext",
        "compilation",
        "the id (0/0) of what is being compiled",
        "a place inside a compilation does not name the graph",
    ),
    "original_code": Private(
        "torch._dynamo.utils.orig_code_map",
        "compilation",
        "from the code dynamo made to the code it was made from: tells compiled frames from others",
        "places inside compiled graphs do not name them",
        lazy=True,
    ),
    "cache_entries": Private(
        "torch._C._dynamo.eval_frame._debug_get_cache_entry_list",
        "compilation",
        "the compiled variants of a code object, each with its id",
        "places inside compiled graphs do not name them",
    ),
}


# only compared: the module of what runs AOTAutograd's graphs
AOT_RUNTIME = "torch._functorch._aot_autograd.runtime_wrappers"

# Only compared: a thread with a frame of one of these modules on its stack may be about to call a
# collective.
COLLECTIVE_CALLERS = ("torch.distributed.", "torch._ops", "torch.autograd.graph")


def resolve(path: str, *, lazy: bool = False) -> Any:
    """The object at a dotted path, or None. Lazy: only from the module before the last dot, and
    only if it is loaded.

    `getattr(torch, "_dynamo")` would import it: torch's own `__getattr__` does that.
    """
    parts = path.split(".")
    for cut in range(len(parts) - 1, len(parts) - 2 if lazy else 0, -1):
        module = _module(".".join(parts[:cut]), lazy=lazy)
        if module is None:
            continue
        found: Any = module
        for attribute in parts[cut:]:
            found = getattr(found, attribute, None)
        return found
    return None


def _module(name: str, *, lazy: bool) -> Any:
    if name in sys.modules or lazy:
        return sys.modules.get(name)
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@cache
def _eager(key: str) -> Any:
    return resolve(NAMES[key].path)


def private(key: str) -> Any:
    """The private name behind `key`, or None where this torch does not have it (or, if lazy, not
    yet)."""
    return resolve(NAMES[key].path, lazy=True) if NAMES[key].lazy else _eager(key)


def imported(key: str) -> Any:
    """The module behind `key`, imported for somebody who asked for it by name; None where this
    torch does not have it."""
    return _module(NAMES[key].path, lazy=False)


def missing(sense: str) -> list[str]:
    """What this torch lacks for one sense, as sentences to say once."""
    return [
        f"this torch has no {name.path}: {name.without}"
        for key, name in NAMES.items()
        if name.sense == sense
        and (not name.lazy or name.comes_with in sys.modules)
        and private(key) is None
    ]


Function = TypeVar("Function", bound=Callable[..., Any])


def stepped_over(function: Function) -> Function:
    """Have dynamo step over frames of a wrapper of ours, while what it calls is compiled as
    ever."""
    return _tell_dynamo(function, what_it_calls="DEFAULT")


def unseen(function: Function) -> Function:
    """Have dynamo leave a function of ours alone, and everything it calls.

    Where a graph breaks, dynamo tries to compile every Python frame that runs next: without this,
    our own.
    """
    return _tell_dynamo(function, what_it_calls="SKIP")


def _tell_dynamo(function: Function, *, what_it_calls: str) -> Function:
    eval_frame = private("eval_frame")
    action = getattr(eval_frame, "_FrameAction", None)
    code = getattr(function, "__code__", None)  # one written in C has none, and no frame either
    if code is not None and action is not None and hasattr(eval_frame, "set_code_exec_strategy"):
        strategy = eval_frame._FrameExecStrategy(action.SKIP, getattr(action, what_it_calls))
        eval_frame.set_code_exec_strategy(code, strategy)
    return function


def is_dynamo_loaded() -> bool:
    return "torch._dynamo.callback" in sys.modules
