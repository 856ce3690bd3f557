"""The framework's line beside the user's: recorded by Python and by C++, shown by every view, and used
to compare ranks. The framework is a small package in a folder of installed packages."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchwhere
from diagnosing import diagnose
from rank_pool import Pool
from torchwhere.cli import main
from torchwhere.core.framework_path import framework_path
from torchwhere.core.place import Place, line_fields, line_text, stored_line
from torchwhere.diagnose.diff.comparison import diff
from torchwhere.diagnose.doctor.stacks import stack_lines
from torchwhere.native import load as loading

NAME = "engine_of_tests"
# Lines are found by the comments.
FRAMEWORK = """\
import torch.distributed as dist

def backward(loss):
    loss.backward()  # backward

def step(optimizer):
    optimizer.step()  # step

def train(model, optimizer, batches):
    for batch in batches:
        backward(model(batch).sum())
        step(optimizer)

def where(where):
    return where()  # where

def call(callback):
    return callback()

def fail():
    raise ValueError("in the framework")  # fail

def reduce_loss(value):
    dist.all_reduce(value)  # loss

def reduce_accuracy(value):
    dist.all_reduce(value)  # accuracy

def train_step(value, is_odd):
    for reduce in (reduce_accuracy, reduce_loss) if is_odd else (reduce_loss, reduce_accuracy):
        reduce(value)
"""


def framework(folder: Path) -> ModuleType:
    """The package, written below `folder` and imported."""
    packages = folder / "site-packages"
    (packages / NAME).mkdir(parents=True, exist_ok=True)
    (packages / NAME / "__init__.py").touch()
    (packages / NAME / "loop.py").write_text(FRAMEWORK)
    sys.path.insert(0, str(packages))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(f"{NAME}.loop")
    finally:
        sys.path.remove(str(packages))


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[ModuleType]:
    yield framework(tmp_path)
    for name in (NAME, f"{NAME}.loop"):
        del sys.modules[name]


def line(comment: str, function: str) -> str:
    """The framework's line with a comment, as a place has it."""
    number = 1 + FRAMEWORK.splitlines().index(
        next(text for text in FRAMEWORK.splitlines() if text.endswith(f"# {comment}"))
    )
    return f"{NAME}/loop.py:{number} {function}"


# -- which frame -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "path"),
    [
        ("/v/lib/python3.11/site-packages/transformers/trainer.py", "transformers/trainer.py"),
        ("/usr/lib/python3/dist-packages/lightning/a.py", "lightning/a.py"),
        ("/v/site-packages/torch/nn/modules/module.py", None),
        ("/v/site-packages/torchwhere/api/watch.py", None),
        ("/v/site-packages/torchvision/models.py", "torchvision/models.py"),
        ("/v/site-packages/deepspeed/comm/comm.py", None),
        ("/v/site-packages/deepspeed/runtime/engine.py", "deepspeed/runtime/engine.py"),
        ("/home/me/train.py", None),
        ("/usr/lib/python3.11/contextlib.py", None),
    ],
)
def test_files_of_frameworks(file: str, path: str | None) -> None:
    """A framework is an installed package other than torch and torchwhere; files that only pass calls
    to torch.distributed do not count."""
    assert framework_path(file) == path


def test_place(loop: ModuleType) -> None:
    """A place has the user's line and the framework's line, and its text shows both."""
    with torchwhere.watch():
        place = loop.where(torchwhere.where)
        own = torchwhere.where()
    assert place.framework_line == line("where", "where")
    assert place.line is not None
    assert "test_framework_lines.py:" in place.line
    assert str(place).endswith(f"{place.line}, in {place.framework_line}")
    assert place.to_dict()["framework_line"] == place.framework_line
    assert own.framework_line is None
    assert str(own).endswith(str(own.line))


def test_callback_of_the_user(loop: ModuleType) -> None:
    """In a callback of the user, the user's own line is the innermost: the framework called it, and
    not the other way round."""

    def callback() -> Place:
        return torchwhere.where()

    with torchwhere.watch():
        place = loop.call(callback)
    assert place.framework_line is None


def test_stored_lines() -> None:
    """Both lines survive the box as one text, and a text without a framework is the line alone."""
    both = stored_line("train.py:7", "engine/loop.py:3 fit")
    assert line_fields(both) == {"line": "train.py:7", "framework_line": "engine/loop.py:3 fit"}
    assert line_text(both) == "train.py:7, in engine/loop.py:3 fit"
    assert stored_line("train.py:7", None) == "train.py:7"
    assert line_fields("train.py:7") == {"line": "train.py:7", "framework_line": None}
    assert line_fields(None) == {"line": None, "framework_line": None}


def test_stack_of_another_tool() -> None:
    """The stack of a rank gives the same two lines; without a line of the user it gives none."""
    packages = "/v/lib/python3.11/site-packages"
    stack = (
        f"{packages}/torch/distributed/distributed_c10d.py:3252 in all_reduce",
        f"{packages}/deepspeed/comm/torch.py:160 in all_reduce",
        f"{packages}/deepspeed/runtime/engine.py:2000 in allreduce_gradients",
        f"{packages}/accelerate/accelerator.py:2858 in backward",
        "/home/me/train.py:12 in <module>",
    )
    assert stack_lines(stack, folder="/home/me") == {
        "line": "train.py:12",
        "framework_line": "deepspeed/runtime/engine.py:2000 allreduce_gradients",
    }
    assert stack_lines(stack[:-1], folder="/home/me") == {"line": None, "framework_line": None}


def test_exception_in_the_framework(loop: ModuleType, tmp_path: Path) -> None:
    """The event of an exception has the line of the framework that raised it."""
    watch = torchwhere.watch(out=tmp_path / "run")
    with pytest.raises(ValueError, match="in the framework") as raised, watch:
        loop.fail()
    (event,) = torchwhere.read_run(tmp_path / "run").events(kinds={"exception"})
    assert event.place.framework_line == line("fail", "fail")
    assert f"in {event.place.framework_line}" in raised.value.__notes__[0]


# -- Python and C++ --------------------------------------------------------------------------------


def train(loop: ModuleType, folder: Path) -> list[dict[str, Any]]:
    """Train below one line of the user, then call backward below another one, sometimes through the
    framework. Returns the places of the events."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.ones(9, 2, 4)
    with torchwhere.watch(model, out=folder):
        loop.train(model, optimizer, rows)
        for _ in range(6):
            for backward in (loop.backward, torch.Tensor.backward, loop.backward):
                backward(model(rows[0]).sum())
            optimizer.step()
    names = ("kind", "step", "pass", "module", "line", "framework_line")
    return [
        {name: event.to_dict()[name] for name in names}
        for event in torchwhere.read_run(folder).events()
    ]


def test_every_record_has_both(one_rank: None, loop: ModuleType, tmp_path: Path) -> None:
    """The records of collectives, optimizer steps and steps have the framework's line. The line of a
    collective in a backward is the line that called the backward."""
    events = train(loop, tmp_path / "run")
    lines = [
        (event["kind"], event["framework_line"])
        for event in events
        if event["kind"] in ("optimizer", "step_begin")
        or (event["kind"] == "collective" and event["pass"] == "backward")
    ]
    backward, step = line("backward", "backward"), line("step", "step")
    inside = [("collective", backward), ("optimizer", step), ("step_begin", step)] * 9
    reductions = [("collective", backward), ("collective", None), ("collective", backward)]
    outside = [*reductions, ("optimizer", None), ("step_begin", None)] * 6
    assert lines == [("step_begin", None), *inside, *outside]
    assert len({event["line"] for event in events if event["framework_line"] == step}) == 1


def test_native_records_are_equal(
    one_rank: None,
    loop: ModuleType,
    tmp_path: Path,
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C++ records the same lines as Python, also if one line of the user leads through different
    lines of the framework."""
    python = train(loop, tmp_path / "python")
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(library.parent.parent))
        patch.setenv(loading.SWITCH, "1")
        native = train(loop, tmp_path / "native")
        extension = loading.native()
    assert extension is not None
    assert extension.recorded() > 0
    assert native == python


# -- ranks -----------------------------------------------------------------------------------------

STEPS, ODD_STEP = 9, 6


def _reduce(folder: Path, odd_rank: int) -> None:
    """Each step reduces two values in the framework, below one line of the user. In one step, one
    rank reduces them in the other order."""
    loop, value = framework(folder / f"rank{dist.get_rank()}"), torch.ones(1)
    try:
        with torchwhere.watch(out=folder / "run"):
            for step in range(STEPS):
                torchwhere.step(step)
                loop.train_step(value, step == ODD_STEP and dist.get_rank() == odd_rank)
            dist.barrier()
    finally:
        for name in (NAME, f"{NAME}.loop"):
            del sys.modules[name]


def test_ranks_in_different_functions(
    four_ranks: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks that are in different functions of a framework, below one line of the user, differ: in
    the verdict, in the diff, and in the counts of collectives."""
    four_ranks.run(_reduce, tmp_path, 2)
    run = torchwhere.read_run(tmp_path / "run")
    verdict = diagnose(run)
    loss, accuracy = line("loss", "reduce_loss"), line("accuracy", "reduce_accuracy")
    assert (verdict.kind, verdict.culprits) == ("mismatch", (2,))
    assert verdict.facts["differs_in"] == ["line"]
    text = str(verdict)
    assert f"in {loss}, step {ODD_STEP}" in text
    assert f"in {accuracy}, step {ODD_STEP}" in text

    (divergence,) = diff(run).events.divergences[:1]
    entries = [version.entry for version in divergence.versions]
    assert {entry.event.place.framework_line for entry in entries if entry and entry.event} == {
        loss,
        accuracy,
    }
    by_line = run.comms().by_line
    assert sum(f", in {loss}" in str(name) for name in by_line) == 1

    assert main(["events", str(tmp_path / "run"), "--rank", "2", "--kind", "collective"]) == 0
    assert loss in capsys.readouterr().out
    assert main(["events", str(tmp_path / "run"), "--kind", "collective", "--json"]) == 0
    events = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert {event["framework_line"] for event in events} == {loss, accuracy, None}


def test_ranks_in_the_same_functions(four_ranks: Pool, tmp_path: Path) -> None:
    """Ranks that take the same way through a framework are healthy."""
    four_ranks.run(_reduce, tmp_path, -1)
    verdict = diagnose(torchwhere.read_run(tmp_path / "run"))
    assert (verdict.kind, verdict.culprits) == ("healthy", ())
