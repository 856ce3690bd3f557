"""A watch from start to end: it leaves nothing behind, memory does not grow, and no error of
torchwhere reaches the job."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import leaks
import torchwhere
from models import Model, batch
from torchwhere.api import watch as process
from torchwhere.blackbox.stored_layouts import layouts_in
from torchwhere.core.errors import end_reason
from torchwhere.hooks.backward import BackwardHook
from torchwhere.hooks.collectives import CollectiveHook
from torchwhere.hooks.exceptions import ExceptionHook
from torchwhere.hooks.group_creation import GroupCreationHook
from torchwhere.hooks.late_imports import LateImports
from torchwhere.hooks.modules import ModuleHook
from torchwhere.hooks.optimizers import OptimizerHook
from torchwhere.hooks.stack_files import Faults
from torchwhere.pipeline.verdict import diagnose_folder
from warm_python import Program, WarmPython


def train(
    model: nn.Module, steps: int = 2, *, optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(steps):
        loss = model(batch(seed=step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def kinds(folder: Path) -> list[str]:
    return [event.kind for event in torchwhere.read_run(folder).events()]


# -- lifetime --------------------------------------------------------------------------------------


def test_watch_is_context_manager_decorator_and_pair(tmp_path: Path) -> None:
    """The three forms of a watch record the same."""
    model = Model()
    with torchwhere.watch(model, out=tmp_path / "with"):
        train(model)

    @torchwhere.watch(model, out=tmp_path / "decorator")
    def decorated() -> None:
        train(model)

    decorated()
    torchwhere.start(model, out=tmp_path / "pair")
    train(model)
    torchwhere.stop()
    first = kinds(tmp_path / "with")
    assert first == kinds(tmp_path / "decorator") == kinds(tmp_path / "pair")
    assert first == ["start", "step_begin", *["optimizer", "step_end", "step_begin"] * 2, "end"]


def test_nested_watches_are_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A watch inside a watch joins it, and the outer one ends it; a warning says that another
    folder is not used."""
    model = Model()
    with torchwhere.watch(out=tmp_path / "outer"):
        with torchwhere.watch(model, out=tmp_path / "inner"):
            train(model, 1)
        assert process.current() is not None
        train(model, 1)
    assert process.current() is None
    assert kinds(tmp_path / "outer").count("optimizer") == 2
    assert not (tmp_path / "inner").exists()
    assert "is not used" in caplog.text


def test_watch_ends_with_an_exception(tmp_path: Path) -> None:
    """An exception ends the watch, is recorded as its reason, and propagates unchanged."""
    with pytest.raises(KeyError, match="mine"), torchwhere.watch(out=tmp_path):
        raise KeyError("mine")
    assert process.current() is None
    *_, end = torchwhere.read_run(tmp_path).events()
    assert end.fields["reason"] == "exception: KeyError: 'mine'"


def test_keyboard_interrupt_is_not_swallowed(tmp_path: Path) -> None:
    """Hooks catch only `Exception`: a KeyboardInterrupt reaches the user."""

    class Interrupts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), torchwhere.watch(out=tmp_path):
        nn.Sequential(Interrupts())(batch())


def test_stop_without_start_does_nothing() -> None:
    """Without a watch, `stop`, `note`, `phase` and `step` do nothing: they can stay in training
    scripts."""
    torchwhere.stop()
    torchwhere.note("nobody listens", answer=42)
    torchwhere.step()
    with torchwhere.phase("data"):
        place = torchwhere.where()
    assert (place.rank, place.step, place.pass_, place.certainty) == (0, None, "outside", "unknown")


def test_hundred_rounds_leave_nothing(tmp_path: Path) -> None:
    """After 100 watches, some of which ended with exceptions, nothing is left and memory has grown
    by less than 1 MB."""
    model = Model()

    def rounds(count: int) -> None:
        for index in range(count):
            try:
                with torchwhere.watch(model, out=tmp_path, records=256), torchwhere.watch():
                    train(model, 1)
                    if index % 3 == 0:
                        raise RuntimeError("as planned")
            except RuntimeError:
                pass
            for box in tmp_path.glob("*.box"):
                box.unlink()

    rounds(30)  # what torch and the allocator retain
    before, grown_from = leaks.snapshot(), _memory_bytes()
    rounds(100)
    assert leaks.differences(before, leaks.snapshot()) == []
    assert _memory_bytes() - grown_from < 1_000_000


def _memory_bytes() -> int:
    gc.collect()
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGESIZE")


def test_watch_does_not_keep_the_model_alive() -> None:
    """A model that the job deletes while it is watched is freed."""
    model = Model()
    deleted = weakref.ref(model)
    torchwhere.start(model)
    model(batch())
    del model
    gc.collect()
    assert deleted() is None
    torchwhere.stop()


# -- steps, notes, phases --------------------------------------------------------------------------


def test_steps_set_by_the_user(tmp_path: Path) -> None:
    """After the user has set a step, optimizers no longer count."""
    model = Model()
    with torchwhere.watch(model, out=tmp_path):
        torchwhere.step(100)
        train(model, 2)
        assert torchwhere.where().step == 100
        torchwhere.step()
        assert torchwhere.where().step == 101


def test_two_optimizers_make_one_step() -> None:
    """Two optimizers that step one after the other make one step, and so do two that alternate."""
    model = Model()
    first = torch.optim.SGD(model.layers.parameters(), 0.1)
    second = torch.optim.AdamW(model.head.parameters(), 0.1)
    with torchwhere.watch(model):
        for _ in range(3):
            model(batch()).sum().backward()
            first.step()
            second.step()
        assert torchwhere.where().step == 3


def test_an_optimizer_that_replaces_another() -> None:
    """If an optimizer was freed, the first step of the next one ends a training step too."""
    model = Model()
    with torchwhere.watch(model):
        for _ in range(3):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(2):
                model(batch()).sum().backward()
                optimizer.step()
            del optimizer
            gc.collect()
        assert torchwhere.where().step == 6


def test_closure_runs_forward_and_backward_inside_the_optimizer() -> None:
    """Inside a closure of an optimizer (LBFGS, Lightning), the place has the pass that runs there,
    not the optimizer."""
    model = Model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    places = []
    model.head.register_forward_hook(lambda *_: places.append(torchwhere.where()))
    model.head.weight.register_post_accumulate_grad_hook(
        lambda _: places.append(torchwhere.where())
    )

    def closure() -> Any:
        places.append(torchwhere.where())
        optimizer.zero_grad()
        loss = model(batch()).pow(2).mean()
        loss.backward()
        return loss

    with torchwhere.watch(model):
        optimizer.step(closure)
        after = torchwhere.where()
    assert [place.pass_ for place in places[:3]] == ["optimizer", "forward", "backward"]
    assert (after.pass_, after.step) == ("outside", 1)


def test_optimizer_that_raises_leaves_no_stale_pass() -> None:
    """After an optimizer step that raised, the place is no longer in the optimizer."""
    param = nn.Parameter(torch.ones(1))

    class Breaks(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("as planned")

    optimizer = Breaks([param], 0.1)
    with torchwhere.watch():
        with pytest.raises(RuntimeError, match="as planned"):
            optimizer.step()
        assert torchwhere.where().pass_ == "outside"


class Subclass(torch.optim.SGD):
    """An optimizer whose step calls that of its base class. It raises if it shall."""

    raises = False

    def step(self, closure: Any = None) -> None:
        if self.raises:
            raise RuntimeError("as planned")
        super().step(closure)


def test_a_step_inside_a_step_counts_once() -> None:
    """The step of a subclass counts once, although torch calls the hooks for its base class too."""
    model = Model()
    torch.optim.SGD(model.parameters(), 0.1)  # torch adds the hooks to the base class
    with torchwhere.watch(model):
        train(model, 4, optimizer=Subclass(model.parameters(), 0.1))
        assert torchwhere.where().step == 4


def test_steps_after_one_that_raised() -> None:
    """After an optimizer step that raised, the following steps count."""
    model = Model()
    torch.optim.SGD(model.parameters(), 0.1)
    optimizer = Subclass(model.parameters(), 0.1)
    with torchwhere.watch(model):
        train(model, 2, optimizer=optimizer)
        optimizer.raises = True
        with pytest.raises(RuntimeError, match="as planned"):
            optimizer.step()
        optimizer.raises = False
        train(model, 3, optimizer=optimizer)
        assert (torchwhere.where().step, torchwhere.where().pass_) == (5, "outside")


def test_notes_and_phases(tmp_path: Path) -> None:
    """Notes have their fields, phases nest and also end with exceptions, and both have a place."""

    @torchwhere.phase("epoch")
    def epoch() -> None:
        with torchwhere.phase("data"):
            torchwhere.note("loaded", rows=3, tensor=torch.ones(1))
        raise ValueError("no data")

    with torchwhere.watch(out=tmp_path), pytest.raises(ValueError, match="no data"):
        epoch()
    events = list(torchwhere.read_run(tmp_path).events(kinds={"note", "phase_begin", "phase_end"}))
    assert [(event.kind, event.fields.get("phase")) for event in events] == [
        ("phase_begin", "epoch"),
        ("phase_begin", "data"),
        ("note", None),
        ("phase_end", "data"),
        ("phase_end", "epoch"),
    ]
    note = events[2]
    assert note.fields == {"text": "loaded", "rows": 3, "tensor": [1.0]}
    assert note.place.line is not None
    assert "test_session.py:" in note.place.line


def test_module_events_are_there_when_asked_for(tmp_path: Path) -> None:
    """With module events, each module call is an enter and an exit; a wrapper and the module inside
    it are one call."""
    model = torch.nn.parallel.DataParallel(Model(depth=1))
    with torchwhere.watch(model, out=tmp_path, module_events=True):
        model(batch())
    events = torchwhere.read_run(tmp_path).events(kinds={"module_enter", "module_exit"})
    assert [
        (event.kind.removeprefix("module_"), event.place.module, event.place.call)
        for event in events
    ] == [
        ("enter", "", 0),
        ("enter", "layers.0", 0),
        ("enter", "layers.0.up", 0),
        ("exit", "layers.0.up", 0),
        ("enter", "layers.0.down", 0),
        ("exit", "layers.0.down", 0),
        ("exit", "layers.0", 0),
        ("enter", "head", 0),
        ("exit", "head", 0),
        ("exit", "", 0),
    ]


def test_exception_is_an_event(tmp_path: Path) -> None:
    """An exception that leaves several modules is recorded once, with the place of the innermost
    one."""

    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("deep inside")

    with torchwhere.watch(out=tmp_path), pytest.raises(ValueError, match="deep inside"):
        nn.Sequential(nn.Sequential(nn.Linear(8, 8), Raises()))(batch())
    (event,) = torchwhere.read_run(tmp_path).events(kinds={"exception"})
    assert (event.place.module, event.fields["text"]) == ("0.1", "ValueError: deep inside")


# -- our own errors --------------------------------------------------------------------------------


class Bug(Exception):
    """A planted error of torchwhere."""


def _plant(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: tuple[int, ...]
) -> list[int]:
    """Make a function of torchwhere raise at the given calls."""
    original, count = getattr(owner, name), [0]

    def planted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] in at:
            raise Bug(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, planted)
    return count


HOOKS = {
    "modules": ("torchwhere.hooks.modules.ModuleHook", "_enter_slowly"),
    "backward": ("torchwhere.hooks.backward.BackwardHook", "_move"),
    "optimizers": ("torchwhere.recorder.recorder.Recorder", "optimizer_stepped"),
    "exceptions": ("torchwhere.recorder.recorder.Recorder", "exception"),
    "collectives": ("torchwhere.hooks.groups.WatchedGroups", "of"),
    "compilation": ("torchwhere.recorder.recorder.Recorder", "compile_begins"),
    "notes and phases": ("torchwhere.recorder.recorder.Recorder", "note"),
}


def _busy(model: nn.Module) -> list[float]:
    """Train a model in a way that uses every hook."""
    import torch.distributed as dist

    losses = []
    for step in range(8):
        torchwhere.note("step", step=step)
        losses += train(model, 1)
        dist.all_reduce(torch.ones(1))
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 3))
        torch.compile(eval("lambda x: x + 1"), backend="eager")(torch.ones(1))
    return losses


class Slotted:
    """A function of the job that cannot be weakly referenced."""

    __slots__ = ()

    def __call__(self, *arguments: object) -> None: ...


def test_a_function_that_no_weak_dictionary_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch replaces and restores any function of the job."""
    hook = Slotted()
    monkeypatch.setattr(threading, "excepthook", hook)
    with torchwhere.watch(out=tmp_path):
        assert threading.excepthook is not hook
    assert threading.excepthook is hook
    assert (tmp_path / "rank0.box").exists()


@pytest.mark.parametrize(
    ("code", "reason"),
    [(None, "exit 0"), (False, "exit 0"), (True, "exit 1"), (3, "exit 3"), ("", "exit 1")],
)
def test_end_reason_of_an_exit(code: Any, reason: str) -> None:
    """`sys.exit` ends a process with the code that Python gives it."""
    assert end_reason(SystemExit(code)) == reason


@pytest.mark.parametrize("hook", HOOKS)
def test_our_own_errors_never_reach_the_job(
    hook: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    one_rank: None,
) -> None:
    """A hook that fails at its 1st, 2nd and 17th call, or always, changes nothing, logs one warning
    and switches itself off."""
    path, name = HOOKS[hook]
    module, _, class_name = path.rpartition(".")
    torch.manual_seed(0)
    expected = _busy(Model())
    for calls in ((1, 2, 17), tuple(range(1, 1000))):
        caplog.clear()
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            count = _plant(patch, getattr(sys.modules[module], class_name), name, calls)
            torch.manual_seed(0)
            with torchwhere.watch(out=tmp_path):
                assert _busy(Model()) == expected
        assert count[0] >= 3
        said = [
            record
            for record in caplog.records
            if f"the hook for {hook} failed" in record.getMessage()
        ]
        assert len(said) == 1


# -- a hook that fails while it is installed or removed ------------------------------------------


INSTALLED = {
    "exceptions": ExceptionHook,
    "modules": ModuleHook,
    "backward": BackwardHook,
    "optimizers": OptimizerHook,
    "collectives": CollectiveHook,
    "group creation": GroupCreationHook,
    "imports": LateImports,
    "faults": Faults,
}


@pytest.mark.parametrize("name", INSTALLED)
def test_hook_that_cannot_be_installed_leaves_none_behind(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error while one hook is installed, before or after its own work, removes all hooks. It
    does not reach the job."""
    hook: Any = INSTALLED[name]
    before = leaks.snapshot()
    for is_late in (False, True):
        _plant_around(monkeypatch, hook, "install", is_late=is_late)
        torchwhere.start(Model(), out=tmp_path)
        monkeypatch.undo()
        assert leaks.differences(before, leaks.snapshot()) == []
        assert process.current() is None
    with torchwhere.watch(out=tmp_path):
        train(Model(), 1)
    assert "optimizer" in kinds(tmp_path)


def test_hook_that_is_half_installed_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle of an installation also removes the first half of that hook."""
    before = leaks.snapshot()
    _plant_around(monkeypatch, OptimizerHook, "_make_after", is_late=False)
    torchwhere.start(Model())
    assert process.current() is None
    assert leaks.differences(before, leaks.snapshot()) == []


@pytest.mark.parametrize("name", INSTALLED)
def test_hook_that_cannot_be_removed_keeps_no_other(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error while one hook is removed is logged; the others are removed and the box is
    closed."""
    before = leaks.snapshot()
    _plant_around(monkeypatch, INSTALLED[name], "remove", is_late=True)
    with torchwhere.watch(Model(), out=tmp_path):
        pass
    monkeypatch.undo()
    assert leaks.differences(before, leaks.snapshot()) == []
    assert [
        record.getMessage() for record in caplog.records if "could not remove" in record.msg
    ] != []


def test_hook_that_cannot_be_removed_in_a_forked_child_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a forked child too, an error while one hook is removed does not keep the others."""
    removed = ("patches", "patches of torch.distributed", "optimizer hooks", "import hooks")
    before = leaks.snapshot()
    _plant_around(monkeypatch, LateImports, "remove", is_late=True)
    with torchwhere.watch(Model(), out=tmp_path):
        child = os.fork()
        if child == 0:
            after = leaks.snapshot()
            os._exit(0 if all(after[key] == before[key] for key in removed) else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def _plant_around(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, is_late: bool
) -> None:
    """Let a method of torchwhere raise instead of its work, or, if `is_late`, after it."""
    original = getattr(owner, name)

    def planted(*args: Any, **kwargs: Any) -> None:
        if is_late:
            original(*args, **kwargs)
        raise Bug(name)

    monkeypatch.setattr(owner, name, planted)


# -- processes and threads -------------------------------------------------------------------------


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    """A dataset whose workers run a module, like transforms do."""

    def __init__(self) -> None:
        self.transform = nn.Linear(2, 2)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        torchwhere.note("in a worker")
        assert torchwhere.where().step is None
        return self.transform(torch.full((2,), float(index))).detach()


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_data_loader_workers_leave_the_box_alone(tmp_path: Path, start_method: str) -> None:
    """Forked and spawned workers do not write into the parent's box; the parent goes on
    recording."""
    loader = torch.utils.data.DataLoader(
        Squares(), batch_size=2, num_workers=2, multiprocessing_context=start_method
    )
    with torchwhere.watch(out=tmp_path, module_events=True):
        torchwhere.note("before")
        assert len(list(loader)) == 4
        torchwhere.note("after")
    run = torchwhere.read_run(tmp_path)
    assert [event.fields.get("text") for event in run.events(kinds={"note"})] == ["before", "after"]
    assert not list(run.events(kinds={"module_enter"}))
    assert run.boxes[0].counts.torn == 0


def test_threads_lose_nothing(tmp_path: Path) -> None:
    """If sixteen threads write notes and call modules at the same time, every note is recorded with
    its own thread."""
    model = Model()

    def work(number: int) -> None:
        for index in range(200):
            model(batch())
            torchwhere.note("n", thread=number, index=index)

    with torchwhere.watch(model, out=tmp_path):
        threads = [threading.Thread(target=work, args=(n,), name=f"writer-{n}") for n in range(16)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    run = torchwhere.read_run(tmp_path)
    notes = list(run.events(kinds={"note"}))
    assert sorted((e.fields["thread"], e.fields["index"]) for e in notes) == [
        (t, i) for t in range(16) for i in range(200)
    ]
    assert all(event.place.thread == f"writer-{event.fields['thread']}" for event in notes)
    assert run.boxes[0].counts.torn == 0


def test_watches_begin_and_end_while_threads_reduce(one_rank: None) -> None:
    """While other threads issue collectives, watches begin and end and no call fails; a later watch
    removes the kernels that were left."""
    failed, is_over, none = list[BaseException](), threading.Event(), leaks.snapshot()["kernels"]

    def reduce() -> None:
        try:
            while not is_over.is_set():
                dist.all_reduce(torch.ones(2))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=reduce) for _ in range(3)]
    [thread.start() for thread in threads]
    for _ in range(25):
        with torchwhere.watch():
            time.sleep(0.01)
    left = leaks.snapshot()["kernels"]
    is_over.set()
    [thread.join() for thread in threads]
    assert failed == []
    assert left != none
    with torchwhere.watch():
        pass
    assert leaks.snapshot()["kernels"] == none


JOB = """
    import sys, torch, torchwhere
    from torch import nn
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    def train(steps=3):
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    def where_is_it(path): return sys.argv[1]
"""


ENDINGS = {
    "": (0, "exit"),
    "sys.exit(3)": (3, "exit"),
    "raise ValueError('last words')": (1, "exception: ValueError: last words"),
}
TROUBLES = {
    "read-only": "pass",
    "truncated": "import os; os.truncate(sys.argv[1] + '/rank0.box', 0)",
    "deleted": "import shutil; shutil.rmtree(sys.argv[1])",
    "not a folder": "pass",
}
Ended = tuple[Path, Program]


def _ending(how: str) -> str:
    return textwrap.dedent(JOB) + f"\ntorchwhere.start(model, out=sys.argv[1])\ntrain()\n{how}\n"


def _troubled(during: str) -> str:
    watched = "with torchwhere.watch(model, out=sys.argv[1], module_events=True):"
    return (
        textwrap.dedent(JOB)
        + f"\n{watched}\n    train()\n    {during}\n    train(50)\nprint('done')\n"
    )


@pytest.fixture(scope="module")
def ended(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ended]]:
    """One process for each ending and each problem, with its folder. All start at once."""
    programs = {how: _ending(how) for how in ENDINGS} | {
        errors: _troubled(during) for errors, during in TROUBLES.items()
    }
    started: dict[str, Ended] = {}
    for name, program in programs.items():
        folder = (
            Path("/proc/torchwhere-run")
            if name == "read-only"
            else tmp_path_factory.mktemp("ended") / "run"
        )
        if name == "not a folder":
            folder.write_text("a file")
        started[name] = folder, warm.start("-c", program, folder)
    yield started
    for _, job in started.values():
        job.kill()


@pytest.mark.parametrize("ending", ENDINGS)
def test_interpreter_shutdown(ended: dict[str, Ended], ending: str) -> None:
    """A watch without `stop` ends with the interpreter: the exit code is that of the job, and the
    box has the reason. The native extension also knows the exit code."""
    (folder, job), (code, reason) = ended[ending], ENDINGS[ending]
    if code and reason == "exit" and os.environ.get("TORCHWHERE_NATIVE") == "1":
        reason = f"exit {code}"
    returncode, _, err = job.end()
    assert returncode == code, err
    *_, end = torchwhere.read_run(folder).events()
    assert (end.kind, end.fields["reason"]) == ("end", reason)


@pytest.mark.parametrize("errors", TROUBLES)
def test_trouble_with_the_folder(ended: dict[str, Ended], errors: str) -> None:
    """If the folder is deleted, truncated or read-only, the job goes on with one warning."""
    _, job = ended[errors]
    code, out, err = job.end()
    assert code == 0, err
    assert out == "done\n"
    assert err.count("torchwhere:") == 1, err


def test_place_as_text_and_json() -> None:
    """A place is one line as text, and a dict that JSON can store."""
    model = Model()
    places = []
    model.layers[1].up.register_forward_hook(lambda *_: places.append(torchwhere.where()))
    with torchwhere.watch(model):
        model(batch())
    (place,) = places
    assert "\n" not in str(place)
    assert str(place).startswith("rank 0, step 0, forward of layers.1.up, ")
    assert json.loads(json.dumps(place.to_dict()))["pass"] == "forward"


def test_an_exception_that_cannot_be_printed(tmp_path: Path) -> None:
    """An exception whose text cannot be computed leaves the watch unchanged."""

    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    with pytest.raises(Odd), torchwhere.watch(out=tmp_path):
        raise Odd
    assert process.current() is None
    *_, end = torchwhere.read_run(tmp_path).events()
    assert end.fields["reason"] == "exception: Odd"


def test_an_exception_outside_any_module_has_a_note_too(tmp_path: Path) -> None:
    """An exception that leaves the watch outside any module gets one note with its place, and is an
    event."""
    with pytest.raises(ValueError, match="between") as caught, torchwhere.watch(out=tmp_path):
        raise ValueError("between modules")
    (note,) = caught.value.__notes__
    assert note.startswith("torchwhere: rank 0, step 0, outside any module, ")
    assert len(list(torchwhere.read_run(tmp_path).events(kinds={"exception"}))) == 1


def test_an_inferred_last_place(tmp_path: Path) -> None:
    """If a kernel of torch fails in a backward, the engine does not say in which node. The verdict
    says that the last place is inferred."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid())

    def step() -> None:
        out = model(torch.ones(2, 2))
        out.detach().zero_()  # the sigmoid has saved it: an error in backward
        out.sum().backward()

    with pytest.raises(RuntimeError), torchwhere.watch(model, out=tmp_path):
        step()
    verdict = diagnose_folder(tmp_path)
    (line,) = [line for line in verdict.explanation if line.startswith("  last place: ")]
    assert line.startswith("  last place: backward of 1, ")
    assert line.endswith(", step 0, (inferred)")


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_exception_that_ends_the_process(
    warm: WarmPython, tmp_path: Path, *, is_stopped: bool
) -> None:
    """An exception that passes through no module gets its note and event before Python prints it,
    also below the hook that `init_process_group` installs. After the watch it gets neither."""
    code = f"""
import torch, torchwhere
import torch.distributed as dist
torchwhere.start(out="run/")
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
if {is_stopped}:
    torchwhere.stop()
raise RuntimeError("CUDA error: device-side assert triggered")
"""
    (tmp_path / "job.py").write_text(code)
    done = warm.run("job.py", cwd=tmp_path)
    run = torchwhere.read_run(tmp_path / "run")
    events = list(run.events(kinds={"exception"}))
    assert done.returncode == 1
    assert "[rank0]: RuntimeError: CUDA error: device-side assert triggered\n" in done.stderr
    if is_stopped:
        assert (events, "torchwhere: " in done.stderr) == ([], False)
        return
    assert (
        "[rank0]: torchwhere: rank 0, step 0, outside any module, job.py:9;"
        " last collectives: all_reduce #0 on default\n[rank0]: torchwhere: device progress: "
    ) in done.stderr
    assert [(event.place.line, event.fields["device"][:15]) for event in events] == [
        ("job.py:9", "device progress")
    ]


class Ending:
    """A value whose text ends the watch, as another thread may do at this moment."""

    def __str__(self) -> str:
        torchwhere.stop()
        return "ending"


def test_a_note_while_the_watch_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The note is lost, which is no error."""
    torchwhere.start(out=tmp_path)
    torchwhere.note("last", value=Ending())
    assert caplog.records == []
    assert not list(torchwhere.read_run(tmp_path).events(kinds={"note"}))


def test_a_hook_of_threads_that_another_library_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the watch it only calls the hook that was there before, also on a new thread."""
    seen: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(str(args.exc_value)))

    def run(text: str) -> None:
        def fail() -> None:
            raise ValueError(text)

        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()

    with torchwhere.watch(out=tmp_path):
        run("inside")
        found = threading.excepthook
    monkeypatch.setattr(threading, "excepthook", lambda args: found(args))
    run("after it")
    assert seen == ["inside", "after it"]
    events = list(torchwhere.read_run(tmp_path).events(kinds={"exception"}))
    assert [event.fields["text"] for event in events] == ["ValueError: inside"]


def test_a_hook_of_python_does_not_keep_the_watch_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`init_process_group` keeps the `sys.excepthook` that it finds, also after the watch."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with torchwhere.watch(out=tmp_path):
        found = sys.excepthook
        sys.excepthook = lambda *error: found(*error)
        watch = weakref.ref(process._current)
    gc.collect()
    assert watch() is None


def test_watching_does_not_import_dynamo(warm: WarmPython) -> None:
    """A watch waits for the import of dynamo and does not import it itself, which takes a
    second."""
    code = """
import sys, torch, torchwhere
with torchwhere.watch(torch.nn.Linear(2, 2)) as watch:
    torch.nn.Linear(2, 2)(torch.ones(2)).sum().backward()
    torchwhere.note("here")
print("torch._dynamo" in sys.modules, "torch._inductor" in sys.modules)
"""
    done = warm.run("-c", code)
    assert done.stdout == "False False\n", done.stderr


def test_steps_counted_by_the_user_begin_at_zero() -> None:
    """`step()` at the top of each iteration makes the first one step 0."""
    steps = []
    with torchwhere.watch():
        for _ in range(3):
            torchwhere.step()
            steps.append(torchwhere.where().step)
    assert steps == [0, 1, 2]


def test_the_folder_it_works_in_is_gone(warm: WarmPython, tmp_path: Path) -> None:
    """A process whose working folder was deleted is watched like any other; its lines are absolute
    paths."""
    code = """
import os, sys
import torch, torchwhere
from torch import nn
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
os.makedirs("gone")
os.chdir("gone")
os.rmdir(os.getcwd())
seen = []
model.register_forward_hook(lambda *_: seen.append(torchwhere.where()))
with torchwhere.watch(model, out=sys.argv[1]):
    with torchwhere.phase("all"):
        model(torch.zeros(2)).sum().backward()
        optimizer.step()
    torchwhere.note("said")
print(seen[0].module == "", os.path.isabs(seen[0].line.partition(":")[0]))
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = warm.run(script, tmp_path / "run", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n", "")
    assert [
        event.fields["text"]
        for event in torchwhere.read_run(tmp_path / "run").events(kinds={"note"})
    ] == ["said"]


# -- others who do as we do ------------------------------------------------------------------------


def _wrapped(function: Any) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("which", ["module calls", "backward"])
def test_somebody_else_wraps_what_we_have_wrapped(which: str) -> None:
    """Another library wraps our wrapper during a watch and restores it later: it then does nothing,
    and the next watch removes it."""
    owners = (nn.Module,) if which == "module calls" else (torch.autograd, torch.autograd.graph)
    name = "__call__" if which == "module calls" else "_engine_run_backward"
    torchs = getattr(owners[0], name)

    def put(function: Any) -> None:
        for owner in owners:
            setattr(owner, name, function)

    model, places = Model(), []
    with torchwhere.watch(model):
        ours = getattr(owners[0], name)
        put(_wrapped(ours))
    train(model)
    put(ours)
    expected = train(Model())
    for _ in range(2):
        with torchwhere.watch(model):
            torch.manual_seed(0)
            model.head.register_full_backward_hook(lambda *_: places.append(torchwhere.where()))
            train(model, 1)
        assert getattr(owners[0], name) is torchs
    assert len(expected) == 2
    assert {(place.pass_, place.module, place.call) for place in places} == {
        ("backward", "head", 0)
    }


def test_somebody_else_wraps_backward_between_two_watches() -> None:
    """A wrapper that another library installs between two watches is called, and is still there
    after the second one."""
    with torchwhere.watch():
        train(Model(), 1)
    called = []
    torchs = torch.autograd._engine_run_backward

    def theirs(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return torchs(*args, **kwargs)

    torch.autograd._engine_run_backward = theirs
    try:
        with torchwhere.watch():
            train(Model(), 2)
        assert torch.autograd._engine_run_backward is theirs
    finally:
        torch.autograd._engine_run_backward = torchs
    assert len(called) == 2


def test_a_scripted_module_has_a_layout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A ScriptModule has no dict of parameters: its layout is recorded, without a warning."""
    model = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 8))
    with torchwhere.watch(model, out=tmp_path):
        train(model)
    assert caplog.text == ""
    assert layouts_in(torchwhere.read_run(tmp_path).boxes[0])


def test_a_model_compiled_under_a_watch_and_used_after_it() -> None:
    """A model that was compiled in a watch keeps our wrapper of `__call__`, which does nothing
    afterwards: no extra frame, graph break or recompile."""
    import contextlib

    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    def run(watch: Any) -> dict[str, Any]:
        dynamo.reset()
        counters.clear()
        with watch:
            models = [torch.compile(Model(), backend="eager") for _ in range(2)]
            models[0](batch())
        for model in models:
            model(batch())
        return {
            key: dict(counters[key]) for key in ("stats", "frames", "graph_break", "recompiles")
        }

    plain, watched = run(contextlib.nullcontext()), run(torchwhere.watch())
    dynamo.reset()
    assert watched == plain
    assert plain["frames"]
