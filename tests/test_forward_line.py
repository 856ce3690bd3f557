"""The line of the forward that made a tensor or a node: recorded, from anomaly mode, of a compiled
function, of a module."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchwhere
from torchwhere.core.place import Certainty
from torchwhere.hooks import line_log
from torchwhere.model.graph_walk import nodes_of


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    """Lines that one test recorded do not exist in the next."""
    line_log.forget()
    yield
    line_log.forget()


def line_of(function: Any, offset: int) -> str:
    code = getattr(function, "__wrapped__", function).__code__
    return f"{code.co_filename}:{code.co_firstlineno + offset}"


def whole(line: str | None) -> str | None:
    """The line with its full path, whatever the current folder."""
    return None if line is None else os.path.abspath(line)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.down = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        y = torch.relu(y)
        return x + self.down(
            y.square(),
        )


def ops_and_lines(tensor: torch.Tensor) -> dict[str, str | None]:
    nodes = [
        node
        for node in nodes_of([tensor.grad_fn])
        if node.name() not in ("torch::autograd::AccumulateGrad", "TBackward0")
    ]
    return {node.name(): whole(torchwhere.forward_line(node)) for node in nodes}


# -- recorded --------------------------------------------------------------------------------------


def test_recorded_lines_are_exact() -> None:
    """Each node has the line of the user's code that made it, also inside modules; a call over
    several lines has its own line."""
    model = Block()
    with torchwhere.forward_lines():
        z = model(torch.ones(1, 4)) * 2
    line = torchwhere.forward_line(z)
    assert line is not None
    assert (line.source, line.certainty) == ("recorded", Certainty.EXACT)
    forward = Block.forward
    assert ops_and_lines(z) == {
        "MulBackward0": line_of(test_recorded_lines_are_exact, 5),
        "AddBackward0": line_of(forward, 3),
        "AddmmBackward0": line_of(forward, 1),  # the last one walked: `up`
        "PowBackward0": line_of(forward, 4),
        "ReluBackward0": line_of(forward, 2),
    }


def test_before_and_after_nothing_is_recorded() -> None:
    """Nodes made before, after and between recordings have no line; nodes of an earlier recording
    keep theirs."""
    x = torch.ones(2, requires_grad=True)
    before = x.sin()
    with torchwhere.forward_lines():
        first = x.sin()
    between = x.sin()
    with torchwhere.forward_lines():
        second = x.sin()
    after = x.sin()
    found = [whole(torchwhere.forward_line(y)) for y in (before, first, between, second, after)]
    function = test_before_and_after_nothing_is_recorded
    assert found == [None, line_of(function, 6), None, line_of(function, 9), None]


def test_a_decorator_nested_and_an_exception() -> None:
    """As a decorator, nested, and left by an exception it records the code inside, and leaves
    nothing behind."""

    @torchwhere.forward_lines()
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torchwhere.forward_lines():
            y = x.exp()
        return y.cos()

    y = forward(torch.ones(2, requires_grad=True))
    assert ops_and_lines(y) == {
        "CosBackward0": line_of(forward, 4),
        "ExpBackward0": line_of(forward, 3),
    }
    x = torch.ones(2, requires_grad=True)
    try:
        with torchwhere.forward_lines():
            z = x.sin()
            raise KeyError
    except KeyError:
        pass
    assert whole(torchwhere.forward_line(z)) == line_of(
        test_a_decorator_nested_and_an_exception, 18
    )
    assert sys.gettrace() is None
    assert sys._getframe().f_trace is None


def test_loops_generators_and_comprehensions() -> None:
    """Nodes made in a generator, a comprehension or a loop have the line that made them."""
    x = torch.ones(2, requires_grad=True)

    def powers() -> Iterator[torch.Tensor]:
        for _ in range(3):
            yield x.exp()

    with torchwhere.forward_lines():
        made = list(powers())
        more = [y.sin() for y in made]
    function = test_loops_generators_and_comprehensions
    assert {whole(torchwhere.forward_line(y)) for y in made} == {line_of(powers, 2)}
    assert {whole(torchwhere.forward_line(y)) for y in more} == {line_of(function, 10)}


def test_other_threads_are_left_alone() -> None:
    """Only the calling thread is recorded; another thread can record for itself."""
    x = torch.ones(2, requires_grad=True)
    found: list[Any] = []

    def elsewhere() -> None:
        found.append(sys.gettrace())
        with torchwhere.forward_lines():
            y = x.sin()
        found.append(whole(torchwhere.forward_line(y)))

    with torchwhere.forward_lines():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert found == [None, line_of(elsewhere, 3)]


def test_many_lines_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long recording drops its oldest lines, and never returns a wrong one."""
    monkeypatch.setattr(line_log, "_MOST_SPANS", 100)
    x = torch.ones(2, requires_grad=True)
    made = []
    with torchwhere.forward_lines():
        for _ in range(300):
            made.append(x.sin())
            made.append(x.cos())
    found = [whole(torchwhere.forward_line(y)) for y in made]
    function = test_many_lines_are_kept_within_bounds
    assert found[:100] == [None] * 100
    assert found[-50:] == [line_of(function, 7), line_of(function, 8)] * 25
    assert set(found[::2]) == {None, line_of(function, 7)}


def test_a_debugger_is_not_pushed_aside() -> None:
    """If another tool traces the thread, recording is an error, and the other tool stays."""

    def debugger(frame: Any, event: str, arg: Any) -> None:
        return None

    sys.settrace(debugger)
    try:
        with (
            pytest.raises(
                torchwhere.TorchwhereError,
                match=r"^forward_lines\(\): a debugger or a coverage tool already traces this thread",
            ),
            torchwhere.forward_lines(),
        ):
            pass
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(None)


def test_graphs_have_lines() -> None:
    """A backward graph of recorded nodes has their lines, also in its text."""
    with torchwhere.forward_lines():
        y = torch.ones(2, requires_grad=True).exp()
    graph = torchwhere.backward_graph(y.sin())
    assert [whole(node.line) for node in graph] == [None, line_of(test_graphs_have_lines, 3), None]
    assert f"{graph[1].line}" in str(graph)


# -- other ways of knowing -------------------------------------------------------------------------


def test_anomaly_mode_is_read() -> None:
    """Lines recorded by anomaly mode are used: exact, also in a backward graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            y = Block()(torch.ones(1, 4))
    line = torchwhere.forward_line(y)
    assert line is not None
    assert (whole(line), line.source, line.certainty) == (
        line_of(Block.forward, 3),
        "anomaly",
        Certainty.EXACT,
    )
    graph = torchwhere.backward_graph(y)
    assert [whole(node.line) for node in graph if node.op == "ReluBackward0"] == [
        line_of(Block.forward, 2)
    ]


def test_a_watch_knows_the_module() -> None:
    """With only a watch, the line is the begin of the forward of the user's innermost module, as
    inferred."""
    model = nn.Sequential(Block(), nn.Linear(4, 4))
    with torchwhere.watch(model):
        y = model[0](torch.ones(1, 4))
        node = next(node for node in nodes_of([y.grad_fn]) if node.name() == "AddmmBackward0")
        for origin in (y, node):
            line = torchwhere.forward_line(origin)
            assert line is not None
            assert (whole(line), line.source, line.certainty) == (
                line_of(Block.forward, 0),
                "module",
                Certainty.INFERRED,
            )
        assert torchwhere.forward_line(y.sum()) is None  # no module made it
        # Sequential and Linear are torch's own
        assert torchwhere.forward_line(model(torch.ones(1, 4))) is None
    assert torchwhere.forward_line(y) is None  # the watch is over


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_graphs(backend: str) -> None:
    """A node of a compiled graph has the first line of the compiled function; recording recompiles
    nothing."""
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    x = torch.ones(3, requires_grad=True)
    plain = compiled(x)
    line = torchwhere.forward_line(plain)
    assert line is not None
    assert (whole(line), line.source, line.certainty) == (
        line_of(function, 0),
        "compiled",
        Certainty.INFERRED,
    )
    before = dict(counters["stats"])
    with dynamo.config.patch(error_on_recompile=True), torchwhere.forward_lines():
        recorded = compiled(x)
    assert whole(torchwhere.forward_line(recorded)) == line_of(function, 0)
    assert dict(counters["stats"]) == before
    torch.compiler.reset()


def test_compiling_while_recording() -> None:
    """A function that is first compiled while lines are recorded is compiled as usual, and stays
    so."""
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    counters.clear()
    model = torch.compile(Block(), backend="aot_eager")
    with torchwhere.forward_lines():
        y = model(torch.ones(1, 4))
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})
    with dynamo.config.patch(error_on_recompile=True):
        model(torch.ones(1, 4))
    assert whole(torchwhere.forward_line(y)) == line_of(Block.forward, 0)
    torch.compiler.reset()


def test_an_error_of_a_custom_backward() -> None:
    """For an exception that a custom function raised in backward, the line is the one of the
    forward that called it."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("broken")

    with torchwhere.forward_lines():
        x = torch.ones(2, requires_grad=True)
        y = Broken.apply(x.sin())
        z = y.exp().sum()
    with pytest.raises(ArithmeticError) as raised:
        z.backward()
    line = torchwhere.forward_line(raised.value)
    assert line is not None
    assert (whole(line), line.certainty) == (
        line_of(test_an_error_of_a_custom_backward, 15),
        Certainty.EXACT,
    )


def test_an_error_of_torch_in_backward() -> None:
    """For an exception of torch in backward, the line is that of the node reached, as inferred."""
    with torchwhere.forward_lines():
        x = torch.ones(2, requires_grad=True)
        y = x.sin()
        z = y.exp()
        w = (z + 1).sum()
    with torch.no_grad():
        z.add_(1)  # exp saved its result: an error in backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        w.backward()
    line = torchwhere.forward_line(raised.value)
    assert line is not None
    assert line.certainty is Certainty.INFERRED
    function = test_an_error_of_torch_in_backward
    assert whole(line) == line_of(function, 5)


def test_an_error_of_a_forward() -> None:
    """For any other exception, the line is the innermost line of the user that it passed."""
    with pytest.raises(RuntimeError) as raised:
        Block()(torch.ones(1, 5))
    line = torchwhere.forward_line(raised.value)
    assert line is not None
    assert (whole(line), line.source) == (line_of(Block.forward, 1), "traceback")
    assert torchwhere.forward_line(ValueError("never raised")) is None


# -- no line ---------------------------------------------------------------------------------------


def test_a_leaf_has_no_line() -> None:
    """The node of a leaf has no line: no forward made it. A node that was not recorded has none
    either."""
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    assert y.grad_fn is not None
    assert torchwhere.forward_line(y.grad_fn.next_functions[0][0]) is None
    assert torchwhere.forward_line(y) is None


def test_bad_input() -> None:
    """A tensor without a graph is a ValueError that says why, anything else a TypeError."""
    with pytest.raises(
        ValueError,
        match=r"^forward_line\(tensor\): this tensor has no graph: requires_grad is False",
    ):
        torchwhere.forward_line(torch.ones(1))
    with pytest.raises(
        ValueError, match=r"^forward_line\(tensor\): this tensor is a leaf: no operation made it"
    ):
        torchwhere.forward_line(torch.ones(1, requires_grad=True))
    with pytest.raises(
        TypeError,
        match=(
            r"^forward_line\(...\): expected a tensor, an autograd node or an exception, got str$"
        ),
    ):
        torchwhere.forward_line("x")  # type: ignore[arg-type]
