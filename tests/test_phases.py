"""Phases: their sums, how they nest on threads, in coroutines and in generators, and the tables of
one rank and of many ranks."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import torchwhere
from rank_pool import Pool
from torchwhere import TorchwhereError, cli
from torchwhere.api.phases import Phases as Table
from torchwhere.api.watch import current
from torchwhere.blackbox.phase_sums import MOST_PATHS, OTHERS, PhaseKey, PhaseSum
from torchwhere.diagnose.phases import Phases, table
from torchwhere.hooks import phases as phase_hook
from torchwhere.native import load as loading
from torchwhere.render.phases import phases_lines
from warm_python import WarmPython

GOLDEN = Path(__file__).parent / "golden"
MS = 1_000_000
START = 10**12  # the first reading of the clock


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now_ns = START

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, ms: float) -> None:
        self.now_ns += int(ms * MS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(phase_hook, "monotonic_ns", clock)
    monkeypatch.setenv(loading.SWITCH, "0")  # C++ reads the real clock
    return clock


def brief(phases: Phases) -> dict[str, tuple[float, ...]]:
    """Return the count, and total, maximum and own time in ms, of each path."""
    return {
        "/".join(row.path): (
            row.all.count,
            *(ns / MS for ns in (row.all.total_ns, row.all.max_ns, row.all.self_ns)),
        )
        for row in phases
    }


def shown(phases: Phases, *, width: int | None = None) -> list[str]:
    return ["".join(text for text, _ in line) for line in phases_lines(phases, width=width)]


# -- counting --------------------------------------------------------------------------------------


def test_sums_of_nested_phases(clock: Clock) -> None:
    """A phase is counted below the phases around it; its own time excludes the phases inside it."""
    with torchwhere.watch():
        for step in range(3):
            torchwhere.step(step)
            with torchwhere.phase("forward"):
                clock.sleep(1)
                with torchwhere.phase("attention"):
                    clock.sleep(2 + step)
            with torchwhere.phase("attention"):
                clock.sleep(5)
            clock.sleep(2)
        phases = torchwhere.phases()
    assert brief(phases) == {
        "forward": (3, 12, 5, 3),
        "forward/attention": (3, 9, 4, 9),
        "attention": (3, 15, 5, 15),
    }
    row = phases["forward", "attention"]
    assert (row.name, row.is_main, row.all.mean_ns, row.all.share) == (
        "attention",
        True,
        3 * MS,
        9 / 33,
    )
    assert (phases.steps[0].count, phases.steps[0].max_ns, phases.watched_ns) == (
        2,
        11 * MS,
        33 * MS,
    )
    with pytest.raises(KeyError, match="nothing"):
        phases["nothing"]


def test_sums_are_those_of_the_last_watch(clock: Clock) -> None:
    """The phases of a watch can be read after its end, and then no longer change; the next watch
    begins without phases."""
    with torchwhere.watch(), torchwhere.phase("first"):
        clock.sleep(3)
    clock.sleep(100)
    with torchwhere.phase("first"):
        clock.sleep(3)
    assert brief(torchwhere.phases()) == {"first": (1, 3, 3, 3)}
    assert torchwhere.phases().watched_ns == 3 * MS
    with torchwhere.watch():
        assert len(torchwhere.phases()) == 0


def test_a_phase_inside_itself(clock: Clock) -> None:
    """A phase object may be used inside itself: each level is a separate phase."""
    data = torchwhere.phase("data")
    with torchwhere.watch(), data:
        clock.sleep(1)
        with data, data:
            clock.sleep(2)
    assert brief(torchwhere.phases()) == {
        "data": (1, 3, 3, 1),
        "data/data": (1, 2, 2, 0),
        "data/data/data": (1, 2, 2, 2),
    }


def test_a_phase_that_has_not_ended(clock: Clock) -> None:
    """A phase that still runs adds to the total and to the share, not to the count; its inner phases
    do not take longer than it."""
    with torchwhere.watch(), torchwhere.phase("epoch"):
        with torchwhere.phase("data"):
            clock.sleep(3)
        clock.sleep(1)
        phases = torchwhere.phases()
    times = phases["epoch"].all
    assert brief(phases) == {"epoch": (0, 4, 0, 1), "epoch/data": (1, 3, 3, 3)}
    assert (times.running, times.running_ns, times.mean_ns, times.share) == (1, 4 * MS, 0.0, 1.0)
    assert shown(phases)[-1] == "not ended: epoch on rank 0, after 4.0 ms"


def test_a_watch_that_begins_and_ends_inside_phases(clock: Clock) -> None:
    """A phase that began before the watch is not counted; a phase that outlasts the watch does not
    disturb the next watch."""
    with torchwhere.phase("outer"):
        torchwhere.start()
        with torchwhere.phase("inner"):
            clock.sleep(1)
    clock.sleep(1)
    cut = torchwhere.phase("cut")
    cut.__enter__()
    torchwhere.stop()
    cut.__exit__(None, None, None)
    assert brief(torchwhere.phases()) == {"inner": (1, 1, 1, 1), "cut": (0, 0, 0, 0)}
    with torchwhere.watch(), torchwhere.phase("next"):
        clock.sleep(1)
    assert brief(torchwhere.phases()) == {"next": (1, 1, 1, 1)}


def test_exceptions_end_phases(clock: Clock) -> None:
    """A phase that ends with an exception is counted, and later phases are not inside it."""
    with torchwhere.watch():
        for _ in range(2):
            with (
                contextlib.suppress(ValueError),
                torchwhere.phase("load"),
                torchwhere.phase("parse"),
            ):
                clock.sleep(1)
                raise ValueError("bad file")
        with torchwhere.phase("train"):
            pass
    assert brief(torchwhere.phases()) == {
        "load": (2, 2, 1, 0),
        "load/parse": (2, 2, 1, 2),
        "train": (1, 0, 0, 0),
    }


def test_too_many_names(tmp_path: Path) -> None:
    """If a program uses a new name in every step, the table stays small: one row sums up the rest,
    and each event has its own name."""
    with torchwhere.watch(out=tmp_path):
        for number in range(500):
            with torchwhere.phase(f"batch {number}"), torchwhere.phase("inner"):
                pass
    live, read = torchwhere.phases(), torchwhere.phases(tmp_path)
    assert brief(live).keys() == brief(read).keys()
    assert len(live) < MOST_PATHS
    assert sum(row.all.count for row in live) == sum(row.all.count for row in read) == 1000
    assert live[OTHERS].all.count > 500
    ends = torchwhere.read_run(tmp_path).events(kinds={"phase_end"})
    assert [event.fields["phase"] for event in ends][::2][-1] == "inner"
    assert [
        event.fields["phase"] for event in torchwhere.read_run(tmp_path).events(kinds={"phase_end"})
    ][-1] == "batch 499"


# -- threads, coroutines, generators, functions ----------------------------------------------------


def test_phases_of_many_threads() -> None:
    """Phases nest separately on each thread; threads may share a phase object; no phase is lost."""
    data, interval = torchwhere.phase("data"), sys.getswitchinterval()

    def work() -> None:
        for _ in range(500):
            with data, torchwhere.phase("inner"):
                pass

    sys.setswitchinterval(1e-5)
    try:
        with torchwhere.watch(), torchwhere.phase("main"):
            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads:
                thread.start()
            work()
            for thread in threads:
                thread.join()
            phases = torchwhere.phases()
    finally:
        sys.setswitchinterval(interval)
    assert [(row.path, row.is_main, row.all.count, row.all.running) for row in phases] == [
        (("main",), True, 0, 1),
        (("main", "data"), True, 500, 0),
        (("main", "data", "inner"), True, 500, 0),
        (("data",), False, 4000, 0),
        (("data", "inner"), False, 4000, 0),
    ]


def test_tasks_that_take_turns(clock: Clock) -> None:
    """Phases of coroutines that take turns on one thread nest separately, each with its own time."""

    @torchwhere.phase("rollout")
    async def rollout(turns: int) -> int:
        for _ in range(turns):
            with torchwhere.phase("generate"):
                await asyncio.sleep(0)
                clock.sleep(1)
        return turns

    async def main() -> list[int]:
        with torchwhere.phase("all"):
            return await asyncio.gather(rollout(1), rollout(3), rollout(2))

    with torchwhere.watch():
        assert asyncio.run(main()) == [1, 3, 2]
    phases = torchwhere.phases()
    assert inspect.iscoroutinefunction(rollout)
    assert [(row.path, row.all.count) for row in phases] == [
        (("all",), 1),
        (("all", "rollout"), 3),
        (("all", "rollout", "generate"), 6),
    ]
    # Turns: all three, then two, then one. Each rollout lasts from its first turn to its last,
    # including its waits.
    assert phases["all"].all.total_ns == 6 * MS
    assert phases["all", "rollout"].all.max_ns == 6 * MS
    assert phases["all", "rollout"].all.total_ns == (1 + 5 + 6) * MS


def test_generators_are_timed_while_they_run(clock: Clock) -> None:
    """A decorated generator is in its phase while it produces an item, not while its caller uses the
    item; it is still a generator."""

    @torchwhere.phase("load")
    def items(count: int) -> Iterator[int]:
        """Items."""
        given = []
        try:
            for number in range(count):
                clock.sleep(2)
                given.append((yield number))
        except KeyError:
            yield -1
        finally:
            clock.sleep(1)
        return given

    with torchwhere.watch():
        generator = items(3)
        assert next(generator) == 0
        clock.sleep(100)
        assert generator.send("a") == 1
        assert generator.throw(KeyError("b")) == -1
        with torchwhere.phase("use"):
            generator.close()
        with pytest.raises(StopIteration) as stopped:
            next(items(0))
        with contextlib.suppress(RuntimeError):
            items(1).throw(RuntimeError("before it began"))
    assert stopped.value.value == []
    assert (items.__name__, items.__doc__, inspect.isgeneratorfunction(items)) == (
        "items",
        "Items.",
        True,
    )
    assert brief(torchwhere.phases()) == {
        "load": (4, 5, 2, 5),
        "use": (1, 1, 1, 0),
        "use/load": (1, 1, 1, 1),
    }


def test_async_generators_are_timed_while_they_run(clock: Clock) -> None:
    """The phase of an asynchronous generator also includes what the generator awaits."""

    @torchwhere.phase("fetch")
    async def items() -> AsyncIterator[int]:
        got = None
        for number in range(2):
            await asyncio.sleep(0)
            clock.sleep(2)
            try:
                got = yield number if got is None else got
            except KeyError:
                got = 7

    async def main() -> list[int]:
        got_items = []
        async for item in items():
            got_items.append(item)
            clock.sleep(50)
        generator = items()
        got_items += [await generator.asend(None), await generator.athrow(KeyError("x"))]
        await generator.aclose()
        return got_items

    with torchwhere.watch():
        assert asyncio.run(main()) == [0, 1, 0, 7]
    assert inspect.isasyncgenfunction(items)
    assert brief(torchwhere.phases()) == {"fetch": (6, 8, 2, 8)}


def test_a_generator_that_ends_inside_its_callers_phase(clock: Clock) -> None:
    """A phase around a `yield` may end inside a phase of the caller: both times are right."""

    def items() -> Iterator[None]:
        with torchwhere.phase("items"):
            yield
            clock.sleep(1)

    with torchwhere.watch():
        generator = items()
        next(generator)
        with torchwhere.phase("use"):
            clock.sleep(2)
            next(generator, None)
            clock.sleep(4)
        with torchwhere.phase("after"):
            pass
    assert brief(torchwhere.phases()) == {
        "items": (1, 3, 3, 0),
        "items/use": (1, 7, 7, 7),
        "after": (1, 0, 0, 0),
    }


def test_decorated_functions(clock: Clock, tmp_path: Path) -> None:
    """A decorated function has its name and docstring, may call itself, and its phase has the line
    of the call."""

    @torchwhere.phase("work")
    def work(depth: int) -> int:
        """Works."""
        clock.sleep(1)
        return work(depth - 1) if depth else 42

    with torchwhere.watch(out=tmp_path):
        assert work(2) == 42
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert (work.__name__, work.__doc__) == ("work", "Works.")
    assert brief(torchwhere.phases()) == {
        "work": (1, 3, 3, 1),
        "work/work": (1, 2, 2, 1),
        "work/work/work": (1, 1, 1, 1),
    }
    begin, *_, end = torchwhere.read_run(tmp_path).events(kinds={"phase_begin", "phase_end"})
    assert begin.place.line == end.place.line
    assert str(begin.place.line).endswith(f"test_phases.py:{line}")
    assert end.fields == {"phase": "work", "duration_ns": 3 * MS}


def test_the_place_of_a_phase(tmp_path: Path) -> None:
    """Both events of a phase inside a module have the place of that module and the line of the
    `with`."""

    class Timed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torchwhere.phase("double"):
                return x * 2

    model = torch.nn.Sequential(torch.nn.Identity(), Timed())
    with torchwhere.watch(model, out=tmp_path):
        model(torch.ones(1))
    begin, end = torchwhere.read_run(tmp_path).events(kinds={"phase_begin", "phase_end"})
    line = inspect.getsourcelines(Timed)[1] + 2
    for place in (begin.place, end.place):
        assert (place.module, place.pass_, place.call) == ("1", "forward", 0)
        assert str(place.line).endswith(f"test_phases.py:{line}")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_has_no_phases_and_no_breaks(backend: str) -> None:
    """Phases inside compiled code have no effect: one graph, no guard on the watch, the same results,
    no records."""
    graphs: list[Any] = []
    decorated = torchwhere.phase("decorated")(torch.relu)

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    @torch.compile(backend=count, fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        with torchwhere.phase("outer"), torchwhere.phase("inner"):
            return decorated(x) + 1

    x = torch.ones(3)
    expected = torch.relu(x) + 1
    assert step(x).equal(expected)
    with torchwhere.watch():
        assert step(x).equal(expected)
        with torchwhere.phase("around"):
            assert step(x).equal(expected)
    assert step(x).equal(expected)
    assert len(graphs) == 1
    assert [row.path for row in torchwhere.phases()] == [("around",)]
    torch._dynamo.reset()


def test_phases_without_a_watch() -> None:
    """Without a watch a phase stores nothing, on any thread and in any context."""

    def look() -> None:
        with torchwhere.phase("unwatched"):
            assert phase_hook._innermost.get() is None

    contextvars.Context().run(look)
    assert "unwatched" not in brief(torchwhere.phases())


def test_errors_do_not_reach_the_program(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error inside a phase's own bookkeeping is logged once, switches phases off, and never
    reaches the program."""
    with torchwhere.watch():
        session = current()
        assert session is not None
        monkeypatch.setattr(phase_hook.PhaseRecorder, "_add_node", lambda *_args, **_options: 1 / 0)
        for _ in range(5):
            with torchwhere.phase("data"):
                pass
    assert [record.getMessage()[:46] for record in caplog.records] == [
        "torchwhere: the hook for phases failed (ZeroDi"
    ]
    assert len(torchwhere.phases()) == 0


@pytest.mark.parametrize(("value", "kind"), [(5, "int"), (None, "NoneType")])
def test_only_functions_are_decorated(value: Any, kind: str) -> None:
    """Decorating anything but a function is a TypeError that says so."""
    with pytest.raises(TypeError, match=rf"^phase\('data'\) decorates a function, got {kind}$"):
        torchwhere.phase("data")(value)


# -- offline, and many ranks -----------------------------------------------------------------------


def _phases_of_a_rank(folder: Path) -> dict[str, Any]:
    """Record 50 steps with phases, in a ring of 64 records; rank 2 is slow, rank 3 saves once."""
    import torch.distributed as dist

    rank, clock = dist.get_rank(), Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phase_hook, "monotonic_ns", clock)
        patch.setattr(time, "monotonic_ns", clock)
        with torchwhere.watch(out=folder, records=64):
            for step in range(50):
                torchwhere.step(step)
                with torchwhere.phase("forward"), torchwhere.phase("attention"):
                    clock.sleep(2 + 2 * (rank == 2))
                with torchwhere.phase("backward"):
                    clock.sleep(3)
                if rank == 3 and step == 40:
                    with torchwhere.phase("save"):
                        clock.sleep(7)
            torchwhere.step(50)
            live = torchwhere.phases()
    dist.barrier()
    read = torchwhere.phases(folder, ranks=[rank])
    return {
        "live": [row.to_dict() for row in live],
        "read": [row.to_dict() for row in read],
        "steps": live.to_dict()["steps"],
    }


@pytest.fixture(scope="module")
def four_rank_run(
    four_ranks: Pool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("phases")
    return folder, four_ranks.run(_phases_of_a_rank, folder)


def test_sums_outlive_the_ring(four_rank_run: tuple[Path, list[dict[str, Any]]]) -> None:
    """A ring that has wrapped has lost events, but no sums: the table from the box equals the table
    from the process."""
    folder, answers = four_rank_run
    run = torchwhere.read_run(folder)
    assert all(box.counts.overwritten > 100 for box in run.boxes.values())
    for rank, answer in enumerate(answers):
        assert answer["live"] == answer["read"]
        assert answer["live"][0]["count"] == 50
        assert answer["steps"][str(rank)]["count"] == 50


def test_table_over_ranks(four_rank_run: tuple[Path, list[dict[str, Any]]]) -> None:
    """The table of many ranks has the time of each rank, the slowest and the fastest rank, and a
    phase of only one rank."""
    phases = torchwhere.phases(four_rank_run[0])
    row = phases["forward", "attention"]
    assert {rank: times.total_ns / MS for rank, times in row.by_rank.items()} == {
        0: 100,
        1: 100,
        2: 200,
        3: 100,
    }
    assert (row.slowest, row.fastest, row.all.count, row.all.total_ns / MS) == (2, 0, 200, 500)
    assert list(phases["save"].by_rank) == [3]
    assert phases["backward"].all.share == 600 / (250 + 250 + 350 + 257)
    assert list(torchwhere.phases(four_rank_run[0], ranks=[1, 2])["backward"].by_rank) == [1, 2]
    assert phases == torchwhere.phases(torchwhere.read_run(four_rank_run[0]))


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("TORCHWHERE_REGENERATE"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("width", [None, 80, 60])
def test_how_it_looks(four_rank_run: tuple[Path, list[dict[str, Any]]], width: int | None) -> None:
    """The tables of many ranks and of one rank fit a pipe and terminals of two widths."""
    many, single = (
        replace(torchwhere.phases(four_rank_run[0], ranks=ranks), parts=None)
        for ranks in (None, [3])
    )
    lines = [*shown(many, width=width), "", *shown(single, width=width)]
    assert width is None or max(map(len, lines)) <= width
    check_golden(f"phases-{width or 'pipe'}.txt", "\n".join(lines) + "\n")
    assert str(single) == "\n".join(shown(single))


def test_the_command(
    four_rank_run: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    """`torchwhere phases` prints the table, `--json` everything, `--rank` one rank; a missing rank
    is an error."""
    folder = str(four_rank_run[0])
    assert cli.main(["phases", folder]) == 0
    assert capsys.readouterr().out.rstrip("\n") == str(torchwhere.phases(folder))
    assert cli.main(["phases", folder, "--json", "--rank", "3"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == torchwhere.phases(folder, ranks=[3]).to_dict()
    assert printed["phases"][-1] == {
        "path": ["save"],
        "thread": "main",
        **(
            times := {
                "count": 1,
                "total_ns": 7 * MS,
                "mean_ns": 7 * MS,
                "max_ns": 7 * MS,
                "self_ns": 7 * MS,
            }
        ),
        **(rest := {"share": 7 / 257, "running": 0, "running_ns": 0}),
        "fastest": 3,
        "slowest": 3,
        "by_rank": {"3": times | rest},
    }
    assert cli.main(["phases", folder, "--rank", "9"]) == 2
    assert (
        capsys.readouterr().err == f"torchwhere: {folder} has no box of rank 9; it has ranks 0-3\n"
    )


def test_reading_needs_no_torch(four_rank_run: tuple[Path, list[dict[str, Any]]]) -> None:
    """Reading the phases of a run does not import torch."""
    code = (
        f"import sys, torchwhere; print(torchwhere.phases({str(four_rank_run[0])!r})); assert"
        " 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip("\n") == str(torchwhere.phases(four_rank_run[0]))


def test_a_killed_process(warm: WarmPython, tmp_path: Path) -> None:
    """The box of a killed process has all ended phases and the phases that it was in."""
    program = (
        "import os, signal, torchwhere\n"
        f"torchwhere.start(out={str(tmp_path)!r})\n"
        "for _ in range(3):\n"
        "    with torchwhere.phase('data'): pass\n"
        "with torchwhere.phase('train'), torchwhere.phase('save'):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert warm.run("-c", program).returncode == -signal.SIGKILL
    phases = torchwhere.phases(tmp_path)
    assert [(row.path, row.all.count, row.all.running) for row in phases] == [
        (("data",), 3, 0),
        (("train",), 0, 1),
        (("train", "save"), 0, 1),
    ]
    assert shown(phases)[-1].startswith("not ended: train > save on rank 0, after ")


def test_a_box_with_inconsistent_words() -> None:
    """Words of a box that were written at different times, or are damaged, give no absurd time."""
    sums = {
        PhaseKey((), True): PhaseSum(3, 30 * MS, 20 * MS, 1, START),
        PhaseKey(("torn",), True): PhaseSum(1, MS, MS, 1, 0),
        PhaseKey(("damaged",), True): PhaseSum(1, MS, MS, 1, 2**63),
    }
    phases = table({0: (sums, START + 10 * MS)})
    assert [times.total_ns for times in (phases["torn"].all, phases["damaged"].all)] == [MS, MS]
    assert phases.watched_ns == 40 * MS


def test_a_box_without_steps() -> None:
    """Without times of steps, the share is unknown and nothing is divided by zero."""
    phases = table({0: ({PhaseKey(("data",), True): PhaseSum(1, MS, MS)}, START)})
    assert phases["data"].all.share is None
    assert shown(phases)[1:] == [
        "phase  count   total    mean     max  share  self",
        "data       1  1.0 ms  1.0 ms  1.0 ms      -     -",
    ]


def test_hostile_names_are_inert(tmp_path: Path) -> None:
    """A phase's name may hold anything: on the terminal it is one line without escape sequences."""
    with torchwhere.watch(), torchwhere.phase("a\x1b[31m\nb\u202e/c"):
        phases = torchwhere.phases()
    lines = shown(phases)
    assert len(lines) == 5
    assert all(line.isprintable() for line in lines)


def test_bad_input(tmp_path: Path) -> None:
    """A value that is not a run is a TypeError; a folder without boxes or a missing rank is a
    TorchwhereError."""
    with pytest.raises(
        TypeError, match=r"^phases\(run\): expected a folder, a Run or nothing, got int$"
    ):
        torchwhere.phases(3)  # type: ignore[arg-type]
    with pytest.raises(TorchwhereError, match=r"holds no black box \(\*\.box\)"):
        torchwhere.phases(tmp_path)
    with torchwhere.watch(out=tmp_path):
        pass
    with pytest.raises(TorchwhereError, match=r"has no box of rank 7; it has rank 0$"):
        torchwhere.phases(tmp_path, ranks={7})
    assert isinstance(torchwhere.phases(tmp_path), Table)
    assert shown(torchwhere.phases(tmp_path)) == ["no phase was recorded"]


def test_phases_before_any_watch() -> None:
    """In a process that was never watched, the table is empty and says so."""
    code = (
        "import torchwhere; found = torchwhere.phases(); print(found); print(len(found),"
        " repr(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400)
    assert done.stdout.splitlines() == [
        "no phase was recorded",
        "this process has not been watched yet; use: with torchwhere.watch(): ...",
        "0 <Phases: 0 phases of 0 ranks>",
    ]
