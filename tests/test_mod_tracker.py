"""The drop-in for ModTracker and ModuleTracker: the same as the originals, and right answers where
they are wrong."""

from __future__ import annotations

import collections
import dataclasses
import gc
import io
import itertools
import os
import re
import threading
import warnings
import weakref
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed._tools.mod_tracker import ModTracker as OriginalModTracker
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.module_tracker import ModuleTracker as OriginalModuleTracker

import torchwhere
from models import Model, batch
from rank_pool import Pool
from torchwhere.drop_in.mod_tracker import ModTracker, ModuleTracker

Seen = list[tuple[set[str], bool]]


class Noting(torch.autograd.Function):
    """An operation whose backward records what the tracker says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, note: Any) -> torch.Tensor:
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.note()
        return grad.clone(), None


class Probe(nn.Module):
    """A module that records what the tracker says, in forward and in backward."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.note = note

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note()
        return Noting.apply(x * self.weight, self.note)


class Notes:
    """Records the parents of a tracker, without "Global", whenever it is called."""

    def __init__(self, kind: type = ModTracker) -> None:
        self.tracker = kind()
        self.seen: list[tuple[str, ...]] = []

    def __call__(self) -> None:
        assert "Global" in self.tracker.parents
        self.seen.append(tuple(sorted(self.tracker.parents - {"Global"})))


# -- what the tests of the originals hold ----------------------------------------------------------


class InDicts(nn.Module):
    """A module that takes and returns a dict, and works in place."""

    def __init__(self, forward: Seen, backward: Seen, tracker: Any) -> None:
        super().__init__()
        self.told = forward, backward
        self.tracker = tracker

    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        y = x["a"].relu_()
        self.told[0].append((set(self.tracker.parents), self.tracker.is_bw))
        y.register_hook(
            lambda grad: self.told[1].append((set(self.tracker.parents), self.tracker.is_bw))
        )
        return {"a": torch.mm(y, y)}


class Mod(nn.Module):
    def __init__(self, *told: Any) -> None:
        super().__init__()
        self.a = InDicts(*told)
        self.b = nn.ModuleDict({"nest": InDicts(*told)})
        self.c = nn.ModuleList([InDicts(*told)])

    def forward(self, x: Any) -> Any:
        return self.b["nest"](self.a(self.c[0](x)))


def test_module_hierarchy() -> None:
    """With nested containers, dicts and in-place operations, each operation has its modules as
    parents, in forward and in backward."""
    for kind in (ModTracker, ModuleTracker, OriginalModTracker, OriginalModuleTracker):
        tracker = kind()
        forward: Seen = []
        backward: Seen = []
        model = Mod(forward, backward, tracker)
        with tracker:
            for _ in range(2):
                model({"a": torch.randn(10, 10, requires_grad=True).clone()})["a"].sum().backward()
        names = ["Mod.c.0", "Mod.a", "Mod.b.nest"]
        assert forward == [({"Global", "Mod", name}, False) for name in names] * 2, kind
        assert backward == [({"Global", "Mod", name}, True) for name in reversed(names)] * 2, kind


def test_backward_detection() -> None:
    """After a backward, `is_bw` is false and no module is left in `parents`; also before, inside
    and after the tracker."""
    for tracker in (ModTracker(), ModuleTracker()):
        assert (tracker.parents, tracker.is_bw) == ({"Global"}, False)
        with tracker as entered:
            assert entered is tracker
            nn.Linear(2, 2)(torch.rand(2, requires_grad=True)).sum().backward()
            assert (tracker.parents, tracker.is_bw) == ({"Global"}, False)
        assert (tracker.parents, tracker.is_bw) == ({"Global"}, False)


class Recursive(nn.Module):
    def __init__(self, note: Any) -> None:
        super().__init__()
        self.inner = Probe(note)
        self.ran = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran = not self.ran
        return self(x) if self.ran else self.inner(x)


def test_a_module_that_calls_itself() -> None:
    """A module that calls itself, also recomputed, has itself and its submodule as parents, and
    nothing raises."""
    for kind, reentrant in itertools.product((ModTracker, ModuleTracker), (None, False, True)):
        notes = Notes(kind)
        model, x = Recursive(notes), torch.rand(1, 2, requires_grad=True)
        with notes.tracker:
            out = (
                model(x)
                if reentrant is None
                else checkpoint(lambda x, model=model: model(x), x, use_reentrant=reentrant)
            )
            out.sum().backward()
        assert set(notes.seen) == {("Recursive", "Recursive.inner")}, (kind, reentrant)


class Bar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.foo = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.foo(x).relu_()


def hooked(tracker: Any) -> list[tuple[str, str | None, bool, bool]]:
    """Register all four user hooks, and return what they get: hook, name, whether it is in parents,
    whether in backward."""
    told: list[tuple[str, str | None, bool, bool]] = []

    def hook(name: str) -> Any:
        def called(module: nn.Module | None, *_args: Any) -> None:
            fqn = tracker.get_known_fqn(module) if module is not None else None
            told.append((name, fqn, fqn in tracker.parents, tracker.is_bw))

        return called

    tracker.register_user_hooks(hook("pre_fw"), hook("post_fw"), hook("pre_bw"), hook("post_bw"))
    return told


FORWARD_OF_BAR = [
    ("pre_fw", "Bar", True, False),
    ("pre_fw", "Bar.foo", True, False),
    ("post_fw", "Bar.foo", True, False),
    ("post_fw", "Bar", True, False),
]


def test_user_hooks() -> None:
    """The four hooks run in order, with the name of the module among the parents; a deleted module
    is None."""
    for kind in (ModTracker, OriginalModTracker):
        tracker = kind()
        told = hooked(tracker)
        model = Bar()
        with tracker:
            model(torch.rand(10, 10, requires_grad=True)).sum().backward()
        order = [
            ("pre_bw", "Bar"),
            ("pre_bw", "Bar.foo"),
            ("post_bw", "Bar"),
            ("post_bw", "Bar.foo"),
        ]
        assert told == FORWARD_OF_BAR + [(hook, name, True, True) for hook, name in order]
        told.clear()
        with tracker:
            loss = model(torch.rand(10, 10, requires_grad=True)).sum()
            del model
            gc.collect()
            loss.backward()
        assert told == FORWARD_OF_BAR + [(hook, None, False, True) for hook, _ in order]


def test_a_second_hook_is_refused() -> None:
    """A second hook of a kind is refused until the hooks are cleared, with the text of the
    original."""
    for kind in (ModTracker, OriginalModTracker):
        tracker = kind()
        tracker.register_user_hooks(None, lambda *_: None)
        with pytest.raises(AssertionError) as caught:
            tracker.register_user_hooks(None, lambda *_: None)
        assert (
            str(caught.value)
            == "Only one post_fw_hook can be registered at a time Clear the existing hook by"
            " calling ``clear_user_hooks`` before registering a new one"
        )
        tracker.clear_user_hooks()
        tracker.register_user_hooks(None, lambda *_: None)


class Foo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.linears[0](x))
        return torch.relu(checkpoint(self.linears[1], x, use_reentrant=False))


def test_activation_checkpointing() -> None:
    """The hooks of a recomputed forward run in backward; a call whose inputs need no gradient ends
    with the backward."""
    for kind in (ModTracker, OriginalModTracker):
        tracker = kind()
        told = hooked(tracker)
        model = Foo()
        with tracker:
            model(torch.randn(2, 8)).sum().backward()
        assert told == [
            ("pre_fw", "Foo", True, False),
            ("pre_fw", "Foo.linears.0", True, False),
            ("post_fw", "Foo.linears.0", True, False),
            ("pre_fw", "Foo.linears.1", True, False),
            ("post_fw", "Foo.linears.1", True, False),
            ("post_fw", "Foo", True, False),
            ("pre_bw", "Foo", True, True),
            ("pre_bw", "Foo.linears.1", True, True),
            ("pre_fw", "Foo.linears.1", True, True),
            ("post_fw", "Foo.linears.1", True, True),
            ("post_bw", "Foo.linears.1", True, True),
            ("pre_bw", "Foo.linears.0", True, True),
            ("post_bw", "Foo.linears.0", True, True),
            ("post_bw", "Foo", True, True),
        ]


def test_what_user_hooks_are_given() -> None:
    """The hooks get the arguments that the original gives: positional inputs, the output, a
    gradient, a list of gradients, nothing."""
    for kind in (ModTracker, OriginalModTracker):
        given: dict[str, list[Any]] = collections.defaultdict(list)
        tracker = kind()
        names = ("pre_fw", "post_fw", "pre_bw", "post_bw")
        tracker.register_user_hooks(
            *((lambda *args, _told=given[name]: _told.append(args)) for name in names)
        )
        model, x, y = (
            nn.Bilinear(2, 2, 1),
            torch.ones(3, 2, requires_grad=True),
            torch.ones(3, 2, requires_grad=True),
        )
        with tracker:
            out = model(x, y)
            out.sum().backward()
            model(x.detach(), y.detach()).sum().backward()
        assert [args[0] for hook in names for args in given[hook]] == [model] * 8
        assert given["pre_fw"][0][1] == (x, y)
        assert given["post_fw"][0][1:] == ((x, y), out)
        ((grad,),) = given["pre_bw"][0][1:]
        assert torch.equal(grad, torch.ones(3, 1))
        ((gradients,),) = given["post_bw"][0][1:]
        assert (type(gradients), [g.shape for g in gradients]) == (list, [x.shape, y.shape])
        assert given["post_bw"][1][1:] == ((),)


# -- hooks that a compiled graph calls -------------------------------------------------------------


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(4, 8)
        self.act = nn.ReLU()
        self.linear2 = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.act(self.linear1(x)))


@pytest.fixture
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("compiled", [False, True])
def test_compile_safe_hooks(compiled: bool, fresh_dynamo: None) -> None:
    """All four hooks run for every module but the root, in a full compiled graph as in eager code,
    with the same gradients; none is left."""
    model, x, told = Tiny(), torch.randn(3, 4, requires_grad=True), []
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    hooks = {
        f"{name}_hook": lambda fqn, *tensors, _name=name: told.append(
            (_name, fqn, [[t.shape for t in ts] for ts in tensors])
        )
        for name in ("pre_fw", "post_fw", "pre_bw", "post_bw")
    }
    with ModTracker.compile_safe_hooks(model, **hooks):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        run(x).sum().backward()
    order = ["linear1", "act", "linear2"]
    assert [each[:2] for each in told] == [
        (hook, name) for name in order for hook in ("pre_fw", "post_fw")
    ] + [(hook, name) for name in reversed(order) for hook in ("pre_bw", "post_bw")]
    assert told[1] == ("post_fw", "linear1", [[(3, 4)], [(3, 8)]])
    assert told[6] == ("pre_bw", "linear2", [[(3, 2)]])
    assert torch.equal(x.grad, expected)
    told.clear()
    model(x).sum().backward()
    assert (told, [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]) == (
        [],
        [],
    )


def test_compile_safe_filter(fresh_dynamo: None) -> None:
    """Only modules that the filter accepts have hooks; each hook works alone."""
    told: list[str] = []
    model = Tiny()
    with ModTracker.compile_safe_hooks(
        model,
        post_fw_hook=lambda fqn, inputs, outputs: told.append(fqn),
        module_filter=lambda fqn, module: isinstance(module, nn.Linear),
    ):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(3, 4))
    assert told == ["linear1", "linear2"]


# -- the attribution cases -------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, note: Any, *, reentrant: bool) -> None:
        super().__init__()
        self.before, self.block, self.after = (
            Probe(note),
            nn.Sequential(Probe(note), Probe(note)),
            Probe(note),
        )
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(checkpoint(self.block, self.before(x), use_reentrant=self.reentrant))


def in_block(index: int) -> tuple[str, ...]:
    return ("Checkpointed", "Checkpointed.block", f"Checkpointed.block.{index}")


def test_c6_c7_checkpoint() -> None:
    """A recomputed block and its backward have the block and the modules around it as parents, and
    no sibling."""
    for kind, reentrant in itertools.product((ModTracker, ModuleTracker), (True, False)):
        notes = Notes(kind)
        model = Checkpointed(notes, reentrant=reentrant)
        with notes.tracker:
            model(batch()).sum().backward()
        before, after = (("Checkpointed", f"Checkpointed.{name}") for name in ("before", "after"))
        assert notes.seen[:4] == [before, in_block(0), in_block(1), after]
        if reentrant:  # the whole block is recomputed first, then its backward runs
            assert notes.seen[4:] == [
                after,
                in_block(0),
                in_block(1),
                in_block(1),
                in_block(0),
                before,
            ]
        # recomputed when the first thing is needed that was not kept, which is inside the last part
        else:
            assert sorted(notes.seen[4:]) == sorted(
                [after, in_block(0), in_block(1), in_block(1), in_block(0), before]
            )


class Lambda(nn.Module):
    def __init__(self, note: Any) -> None:
        super().__init__()
        self.first, self.second = Probe(note), Probe(note)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.second(self.first(x)), x, use_reentrant=False)


def test_c7_a_recomputed_function_of_several_modules() -> None:
    """Each recomputed module has itself and the module around it as parents, whichever node asked
    for the recomputation."""
    notes = Notes()
    model = Lambda(notes)
    with notes.tracker:
        model(batch().requires_grad_()).sum().backward()
    assert sorted(set(notes.seen)) == [("Lambda", "Lambda.first"), ("Lambda", "Lambda.second")]
    assert len(notes.seen) == 6


class Keyword(nn.Module):
    def __init__(self, note: Any) -> None:
        super().__init__()
        self.first, self.second = Probe(note), OnlyKeyword(note)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x=self.first(x))


class OnlyKeyword(nn.Module):
    def __init__(self, note: Any) -> None:
        super().__init__()
        self.note = note

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        return Noting.apply(x, self.note)


def test_c8_keyword_only_tensors() -> None:
    """A module with keyword tensors has its own backward, the layer before is in no other module,
    and its post_bw_hook gets its gradient."""
    notes = Notes()
    model, ended = Keyword(notes), []
    notes.tracker.register_user_hooks(
        post_bw_hook=lambda module, grads: ended.append((type(module), len(grads[0])))
    )
    with notes.tracker:
        model(batch().requires_grad_()).sum().backward()
    assert notes.seen == [
        ("Keyword", "Keyword.first"),
        ("Keyword", "Keyword.second"),
        ("Keyword", "Keyword.first"),
    ]
    assert ended == [(OnlyKeyword, 1), (Keyword, 1), (Probe, 1)]


def test_c9_one_module_used_twice() -> None:
    """Each call of a module has its own backward hooks, in the order of the backward."""
    tracker, told = ModTracker(), []
    shared = nn.Linear(8, 8)
    tracker.register_user_hooks(
        pre_bw_hook=lambda module, grads: told.append(("pre", grads[0][0, 0].item())),
        post_bw_hook=lambda module, grads: told.append(("post", len(grads[0]))),
    )
    with tracker:
        x, y = batch().requires_grad_(), batch().requires_grad_()
        (shared(x) + 2 * shared(y)).sum().backward()
    assert told == [("pre", 2), ("post", 1), ("pre", 1), ("post", 1)]


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, broken: list[bool]) -> torch.Tensor:
        ctx.broken = broken
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.broken:
            raise RuntimeError("as planned")
        return grad, None


class Broken(nn.Module):
    def __init__(self, broken: list[bool]) -> None:
        super().__init__()
        self.broken = broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Breaks.apply(x, self.broken)


def test_c10_a_backward_that_raises() -> None:
    """A backward that raises leaves no name and no hook for later steps."""
    notes, broken, late = Notes(), [True], []
    model = nn.Sequential(Probe(notes), Broken(broken), Probe(notes))
    notes.tracker.register_user_hooks(post_bw_hook=lambda module, grads: late.append(module))
    with notes.tracker:
        with pytest.raises(RuntimeError, match="as planned"):
            model(batch()).sum().backward()
        assert notes.tracker.parents == {"Global"}
        broken.clear()
        notes.seen.clear()
        late.clear()
        model(batch()).sum().backward()
    assert notes.seen == [("Sequential", f"Sequential.{i}") for i in (0, 2, 2, 0)]
    assert late == [model[2], model[1], model[0], model]


def test_c2_a_forward_that_raises() -> None:
    """A module whose forward raises is left, and its post_fw_hook gets no output."""
    tracker, told = ModTracker(), []
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 9))
    tracker.register_user_hooks(
        post_fw_hook=lambda module, args, output: told.append((module, output is None))
    )
    with tracker:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(batch())
        assert tracker.parents == {"Global"}
    assert told == [(model[0], False), (model[1], True), (model, True)]


def test_c11_names() -> None:
    """Names are right for a submodule called before its model, a tied one, a wrapped model, another
    model, and a module in a list."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    notes = Notes()
    model = nn.Sequential(Probe(notes), nn.Sequential(Probe(notes)))
    model.append(model[0])
    model[1] = checkpoint_wrapper(model[1])
    free = [nn.Sequential(Probe(notes))]
    with notes.tracker as tracker:
        model[1](batch())
        assert notes.seen == [("Sequential.1", "Sequential.1.0")]
        model(batch())
        assert notes.seen[1:] == [
            ("Sequential", "Sequential.0"),
            (*["Sequential", "Sequential.1"], "Sequential.1.0"),
        ] + [("Sequential", "Sequential.0")]
        assert [tracker.get_known_fqn(m) for m in (model, model[1], model[2])] == [
            "Sequential",
            "Sequential.1",
            "Sequential.0",
        ]
        assert tracker.get_known_fqn(nn.Linear(1, 1)) is None
        other = nn.ModuleDict({"other": free[0]})
        other["other"](batch())
        assert notes.seen[-1] == ("ModuleDict.other", "ModuleDict.other.0")
        assert tracker.get_known_fqn(free[0]) == "ModuleDict.other"
    assert tracker.get_known_fqn(model[1]) == "Sequential.1"


class PlainList(nn.Module):
    def __init__(self, note: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.parts = [nn.Sequential(Probe(note))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[0](x) * self.weight


def test_c11_a_module_in_a_plain_list() -> None:
    """A module in a plain list has its class as its name, inside the module that calls it."""
    for kind in (ModTracker, OriginalModTracker):
        notes = Notes(kind)
        with notes.tracker:
            PlainList(notes)(batch())
        assert notes.seen == [("PlainList", "Sequential", "Sequential.0")]


@dataclasses.dataclass
class Output:
    value: Any
    extra: None = None


class Odd(nn.Module):
    def __init__(self, note: Any, kind: str) -> None:
        super().__init__()
        self.probe = Probe(note)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        y = self.kept = self.probe(x)
        return {
            "dict": lambda: {"y": [y]},
            "dataclass": lambda: Output({"y": y}),
            "none": lambda: None,
            "view": lambda: y.view(-1),
            "inplace": lambda: y.add_(1),
            "no grad": lambda: (y.detach(), y),
        }[self.kind]()


def test_c12_unusual_outputs() -> None:
    """The backward of a module is found for any kind of output, and its hooks run if it returns a
    tensor."""
    for kind in ("dict", "dataclass", "none", "view", "inplace", "no grad"):
        notes = Notes()
        told = hooked(notes.tracker)
        model = Odd(notes, kind)
        with notes.tracker:
            model(batch())
            model.kept.sum().backward()
        assert notes.seen == [("Odd", "Odd.probe")] * 2
        entered = {
            name
            for hook, name, is_parent, is_bw in told
            if hook == "pre_bw" and is_parent and is_bw
        }
        assert entered == ({"Odd.probe"} if kind in ("none", "view") else {"Odd", "Odd.probe"})


def test_c13_several_backwards() -> None:
    """With `autograd.grad` and two backwards over one graph, each node has its modules, and the
    hooks run once per backward."""
    notes, told = Notes(), []
    model = nn.Sequential(Probe(notes), Probe(notes))
    notes.tracker.register_user_hooks(
        pre_bw_hook=lambda module, grads: told.append(("pre", module)),
        post_bw_hook=lambda module, grads: told.append(("post", module)),
    )
    x = batch().requires_grad_()
    with notes.tracker:
        loss = model(x).sum()
        notes.seen.clear()
        torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    assert notes.seen == [("Sequential", "Sequential.1"), ("Sequential", "Sequential.0")] * 3
    one = [
        ("pre", model[1]),
        ("pre", model),
        ("pre", model[0]),
        ("post", model[1]),
        ("post", model),
        ("post", model[0]),
    ]
    assert told == one * 3


def test_c13_double_backward() -> None:
    """A node that a backward made has the modules of the node that it differentiates."""

    class Cubing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return Noting.apply(3 * ctx.saved_tensors[0] ** 2 * grad, notes)

    class Cube(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Cubing.apply(x)

    notes = Notes()
    model = nn.Sequential(Cube(), nn.Sequential(Cube()))
    x = batch().requires_grad_()
    with notes.tracker:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.sum().backward()
    inner = ("Sequential", "Sequential.1", "Sequential.1.0")
    assert set(notes.seen) == {("Sequential", "Sequential.0"), inner}


def test_an_input_that_is_used_again() -> None:
    """A tensor that outlives its graph does not run the hooks of earlier steps again."""
    tracker, told = ModTracker(), []
    tracker.register_user_hooks(post_bw_hook=lambda module, grads: told.append(module))
    model, x = nn.Linear(8, 8), batch().requires_grad_()
    with tracker:
        for _ in range(3):
            model(x).sum().backward()
    assert told == [model] * 3
    assert not x._backward_hooks


def test_a_forward_without_a_backward() -> None:
    """A forward whose graph is dropped leaves no hook that the next backward would run."""
    tracker, told = ModTracker(), []
    tracker.register_user_hooks(post_bw_hook=lambda module, grads: told.append(module))
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    with tracker:
        first(batch())
        second(batch()).sum().backward()
    assert told == [second]


# -- around it -------------------------------------------------------------------------------------


def test_each_thread_is_in_its_own_modules() -> None:
    """Two threads in different models each have their own parents, in forward and in backward."""
    notes = {name: Notes() for name in ("a", "b")}
    meet = threading.Barrier(2, timeout=20)

    class Meets(nn.Module):
        def __init__(self, note: Any) -> None:
            super().__init__()
            self.probe = Probe(note)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            meet.wait()
            return self.probe(x)

    class A(Meets):
        pass

    class B(Meets):
        pass

    def train(name: str, model: nn.Module) -> None:
        for _ in range(20):
            model(batch()).sum().backward()

    tracker = notes["a"].tracker = notes["b"].tracker = ModuleTracker()
    models = {"a": A(notes["a"]), "b": B(notes["b"])}
    with tracker:
        threads = [threading.Thread(target=train, args=item) for item in models.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tracker.parents == {"Global"}
    assert set(notes["a"].seen) == {("A", "A.probe")}
    assert set(notes["b"].seen) == {("B", "B.probe")}
    assert len(notes["a"].seen) == len(notes["b"].seen) == 40


def test_a_gradient_is_accumulated_in_the_module_that_holds_it() -> None:
    """In a hook of a parameter, the parents are those of the last call of its module."""
    tracker, seen = ModuleTracker(), []
    model = Model(depth=1)
    model.layers[0].up.bias.register_post_accumulate_grad_hook(
        lambda _: seen.append((tracker.parents, tracker.is_bw))
    )
    with tracker:
        model(batch()).sum().backward()
    assert seen == [({"Global", "Model", "Model.layers.0", "Model.layers.0.up"}, True)]


def test_a_forward_longer_than_the_log() -> None:
    """After more module calls than the log holds, the innermost module is right, outer ones may be
    missing, and none is wrong."""

    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.short, self.probe = nn.Identity(), nn.Sequential(Probe(notes))

        def forward(self, x: torch.Tensor, calls: int) -> torch.Tensor:
            for _ in range(calls):
                self.short(x)
            return self.probe(x)

    notes = Notes(ModuleTracker)
    model = Long()
    with notes.tracker:
        for calls in (40_000, 1):
            model(batch(), calls).sum().backward()
    whole = ("Long", "Long.probe", "Long.probe.0")
    assert all("Long.probe.0" in seen and set(seen) <= set(whole) for seen in notes.seen[:2])
    assert notes.seen[2:] == [whole] * 2


def test_nothing_is_left_behind() -> None:
    """No hook on a module, a tensor or torch is left, and neither the format of warnings nor their
    number changes."""
    model, x = Model(), batch().requires_grad_()
    looks = warnings.formatwarning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ModTracker() as tracker:
            hooked(tracker)
            model(x).sum().backward()
            model(x).sum().backward()
    assert warnings.formatwarning is looks
    assert not x._backward_hooks
    assert not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules()
    )


def test_hooks_that_come_and_go() -> None:
    """Hooks may be registered and cleared while the tracker runs; adding one kind does not remove
    another."""
    tracker, told = ModTracker(), []
    model = nn.Linear(8, 8)
    with tracker:
        tracker.register_user_hooks(pre_fw_hook=lambda *_: told.append("pre"))
        tracker.register_user_hooks(post_fw_hook=lambda *_: told.append("post"))
        model(batch())
        tracker.clear_user_hooks()
        model(batch())
        tracker.register_user_hooks(pre_fw_hook=lambda *_: tracker.clear_user_hooks())
        model(batch())
    model(batch())
    assert told == ["pre", "post"]


def test_nested_and_repeated() -> None:
    """A tracker works inside a tracker, inside a watch, and a second time."""
    notes = Notes()
    model = nn.Sequential(Probe(notes))
    with torchwhere.watch(model), notes.tracker, ModuleTracker(), notes.tracker:
        model(batch())
    assert notes.tracker.parents == {"Global"}
    with notes.tracker:
        model(batch())
    assert notes.seen == [("Sequential", "Sequential.0")] * 2


def test_an_exception_of_a_hook_propagates() -> None:
    """An exception of a user hook leaves the forward or backward that called it."""

    def raises(*_args: Any) -> None:
        raise KeyError("mine")

    for hook in ("pre_fw_hook", "post_fw_hook", "pre_bw_hook", "post_bw_hook"):
        tracker = ModTracker()
        tracker.register_user_hooks(**{hook: raises})
        with tracker:
            with pytest.raises(KeyError, match="mine"):
                nn.Linear(8, 8)(batch()).sum().backward()
            assert tracker.parents == {"Global"}


def test_compiled_as_ever(fresh_dynamo: None) -> None:
    """Under a tracker with hooks a model compiles as without one, and no hook runs for it."""
    from torch._dynamo.utils import counters

    def run() -> tuple[dict[str, Any], torch.Tensor]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = Model()
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            compiled(batch()).sum().backward()
        return {
            key: dict(counters[key]) for key in ("stats", "frames", "graph_break", "recompiles")
        }, model.head.weight.grad

    run()
    plain, expected = run()
    tracker = ModTracker()
    told = hooked(tracker)
    with tracker:
        tracked, grad = run()
    assert tracked == plain
    assert torch.equal(grad, expected)
    assert told == []


class Breaking(nn.Module):
    """A module that breaks a compiled graph, so that its submodule is called in eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.part(x)


@pytest.mark.parametrize("child", [lambda: nn.Linear(8, 8), Breaking])
def test_a_compiled_child(child: Any, fresh_dynamo: None) -> None:
    """As in the original, no hook runs for a compiled submodule or its calls; the model and the
    other submodules have theirs."""
    told = {}
    for kind in (ModTracker, OriginalModTracker):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), child(), nn.Linear(8, 8))
        model[1] = torch.compile(model[1], backend="aot_eager")
        tracker = kind()
        told[kind] = hooked(tracker)
        with tracker:
            for _ in range(2):
                model(batch().requires_grad_()).sum().backward()
    assert {name for _, name, _, _ in told[ModTracker]} == {
        "Sequential",
        "Sequential.0",
        "Sequential.2",
    }
    assert len(told[ModTracker]) == 2 * 4 * 3
    forward = [[each for each in told[kind] if not each[3]] for kind in told]
    assert forward[0] == forward[1]
    assert sorted(told[ModTracker]) == sorted(told[OriginalModTracker])


def test_the_name_of_any_module() -> None:
    """`_get_mod_name`, which tools of torch call, names a module that was never called, and its
    submodules, by its class."""
    for kind in (ModTracker, ModuleTracker, OriginalModTracker, OriginalModuleTracker):
        tracker, model = kind(), nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU()))
        assert [tracker._get_mod_name(m) for m in (model, model[0], model[1][0])] == [
            "Sequential",
            "Sequential.0",
            "Sequential.1.0",
        ]
        with tracker:
            model(batch())
            other = nn.Bilinear(1, 1, 1)
            assert [tracker._get_mod_name(m) for m in (model[1], other)] == [
                "Sequential.1",
                "Bilinear",
            ]
        assert tracker._get_mod_name(model[1]) == "Sequential.1"


class Subclass:
    """A subclass like that of torch's CommDebugMode: its own hooks call the private methods of the
    tracker."""

    def _before(self, mod: nn.Module, args: Any) -> None:
        name, w_mod = self._get_mod_name(mod), weakref.ref(mod)
        self._get_append_fn(w_mod, name, False)()
        tensors = [arg for arg in args if arg.requires_grad]
        if tensors and not self.is_bw:
            register_multi_grad_hook(tensors, self._get_pop_fn(w_mod, name, True))

    def __enter__(self) -> None:
        self._fw_pre_handle = register_module_forward_pre_hook(self._before)
        self._fw_post_handle = register_module_forward_hook(self._fw_post_hook)


def test_a_subclass_with_hooks_of_its_own() -> None:
    """A subclass has the parents that it entered, and its user hooks, as with the original; nothing
    is left afterwards."""
    seen, told = {}, {}
    for kind in (ModTracker, OriginalModTracker):
        notes = Notes(type("Own", (Subclass, kind), {}))
        told[kind] = hooked(notes.tracker)
        model = nn.Sequential(Probe(notes), nn.Sequential(Probe(notes)))
        with notes.tracker:
            for _ in range(2):
                model(batch().requires_grad_()).sum().backward()
                assert notes.tracker.parents == {"Global"}
        model(batch().requires_grad_())
        seen[kind] = notes.seen
    assert seen[ModTracker] == seen[OriginalModTracker]
    assert told[ModTracker] == told[OriginalModTracker]
    assert seen[ModTracker][:2] == [
        ("Sequential", "Sequential.0"),
        ("Sequential", "Sequential.1", "Sequential.1.0"),
    ]
    assert seen[ModTracker][-2:] == [(), ()]


def test_a_backward_that_raises_in_a_subclass() -> None:
    """Names that a subclass entered before a backward raised are gone after the next backward."""
    notes, broken = Notes(type("Own", (Subclass, ModTracker), {})), [True]
    model = nn.Sequential(Probe(notes), Broken(broken), Probe(notes))
    with notes.tracker:
        with pytest.raises(RuntimeError, match="as planned"):
            model(batch().requires_grad_()).sum().backward()
        broken.clear()
        model(batch().requires_grad_()).sum().backward()
        assert notes.tracker.parents == {"Global"}


def test_bad_input() -> None:
    """A wrong module or hook is an error of the right type that says what was expected."""
    tracker = ModTracker()
    with pytest.raises(
        TypeError, match=r"^get_known_fqn\(mod\): expected a torch.nn.Module, got NoneType$"
    ):
        tracker.get_known_fqn(None)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"^register_user_hooks\(pre_bw_hook=\): expected a function, got int$"
    ):
        tracker.register_user_hooks(None, None, 1)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"^compile_safe_hooks\(model\): expected a torch.nn.Module, got str$"
    ):
        ModTracker.compile_safe_hooks("model").__enter__()  # type: ignore[arg-type]
    with pytest.raises(
        TypeError,
        match=r"^compile_safe_hooks\(\): hooks and module_filter must be callable, got int$",
    ):
        ModTracker.compile_safe_hooks(nn.Linear(1, 1), module_filter=1).__enter__()  # type: ignore[arg-type]


# -- ranks -----------------------------------------------------------------------------------------


def _sharded(kind: str) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    notes = Notes()
    told = hooked(notes.tracker)
    torch.manual_seed(0)
    model: Any = Model(depth=1)
    model.layers[0].probe = Probe(notes)
    model.layers[0].register_forward_hook(lambda module, args, output: module.probe(output))
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.layers[0], mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    with notes.tracker:
        for _ in range(2):
            wrapped(batch().requires_grad_()).sum().backward()
    return {
        "seen": notes.seen,
        "told": {
            hook: {name for h, name, _, _ in told if h == hook} for hook in ("pre_fw", "post_bw")
        },
    }


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks(two_ranks: Pool, kind: str) -> None:
    """With DDP and FSDP2, the names are those of the user's own model, on every rank."""
    prefix = "FSDPModel" if kind == "fsdp2" else "Model"
    inside = tuple(f"{prefix}{rest}" for rest in ("", ".layers.0", ".layers.0.probe"))
    names = {
        f"{prefix}{rest}"
        for rest in ("", ".layers.0", ".layers.0.up", ".layers.0.down", ".layers.0.probe", ".head")
    }
    for answer in two_ranks.run(_sharded, kind):
        assert set(answer["seen"]) == {inside}
        assert len(answer["seen"]) == 4
        assert answer["told"] == {"pre_fw": names, "post_bw": names}


@pytest.mark.filterwarnings("ignore")
def test_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program in docs/migrating.md prints what the page shows, with the drop-in and with both
    originals."""
    page = Path(__file__).parent.parent / "docs" / "migrating.md"
    before, start, section = page.read_text().partition("## torch's `ModTracker`")
    section, end, after = section.partition("\n## ")
    program, *shown = re.findall(r"```(?:python|text)\n(.*?)```", section, re.DOTALL)
    ours = "torchwhere.drop_in.mod_tracker import ModTracker"
    theirs = (
        "torch.distributed._tools.mod_tracker import ModTracker",
        "torch.utils.module_tracker import ModuleTracker as ModTracker",
    )
    assert program.count(ours) == 1
    # the original sets its own handler there
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    printed = [_printed(program), *(_printed(program.replace(ours, one)) for one in theirs)]
    assert printed[1] == printed[2]
    if os.environ.get("TORCHWHERE_REGENERATE"):
        for was, now in zip(shown, printed[:2], strict=True):
            section = section.replace(f"```text\n{was}```", f"```text\n{now}```", 1)
        page.write_text(before + start + section + end + after)
    else:
        assert shown == printed[:2]


def _printed(program: str) -> str:
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(program, "train.py", "exec"), {"__name__": "__main__"})
    return out.getvalue()
