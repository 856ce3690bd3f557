"""`SimpleProfiler`: the drop-in behaves like the original, except where it is better."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import _debug_utils as original

import torchwhere
from rank_pool import Pool
from torchwhere.drop_in import fsdp_debug

LOGGER = "torch.distributed.fsdp._debug_utils"


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Both profilers begin and end empty, and the debug level is restored."""
    level = dist.get_debug_level()
    for module in (original, fsdp_debug):
        module.SimpleProfiler.reset()
    yield
    for module in (original, fsdp_debug):
        module.SimpleProfiler.reset()
    dist.set_debug_level(level)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of both profilers: a number that the test advances."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


both = pytest.mark.parametrize("module", [original, fsdp_debug], ids=["original", "drop-in"])


# -- as the original -------------------------------------------------------------------------------


def test_types() -> None:
    """The types are the same strings as in the original."""
    theirs, ours = original.SimpleProfiler.Type, fsdp_debug.SimpleProfiler.Type
    assert [(t.name, t.value, str(t), repr(t), f"{t}") for t in ours] == [
        (t.name, t.value, str(t), repr(t), f"{t}") for t in theirs
    ]
    assert ours.ALLGATHER == "all_gather"
    assert (ours.__qualname__, len(ours)) == ("SimpleProfiler.Type", 6)


@both
def test_seconds_are_added_up(module: ModuleType, seconds: list[float]) -> None:
    """Each block adds its seconds to its type: nested, by enum or by name, and also after an
    exception."""
    profiler = module.SimpleProfiler
    with profiler.profile(profiler.Type.ALL):
        for took in (1.0, 2.0):
            with profiler.profile("all_gather"):
                assert profiler.profiling == {"all", "all_gather"}
                seconds[0] += took
        seconds[0] += 4
        with contextlib.suppress(ValueError), profiler.profile(profiler.Type.H2D):
            seconds[0] += 4
            raise ValueError("as planned")
        assert profiler.profiling == {profiler.Type.ALL}
    assert profiler.results == {"all": 11.0, profiler.Type.ALLGATHER: 3.0, "H2D": 4.0}
    assert profiler.profiling == set()
    assert profiler.results["never"] == 0.0
    assert profiler().results is profiler.results
    profiler.reset()
    assert (profiler.results, profiler.profiling) == ({}, set())


@both
def test_a_type_inside_itself(module: ModuleType) -> None:
    """The same type inside itself is an AssertionError with the text of the original, and the outer
    block goes on."""
    profiler = module.SimpleProfiler
    text = (
        " is already being profiled. SimpleProfiler does not support profiling multiple instances"
        " at the same time. "
    )
    with profiler.profile(profiler.Type.D2H):
        for again, shown in ((profiler.Type.D2H, "Type.D2H"), ("D2H", "D2H")):
            with pytest.raises(AssertionError) as caught, profiler.profile(again):
                raise RuntimeError("not reached")
            assert str(caught.value) == shown + text
        assert profiler.profiling == {"D2H"}
    assert set(profiler.results) == {"D2H"}


@both
def test_as_a_decorator(module: ModuleType, seconds: list[float]) -> None:
    """`profile` also decorates functions."""
    profiler = module.SimpleProfiler

    @profiler.profile("resharding")
    def work() -> int:
        seconds[0] += 1
        return 7

    assert work() + work() == 14
    assert profiler.results == {"resharding": 2.0}


def dumped(module: ModuleType, level: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    dist.set_debug_level(level)
    module.SimpleProfiler.results[module.SimpleProfiler.Type.ALL] += 1.5
    with caplog.at_level(logging.INFO, LOGGER):
        module.SimpleProfiler.dump_and_reset("state_dict took")
    assert module.SimpleProfiler.results == {}
    return [f"{record.levelname} {record.name} {record.getMessage()}" for record in caplog.records]


@both
def test_dump(module: ModuleType, caplog: pytest.LogCaptureFixture, one_rank: None) -> None:
    """A dump is logged with the original's logger, only at the debug level INFO, and always
    resets."""
    line = f"INFO {LOGGER} state_dict took defaultdict(<class 'float'>, {{<Type.ALL: 'all'>: 1.5}})"
    logged = dumped(module, dist.DebugLevel.INFO, caplog)
    if module is original:  # it formats the text later, when its results may be reset
        assert caplog.text.rstrip().endswith(line.partition(LOGGER)[2].strip())
    else:
        assert logged == [line]
    assert dumped(module, dist.DebugLevel.OFF, caplog) == []
    assert dumped(module, dist.DebugLevel.DETAIL, caplog) == []


# -- better than the original ----------------------------------------------------------------------


def test_dump_without_a_process_group(caplog: pytest.LogCaptureFixture) -> None:
    """Without a process group this is rank 0; the original raises and does not reset."""
    with pytest.raises(ValueError, match="process group"):
        dumped(original, dist.DebugLevel.INFO, caplog)
    assert len(dumped(fsdp_debug, dist.DebugLevel.INFO, caplog)) == 1


def test_reset_inside_a_block(seconds: list[float]) -> None:
    """A reset inside a block does not break the block; the original raises a KeyError."""
    with pytest.raises(KeyError), original.SimpleProfiler.profile("all"):
        original.SimpleProfiler.reset()
    profiler = fsdp_debug.SimpleProfiler
    with profiler.profile("all"):
        seconds[0] += 1
        profiler.reset()
        with profiler.profile("all"):  # free again, as after any reset
            seconds[0] += 1
    assert profiler.results == {"all": 3.0}


def test_threads_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads may be in the same phase at once, and all their times are added."""
    profiler, barrier, errors = fsdp_debug.SimpleProfiler, threading.Barrier(8), []
    clocks = threading.local()

    def tick() -> float:
        """A clock for each thread, which advances by a second at each reading."""
        clocks.now = getattr(clocks, "now", 0.0) + 1
        return clocks.now

    def work() -> None:
        try:
            for _ in range(200):
                barrier.wait()
                with profiler.profile(profiler.Type.ALLGATHER):
                    assert profiler.profiling == {"all_gather"}
        except BaseException as error:
            errors.append(error)

    monkeypatch.setattr(fsdp_debug, "time", SimpleNamespace(monotonic=tick))
    with torchwhere.watch():
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        phases = torchwhere.phases()
    assert errors == []
    assert phases["all_gather"].all.count == 1600
    assert profiler.results == {"all_gather": 1600.0}
    assert profiler.profiling == set()


def test_blocks_are_phases(tmp_path: Path) -> None:
    """In a watch each block is a phase in the box, with the value of its type, at the line of its
    `with`, nested."""
    profiler = fsdp_debug.SimpleProfiler
    with (
        torchwhere.watch(out=tmp_path),
        profiler.profile(profiler.Type.ALL),
        profiler.profile("mine"),
        profiler.profile(""),
    ):
        pass
    assert [row.path for row in torchwhere.phases(tmp_path)] == [
        ("all",),
        ("all", "mine"),
        ("all", "mine", "<unnamed>"),
    ]
    begin = next(torchwhere.read_run(tmp_path).events(kinds={"phase_begin"}))
    assert "test_simple_profiler.py:" in str(begin.place.line)


def _on_every_rank() -> tuple[list[str], dict[str, float]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(LOGGER)
    level, debug = logger.level, dist.get_debug_level()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        with fsdp_debug.SimpleProfiler.profile(fsdp_debug.SimpleProfiler.Type.ALLGATHER_OBJ):
            dist.barrier()
        fsdp_debug.SimpleProfiler.dump_and_reset("gathered")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        dist.set_debug_level(debug)
    return records, dict(fsdp_debug.SimpleProfiler.results)


def test_only_rank_0_logs_a_dump(two_ranks: Pool) -> None:
    """Only rank 0 logs a dump; all ranks reset."""
    (logged, left), (nothing, left_there) = two_ranks.run(_on_every_rank)
    assert len(logged) == 1
    assert logged[0].startswith(
        "gathered defaultdict(<class 'float'>, {<Type.ALLGATHER_OBJ: 'all_gather_object'>: "
    )
    assert (nothing, left, left_there) == ([], {}, {})


# -- the page --------------------------------------------------------------------------------------


def _printed(program: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(program, {})
    return out.getvalue()


def test_the_page_shows_both() -> None:
    """The program in docs/migrating.md prints what the page shows, with the drop-in and with the
    original."""
    page = (Path(__file__).parent.parent / "docs" / "migrating.md").read_text()
    section = page.partition("_debug_utils`: `SimpleProfiler`\n\n")[2].partition("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    ours, theirs = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    assert _printed(program) == ours
    assert (
        _printed(
            program.replace("torchwhere.drop_in.fsdp_debug", "torch.distributed.fsdp._debug_utils")
        )
        == theirs
    )
