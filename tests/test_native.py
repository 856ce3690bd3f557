"""The native extension: built for real into its own cache, and compared with the Python code that it
replaces.

`library` (in `conftest.py`) builds it once. `watched(job, native=...)` returns what the same job
records with it and without it.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import gc
import json
import logging
import mmap
import os
import random
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import torchwhere
from torchwhere.blackbox.phase_sums import PhaseKey, phase_sums
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.cli import main
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.events import Kind
from torchwhere.hooks.modules import PIPELINING
from torchwhere.hooks.threads import LOG_LENGTH
from torchwhere.native import first_run, self_test
from torchwhere.native import load as loading
from torchwhere.native.build import build
from torchwhere.native.first_run import prepare
from torchwhere.pipeline.verdict import diagnose_folder
from warm_python import WarmPython

PATIENCE_S = 400


@pytest.fixture
def cache(library: Path, children: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let this process find that library and use it."""
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
    """Without a compiler, the command prints one line that says what to do."""
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert main(["native"]) == 2
    assert (
        capsys.readouterr().err
        == "torchwhere: no C++ compiler found (no-such-compiler): install g++, or set CXX to a"
        " compiler\n"
    )


def test_with_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error contains the errors of the compiler, and no file is left."""
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
        == "the compiler could not build the native extension: native.cpp:1: error: boom"
    )
    assert list((tmp_path / "torchwhere").iterdir()) == []


def test_without_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Python.h, the error says where it was expected."""
    real = sysconfig.get_path
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        patch.setattr(
            sysconfig, "get_path", lambda name: "/nowhere" if name == "include" else real(name)
        )
        with pytest.raises(TorchwhereError) as raised:
            build()
    expected = (
        "Python.h not found (/nowhere/Python.h): install the Python headers (python3-dev,"
        " python3-devel)"
    )
    assert str(raised.value) == expected


def test_where_it_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the cache folder is a file, one sentence says so."""
    (tmp_path / "torchwhere").write_text("")
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(TorchwhereError) as raised:
            build()
    assert (
        str(raised.value)
        == f"the native extension cannot be written to {tmp_path}/torchwhere: File exists"
    )


def test_it_is_built_once(
    library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints the path of the library; a second call does not build it again."""
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
    """The file name contains version and commit of torch, the ABI of Python and a hash of the
    sources."""
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
        (lose_checksum, "the checksum file of"),
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
    """A library that is damaged, truncated or replaced is refused with one warning, and Python
    records."""
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
    assert "`torchwhere native --anew` builds the extension again" in said[0]
    assert [event.kind for event in torchwhere.read_run(tmp_path / "run").events()].count(
        "note"
    ) == 1
    monkeypatch.undo()


def test_a_library_for_another_torch_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renamed library is refused, because it contains what it was built for."""
    with monkeypatch.context() as patch:
        patch.setattr(loading, "built_for", lambda: "another")
        with pytest.raises(loading.RefusedLibraryError, match=r"was built for .*, this is another"):
            loading.load(next(path for path in cache.iterdir() if path.suffix == ".so"))


def test_it_can_be_switched_off(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TORCHWHERE_NATIVE=0 a watch does not use the library."""
    with monkeypatch.context() as patch:
        patch.setenv(loading.SWITCH, "0")
        assert loading.native() is None
    assert loading.native() is part


def test_a_watch_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch does not build a missing library."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        patch.setenv(loading.SWITCH, "1")
        with torchwhere.watch(nn.Linear(2, 2)):
            pass
    assert list(tmp_path.iterdir()) == []


# -- before a job ----------------------------------------------------------------------------------

SCRIPT = "from torchwhere.native.load import native; print(native() is not None)"
BUILDS = "torchwhere: building the native extension"


def compiler_that(folder: Path, does: str) -> str:
    """Return the command of a fake compiler that runs a shell line; `$to` is its output file. Each
    call appends a line to `calls`."""
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
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, for this process and its children."""
    # Not a context of its own: a test that changes CXX too would restore it to this value.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(loading.SWITCH, "1")
    monkeypatch.setenv("CXX", compiler_that(tmp_path, "exit 1"))
    return tmp_path


def test_run_builds_it_before_the_script(library: Path, home: Path) -> None:
    """One of two ranks builds and logs it, the other one waits, and both use the library. Folders
    of killed builds are deleted."""
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
    """A library that crashes ends the process of its test and not the job. The log says so, and only
    `torchwhere native` tries again."""
    monkeypatch.setenv(
        "CXX", compiler_that(home, f"echo '{CRASHES}' | cc -shared -fPIC -x c - -o $to")
    )
    for _ in range(2):
        prepare()
    path = loading.library()
    assert not path.exists()
    assert (
        loading.failure_file(path).read_text()
        == "the native extension was built, but crashed in its test: SIGSEGV\n"
    )
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text.startswith(BUILDS) for text in said] == [True, False]
    assert said[1] == (
        "torchwhere: running without the native extension: the native extension was built, but"
        " crashed in its test: SIGSEGV. Runs do not try again; `torchwhere native` builds it."
    )
    assert calls(home) == 1
    assert loading.native() is None


def test_what_failed_may_succeed_later(
    library: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed build, `torchwhere native` builds again, and the library is used from then on.
    Any rank of a host may build."""
    prepare(is_first_of_host=False)
    failure = loading.failure_file(loading.library())
    assert failure.exists()
    monkeypatch.setenv("CXX", compiler_that(home, f"cp {library} $to"))
    assert build() == (loading.library(), True)
    assert not failure.exists()


def test_where_it_cannot_be_built_nothing_is_said(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Without compiler or folder, or if switched off, a job starts at once, and no build is
    tried."""
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
    """A build that hangs, in this process or in another one, does not keep a job from starting."""
    monkeypatch.setattr(first_run, "_MAX_WAIT_S", 0.3)
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
        loading.failure_file(path).read_text()
        == "compiling the native extension took longer than 0 s\n"
    )


Recorded = tuple[list[torch.Tensor], list[dict[str, Any]]]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda trained, events: (trained, events), None),
        (
            lambda trained, events: (trained, events[:-1]),
            "does not record the same as Python: ",
        ),
        (
            lambda trained, events: (trained, [event | {"step": 7} for event in events]),
            "does not record the same as Python: ({",
        ),
        (
            lambda trained, events: ([param + 1 for param in trained], events),
            "changes the trained parameters",
        ),
    ],
)
def test_its_trial(
    part: Any,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Any, Any], Recorded],
    why: str | None,
) -> None:
    """The self-test reports a library that records or trains something else than Python."""
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


def test_its_trial_frees_the_model_before_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """If DDP frees its group, torch waits for a thread of gloo with the GIL held: a deadlock, if that
    thread frees a tensor."""
    real, reducers, left = dist.destroy_process_group, weakref.WeakSet[Any](), []

    def destroy() -> None:
        left.append(len(reducers))
        real()

    def watched() -> Iterator[None]:
        yield
        reducers.update(ddp.reducer for ddp in gc.get_objects() if isinstance(ddp, DDP))

    with monkeypatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", destroy)
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setattr(sys, "excepthook", sys.excepthook)
        self_test._train(contextlib.contextmanager(watched)())
    assert left == [0]


def test_there_is_nothing_to_check(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a library, `torchwhere native --check` says how to build one."""
    assert main(["native", "--check"]) == 2
    expected = (
        f"the native extension is missing ({loading.library()}): build it with `torchwhere native`"
    )
    assert capsys.readouterr().err == f"torchwhere: {expected}\n"


# -- its parts, against Python's -------------------------------------------------------------------


def test_records_are_pythons(part: Any) -> None:
    """The same fields give the same bytes as in Python, including the checksum; also for a record
    with only a place."""
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
    """Too many fields, or a value that does not fit, raise an exception and write no record, as in
    Python."""
    box = BoxWriter(None, meta={}, records=16, native=part)
    with pytest.raises((TypeError, ValueError)):
        box.record(*fields)
    assert box.record(1, 1) == 0
    box.close()


def test_a_closed_box_takes_nothing(part: Any) -> None:
    """A closed box raises an exception and writes nothing."""
    box = BoxWriter(None, meta={}, records=16, native=part)
    box.close()
    with pytest.raises(ValueError, match="the box is closed"):
        box.record(1, 1)


def test_its_dict_is_a_dict(part: Any) -> None:
    """`IntMap` answers like a dict of Python."""
    chance, plain, words = random.Random(1), {}, part.IntMap()
    for _ in range(4000):
        key, value = chance.randrange(300) << 36, chance.randrange(-(1 << 62), 1 << 62)
        if chance.random() < 0.6:
            plain[key] = words[key] = value
        elif chance.random() < 0.6:
            assert words.pop(key, None) == plain.pop(key, None)
        elif chance.random() < 0.01:
            plain.clear()
            words.clear()
        assert (words.get(key), words.get(key, 5)) == (plain.get(key), plain.get(key, 5))


def test_its_counts_are_a_dict(part: Any) -> None:
    """`Counts` counts calls by packed place like a dict of Python, and `clear` resets all."""
    chance, plain, counts = random.Random(2), {}, part.Counts()
    for _ in range(20):
        for _ in range(200):
            word = chance.choice([5, 200, 1 << 20, chance.randrange(300)]) << 36 | 1 << 32
            assert counts.get(word, 0) == plain.get(word, 0)
            plain[word] = counts[word] = plain.get(word, 0) + 1
        plain.clear()
        counts.clear()


def test_the_stub_has_the_names_of_the_module(part: Any) -> None:
    """The stub for the type checker has exactly the names of the built module and of its classes."""
    stub = ast.parse((loading.SOURCES / "extension.pyi").read_text())
    classes = {node.name: _names_in(node) for node in stub.body if isinstance(node, ast.ClassDef)}
    assert _names_in(stub) == _public(dir(part))
    assert classes.keys() == {name for name in dir(part) if isinstance(getattr(part, name), type)}
    for name, members in classes.items():
        cls = getattr(part, name)
        assert _public(members) == _public(vars(cls)), name
        assert {member for member in members if not hasattr(cls, member)} == set(), name
        assert ("__new__" in members) == ("__new__" in vars(cls)), name


def _names_in(node: ast.Module | ast.ClassDef) -> set[str]:
    """The public names and methods that a stub declares."""
    declared = [child for child in node.body if isinstance(child, ast.AnnAssign)]
    targets = {child.target.id for child in declared if isinstance(child.target, ast.Name)}
    return targets | {
        child.name for child in node.body if isinstance(child, (ast.ClassDef, ast.FunctionDef))
    }


def _public(names: Iterable[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_memory_needs_an_accelerator(part: Any) -> None:
    """The allocator of the CPU keeps no statistics: nothing is sampled, and no record is written."""
    box = part.Box(mmap.mmap(-1, 1 << 16), 0, 16)
    assert part.memory_begin("cpu", 0, int(Kind.MEMORY)) is False
    part.memory_record(box, 0, 0)
    assert part.memory_now() is None
    part.memory_end()
    assert box.record(1, 2) == 0
    box.close()


def test_both_sides_have_the_same_log(part: Any) -> None:
    """The log of a track has the same length in C++ and in Python."""
    assert part.LOG_LENGTH == LOG_LENGTH


def test_it_knows_pythons_frames(part: Any) -> None:
    """`check_frames` recognizes the running code, and no other."""
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
    """Calls from Python on the same group, between the buckets and inside a hook of a backward."""
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
    """Sometimes another parameter completes the bucket, and the records show it."""

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
    """Two DDP instances in one backward, then the second one alone."""
    first, second = stacked(), stacked()
    with torchwhere.watch(first):
        for step in range(12):
            x = torch.ones(2, 64)
            (second(first(x)) if step % 2 else second(x)).sum().backward()


def hooked() -> None:
    """A communication hook in Python, set when the buckets are known: from then on Python issues
    the calls."""
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
    """The note on an exception names the last collectives, whether C++ or Python recorded them."""
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
    """One optimizer, called from two lines; then two optimizers, which make one step; then the
    first one alone."""
    model = stacked()
    first, second = sgd(model), sgd(model)
    with torchwhere.watch(model):
        optimize(model, first, steps=6)
        model(torch.ones(2, 64)).sum().backward()
        first.step()
        optimize(model, first, second, steps=4)
        optimize(model, first, steps=4)


def optimized_in_backward() -> None:
    """The optimizer steps in a hook of a backward, which the extension may have begun: the step
    ends with the backward."""
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
    """First the optimizer counts steps, then the user, also with numbers of their own."""
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
    """An optimizer step that raises does not reach the hook after it; the next steps are recorded
    as usual."""

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
    """A backward that creates a graph, one inside another one, `autograd.grad`, one inside a
    module, and one that fails."""

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
    """Between steps come a listener, a group, a second model, a forward with fake tensors, a
    compilation, and a reset of the compiler."""
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
    """A new process group for every job, so that collectives count from 0."""
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
    """A job records the same events with the native extension and without it, except for times."""
    notes.clear()
    natively = events_of(job, tmp_path / "native", monkeypatch, native=True)
    recorded = part.recorded()
    plainly = events_of(job, tmp_path / "python", monkeypatch, native=False)
    assert natively == plainly
    assert recorded > 0
    assert notes[:1] == notes[1:]


STEP = {  # what of ours in Python a step takes that is like the one before
    "Module._wrapped_call_impl",
    "_engine_run_backward",
    "OptimizerHook._make_before.<locals>.before",
    "OptimizerHook._make_after.<locals>.after",
}


def test_a_step_needs_no_more_python(
    part: Any, one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step like the one before, the hooks themselves are the only Python code of torchwhere
    that runs."""
    # in its presence a call from outside may be a rehearsal
    monkeypatch.delitem(sys.modules, PIPELINING, raising=False)
    model, home = stacked(), str(Path(torchwhere.__file__).parent)
    optimizer, found = sgd(model), []

    def look(frame: FrameType, event: str, _argument: object) -> None:
        # a wrapper has the file of the function that it wraps
        is_ours = frame.f_code.co_filename.startswith(home) or frame.f_code in wrappers
        if event == "call" and is_ours:
            found[-1].add(frame.f_code.co_qualname)

    with torchwhere.watch(model, out=tmp_path):
        optimize(model, optimizer, steps=12)
        wrappers = {nn.Module.__call__.__code__, torch.autograd._engine_run_backward.__code__}
        # once a second Python looks whether the file is there: not three times in a row
        for _ in range(3):
            found.append(set())
            sys.setprofile(look)
            optimize(model, optimizer, steps=1)
            sys.setprofile(None)
    assert min(found, key=len) == STEP


def test_a_tap_hears_every_collective(part: Any, one_rank: None) -> None:
    """`comms()` also counts the buckets that the kernel knows; afterwards the kernel records them
    again."""
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


def test_buckets_of_a_group_that_a_mesh_names(part: Any, one_rank: None) -> None:
    """A mesh may get the group of a DDP instance. Then known buckets have its name in the mesh."""
    meshes = []

    def job() -> None:
        model = stacked()
        for step in range(20):
            if step == 10:
                meshes.append(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("inner",)))
                dist.new_group([0])  # the names of groups are read when there is a new one
            train(model, 1)
        raise ValueError("stop")

    group = dist.group.WORLD
    with pytest.raises(ValueError, match="stop") as raised, torchwhere.watch():
        job()
    (note,) = raised.value.__notes__
    assert re.search(r"collectives: (all_reduce #\d+ on inner(, |$)){3}", note)
    assert part.recorded() > 0


# -- threads, ends and deaths ----------------------------------------------------------------------


@pytest.fixture
def ddp_on_threads(one_rank: None) -> Iterator[None]:
    """DDP stores in its class which instance runs its forward, and restores the value before:
    threads would restore the values of each other."""
    yield
    DDP._active_ddp_module = None


def test_sixteen_threads(part: Any, ddp_on_threads: None, tmp_path: Path) -> None:
    """Sixteen backwards at the same time, without the GIL: no record is lost, torn or counted
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
    """A hundred watches leave no track, map or kernel, and the model trains on between them."""
    model, kinds = stacked(), (part.Box, part.Buckets, part.Calls, part.ThreadTrack, part.IntMap)

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
    """A watch may end at any moment of a backward on another thread: no thread writes to a map that
    is gone."""
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


ENDED_BY_AN_ATTRIBUTE = """
class Ending(torch.nn.Linear):
    ends = False
    @property
    def training(self):
        if Ending.ends:
            torchwhere.stop()
        return False
    @training.setter
    def training(self, value):
        pass
model = Ending(2, 2)
torchwhere.start(out=sys.argv[1])
with torch.no_grad():
    model(torch.ones(2))
    Ending.ends = True
    model(torch.ones(2))
"""

ENDED_BY_THE_COLLECTOR = """
class Ending:
    def __init__(self):
        self.cycle = self
    def __del__(self):
        torchwhere.stop()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
gc.disable()
for threshold in range(2, 9):  # the collector runs a little later each time
    torchwhere.start(out=f"{sys.argv[1]}/{threshold}")
    for step in range(8):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if step == 7:
            gc.collect()
            Ending()
            gc.set_threshold(threshold)
            gc.enable()
        torchwhere.step()
    gc.disable()
    gc.collect()
"""


@pytest.mark.parametrize("code", [ENDED_BY_AN_ATTRIBUTE, ENDED_BY_THE_COLLECTOR])
def test_ended_inside_the_extension(
    code: str, library: Path, warm: WarmPython, tmp_path: Path
) -> None:
    """Code that runs in the middle of a function of the extension may end the watch: an attribute of
    a module, or a finalizer."""
    env = os.environ | {"XDG_CACHE_HOME": str(library.parent.parent), loading.SWITCH: "1"}
    program = "import gc, sys, torch, torchwhere\n" + code
    done = warm.run("-c", program, tmp_path / "run", env=env)
    assert done.returncode == 0, done.stderr


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

EXITED = """
torchwhere.start(model, out=folder)
train(2)
sys.exit("no data")
"""

Child = tuple[Path, subprocess.Popen[str]]


@pytest.fixture(scope="module")
def children(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Child]]:
    """One process for each of these programs, with its folder. All start as soon as the library is
    built: they take a while."""
    env = os.environ | {"XDG_CACHE_HOME": str(library.parent.parent), loading.SWITCH: "1"}
    started: dict[str, Child] = {}
    for code in (KILLED, TRUNCATED, FORKED, EXITED):
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
    """A process killed while it writes leaves every record up to the last one, complete."""
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
    """If the file is truncated while the kernel writes without the GIL, the job goes on, and a
    warning says that the box is lost."""
    _, process = children[TRUNCATED]
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert [json.loads(line) for line in out.splitlines()] == [{"more": 18}, {"alive": True}]
    assert (
        "was truncated by another process; the job continues, this rank is no longer recorded"
        in err
    )


def test_forked(children: dict[str, Child]) -> None:
    """A forked child does not touch the box of its parent and can watch natively itself; the parent
    goes on."""
    folder, process = children[FORKED]
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert json.loads(out) == {"status": 0, "more": 12}
    noted = {
        name: [e.fields["text"] for e in torchwhere.read_run(folder / name).events(kinds={"note"})]
        for name in NAMES
    }
    assert noted == {"parent": [], "child": ["from the child"]}


def test_exit_code(children: dict[str, Child]) -> None:
    """The box of a process that ends itself with `sys.exit` has its exit code, so the doctor does
    not call the job healthy."""
    folder, process = children[EXITED]
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "no data" in err) == (1, True), err
    *_, end = torchwhere.read_run(folder).events()
    assert (end.kind, end.fields["reason"]) == ("end", "exit 1")
    verdict = diagnose_folder(folder)
    assert (verdict.kind, verdict.culprits) == ("dead", (0,))
