"""Lists every private or version-bound name of torch that torchwhere uses, with the reason.

No other file uses such names.

`private(key)` returns the object, or None if this torch lacks it. `missing(hook)` says what does
not work without it. Names of modules that are slow to import (dynamo) are resolved only once the
job itself has imported them.
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
    """One name: its path, the hook that needs it, why, and what does not work without it."""

    path: str
    hook: str
    why: str
    without: str
    lazy: bool = False  # do not import its module; use it if the job has imported it
    # lazy names: the name must exist once the job has imported this module
    comes_with: str = "torch._dynamo.callback"


# torch 2.11 and 2.13 have all of these names (the test suite checks it), unless a line says
# otherwise.
NAMES = {
    "sequence_nr": Private(
        "torch._C._autograd._get_sequence_nr",
        "modules",
        "the number that the next autograd node of this thread gets: the nodes of a module call"
        " are between two such numbers",
        "places in backward have no module",
    ),
    "wrapped_call": Private(
        "torch.nn.Module._wrapped_call_impl",
        "modules",
        "the original of `nn.Module.__call__`: if no other library has wrapped it, our wrapper does"
        " its work, and its frame looks like one of this function",
        "each module call costs one extra frame, and stacks show a frame of torchwhere",
    ),
    "call": Private(
        "torch.nn.Module._call_impl",
        "modules",
        "the function that it calls for a module that was not compiled in place",
        "each module call costs one extra frame",
    ),
    "node_sequence_nr": Private(
        "torch.autograd.graph.Node._sequence_nr",
        "modules",
        "the number of a node: it shows which module call made the node",
        "places in backward have no module",
    ),
    "group_sequence_nr": Private(
        "torch.distributed.ProcessGroup._get_sequence_number_for_group",
        "collectives",
        "how many collectives a group has done: our own count begins there, so that ranks that"
        " start to watch at different times agree",
        "collectives are counted from the start of the watch",
    ),
    "unbox_group": Private(
        "torch.distributed.ProcessGroup.unbox",
        "collectives",
        "the process group behind the argument of a c10d op",
        "collectives are not recorded",
    ),
    "work": Private(
        "torch._C._distributed_c10d.Work",
        "device marks",
        "what an asynchronous collective returns: the job waits for the collective in its `wait`",
        "the end of asynchronous collectives on a device is unknown",
    ),
    "process_group": Private(
        "torch._C._distributed_c10d.ProcessGroup",
        "device marks",
        "collectives between its `_start_coalescing` and `_end_coalescing` have one `Work`",
        "the end of collectives that are issued together on a device is unknown",
    ),
    "current_node": Private(
        "torch._C._current_autograd_node",
        "modules",
        "the node that the engine runs on this thread",
        "places in backward have no module",
    ),
    "graph_task_id": Private(
        "torch._C._current_graph_task_id",
        "modules",
        "not -1 while the engine runs on this thread, also in its final callbacks, which have no"
        " node",
        "backward on device threads is recorded as `outside`",
    ),
    "run_backward": Private(
        "torch.autograd.graph._engine_run_backward",
        "backward",
        "every backward() and grad() calls it: the one place where a backward begins and ends",
        "the cursor does not show backward, exceptions in backward get no note",
    ),
    "loader_iterator": Private(
        "torch.utils.data.dataloader._BaseDataLoaderIter",
        "parts of a step",
        "the iterator of every `DataLoader`: the job loads data while its `__next__` runs",
        "the time in which the job loads data counts as `other`",
    ),
    "device_stats": Private(
        "torch._C._accelerator_getDeviceStats",
        "device memory",
        "the statistics of the caching allocator; `torch.accelerator.memory_stats` makes a flat"
        " dict of 100 entries from them, which takes much longer",
        "the memory of the device is not recorded",
    ),
    "dispatch_key": Private(
        "torch._C.DispatchKey",
        "collectives",
        "BackendSelect: the first key that every c10d op passes and that no other library uses",
        "collectives are not recorded",
    ),
    "keyset_after": Private(
        "torch._C._dispatch_keyset_full_after",
        "collectives",
        "redispatches a c10d op below our kernel",
        "collectives are not recorded",
    ),
    "all_schemas": Private(
        "torch._C._jit_get_all_schemas",
        "collectives",
        "lists the ops of the c10d namespace, so that new ops are recorded too",
        "collectives are not recorded",
    ),
    "process_groups": Private(
        "torch.distributed.distributed_c10d._world",
        "collectives",
        "the table of all process groups, used or not",
        "only the names of groups are recorded",
    ),
    "new_group": Private(
        "torch.distributed.distributed_c10d._new_group_with_tag",
        "process groups",
        "every new_group, also of a device mesh, calls it: all ranks wait for each other in it",
        "a job that hangs while it creates a process group looks like a job that computes",
    ),
    "replicated": Private(
        "torch.distributed._composable.replicate.DDP",
        "collectives",
        "the class of the modules that `replicate()` returns",
        "DDP all-reduces of `replicate()` do not name their parameters",
        lazy=True,
        comes_with="torch.distributed._composable.replicate",
    ),
    "replicate": Private(
        "torch.distributed._composable.replicate.replicate",
        "collectives",
        "has the DDP instance of such a module",
        "DDP all-reduces of `replicate()` do not name their parameters",
        lazy=True,
        comes_with="torch.distributed._composable.replicate",
    ),
    "bucket_assignment": Private(
        "torch.distributed._compute_bucket_assignment_by_size",
        "collectives",
        "DDP's own bucketing: names the parameters of a bucket before the logger of DDP has them",
        "DDP all-reduces before the third step do not name their parameters",
    ),
    "step_pre_hook": Private(
        "torch.optim.optimizer.register_optimizer_step_pre_hook",
        "optimizers",
        "hooks for every optimizer's step",
        "torchwhere does not count steps by itself; call torchwhere.step()",
    ),
    "step_post_hook": Private(
        "torch.optim.optimizer.register_optimizer_step_post_hook",
        "optimizers",
        "hooks for every optimizer's step",
        "torchwhere does not count steps by itself; call torchwhere.step()",
    ),
    "eval_frame": Private(
        "torch._C._dynamo.eval_frame",
        "modules",
        "makes dynamo skip the frames of our wrappers: an attempt to compile them counts as a graph"
        " break",
        "dynamo may count graph breaks at module calls",
    ),
    "fake_mode": Private(
        "torch._guards.active_fake_mode",
        "modules",
        "distinguishes a forward that only infers shapes from a real one: its calls do not count",
        "call numbers also count forwards under fake tensors",
    ),
    "fake_tensor": Private(
        "torch._subclasses.fake_tensor.FakeTensor",
        "ops",
        "an op on tensors without data only infers shapes, and is not listed",
        "ops on fake tensors are listed too",
    ),
    "dispatch_modes": Private(
        "torch._C._len_torch_dispatch_stack",
        "ops",
        "whether a dispatch mode is active: without one there is no mode for fake tensors either",
        "ops on fake tensors are listed too",
    ),
    "queue_callback": Private(
        "torch.autograd.Variable._execution_engine.queue_callback",
        "backward",
        "registers a callback for the end of the running backward",
        "ModTracker does not call post_bw_hook for a module if none of its inputs needs a gradient",
    ),
    "will_run": Private(
        "torch._C._will_engine_execute_node",
        "backward",
        "whether the running backward executes a node: how many gradients to wait for",
        "ModTracker may call post_bw_hook only at the end of the backward",
    ),
    "leaf_function": Private(
        "torch._dynamo.decorators.leaf_function",
        "backward",
        "marks a function that a compiled graph calls without tracing it",
        "ModTracker.compile_safe_hooks breaks graphs",
        lazy=True,
    ),
    "in_compiled_module": Private(
        "torch._dynamo.eval_frame._is_in_optimized_module",
        "backward",
        "true inside a module that torch.compile(module) returned: ModTracker calls no user hooks"
        " there",
        "ModTracker calls the user's hooks for compiled modules too",
        lazy=True,
    ),
    "compiled_autograd": Private(
        "torch._dynamo.compiled_autograd.compiled_autograd_enabled",
        "backward",
        "true while torch compiles backwards: a hook on a node would become part of the graph",
        "backward callbacks may cause recompilations under compiled autograd",
        lazy=True,
    ),
    "compile_callbacks": Private(
        "torch._dynamo.callback.callback_handler",
        "compilation",
        "calls back when a compilation begins and ends",
        "compilations are not recorded",
        lazy=True,
    ),
    "compile_metrics": Private(
        "torch._dynamo.utils.get_compilation_metrics",
        "compilation",
        "dynamo's metrics of its last 64 compilations: number of ops, time, reason for a recompile",
        "graphs() does not know sizes, times and reasons of compilations",
        lazy=True,
    ),
    "metrics_context": Private(
        "torch._dynamo.utils.get_metrics_context",
        "compilation",
        "dynamo's metrics of the running compilation: the reason for a recompile",
        "compile_begin events do not say why a function is compiled again",
        lazy=True,
    ),
    "aot_naming": Private(
        "torch._functorch._aot_autograd.logging_utils",
        "compilation",
        "the module where AOTAutograd has the names of the model and of the graph it compiles",
        "the graph that AOTAutograd compiles has no name",
        lazy=True,
    ),
    "tracing_context": Private(
        "torch._guards.TracingContext",
        "compilation",
        "dynamo and AOTAutograd pass each other the name of the graph in it",
        "drop_in.aot_logging does not pass the name of the graph to dynamo",
    ),
    "compile_context": Private(
        "torch._guards.CompileContext",
        "compilation",
        "the id (0/0) of the running compilation",
        "a place inside a compilation does not name the graph",
    ),
    "original_code": Private(
        "torch._dynamo.utils.orig_code_map",
        "compilation",
        "maps compiled code to the original code: distinguishes compiled frames from others",
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


# Only compared: the module that runs the graphs of AOTAutograd.
AOT_RUNTIME = "torch._functorch._aot_autograd.runtime_wrappers"

# Only compared: the exceptions of these modules are control flow. torch stops a recomputation early
# with one.
CONTROL_FLOW_MODULES = ("torch.utils.checkpoint", "torch._dynamo.exc")

# Only compared: the module whose import starts the hook for compilations.
DYNAMO = "torch._dynamo"

# Only compared: a thread with a frame of one of these modules on its stack may be about to call a
# collective.
COLLECTIVE_CALLERS = ("torch.distributed.", "torch._ops", "torch.autograd.graph")


def resolve(path: str, *, lazy: bool = False) -> Any:
    """The object at a dotted path, or None. Lazy: only from the module before the last dot, and
    only if that is imported.

    `getattr(torch, "_dynamo")` would import dynamo: `__getattr__` of torch does that.
    """
    parts = path.split(".")
    for cut in range(len(parts) - 1, len(parts) - 2 if lazy else 0, -1):
        module = _module(".".join(parts[:cut]), lazy=lazy)
        if module is None:
            continue
        value: Any = module
        for attribute in parts[cut:]:
            value = getattr(value, attribute, None)
        return value
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
    """The object for `key`; None if this torch does not have it, or if it is lazy and not
    imported."""
    return resolve(NAMES[key].path, lazy=True) if NAMES[key].lazy else _eager(key)


def getter(key: str, default: Any = None) -> Callable[[], Any]:
    """The function for `key`; if this torch does not have it, one that returns `default`."""
    return private(key) or (lambda: default)


def imported(key: str) -> Any:
    """The module for `key`, imported now; None if this torch does not have it."""
    return _module(NAMES[key].path, lazy=False)


def missing(hook: str) -> list[str]:
    """The names that this torch lacks for one hook, as sentences for the log."""
    return [
        f"this torch has no {name.path}: {name.without}"
        for key, name in NAMES.items()
        if name.hook == hook
        and (not name.lazy or name.comes_with in sys.modules)
        and private(key) is None
    ]


Function = TypeVar("Function", bound=Callable[..., Any])


def stepped_over(function: Function) -> Function:
    """Make dynamo skip the frames of one of our wrappers, and compile the functions that it calls
    as usual."""
    return _set_strategy(function, callees="DEFAULT")


def unseen(function: Function) -> Function:
    """Make dynamo skip one of our functions, and everything that it calls.

    After a graph break dynamo tries to compile every Python frame that runs next, also ours.
    """
    return _set_strategy(function, callees="SKIP")


def _set_strategy(function: Function, *, callees: str) -> Function:
    eval_frame = private("eval_frame")
    action = getattr(eval_frame, "_FrameAction", None)
    code = getattr(function, "__code__", None)  # a function written in C has no code and no frame
    if code is not None and action is not None and hasattr(eval_frame, "set_code_exec_strategy"):
        strategy = eval_frame._FrameExecStrategy(action.SKIP, getattr(action, callees))
        eval_frame.set_code_exec_strategy(code, strategy)
    return function


def is_dynamo_loaded() -> bool:
    return "torch._dynamo.callback" in sys.modules
