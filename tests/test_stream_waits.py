"""The waits of a job for other streams, on an accelerator in software: FSDP issues its collectives on
streams of its own, and the stream of the job waits for events on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulated_programs import PROGRAM, Tools
from torchwhere.blackbox.box import Box
from torchwhere.blackbox.device import device_times, device_waits, ends_are_bounds
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.run import read_run
from torchwhere.core.events import Kind
from torchwhere.diagnose.phases import phases

pytestmark = pytest.mark.exhaustive  # two compilations

HERE = Path(__file__).parent
BEGIN = """
from simulated_streams import Event, Stream, current_stream
join_group(sim, folder)
x, own = buffer(), Stream()

def issue():
    "Issue a collective that blocks a stream of its own, and record an event after it."
    with own:
        dist.all_reduce(x)
    return own.record_event()
"""


def collectives_in(box: Box) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.flatnonzero(box.records["kind"] == int(Kind.COLLECTIVE))


def test_a_wait_for_an_event(tools: Tools, tmp_path: Path) -> None:
    """The stream of the job works for 0.1 s, then it waits for a collective on another stream, which
    is busy for 0.4 s. The end of that wait is the end of the collective, and a second wait changes
    nothing."""
    tools.run(
        BEGIN
        + """
with torchwhere.watch(out=folder / "run"):
    current_stream().wait_event(issue())  # the first one takes long
    settle(part.device_status()["marked"])
    torchwhere.step(1)
    with own:
        sim.kernel(0.4)
    done = issue()
    again = own.record_event()
    sim.kernel(0.1)
    current_stream().wait_event(done)
    sim.kernel(0.1)
    current_stream().wait_event(again)
    torchwhere.step(2)
    settle(part.device_status()["marked"])
print("{}")
""",
        tmp_path,
    )
    box = read_box(tmp_path / "run" / "rank0.box")
    at = collectives_in(box)[1]
    (reached_ns, done_ns), (waited_ns, lanes) = device_times(box), device_waits(box)
    assert 0.25 < (reached_ns[at] - waited_ns[at]) / 1e9 < 0.4  # not that of the second wait
    assert 0 <= (done_ns[at] - reached_ns[at]) / 1e9 < 0.1
    assert lanes[at] >= 0
    steps = phases(read_run(tmp_path / "run")).device
    assert steps is not None
    assert (steps.by_rank[0].exposed_ns > 0).tolist() == [True]
    assert (steps.by_rank[0].hidden_ns + steps.by_rank[0].unclear_ns).tolist() == [0]


def test_a_collective_that_ends_before_the_wait_for_it(tools: Tools, tmp_path: Path) -> None:
    """A collective ends on its own stream while the stream of the job works for 0.4 s. Its end is
    only known to be before the next look at the device, or before the next mark on its stream. The
    device counts it as done, and its time as hidden."""
    tools.run(
        BEGIN
        + """
with torchwhere.watch(out=folder / "run"):
    torchwhere.step(1)
    current_stream().wait_event(issue())  # the first one takes long
    settle(part.device_status()["marked"])
    torchwhere.step(2)
    done, next_done = issue(), issue()
    sim.kernel(0.4)
    current_stream().wait_event(done)
    current_stream().wait_event(next_done)
    dist.all_reduce(x)
    torchwhere.step(3)
    settle(part.device_status()["marked"])
print("{}")
""",
        tmp_path,
    )
    box = read_box(tmp_path / "run" / "rank0.box")
    at = collectives_in(box)[1:]
    (reached_ns, done_ns), (waited_ns, _) = device_times(box), device_waits(box)
    assert ends_are_bounds(box)[at].tolist() == [True, True, False]
    took_s = (done_ns[at] - reached_ns[at]) / 1e9
    assert (took_s >= 0).all()
    assert (took_s < 0.25).all()  # less than the wait was away
    assert done_ns[at[0]] <= reached_ns[at[1]]  # the next mark on its stream
    assert (waited_ns[at[:2]] > done_ns[at[:2]]).all()
    device = phases(read_run(tmp_path / "run")).device
    assert device is not None
    steps = device.by_rank[0].chosen(device.by_rank[0].steps == 2)
    assert steps.open_calls.tolist() == [0]
    assert steps.exposed_ns[0] < 0.1e9


def test_waits_that_do_not_count(tools: Tools, tmp_path: Path) -> None:
    """The stream of the job waits for no collective if the event is on a stream without one, if the
    event was used again, or if another stream waits."""
    tools.run(
        BEGIN
        + """
other = Stream()
with torchwhere.watch(out=folder / "run"):
    event = issue()
    with other:
        sim.kernel(0)
    event.record(other)
    current_stream().wait_event(event)
    other.wait_event(issue())
    with other:
        other.wait_event(issue())
    torchwhere.step()
    settle(part.device_status()["marked"])
print("{}")
""",
        tmp_path,
    )
    box = read_box(tmp_path / "run" / "rank0.box")
    at = collectives_in(box)
    assert len(at) == 3
    assert (device_times(box)[1][at] > 0).all()
    assert not device_waits(box)[0].any()


def test_a_stream_that_becomes_the_stream_of_the_job(tools: Tools, tmp_path: Path) -> None:
    """The first collective runs beside the stream of the job. Then steps begin on its stream: an
    event there is no event after the collective, but one of the job itself."""
    tools.run(
        BEGIN
        + """
with torchwhere.watch(out=folder / "run"):
    issue()
    with own:
        torchwhere.step(1)
        own.wait_event(own.record_event())
    torchwhere.step(2)
    settle(part.device_status()["marked"])
print("{}")
""",
        tmp_path,
    )
    box = read_box(tmp_path / "run" / "rank0.box")
    assert len(collectives_in(box)) == 1
    assert not device_waits(box)[0].any()


def test_the_methods_of_an_event(tools: Tools, tmp_path: Path) -> None:
    """In a watch, the methods of an event return what they returned before, take the same arguments
    and raise the same errors. After it, they are the original ones."""
    originals, before, inside, after = tools.run(
        BEGIN
        + """
class Odd(Event):
    def record(self, stream=None):
        return "recorded", super().record(stream)

def results():
    "What calls of the methods return or raise."
    event, odd = Event(), Odd()
    calls = [
        lambda: event.record(),
        lambda: event.record(own),
        lambda: event.record(stream=own),
        lambda: event.wait(stream=own),
        lambda: event.wait(None),
        lambda: Event.wait(event, own),
        lambda: odd.record(own),
        lambda: event.record(own, own),
        lambda: event.record(flow=own),
        lambda: event.wait("stream"),
        lambda: Event.wait(),
        lambda: Event.record(3),
    ]
    texts = []
    for call in calls:
        try:
            texts.append(repr(call()))
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts

methods = [Event.record, Event.wait]
before = results()
with torchwhere.watch(out=folder / "run"):
    issue()
    assert Event.wait is not methods[1]
    inside = results()
print(json.dumps([[Event.record, Event.wait] == methods, before, inside, results()]))
""",
        tmp_path,
    )
    assert originals
    assert before == inside == after
    assert sum("Error" in text for text in before) == 5, before


FSDP = """
from simulated_jobs import fsdp
rank = int(os.environ["RANK"])
join_group(sim, folder)
model = fsdp(blocks=3)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
rows = torch.ones(2, 32, device="simulated")
with torchwhere.watch(model, out=folder / "run"):
    for step in range(8):
        if step >= 4 and rank:
            sim.kernel(0.3)
        model(rows).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sim.synchronize()
    settle(part.device_status()["marked"])
    assert part.device_status()["skipped"] == 0
print("{}")
"""


def test_fsdp(tools: Tools, tmp_path: Path) -> None:
    """The device of rank 1 is late by 0.3 s in each step from step 4 on. The collectives of FSDP2 have
    an end, and it is known for how long the device of rank 0 waited in them: for all of that time."""
    program = ("-c", PROGRAM + FSDP, tools.library, tmp_path, HERE)
    ranks = [
        tools.warm.start(*program, env=tools.env | {"RANK": str(rank), "WORLD_SIZE": "2"})
        for rank in range(2)
    ]
    for rank in ranks:
        done = rank.end(timeout=100)
        assert done.returncode == 0, done.stderr
        assert "hook" not in done.stderr, done.stderr
    device = phases(read_run(tmp_path / "run")).device
    assert device is not None
    early, late = device.by_rank[0], device.by_rank[1]
    for steps in (early, late):
        assert (steps.open_calls == 0).all()
        assert (steps.unclear_ns < 10_000_000).all(), steps.unclear_ns
    assert len(early) >= 6
    is_delayed = early.steps >= 4
    assert (early.exposed_ns[is_delayed] > 250_000_000).all(), early.exposed_ns
    assert (early.waited_for[is_delayed] == 1).all()
    assert (late.exposed_ns < early.exposed_ns)[is_delayed].all()
    box = read_box(tmp_path / "run" / "rank0.box")
    assert (device_waits(box)[0][collectives_in(box)] > 0).mean() > 0.9
