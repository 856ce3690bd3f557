"""Boxes of processes that were killed, stopped or stuck, of forks, and in files that shrink,
disappear or do not fit.

Whatever may kill or disturb a process happens in a child: a light Python that imports the writer
and no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import EntryType
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import Kind

PATIENCE_S = 400
CAPACITY = 64
NOTE = int(Kind.NOTE)

PRELUDE = """
import ctypes, faulthandler, fcntl, json, mmap, os, random, resource, signal, sys, threading, time
from pathlib import Path
from torchwhere.blackbox.file_format import *
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.errors import TorchwhereError

folder = Path(sys.argv[1])
CAPACITY = 64
NOTE = 9

def write(box, number):  # one record that can be checked by its number alone
    module = box.intern(EntryType.MODULE, f"module {number % 50}")
    text = box.text(json.dumps({"text": f"text {number}"}))
    found = box.record(NOTE, number + 1, 1, 0, 0, number % 1000, module, number % 7, 0, 0, 0, 0, 0, text)
    assert found == number
    box.words[box.cursor_at(0) + CURSOR_RECORD] = number
    box.words[box.cursor_at(0) + CURSOR_TIME] = number + 1

def say(**facts):
    os.write(1, json.dumps(facts).encode() + b"\\n")
"""


def assert_as_written(box: Box) -> list[int]:
    """Check that every visible record is one that `write` writes, with its name and its text.
    Returns their numbers."""
    events = list(box.events())
    for event in events:
        number, place = event.number, event.place
        assert (event.t_ns, place.step, place.call, place.pass_) == (
            number + 1,
            number % 1000,
            number % 7,
            "forward",
        )
        assert (place.module, event.fields) == (f"module {number % 50}", {"text": f"text {number}"})
    return [event.number for event in events]


def command(code: str, *args: object) -> list[str]:
    return [sys.executable, "-c", PRELUDE + code, *map(str, args)]


def run(
    code: str, *args: object, returncode: int = 0, before: tuple[str, ...] = ()
) -> tuple[list[dict[str, Any]], str]:
    """Run `code` in a child until it exits. Returns its output and its stderr."""
    done = subprocess.run(
        [*before, *command(code, *args)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@contextlib.contextmanager
def running(code: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """A child that runs `code` until the end of the block; then it is killed, even if it is
    stopped."""
    with subprocess.Popen(
        command(code, *args), stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def said(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    answer: dict[str, Any] = json.loads(child.stdout.readline())
    return answer


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"


# -- killed, stopped, stuck ------------------------------------------------------------------------

KILLED = """
def write_and_acknowledge(path, pipe):
    box = BoxWriter(path, meta={"rank": 0}, records=CAPACITY)
    number = 0
    while True:
        write(box, number)
        number += 1
        os.write(pipe, b".")

for trial in range(100):
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20)
    child = os.fork()
    if not child:
        write_and_acknowledge(folder / f"rank{trial}.box", writing)
    os.close(writing)
    time.sleep(random.random() * 0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(reading, "rb") as acknowledged:
        say(trial=trial, acknowledged=len(acknowledged.read()))
"""


def test_killed_at_100_moments(tmp_path: Path) -> None:
    """After a kill at any moment, the ring has every record whose call had returned, and no
    half-written one."""
    answers, _ = run(KILLED, tmp_path)
    assert len(answers) == 100
    for answer in answers:
        path, acknowledged = tmp_path / f"rank{answer['trial']}.box", answer["acknowledged"]
        if not acknowledged and not path.exists():
            continue
        box = read_box(path)
        shown = assert_as_written(box)
        # The record in progress at the kill, number `acknowledged`, may have taken the slot of the
        # oldest.
        assert set(shown) >= set(range(max(0, acknowledged - CAPACITY + 1), acknowledged))
        assert set(shown) <= set(range(acknowledged + 1))
        assert box.counts.torn + box.counts.torn_entries <= 1
        if acknowledged:
            assert box.problems == []
    went_round = [answer for answer in answers if answer["acknowledged"] > CAPACITY]
    assert len(went_round) > 10, "killed too early to prove anything"


WRITING = """
box = BoxWriter(folder / "rank0.box", meta={"rank": 0}, records=CAPACITY)
say(ready=True)
number = 0
while True:
    write(box, number)
    number += 1
"""


def test_read_while_it_is_written(tmp_path: Path) -> None:
    """A box can be read at any time while it is written: every visible record is complete, and the
    box makes progress."""
    with running(WRITING, tmp_path) as child:
        said(child)
        newest: set[int] = set()

        def look() -> bool:
            box = read_box(tmp_path / "rank0.box")
            assert box.problems == []
            numbers = [event.number for event in box.events()]
            modules = {event.number: event.place.module for event in box.events()}
            assert modules == {number: f"module {number % 50}" for number in numbers}
            assert {e.fields["text"] for e in box.events()} <= {
                None,
                *(f"text {number}" for number in numbers),
            }
            newest.add(max(numbers, default=0))
            return len(newest) > 50

        until(look)


def test_read_while_it_is_stopped(tmp_path: Path) -> None:
    """A box whose process is stopped is readable, complete up to its cursor, and does not
    change."""
    with running(WRITING, tmp_path) as child:
        said(child)
        until(lambda: read_box(tmp_path / "rank0.box").counts.overwritten > 0)
        child.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        box, again = read_box(tmp_path / "rank0.box"), read_box(tmp_path / "rank0.box")
        shown = assert_as_written(box)
        last = box.cursors()[0].last_record
        assert set(shown) >= set(range(last - CAPACITY + 3, last + 1))
        assert box.counts.torn <= 1
        assert (box.records == again.records).all()
        assert box.cursors() == again.cursors()


STUCK = """
box = BoxWriter(folder / "rank0.box", meta={"rank": 0}, records=CAPACITY)
for number in range(10):
    write(box, number)
place = box.intern(EntryType.MODULE, "layers.3.stuck") << MODULE_SHIFT | 1 << PASS_SHIFT | 2
box.words[box.cursor_at(0)] = place
hold = ctypes.PyDLL(None).pause  # PyDLL keeps the GIL while it calls
say(ready=True)
hold()
"""


def test_read_while_it_is_stuck_in_c(tmp_path: Path) -> None:
    """The box of a process that is stuck in C with the GIL held still shows where it is and what it
    did last."""
    with running(STUCK, tmp_path) as child:
        said(child)
        until(
            lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
        )
        box = read_box(tmp_path / "rank0.box")
        assert assert_as_written(box) == list(range(10))
        (cursor,) = box.cursors()
        assert (cursor.place.module, cursor.place.pass_, cursor.place.call) == (
            "layers.3.stuck",
            "forward",
            2,
        )
        assert cursor.last_record == 9


INTERRUPTED = """
box = BoxWriter(folder / "rank0.box", meta={"rank": 0}, records=1 << 16)
expected, interruptions = {}, 0

def interrupted(*_):
    global interruptions
    interruptions += 1
    tell(f"handler {interruptions}")

def tell(text):
    module, position = box.intern(EntryType.MODULE, text), box.text(json.dumps({"text": text}))
    expected[box.record(NOTE, 1, 0, 0, 0, 0, module, 0, 0, 0, 0, 0, 0, position)] = text

signal.signal(signal.SIGALRM, interrupted)
signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
number = 0
while interruptions < 500:
    number += 1
    tell(f"main {number}")
signal.setitimer(signal.ITIMER_REAL, 0)
box.close()
say(expected=expected)
"""


def test_signal_handlers_may_record(tmp_path: Path) -> None:
    """A signal handler that records while its thread is inside the writer neither hangs nor mixes
    up names."""
    (answer,), _ = run(INTERRUPTED, tmp_path)
    box = read_box(tmp_path / "rank0.box")
    assert box.counts.torn == box.counts.torn_entries == 0
    newest = list(box.events())[-2000:]  # the ring of texts is shorter than the ring of records
    assert len(newest) == min(2000, len(answer["expected"]))
    for event in newest:
        text = answer["expected"][str(event.number)]
        assert (event.place.module, event.fields["text"]) == (text, text)


# -- forks -----------------------------------------------------------------------------------------

FORKED = """
box = BoxWriter(folder / "rank0.box", meta={"rank": 0}, records=CAPACITY)
write(box, 0)
child = os.fork()
if not child:
    box.abandon()
    for number in range(1, 10):
        write(box, number)
    box.words[box.cursor_at(5) + CURSOR_TIME] = 77
    box.write_meta()
    box.close()
    say(child=os.getpid())
    sys.stdin.read()
    os._exit(0)
"""


def test_forked_child_leaves_the_box_alone(tmp_path: Path) -> None:
    """Writes of a forked child after `abandon` never reach the parent's box, and the parent goes
    on."""
    code = FORKED + "os.waitpid(child, 0)\nwrite(box, 1)\nbox.close()"
    with running(code, tmp_path) as child:
        said(child)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(PATIENCE_S) == 0
    box = read_box(tmp_path / "rank0.box")
    assert assert_as_written(box) == [0, 1]
    assert [name for _, name in box.names.values()] == ["module 0", "module 1"]
    assert [cursor.last_record for cursor in box.cursors()] == [1]


IN_MEMORY = """
box = BoxWriter(None, meta={"rank": 0}, records=CAPACITY)
write(box, 0)
if not os.fork():
    box.abandon()
    write(box, 1)
    os._exit(0)
os.wait()
say(last=box.words[box.cursor_at(0) + CURSOR_RECORD])
"""


def test_forked_child_leaves_a_box_in_memory_alone(tmp_path: Path) -> None:
    """A box without a file is not shared with forked children either."""
    (answer,), _ = run(IN_MEMORY, tmp_path)
    assert answer == {"last": 0}


def test_orphan_does_not_keep_the_box(tmp_path: Path) -> None:
    """A child that outlives the dead writer (a data loader worker) does not block the name for
    others."""
    code = FORKED + "os.waitpid(child, 0)"
    with running(code, tmp_path) as child:
        orphan = said(child)["child"]
        assert Path(f"/proc/{orphan}").exists()
        child.kill()
        child.wait()
        box = BoxWriter(tmp_path / "rank0.box", meta={"rank": 0}, records=16)
        box.close()
        assert Path(f"/proc/{orphan}").exists(), "the orphan was to live through this"
        assert child.stdin is not None
        child.stdin.close()
    boxes = [read_box(path) for path in tmp_path.iterdir()]
    assert sorted(found.counts.good for found in boxes) == [0, 1]


# -- files that shrink or vanish -------------------------------------------------------------------

TRUNCATED = """
lost, told = [], threading.Event()

def on_lost(why):
    lost.append(why)
    told.set()

if "before" in sys.argv:
    faulthandler.enable()
box = BoxWriter(folder / "rank0.box", meta={"rank": 0}, records=CAPACITY, on_lost=on_lost)
if "after" in sys.argv:
    faulthandler.enable()
for number in range(100):
    write(box, number)
os.truncate(box.path, int(sys.argv[2]))
if "table first" in sys.argv:
    box.intern(EntryType.LINE, "train.py:1")
for number in range(100, 300):
    box.record(NOTE, number + 1)
    box.text("text")
    box.words[box.cursor_at(3)] = number
assert told.wait(30)
box.write_meta()
box.check_file()
box.rename(folder / "rank1.box")
for number in range(300, 400):
    write(box, number)
box.close()
box.close()
say(lost=lost, size=os.path.getsize(folder / "rank0.box"))
"""


@pytest.mark.parametrize("how", ["", "before", "after", "table first"])
@pytest.mark.parametrize("size", [0, 30_000])
def test_truncated_by_another_process(tmp_path: Path, size: int, how: str) -> None:
    """When another process truncates the file, the job goes on, records nothing more, and says so
    exactly once."""
    (answer,), _ = run(TRUNCATED, tmp_path, size, how)
    assert answer["lost"] == [
        (
            f"{tmp_path}/rank0.box was truncated by another process; the job continues, this rank is no"
            " longer recorded"
        )
    ]
    assert answer["size"] == size


BUS = """
def fault():  # the fault of another map
    other = folder / "other"
    other.write_bytes(bytes(8192))
    with other.open("r+b") as file:
        other_map = mmap.mmap(file.fileno(), 8192)
    os.truncate(other, 0)
    other_map[5000]

if "faulthandler" in sys.argv:
    faulthandler.enable()
box = BoxWriter(folder / "rank0.box", meta={"rank": 0}, records=CAPACITY)
write(box, 0)
if "closed" in sys.argv:
    box.close()
say(ready=True)
fault() if "fault" in sys.argv else os.kill(os.getpid(), signal.SIGBUS)
say(survived=True)
"""


@pytest.mark.parametrize("cause", ["fault", "kill"])
@pytest.mark.parametrize("state", ["open", "closed"])
@pytest.mark.parametrize("handler", ["faulthandler", "default"])
def test_foreign_bus_errors_kill_as_before(
    tmp_path: Path, cause: str, state: str, handler: str
) -> None:
    """A SIGBUS that is not ours goes to the previous handler, while a box is open and after: the
    process dies."""
    answers, stderr = run(BUS, tmp_path, cause, state, handler, returncode=-signal.SIGBUS)
    assert answers == [{"ready": True}]
    assert ("Fatal Python error: Bus error" in stderr) == (handler == "faulthandler")
    assert assert_as_written(read_box(tmp_path / "rank0.box")) == [0]


CHAINED = """
libc = ctypes.CDLL(None)
def handler():  # the address of the handler, as the kernel has it
    action = (ctypes.c_char * 256)()
    libc.sigaction(int(signal.SIGBUS), None, action)
    return int.from_bytes(action[:8], "little")

faulthandler.enable()
before = handler()
first = BoxWriter(folder / "rank0.box", meta={"rank": 0}, records=CAPACITY)
second = BoxWriter(folder / "rank1.box", meta={"rank": 1}, records=CAPACITY)
assert handler() != before
order = (second, first) if "in order" in sys.argv else (first, second)
for box in order:
    box.close()
say(restored=handler() == before)
other = folder / "other"
other.write_bytes(bytes(first.geometry.table_at))  # as large as a box: the kernel puts it where one was
with other.open("r+b") as file:
    other_map = mmap.mmap(file.fileno(), 0)
os.truncate(other, 0)
other_map[5000]
"""


@pytest.mark.parametrize("order", ["in order", "out of order"])
def test_two_guarded_boxes(tmp_path: Path, order: str) -> None:
    """Two boxes of one process may be closed in any order: no handler is left, and no later fault
    is attributed to them."""
    (answer,), stderr = run(CHAINED, tmp_path, order, returncode=-signal.SIGBUS)
    assert answer["restored"]
    assert "Fatal Python error: Bus error" in stderr


def test_deleted_file(tmp_path: Path) -> None:
    """When the file is deleted, the writer goes on, says so exactly once, and leaves nothing
    behind."""
    lost: list[str] = []
    box = BoxWriter(tmp_path / "rank0.box", meta={"rank": 0}, records=16, on_lost=lost.append)
    box.check_file()
    assert lost == []
    (tmp_path / "rank0.box").unlink()
    for _ in range(2):
        assert (
            box.intern(EntryType.MODULE, f"module {box.record(NOTE, 1, extra=box.text('{}'))}") > 0
        )
        box.check_file()
    box.rename(tmp_path / "rank1.box")
    box.close()
    assert lost == [
        f"{tmp_path}/rank0.box was deleted; the job continues, this rank is no longer recorded"
    ]
    assert list(tmp_path.iterdir()) == []


# -- files that never fit --------------------------------------------------------------------------


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("below", ["", "folder/rank0.box", "rank0.box"])
def test_impossible_path(tmp_path: Path, below: str) -> None:
    """A path below a regular file, or one that is a folder, is an OSError that leaves nothing
    behind."""
    (tmp_path / "file").write_text("mine")
    before = descriptors()
    path = tmp_path / "file" / below if below else tmp_path
    with pytest.raises(OSError):  # noqa: PT011 - the system decides which one
        BoxWriter(path, meta={"rank": 0}, records=16)
    assert descriptors() == before
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


CREATED = """
os.chdir(folder)
before = sorted(os.listdir("/proc/self/fd"))
try:
    BoxWriter(folder / "rank0.box", meta={"rank": 0}, records=1 << 16)
except OSError as error:
    say(error=type(error).__name__, number=error.errno, left=os.listdir(folder))
assert sorted(os.listdir("/proc/self/fd")) == before
"""


def mounted(folder: Path, options: str) -> tuple[str, ...]:
    """The prefix of a command that gives it a small file system on `folder`."""
    own = ("unshare", "--mount", "--map-root-user") if os.geteuid() else ("unshare", "--mount")
    before = (*own, "sh", "-c", f'mount -t tmpfs -o {options} none "{folder}" && exec "$@"', "sh")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*before, "true"], capture_output=True).returncode
    ):
        pytest.skip("a file system cannot be mounted here")
    return before


def test_full_disk(tmp_path: Path) -> None:
    """On a disk that is too small, creating the box raises an OSError at once: no SIGBUS later, and
    no file or descriptor left."""
    (answer,), _ = run(CREATED, tmp_path, before=mounted(tmp_path, "size=1m"))
    assert answer == {"error": "OSError", "number": 28, "left": []}


def test_read_only_disk(tmp_path: Path) -> None:
    """On a read-only disk, creating the box raises an OSError and leaves nothing."""
    (answer,), _ = run(CREATED, tmp_path, before=mounted(tmp_path, "ro"))
    assert answer == {"error": "OSError", "number": 30, "left": []}


def test_file_size_limit(tmp_path: Path) -> None:
    """If a limit on file sizes is too small for the box, creating it raises an OSError and leaves
    nothing."""
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
    (answer,), _ = run(limit + CREATED, tmp_path)
    assert answer == {"error": "OSError", "number": 27, "left": []}


GROWN = """
lost = []
box = BoxWriter(folder / "rank0.box", meta={"rank": 0}, records=CAPACITY, on_lost=lost.append)
first = box.intern(EntryType.MODULE, "a name with room")
most = os.path.getsize(box.path) + 50
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
ids = [box.intern(EntryType.MODULE, f"a name without room {number}") for number in range(100)]
for number in range(200):
    box.record(NOTE, 1, 0, 0, 0, 0, ids[number % 100])
box.record(NOTE, 1, 0, 0, 0, 0, first, 0, 0, 0, 0, 0, 0, box.text('{"text": "last"}'))
assert len(set(ids)) == 100 and ids == [box.intern(EntryType.MODULE, f"a name without room {number}") for number in range(100)]
box.check_file()
box.close()
say(lost=lost)
"""


def test_table_that_cannot_grow(tmp_path: Path) -> None:
    """When the table cannot grow any more, the writer goes on, says so exactly once, and shows no
    incomplete name."""
    (answer,), _ = run(GROWN, tmp_path)
    assert answer["lost"] == [
        (
            f"{tmp_path}/rank0.box cannot grow (File too large); the job continues, this rank is no"
            " longer recorded"
        )
    ]
    box = read_box(tmp_path / "rank0.box")
    events = list(box.events())
    assert len(events) == CAPACITY
    assert events[-1].place.module == "a name with room"
    assert events[-1].fields == {"text": "last"}
    assert {event.place.module for event in events[:-1]} <= {None, "a name without room 0"}
    assert box.counts.torn_entries == 1


# -- several at once -------------------------------------------------------------------------------

RACED = """
def race(start, results):
    os.read(start, 1)  # until the starter closes its end
    try:
        box = BoxWriter(folder / "rank0.box", meta={"rank": 0, "pid": os.getpid()}, records=16)
        write(box, 0)
        os.write(results, b"won %d\\n" % os.getpid())
        signal.pause()
    except TorchwhereError:
        os.write(results, b"refused\\n")
    except BaseException as error:
        os.write(results, f"{type(error).__name__}: {error}\\n".encode())
    os._exit(0)

for round in range(120):
    (waiting, start), (reading, results) = os.pipe(), os.pipe()
    children = []
    for _ in range(6):
        children.append(os.fork())
        if not children[-1]:
            os.close(start)
            race(waiting, results)
    os.close(start), os.close(waiting), os.close(results)
    with open(reading) as answers:
        lines = [answers.readline().strip() for _ in children]
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    say(answers=lines)
"""


def test_race_for_one_name(tmp_path: Path) -> None:
    """Of many processes that open the same box at once exactly one gets it, the others get an
    error, and no old box is lost."""
    answers, _ = run(RACED, tmp_path)
    winners = []
    for answer in answers:
        won = [line for line in answer["answers"] if line.startswith("won")]
        assert sorted(answer["answers"]) == ["refused"] * 5 + won
        winners.append(int(won[0].split()[1]))
    boxes = {path.name: read_box(path) for path in tmp_path.iterdir()}
    assert sorted(box.meta["pid"] for box in boxes.values()) == sorted(winners)
    assert boxes["rank0.box"].meta["pid"] == winners[-1]
    assert all(assert_as_written(box) == [0] for box in boxes.values())


WITHOUT_LOCKS = """
# The kernel itself answers flock with "not implemented", as a file system without locks does.
NUMBERS = {"x86_64": 73, "aarch64": 32}
RULES = b"".join(
    rule.to_bytes(8, "little")
    for rule in (
        0x20,  # load the number of the system call
        NUMBERS[os.uname().machine] << 32 | 1 << 24 | 0x15,  # if it is not flock, skip the next rule
        (0x00050000 | 38) << 32 | 0x06,  # answer ENOSYS
        0x7FFF0000 << 32 | 0x06,  # allow
    )
)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_char_p)]
libc = ctypes.CDLL(None)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(Program(4, RULES))):
    say(possible=False)
    sys.exit()
try:
    fcntl.flock(1, fcntl.LOCK_EX)
except OSError as error:
    assert error.errno == 38
first = BoxWriter(folder / "rank0.box", meta={"rank": 0, "which": "first"}, records=CAPACITY)
write(first, 0)
second = BoxWriter(folder / "rank0.box", meta={"rank": 0, "which": "second"}, records=CAPACITY)
write(second, 0)
write(first, 1)
first.close(), second.close()
say(possible=True)
"""


@pytest.mark.skipif(
    os.uname().machine not in ("x86_64", "aarch64"), reason="the number of flock is not known here"
)
def test_file_system_without_locks(tmp_path: Path) -> None:
    """On a file system without locks a box is written all the same, and an existing box keeps all
    its records."""
    (answer,), _ = run(WITHOUT_LOCKS, tmp_path)
    if not answer["possible"]:
        pytest.skip("the kernel does not let us filter system calls")
    boxes = {box.meta["which"]: box for box in map(read_box, tmp_path.iterdir())}
    assert assert_as_written(boxes["first"]) == [0, 1]
    assert assert_as_written(boxes["second"]) == [0]
    assert boxes["second"].path.name == "rank0.box"
