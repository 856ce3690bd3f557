"""Printing and logging from many ranks: complete lines, the right ranks, a file for each, records
with their place."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchwhere
from models import Model, batch
from rank_pool import Pool
from torchwhere.api import printing, rank_logging
from torchwhere.api.printing import get_rank, print_rank, rank_log
from torchwhere.core import locked_write

ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("PYTHONUNBUFFERED", "RANK", "WORLD_SIZE")
}


@pytest.fixture(autouse=True)
def files_closed() -> Iterator[None]:
    yield
    printing.close_logs()


@pytest.fixture
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def python(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    # Since Python 3.12 a fork beside threads warns.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, *arguments]
    return subprocess.run(
        command, env=ENVIRONMENT, text=True, capture_output=True, timeout=400, **options
    )


# -- whole lines -----------------------------------------------------------------------------------

# Prints texts of many lines, some larger than a pipe's buffer. Each line has the rank and the
# number of its text.
WRITER = """
import os, sys
from torchwhere import print_rank
rank, texts = os.environ["RANK"], int(sys.argv[1])
for text in range(texts):
    print(f"<plain {rank} {text}>")
    print_rank("\\n".join(f"{text} {line} " + "x" * 100 for line in range(700 if text % 4 == 0 else 5)), ranks="all")
"""


def assert_whole(lines: list[str], *, processes: int, texts: int) -> None:
    """Check that every text is complete, with its lines together and in order."""
    expected = {
        f"[{rank}] {text} 0 {'x' * 100}" for rank in range(processes) for text in range(texts)
    }
    at = 0
    while at < len(lines):
        if lines[at].startswith("<plain"):
            at += 1
            continue
        rank, text, line, _ = lines[at].split(" ")
        assert line == "0"
        length = 700 if int(text) % 4 == 0 else 5
        assert lines[at : at + length] == [
            f"{rank} {text} {number} {'x' * 100}" for number in range(length)
        ]
        expected.discard(lines[at])
        at += length
    assert expected == set()


@pytest.mark.parametrize("destination", ["pipe", "file", "append"])
def test_texts_of_many_processes_are_never_torn(destination: str, tmp_path: Path) -> None:
    """Four processes print long texts of many lines into one pipe or file at once: every text stays
    in one piece."""
    processes, texts, path = 4, 12, tmp_path / "out.txt"
    reading, writing = os.pipe()
    if destination != "pipe":
        os.close(writing)
        writing = os.open(
            path, os.O_CREAT | os.O_WRONLY | (os.O_APPEND if destination == "append" else 0)
        )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(texts)],
            stdout=writing,
            env=ENVIRONMENT | {"RANK": str(rank)},
        )
        for rank in range(processes)
    ]
    os.close(writing)
    with open(reading) as pipe:
        printed = pipe.read()
    assert [writer.wait(60) for writer in writers] == [0] * processes
    if destination != "pipe":
        printed = path.read_text()
    assert_whole(printed.splitlines(), processes=processes, texts=texts)


def _print_to(path: Path, texts: int) -> None:
    with open(path, "a") as file:
        for text in range(texts):
            print_rank(
                "\n".join(
                    f"{text} {line} {'x' * 100}" for line in range(700 if text % 4 == 0 else 5)
                ),
                ranks="all",
                file=file,
            )
            print_rank("never", ranks=7, file=file)
    dist.barrier()


def test_real_ranks_print_whole(two_ranks: Pool, tmp_path: Path) -> None:
    """The ranks of a job print to one file, each under its own number."""
    two_ranks.run(_print_to, tmp_path / "out.txt", 8)
    assert_whole((tmp_path / "out.txt").read_text().splitlines(), processes=2, texts=8)


@pytest.mark.parametrize("kind", ["pipe", "text"])
def test_threads_print_whole(kind: str, no_rank: None) -> None:
    """Threads of one process do not mix their texts, for every kind of stream."""
    reading, writing = os.pipe()
    file = open(writing, "w") if kind == "pipe" else io.StringIO()  # noqa: SIM115

    def write(who: int) -> None:
        for _ in range(20):
            print_rank(f"{who}\n" * 20, file=file, end="")

    threads = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    printed = file.getvalue() if isinstance(file, io.StringIO) else ""
    file.close()
    with contextlib.suppress(OSError):
        os.close(writing)
    with open(reading) as pipe:
        printed += pipe.read()
    lines = printed.splitlines()
    assert len(lines) == 1600
    assert all(len(set(lines[at : at + 20])) == 1 for at in range(0, 1600, 20))


def test_without_locks_it_still_prints(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Printing works without fcntl, without a temporary folder, and on a file system without
    locks."""
    monkeypatch.setattr(locked_write, "fcntl", None)
    print_rank("no fcntl")
    monkeypatch.undo()
    monkeypatch.setattr(locked_write, "_lock", locked_write._HostLock())
    monkeypatch.setattr(locked_write, "lock_path", lambda: str(tmp_path / "gone" / "lock"))
    print_rank("no folder")
    monkeypatch.setattr(locked_write, "_lock", locked_write._HostLock())
    monkeypatch.setattr(locked_write, "lock_path", lambda: "/proc/self/mem")
    print_rank("no locks")
    assert capfd.readouterr().out == "[0] no fcntl\n[0] no folder\n[0] no locks\n"


HOLDER = """
import sys, time
from torchwhere.core import locked_write
with locked_write._lock.held(int(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_dead_or_stopped_process_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While another process holds the lock nothing is printed; the wait for a stopped process is
    limited, and a dead one does not block."""
    monkeypatch.setattr(locked_write, "_lock", locked_write._HostLock())
    reading, writing = os.pipe()
    command = [sys.executable, "-c", HOLDER, str(writing)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[writing]) as holder,
        open(writing, "w") as file,
    ):
        assert holder.stdout is not None
        holder.stdout.readline()
        monkeypatch.setattr(locked_write._lock, "_patience_s", 0.3)
        start = time.monotonic()
        print_rank("waited", file=file)
        assert time.monotonic() - start >= 0.3
        holder.kill()
        holder.wait()
        monkeypatch.setattr(locked_write._lock, "_patience_s", 60.0)
        print_rank("at once", file=file)
    with open(reading) as pipe:
        assert pipe.read() == "[0] waited\n[0] at once\n"


def test_a_pipe_that_does_not_block_is_waited_for() -> None:
    """A full non-blocking stdout costs time, not text."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    chunks: list[str] = []

    def read_late() -> None:
        time.sleep(0.05)
        with open(reading) as pipe:
            chunks.append(pipe.read())

    reader = threading.Thread(target=read_late)
    reader.start()
    with open(writing, "w") as file:
        print_rank("x" * 300_000, file=file)
    reader.join()
    assert chunks == [f"[0] {'x' * 300_000}\n"]


def test_what_was_printed_before_comes_before(tmp_path: Path) -> None:
    """Earlier text in Python's buffer is printed first."""
    with open(tmp_path / "out.txt", "w") as file:
        print("first", file=file)
        print_rank("second", file=file)
        print("third", file=file)
    assert (tmp_path / "out.txt").read_text() == "first\n[0] second\nthird\n"


def test_a_stream_without_unicode_gets_escapes(tmp_path: Path) -> None:
    """Characters that the stream cannot encode are escaped; `print` would raise."""
    with open(tmp_path / "out.txt", "w", encoding="ascii") as file:
        print_rank("∇", file=file)
    assert (tmp_path / "out.txt").read_text() == "[0] \\u2207\n"


def test_forks_signals_and_no_stdout() -> None:
    """Nothing hangs with a fork while a thread prints, a signal handler that prints while its
    thread prints, or no stdout."""
    done = python("""
import os, signal, sys, threading
from torchwhere import print_rank, rank_log
from torchwhere.core.locked_write import _lock
held = threading.Event(); over = threading.Event()
def hold():
    with _lock._threads:
        held.set(); over.wait()
thread = threading.Thread(target=hold); thread.start(); held.wait()
if os.fork() == 0:
    print_rank("child"); os._exit(0)
os.wait(); over.set(); thread.join()
signal.signal(signal.SIGALRM, lambda *_: print_rank("signal", file=open(os.devnull, "w")))
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
for _ in range(3000):
    print_rank("text", file=sys.stderr)
signal.setitimer(signal.ITIMER_REAL, 0)
print_rank("parent")
sys.stdout = None
print_rank("nowhere")
""")
    assert (done.returncode, done.stdout) == (0, "[0] child\n[0] parent\n")
    assert done.stderr == "[0] text\n" * 3000


# -- which ranks, and what they say ----------------------------------------------------------------


def test_rank_before_and_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's RANK counts until there is a group; without either, or with an invalid value,
    the rank is 0."""
    monkeypatch.setenv("RANK", "3")
    assert get_rank() == 3
    monkeypatch.setenv("RANK", "three")
    assert get_rank() == 0
    monkeypatch.delenv("RANK")
    assert get_rank() == 0


def test_a_process_group_counts_more_than_the_environment(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once there is a group, its rank counts."""
    monkeypatch.setenv("RANK", "3")
    assert get_rank() == 0


@pytest.mark.parametrize(
    ("chosen", "printed"), [(0, False), (2, True), ("all", True), ([0, 2], True), (range(2), False)]
)
def test_only_the_ranks_asked_for_print(
    chosen: Any, printed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ranks` is one rank, several, or all; every printed line begins with the rank."""
    monkeypatch.setenv("RANK", "2")
    print_rank("a", 1, ranks=chosen, sep="-")
    print_rank("two\nlines\n", "", ranks=chosen, end="")
    expected = "[2] a-1\n[2] two\n[2] lines\n[2]  " if printed else ""
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        ("none", ValueError, "ranks='none': expected a rank, several of them, or \"all\""),
        (None, TypeError, 'ranks=None: expected a rank, several of them, or "all"'),
        (True, TypeError, 'ranks=True: expected a rank, several of them, or "all"'),
        ([0, "1"], TypeError, "ranks=[0, '1']: '1' is not a rank"),
        (-1, ValueError, "ranks=-1: ranks are counted from 0"),
    ],
)
def test_wrong_choices_of_ranks(
    chosen: Any, error: type[Exception], message: str, no_rank: None
) -> None:
    """An invalid choice of ranks raises on every rank."""
    for ask in (
        lambda: print_rank("x", ranks=chosen),
        lambda: torchwhere.RankHandler(ranks=chosen),
    ):
        with pytest.raises(error) as raised:
            ask()
        assert str(raised.value) == message


def test_the_place_as_prefix(no_rank: None, capsys: pytest.CaptureFixture[str]) -> None:
    """On request, every line begins with the place of the call."""
    model = Model()
    model.head.register_forward_hook(lambda *_: print_rank("here\nand here", place=True))
    with torchwhere.watch(model):
        model(batch())
    print_rank("outside", place=True)
    line = model.head._forward_hooks.popitem()[1].__code__.co_firstlineno
    place = f"[rank 0, step 0, forward of head, {Path(__file__).relative_to(Path.cwd())}:{line}]"
    assert (
        capsys.readouterr().out
        == f"{place} here\n{place} and here\n[rank 0, outside any module, (unknown)] outside\n"
    )


def test_a_compiled_function_prints_every_time(
    no_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inside `torch.compile` it prints at every call, not once at compile time, and dynamo does not
    trace it."""

    @torch.compile(backend="eager")
    def double(x: torch.Tensor) -> torch.Tensor:
        print_rank("doubling", ranks="all")
        return 2 * x

    torch.compiler.reset()
    counters = importlib.import_module("torch._dynamo.utils").counters
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [double(torch.ones(2)).sum().item() for _ in range(3)] == [4, 4, 4]
    assert capsys.readouterr().out == "[0] doubling\n" * 3
    assert sum(counters["graph_break"].values()) == 1
    assert counters["frames"]["total"] == 2  # before and after it
    torch.compiler.reset()


def test_printing_and_logging_need_no_torch(tmp_path: Path) -> None:
    """If torch is not installed or not imported, printing and logging work and do not import it."""
    code = """
import sys, logging
if sys.argv[1] == "without": sys.modules["torch"] = None
import torchwhere
torchwhere.print_rank("printed", place=True)
torchwhere.rank_log("logged", rank=1)
logger = logging.getLogger("job"); logger.addHandler(torchwhere.RankHandler(file=sys.stdout)); logger.error("said")
assert sys.modules.get("torch") is None
"""
    for kind in ("without", "with"):
        done = python(code, kind, cwd=tmp_path)
        assert (done.stderr, done.stdout) == (
            "",
            "[rank 0, outside any module, (unknown)] printed\n[rank 0] ERROR job: said\n",
        )
    assert (tmp_path / "log_rank_1.txt").read_text() == "logged\n" * 2


# -- a file for each rank --------------------------------------------------------------------------


def test_each_rank_has_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is appended to the file of its rank at once; a missing folder is created."""
    monkeypatch.setenv("RANK", "1")
    rank_log("own", 1, folder=tmp_path / "logs")
    rank_log("another's", folder=tmp_path / "logs", rank=4)
    rank_log("own", 2, folder=tmp_path / "logs", sep=": ")
    assert (tmp_path / "logs" / "log_rank_1.txt").read_text() == "own 1\nown: 2\n"
    assert (tmp_path / "logs" / "log_rank_4.txt").read_text() == "another's\n"
    printing.close_logs()
    rank_log("later", folder=tmp_path / "logs")
    assert (tmp_path / "logs" / "log_rank_1.txt").read_text() == "own 1\nown: 2\nlater\n"


def test_where_the_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_rank: None) -> None:
    """Without a folder, files go to the folder of the watch, if it writes one, else to the current
    working directory."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        rank_log(name)
        assert (tmp_path / name / "log_rank_0.txt").read_text() == f"{name}\n"
    with torchwhere.watch(out=tmp_path / "run"):
        rank_log("watched", place=True)
    with torchwhere.watch():
        rank_log("in memory")
    text = (tmp_path / "run" / "log_rank_0.txt").read_text()
    assert text.startswith("[rank 0, step 0, outside any module, ")
    assert text.endswith("] watched\n")
    assert (tmp_path / "b" / "log_rank_0.txt").read_text() == "b\nin memory\n"


def test_a_file_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    """If its file was deleted, a line goes into a new file."""
    rank_log("lost", folder=tmp_path, rank=0)
    (tmp_path / "log_rank_0.txt").unlink()
    rank_log("found", folder=tmp_path, rank=0)
    assert (tmp_path / "log_rank_0.txt").read_text() == "found\n"


def test_threads_and_forks_log_whole_lines(tmp_path: Path) -> None:
    """Threads and a forked process write to the file of one rank; every line is complete; nothing
    is open at exit."""
    done = python(
        """
import os, threading
from torchwhere import rank_log
def write(who):
    for n in range(200): rank_log(who * 3000, n, rank=0)
threads = [threading.Thread(target=write, args=(who,)) for who in "ab"]
for thread in threads: thread.start()
if os.fork() == 0: write("c"); os._exit(0)
for thread in threads: thread.join()
os.wait()
import gc, torchwhere.api.printing
""",
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = (tmp_path / "log_rank_0.txt").read_text().splitlines()
    assert sorted(lines) == sorted(f"{who * 3000} {n}" for who in "abc" for n in range(200))


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_files_are_closed(tmp_path: Path) -> None:
    """`close_logs`, which runs at exit, closes the files."""
    rank_log("x", folder=tmp_path, rank=0)
    (file,) = printing._logs._files.values()
    printing.close_logs()
    assert file.closed
    del file
    gc.collect()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The first line raises an error with advice."""
    (tmp_path / "file").touch()
    with pytest.raises(torchwhere.TorchwhereError) as raised:
        rank_log("x", folder=tmp_path / "file", rank=0)
    path = tmp_path / "file" / "log_rank_0.txt"
    assert (
        str(raised.value)
        == f"cannot write {path}: File exists. Choose another folder with folder=..."
    )
    for rank in (-1, "0", True):
        with pytest.raises(ValueError, match=r"^rank=.*: expected a rank, counted from 0$"):
            rank_log("x", folder=tmp_path, rank=rank)


def test_a_full_disk_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lines that do not fit on the disk are lost, with one warning; the job goes on."""
    (tmp_path / "log_rank_0.txt").symlink_to("/dev/full")
    for _ in range(3):
        rank_log("x", folder=tmp_path, rank=0)
    path = tmp_path / "log_rank_0.txt"
    assert [record.getMessage() for record in caplog.records] == [
        (
            f"torchwhere: cannot write {path} (No space left on device): lines are lost, the job"
            " continues"
        )
    ]


# -- logging ---------------------------------------------------------------------------------------


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("job")
    found.propagate = False
    yield found
    for handler in list(found.handlers):
        found.removeHandler(handler)
        handler.close()
    found.filters.clear()
    found.propagate = True


def test_records_know_their_place(logger: logging.Logger, no_rank: None) -> None:
    """The filter adds the place and its parts to a record, and leaves logging's own fields
    alone."""
    seen: list[logging.LogRecord] = []
    logger.addFilter(torchwhere.PlaceFilter())
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    model = Model()
    model.layers[1].register_forward_hook(lambda *_: logger.warning("hi", extra={"rank": "mine"}))
    with torchwhere.watch(model):
        model(batch())
        torchwhere.step(7)
        logger.warning("outside")
    logger.warning("unwatched")
    inside, outside, unwatched = seen
    assert (inside.place_rank, inside.place_step, inside.place_pass) == (0, 0, "forward")
    assert (inside.place_module, inside.place_call, inside.rank) == ("layers.1", 0, "mine")
    assert inside.place_line.startswith("tests/test_ranks.py:")
    assert inside.place.startswith("rank 0, step 0, forward of layers.1, tests/test_ranks.py:")
    assert (inside.module, inside.filename) == ("test_ranks", "test_ranks.py")
    assert (outside.place_step, outside.place_module, outside.rank) == (7, "-", 0)
    assert (unwatched.place, unwatched.place_step, unwatched.place_line) == ("rank 0", "-", "-")


def test_the_handler_writes_a_file_for_each_rank(
    logger: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records go to the rank's own file, prefixed by the place; a custom formatter replaces the
    prefix."""
    monkeypatch.setenv("RANK", "5")
    handler = torchwhere.RankHandler(logging.INFO, folder=tmp_path)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.info("one\ntwo")
    logger.debug("not this")
    handler.setFormatter(logging.Formatter("%(rank)s %(place_pass)s %(message)s"))
    logger.error("own")
    assert (
        tmp_path / "log_rank_5.txt"
    ).read_text() == "[rank 5] INFO job: one\ntwo\n5 outside own\n"


def test_the_handler_writes_whole_to_a_stream(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stream, records of the chosen ranks go there."""
    stream = io.StringIO()
    logger.addHandler(torchwhere.RankHandler(file=stream, ranks=iter([1, 2])))
    for rank in ("0", "1", "2"):
        monkeypatch.setenv("RANK", rank)
        logger.error("said")
    assert stream.getvalue() == "[rank 1] ERROR job: said\n[rank 2] ERROR job: said\n"
    with pytest.raises(
        ValueError, match=r"^RankHandler\(file=..., folder=...\): give only one of them$"
    ):
        torchwhere.RankHandler(file=stream, folder=".")


def test_logging_inside_a_watch_never_recurses_nor_hangs(
    logger: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a place that logs and raises, torchwhere's own records and a locked box, every record is
    written once."""
    handler = torchwhere.RankHandler(folder=tmp_path)
    logger.addHandler(handler)
    own = logging.getLogger("torchwhere")
    own.addHandler(handler)
    with torchwhere.watch(out=tmp_path):

        def logs_itself(_frame: object) -> Any:
            logger.error("inner")
            own.warning("ours")
            raise RuntimeError("no place")

        with monkeypatch.context() as patched:
            patched.setattr(rank_logging, "place_of", logs_itself)
            logger.error("outer")
        from torchwhere.api.watch import current

        with current()._box._file.lock:  # type: ignore[union-attr]
            thread = threading.Thread(target=own.warning, args=("while it is locked",))
            thread.start()
            thread.join(10)
            assert not thread.is_alive()
    own.removeHandler(handler)
    rank = get_rank()
    assert (tmp_path / f"log_rank_{rank}.txt").read_text().splitlines() == [
        f"[rank {rank}] ERROR job: inner",
        f"[rank {rank}] WARNING torchwhere: ours",
        f"[rank {rank}] ERROR job: outer",
        f"[rank {rank}] WARNING torchwhere: while it is locked",
    ]


def test_a_handler_that_cannot_write_does_not_fail_the_job(
    logger: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Like every logging handler, it prints the error to stderr, and the program goes on."""
    (tmp_path / "file").touch()
    logger.addHandler(torchwhere.RankHandler(folder=tmp_path / "file"))
    logger.error("lost")
    assert ": File exists. Choose another folder with folder=..." in capsys.readouterr().err
