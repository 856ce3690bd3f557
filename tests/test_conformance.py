"""The attribution cases: each is a small program with one right answer. One process; cases with
ranks are in the other file."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchwhere
from models import Model, batch
from torchwhere.core.place import Place


class Probe(nn.Module):
    """Notes where it is, in forward and in backward."""

    def __init__(self, seen: list[Place], *, scale: float = 2.0) -> None:
        super().__init__()
        self.seen = seen
        self.weight = nn.Parameter(torch.tensor(scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(torchwhere.where())
        return _Noting.apply(x * self.weight, self.seen)


class _Noting(torch.autograd.Function):
    """An operation whose backward notes where it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[Place]) -> torch.Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen.append(torchwhere.where())
        return grad.clone(), None


def told(places: list[Place]) -> list[tuple[str, str | None, int | None]]:
    return [(place.pass_, place.module, place.call) for place in places]


def test_c1_one_module_called_twice(tmp_path: Path) -> None:
    """Two calls of one module are call 0 and call 1, again in each step, and nothing stays on the
    module."""
    seen: list[Place] = []
    model = nn.Sequential(Probe(seen))
    model.append(model[0])
    attributes = set(vars(model[0]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torchwhere.watch(model, out=tmp_path):
        for _ in range(2):
            model(batch()).sum().backward()
            optimizer.step()
    one_step = [
        ("forward", "0", 0),
        ("forward", "0", 1),
        ("backward", "0", 1),
        ("backward", "0", 0),
    ]
    assert told(seen) == one_step * 2
    assert [place.step for place in seen] == [0] * 4 + [1] * 4
    assert set(vars(model[0])) == attributes
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks
    assert not model[0]._backward_hooks


class _Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.breaks = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.breaks:
            raise RuntimeError("as planned")
        return x


def test_c2_forward_raises_and_is_called_again() -> None:
    """After a caught exception the stack is back at the root, and the next call is right."""
    seen: list[Place] = []
    model = nn.Sequential(_Fragile(), Probe(seen))
    with torchwhere.watch(model):
        with pytest.raises(RuntimeError, match="as planned"):
            model(batch())
        outside = torchwhere.where()
        model[0].breaks = False
        model(batch())
    assert (outside.pass_, outside.module) == ("outside", None)
    assert told(seen) == [("forward", "1", 0)]


class _Checkpointed(nn.Module):
    def __init__(self, seen: list[Place], *, reentrant: bool) -> None:
        super().__init__()
        self.before, self.block, self.after = Probe(seen), Probe(seen), Probe(seen)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.after(x)


@pytest.mark.parametrize("calls", [1, 2])
def test_c6_reentrant_checkpoint(calls: int) -> None:
    """A recomputed block has the block's place and the number of the call that it repeats, and so
    has its backward."""
    seen: list[Place] = []
    model = _Checkpointed(seen, reentrant=True)
    with torchwhere.watch(model):
        sum(model(batch()).sum() for _ in range(calls)).backward()
    forward = [
        ("forward", name, call) for call in range(calls) for name in ("before", "block", "after")
    ]
    assert told(seen[: len(forward)]) == forward
    backward = [
        place
        for call in reversed(range(calls))
        for place in (
            ("backward", "after", call),
            ("recompute", "block", call),
            ("backward", "block", call),
            ("backward", "before", call),
        )
    ]
    assert sorted(told(seen[len(forward) :])) == sorted(backward)


@pytest.mark.parametrize("calls", [1, 2])
def test_c7_non_reentrant_checkpoint(calls: int) -> None:
    """Recomputation is a separate pass, only in the recomputed module."""
    seen: list[Place] = []
    model = _Checkpointed(seen, reentrant=False)
    with torchwhere.watch(model):
        sum(model(batch()).sum() for _ in range(calls)).backward()
    after_forward = told(seen[3 * calls :])
    assert [place for place in after_forward if place[0] == "recompute"] == [
        ("recompute", "block", call) for call in reversed(range(calls))
    ]
    assert [place[1:] for place in after_forward if place[0] == "backward"] == [
        (name, call) for call in reversed(range(calls)) for name in ("after", "block", "before")
    ]


class _CheckpointedTwice(nn.Module):
    def __init__(self, seen: list[Place], *, reentrant: bool) -> None:
        super().__init__()
        self.block = Probe(seen)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x * 1, use_reentrant=self.reentrant)


@pytest.mark.parametrize("outer", [True, False], ids=["in reentrant", "in non-reentrant"])
@pytest.mark.parametrize("inner", [True, False], ids=["reentrant", "non-reentrant"])
def test_c6_and_c7_checkpoint_inside_a_checkpoint(outer: bool, inner: bool) -> None:
    """However often a block is recomputed, also before any module was called, its call number is
    that of the forward that it repeats."""
    seen: list[Place] = []
    model = _CheckpointedTwice(seen, reentrant=inner)
    with torchwhere.watch(model):
        outputs = [
            checkpoint(model, batch(seed=seed).requires_grad_(), use_reentrant=outer)
            for seed in range(3)
        ]
        for output in outputs:
            output.sum().backward()
    recomputed = (
        1 if not outer and not inner else 2
    )  # non-reentrant checkpoints share what they recompute
    fast_path = ["forward", "backward"] + ["recompute"] * recomputed
    assert sorted(told(seen)) == sorted(
        (each, "block", call) for each in fast_path for call in range(3)
    )
    assert [place.call for place in seen] == [0, 1, 2] + [
        call for call in range(3) for _ in fast_path[1:]
    ]
    assert {place.certainty for place in seen} == {"exact"}


class _KeywordOnly(nn.Module):
    def __init__(self, seen: list[Place]) -> None:
        super().__init__()
        self.first, self.second = Probe(seen), _Named(seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x=self.first(x))


class _Named(nn.Module):
    def __init__(self, seen: list[Place]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        return _Noting.apply(x * 3, self.seen)


def test_c8_keyword_only_tensors() -> None:
    """A module called with keyword-only tensors has its own backward; the layer before it has the
    other."""
    seen: list[Place] = []
    model = _KeywordOnly(seen)
    with torchwhere.watch(model):
        model(batch()).sum().backward()
    assert told(seen) == [
        ("forward", "first", 0),
        ("backward", "second", 0),
        ("backward", "first", 0),
    ]


def test_c9_one_module_used_twice_before_one_backward() -> None:
    """The backward passes call 1, then call 0."""
    seen: list[Place] = []
    probe = Probe(seen)
    model = nn.ModuleDict({"shared": probe})
    with torchwhere.watch(model):
        (probe(batch()) + probe(batch())).sum().backward()
    assert told(seen)[2:] == [("backward", "shared", 1), ("backward", "shared", 0)]


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, broken: list[bool]) -> torch.Tensor:
        ctx.broken = broken
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.broken:
            raise RuntimeError("backward as planned")
        return grad, None


class _BreaksInBackward(nn.Module):
    def __init__(self, broken: list[bool]) -> None:
        super().__init__()
        self.broken = broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Breaks.apply(x, self.broken)


def test_c10_backward_raises_once() -> None:
    """After a backward that raised, later steps have no stale place."""
    seen: list[Place] = []
    broken = [True]
    model = nn.Sequential(Probe(seen), _BreaksInBackward(broken), Probe(seen))
    with torchwhere.watch(model):
        with pytest.raises(RuntimeError, match="backward as planned"):
            model(batch()).sum().backward()
        outside = torchwhere.where()
        broken.clear()
        seen.clear()
        model(batch()).sum().backward()
    assert (outside.pass_, outside.module) == ("outside", None)
    assert told(seen) == [
        ("forward", "0", 1),
        ("forward", "2", 1),
        ("backward", "2", 1),
        ("backward", "0", 1),
    ]


def test_c11_submodule_called_before_its_root() -> None:
    """Without an explicit model, a submodule that is called first has its name in its model."""
    seen: list[Place] = []
    model = nn.ModuleDict({"layers": nn.ModuleList([Probe(seen)])})
    with torchwhere.watch():
        model["layers"][0](batch())
        nn.functional.relu(batch())
    assert told(seen) == [("forward", "layers.0", 0)]


def test_c11_names_without_a_model_are_those_of_the_users_model() -> None:
    """Without an explicit model, the first outermost call gives the root; a separate loss module
    does not take its names."""
    seen: list[Place] = []
    model = nn.Sequential(nn.Linear(8, 8), Probe(seen))
    loss = nn.Sequential(nn.Identity(), nn.MSELoss())
    with torchwhere.watch():
        nn.MSELoss()(batch(), batch())
        loss[1](model(batch()), batch())
        root = []
        model.register_forward_hook(lambda *_: root.append(torchwhere.where()))
        model(batch())
    assert told(seen)[0] == ("forward", "1", 0)
    assert (root[0].module, str(root[0]).count("<root>")) == ("", 1)


def test_c11_a_part_is_called_before_the_model_is_put_together() -> None:
    """A parametrization runs when it is registered, by itself: the model is still the root, with
    its own names."""
    seen: list[Place] = []
    model = nn.Sequential(nn.Linear(8, 8), Probe(seen))
    with torchwhere.watch():
        nn.utils.parametrizations.weight_norm(model[0])
        weight = model[0].parametrizations.weight.original1
        weight.register_post_accumulate_grad_hook(lambda _: seen.append(torchwhere.where()))
        model(batch()).sum().backward()
    assert told(seen)[0] == ("forward", "1", 0)
    assert seen[-1].param == "0.parametrizations.weight.original1"


def test_c11_a_wrapper_that_comes_later_changes_no_names() -> None:
    """After training has begun, a new module around the model (for evaluation, say) is foreign: no
    name changes."""
    seen: list[Place] = []
    model = nn.Sequential(Probe(seen))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torchwhere.watch():
        model(batch()).sum().backward()
        optimizer.step()
        nn.Sequential(model)(batch())
        model(batch())
    assert [place.module for place in seen if place.pass_ == "forward"] == ["0", "0", "0"]


def test_c11_the_next_model_has_its_own_names_too() -> None:
    """After the first model is deleted, the next one is the root; a model beside a root is not."""
    seen: list[Place] = []
    with torchwhere.watch():
        for _ in range(2):
            model = nn.Sequential(Probe(seen))
            model(batch())
            del model
        model, beside = nn.Sequential(Probe(seen)), nn.Sequential(Probe(seen))
        model(batch())
        beside(batch())
    assert [place.module for place in seen] == ["0", "0", "0", "<Sequential>.0"]


def test_c11_tied_modules_and_wrappers() -> None:
    """Wrapper prefixes are removed, from compile and checkpoint wrappers too; every alias of a tied
    module is known."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from torchwhere.model.module_names import NameTable

    model = Model()
    model.tied = model.head
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    table = NameTable()
    table.add_root(torch.compile(model, backend="eager"))
    assert table.module_names(model.head) == ["head", "tied"]
    assert table.param_names(model.head.weight) == ["head.weight", "tied.weight"]
    inner = model.layers[0]._checkpoint_wrapped_module
    assert table.module_names(inner) == table.module_names(model.layers[0]) == ["layers.0"]
    assert table.module_names(inner.up) == ["layers.0.up"]
    assert table.module_names(model) == [""]


@dataclasses.dataclass
class _Output:
    value: torch.Tensor
    extra: None = None


class _Shapes(nn.Module):
    """Returns values that hook-based tools lose."""

    def __init__(self, seen: list[Place], kind: str) -> None:
        super().__init__()
        self.probe = Probe(seen)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        y = self.probe(x)
        if self.kind == "dict":
            return {"y": y}
        if self.kind == "dataclass":
            return _Output(y)
        if self.kind == "none":
            self.kept = y
            return None
        if self.kind == "view":
            return y.view(-1)
        if self.kind == "inplace":
            return y.add_(1)
        return y.detach(), y


@pytest.mark.parametrize("kind", ["dict", "dataclass", "none", "view", "inplace", "no grad"])
def test_c12_unusual_outputs(kind: str) -> None:
    """The backward of a module is found for every kind of output."""
    seen: list[Place] = []
    model = nn.ModuleDict({"odd": _Shapes(seen, kind)})
    with torchwhere.watch(model):
        out = model["odd"](batch())
        tensor = {
            "dict": lambda: out["y"],
            "dataclass": lambda: out.value,
            "none": lambda: model["odd"].kept,
            "no grad": lambda: out[1],
        }.get(kind, lambda: out)()
        tensor.sum().backward()
    assert told(seen) == [("forward", "odd.probe", 0), ("backward", "odd.probe", 0)]


def test_c13_autograd_grad_and_two_backwards() -> None:
    """autograd.grad, and a second backward over a retained graph, give the module of each node."""
    seen: list[Place] = []
    model = nn.Sequential(Probe(seen), Probe(seen))
    with torchwhere.watch(model):
        loss = model(batch()).sum()
        del seen[:]
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    assert told(seen) == [("backward", "1", 0), ("backward", "0", 0)] * 3


class _Cubing(torch.autograd.Function):
    """x cubed, with a backward that can itself be differentiated and notes where it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[Place]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.seen = seen
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return _Noting.apply(3 * x**2 * grad, ctx.seen), None


class _Cube(nn.Module):
    def __init__(self, seen: list[Place]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Cubing.apply(x, self.seen)


def test_c13_double_backward() -> None:
    """A node that a backward created (create_graph) belongs to the module whose backward created
    it; no hook stays."""
    seen: list[Place] = []
    model = nn.Sequential(_Cube(seen), nn.Identity(), _Cube(seen))
    x = batch().requires_grad_()
    with torchwhere.watch(model):
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        grad.sum().backward()
    assert {(place.pass_, place.module) for place in seen} == {("backward", "0"), ("backward", "2")}
    assert [place.module for place in seen].count("2") == 1


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA device: backward runs on device threads there",
)
def test_c14_backward_on_device_threads() -> None:
    """On CUDA, where backward and recomputation run on the engine's own threads, the places are
    those of the CPU."""
    answers = {}
    for device in ("cpu", "cuda"):
        for reentrant in (False, True):
            seen: list[Place] = []
            model = _Checkpointed(seen, reentrant=reentrant).to(device)
            with torchwhere.watch(model):
                for _ in range(2):
                    model(batch().to(device).requires_grad_()).sum().backward()
            answers[device, reentrant] = told(seen)
    assert answers["cuda", False] == answers["cpu", False]
    assert answers["cuda", True] == answers["cpu", True]


def test_c17_post_accumulate_grad_hooks() -> None:
    """In a hook that runs when a gradient is accumulated, the place names the parameter."""
    model = Model()
    seen: list[Place] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: seen.append(torchwhere.where()))
    with torchwhere.watch(model):
        model(batch()).sum().backward()
    assert {place.param for place in seen} == {name for name, _ in model.named_parameters()}
    assert all(
        place.pass_ == "backward" and f"{place.module}." in f"{place.param}" for place in seen
    )


def test_c17_optimizer_in_backward(tmp_path: Path) -> None:
    """With an optimizer per parameter that steps in backward, the pass is optimizer, the place
    names the parameter, and each backward is one step."""
    model = Model()
    seen: list[Place] = []
    optimizers = {param: torch.optim.SGD([param], 0.1) for param in model.parameters()}
    for optimizer in optimizers.values():
        optimizer.register_step_post_hook(lambda *_: seen.append(torchwhere.where()))

    def step(param: torch.Tensor) -> None:
        optimizers[param].step()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    with torchwhere.watch(model, out=tmp_path):
        for _ in range(3):
            model(batch()).sum().backward()
        assert torchwhere.where().step == 3
    assert {place.param for place in seen} == {name for name, _ in model.named_parameters()}
    assert [place.step for place in seen] == [0] * 10 + [1] * 10 + [2] * 10
    assert all(place.pass_ == "optimizer" for place in seen)


def test_c19_several_forwards_then_their_backwards() -> None:
    """Each backward has the call number of its forward, in any order."""
    seen: list[Place] = []
    model = nn.Sequential(Probe(seen))
    with torchwhere.watch(model):
        losses = [model(batch()).sum() for _ in range(4)]
        del seen[:]
        for index in (0, 1, 3, 2):
            losses[index].backward()
    assert told(seen) == [("backward", "0", call) for call in (0, 1, 3, 2)]


def test_c20_another_thread_has_its_own_place() -> None:
    """While the main thread is in a module, another thread has its own place."""
    places: list[Place] = []

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            helper = threading.Thread(
                target=lambda: places.append(torchwhere.where()), name="helper"
            )
            helper.start()
            helper.join()
            places.append(torchwhere.where())
            return x

    with torchwhere.watch(model := nn.Sequential(Waits())):
        model(batch())
    assert told(places) == [("outside", None, None), ("forward", "0", 0)]
    assert [place.thread for place in places] == ["helper", "MainThread"]


def test_c22_exception_in_forward() -> None:
    """A user's exception propagates unchanged, with one note: rank, step, pass, module and the last
    collectives."""
    model = nn.Sequential(nn.Identity(), _Fragile())
    error = RuntimeError("mine")
    model[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error))
    with torchwhere.watch(model), pytest.raises(RuntimeError) as caught:
        model(batch())
    assert caught.value is error
    (note,) = error.__notes__
    assert note.startswith("torchwhere: rank 0, step 0, forward of 1, ")
    assert "test_conformance.py:" in note
    assert note.endswith("no collective so far")


def _hook_that_raises(grad: torch.Tensor) -> None:
    raise RuntimeError("in a hook")


@pytest.mark.parametrize(
    "where", ["function", "tensor hook", "parameter hook", "module hook", "operation"]
)
def test_c22_exception_in_backward(where: str) -> None:
    """An exception in backward gets the same note, whether a user function, a hook or an operation
    of torch raises it."""
    model = Model()
    if where == "function":
        model.layers[1] = nn.Sequential(model.layers[1], _BreaksInBackward([True]))
    if where == "tensor hook":
        model.layers[1].up.register_forward_hook(
            lambda m, i, out: out.register_hook(_hook_that_raises) and None
        )
    if where == "parameter hook":
        model.layers[1].up.weight.register_post_accumulate_grad_hook(_hook_that_raises)
    if where == "module hook":
        model.layers[1].up.register_full_backward_hook(lambda *_: _hook_that_raises(torch.empty(0)))
    if where == "operation":
        model.layers[1].register_forward_pre_hook(lambda m, args: _spoiled(args[0]))
    with torchwhere.watch(model), pytest.raises(RuntimeError) as caught:
        model(batch()).sum().backward()
    (note,) = caught.value.__notes__
    expected = {
        "function": "layers.1.1",
        "parameter hook": "layers.1.up.weight",
        "operation": "layers.1",
    }
    assert note.startswith(
        f"torchwhere: rank 0, step 0, backward of {expected.get(where, 'layers.1.up')}"
    ), note
    assert "test_conformance.py:" in note


def _spoiled(x: torch.Tensor) -> tuple[torch.Tensor]:
    """A tensor whose backward raises in torch: a saved value was changed in place."""
    y = x.exp()
    z = y * 1
    y.add_(1)
    return (z + y.detach(),)
