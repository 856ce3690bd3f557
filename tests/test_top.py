"""`torchwhere top` without a terminal: what a look at a live box shows, which ranks stall, which
wait, and the screen at any size."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from device_boxes import DeviceBox
from synthetic_boxes import make
from synthetic_job import Job
from torchwhere.blackbox import file_format
from torchwhere.blackbox.file_format import EntryType
from torchwhere.blackbox.live_box import LiveBox
from torchwhere.blackbox.live_names import NameReader
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.cli import main
from torchwhere.core.events import Kind
from torchwhere.core.place import Pass
from torchwhere.diagnose.live.ranks import LiveRanks, RankNow
from torchwhere.diagnose.live.run import RunNow
from torchwhere.processes.status import ProcessStatus
from torchwhere.render.lines import as_text
from torchwhere.render.top import (
    body_height,
    impression,
    plain_lines,
    screen_lines,
    verdict_sentence,
)
from torchwhere.render.top_detail import detail_lines
from torchwhere.render.top_rows import Charset, age, speed, widths
from torchwhere.render.top_view import TopView
from torchwhere.top.poller import RunPoller

S = 1_000_000_000
START_NS = 1_700_000_000 * S
EVIL = "bad\x1b[31m\u202emirror\nline\x07"


class Writer:
    """A rank controlled by the test: a real box, written by the library's own writer, on a clock of
    the test."""

    def __init__(self, folder: Path, rank: int, *, world: int = 2, **meta: Any) -> None:
        known = {
            "rank": rank,
            "world_size": world,
            "run_id": "r",
            "host": "elsewhere",
            "pid": 1,
            "started_ns": START_NS,
        }
        self.box = BoxWriter(
            folder / f"rank{rank}.box",
            meta=known | {"clock_offset_ns": START_NS} | meta,
            records=64,
        )
        group = json.dumps(
            {"name": "0", "desc": "default_pg", "ranks": list(range(world)), "mesh_dim": None}
        )
        self.group = self.box.intern(EntryType.GROUP, group)
        self.counter = self.box.counter_at((self.group, -1, -1))
        self.cursor = self.box.cursor_at(0)
        self.count = 0
        self.box.words[self.cursor + file_format.CURSOR_THREAD] = 1

    def _at(self, at_s: float) -> int:
        t_ns = int(at_s * S) + 1
        self.box.words[self.cursor + file_format.CURSOR_TIME] = t_ns
        return t_ns

    def enter(self, module: str, at_s: float, pass_: Pass = Pass.FORWARD) -> None:
        entry = self.box.intern(EntryType.MODULE, module)
        self.box.words[self.cursor] = (
            entry << file_format.MODULE_SHIFT | pass_ << file_format.PASS_SHIFT
        )
        self._at(at_s)

    def step(self, number: int, at_s: float) -> None:
        self.box.words[self.cursor + file_format.CURSOR_STEP] = number
        self._at(at_s)

    def issue(self, op: str, at_s: float, line: str = "train.py:7") -> None:
        assert self.counter is not None
        what = self.box.intern(EntryType.COLLECTIVE, json.dumps({"op": op, "group": "0"}))
        t_ns, line_id = self._at(at_s), self.box.intern(EntryType.LINE, line)
        number = self.box.record(
            Kind.COLLECTIVE, t_ns, line=line_id, subject=what, extra=self.count
        )
        self.count += 1
        for word, value in (
            (file_format.COUNTER_COUNT, self.count),
            (file_format.COUNTER_TIME, t_ns),
            (file_format.COUNTER_RECORD, number),
        ):
            self.box.words[self.counter + word] = value
        self.box.words[self.cursor + file_format.CURSOR_RECORD] = number

    def end(self, reason: str, at_s: float) -> None:
        number = self.box.record(
            Kind.END, self._at(at_s), extra=self.box.text(json.dumps({"reason": reason}))
        )
        self.box.words[self.cursor + file_format.CURSOR_RECORD] = number


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., list[Writer]]]:
    made: list[Writer] = []

    def make_ranks(count: int = 2, **meta: Any) -> list[Writer]:
        made.extend(Writer(tmp_path, rank, world=count, **meta) for rank in range(count))
        return made

    yield make_ranks
    for writer in made:
        writer.box.close()


class Watcher:
    """`LiveRanks` over some boxes, on the clock of the test: its second 0 is that of the boxes."""

    def __init__(self, writers: list[Writer], *, stall_s: float = 1.5) -> None:
        names = NameReader()
        self.glances = [
            LiveBox(writer.box.path, names) for writer in writers if writer.box.path is not None
        ]
        self.live = LiveRanks(stall_s=stall_s)

    def look(self, at_s: float, statuses: dict[int, ProcessStatus] | None = None) -> list[RankNow]:
        for live_box in self.glances:
            has_moved = live_box.look()
            self.live.update(
                live_box, has_moved=has_moved, now_s=at_s, now_ns=START_NS + int(at_s * S)
            )
            self.live.add(live_box, now_s=at_s, now_ns=START_NS + int(at_s * S))
        return self.live.now(
            [live_box.rank for live_box in self.glances], statuses or {}, now_s=at_s
        )


# -- a glance --------------------------------------------------------------------------------------


def test_live_box_agrees_with_the_full_box(tmp_path: Path) -> None:
    """Step, place, counts and last collective equal those of the full reader, on every rank."""
    make(Job(64, steps=2, records=64, fault="missing", victim=9), tmp_path)
    names = NameReader()
    for path in tmp_path.glob("*.box"):
        live_box, box = LiveBox(path, names), read_box(path)
        assert live_box.look()
        assert not live_box.look()
        (cursor,) = box.cursors()
        place = live_box.place()
        assert (place.step, place.pass_, place.module) == (
            cursor.place.step,
            cursor.place.pass_,
            cursor.place.module,
        )
        groups = {
            entry: box.value(entry)["name"]
            for entry, (sort, _) in box.names.items()
            if sort == EntryType.GROUP
        }
        counted = {
            (groups[group], *ends): count for (group, *ends), count in box.counters().items()
        }
        assert {tuple(stream): count for stream, count in live_box.counts().items()} == counted
        last = list(box.events(kinds={"collective"}))[-1]
        issued = live_box.issued()
        assert issued is not None
        if next(iter(box.events(last=1))).kind == "collective":
            assert (issued.op, issued.number, place.line) == (
                last.fields["op"],
                last.fields["number"],
                last.place.line,
            )
        assert live_box.moved_ns == box.last_ns


def test_live_box_follows_a_growing_box(ranks: Callable[..., list[Writer]]) -> None:
    """New names, streams and the end appear in an open live box, for any number of streams."""
    writer, _ = ranks()
    (live_box,) = Watcher([writer]).glances
    assert live_box.look()
    writer.enter("encoder", 1)
    assert live_box.look()
    assert (live_box.place().module, live_box.issued()) == ("encoder", None)
    writer.issue("broadcast", 2, line="later.py:3")
    streams = [writer.box.counter_at((writer.group, 0, peer)) for peer in range(100)]
    writer.box.words[(streams[-1] or 0) + file_format.COUNTER_COUNT] = 7
    assert live_box.look()
    assert live_box.place().line == "later.py:3"
    assert len(live_box.counts()) == 101
    assert max(live_box.counts().values()) == 7
    writer.end("exit 3", 3)
    assert live_box.look()
    assert not live_box.look()  # the last record is read after all progress has stopped
    assert live_box.ended == "exit 3"


def test_live_box_of_a_damaged_file(tmp_path: Path) -> None:
    """A live view of a cut or damaged box raises no error and invents nothing."""
    make(Job(16, steps=1, records=16), tmp_path / "made")
    whole = (tmp_path / "made" / "rank3.box").read_bytes()
    path, chance = tmp_path / "rank3.box", random.Random(0)
    known = set(read_box(tmp_path / "made" / "rank3.box").names.values())
    modules = {text for _, text in known} | {None}
    for attempt in range(150):
        data = bytearray(whole[: chance.randrange(len(whole))] if attempt % 2 else whole)
        for _ in range(attempt % 5 * 3 if data else 0):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data)
        live_box = LiveBox(path, NameReader())
        live_box.look()
        live_box.look()
        assert {live_box.place().module, live_box.place().line} <= modules
        live_box.issued(), live_box.counts(), live_box.summary(), live_box.phase(), live_box.ended
    path.unlink()
    assert not live_box.look()
    assert live_box.problem == "cannot be read: No such file or directory"


def test_poller_reads_an_empty_box(tmp_path: Path) -> None:
    """A box that a rank has just created is empty: the poll raises no error and says why it cannot
    be read."""
    path = tmp_path / "rank0.box"
    path.touch()
    poller = RunPoller(tmp_path)
    problem = f"none of the 1 boxes in {tmp_path} can be read: no readable header: not a black box"
    for _ in range(2):
        assert poller.poll().problem == f"{problem}, or damaged"


def test_poller_reads_a_box_without_its_table(tmp_path: Path) -> None:
    """A box of a device whose table of names is cut off is shown without them."""
    device = DeviceBox(tmp_path / "rank0.box")
    record = device.issue(step=4, at_s=100)
    device.reach(record, at_s=100.1)
    device.lane(place=device.place(), time=int(100.1 * 1e9), step=4, record=record + 1)
    table_at = device.box.geometry.table_at
    device.box.close()
    os.truncate(tmp_path / "rank0.box", table_at)
    assert [rank.rank for rank in RunPoller(tmp_path).poll().ranks] == [0]


# -- who stands still ------------------------------------------------------------------------------


def train(writers: list[Writer], watcher: Watcher, *, steps: int, step_s: float = 0.5) -> float:
    """Let all ranks go through some steps, with polls. Returns the end time."""
    for step in range(steps):
        for writer in writers:
            writer.step(step, step * step_s)
            writer.issue("all_reduce", step * step_s)
        watcher.look(step * step_s)
    return (steps - 1) * step_s


def test_hang_is_seen_within_two_seconds(ranks: Callable[..., list[Writer]]) -> None:
    """When one rank does not issue the collective of the others, it is blamed, the others wait for
    it, and no rank was blamed before."""
    writers = ranks(4)
    watcher = Watcher(writers)
    end_s = train(writers, watcher, steps=10)
    assert not any(rank.is_trouble for rank in watcher.look(end_s))
    for writer in (writers[0], writers[1], writers[3]):
        writer.issue("all_reduce", end_s + 0.1)
    assert not any(rank.is_trouble for rank in watcher.look(end_s + 0.5))
    found = watcher.look(end_s + 2)
    assert [(str(rank.state), rank.is_blamed, rank.waits_for) for rank in found] == [
        ("waiting", False, (2,)),
        ("waiting", False, (2,)),
        ("running", True, ()),
        ("waiting", False, (2,)),
    ]
    assert all(rank.is_stalled for rank in found)
    assert found[2].age_s == pytest.approx(2, abs=0.01)
    run = RunNow("run", START_NS, tuple(found), world_size=4)
    assert impression(run)[0] == "rank 2 STUCK for 2.0s; 3 ranks wait in all_reduce #10 default"
    writers[2].issue("all_reduce", end_s + 3)
    assert not any(rank.is_blamed for rank in watcher.look(end_s + 3))


def test_slow_steps_are_no_hang(ranks: Callable[..., list[Writer]]) -> None:
    """A rank may pause as long as a few of its steps take, and no longer."""
    writers = ranks(1)
    watcher = Watcher(writers)
    end_s = train(writers, watcher, steps=4, step_s=10)
    assert [watcher.look(end_s + late)[0].is_stalled for late in (9, 19, 51)] == [
        False,
        False,
        True,
    ]
    assert watcher.look(end_s + 9)[0].steps_per_s == pytest.approx(0.1)


def test_a_start_is_no_hang(ranks: Callable[..., list[Writer]]) -> None:
    """Before its first module, collective or step a rank has half a minute."""
    watcher = Watcher(ranks(1))
    assert [watcher.look(late)[0].is_stalled for late in (1, 20, 31)] == [False, False, True]


def test_looping_rank_is_blamed(ranks: Callable[..., list[Writer]]) -> None:
    """A rank that moves but issues nothing is the rank that the others wait for: `BEHIND`."""
    writers = ranks()
    watcher = Watcher(writers)
    end_s = train(writers, watcher, steps=5)
    writers[0].issue("all_reduce", end_s)
    for tick in range(8):
        writers[1].enter(f"layer{tick}", end_s + tick * 0.5)
        found = watcher.look(end_s + tick * 0.5)
    assert (found[1].is_stalled, found[1].is_blamed, found[0].waits_for) == (False, True, (1,))
    assert "rank 1 BEHIND" in impression(RunNow("run", START_NS, tuple(found), world_size=2))[0]


def test_ends_and_stops(ranks: Callable[..., list[Writer]]) -> None:
    """Finished, failed with a record, exited without one, stopped: each has its state."""
    writers = ranks(4)
    watcher = Watcher(writers)
    writers[0].end("exit", 1)
    writers[1].end("exception: ValueError: no", 1)
    statuses = {2: ProcessStatus(alive=False), 3: ProcessStatus(alive=True, state="T")}
    watcher.look(1)
    found = watcher.look(2, statuses)
    assert [str(rank.state) for rank in found] == ["finished", "dead", "dead", "stopped"]
    assert found[1].detail == "exception: ValueError: no"


# -- a folder --------------------------------------------------------------------------------------


def test_poller_waits_for_a_run_and_notices_when_it_is_deleted(tmp_path: Path) -> None:
    """A folder that does not exist yet, is empty, has a run, is deleted: each has its message."""
    poller = RunPoller(tmp_path / "run")

    def poll() -> RunNow:
        poller._list_at = 0.0  # look at the folder now
        return poller.poll()

    assert poll().problem == f"there is no folder {tmp_path / 'run'} yet"
    (tmp_path / "run").mkdir()
    assert poll().problem == f"{tmp_path / 'run'} holds no black box (*.box) yet"
    make(Job(16, steps=1, records=16), tmp_path / "run")
    found = poll()
    assert (len(found.ranks), found.world_size, found.missing, found.problem) == (16, 16, (), None)
    shutil.rmtree(tmp_path / "run")
    gone = poll()
    assert gone.problem == f"the folder {tmp_path / 'run'} is gone"
    assert len(gone.ranks) == 16


def test_poller_follows_a_restart(tmp_path: Path, ranks: Callable[..., list[Writer]]) -> None:
    """The boxes of an elastic restart replace the first ones while it polls; ranks without one are
    listed."""
    old = ranks(2)
    old[0].step(40, 1)
    poller = RunPoller(tmp_path)
    assert [rank.step for rank in poller.poll().ranks] == [40, None]
    for writer in old:
        writer.box.close()
        assert writer.box.path is not None
        writer.box.path.rename(writer.box.path.with_name(f"{writer.box.path.stem}.old.box"))
    new = Writer(tmp_path, 0, restart=1, started_ns=START_NS + S)
    new.step(3, 1)
    poller._list_at = 0.0
    found = poller.poll()
    assert ([(rank.rank, rank.step) for rank in found.ranks], found.missing) == ([(0, 3)], (1,))
    new.box.close()


def test_heartbeats_choose_the_run(tmp_path: Path, ranks: Callable[..., list[Writer]]) -> None:
    """Ranks that wait, and only their heartbeats move, stay the run when a process starts that does
    not know its rank; also if the heartbeat comes after the first poll."""
    made = ranks()
    for writer in made:
        writer.issue("all_reduce", 1)
    assumed = {"rank_is_assumed": True, "started_ns": START_NS + 10 * S, "pid": 2}
    made.append(Writer(tmp_path, 9, world=1, **assumed))
    poller = RunPoller(tmp_path)
    assert [rank.rank for rank in poller.poll().ranks] == [9]  # nothing shows that the ranks live
    for writer in made[:2]:
        writer.box.beat(20 * S)
    assert [rank.rank for rank in RunPoller(tmp_path).poll().ranks] == [0, 1]
    time.sleep(1.1)  # the poller lists the folder again
    assert [rank.rank for rank in poller.poll().ranks] == [0, 1]


def test_poller_reads_in_slices(tmp_path: Path) -> None:
    """Without time it reads one box a poll, and counts the boxes it has not read."""
    make(Job(16, steps=1, records=16), tmp_path)
    poller = RunPoller(tmp_path)
    assert [(len(run.ranks), run.unread) for run in (poller.poll(most_s=0) for _ in range(3))] == [
        (1, 15),
        (2, 14),
        (3, 13),
    ]


# -- the screen ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> RunNow:
    """10,240 ranks: rank 777 stalls, eight wait for it, all others move."""
    folder = tmp_path_factory.mktemp("many")
    make(Job(16, steps=1, records=16), folder)
    names = NameReader()
    glances = [LiveBox(folder / f"rank{rank}.box", names) for rank in range(16)]
    assert all(live_box.look() for live_box in glances)

    def one(rank: int) -> RankNow:
        waits_for = (777,) if 760 <= rank < 768 else ()
        return RankNow(
            rank=rank,
            state="waiting" if waits_for else "running",  # type: ignore[arg-type]
            step=41 + rank % 2,
            age_s=9.0 if waits_for or rank == 777 else rank % 7 / 10,
            steps_per_s=2.5 if rank != 4000 else 1.5,
            is_stalled=bool(waits_for) or rank == 777,
            is_blamed=rank == 777,
            waits_for=waits_for,
            detail=None,
            live_box=glances[rank % 16],
        )

    return RunNow("run", START_NS, tuple(map(one, range(10240))), world_size=10240)


def painted(
    run: RunNow,
    view: TopView,
    *,
    width: int = 120,
    height: int = 40,
    charset: Charset | None = None,
) -> list[str]:
    lines = screen_lines(
        run, view, verdict=None, width=width, height=height, charset=charset or Charset()
    )
    return ["".join(text for text, _ in line) for line in lines]


def test_ten_thousand_ranks_fit(many: RunNow) -> None:
    """The culprit is on top, those who wait for it below, all others in a line for each step; a
    line can be opened."""
    view = TopView()
    rows = view.rows(many, 30)
    assert [(row.id, len(row.cohort.ranks)) for row in rows][:1] == [(("rank", 777), 1)]
    assert sum(len(row.cohort.ranks) for row in rows) == 10240
    assert len(rows) < 30
    lines = painted(many, view)
    assert lines[1].startswith("rank 777 STUCK for 9.0s; 8 ranks wait in ")
    assert lines[4].startswith(">!777 ")
    assert "STUCK" in lines[4]
    assert any(re.search(r"^ \+0,2,4,.* \(5\d+\) +running +41 ", line) for line in lines)
    view.press("end", many, 30)
    view.press("enter", many, 30)
    assert len(view.rows(many, 30)) > 5000
    view.press("enter", many, 30)
    assert len(view.rows(many, 30)) == len(rows)


def test_keys(many: RunNow) -> None:
    """Sorting, jumping, filtering, folding, moving, pages, pausing: each key does what the help
    says."""
    view = TopView()

    def press(*keys: str) -> TopView:
        assert all(view.press(key, many, 30) for key in keys)
        return view

    assert press("n").selected == ("rank", 777)
    assert press("s").sort == "rank"
    assert press("c").rows(many, 30)[0].id == ("rank", 0)
    assert (len(view.rows(many, 30)), press("end").selected, press("k").selected) == (
        10240,
        ("rank", 10239),
        ("rank", 10238),
    )
    assert (press("home", "pagedown").selected, press("down", "j", "up").selected) == (
        ("rank", 30),
        ("rank", 31),
    )
    assert press("s", "home").rows(many, 30)[0].id[1] in range(760, 778)  # oldest first
    assert press("s", "s").sort == "speed"
    assert press("home").rows(many, 30)[0].id == ("rank", 4000)
    assert [
        row.id[1] for row in press("/", *"waitinx", "backspace", *"g", "enter").rows(many, 30)
    ] == list(range(760, 768))
    assert "filter 'waiting': 8 of 10240" in painted(many, view)[-1]
    assert len(press("/", *" rank 761").rows(many, 30)) == 1
    assert len(press("escape").rows(many, 30)) == 8
    assert press("enter").page == "detail"
    assert press("escape").page == "list"
    assert len(press("escape").rows(many, 30)) == 10240
    assert press("?").page == "help"
    assert any("jump to the slowest" in line for line in painted(many, view))
    assert press("h").page == "list"
    assert press("p").is_paused
    assert "PAUSED" in painted(many, view)[1]
    assert not view.press("q", many, 30)


@pytest.mark.parametrize("is_ascii", [False, True])
def test_every_size(many: RunNow, is_ascii: bool) -> None:
    """At every width and height the screen has exactly that many lines, and none is too wide."""
    small = RunNow(
        "run", START_NS, many.ranks[755:780], world_size=10240, missing=tuple(range(755))
    )
    for width in (1, 2, 5, 10, 19, 20, 33, 60, 79, 80, 100, 200):
        for height in (1, 2, 3, 4, 6, 10, 24, 50):
            for page in ("list", "help"):
                lines = painted(
                    small,
                    TopView(page=page),
                    width=width,
                    height=height,
                    charset=Charset(is_ascii=is_ascii),
                )
                assert len(lines) == height
                assert max(map(cell_len, lines)) <= width
                assert not is_ascii or "".join(lines).isascii()
    assert body_height(small, None, 20, 10, Charset()) >= 5


def test_columns_at_widths(many: RunNow) -> None:
    """At 80 columns everything has a column; at 20 it is who, what state, and for how long."""
    rows = TopView(folds=False).rows(RunNow("run", START_NS, many.ranks[:9], world_size=9), 30)
    every = ["rank", "state", "step", "pass", "module", "line", "last", "age", "speed"]
    assert list(widths(rows, 80, step=99)) == every
    assert list(widths(rows, 20, step=99)) == ["rank", "state", "age"]
    assert sum(widths(rows, 80, step=99).values()) + len(every) + 1 <= 80


def test_numbers_fit() -> None:
    """Ages and speeds take at most five cells."""
    assert [age(s) for s in (0, 9.94, 99.9, 100, 599, 600, 35999, 36000, 10**6)] == [
        *("0.0s", "9.9s", "99.9s", "100s", "599s", "10m", "600m", "10h", "278h"),
    ]
    assert [speed(s) for s in (None, 0.0, 9.99, 10, 99.9, 1234.5)] == [
        "-",
        "0.00",
        "9.99",
        "10.0",
        "99.9",
        "1234",
    ]
    assert all(len(age(10**power)) <= 5 for power in range(9))


def test_hostile_names(ranks: Callable[..., list[Writer]], tmp_path: Path) -> None:
    """Escape sequences, direction marks and line breaks in names reach neither the screen nor a
    file."""
    (writer,) = ranks(1, host=EVIL)
    writer.enter(EVIL, 1)
    writer.issue(EVIL, 1, line=EVIL)
    run = RunPoller(tmp_path).poll()
    verdict = {"kind": "dead", "text": f"DEAD\n{EVIL}"}
    for charset in (Charset(), Charset(is_ascii=True)):
        lines = screen_lines(run, TopView(), verdict=verdict, width=150, height=20, charset=charset)
        text = "\n".join("".join(text for text, _ in line) for line in lines)
        assert "mirror" in text
        assert all(character.isprintable() or character == "\n" for character in text)
        assert not charset.is_ascii or text.isascii()
        page = detail_lines(
            run.ranks[0],
            read_box(tmp_path / "rank0.box"),
            verdict=verdict,
            width=150,
            charset=charset,
        )
        texts = [text for line in page for text, _ in line]
        assert sum("mirror" in text for text in texts) > 4
        assert all(text.isprintable() for text in texts)
    printed = as_text(plain_lines(run, verdict=verdict, width=None))
    assert "mirror" in printed
    assert all(character.isprintable() or character == "\n" for character in printed)


# -- the command -----------------------------------------------------------------------------------


def top(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchwhere", "top", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=os.environ | {"COLUMNS": ""}
    )


def test_a_stop_is_marked_before_it_is_a_hang(
    ranks: Callable[..., list[Writer]],
) -> None:
    """While the doctor still calls the job healthy, a marked rank and the verdict line do not
    contradict each other."""
    writers = ranks(2)
    watcher = Watcher(writers)
    healthy = {"kind": "healthy", "text": "HEALTHY  2 ranks\nAll 2 ranks move. Step 4."}
    moving = RunNow("run", START_NS, tuple(watcher.look(0.1)), world_size=2)
    assert verdict_sentence(healthy, moving) == "HEALTHY: All 2 ranks move"
    stopped = {0: ProcessStatus(alive=True, state="T")}
    marked = RunNow("run", START_NS, tuple(watcher.look(0.2, stopped)), world_size=2)
    assert marked.culprits
    assert (
        verdict_sentence(healthy, marked)
        == "no progress for 0.2s, not yet called a hang (see --stall)"
    )


def test_plain_snapshot(tmp_path: Path) -> None:
    """Into a pipe it prints one snapshot with the verdict, uncut and without colour, one line per
    rank; as JSON one object."""
    make(Job(16, steps=2, records=64, fault="dead", victim=5), tmp_path)
    done = top(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path}  16 ranks  step 2")
    assert lines[1].startswith("rank 5 DEAD for ")
    assert lines[2].startswith("DEAD: Rank 5 exited: exit 1")
    assert len(lines) == 4 + 16
    assert lines[4].split()[:4] == ["!", "5", "DEAD", "2"]
    assert "\x1b" not in done.stdout
    done = top(tmp_path, "--json", "--count", 2, "--interval", 0.1)
    first, second = map(json.loads, done.stdout.splitlines())
    assert second["t_ns"] > first["t_ns"]
    assert second["verdict"]["culprits"] == [5]
    assert second["ranks"][5] | {"age_s": 0} == {
        "rank": 5,
        "state": "dead",
        "step": 2,
        "pass": "backward",
        "module": "layers.0.mlp.up",
        "call": 0,
        "line": "train.py:50",
        "framework_line": None,
        "phase": None,
        "last": {"op": "all_reduce", "group": "tp", "number": 94},
        "age_s": 0,
        "steps_per_s": None,
        "stalled": False,
        "blamed": False,
        "waits_for": [],
        "host": "node0000",
        "detail": "exit 1",
        "device": None,
    }


def test_plain_waits_for_a_run(tmp_path: Path) -> None:
    """With an interval it waits for a run that has not started, says so once, and exits when the
    job is over."""
    command = [
        sys.executable,
        "-m",
        "torchwhere",
        "top",
        str(tmp_path / "run"),
        "--interval",
        "0.1",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert (
            process.stderr.readline()
            == f"torchwhere: there is no folder {tmp_path / 'run'} yet; waiting for it\n"
        )
        (tmp_path / "run").mkdir()
        writer = Writer(tmp_path / "run", 0, world=1)
        writer.step(8, 1)
        time.sleep(0.3)
        writer.end("exit", 2)
        out, err = process.communicate(timeout=400)
    writer.box.close()
    assert process.returncode == 0
    assert re.search(r"^the rank has finished$", out, re.MULTILINE)
    assert "yet" not in err.replace("holds no black box (*.box) yet", "", 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["nowhere"],
            (
                "torchwhere: there is no folder nowhere. Record one with: torchwhere run --out"
                " nowhere train.py"
            ),
        ),
        (
            ["empty"],
            (
                "torchwhere: empty holds no black box (*.box). Record one with: torchwhere run"
                " --out empty train.py"
            ),
        ),
        (
            ["foreign"],
            (
                "torchwhere: none of the 1 boxes in foreign can be read: no readable header: not a"
                " black box, or damaged"
            ),
        ),
        (
            ["a file"],
            (
                "torchwhere: there is no folder a file. Record one with: torchwhere run --out a"
                " file train.py"
            ),
        ),
        (
            ["empty", "--count", "1"],
            "torchwhere: empty holds no black box (*.box). Record one with: torchwhere run --out",
        ),
        (
            ["empty", "--interval", "0"],
            "argument --interval: '0' is not a number of seconds of 0.01 or more",
        ),
        (
            ["empty", "--interval", "nan"],
            "argument --interval: 'nan' is not a number of seconds of 0.01 or more",
        ),
        (
            ["empty", "--stall", "-1"],
            "argument --stall: '-1' is not a number of seconds of 0.01 or more",
        ),
        (["empty", "--count", "0"], "argument --count: '0' is not a number of 1 or more"),
    ],
)
def test_bad_input(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error goes to stderr, with exit code 2."""
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("foreign").mkdir()
    Path("foreign/rank0.box").write_text("no box")
    Path("a file").touch()
    try:
        code = main(["top", *arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err
