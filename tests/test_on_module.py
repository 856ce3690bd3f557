"""Callbacks on entering and leaving modules: which run, in which order, how often, and that they do
not disturb the job."""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchwhere
from models import Model, batch
from rank_pool import Pool
from test_identity import KINDS, _tensors
from torchwhere import ModuleCall, on_module
from torchwhere.api import watch
from warm_python import WarmPython

KEYS = ("enter", "exit", "backward_enter", "backward_exit")
SIGNS = dict(zip(KEYS, "><{}", strict=True))


class Log:
    """The calls of callbacks: `>name` and `<name` in forward, `{name` and `}name` in backward, `*`
    when recomputed."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, nn.Module | None, ModuleCall]] = []

    def callbacks(self, *keys: str) -> dict[str, Callable[[Any, ModuleCall], None]]:
        def callback(key: str) -> Callable[[Any, ModuleCall], None]:
            return lambda module, call: self.calls.append((key, module, call))

        return {key: callback(key) for key in keys or KEYS}

    def __str__(self) -> str:
        return " ".join(
            f"{SIGNS[key]}{call.name or '/'}{call.call or ''}{'*' * (call.pass_ == 'recompute')}"
            for key, _, call in self.calls
        )

    def backward(self) -> str:
        return " ".join(part for part in str(self).split() if part[0] in "{}")

    def check(self) -> None:
        """Check that everything entered is left, in the right order, on this thread."""
        for opening, closing in (("enter", "exit"), ("backward_enter", "backward_exit")):
            stack: list[Any] = []
            for key, module, call in self.calls:
                if key == opening:
                    stack.append((module, call))
                elif key == closing:
                    assert stack.pop() == (module, call)
            assert stack == []


def told(run: Callable[[], Any], *keys: str) -> Log:
    found = Log()
    with on_module(**found.callbacks(*keys)):
        run()
    if not keys:
        found.check()
    return found


def train(model: nn.Module, x: torch.Tensor | None = None) -> None:
    out = model(batch() if x is None else x)
    out.sum().backward()


# -- what is told ----------------------------------------------------------------------------------


def test_one_step() -> None:
    """Outer modules are entered before inner ones and left after them, in forward and in
    backward."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)))
    found = told(lambda: train(model))
    assert (
        str(found) == ">/ >0 <0 >1 >1.0 <1.0 >1.1 <1.1 <1 </ {/ {1 {1.1 }1.1 {1.0 }1.0 }1 {0 }0 }/"
    )
    assert [module for _, module, call in found.calls if call.name == "1.1"] == [model[1][1]] * 4
    assert {type(call) for _, _, call in found.calls} == {ModuleCall}


def test_what_a_call_says() -> None:
    """A call has the name, the number within the step, the pass and the step; it is equal at enter
    and exit, and readable."""
    model = nn.Sequential(nn.Linear(8, 8))
    model.append(model[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def steps() -> None:
        for _ in range(2):
            train(model)
            optimizer.step()

    calls = [
        call
        for key, _, call in told(steps).calls
        if call.name == "0" and key in ("enter", "backward_exit")
    ]
    assert calls == [
        ModuleCall("0", call, pass_, step)
        for step in (0, 1)
        for pass_, call in (("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0))
    ]
    assert [str(call) for call in calls[:3]] == [
        "forward of 0",
        "forward of 0 call 1",
        "backward of 0 call 1",
    ]
    assert str(ModuleCall("", None, "recompute", 0)) == "recompute of <root>"
    assert calls[1].to_dict() == {"name": "0", "call": 1, "pass": "forward", "step": 0}


def test_where_inside_a_callback() -> None:
    """Inside a callback, `where()` names the module of that callback."""
    places: list[tuple[str, str | None, int | None]] = []

    def note(_module: Any, _call: ModuleCall) -> None:
        place = torchwhere.where()
        places.append((place.pass_, place.module, place.call))

    model = nn.Sequential(nn.Linear(8, 8))
    with on_module(enter=note, exit=note, backward_enter=note):
        train(model)
    forward = [("forward", "", 0), ("forward", "0", 0), ("forward", "0", 0), ("forward", "", 0)]
    assert places == forward + [("backward", "0", 0)] * 2


def test_wrappers_are_reported_once() -> None:
    """A wrapper and the module in it are one call, reported with the user's own module."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = nn.Linear(8, 8)
    model = nn.Sequential(checkpoint_wrapper(inner))
    found = told(lambda: train(model, batch().requires_grad_()))
    assert str(found) == ">/ >0 <0 </ {/ {0 >0* <0* }0 }/"
    assert {module for _, module, call in found.calls if call.name == "0"} == {inner}


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return x


def test_recomputation_is_reported_as_such() -> None:
    """A repeated forward has the pass `recompute` and the number of the call that it repeats; its
    backward is reported once."""
    for reentrant in (False, True):
        model = Checkpointed(reentrant=reentrant)
        found = told(functools.partial(train, model))
        recomputed = [
            (call.name, call.call)
            for key, _, call in found.calls
            if key == "enter" and call.pass_ == "recompute"
        ]
        assert recomputed == [
            (name, call) for call in (1, 0) for name in ("block", "block.0", "block.1")
        ]
        assert (
            found.backward() == "{/ {block1 {block.11 }block.11 {block.01 }block.01 }block1 "
            "{block {block.1 }block.1 {block.0 }block.0 }block {first }first }/"
        )


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA device: backward runs on device threads there",
)
def test_device_threads() -> None:
    """On CUDA, where backward and recomputation run on the engine's own threads, callbacks run as
    on the CPU."""
    for make in (
        Model,
        lambda: Checkpointed(reentrant=False),
        lambda: Checkpointed(reentrant=True),
    ):
        heard = [
            str(
                told(
                    functools.partial(train, make().to(device), batch().to(device).requires_grad_())
                )
            )
            for device in ("cpu", "cuda")
        ]
        assert heard[0] == heard[1]


def test_a_shared_module_has_a_backward_for_each_call() -> None:
    """A module that is called twice before one backward reports call 1, then call 0; its gradient
    is complete at the end of the last one."""
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"shared": shared})
    shapes: list[Any] = []

    def note(module: Any, _call: ModuleCall) -> None:
        shapes.append(None if module.weight.grad is None else module.weight.grad.clone())

    found = Log()
    with on_module(**found.callbacks("backward_enter")), on_module(backward_exit=note):
        (model["shared"](batch()) + model["shared"](batch(seed=1))).sum().backward()
    assert found.backward() == "{shared1 {shared"
    assert shapes[0] is None
    assert torch.equal(shapes[1], shared.weight.grad)


def test_a_graph_of_any_depth(warm: WarmPython) -> None:
    """A chain of 200,000 nodes is reported like any other, and is freed without a stack overflow,
    in a process of its own."""
    code = """
import torch, torchwhere
from torch import nn
told = []
model = nn.Linear(2, 2)
with torchwhere.on_module(backward_enter=lambda *_: told.append("in"), backward_exit=lambda *_: told.append("out")):
    x = model(torch.zeros(2))
    for _ in range(200_000):
        x = x + 1
    loss = x.sum()
    loss.backward()
    del x, loss
print(*told)
"""
    done = warm.run("-c", code)
    assert (done.returncode, done.stdout) == (0, "in out\n"), done.stderr


def test_a_parameter_that_is_used_outside_its_module_too() -> None:
    """A gradient that is completed outside any module does not delay the end of a module."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    found = Log()
    with on_module(**found.callbacks("backward_enter", "backward_exit")):
        early = batch() @ model[1].weight
        model(early).sum().backward()
    assert str(found) == "{/ {1 }1 {0 }0 }/"


def test_gradients_are_there_when_a_module_is_left() -> None:
    """At `backward_exit` the parameters of the module have their gradients; those of earlier
    modules do not."""
    model = Model()
    seen = []

    def left(module: Any, call: ModuleCall) -> None:
        seen.append(
            (
                call.name,
                all(p.grad is not None for p in module.parameters()),
                model.layers[0].up.weight.grad is None,
            )
        )

    with on_module(backward_exit=left):
        train(model)
    assert [name for name, has_gradients, _ in seen if not has_gradients] == []
    assert [name for name, _, is_early in seen if is_early] == [
        *("head", "layers.1.down", "layers.1.up", "layers.1", "layers.0.down"),
    ]


@dataclasses.dataclass
class Output:
    value: torch.Tensor


class Odd(nn.Module):
    """Takes and returns values that tensor hooks lose."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.kind = kind

    def forward(self, *, x: torch.Tensor) -> Any:
        y = self.inner(x.clone())
        if self.kind == "none":
            self.kept = y
            return None
        kinds = {
            "dict": lambda: {"y": [y]},
            "dataclass": lambda: Output(y),
            "view": lambda: y.view(-1),
            "inplace": lambda: y.relu_(),
            "no grad": lambda: (y.detach(), y),
            "input": lambda: x.add_(y),
        }
        return kinds[self.kind]()


def test_unusual_inputs_and_outputs() -> None:
    """Callbacks work with keyword-only tensors that need no gradient, and with dicts, dataclasses,
    None, views and in-place operations as output."""
    for kind in ("dict", "dataclass", "none", "view", "inplace", "no grad", "input"):
        model = nn.ModuleDict({"odd": Odd(kind)})

        def run(model: Any = model, kind: str = kind) -> None:
            out = model["odd"](x=batch() + 1)
            tensor = {
                "dict": lambda: out["y"][0],
                "dataclass": lambda: out.value,
                "none": lambda: model["odd"].kept,
                "no grad": lambda: out[1],
            }.get(kind, lambda: out)()
            tensor.sum().backward()

        assert (
            str(told(run)) == ">odd >odd.inner <odd.inner <odd {odd {odd.inner }odd.inner }odd"
        ), kind


def test_each_backward_is_reported() -> None:
    """`autograd.grad`, a retained graph, a backward of one part, a backward for some inputs: each
    reports the modules that it passes through."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = batch().requires_grad_()
    found = Log()
    with on_module(**found.callbacks("backward_enter", "backward_exit")):
        loss = model(x).sum()
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        whole = "{/ {1 }1 {0 }0 }/"
        assert str(found) == " ".join([whole] * 3)
        found.calls.clear()
        model(x).sum().backward(inputs=[model[1].weight])
        torch.autograd.grad(model(x).sum(), model[1].bias)
        assert str(found) == "{/1 {11 }11 }/1 {/2 {12 }12 }/2"
        found.calls.clear()
        model[0](x).sum().backward()
        middle = model[0](x)
        torch.autograd.grad(model[1](middle).sum(), middle)
        assert str(found) == "{03 }03 {13 }13"
        found.calls.clear()
        with torch.no_grad():
            model(x)
        torch.ones(1, requires_grad=True).backward()
        assert str(found) == ""


def test_double_backward() -> None:
    """The backward of a backward is reported with the modules whose nodes it differentiates."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    x = batch().requires_grad_()
    found = Log()
    with on_module(**found.callbacks()):
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert found.backward() == "{/ {1 }1 {0 }0 }/"
        found.calls.clear()
        grad.sum().backward()
    names = [call.name for key, _, call in found.calls if key == "backward_enter"]
    assert sorted(names) == ["", "0", "1"]
    found.check()


# -- when things go wrong --------------------------------------------------------------------------


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("as planned")


class BreaksInBackward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Breaks.apply(x)


def test_exceptions_of_the_job() -> None:
    """A forward or backward that raises leaves the modules that it entered; the next step is
    reported as usual."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def run() -> None:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 9))(batch())
        with pytest.raises(RuntimeError, match="as planned"):
            train(nn.Sequential(nn.Linear(8, 8), BreaksInBackward(), nn.Linear(8, 8)))
        train(model)

    found = str(told(run))
    first, second = "</ ", "}<Sequential>.1 }<Sequential> "
    assert found.startswith(f">/ >0 <0 >1 <1 {first}")
    assert f"{{<Sequential>.2 }}<Sequential>.2 {{<Sequential>.1 {second}" in found
    assert found.endswith(
        " {<Sequential#2> {<Sequential#2>.1 }<Sequential#2>.1 {<Sequential#2>.0 }<Sequential#2>.0"
        " }<Sequential#2>"
    )


def test_exceptions_of_a_callback() -> None:
    """An exception of a callback propagates into the job, like that of a hook; other callbacks
    still get the exits; the next step is clean."""
    for key in KEYS:
        model = nn.Sequential(nn.Linear(8, 8))
        found, errors = Log(), [KeyError("mine")]

        def raises(_module: Any, call: ModuleCall, errors: list[KeyError] = errors) -> None:
            if call.name == "0" and errors:
                raise errors.pop()

        with on_module(**found.callbacks()), on_module(**{key: raises}):
            with pytest.raises(KeyError, match="mine"):
                train(model)
            found.check()
            assert torchwhere.where().pass_ == "outside"
            found.calls.clear()
            train(model)
            assert str(found) == ">/1 >01 <01 </1 {/1 {01 }01 }/1", key


def test_an_error_of_ours_does_not_reach_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of torchwhere is logged once and does not affect the training; after a few errors,
    callbacks no longer run."""
    from torchwhere.hooks.listeners import Listeners

    def broken(*_args: Any) -> None:
        raise AttributeError("a bug")

    model = Model()
    found = Log()
    with on_module(**found.callbacks()), caplog.at_level(logging.WARNING):
        monkeypatch.setattr(Listeners, "_call", broken)
        train(model)
        monkeypatch.undo()
        train(model)
    assert model.head.weight.grad is not None
    assert found.calls == []
    (said,) = [record.getMessage() for record in caplog.records]
    assert (
        said
        == "torchwhere: the hook for module callbacks failed (AttributeError: a bug). The training"
        " is not affected; after 3 failures torchwhere removes this hook."
    )


def test_bad_input() -> None:
    """A registration without a callback, or with an object that is not callable, raises an
    error."""
    with pytest.raises(
        ValueError,
        match=r"^on_module\(\): nothing to call; give one or more of enter, exit, backward_enter, ",
    ):
        on_module()
    with pytest.raises(
        TypeError, match=r"^on_module\(backward_exit=\): expected a function, got str$"
    ):
        on_module(backward_exit="print")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        on_module(print)  # type: ignore[misc]
    assert watch.current() is None


# -- coming and going ------------------------------------------------------------------------------


def test_handle_block_and_decorator() -> None:
    """A handle works until it is removed, a `with` block until its end, a decorator while its
    function runs, also recursively."""
    model = nn.Linear(8, 8)
    found = Log()
    callbacks = found.callbacks("enter")
    handle = on_module(**callbacks)
    model(batch())
    handle.remove()
    handle.remove()
    model(batch())
    with handle as entered:
        assert entered is handle
        model(batch())
    assert len(found.calls) == 2

    @on_module(**callbacks)
    def run(depth: int) -> str:
        """Documented."""
        model(batch())
        if depth:
            run(depth - 1)
            model(batch())
        return "done"

    found.calls.clear()
    model(batch())
    assert run(1) == "done"
    model(batch())
    assert len(found.calls) == 3
    assert (run.__name__, run.__doc__) == ("run", "Documented.")
    assert watch.current() is None


def test_any_number_nested_in_order() -> None:
    """Enter callbacks run in the order of registration, exit callbacks in reverse order: the last
    registered is innermost."""
    order: list[str] = []
    handles = [
        on_module(
            **{
                key: lambda *_args, _text=f"{SIGNS[key]}{number}": order.append(_text)
                for key in KEYS
            },
        )
        for number in range(3)
    ]
    train(nn.Linear(8, 8))
    for handle in handles:
        handle.remove()
    assert order == [">0", ">1", ">2", "<2", "<1", "<0", "{0", "{1", "{2", "}2", "}1", "}0"]


def test_removed_and_added_inside_a_callback() -> None:
    """A callback that removes itself is not called again; an added callback gets only modules that
    are entered from then on."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    found, late = Log(), Log()
    handles: list[on_module] = []

    def once(module: Any, call: ModuleCall) -> None:
        found.calls.append(("enter", module, call))
        if call.name == "0":
            handles.pop().remove()
            handles.append(on_module(**late.callbacks()))

    handles.append(on_module(enter=once, exit=once))
    train(model)
    handles.pop().remove()
    assert str(found) == ">/ >0"
    assert str(late) == ">1 <1 {1 }1"
    assert watch.current() is None
    found.calls.clear()

    def only_one(module: Any, call: ModuleCall) -> None:
        found.calls.append(("backward_enter", module, call))
        handle.remove()

    with on_module(backward_enter=only_one, backward_exit=only_one) as handle:
        train(model)
    assert str(found) == "{/"


def test_callbacks_outlive_watches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Callbacks registered before, inside or between watches run all the time, and each watch
    records into its own folder."""
    model = nn.Linear(8, 8)
    found = Log()
    with caplog.at_level(logging.WARNING):
        handle = on_module(**found.callbacks("enter"))
        train(model)
        for name in ("a", "b"):
            with torchwhere.watch(model, out=tmp_path / name):
                train(model)
                with on_module(**found.callbacks("exit")):
                    train(model)
            train(model)
        torchwhere.stop()  # without a watch nothing is recorded
        train(model)
        handle.remove()
    assert len(found.calls) == 10
    assert [record.getMessage() for record in caplog.records] == []
    for name in ("a", "b"):
        assert [event.kind for event in torchwhere.read_run(tmp_path / name).events()][-1] == "end"
    assert watch.current() is None


def test_a_hundred_rounds_leave_nothing() -> None:
    """After many registrations and removals, the module, the callback and the graph are freed."""
    model = nn.Linear(8, 8)
    heard: list[int] = []
    with torchwhere.watch(model):
        for number in range(100):
            with on_module(
                enter=lambda *_, n=number: heard.append(n), backward_exit=lambda *_: None
            ):
                loss = model(batch()).sum()
                loss.backward()
                node = loss.grad_fn.next_functions[0][0]
        session = watch.current()
        assert session is not None
        assert (
            session.listeners._all,
            session.listeners.backwards,
            len(session.listeners._owners),
        ) == ((), {}, 0)
    assert heard == list(range(100))
    gone = weakref.ref(model)
    del model, loss, node, session
    gc.collect()
    assert gone() is None


def test_a_module_that_is_gone() -> None:
    """If only the graph of a deleted module is left, its backward is reported with None."""
    model = nn.Sequential(nn.Linear(8, 8))
    found = Log()
    with on_module(**found.callbacks("backward_enter")):
        loss = model(batch()).sum()
        del model
        gc.collect()
        loss.backward()
    assert [(module, call.name) for _, module, call in found.calls] == [(None, ""), (None, "0")]


def test_threads() -> None:
    """Callbacks run on the thread that runs the module; the calls of each thread nest properly."""
    heard: dict[str, Log] = {name: Log() for name in ("a", "b")}
    meet = threading.Barrier(2, timeout=20)

    def callback(key: str) -> Callable[[Any, ModuleCall], None]:
        return lambda module, call: heard[threading.current_thread().name].calls.append(
            (key, module, call)
        )

    def run(model: nn.Module) -> None:
        for _ in range(10):
            meet.wait()
            train(model)

    models = {name: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for name in heard}
    with on_module(**{key: callback(key) for key in KEYS}):
        threads = [
            threading.Thread(target=run, args=(model,), name=name) for name, model in models.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for name, found in heard.items():
        found.check()
        assert len(found.calls) == 10 * 12
        assert {module for _, module, _ in found.calls} == set(models[name].modules())


def test_a_backward_on_another_thread() -> None:
    """A backward on another thread than the forward passes through the modules of the forward, and
    is reported on its own thread."""
    model, found, threads = nn.Sequential(nn.Linear(8, 8)), Log(), set()

    def backward() -> None:
        loss.backward()

    with (
        on_module(**found.callbacks()),
        on_module(backward_enter=lambda *_: threads.add(threading.current_thread().name)),
    ):
        loss = model(batch()).sum()
        thread = threading.Thread(target=backward, name="other")
        thread.start()
        thread.join()
    assert str(found) == ">/ >0 <0 </ {/ {0 }0 }/"
    assert threads == {"other"}


def test_callbacks_do_not_run_in_a_forked_child() -> None:
    """A forked child runs no callback, and can register its own."""
    import os

    found = Log()
    with on_module(**found.callbacks("enter")) as handle:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                nn.Linear(8, 8)(batch())
                before = len(found.calls)
                with on_module(**found.callbacks("enter")):
                    nn.Linear(8, 8)(batch())
                handle.remove()
                os.write(write, f"{before} {len(found.calls)}".encode())
            finally:
                os._exit(0)
        os.close(
            write
        )  # a child that fails writes nothing: the parent reads an empty answer and does not wait forever
        os.waitpid(pid, 0)
        assert os.read(read, 100) == b"0 1"
        os.close(read)
        nn.Linear(8, 8)(batch())
    assert len(found.calls) == 1


# -- that nothing is disturbed ---------------------------------------------------------------------


def test_hooks_are_there_for_one_backward() -> None:
    """No hook stays on a retained graph or on a parameter after the callbacks are removed or the
    backward is over."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    found = Log()
    with on_module(**found.callbacks()):
        loss = model(batch()).sum()
        loss.backward(retain_graph=True)
        assert found.backward() == "{/ {1 }1 {0 }0 }/"
    found.calls.clear()
    loss.backward(retain_graph=True)
    with on_module(**found.callbacks("backward_enter")):
        loss.backward()  # calls that were made without any callback
    assert found.calls == []


def test_compiled_as_ever() -> None:
    """Callbacks add no frame, graph break or recompile; the compiled model and its backward are
    reported, and nothing inside it."""
    from torch._dynamo.utils import counters

    def run() -> tuple[dict[str, Any], torch.Tensor]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = Model()
        compiled = torch.compile(model, backend="aot_eager")
        for seed in range(2):
            compiled(batch(seed=seed)).sum().backward()
        if handles:
            handles.pop().remove()
            handles.append(on_module(**found.callbacks("enter")))
        compiled(batch()).sum().backward()
        return {
            key: dict(counters[key]) for key in ("stats", "frames", "graph_break", "recompiles")
        }, model.head.weight.grad

    handles: list[on_module] = []
    found = Log()
    run()
    plain, expected = run()
    handles.append(on_module(**found.callbacks()))
    heard, grad = run()
    handles.pop().remove()
    torch._dynamo.reset()
    assert heard == plain
    assert torch.equal(grad, expected)
    # the last in its own session, which counts from zero
    assert str(found) == ">/ </ {/ }/ >/1 </1 {/1 }/1 >/"
    assert {type(module) for _, module, _ in found.calls} == {Model}


def _digest(kind: str, *, heard: bool) -> tuple[str, int]:
    """Train for some steps. Returns a digest of every loss, gradient, parameter and the random
    state, and how often callbacks ran."""
    torch.manual_seed(7)
    model = KINDS[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    digest = hashlib.sha256()
    found = Log()
    handle = on_module(**found.callbacks()) if heard else None
    for step in range(3):
        loss = model(batch(seed=step)).float().pow(2).mean()
        loss.backward()
        for tensor in (loss, *_tensors(model)):
            digest.update(tensor.detach().float().numpy().tobytes())
        optimizer.step()
        optimizer.zero_grad()
    digest.update(torch.get_rng_state().numpy().tobytes())
    if handle is not None:
        handle.remove()
        found.check()
    return digest.hexdigest(), len(found.calls)


def _identical(kind: str) -> tuple[bool, int]:
    plain, _ = _digest(kind, heard=False)
    heard, calls = _digest(kind, heard=True)
    return plain == heard, calls


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp", "checkpoint"])
def test_training_is_bit_identical(two_ranks: Pool, kind: str) -> None:
    """With all callbacks the results are bit-identical on every rank, and every module call is
    reported, in forward and backward."""
    # two layers of three modules each are entered and left once more
    recomputed = 2 * 2 * 3 if kind == "checkpoint" else 0
    for same, calls in two_ranks.run(_identical, kind):
        assert same
        assert calls == 3 * (4 * 8 + recomputed)  # steps, callbacks, modules
