"""The time of devices: how long collectives wait and take, what a step consists of, and what
`phases`, `report` and `trace` show of it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import Browser, browser
from test_nccl_runs import unpacked
from timed_device_boxes import DeviceEvent, step_mark, write_box
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.run import read_run
from torchwhere.cli import main
from torchwhere.diagnose.clocks.call_arrivals import JobArrivals
from torchwhere.diagnose.clocks.host_clocks import UNALIGNED
from torchwhere.diagnose.device_time.calls import (
    NO_RANK,
    UNKNOWN_NS,
    DeviceCalls,
    device_arrivals,
    device_calls,
)
from torchwhere.diagnose.device_time.job import JobDeviceTimes
from torchwhere.diagnose.device_time.steps import PARTS, _Cover
from torchwhere.diagnose.phases import phases
from torchwhere.pipeline.report import report_json, report_on
from torchwhere.render.page.page import page_html
from trace_format import checked

MS = 1_000_000
VICTIM = 2
OTHERS = (0, 1, 3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("nccl_runs.txz", tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


def times_of(folder: Path) -> JobDeviceTimes:
    device = phases(read_run(folder)).device
    assert device is not None
    return device


def calls_of(folder: Path, rank: int, *, ranks: int = 2) -> DeviceCalls:
    """The device calls of a rank, by the wall clocks."""
    job_arrivals = JobArrivals(UNALIGNED)
    boxes = [read_box(folder / f"rank{number}.box") for number in range(ranks)]
    own = [device_arrivals(box) for box in boxes]
    for arrivals in own:
        assert arrivals is not None
        job_arrivals.add(arrivals)
    arrivals = own[rank]
    assert arrivals is not None
    return device_calls(boxes[rank], arrivals, clocks=UNALIGNED, job_arrivals=job_arrivals)


def write(folder: Path, *ranks: Sequence[DeviceEvent], **settings: Any) -> Path:
    for rank, events in enumerate(ranks):
        write_box(folder, rank, events, ranks=len(ranks), **settings)
    return folder


# -- one collective --------------------------------------------------------------------------------


def test_wait_and_transfer(tmp_path: Path) -> None:
    """A collective waits until the last device reaches it; the rest of its time is the transfer."""
    write(tmp_path, [DeviceEvent(0, 10, 35)], [DeviceEvent(0, 30, 35)])
    early, late = calls_of(tmp_path, 0), calls_of(tmp_path, 1)
    assert (early.wait_ns.tolist(), late.wait_ns.tolist()) == ([20 * MS], [0])
    assert early.transfer_ns.tolist() == late.transfer_ns.tolist() == [5 * MS]
    assert early.last_rank.tolist() == [1]


def test_unknown_ends(tmp_path: Path) -> None:
    """Without an end the transfer is unknown. The wait is known, unless a rank may leave before
    the others arrive, as the root of a broadcast does."""
    events = [[DeviceEvent(0, at), DeviceEvent(0, 50 + at, op="broadcast")] for at in (10, 30)]
    calls = calls_of(write(tmp_path, *events), 0)
    assert calls.transfer_ns.tolist() == [UNKNOWN_NS, UNKNOWN_NS]
    assert calls.wait_ns.tolist() == [20 * MS, UNKNOWN_NS]


def test_a_call_that_ends_before_the_last_arrival(tmp_path: Path) -> None:
    """A root that leaves early has waited only as long as its collective took."""
    write(tmp_path, [DeviceEvent(0, 10, 12, op="broadcast")], [DeviceEvent(0, 30, 33)])
    calls = calls_of(tmp_path, 0)
    assert (calls.wait_ns.tolist(), calls.transfer_ns.tolist()) == ([2 * MS], [0])


def test_a_device_that_has_not_arrived(tmp_path: Path) -> None:
    """While one device has not reached a call, the last arrival is not known."""
    write(tmp_path, [DeviceEvent(0, 10, 11), DeviceEvent(0, 20)], [DeviceEvent(0, 10, 11)])
    calls = calls_of(tmp_path, 0)
    assert calls.wait_ns.tolist() == [0, UNKNOWN_NS]
    assert calls.last_rank.tolist()[1] == NO_RANK


# -- one step --------------------------------------------------------------------------------------


def test_parts_of_a_step(tmp_path: Path) -> None:
    """The parts add up to the step, and no time counts twice. An asynchronous call is hidden until
    the last mark that the stream reached before the call ended."""
    own = [
        DeviceEvent(0, 0, 5),
        DeviceEvent(0, 10, 40, is_async=True),
        DeviceEvent(0, 20, 30),
        DeviceEvent(1, 100, 105),
    ]
    other = [
        DeviceEvent(0, 0, 5),
        DeviceEvent(0, 10, 40, is_async=True),
        DeviceEvent(0, 26, 30),
        DeviceEvent(1, 100, 105),
    ]
    steps = times_of(write(tmp_path, own, other)).by_rank[0]
    assert steps.steps.tolist() == [0]
    assert steps.device_ns.tolist() == [100 * MS]
    assert steps.exposed_ns.tolist() == [15 * MS]
    assert steps.hidden_ns.tolist() == [10 * MS]
    assert steps.unclear_ns.tolist() == [10 * MS]
    assert steps.compute_ns.tolist() == [65 * MS]
    assert (steps.waited_ns.tolist(), steps.waited_for.tolist()) == ([6 * MS], [1])
    assert steps.open_calls.tolist() == [0]


def test_unrecorded_ends_are_counted(tmp_path: Path) -> None:
    """An asynchronous call without an end counts until the last device reached it. It is never
    hidden, and is counted as open."""
    asynchronous = [DeviceEvent(0, at, is_async=True) for at in (10, 90)]
    own, other = (
        [DeviceEvent(0, 0, 1), call, DeviceEvent(0, 92, 93), DeviceEvent(1, 100, 101)]
        for call in asynchronous
    )
    device = times_of(write(tmp_path, own, other))
    for rank, unclear_ms in ((0, 80), (1, 0)):
        steps = device.by_rank[rank]
        assert steps.unclear_ns.tolist() == [unclear_ms * MS]
        assert steps.hidden_ns.tolist() == [0]
        assert steps.open_calls.tolist() == [1]
    assert (device.usual(0).waited_for, device.usual(1).waited_for) == (1, None)


def test_the_wait_for_buckets(tmp_path: Path) -> None:
    """Three buckets are launched while the backward computes, and the stream waits for all of them
    at its end. The time until the wait is hidden, the wait is exposed, and nothing is unclear."""
    buckets = [DeviceEvent(0, at, 70, waited=50, is_async=True) for at in (10, 30, 45)]
    own = [step_mark(0, 0), *buckets, step_mark(1, 100)]
    device = times_of(write(tmp_path, own, own))
    steps = device.by_rank[0]
    assert steps.exposed_ns.tolist() == [20 * MS]
    assert steps.unclear_ns.tolist() == [0]
    assert steps.hidden_ns.tolist() == [
        5 * MS
    ]  # of the last bucket: the others may be done earlier
    assert steps.compute_ns.tolist() == [75 * MS]
    assert steps.open_calls.tolist() == [0]
    calls = calls_of(tmp_path, 0)
    assert calls.done_ns.tolist()[:2] == [UNKNOWN_NS, UNKNOWN_NS]
    assert calls.transfer_ns.tolist() == [UNKNOWN_NS, UNKNOWN_NS, 25 * MS]


def test_a_wait_for_a_collective_that_is_done(tmp_path: Path) -> None:
    """If the stream passes the wait at once, the collective ended before. All of it is hidden, at
    least until the last device reached it."""
    own, other = (
        [step_mark(0, 0), DeviceEvent(0, at, 50.01, waited=50, is_async=True), step_mark(1, 100)]
        for at in (10, 30)
    )
    steps = times_of(write(tmp_path, own, other)).by_rank[0]
    assert steps.hidden_ns.tolist() == [20 * MS]
    assert (steps.exposed_ns + steps.unclear_ns).tolist() == [0]
    assert steps.open_calls.tolist() == [0]


def on_own_stream(
    reached: float, done: float | None, *, waited: float | None = None
) -> DeviceEvent:
    """A collective that blocks a stream beside that of the job, as those of FSDP."""
    return DeviceEvent(0, reached, done, waited=waited, lane=1)


def test_a_wait_for_another_stream(tmp_path: Path) -> None:
    """A collective on a stream of its own is hidden until the stream of the job comes to the wait
    for it, and exposed after that. Nothing is unclear, and its end is its own."""
    own = [step_mark(0, 0), on_own_stream(10, 70, waited=50), step_mark(1, 100)]
    steps = times_of(write(tmp_path, own, own, streams=(0, 7))).by_rank[0]
    assert steps.exposed_ns.tolist() == [20 * MS]
    assert steps.hidden_ns.tolist() == [40 * MS]
    assert steps.unclear_ns.tolist() == [0]
    assert steps.compute_ns.tolist() == [40 * MS]
    assert calls_of(tmp_path, 0).transfer_ns.tolist() == [60 * MS]


def test_a_wait_before_the_collective_is_reached(tmp_path: Path) -> None:
    """The stream of the job waits, while the other stream is still in an earlier collective: all of
    the wait in which a collective was in flight is exposed."""
    calls = [on_own_stream(2, 10, waited=1), on_own_stream(12, 30, waited=5)]
    own = [step_mark(0, 0), *calls, step_mark(1, 100)]
    steps = times_of(write(tmp_path, own, own, streams=(0, 7))).by_rank[0]
    assert steps.exposed_ns.tolist() == [26 * MS]
    assert (steps.hidden_ns + steps.unclear_ns).tolist() == [0]


def test_a_wait_for_a_stream_that_is_done(tmp_path: Path) -> None:
    """A collective that was done before the stream of the job came to the wait is hidden. Without a
    known wait it is unclear."""
    own = [
        step_mark(0, 0),
        on_own_stream(10, 30, waited=50),
        on_own_stream(60, 70),
        step_mark(1, 100),
    ]
    steps = times_of(write(tmp_path, own, own, streams=(0, 7))).by_rank[0]
    assert steps.exposed_ns.tolist() == [0]
    assert steps.hidden_ns.tolist() == [20 * MS]
    assert steps.unclear_ns.tolist() == [10 * MS]


def test_a_wait_on_another_stream(tmp_path: Path) -> None:
    """A wait on a stream beside the job does not show whether the job waited."""
    call = DeviceEvent(0, 10, 40, waited=20, is_async=True, lane=1, wait_lane=1)
    own = [step_mark(0, 0), call, step_mark(1, 100)]
    steps = times_of(write(tmp_path, own, own, streams=(0, 7))).by_rank[0]
    assert steps.exposed_ns.tolist() == [0]
    assert steps.unclear_ns.tolist() == [30 * MS]


@pytest.mark.parametrize(
    ("lane", "streams", "exposed_ms"),
    [(0, (0, 7), 10), (1, (0, 7), 0), (None, (0, 7), 0), (None, (7,), 10), (1, (0, 0), 10)],
)
def test_streams_beside_the_job(
    tmp_path: Path, lane: int | None, streams: tuple[int, ...], exposed_ms: int
) -> None:
    """A collective is exposed only if it runs on the stream of the job: FSDP has its own."""
    events = [DeviceEvent(0, 0, 10, lane=lane), DeviceEvent(1, 100, 110, lane=lane)]
    steps = times_of(write(tmp_path, events, events, streams=streams)).by_rank[0]
    assert steps.exposed_ns.tolist() == [exposed_ms * MS]
    assert (steps.exposed_ns + steps.unclear_ns).tolist() == [10 * MS]


def test_a_replay_is_not_exposed(tmp_path: Path) -> None:
    """The time of a CUDA graph with collectives includes its compute: it is unclear, and the trace
    does not draw it as a collective."""
    events = [DeviceEvent(0, 0, 10, is_replayed=True)] * 2 + [DeviceEvent(1, 100, 110)]
    run = write(tmp_path / "run", events, events)
    steps = times_of(run).by_rank[0]
    assert (steps.exposed_ns.tolist(), steps.unclear_ns.tolist()) == ([0], [10 * MS])
    slices = device_slices(traced(run, tmp_path / "out.json"), 0)
    assert sum("op" in e["args"] for e in slices) == 1


def test_step_marks(tmp_path: Path) -> None:
    """If steps are marked on the device, a step begins at its mark, also without collectives; the
    stream of the marks is that of the job."""
    events = [step_mark(0, 5), DeviceEvent(0, 20, 30), step_mark(1, 50), step_mark(2, 80)]
    steps = times_of(write(tmp_path, events, streams=(9, 0))).by_rank[0]
    assert steps.steps.tolist() == [0, 1]
    assert steps.device_ns.tolist() == [45 * MS, 30 * MS]
    assert steps.exposed_ns.tolist() == [10 * MS, 0]


def test_one_device_without_collectives(tmp_path: Path) -> None:
    """A job of one rank has the time of its steps."""
    write(tmp_path, [step_mark(0, 5), step_mark(1, 50)])
    assert times_of(tmp_path).usual(0).compute_ns == 45 * MS


def test_clocks_are_aligned(tmp_path: Path) -> None:
    """A host whose clock is 5 s ahead does not look like a device that is 5 s late."""
    events = [DeviceEvent(step, 10 * step + 3, 10 * step + 5, 10 * step) for step in range(20)]
    write_box(tmp_path, 0, events, host="a")
    write_box(tmp_path, 1, events, host="b", ahead_ns=5_000 * MS)
    device = times_of(tmp_path)
    assert device.clocks == "the aligned clocks of 2 hosts"
    assert max(device.by_rank[0].waited_ns.tolist()) < MS


def test_chosen_ranks_wait_for_all(tmp_path: Path) -> None:
    """The wait of a chosen rank depends on the ranks that are not chosen."""
    write(
        tmp_path,
        [DeviceEvent(0, 10, 35), DeviceEvent(1, 50, 51)],
        [DeviceEvent(0, 30, 35), DeviceEvent(1, 50, 51)],
    )
    device = phases(read_run(tmp_path), ranks={0}).device
    assert device is not None
    assert {rank: steps.waited_ns.tolist() for rank, steps in device.by_rank.items()} == {
        0: [20 * MS]
    }


def test_cover() -> None:
    """The time that intervals cover together equals a count of covered moments."""
    random = np.random.default_rng(0)
    for size in (0, 1, 2, 20):
        begins = random.integers(0, 200, size)
        ends = begins + random.integers(0, 30, size)
        edges = np.sort(random.integers(0, 240, (10, 2)), axis=1)
        is_covered = np.zeros(300, np.bool_)
        for begin, end in zip(begins, ends, strict=True):
            is_covered[begin:end] = True
        wanted = [int(is_covered[low:high].sum()) for low, high in edges]
        assert _Cover(begins, ends).within(edges[:, 0], edges[:, 1]).tolist() == wanted


# -- recorded runs ---------------------------------------------------------------------------------


def test_a_slow_device(runs: Path) -> None:
    """The slow device computes while the others wait for it, in each step."""
    device = times_of(runs / "slow_ddp")
    slow = device.usual(VICTIM)
    assert slow.compute_ns > 0.99 * slow.device_ns
    for rank in OTHERS:
        usual = device.usual(rank)
        assert usual.waited_for == VICTIM
        assert usual.waited_steps >= usual.steps - 1
        assert 150 * MS < usual.waited_ns < 210 * MS
        assert usual.compute_ns < 20 * MS
    for steps in device.by_rank.values():
        parts = np.stack([getattr(steps, f"{part}_ns") for part in PARTS])
        assert (parts.sum(axis=0) == steps.device_ns).all()
        assert (parts >= 0).all()


def test_healthy_devices(runs: Path) -> None:
    """In a healthy job no device waits for more than a small part of its steps."""
    device = times_of(runs / "healthy_ddp")
    for rank in range(4):
        usual = device.usual(rank)
        assert usual.waited_ns < 0.05 * usual.device_ns


def test_waits_of_recorded_collectives(runs: Path) -> None:
    """In the slow job each reduction of gradients waits for the slow device, and its own does
    not."""
    calls = {rank: calls_of(runs / "slow_ddp", rank, ranks=4) for rank in range(4)}
    is_late = calls[0].wait_ns > 100 * MS
    is_late[0] = False  # NCCL connects the ranks
    assert is_late.sum() >= 50
    assert set(calls[0].last_rank[is_late].tolist()) == {VICTIM}
    assert (calls[VICTIM].wait_ns < 20 * MS)[10:].all()


# -- phases ----------------------------------------------------------------------------------------


def test_phases(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`phases` shows a row for each rank, and says what is not known."""
    assert main(["phases", str(runs / "slow_ddp")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "no phase was recorded",
        "",
        "device, median of 29 steps",
        "rank    step  compute, idle  hidden  unclear  exposed   waited  waited for",
        "   0  185 ms         4.5 ms    0 ns   181 ms  52.5 us   181 ms  rank 2 in 28 steps",
        "   1  185 ms         4.4 ms    0 ns   181 ms  76.9 us   181 ms  rank 2 in 29 steps",
        "   2  185 ms         185 ms    0 ns     0 ns  70.8 us  21.9 us",
        "   3  185 ms         4.5 ms    0 ns   181 ms  73.2 us   181 ms  rank 2 in 29 steps",
        (
            "unclear: a collective that is asynchronous or has its own stream was in flight."
            " It is not known whether the job computed or waited for it."
        ),
        (
            "The end of 248 collectives was not recorded. Each counts only until the last device"
            " reached it; a send, a recv or a collective with a root counts as compute."
        ),
        "Devices are compared by the wall clock of the host.",
    ]


def test_ranks_with_different_steps(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank whose device was killed, or was not looked at any more, has fewer steps: the table
    shows how many each rank has."""
    assert main(["phases", str(runs / "killed")]) == 0
    _, _, title, heading, *rows = capsys.readouterr().out.splitlines()
    assert title == "device, median of the steps of each rank"
    assert heading.split()[:3] == ["rank", "steps", "step"]
    assert [row.split()[:2] for row in rows[:4]] == [["0", "6"], ["1", "6"], ["2", "2"], ["3", "6"]]


def test_phases_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON of `phases` has each step of each device."""
    assert main(["phases", str(runs / "slow_ddp"), "--json", "--rank", "0"]) == 0
    device = json.loads(capsys.readouterr().out)["device"]
    assert list(device["ranks"]) == ["0"]
    columns = device["ranks"]["0"]
    assert {len(column) for column in columns.values()} == {29}
    assert columns["waited_for"].count(VICTIM) == 28


def test_many_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of many ranks, `phases` shows those that waited the least and the most."""
    events = [[DeviceEvent(0, at, 50), DeviceEvent(1, 60, 61)] for at in range(40)]
    assert main(["phases", str(write(tmp_path, *events))]) == 0
    lines = capsys.readouterr().out.splitlines()
    ranks = [int(line[:4]) for line in lines if line[:4].strip().isdecimal()]
    assert ranks == [*range(8), *range(32, 40)]
    assert "and 24 ranks between them; --json has all" in lines


# -- report ----------------------------------------------------------------------------------------


def test_report(runs: Path) -> None:
    """The report has the place and the times of each device, how far it is behind its CPU, and
    arrivals of the devices."""
    report = report_json(report_on(runs / "endless_ddp"))
    ranks = report["ranks"]
    places = [ranks["devices"][at] for at in ranks["device"]]
    waiting = "at all_reduce #23 of group default, backward of layers.0.0, nccl_jobs.py:35"
    blocked = "after all_reduce #21 of group default, nccl_jobs.py:36"
    assert places == [waiting, waiting, blocked, waiting]
    assert ranks["device_step"] == [6, 6, 6, 6]
    assert ranks["device_behind"] == [1, 1, 1, 1]
    assert ranks["device_behind_calls"] == [1, 1, 3, 1]
    (group,) = report["collectives"]
    assert group["window"].endswith("arrival of the devices by the wall clock of the host")
    assert [row["arrived"] for row in group["rows"]][-3:] == [3, 3, 0]


def test_report_of_a_slow_device(runs: Path) -> None:
    """The slow device arrives late, and its row of the device section has no wait."""
    report = report_json(report_on(runs / "slow_ddp"))
    (group,) = report["collectives"]
    late = np.array(group["matrix"]["ms"], np.float64)
    assert np.nanmean(late[VICTIM]) > 5 * np.nanmean(late[0])
    waited = np.array(report["device"]["ms"]["waited"])[:, 5:]
    assert (waited[VICTIM] < 10).all()
    assert (waited[list(OTHERS)] > 150).all()


def test_page(runs: Path, tmp_path: Path, chromium: Browser) -> None:
    """The page shows where CPU and device of a rank are, and the time of its device."""
    path = tmp_path / "report.html"
    path.write_text(page_html(report_json(report_on(runs / "slow_ddp"))))
    with chromium.opened(path) as opened:
        assert opened.errors == []
        assert "rank 2 in 29 steps" in opened.page.inner_text("#device .body")
        card = opened.page.inner_text("#ranks .card .facts").split("\n")
        place = "after all_reduce #90 of group default, nccl_jobs.py:36, step 29"
        assert card[card.index("device") + 1] == place
        assert "CPU" in card


def test_too_many_ranks(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of a run with too many ranks says that it leaves out the times of the devices."""
    monkeypatch.setattr("torchwhere.diagnose.report.device.MOST_RANKS", 3)
    report = report_json(report_on(runs / "slow_ddp"))
    assert "device" not in report
    assert (
        "times of the devices: left out, because 4 ranks are more than 3; torchwhere phases shows"
        " them"
    ) in report["missing"]


def test_no_device(tmp_path: Path) -> None:
    """Without device data, no output mentions a device."""
    events = [DeviceEvent(step, None, issued=10 * step) for step in range(5)]
    run = write(tmp_path / "run", events, events, has_device=False)
    table = phases(read_run(run))
    assert "device" not in table.to_dict()
    assert "device" not in str(table)
    report = report_json(report_on(run))
    assert not [name for name in (*report, *report["ranks"]) if name.startswith("device")]
    assert "arrival by" in report["collectives"][0]["window"]
    assert 'id="device"' not in page_html(report)
    assert "device" not in json.dumps(traced(run, tmp_path / "out.json"))


# -- trace -----------------------------------------------------------------------------------------


def traced(folder: Path, out: Path, *options: str) -> list[dict[str, Any]]:
    assert main(["trace", str(folder), "-o", str(out), *options]) == 0
    events: list[dict[str, Any]] = checked(out.read_text())["traceEvents"]
    return events


def device_slices(events: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and e["cat"] == "device" and e["pid"] == rank]


def test_trace(runs: Path, tmp_path: Path) -> None:
    """The trace has tracks of the devices, with waits and steps, and arrows from the CPU."""
    events = traced(runs / "slow_ddp", tmp_path / "out.json")
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0}
    assert {
        "device: steps",
        "device: stream of the job",
        "device: other collectives",
    } <= names
    slices = device_slices(events, 0)
    steps = [e for e in slices if e["name"].startswith("step")]
    assert len(steps) == 29
    assert steps[10]["args"]["waited_for"] == VICTIM
    late = [e for e in slices if e["args"].get("waited_us", 0) > 100_000 and "op" in e["args"]][1:]
    assert {e["args"]["last"] for e in late} == {VICTIM}
    assert all(e["args"]["end"] == "estimated" for e in late)
    reduced = next(
        e for e in slices if e["args"].get("transfer_us") and e["args"]["async"] is False
    )
    assert "end" not in reduced["args"]
    starts = [e for e in events if e["ph"] == "s" and e["cat"] == "issue" and e["pid"] == 0]
    assert len(starts) == sum("op" in e["args"] for e in slices)


def test_trace_of_collectives_at_once(tmp_path: Path) -> None:
    """Collectives that overlap have lanes of their own, also if one of them ends first."""
    own = [DeviceEvent(0, 0, 100, is_async=True), DeviceEvent(0, 10, 90, is_async=True)]
    other = [DeviceEvent(0, 50, 100, is_async=True), DeviceEvent(0, 60, 90, is_async=True)]
    run = write(tmp_path / "run", own, other)
    slices = device_slices(traced(run, tmp_path / "out.json"), 0)
    calls = [e for e in slices if "op" in e["args"]]
    assert len({e["tid"] for e in calls}) == 2
    waits = [e for e in slices if e["name"] == "wait for rank 1"]
    assert [e["dur"] for e in waits] == [50_000, 50_000]
    assert [e["args"]["transfer_us"] for e in calls] == [50_000, 30_000]


def named(events: list[dict[str, Any]], rank: int, begin: str) -> list[dict[str, Any]]:
    return [e for e in device_slices(events, rank) if e["name"].startswith(begin)]


def test_trace_of_a_hang(runs: Path, tmp_path: Path) -> None:
    """Devices that wait for a device that hangs have an unfinished collective as long as their rank
    was alive, and the device that hangs shows what it has not reached."""
    events = traced(runs / "endless_ddp", tmp_path / "out.json")
    assert not [e for e in device_slices(events, VICTIM) if "unfinished" in e["args"]]
    (missing,) = named(events, VICTIM, "not reached")
    assert missing["name"] == "not reached: all_reduce #22"
    reached = []
    for rank in OTHERS:
        open_ = [e for e in device_slices(events, rank) if "unfinished" in e["args"]]
        assert [e["args"]["number"] for e in open_] == [22, 23]
        waits = named(events, rank, f"wait for rank {VICTIM}")[-2:]
        assert [(e["ts"], e["dur"]) for e in waits] == [(e["ts"], e["dur"]) for e in open_]
        reached.append(open_[0]["ts"])
        assert open_[0]["dur"] > 18.5e6
    assert missing["ts"] == min(reached)
    assert missing["dur"] > 18.5e6


def test_trace_of_a_deadlock(runs: Path, tmp_path: Path) -> None:
    """A device that waits in one group shows the ranks that it waits for, and beside that what it
    has not reached in another group."""
    events = traced(runs / "opposite_groups", tmp_path / "out.json")
    (wait,) = named(events, 2, "wait for ranks 0-1, 3")
    (missing,) = named(events, 2, "not reached")
    assert missing["args"]["group"] == "1"
    assert missing["tid"] != wait["tid"]


def test_trace_of_a_healthy_job_that_was_killed(runs: Path, tmp_path: Path) -> None:
    """If all devices have reached the same collectives, none waits and none lacks one."""
    events = traced(runs / "healthy_ddp", tmp_path / "out.json")
    for rank in range(4):
        assert not named(events, rank, "not reached")
        assert not [e for e in device_slices(events, rank) if "unfinished" in e["args"]]


def test_trace_of_some_steps(runs: Path, tmp_path: Path) -> None:
    """With `--step` the trace has the device work that the CPU issued in that step."""
    events = traced(runs / "slow_ddp", tmp_path / "out.json", "--step", "20", "--rank", "0")
    assert {e["args"]["step"] for e in device_slices(events, 0) if "step" in e["args"]} == {20}


def step_names(events: list[dict[str, Any]], rank: int) -> list[str]:
    names = (e["name"] for e in device_slices(events, rank))
    return [name for name in names if name.startswith("step ")]


def test_trace_of_cuda_graphs(tmp_path: Path) -> None:
    """The trace has the device steps of a job whose collectives are inside CUDA graphs, all of them
    or those that are chosen."""
    run = unpacked("nccl_graphs.txz", tmp_path) / "replay_healthy"
    whole = traced(run, tmp_path / "whole.json")
    assert step_names(whole, 0) == [f"step {number}" for number in range(206)]
    some = traced(run, tmp_path / "some.json", "--steps", "20:23")
    assert step_names(some, 3) == ["step 20", "step 21", "step 22"]


def test_trace_without_collectives(tmp_path: Path) -> None:
    """The trace has the device steps of a job that issues no collective."""
    marks = [replace(step_mark(step, 5 + 40 * step), issued=step) for step in range(4)]
    run = write(tmp_path / "run", marks)
    assert step_names(traced(run, tmp_path / "whole.json"), 0) == ["step 0", "step 1", "step 2"]
    assert step_names(traced(run, tmp_path / "one.json", "--step", "1"), 0) == ["step 1"]


def test_trace_for_hta(runs: Path, tmp_path: Path) -> None:
    """Files for HTA have no slices of a device."""
    assert main(["trace", str(runs / "slow_ddp"), "-o", f"{tmp_path}/hta/"]) == 0
    text = gzip.decompress((tmp_path / "hta" / "rank0.json.gz").read_bytes()).decode()
    assert '"device' not in text
