"""The table of compiled graphs: ids, kinds, functions, inputs by parameter name, recompilations and
why. Real torch.compile."""

from __future__ import annotations

import dis
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn

import torchwhere
from models import Model, batch
from torchwhere.model.bytecode import GRAPH_NAME, Expression, graph_inputs, graph_name


@pytest.fixture(autouse=True)
def a_fresh_compiler() -> Iterator[None]:
    """Nothing compiled before, nothing left after: ids begin at 0/0."""
    from torch._dynamo.utils import clear_compilation_metrics, counters

    def forget() -> None:
        torch.compiler.reset()
        clear_compilation_metrics()
        counters.clear()

    forget()
    yield
    forget()


def facts(graphs: Any) -> list[tuple[Any, ...]]:
    return [(graph.id, graph.kind, graph.function, graph.recompiled) for graph in graphs]


# -- what was compiled -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_forward_backward_inference_and_again(backend: str) -> None:
    """Each graph has its id, kind, function, backend, ops and inputs by name; one compiled again
    says how often and why."""
    model = Model(depth=1)
    compiled = torch.compile(model, backend=backend)
    compiled(batch()).sum().backward()
    compiled(batch(rows=6)).sum().backward()
    with torch.no_grad():
        compiled(batch(rows=6))
    found = torchwhere.graphs()
    assert facts(found) == [
        ("0/0", "forward", "Model.forward", 0),
        ("0/0", "backward", "Model.forward", 0),
        ("0/1", "forward", "Model.forward", 1),
        ("0/1", "backward", "Model.forward", 1),
        ("0/2", "inference", "Model.forward", 2),
    ]
    assert {graph.backend for graph in found} == {backend}
    assert {os.path.basename(graph.line or "") for graph in found} == {
        f"models.py:{Model.forward.__code__.co_firstlineno}"
    }
    assert [graph.ops for graph in found if graph.kind != "backward"] == [4, 4, 4]
    assert [graph.reason for graph in found] == [
        None,
        None,
        "0/0: tensor 'x' size mismatch at index 0. expected 4, actual 6",
        None,
        "0/1: GLOBAL_STATE changed: grad_mode",
    ]
    assert [str(each) for each in found["0/0"].inputs or ()] == [
        "parameter layers.0.up.weight",
        "parameter layers.0.up.bias",
        "input x",
        "parameter layers.0.down.weight",
        "parameter layers.0.down.bias",
        "parameter head.weight",
        "parameter head.bias",
    ]
    assert "input x.size(0)" in [str(each) for each in found["0/1"].inputs or ()]
    assert all(graph.is_live for graph in found)


def test_asking_changes_nothing() -> None:
    """Asking compiles nothing, breaks no graph and causes no recompilation, also while a watch is
    running."""
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    model = Model(depth=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torchwhere.watch(model):
        compiled(batch()).sum().backward()
        before = dict(counters["stats"])
        torchwhere.graphs()
        with dynamo.config.patch(error_on_recompile=True):
            compiled(batch()).sum().backward()
        assert dict(counters["stats"]) == before
        assert dict(counters["graph_break"]) == {}


def test_dynamo_is_not_loaded_for_this() -> None:
    """Where nothing was compiled the table is empty, and dynamo has not been loaded to find that
    out."""
    code = (
        "import sys, torchwhere; print(torchwhere.graphs(), len(torchwhere.graphs()),"
        " 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True
    )
    assert done.stdout == "no compiled graphs 0 False\n"


def test_functions_breaks_buffers_and_containers() -> None:
    """A function's graph has the parameters of the models it uses, buffers, and tensors as they are
    reached; a graph break makes two."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    @torch.compile(backend="aot_eager")
    def step(x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        y = model(x) * more["scale"]
        torch._dynamo.graph_break()
        return y.sin().sum()

    step(torch.ones(2, 4), {"scale": torch.ones(4, requires_grad=True)}).backward()
    found = torchwhere.graphs()
    first, second = found["0/0"], found["1/0"]
    assert first.function.endswith("<locals>.step")
    assert "resume_in_step" in second.function
    named = {(each.kind, each.name) for each in first.inputs or ()}
    assert named >= {
        ("parameter", "0.weight"),
        ("parameter", "1.bias"),
        ("buffer", "1.running_mean"),
        ("input", "x"),
        ("input", "more['scale']"),
    }
    assert [str(each) for each in second.inputs or ()] == ["input y"]


def test_a_backend_of_the_users() -> None:
    """A backend that does not use AOTAutograd has forward graphs, under its own name."""

    def my_backend(module: Any, inputs: Any) -> Any:
        return module.forward

    torch.compile(Model(depth=1), backend=my_backend)(batch()).sum().backward()
    assert [(graph.kind, graph.backend) for graph in torchwhere.graphs()] == [
        ("forward", "my_backend")
    ]


def test_the_name_of_the_model() -> None:
    """A graph has AOTAutograd's name of the model, shown where one was given."""
    from torchwhere.drop_in.aot_logging import set_model_name

    torch.compile(lambda x: x.sin(), backend="aot_eager")(torch.ones(2, requires_grad=True))
    assert {graph.model for graph in torchwhere.graphs()} == {"model"}
    assert "model" not in str(torchwhere.graphs()).splitlines()[0]
    torch.compiler.reset()
    set_model_name("gpt2")
    try:
        torch.compile(lambda x: x.cos(), backend="aot_eager")(torch.ones(2, requires_grad=True))
        assert {graph.model for graph in torchwhere.graphs() if graph.is_live} == {"gpt2"}
        assert "gpt2" in str(torchwhere.graphs())
    finally:
        set_model_name("model")


def test_dropped_graphs() -> None:
    """After a reset the graphs are told as dropped, as long as dynamo remembers them."""
    torch.compile(Model(depth=1), backend="aot_eager")(batch()).sum().backward()
    torch.compiler.reset()
    found = torchwhere.graphs()
    assert [(graph.id, graph.kind, graph.is_live, graph.ops) for graph in found] == [
        ("0/0", "forward", False, 4),
        ("0/0", "backward", False, None),
    ]
    assert "forward, dropped" in str(found)


def test_a_failed_compilation_is_no_graph() -> None:
    """What could not be compiled is not in the table."""

    def broken(module: Any, inputs: Any) -> Any:
        raise RuntimeError("no")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(lambda x: x + 1, backend=broken)(torch.ones(2))
    assert list(torchwhere.graphs()) == []


# -- a watch ---------------------------------------------------------------------------------------


def test_a_watch_remembers_what_dynamo_forgets() -> None:
    """Dynamo keeps notes of its last compilations; a watch collects them before they go."""
    from torch._dynamo.utils import clear_compilation_metrics

    compiled = torch.compile(Model(depth=1), backend="aot_eager")
    with torchwhere.watch():
        compiled(batch()).sum().backward()
        compiled(batch(rows=6)).sum().backward()
        clear_compilation_metrics()
        found = torchwhere.graphs()
        assert (found["0/0"].ops, found["0/0"].seconds is not None) == (4, True)
    alone = torchwhere.graphs()
    assert [(graph.id, graph.ops) for graph in alone if graph.kind == "forward"] == [
        ("0/0", None),
        ("0/1", None),
    ]


def test_events_say_what_and_why(tmp_path: Path) -> None:
    """The box has for each compilation whether it is of a forward or a backward, and why it was
    compiled again."""
    compiled = torch.compile(Model(depth=1), backend="aot_eager")
    with torchwhere.watch(out=tmp_path):
        compiled(batch()).sum().backward()
        compiled(batch(rows=6))
    found = [
        event.fields for event in torchwhere.read_run(tmp_path).events(kinds={"compile_begin"})
    ]
    assert found == [
        {"what": "0/0", "part": "forward"},
        {"what": "0/0", "part": "backward"},
        {
            "what": "0/1",
            "part": "forward",
            "because": "0/0: tensor 'x' size mismatch at index 0. expected 4, actual 6",
        },
    ]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_place_knows_its_graph(backend: str) -> None:
    """Where an op of the user's runs in a compiled graph, forward and backward, and while one is
    compiled, the place has the graph's id, and the table the rest; a function that was not compiled
    is in no graph."""
    seen: list[tuple[str, str | None]] = []
    name = f"torchwhere_test::look_{backend}"

    @torch.library.custom_op(name, mutates_args=())
    def look(x: torch.Tensor) -> torch.Tensor:
        place = torchwhere.where()
        seen.append((place.pass_, place.graph))
        return x.clone()

    @look.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        seen.append(("compiling", torchwhere.where().graph))
        return torch.empty_like(x)

    look.register_autograd(lambda ctx, grad: look(grad))

    @torch.compiler.disable
    def outside() -> None:
        seen.append(("disabled", torchwhere.where().graph))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = look(x) + 1
        outside()
        return y

    compiled = torch.compile(function, backend=backend)
    with torchwhere.watch():
        compiled(torch.ones(2, requires_grad=True)).sum().backward()
        graph = torchwhere.graphs()["0/0"]
    in_backward = None if backend == "eager" else "0/0"  # only AOTAutograd compiles backwards
    assert set(seen) == {
        ("compiling", "0/0"),
        ("outside", "0/0"),
        ("disabled", None),
        ("backward", in_backward),
    }
    assert graph.kind == "forward"


# -- results ---------------------------------------------------------------------------------------


def test_table_and_json() -> None:
    """The table has a line a graph and no empty column; one graph lists its inputs; the dictionary
    survives JSON."""
    compiled = torch.compile(Model(depth=1), backend="aot_eager")
    compiled(batch())
    found = torchwhere.graphs()
    heading, row = str(found).splitlines()
    assert heading.split() == [
        "graph",
        "kind",
        "function",
        "line",
        "backend",
        "ops",
        "inputs",
        "seconds",
    ]
    assert row.split()[:3] == ["0/0", "forward", "Model.forward"]
    assert "6 parameters, 1 input" in row
    text = str(found[0]).splitlines()
    assert text[0].startswith("graph 0/0 forward of Model.forward (")
    assert text[3] == "  2  input x"
    assert json.loads(json.dumps(found.to_dict()))["graphs"][0]["inputs"][2] == {
        "number": 2,
        "kind": "input",
        "name": "x",
    }
    assert repr(found) == "<CompiledGraphs: 0/0>"
    assert found[0].describe(0) == "parameter layers.0.up.weight"
    assert "0/0" in found
    assert found[:1][0] is found[0]


def test_bad_input() -> None:
    """An unknown id is a KeyError that lists the known ones; an input that is not there a
    ValueError."""
    torch.compile(Model(depth=1), backend="aot_eager")(batch()).sum().backward()
    found = torchwhere.graphs()
    with pytest.raises(KeyError, match=r"no compiled graph '7/7'; there are 0/0"):
        found["7/7"]
    with pytest.raises(ValueError, match=r"^describe\(7\): graph 0/0 has 7 inputs, 0 to 6$"):
        found[0].describe(7)
    with pytest.raises(
        ValueError, match=r"^describe\(0\): the inputs of backward graph 0/0 are not known$"
    ):
        found[1].describe(0)


# -- dynamo's code ---------------------------------------------------------------------------------


def code_that_calls(body: str) -> CodeType:
    scope: dict[str, Any] = {}
    exec(f"def made(self, x, d):\n    {body}", scope)
    code: CodeType = scope["made"].__code__
    return code


def test_inputs_are_read_off_the_code() -> None:
    """Attributes, keys and constants are followed through variables; what is no parameter is given
    as it is reached."""
    code = code_that_calls(
        f"t = self._modules; return {GRAPH_NAME}1(t['a']._modules['0']._parameters['w'], x,"
        " d['k'][0], x.t(), 3)"
    )
    inputs = graph_inputs(code)
    assert inputs is not None
    assert [str(each) for each in inputs] == [
        "self._modules['a']._modules['0']._parameters['w']",
        "x",
        "d['k'][0]",
        "x.t()",
        "3",
    ]
    assert [expression.module_tensor for expression in inputs] == [
        ("parameter", "a.0.w"),
        None,
        None,
        None,
        None,
    ]
    assert graph_name(code) == f"{GRAPH_NAME}1"
    assert Expression("self", ((".", "_buffers"), ("[", "mean"))).module_tensor == (
        "buffer",
        "mean",
    )
    assert Expression("self", ((".", "_modules"), ("[", "up"))).module_tensor is None


def test_code_that_is_not_understood_gives_nothing() -> None:
    """Code with loops, arithmetic or no graph gives None, never a guess."""
    assert graph_inputs(code_that_calls(f"return {GRAPH_NAME}1(x + 1)")) is None
    assert graph_inputs(code_that_calls(f"return {GRAPH_NAME}1(*[x for x in d])")) is None
    assert graph_inputs(code_that_calls("return x")) is None
    assert graph_name(code_that_calls("return x")) is None
    assert any(
        i.opname == "BINARY_OP" for i in dis.get_instructions(code_that_calls("return x + 1"))
    )
