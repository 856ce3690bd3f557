"""`drop_in.aot_logging` and torch's own module: same names, results and texts, and one state that
the compiler shares."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._functorch._aot_autograd.logging_utils as original
import torch._inductor.config
from torch._functorch.aot_autograd import aot_function
from torch.fx import traceback as fx_traceback

import torchwhere
from torchwhere.drop_in import aot_logging as ours
from torchwhere.hooks import line_log
from torchwhere.model.graph_walk import nodes_of

BOTH = pytest.mark.parametrize("module", [original, ours], ids=["original", "drop-in"])


@pytest.fixture(autouse=True)
def torch_counts_on() -> Iterator[None]:
    """Restore torch's own count and model name."""
    kept = original.nth_graph, original.model_name
    yield
    original.nth_graph, original.model_name = kept
    original.callback_set = False
    torch.compiler.reset()


def config(aot_id: int = 0, num_params_buffers: int = 2) -> Any:
    return SimpleNamespace(aot_id=aot_id, num_params_buffers=num_params_buffers)


# -- names -----------------------------------------------------------------------------------------


def test_it_has_all_that_the_original_has() -> None:
    """Every public function of the original exists with the same arguments, and its variables exist
    too."""
    functions = {
        name: f
        for name, f in vars(original).items()
        if inspect.isfunction(f) and f.__module__ == original.__name__
    }
    assert len(functions) == 9
    for name, function in functions.items():
        assert list(inspect.signature(getattr(ours, name)).parameters) == list(
            inspect.signature(function).parameters
        ), name
    assert ours.get_graph_being_compiled is ours.get_aot_graph_name
    for variable in ("graph_being_compiled", "model_name", "nth_graph"):
        assert getattr(ours, variable) == getattr(original, variable)
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        _ = ours.nope


@BOTH
def test_tracking_a_graph(module: Any) -> None:
    """While a graph is tracked its name is `<model>__<aot_id>_<name>_<n>`, in torch and in the
    drop-in; then it is counted."""
    before = module.get_aot_compilation_context()
    assert before[0] == []
    module.set_model_name("gpt2")
    with module.track_graph_compiling(config(3), "forward"):
        name = f"gpt2__3_forward_{before[2]}"
        assert module.get_graph_being_compiled() == module.get_aot_graph_name() == name
        assert original.get_aot_graph_name() == ours.get_aot_graph_name() == name
        assert module.get_aot_compilation_context() == (["3_forward"], "gpt2", before[2])
    assert module.get_aot_compilation_context() == ([], "gpt2", before[2] + 1)
    assert original.get_aot_compilation_context() == ours.get_aot_compilation_context()


@BOTH
def test_tracking_ends_with_an_exception(module: Any) -> None:
    """An exception ends the tracking and propagates; the graph is counted."""
    count = module.get_aot_compilation_context()[2]
    with pytest.raises(KeyError), module.track_graph_compiling(config(), "forward"):
        raise KeyError
    assert module.get_aot_compilation_context()[0] == []
    assert module.get_aot_compilation_context()[2] == count + 1


def test_a_graph_within_a_graph() -> None:
    """After a graph that is tracked inside another one, the outer one has its name again; the
    original loses it."""

    def outer_name_afterwards(module: Any) -> list[str]:
        with module.track_graph_compiling(config(0), "joint"):
            with module.track_graph_compiling(config(1), "forward"):
                assert module.get_aot_compilation_context()[0] == ["1_forward"]
            names: list[str] = module.get_aot_compilation_context()[0]
        assert module.get_aot_compilation_context()[0] == []
        return names

    assert outer_name_afterwards(ours) == ["0_joint"]
    assert outer_name_afterwards(original) == []


@BOTH
def test_names_inside_the_compiler(module: Any) -> None:
    """A compiler that asks while torch compiles gets the name of the graph: forward, inference or
    backward of a function."""
    seen = []

    def compiler(graph: Any, _inputs: Any) -> Any:
        graphs, model, count = module.get_aot_compilation_context()
        seen.append((graphs, len(graph.graph.nodes)))
        assert (
            module.get_graph_being_compiled()
            == f"{model}__{graphs[0]}_{count}"
            == original.get_aot_graph_name()
        )
        return graph

    function = aot_function(lambda x: x.sin().sin(), fw_compiler=compiler, bw_compiler=compiler)
    function(torch.randn(5, requires_grad=True)).sum().backward()
    with torch.no_grad():
        aot_function(lambda x: x.sin().sin(), fw_compiler=compiler, bw_compiler=compiler)(
            torch.randn(5)
        )
    assert [(graphs[0].partition("_")[2], nodes) for graphs, nodes in seen] == [
        ("forward", 4),
        ("backward", 8),
        ("inference", 4),
    ]
    ids = [int(graphs[0].partition("_")[0]) for graphs, _ in seen]
    assert (ids[1] - ids[0], ids[2] - ids[0]) == (0, 1)


def test_names_while_dynamo_compiles() -> None:
    """Under torch.compile the drop-in gives the name that torch gives, and the place has dynamo's
    id."""
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def compiler(graph: Any, _inputs: Any) -> Any:
        assert ours.get_graph_being_compiled() == original.get_graph_being_compiled()
        seen.append(
            (ours.get_aot_compilation_context()[0][0].partition("_")[2], torchwhere.where().graph)
        )
        return graph

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    with torchwhere.watch():
        torch.compile(lambda x: x.sin(), backend=backend)(
            torch.ones(2, requires_grad=True)
        ).sum().backward()
    assert seen == [("forward", "0/0"), ("backward", "0/0")]


def test_names_while_inductor_compiles() -> None:
    """Inductor sees the same name in the pass before a graph is lowered."""
    names = []

    def look(_graph: Any) -> None:
        assert ours.get_graph_being_compiled() == original.get_graph_being_compiled()
        names.append(ours.get_aot_compilation_context()[0][0].partition("_")[2])

    with torch._inductor.config.patch(post_grad_custom_pre_pass=look):
        torch.compile(lambda x: x + 1, backend="inductor")(torch.ones(2))
    assert names == ["inference"]


# -- texts -----------------------------------------------------------------------------------------


def test_texts_are_the_originals() -> None:
    """Descriptions of inputs and the text of a guard bug are exactly the same."""
    for number in range(5):
        assert ours.describe_input(number, config()) == original.describe_input(number, config())
    assert [ours.describe_input(number, config()) for number in (0, 1, 2)] == [
        "parameter/buffer 0",
        "parameter/buffer 1",
        "input 0",
    ]
    for expected in ("the input was contiguous", ""):
        assert ours.format_guard_bug_msg(config(7), expected) == original.format_guard_bug_msg(
            config(7), expected
        )


# -- stack traces ----------------------------------------------------------------------------------


def traces_of(module: Any, *, anomaly: bool) -> list[tuple[str, list[str]]]:
    """Return, for each node that runs in backward, fx's stack trace just before it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(anomaly):
            x = torch.ones(2, requires_grad=True)
            y = x.sin()
            z = y.exp() + y
    found = []
    module.setup_stacktrace_preservation_hooks_from_tensors([z, torch.ones(1), None])
    nodes = [
        node for node in nodes_of([z.grad_fn]) if node.name() != "torch::autograd::AccumulateGrad"
    ]
    for node in nodes:
        # Registered later, so called later: by now the trace is that of this node.
        node.register_prehook(
            lambda _grads, node=node: found.append((node.name(), fx_traceback.format_stack()))
        )
        node.register_hook(
            lambda *_, node=node: found.append(
                (f"after {node.name()}", fx_traceback.format_stack())
            )
        )
    with fx_traceback.preserve_node_meta():
        z.sum().backward()
        found.append(("afterwards", fx_traceback.format_stack()))
    return found


def test_traces_are_the_originals() -> None:
    """In backward, fx's stack trace is that of the node's forward, then marked as accumulation;
    nodes and order are those of the original, and the trace before is restored at the end."""
    mine, theirs = traces_of(ours, anomaly=True), traces_of(original, anomaly=True)
    assert mine == theirs
    assert [name for name, _ in mine] == [
        "AddBackward0",
        "after AddBackward0",
        "ExpBackward0",
        "after ExpBackward0",
        "SinBackward0",
        "after SinBackward0",
        "afterwards",
    ]
    traces = dict(mine)
    assert "y = x.sin()" in traces["SinBackward0"][-1]
    assert "z = y.exp() + y" in traces["ExpBackward0"][-1]
    assert traces["after SinBackward0"][-1].endswith(fx_traceback.GRADIENT_ACC_SPECIAL_STACK)
    assert traces_of(ours, anomaly=False) == traces_of(original, anomaly=False)


def test_recorded_lines_are_traces_too() -> None:
    """Without anomaly mode, the recorded lines replace the traces."""
    line_log.forget()
    with torchwhere.forward_lines():
        y = torch.ones(2, requires_grad=True).sin()
    ours.setup_stacktrace_preservation_hooks([y.grad_fn, None])
    found = []
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda _grads: found.extend(fx_traceback.format_stack()))
    with fx_traceback.preserve_node_meta():
        y.sum().backward()
    line_log.forget()
    line = test_recorded_lines_are_traces_too.__code__.co_firstlineno + 4
    assert found == [f'  File "{__file__}", line {line}, in test_recorded_lines_are_traces_too\n']


def test_sequence_numbers_are_set_while_a_node_runs() -> None:
    """While a node runs, fx has its sequence number; afterwards it has none."""
    y = torch.ones(2, requires_grad=True).sin()
    assert y.grad_fn is not None
    ours.setup_stacktrace_preservation_hooks([y.grad_fn])
    seen = []
    number = y.grad_fn._sequence_nr()
    y.grad_fn.register_prehook(lambda _grads: seen.append(dict(fx_traceback.get_current_meta())))
    with (
        fx_traceback.preserve_node_meta(),
        fx_traceback.set_current_meta(SimpleNamespace(meta={}, name="n")),
    ):
        y.sum().backward()
        assert "grad_fn_seq_nr" not in fx_traceback.current_meta or fx_traceback.current_meta[
            "grad_fn_seq_nr"
        ] != [number]
    assert seen[0]["grad_fn_seq_nr"] == [number] or seen[0]["grad_fn_seq_nr"] == number


def test_callback_set_is_true_while_a_backward_will_restore_the_trace() -> None:
    """`callback_set` is true from the first hook of a backward to its end, also after a backward
    that raised."""
    for module in (original, ours):
        y = torch.ones(2, requires_grad=True).sin()
        z, seen = y.exp(), []
        module.setup_stacktrace_preservation_hooks([z.grad_fn])
        y.register_hook(lambda _grad, module=module, seen=seen: seen.append(module.callback_set))
        assert module.callback_set is False
        z.sum().backward()
        assert (seen, module.callback_set) == ([True], False)
    broken = torch.ones(2, requires_grad=True).sin()
    broken.register_hook(lambda _grad: 1 / 0)
    last = broken.exp()
    ours.setup_stacktrace_preservation_hooks([last.grad_fn])
    with pytest.raises(ZeroDivisionError):
        last.sum().backward()
    assert ours.callback_set is False


def test_each_node_gets_its_hooks_once() -> None:
    """With twenty residual layers each node has one pair of hooks, not one for each path."""
    x = torch.ones(2, requires_grad=True)
    y = x
    for _ in range(20):
        y = y + y.sin()
    ran: Counter[Any] = Counter()
    registered: Counter[Any] = Counter()
    for node in nodes_of([y.grad_fn]):
        node.register_prehook(lambda _grads, node=node: ran.update([node]))
    ours.setup_stacktrace_preservation_hooks_from_tensors(y)
    for node in nodes_of([y.grad_fn]):
        registered[node] = 1
    y.sum().backward()
    assert ran == registered
    assert len(ran) == 41


def test_a_backward_that_raised_is_not_in_the_way() -> None:
    """After a backward that raised, the next one restores the stack trace; the original no longer
    does."""

    def stack_afterwards(module: Any) -> list[str]:
        def graph(*, fails: bool) -> torch.Tensor:
            y = torch.ones(2, requires_grad=True).sin()
            if fails:
                y.register_hook(lambda _grad: 1 / 0)
            z = y.exp()
            module.setup_stacktrace_preservation_hooks_from_tensors(z)
            return z.sum()

        with fx_traceback.preserve_node_meta():
            fx_traceback.set_stack_trace(["here\n"])
            with pytest.raises(ZeroDivisionError):
                graph(fails=True).backward()
            fx_traceback.set_stack_trace(["here\n"])
            graph(fails=False).backward()
            return list(fx_traceback.format_stack())

    assert stack_afterwards(ours) == ["here\n"]
    assert stack_afterwards(original) != ["here\n"]


@BOTH
def test_nothing_to_do(module: Any) -> None:
    """Empty roots, tensors without a graph and other objects are ignored."""
    assert module.setup_stacktrace_preservation_hooks([]) is None
    assert module.setup_stacktrace_preservation_hooks_from_tensors(torch.ones(1)) is None
    assert module.setup_stacktrace_preservation_hooks_from_tensors((None, 3)) is None


# -- changing over ---------------------------------------------------------------------------------


def test_side_by_side() -> None:
    """The program in docs/migrating.md prints what the page shows, with the drop-in and with the
    original."""
    page = Path(__file__).parent.parent / "docs" / "migrating.md"
    before, start, section = page.read_text().partition("## AOTAutograd's")
    section, end, after = section.partition("\n## ")
    program, *shown = re.findall(r"```(?:python|text)\n(.*?)```", section, re.DOTALL)
    changed = program.replace(
        "torchwhere.drop_in.aot_logging", "torch._functorch._aot_autograd.logging_utils"
    )
    assert changed != program
    printed = []
    for each in (program, changed):
        original.nth_graph = 0
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(each, "train.py", "exec"), {"__name__": "__main__"})
        printed.append(out.getvalue())
    if os.environ.get("TORCHWHERE_REGENERATE"):
        for was, now in zip(shown, printed, strict=True):
            section = section.replace(f"```text\n{was}```", f"```text\n{now}```", 1)
        page.write_text(before + start + section + end + after)
    else:
        assert shown == printed
