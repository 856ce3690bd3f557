"""The native part: built for real into a cache of its own, and compared with the Python code that
it stands in for.

`library` (in `conftest.py`) builds it once. `watched(job, native=...)` gives what the same job
records in either way.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import torchwhere
from torchwhere.blackbox.phase_sums import PhaseKey, phase_sums
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.cli import main
from torchwhere.core.errors import TorchwhereError
from torchwhere.hooks.shape_inference import PIPELINING
from torchwhere.hooks.threads import LOG_LENGTH
from torchwhere.native import first_run, self_test
from torchwhere.native import load as loading
from torchwhere.native.build import build
from torchwhere.native.first_run import prepare

PATIENCE_S = 120


@pytest.fixture
def cache(library: Path, children: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process finds that library, and uses it."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(library.parent.parent))
        patch.setenv(loading.SWITCH, "1")
        yield library.parent


@pytest.fixture
def part(cache: Path) -> Any:
    found = loading.native()
    assert found is not None
    return found


# -- building and loading --------------------------------------------------------------------------


def test_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No compiler: one line that says so, and what to do."""
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert main(["native"]) == 2
    assert (
        capsys.readouterr().err
        == "torchwhere: no C++ compiler is there (no-such-compiler): install g++, or name one in"
        " CXX\n"
    )


def test_with_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler complains of is said, and nothing is left behind."""
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho 'native.cpp:1: error: boom' >&2\nexit 1\n")
    compiler.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("CXX", str(compiler))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(TorchwhereError) as raised:
            build()
    assert (
        str(raised.value)
        == "the compiler could not build the native part: native.cpp:1: error: boom"
    )
    assert list((tmp_path / "torchwhere").iterdir()) == []


def test_without_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Python.h: said, with where it was looked for."""
    real = sysconfig.get_path
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        patch.setattr(
            sysconfig, "get_path", lambda name: "/nowhere" if name == "include" else real(name)
        )
        with pytest.raises(TorchwhereError) as raised:
            build()
    expected = (
        "the headers of Python are not there (/nowhere/Python.h): install python3-dev, or what it"
        " is called here"
    )
    assert str(raised.value) == expected


def test_where_it_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is a file: said in a sentence."""
    (tmp_path / "torchwhere").write_text("")
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(TorchwhereError) as raised:
            build()
    assert (
        str(raised.value)
        == f"the native part cannot be written to {tmp_path}/torchwhere: File exists"
    )


def test_it_is_built_once(
    library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says where it built the library; asked again, it leaves it alone."""
    before = library.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(library.parent.parent))
        assert main(["native"]) == 0
    assert capsys.readouterr().out == f"already built: {library}\n"
    assert library.stat().st_mtime_ns == before
    assert sorted(path.name for path in library.parent.iterdir()) == [
        library.name,
        library.name + ".sha256",
    ]


def test_its_name_says_what_it_is_for(library: Path) -> None:
    """Torch's version and commit, Python's ABI and the sources are in the name: another one of them
    finds another name."""
    assert torch.version.git_version is not None
    for part in (
        torch.__version__,
        torch.version.git_version[:8],
        f"cpython-3{sys.version_info.minor}",
    ):
        assert part in library.name


def damage_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: 1 << 12])


def lose_checksum(path: Path) -> None:
    loading.checksum_file(path).unlink()


def replace_by_text(path: Path) -> None:
    path.write_text("no library")
    loading.checksum_file(path).write_text(loading.checksum(path))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (damage_byte, "is damaged"),
        (cut, "is damaged"),
        (lose_checksum, "has no checksum beside it"),
        (replace_by_text, "file too short"),
    ],
)
def test_a_spoiled_library_is_not_used(
    library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
    spoil: Callable[[Path], None],
    why: str,
) -> None:
    """Damaged, cut, or something else under its name: said once, and Python's own code records."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(loading.SWITCH, "1")
    path = loading.library()
    path.parent.mkdir()
    path.write_bytes(library.read_bytes())
    loading.checksum_file(path).write_text(loading.checksum_file(library).read_text())
    spoil(path)
    for _ in range(2):
        with torchwhere.watch(nn.Linear(2, 2), out=tmp_path / "run") as _:
            torchwhere.note("here")
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert why in said[0]
    assert "`torchwhere native --anew` builds it again" in said[0]
    assert [event.kind for event in torchwhere.read_run(tmp_path / "run").events()].count(
        "note"
    ) == 1
    monkeypatch.undo()


def test_a_library_for_another_torch_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that got a name which is not its own is told by what is inside it."""
    with monkeypatch.context() as patch:
        patch.setattr(loading, "built_for", lambda: "another")
        with pytest.raises(loading.RefusedLibraryError, match=r"was built for .*, this is another"):
            loading.load(next(path for path in cache.iterdir() if path.suffix == ".so"))


def test_it_can_be_switched_off(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCHWHERE_NATIVE=0 keeps a watch from using it."""
    with monkeypatch.context() as patch:
        patch.setenv(loading.SWITCH, "0")
        assert loading.native() is None
    assert loading.native() is part


def test_a_watch_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no library, a watch leaves it at that."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        patch.setenv(loading.SWITCH, "1")
        with torchwhere.watch(nn.Linear(2, 2)):
            pass
    assert list(tmp_path.iterdir()) == []


# -- before a job ----------------------------------------------------------------------------------

SCRIPT = "from torchwhere.native.load import native; print(native() is not None)"
BUILDS = "torchwhere: builds its native part"


def compiler_that(folder: Path, does: str) -> str:
    """A command that is called like a compiler; `$to` is what it has to make. Each call leaves a
    line in `calls`."""
    path = folder / "cxx"
    lines = [
        "#!/bin/sh",
        f"echo called >> {folder}/calls",
        'while [ "$1" != -o ]; do shift; done; to=$2',
        does,
    ]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return str(path)


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines()) if (folder / "calls").exists() else 0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache with nothing in it, for this process and those it starts."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        patch.setenv(loading.SWITCH, "1")
        patch.setenv("CXX", compiler_that(tmp_path, "exit 1"))
        yield tmp_path


def test_run_builds_it_before_the_script(library: Path, home: Path) -> None:
    """Of two ranks one builds, and says so; the other waits; both use it. What a killed build has
    left is cleared."""
    script, left, fresh = (
        home / "script.py",
        home / "torchwhere" / "building-left",
        home / "torchwhere" / "building-fresh",
    )
    script.write_text(SCRIPT)
    left.mkdir(parents=True)
    fresh.mkdir()
    os.utime(left, (0, 0))
    line = [
        sys.executable,
        "-m",
        "torchwhere",
        "run",
        "--no-monitor",
        "--out",
        str(home / "run"),
        str(script),
    ]
    env = os.environ | {"CXX": compiler_that(home, f"sleep 1; cp {library} $to"), "WORLD_SIZE": "2"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = [
        subprocess.Popen(line, text=True, env=env | {"RANK": str(n), "LOCAL_RANK": str(n)}, **pipes)
        for n in range(2)
    ]
    said = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    assert [out for out, _ in said] == ["True\n", "True\n"], said
    assert sum(err.count(BUILDS) for _, err in said) == 1
    assert calls(home) == 1
    assert list((home / "torchwhere").glob("building-*")) == [fresh]
    prepare()
    assert calls(home) == 1, "what is there is not built again"


CRASHES = "int PyInit_torchwhere_native(void) { return *(volatile int *)0; }"


def test_a_library_that_crashes_gets_no_name(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """It takes its trial's process with it, and not the job. It is said, and not tried again before
    `torchwhere native`."""
    monkeypatch.setenv(
        "CXX", compiler_that(home, f"echo '{CRASHES}' | cc -shared -fPIC -x c - -o $to")
    )
    for _ in range(2):
        prepare()
    path = loading.library()
    assert not path.exists()
    assert (
        loading.failure_file(path).read_text()
        == "the native part was built and crashes in its trial: SIGSEGV\n"
    )
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text.startswith(BUILDS) for text in said] == [True, False]
    assert said[1].endswith(
        "not try again by itself: the native part was built and crashes in its trial: SIGSEGV"
    )
    assert calls(home) == 1
    assert loading.native() is None


def test_what_failed_may_succeed_later(
    library: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torchwhere native` tries again, and what it builds is used from then on. Tried is it by any
    rank of a host."""
    prepare(is_first_of_host=False)
    failure = loading.failure_file(loading.library())
    assert failure.exists()
    monkeypatch.setenv("CXX", compiler_that(home, f"cp {library} $to"))
    assert build() == (loading.library(), True)
    assert not failure.exists()


def test_where_it_cannot_be_built_nothing_is_said(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """No compiler, no folder, a folder that is a file, switched off: a job begins at once, and
    nothing is tried."""
    for name, value in (
        ("CXX", "no-such-compiler"),
        ("XDG_CACHE_HOME", "not/absolute"),
        (loading.SWITCH, "0"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            prepare()
            assert loading.native() is None
    (home / "torchwhere").write_text("")
    prepare()
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ] == []
    assert calls(home) == 0


def test_a_job_does_not_wait_for_ever(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever builds it and does not come to an end keeps no other job from beginning."""
    monkeypatch.setattr(first_run, "_PATIENCE_S", 0.3)
    path = loading.library()
    path.parent.mkdir()
    with open(path.with_name(path.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepare()
        prepare(is_first_of_host=False)
    assert calls(home) == 0
    monkeypatch.setenv("CXX", compiler_that(home, "exec sleep 60"))
    prepare()
    assert (
        loading.failure_file(path).read_text() == "compiling the native part took longer than 0 s\n"
    )


Recorded = tuple[list[torch.Tensor], list[dict[str, Any]]]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda trained, events: (trained, events), None),
        (
            lambda trained, events: (trained, events[:-1]),
            "records something else than Python: more, or less",
        ),
        (
            lambda trained, events: (trained, [event | {"step": 7} for event in events]),
            "records something else than Python: ({",
        ),
        (lambda trained, events: ([one + 1 for one in trained], events), "changes what is trained"),
    ],
)
def test_its_trial(
    part: Any,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Any, Any], Recorded],
    why: str | None,
) -> None:
    """A small job, watched in both ways: what differs from Python's is told."""
    real = self_test._watched

    def watched(folder: Path, *, is_native: bool) -> Recorded:
        trained, events = real(folder, is_native=is_native)
        return spoil(trained, events) if is_native else (trained, events)

    with monkeypatch.context() as patch:
        patch.setattr(self_test, "_watched", watched)
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        # torch installs one of its own and leaves it
        patch.setattr(sys, "excepthook", sys.excepthook)
        with (
            pytest.raises(TorchwhereError, match=re.escape(why))
            if why
            else contextlib.nullcontext()
        ):
            self_test.try_out()


def test_there_is_nothing_to_check(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["native", "--check"]) == 2
    expected = (
        f"there is no native part to check at {loading.library()}: `torchwhere native` builds it"
    )
    assert capsys.readouterr().err == f"torchwhere: {expected}\n"


# -- its parts, against Python's -------------------------------------------------------------------


def test_records_are_pythons(part: Any) -> None:
    """The same fields make the same bytes, checksum and all; and the same record of a place."""
    chance = random.Random(0)
    ends = [1 << 8, 1 << 64, *[1 << 8] * 3, *[1 << 32] * 8, 1 << 64]
    natively, plainly = (BoxWriter(None, meta={}, records=16, native=used) for used in (part, None))
    for _ in range(300):
        fields = [chance.choice([0, end - 1, chance.randrange(end)]) for end in ends][
            : chance.randrange(2, 15)
        ]
        numbers = natively.record(*fields), plainly.record(*fields)
        assert numbers[0] == numbers[1]
        assert natively.copy_of(numbers[0]) == plainly.copy_of(numbers[0])
    place = (3, 123456789, 5 << 36 | 2 << 32 | 9, 9, 200)
    natively.make_place_record(lambda: 7)(*place)
    plainly.make_place_record(lambda: 7)(*place)
    assert natively.copy_of(300) == plainly.copy_of(300)
    natively.close()
    plainly.close()


@pytest.mark.parametrize(
    "fields", [(1,), (1,) * 15, (256, 0), (0, -1), (0, 0, 0, 0, 0, 1 << 32), (0, "now")]
)
def test_what_does_not_fit_is_no_record(part: Any, fields: tuple[Any, ...]) -> None:
    """Too many fields, or one that does not fit: an exception and no record, as ever."""
    box = BoxWriter(None, meta={}, records=16, native=part)
    with pytest.raises((TypeError, ValueError)):
        box.record(*fields)
    assert box.record(1, 1) == 0
    box.close()


def test_a_closed_box_takes_nothing(part: Any) -> None:
    """Nothing is written to a map that is gone."""
    box = BoxWriter(None, meta={}, records=16, native=part)
    box.close()
    with pytest.raises(ValueError, match="the box is closed"):
        box.record(1, 1)


def test_its_dict_is_a_dict(part: Any) -> None:
    """What it keeps numbers in answers as Python's dict does."""
    chance, plain, words = random.Random(1), {}, part.Words()
    for _ in range(4000):
        key, value = chance.randrange(300) << 36, chance.randrange(-(1 << 62), 1 << 62)
        if chance.random() < 0.6:
            plain[key] = words[key] = value
        elif chance.random() < 0.6:
            assert words.pop(key, None) == plain.pop(key, None)
        assert (words.get(key), words.get(key, 5)) == (plain.get(key), plain.get(key, 5))


def test_its_counts_are_a_dict(part: Any) -> None:
    """Calls are counted by their words as in Python's dict, and forgotten at once."""
    chance, plain, counts = random.Random(2), {}, part.Counts()
    for _ in range(20):
        for _ in range(200):
            word = chance.choice([5, 200, 1 << 20, chance.randrange(300)]) << 36 | 1 << 32
            assert counts.get(word, 0) == plain.get(word, 0)
            plain[word] = counts[word] = plain.get(word, 0) + 1
        plain.clear()
        counts.clear()


def test_both_sides_have_the_same_log(part: Any) -> None:
    """The length of a track's log stands in both languages."""
    assert part.LOG_LENGTH == LOG_LENGTH


def test_it_knows_pythons_frames(part: Any) -> None:
    """Which code runs is read off the interpreter: right here, and not mistaken for another."""
    assert part.check_frames(sys._getframe().f_code)
    assert not part.check_frames(train.__code__)


# -- the same job in both ways ---------------------------------------------------------------------

BUCKETS = 6


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.b, self.a(x), use_reentrant=self.reentrant)


def stacked(width: int = 64, **options: Any) -> DDP:
    layers = [nn.Linear(width, width, bias=False) for _ in range(BUCKETS)]
    return DDP(nn.Sequential(*layers), bucket_cap_mb=0.001, **options)


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 64)).sum().backward()
        torchwhere.step()


def plain_ddp() -> None:
    model = stacked()
    with torchwhere.watch(model):
        train(model, 8)


def mixed_with_other_calls() -> None:
    """Calls from Python on the same group, between the buckets' and inside a hook of a backward."""
    model = stacked()
    handle = model.module[2].weight.register_post_accumulate_grad_hook(
        lambda _p: dist.all_reduce(torch.ones(2))
    )
    with torchwhere.watch(model):
        for step in range(8):
            train(model, 1)
            dist.all_reduce(torch.ones(step + 1))
    handle.remove()


def accumulated() -> None:
    model = stacked()
    with torchwhere.watch(model):
        for _ in range(6):
            with model.no_sync():
                model(torch.ones(2, 64)).sum().backward()
            train(model, 1)


def unused_parameters() -> None:
    """Another parameter completes the bucket, from time to time: what is recorded follows it."""

    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
            out: torch.Tensor = (self.a(x), self.b(x), self.b(self.a(x)))[which]
            return out

    model = DDP(Choosing(), find_unused_parameters=True)
    with torchwhere.watch(model):
        for step in range(24):
            model(torch.ones(2, 8), step // 2 % 3).sum().backward()


def static_graph() -> None:
    model = stacked(static_graph=True)
    with torchwhere.watch(model):
        train(model, 8)


def two_models() -> None:
    """Two instances in one backward, and the second alone."""
    first, second = stacked(), stacked()
    with torchwhere.watch(first):
        for step in range(12):
            x = torch.ones(2, 64)
            (second(first(x)) if step % 2 else second(x)).sum().backward()


def hooked() -> None:
    """A communication hook in Python, given when the buckets are known already: from then on Python
    calls."""
    model = stacked()
    with torchwhere.watch(model):
        train(model, 8)
        model.register_comm_hook(None, reduce_in_python)
        train(model, 4)


def reduce_in_python(_state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with classes
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def recomputed() -> None:
    for reentrant in (False, True):
        model = DDP(Checkpointed(reentrant=reentrant))
        with torchwhere.watch(model):
            for _ in range(12):
                model(torch.ones(2, 8, requires_grad=True)).sum().backward()


def failing() -> None:
    """The note on an exception names the last collectives, whoever recorded them."""
    model = stacked()
    with torchwhere.watch(model):
        train(model, 8)
        dist.all_reduce(torch.ones(1))
        model(torch.ones(2, 64)).sum().backward()
        with pytest.raises(RuntimeError) as raised:
            model(torch.ones(2, 63))
    notes.append([note.partition("last collectives")[2] for note in raised.value.__notes__])


def optimize(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 64)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1e-9)


def optimized() -> None:
    """One optimizer, from two lines; then two, which count once; then the first alone again."""
    model = stacked()
    first, second = sgd(model), sgd(model)
    with torchwhere.watch(model):
        optimize(model, first, steps=6)
        model(torch.ones(2, 64)).sum().backward()
        first.step()
        optimize(model, first, second, steps=4)
        optimize(model, first, steps=4)


def optimized_in_backward() -> None:
    """The optimizer steps out of a hook: its step ends with the backward, which the native part may
    have begun."""
    model = stacked()
    optimizer = sgd(model)
    with torchwhere.watch(model):
        optimize(model, optimizer, steps=4)
        handle = model.module[0].weight.register_post_accumulate_grad_hook(
            lambda _p: optimizer.step()
        )
        optimize(model, steps=6)
        handle.remove()
        optimize(model, optimizer, steps=4)


def counted_by_the_user() -> None:
    """First the optimizer counts, then the user does, with numbers of their own too."""
    model = stacked()
    optimizer = sgd(model)
    with torchwhere.watch(model):
        optimize(model, optimizer, steps=5)
        torchwhere.step(5)
        for _ in range(5):
            optimize(model, optimizer, steps=1)
            torchwhere.step()
        torchwhere.step(100)
        optimize(model, optimizer, steps=2)
        with torchwhere.phase("last"):
            torchwhere.step()


def optimizer_failing() -> None:
    """A step that raises never reaches the hook after it: the next ones are told as ever."""

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            if closure is not None:
                raise RuntimeError
            super().step()

    model = stacked()
    optimizer = Failing(model.parameters(), lr=1e-9)
    with torchwhere.watch(model):
        for _ in range(3):
            optimize(model, optimizer, steps=3)
            with pytest.raises(RuntimeError):
                optimizer.step(lambda: None)
            torchwhere.note("after it")


def backwards_of_all_kinds() -> None:
    """One that makes a graph, one inside another, gradients without a backward, one from inside a
    module, one that fails."""

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                inner[0](torch.ones(2, 64)).sum().backward()
            return gradient

    class Failing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.autograd.grad(super().forward(x).sum(), self.weight)
            raise RuntimeError

    model, inner, x = (
        stacked(),
        nn.ModuleList([nn.Linear(64, 2), Failing(64, 2)]),
        torch.ones(2, 64, requires_grad=True),
    )
    with torchwhere.watch(model):
        for _ in range(4):
            train(model, 2)
            Inside.apply(inner[0](x)).sum().backward()
            (gradient,) = torch.autograd.grad((inner[0](x) ** 2).sum(), x, create_graph=True)
            gradient.sum().backward()
            with pytest.raises(RuntimeError):
                inner[1](x)


def others_come() -> None:
    """Between steps: a listener, a group, a second model, a forward under fake tensors, a
    compilation, a reset of compilers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.compiler.reset()  # compilations are numbered from 0
    model, others = stacked(), [stacked()]
    optimizer = sgd(model)

    def listened() -> None:
        with torchwhere.on_module(backward_enter=lambda _module, call: torchwhere.note(call.name)):
            optimize(model, optimizer, steps=2)

    def rehearsed() -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.module[0](torch.ones(2, 64))

    def compiled() -> None:
        torch.compile(eval("lambda x: x + 1"), backend="eager")(torch.ones(1))

    def another() -> None:
        optimize(others[0], sgd(others[0]), steps=3)

    with torchwhere.watch(model):
        for come in (
            listened,
            lambda: dist.new_group([0]),
            another,
            rehearsed,
            compiled,
            torch.compiler.reset,
            compiled,
        ):
            optimize(model, optimizer, steps=4)
            come()
        optimize(model, optimizer, steps=2)


notes: list[list[str]] = []
JOBS = (
    plain_ddp,
    mixed_with_other_calls,
    accumulated,
    unused_parameters,
    static_graph,
    two_models,
    hooked,
    recomputed,
    failing,
    optimized,
    optimized_in_backward,
    counted_by_the_user,
    optimizer_failing,
    backwards_of_all_kinds,
    others_come,
)


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """A new one for every job: collectives are counted from 0."""
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def events_of(
    job: Callable[[], None], folder: Path, monkeypatch: pytest.MonkeyPatch, *, native: bool
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    with monkeypatch.context() as patch, group_of_one():
        patch.setenv(loading.SWITCH, str(int(native)))
        with torchwhere.watch(out=folder, module_events=True):
            job()
    box = read_box(folder / "rank0.box")
    assert (box.counts.torn, box.problems) == (0, [])
    found = [event.to_dict() | {"record": event.number} for event in box.events()]
    steps = phase_sums(box)[PhaseKey((), is_main=True)]
    found.append({"steps": steps.count, "running": steps.running})
    return [
        {key: value for key, value in event.items() if key not in ("t_ns", "duration_ns")}
        for event in found
    ]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_the_same_is_recorded(
    job: Callable[[], None], part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every event of a job is the same with the native part and without, apart from its time."""
    notes.clear()
    natively = events_of(job, tmp_path / "native", monkeypatch, native=True)
    recorded = part.recorded()
    plainly = events_of(job, tmp_path / "python", monkeypatch, native=False)
    assert natively == plainly
    assert recorded > 0
    assert notes[:1] == notes[1:]


STEP = {  # what of ours in Python a step takes that is like the one before
    "make_wrapper.<locals>.__call__",
    "BackwardHook._make_wrapper.<locals>._engine_run_backward",
    "OptimizerHook._make_before.<locals>.before",
    "OptimizerHook._make_after.<locals>.after",
}


def test_a_step_needs_no_more_python(
    part: Any, one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step that is like the one before, all of ours that is Python are the hooks
    themselves."""
    # in its presence a call from outside may be a rehearsal
    monkeypatch.delitem(sys.modules, PIPELINING, raising=False)
    model, home = stacked(), str(Path(torchwhere.__file__).parent)
    optimizer, found = sgd(model), []

    def look(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(home):
            found[-1].add(frame.f_code.co_qualname)

    with torchwhere.watch(model, out=tmp_path):
        optimize(model, optimizer, steps=12)
        # once a second Python looks whether the file is there: not three times in a row
        for _ in range(3):
            found.append(set())
            sys.setprofile(look)
            optimize(model, optimizer, steps=1)
            sys.setprofile(None)
    assert min(found, key=len) == STEP


def test_a_tap_hears_every_collective(part: Any, one_rank: None) -> None:
    """`comms()` is told of the buckets too, though the kernel knows them; when it is over they are
    the kernel's again."""
    model = stacked()
    with torchwhere.watch(model):
        train(model, 6)
        before = part.recorded()
        assert before > 0
        with torchwhere.comms() as found:
            train(model, 2)
        assert part.recorded() == before
        assert sum(found.counts.values()) == 2 * BUCKETS
        train(model, 1)
        assert part.recorded() == before + BUCKETS


# -- threads, ends and deaths ----------------------------------------------------------------------


@pytest.fixture
def ddp_on_threads(one_rank: None) -> Iterator[None]:
    """DDP notes in its class which instance is in its forward, and puts back what it found: threads
    put back each other's."""
    yield
    DDP._active_ddp_module = None


def test_sixteen_threads(part: Any, ddp_on_threads: None, tmp_path: Path) -> None:
    """Sixteen backwards at once, none of them holding the GIL: no record is lost, torn or counted
    twice."""
    models = [stacked() for _ in range(16)]
    [train(model, 3) for model in models]  # their buckets are what they will be
    steps, failed = 25, []

    def work(model: nn.Module) -> None:
        try:
            for _ in range(steps):
                model(torch.ones(2, 64)).sum().backward()
        except Exception as error:
            failed.append(error)

    with torchwhere.watch(out=tmp_path, records=1 << 14):
        threads = [threading.Thread(target=work, args=(model,)) for model in models]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        recorded = part.recorded()
    assert failed == []
    box = read_box(tmp_path / "rank0.box")
    assert (box.counts.torn, box.counts.overwritten, box.problems) == (0, 0, [])
    events = list(box.events())
    assert [event.number for event in events] == list(range(len(events)))
    collectives = [event for event in events if event.kind == "collective"]
    numbers = sorted(event.fields["number"] for event in collectives)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert len(collectives) == 16 * steps * BUCKETS
    # Alone Python sees a bucket twice; with others reducing meanwhile it may have to look once
    # more.
    assert 2 * recorded > 16 * steps * BUCKETS, recorded


def test_started_and_stopped_a_hundred_times(part: Any, one_rank: None) -> None:
    """A hundred watches leave nothing: no track, no map, no kernel; the model trains on between
    them."""
    model, kinds = stacked(), (part.Box, part.Buckets, part.Calls, part.ThreadTrack, part.Words)

    def left() -> int:
        gc.collect()
        return sum(isinstance(thing, kinds) for thing in gc.get_objects())

    def watch_once() -> int:
        with torchwhere.watch(model):
            for _ in range(3):
                model(torch.ones(2, 64)).sum().backward()
            recorded = int(part.recorded())
        model(torch.ones(2, 64)).sum().backward()
        return recorded

    assert sum(watch_once() for _ in range(3)) > 0
    # torch keeps the last Python kernels that were taken off, and with them what they need
    before = left()
    assert sum(watch_once() for _ in range(100)) > 100
    assert left() <= before


def test_stopped_while_others_run(part: Any, ddp_on_threads: None) -> None:
    """A watch may end at any moment of a backward that runs on other threads: nobody writes to a
    map that is gone."""
    models, failed, over = [stacked() for _ in range(3)], [], threading.Event()
    # DDP has built its buckets anew, for which it broadcasts: not through our kernel
    [train(model, 3) for model in models]

    def work(model: nn.Module) -> None:
        try:
            while not over.is_set():
                model(torch.ones(2, 64)).sum().backward()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    [thread.start() for thread in threads]
    for _ in range(25):
        with torchwhere.watch():
            time.sleep(0.02)
    over.set()
    [thread.join() for thread in threads]
    assert failed == []
    with torchwhere.watch():  # takes back the kernels that were left
        pass


PRELUDE = """
import json, os, signal, sys, time, torch, torch.distributed as dist, torchwhere, logging
from pathlib import Path
from torch import nn
from torchwhere.native.load import native
torch.set_num_threads(1)
folder = Path(sys.argv[1])
logging.basicConfig(level=logging.WARNING, format="%(message)s")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.001)
def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 64)).sum().backward()
def say(**facts):
    os.write(1, json.dumps(facts).encode() + b"\\n")
"""


KILLED = """
torchwhere.start(model, out=folder, module_events=True)
train(12)
say(recorded=native().recorded())
sys.stdin.readline()
train(1 << 30)
"""

TRUNCATED = """
torchwhere.start(model, out=folder)
train(12)
before = native().recorded()
os.truncate(folder / "rank0.box", 4096)
train(3)
say(more=native().recorded() - before)
time.sleep(0.2)
torchwhere.stop()
train(1)
say(alive=True)
"""

NAMES = ("parent", "child")
FORKED = """
torchwhere.start(model, out=folder / "parent")
train(12)
child = os.fork()
if not child:
    x = torch.ones(4)
    assert native().recorded() > 0
    with torchwhere.watch(out=folder / "child"):
        layers[0](torch.ones(2, 64))
        torchwhere.note("from the child")
    os._exit(0)
status = os.waitpid(child, 0)[1]
before = native().recorded()
train(2)
say(status=status, more=native().recorded() - before)
torchwhere.stop()
"""

Child = tuple[Path, subprocess.Popen[str]]


@pytest.fixture(scope="module")
def children(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Child]]:
    """A process for each of these, with its folder. All are begun as soon as there is a library:
    they take a while."""
    env = os.environ | {"XDG_CACHE_HOME": str(library.parent.parent), loading.SWITCH: "1"}
    started: dict[str, Child] = {}
    for code in (KILLED, TRUNCATED, FORKED):
        folder = tmp_path_factory.mktemp("child")
        line = [sys.executable, "-c", PRELUDE + code, str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(line, text=True, env=env, **pipes)
        started[code] = folder, process
    yield started
    for _, process in started.values():
        with process:
            process.kill()


def test_killed(children: dict[str, Child]) -> None:
    """Killed while it writes: every record up to the last is there and whole."""
    folder, process = children[KILLED]
    assert process.stdout is not None
    assert process.stdin is not None
    assert json.loads(process.stdout.readline())["recorded"] > 0
    print(file=process.stdin, flush=True)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    box = read_box(folder / "rank0.box")
    numbers = [event.number for event in box.events()]
    assert box.counts.torn <= 1, "the one under way when it was killed"
    assert box.problems == []
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert len(numbers) > 500


def test_truncated_under_the_kernel(children: dict[str, Child]) -> None:
    """Somebody cuts the file while the kernel stores to it, without the GIL: the job goes on, and
    says that it lost its box."""
    _, process = children[TRUNCATED]
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert [json.loads(line) for line in out.splitlines()] == [{"more": 18}, {"alive": True}]
    assert (
        "was truncated by another process; the job continues, this rank is no longer recorded"
        in err
    )


def test_forked(children: dict[str, Child]) -> None:
    """A forked child leaves the parent's box alone and watches natively by itself; the parent goes
    on."""
    folder, process = children[FORKED]
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert json.loads(out) == {"status": 0, "more": 12}
    noted = {
        name: [e.fields["text"] for e in torchwhere.read_run(folder / name).events(kinds={"note"})]
        for name in NAMES
    }
    assert noted == {"parent": [], "child": ["from the child"]}
