"""Stacks in a watched job: the lines, files and modules that an unwatched job shows.

Each function of `FORWARD` and `BACKWARD` captures stacks in one way. The tests run it unwatched and
watched, with the Python wrappers and with the native ones, and compare.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import inspect
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._traceback import CapturedTraceback
from torch.utils.checkpoint import checkpoint

import torchwhere
from torchwhere.hooks.shown_frames import shown_as
from torchwhere.native import load

TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(torchwhere.__file__).parent)
LEVELS = range(1, 8)


class Inner(nn.Module):
    """Runs a function inside its forward."""

    def __init__(self, look: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.look = look

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look()
        return self.second(self.first(x)).relu()


class Outer(nn.Module):
    """Calls `Inner`, so that a stack has two module calls."""

    def __init__(self, look: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.inner = Inner(look)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x))


class Identity(torch.autograd.Function):
    """Runs a function inside its backward."""

    look: Callable[[], object]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Identity.look()
        return gradient


@pytest.fixture(params=["python", "native"])
def kind(request: pytest.FixtureRequest, library: Path, monkeypatch: Any) -> Iterator[str]:
    """Watches of this test use the Python wrappers, or the native ones."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(library.parent.parent))
        patch.setenv(load.SWITCH, str(int(request.param == "native")))
        yield request.param


# -- ways to capture a stack -----------------------------------------------------------------------


def in_forward(look: Callable[[], object]) -> list[Any]:
    found: list[Any] = []
    Outer(lambda: found.append(look()))(torch.ones(2, 4))
    return found


def captured_traceback() -> Any:
    """torch's own fast capture."""
    return in_forward(lambda: CapturedTraceback.extract().format())


def extracted_stack() -> Any:
    """Python's `traceback`, with columns."""
    return in_forward(
        lambda: [
            (frame.filename, frame.lineno, frame.name, frame.line, frame.colno)
            for frame in traceback.extract_stack()
        ]
    )


def inspected_stack() -> Any:
    """Python's `inspect`, with the modules whose globals the frames have."""
    return in_forward(
        lambda: [
            (frame.filename, frame.lineno, frame.function, frame.frame.f_globals["__name__"])
            for frame in inspect.stack()
        ]
    )


def in_a_forward_hook() -> Any:
    """A stack in a forward hook."""
    found: list[Any] = []
    model = Outer()
    model.inner.first.register_forward_hook(
        lambda *_: found.append(CapturedTraceback.extract().format())
    )
    model(torch.ones(2, 4))
    return found


def warned() -> Any:
    """Where `warnings` says that a warning with a `stacklevel` comes from."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        in_forward(lambda: [warnings.warn(f"at {level}", stacklevel=level) for level in LEVELS])
    return [(str(warning.message), warning.filename, warning.lineno) for warning in caught]


def filtered_warnings() -> Any:
    """Which warnings a filter on torch's modules drops."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=r"torch\.nn\.modules\.module")
        in_forward(lambda: [warnings.warn(f"at {level}", stacklevel=level) for level in LEVELS])
    return [str(warning.message) for warning in caught]


def logged() -> Any:
    """Where `logging` says that a record with a `stacklevel` comes from."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("test_shown_frames")
    log.addHandler(handler)
    log.propagate = False
    try:
        in_forward(lambda: [log.warning("at %d", level, stacklevel=level) for level in LEVELS])
    finally:
        log.removeHandler(handler)
    return [(record.getMessage(), record.pathname, record.lineno) for record in records]


def raised() -> Any:
    """The traceback of an exception, as Python prints it."""

    def fail() -> None:
        raise ValueError("in forward")

    with pytest.raises(ValueError, match="in forward") as caught:
        in_forward(fail)
    return traceback.format_tb(caught.value.__traceback__)


def debug_mode() -> Any:
    """The user's lines that DebugMode prints above the ops, in forward and in backward."""
    from torch.utils._debug_mode import DebugMode

    model = Outer()
    with DebugMode(record_stack_trace=True) as mode:
        model(torch.ones(2, 4)).sum().backward()
    return mode.debug_string(show_stack_trace=True)


def anomaly_mode() -> Any:
    """The forward stack that anomaly mode stores on a node."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(check_nan=False):
            node: Any = Outer()(torch.ones(2, 4)).grad_fn
    return node.metadata["traceback_"]


def traced_by_fx() -> Any:
    """The stack traces of the nodes of an FX graph, every module traced into."""

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return False

    tracer = Tracer()
    tracer.record_stack_traces = True
    return [(node.name, node.stack_trace) for node in tracer.trace(Outer()).nodes]


def made_by_make_fx() -> Any:
    """The stack traces of the nodes that `make_fx` records."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(Outer(), record_stack_traces=True)(torch.ones(2, 4)).graph
    return [(node.name, node.stack_trace) for node in graph.nodes]


def exported() -> Any:
    """The stack traces of the nodes of an exported program."""
    program = torch.export.export(Outer(), (torch.ones(2, 4),), strict=False)
    return [(node.name, node.stack_trace) for node in program.graph.nodes]


def compiled() -> Any:
    """The stack traces of the nodes of compiled graphs, with a graph break in a module's
    forward."""
    traces: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        traces.append([(node.name, node.stack_trace) for node in graph.graph.nodes])
        return graph

    torch._dynamo.reset()
    torch.compile(Outer(torch._dynamo.graph_break), backend=backend)(torch.ones(2, 4))
    torch._dynamo.reset()
    return traces


def compiled_in_place() -> Any:
    """A stack below a module that `module.compile()` has compiled, with a graph break."""
    found: list[Any] = []

    @torch._dynamo.disable
    def look() -> None:
        stack = traceback.extract_stack()
        found.append(
            [(frame.filename, frame.name) for frame in stack if "dynamo" not in frame.name]
        )

    torch._dynamo.reset()
    model = nn.Sequential(Inner(look))
    model[0].compile(backend="eager")
    for _ in range(2):
        model(torch.ones(2, 4))
    torch._dynamo.reset()
    return found[-1]


FORWARD = [
    captured_traceback,
    extracted_stack,
    inspected_stack,
    in_a_forward_hook,
    warned,
    filtered_warnings,
    logged,
    raised,
    debug_mode,
    anomaly_mode,
    traced_by_fx,
    made_by_make_fx,
    exported,
    compiled,
    compiled_in_place,
]


@pytest.mark.parametrize("capture", FORWARD, ids=lambda capture: capture.__name__)
def test_stacks_in_forward_are_those_of_an_unwatched_job(
    capture: Callable[[], Any], kind: str
) -> None:
    """A stack that is captured in a module call is the same in a watched and an unwatched job."""
    contexts = [contextlib.nullcontext(), torchwhere.watch()]
    unwatched, watched = [_captured(capture, context) for context in contexts]
    assert watched == unwatched
    assert unwatched


def _captured(capture: Callable[[], Any], context: Any) -> Any:
    with context:
        capture()  # the first call of a module takes another path through the wrapper
        return capture()


# -- where there is a frame more -------------------------------------------------------------------


def in_backward(
    run: Callable[[torch.Tensor, torch.Tensor], object],
) -> list[traceback.StackSummary]:
    stacks: list[traceback.StackSummary] = []
    Identity.look = lambda: stacks.append(traceback.extract_stack())  # type: ignore[method-assign]
    x = torch.ones(2, 4, requires_grad=True)
    run(Identity.apply(x).sum(), x)  # type: ignore[no-untyped-call]
    return stacks


def backward() -> list[traceback.StackSummary]:
    return in_backward(lambda loss, _x: loss.backward())


def grad() -> list[traceback.StackSummary]:
    return in_backward(lambda loss, x: torch.autograd.grad(loss, x))


def recomputed() -> list[traceback.StackSummary]:
    stacks: list[traceback.StackSummary] = []
    model, x = (
        Inner(lambda: stacks.append(traceback.extract_stack())),
        torch.ones(2, 4, requires_grad=True),
    )
    for reentrant in (True, False):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()  # type: ignore[no-untyped-call]
    return stacks


def with_callbacks() -> list[traceback.StackSummary]:
    stacks: list[traceback.StackSummary] = []
    with torchwhere.on_module(enter=lambda *_: None):
        Outer(lambda: stacks.append(traceback.extract_stack()))(torch.ones(2, 4))
    return stacks


def new_group() -> list[traceback.StackSummary]:
    with pytest.raises(ValueError, match=r"world size|rank") as caught:
        dist.new_group([5])
    return [traceback.extract_tb(caught.value.__traceback__)]


@pytest.mark.parametrize(
    "capture",
    [backward, grad, recomputed, with_callbacks, new_group],
    ids=lambda capture: capture.__name__,
)
def test_further_frames_look_like_those_of_torch(
    capture: Callable[[], list[traceback.StackSummary]], kind: str, one_rank: None
) -> None:
    """In a backward, and while a callback on modules is set, a stack has a frame more. It looks
    like a frame of torch, and the user's lines are the same."""
    contexts = [contextlib.nullcontext(), torchwhere.watch()]
    unwatched, watched = [_captured(capture, context) for context in contexts]
    assert [_users(stack) for stack in watched] == [_users(stack) for stack in unwatched]
    assert any(_users(stack) for stack in watched)
    inside = {frame.filename for stack in watched for frame in stack[_first_user(stack) :]}
    assert not [file for file in inside if file.startswith(f"{OURS}/hooks/")]


def _users(stack: traceback.StackSummary) -> list[tuple[str, int | None, str]]:
    return [
        (frame.filename, frame.lineno, frame.name)
        for frame in stack
        if not frame.filename.startswith((TORCH, OURS))
    ]


def _first_user(stack: traceback.StackSummary) -> int:
    return next(at for at, frame in enumerate(stack) if frame.filename == __file__)


def test_a_module_that_is_imported_late_warns_at_the_importing_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning at the import of a module that torchwhere waits for names the line of the
    import."""
    from torchwhere.hooks.late_imports import LateImports

    (tmp_path / "late_module.py").write_text(
        "import warnings\nwarnings.warn('old', stacklevel=2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    imported: list[str] = []
    waiting = LateImports({"late_module": lambda: imported.append("late_module")})
    waiting.install()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import late_module  # type: ignore[import-not-found]  # noqa: F401
    finally:
        waiting.remove()
        sys.modules.pop("late_module", None)
    assert [warning.filename for warning in caught] == [__file__]
    assert imported == ["late_module"]


# -- the decorator ---------------------------------------------------------------------------------


def test_every_instruction_has_the_position_of_the_call() -> None:
    """The line table of a shown function gives one position to all of its instructions, also far
    from its first line."""

    def original(value: int) -> str:
        low = value + 1
        high = low + 1

        return str(low + high)

    text = str

    @shown_as(original, calling="str")
    def wrapper(value: int) -> str:
        values = [text(number) for number in range(value)] or [text(value)]
        return "".join(values) + text(len(values)) + text(values[0]) + text(values[-1])

    assert wrapper(3) == "012302"
    call = next(
        instruction.positions
        for instruction in dis.get_instructions(original)
        if instruction.opname.startswith("CALL")
    )
    assert set(wrapper.__code__.co_positions()) == {tuple(call or ())}
    assert (wrapper.__name__, wrapper.__qualname__) == (original.__name__, original.__qualname__)


def test_a_function_that_is_not_python_is_left_as_it_is() -> None:
    """A function that wraps a builtin keeps its own file and name."""

    def wrapper() -> int:
        return 1

    assert shown_as(len)(wrapper) is wrapper


def test_shown_wrappers_use_no_globals(kind: str, one_rank: None) -> None:
    """A wrapper that has the globals of another module reads builtins and closure variables
    only."""
    with torchwhere.watch(), torchwhere.on_module(enter=lambda *_: None):
        wrappers = [
            nn.Module.__call__,
            torch.autograd.graph._engine_run_backward,
            dist.init_process_group,
            dist.distributed_c10d._new_group_with_tag,
        ]
        closures = inspect.getclosurevars(nn.Module.__call__).nonlocals
        wrappers.append(closures["inner"])
    for wrapper in wrappers:
        assert isinstance(wrapper, FunctionType)
        assert not wrapper.__code__.co_filename.startswith(OURS)
    unknown = {
        name
        for wrapper in wrappers
        for name in _globals_of(wrapper.__code__)
        if not hasattr(builtins, name)
    }
    assert unknown == set()


def _globals_of(code: CodeType) -> set[str]:
    return {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_GLOBAL"
    }
