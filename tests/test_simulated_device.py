"""Device progress on an accelerator that is not CUDA: the native marks, and verdicts on jobs of four
ranks, live and after a kill.

The accelerator is software (`simulated_device.cpp`), so these tests run on every machine. What only
NCCL and CUDA can show is in `test_gpu.py`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import torchwhere
from nccl_jobs import Expected
from simulated_jobs import JOBS
from simulated_programs import PROGRAM, Tools, captures
from torchwhere.blackbox.device import device_times, device_waits
from torchwhere.blackbox.reader import read_box
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.events import Kind
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.pipeline.verdict import diagnose_folder
from warm_python import Program

pytestmark = pytest.mark.exhaustive  # two compilations

HERE = Path(__file__).parent
MOST_PENDING, MOST_LANES = 4096, 31  # as in device_events.h
HANGS = ("missing", "mismatch", "deadlock", "together")
STALL_S = 4.0
FOUND_S = 60.0  # a verdict is there after this long
HEALTHY_S = 12.0  # a job without a fault is judged after this long


# -- marks -----------------------------------------------------------------------------------------


def test_collectives_have_the_times_of_the_device(tools: Tools, tmp_path: Path) -> None:
    """A collective behind a kernel of 0.3 s is reached 0.3 s after its issue. If it runs on the
    current stream, it is done after that. An asynchronous one that the job does not wait for has no
    such time."""
    tools.run(
        """
join_group(sim, folder)
x = buffer()
with torchwhere.watch(out=folder / "run"):
    for is_async in (False, True):
        dist.all_reduce(x)
        sim.synchronize()
        sim.kernel(0.3)
        dist.all_reduce(x, async_op=is_async)
        sim.synchronize()
        torchwhere.step()
    settle(7)
print("{}")
""",
        tmp_path,
    )
    box = read_box(tmp_path / "run" / "rank0.box")
    reached_ns, done_ns = (
        times[box.records["kind"] == int(Kind.COLLECTIVE)] for times in device_times(box)
    )
    issued_ns = box.records["t_ns"][box.records["kind"] == int(Kind.COLLECTIVE)]
    delays_s = (reached_ns - issued_ns) / 1e9
    assert (delays_s[1::2] >= 0.29).all(), delays_s
    assert (delays_s[1::2] >= delays_s[::2] + 0.2).all(), delays_s
    assert (done_ns[:3] >= reached_ns[:3]).all()
    assert done_ns[3] == 0


def test_a_device_that_is_never_idle(tools: Tools, tmp_path: Path) -> None:
    """If the device has work before the first mark, and always after it, its times are right all the
    same: looks at the device show when it had not reached a mark."""
    tools.run(
        """
join_group(sim, folder)
with torchwhere.watch(out=folder / "run"):
    x = buffer()
    sim.kernel(1.0)
    for _ in range(5):
        dist.all_reduce(x)
        sim.kernel(0.1)
    settle(10)
print("{}")
""",
        tmp_path,
    )
    box = read_box(tmp_path / "run" / "rank0.box")
    is_call = box.records["kind"] == int(Kind.COLLECTIVE)
    delays_s = (device_times(box)[0][is_call] - box.records["t_ns"][is_call]) / 1e9
    assert (delays_s >= 0.5).all(), delays_s


WAITS = {
    "work.wait": "dist.all_reduce(x, async_op=True)",
    "wait_tensor": "funcol.all_reduce(x, 'sum', dist.group.WORLD)",
    "wait_tensor, gathered": "funcol.all_gather_tensor(x, 0, dist.group.WORLD)",
}


@pytest.mark.parametrize("way", WAITS)
def test_a_wait_shows_the_end_of_an_asynchronous_collective(
    way: str, tools: Tools, tmp_path: Path
) -> None:
    """The stream of the group is busy for 0.4 s, the stream of the job only for 0.1 s: then it waits
    for the collective. A second wait for the same collective changes nothing."""
    tools.run(
        f"""
import torch.distributed._functional_collectives as funcol
from torch._C._distributed_c10d import Work
def wait(pending):
    pending.wait() if isinstance(pending, Work) else funcol.wait_tensor(pending)
original = Work.__dict__["wait"]
join_group(sim, folder)
x = buffer()
with torchwhere.watch(out=folder / "run"):
    wait({WAITS[way]})  # the first one takes long
    dist.all_reduce(x)
    settle(part.device_status()["marked"])
    sim.set_stream(1)
    sim.kernel(0.4)
    sim.set_stream(0)
    pending = {WAITS[way]}
    sim.kernel(0.1)
    wait(pending)
    settle(part.device_status()["marked"])
    marked = part.device_status()["marked"]
    wait(pending)
    dist.all_reduce(x)
    assert part.device_status()["marked"] == marked + 2, part.device_status()
assert Work.__dict__["wait"] is original
assert not torch._C._dispatch_has_kernel_for_dispatch_key(
    "_c10d_functional::wait_tensor", "BackendSelect"
)
print("{{}}")
""",
        tmp_path,
    )
    box = read_box(tmp_path / "run" / "rank0.box")
    at = np.flatnonzero(box.records["kind"] == int(Kind.COLLECTIVE))
    (reached_ns, done_ns), (waited_ns, lanes) = device_times(box), device_waits(box)
    assert (done_ns[at] > 0)[:3].all()
    assert (waited_ns[at] > 0).tolist() == [True, False, True, False]
    wait_s = (waited_ns[at[2]] - reached_ns[at[2]]) / 1e9
    assert 0.09 < wait_s < 0.3
    assert (done_ns[at[2]] - reached_ns[at[2]]) / 1e9 > 0.35
    assert lanes[at].tolist() == [0, -1, 0, -1]


def test_the_wait_of_ddp_shows_the_end_of_its_buckets(tools: Tools, tmp_path: Path) -> None:
    """DDP waits for its buckets at the end of a backward. From the time when the
    native extension records them, their ends are known. In step 8 the stream of the group is busy
    for 0.4 s."""
    tools.run(
        """
from simulated_jobs import ddp
join_group(sim, folder)
model = ddp()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.ones(2, 32, device="simulated")
with torchwhere.watch(out=folder / "run"):
    for step in range(10):
        loss = model(rows).sum()
        if step == 8:
            sim.set_stream(1)
            sim.kernel(0.4)
            sim.set_stream(0)
        loss.backward()
        optimizer.step()
        sim.synchronize()
    settle(part.device_status()["marked"])
print("{}")
""",
        tmp_path,
    )
    box = read_box(tmp_path / "run" / "rank0.box")
    (reached_ns, done_ns), (waited_ns, _) = device_times(box), device_waits(box)
    is_reduction = box.records["kind"] == int(Kind.COLLECTIVE)
    for step in (7, 8, 9):
        at = np.flatnonzero(is_reduction & (box.records["step"] == step))
        assert len(at) == 2
        assert (waited_ns[at] >= reached_ns[at].max()).all()
        assert len(np.unique(waited_ns[at])) == len(np.unique(done_ns[at])) == 1
        took_s = (done_ns[at] - waited_ns[at]) / 1e9
        assert ((took_s > 0.3) if step == 8 else (took_s >= 0)).all(), took_s


def test_a_wait_for_messages_that_were_issued_together(tools: Tools, tmp_path: Path) -> None:
    """The messages of `batch_isend_irecv` have one wait. Rank 1 is late by 0.3 s, so rank 0 waits for
    both of its messages."""
    code = """
rank = int(os.environ["RANK"])
join_group(sim, folder)
x = buffer()
with torchwhere.watch(out=folder / "run"):
    for step in range(2):
        if step and rank:
            sim.kernel(0.3)
        ops = [dist.P2POp(op, x, 1 - rank) for op in (dist.isend, dist.irecv)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        torchwhere.step()
    settle(part.device_status()["marked"])
print("{}")
"""
    program = ("-c", PROGRAM + code, tools.library, tmp_path, HERE)
    ranks = [
        tools.warm.start(*program, env=tools.env | {"RANK": str(rank), "WORLD_SIZE": "2"})
        for rank in range(2)
    ]
    for rank in ranks:
        done = rank.end(timeout=100)
        assert done.returncode == 0, done.stderr
        assert "hook" not in done.stderr, done.stderr
    for number, waits_s in ((0, 0.2), (1, 0)):
        box = read_box(tmp_path / "run" / f"rank{number}.box")
        at = np.flatnonzero(box.records["kind"] == int(Kind.COLLECTIVE))
        assert len(at) == 4
        (reached_ns, done_ns), (waited_ns, _) = device_times(box), device_waits(box)
        assert (reached_ns[at] <= waited_ns[at]).all()
        assert (waited_ns[at] > 0).all()
        took_s = (done_ns[at[2:]] - waited_ns[at[2:]]) / 1e9
        assert (took_s >= waits_s).all()
        assert waits_s or (took_s < 0.2).all()


def test_a_work_that_the_job_drops(tools: Tools, tmp_path: Path) -> None:
    """A `Work` may be created where another one was, for which the job never waited. A wait for it
    is not the end of that collective."""
    tools.run(
        """
join_group(sim, folder)
x = buffer()
with torchwhere.watch(out=folder / "run"):
    for _ in range(8):
        dist.all_reduce(x, async_op=True).get_future()
        dist.barrier(async_op=True).wait()
    settle(part.device_status()["marked"])
print("{}")
""",
        tmp_path,
    )
    box = read_box(tmp_path / "run" / "rank0.box")
    assert not device_waits(box)[0].any()
    assert not device_times(box)[1].any()


def test_a_collective_that_fails(tools: Tools, tmp_path: Path) -> None:
    """It was never launched, so it has no end: the next collective is another one."""
    tools.run(
        """
join_group(sim, folder)
x, others = buffer(), dist.new_group(backend="gloo")
with torchwhere.watch(out=folder / "run"):
    dist.all_reduce(x)
    try:
        dist.reduce(x, 0)
        raise AssertionError("this backend has no reduce")
    except RuntimeError:
        pass
    dist.all_reduce(torch.ones(1), group=others)
    settle(part.device_status()["marked"])
print("{}")
""",
        tmp_path,
    )
    box = read_box(tmp_path / "run" / "rank0.box")
    at = np.flatnonzero(box.records["kind"] == int(Kind.COLLECTIVE))
    reached_ns, done_ns = device_times(box)
    assert (reached_ns[at] > 0).tolist() == [True, True, False]
    assert (done_ns[at] > 0).tolist() == [True, False, False]


def test_collectives_of_a_coalescing_manager(tools: Tools, tmp_path: Path) -> None:
    """Collectives in a `_coalescing_manager` are launched when it ends, so they are not done before
    that. A manager that cannot begin changes nothing for later collectives."""
    tools.run(
        """
from torch.distributed.distributed_c10d import _coalescing_manager
join_group(sim, folder)
x = buffer()
with torchwhere.watch(out=folder / "run"):
    try:
        dist.group.WORLD._start_coalescing(torch.device("cpu"))
    except RuntimeError:
        pass
    dist.all_reduce(x, async_op=True).wait()
    with _coalescing_manager(dist.group.WORLD, torch.device("simulated")):
        dist.group.WORLD.allreduce([x]).wait()
        sim.kernel(0.3)
    sim.synchronize()
    settle(part.device_status()["marked"])
print("{}")
""",
        tmp_path,
    )
    box = read_box(tmp_path / "run" / "rank0.box")
    at = np.flatnonzero(box.records["kind"] == int(Kind.COLLECTIVE))
    (reached_ns, done_ns), (waited_ns, _) = device_times(box), device_waits(box)
    assert waited_ns[at[0]] > 0
    assert (done_ns[at] > 0).all()
    assert (done_ns[at[1]] - reached_ns[at[1]]) / 1e9 > 0.25


def test_a_thread_that_only_waits(tools: Tools, tmp_path: Path) -> None:
    """A watch may end while another thread waits for tensors: no wait fails."""
    errors, waits = tools.run(
        """
import threading
join_group(sim, folder)
x, errors, waits = buffer(), [], 0
def wait():
    global waits
    while not is_over.is_set():
        try:
            torch.ops._c10d_functional.wait_tensor(x)
            waits += 1
        except RuntimeError as error:
            errors.append(str(error))
is_over, thread = threading.Event(), threading.Thread(target=wait)
thread.start()
for number in range(40):
    with torchwhere.watch(out=folder / f"run{number}"):
        dist.all_reduce(x)
is_over.set()
thread.join()
print(json.dumps([errors, waits]))
""",
        tmp_path,
    )
    assert not errors
    assert waits > 1000


def test_compiled_functional_collectives(tools: Tools, tmp_path: Path) -> None:
    """The kernel on `wait_tensor` changes nothing for compiled code: one graph, the same numbers, the
    same gradients."""
    graphs, are_equal = tools.run(
        """
import torch.distributed._functional_collectives as funcol
from torch._dynamo.utils import counters
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def function(x):
    whole = funcol.all_gather_tensor_autograd(x * 2, 0, dist.group.WORLD)
    return funcol.wait_tensor(funcol.all_reduce(whole, "sum", dist.group.WORLD)) + 1
def results(compiled):
    x = torch.arange(4.0, requires_grad=True)
    out = compiled(x)
    out.pow(2).sum().backward()
    return out.detach(), x.grad
torch.simulated.is_available = lambda: False  # dynamo needs more of a device than this one has
expected, are_equal, graphs = results(function), [], []
with torchwhere.watch(out=folder / "run"):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(
        "_c10d_functional::wait_tensor", "BackendSelect"
    )
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        counters.clear()
        got = results(torch.compile(function, backend=backend, fullgraph=True))
        are_equal += [torch.equal(*pair) for pair in zip(expected, got)]
        graphs.append(counters["stats"]["unique_graphs"])
print(json.dumps([graphs, are_equal]))
""",
        tmp_path,
    )
    assert graphs == [1, 1]
    assert are_equal == [True] * 4


def test_the_place_of_a_device_that_waits(tools: Tools, tmp_path: Path) -> None:
    """A device that waits for an asynchronous collective is in that collective, although it has
    reached a later one."""
    text, device = tools.run(
        """
join_group(sim, folder)
x = buffer()
with torchwhere.watch(out=folder / "run"):
    dist.all_reduce(x)
    settle(2)
    sim.set_stream(1)
    sim.endless_kernel()
    sim.set_stream(0)
    first, second = (dist.all_reduce(x, async_op=True) for _ in range(2))
    first.wait()
    settle(part.device_status()["marked"] - 1)
    time.sleep(0.1)  # the harvester looks again
    place = torchwhere.where(device=True)
    sim.release()
print(json.dumps([str(place), place.to_dict()]))
""",
        tmp_path,
    )
    assert "GPU: in all_reduce #1 of group" in text
    assert device["collective"]["state"] == "running"
    assert device["next"]["collective"]["state"] == "running"
    assert device["collectives_behind"] == 0


def test_the_number_of_events_is_bounded(tools: Tools, tmp_path: Path) -> None:
    """If the device hangs, marks stop when all events are in use. When it continues, all of them
    are read, and marks continue, also those without a time."""
    stuck, free, after = tools.run(
        f"""
from simulated_streams import Stream
join_group(sim, folder)
x = buffer()
with torchwhere.watch(out=folder / "run"):
    dist.all_reduce(x)
    settle(2)
    sim.endless_kernel()
    for _ in range({MOST_PENDING}):
        dist.all_reduce(x)
    stuck = part.device_status()
    sim.release()
    settle(stuck["marked"])
    free = part.device_status()
    with Stream():
        dist.all_reduce(x)
    settle(stuck["marked"] + 2)
    after = part.device_status()
print(json.dumps([stuck, free, after]))
""",
        tmp_path,
    )
    # one event is the base of the device's clock
    assert MOST_PENDING - 1 <= stuck["marked"] - stuck["harvested"] <= MOST_PENDING
    assert stuck["skipped"] >= MOST_PENDING
    assert free["harvested"] == stuck["marked"]
    assert after["skipped"] == stuck["skipped"]
    assert after["problem"] == ""


def test_streams_beyond_the_limit_are_counted(tools: Tools, tmp_path: Path) -> None:
    """Each stream of each device has its own lane. Marks on further streams are skipped."""
    status = tools.run(
        f"""
join_group(sim, folder)
x = [buffer(), torch.empty(1, device="simulated:1")]
with torchwhere.watch(out=folder / "run"):
    for stream in range({MOST_LANES + 2}):
        sim.set_stream(stream // 2)
        dist.all_reduce(x[stream % 2])
    settle(2 * {MOST_LANES})
    status = part.device_status()
print(json.dumps(status))
""",
        tmp_path,
    )
    assert status["skipped"] == 4
    assert status["marked"] == 2 * MOST_LANES
    missing = diagnose_folder(tmp_path / "run").missing_data
    assert any(line.startswith("a part of the device progress of rank 0") for line in missing)


@captures
def test_nothing_is_marked_during_a_capture(tools: Tools, tmp_path: Path) -> None:
    """While a stream is captured into a graph, torchwhere records no event on it."""
    before, during, after = tools.run(
        """
join_group(sim, folder)
x = buffer()
with torchwhere.watch(out=folder / "run"):
    dist.all_reduce(x)
    counts = [part.device_status()]
    for is_captured in (True, False):
        sim.capture(is_captured)
        dist.all_reduce(x)
        counts.append(part.device_status())
print(json.dumps(counts))
""",
        tmp_path,
    )
    assert (during["marked"], during["captured"]) == (before["marked"], 2)
    assert (after["marked"], after["captured"]) == (before["marked"] + 2, 2)


def test_a_watch_does_not_initialize_the_device(tools: Tools, tmp_path: Path) -> None:
    """torchwhere sets no mark before the job itself uses the device: not at modules, and not at
    steps. Afterwards it does, also without collectives."""
    before, is_initialized, after = tools.run(
        """
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with torchwhere.watch(out=folder / "run"):
    for step in range(8):
        if step == 4:
            before, is_initialized = part.device_status()["marked"], sim.is_initialized()
            sim.initialize()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        time.sleep(0.5 if step >= 4 else 0)  # once a second Python records a step
    after = part.device_status()["marked"]
print(json.dumps([before, is_initialized, after]))
""",
        tmp_path,
    )
    assert (before, is_initialized) == (0, False)
    assert after >= 4


def test_a_lost_device_is_left_alone(tools: Tools, tmp_path: Path) -> None:
    """After an error of the device nothing asks it again. The job continues, and a line in the log
    says why the progress is not recorded any more."""
    asked, text, lines = tools.run(
        """
import logging
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("torchwhere").addHandler(handler)
join_group(sim, folder)
x = buffer()
with torchwhere.watch(out=folder / "run"):
    dist.all_reduce(x)
    settle(2)
    sim.lose()
    dist.all_reduce(x)
    deadline = time.monotonic() + 60
    while not part.device_status()["problem"] and time.monotonic() < deadline:
        time.sleep(0.01)
    asked = sim.queries()
    for _ in range(20):
        dist.all_reduce(x)
        torchwhere.step()
        time.sleep(0.01)
    asked = sim.queries() - asked
    text = str(torchwhere.where(device=True))
print(json.dumps([asked, text, lines]))
""",
        tmp_path,
    )
    assert asked == 0
    assert "21 collectives issued since it was looked at" in text
    (line,) = lines
    assert line.startswith("torchwhere: an error of the device ended the record of its progress")
    assert "the device was lost" in line
    assert len(read_box(tmp_path / "run" / "rank0.box").records) > 40


def test_an_error_that_the_job_has_seen(tools: Tools, tmp_path: Path) -> None:
    """After an error that makes the device unusable, nothing calls the device: the exception of the
    job is enough. An error that it survives changes nothing."""
    survived, asked, problem = tools.run(
        """
class Failing(torch.nn.Module):
    def forward(self, text):
        raise RuntimeError(text)
def call(text):
    try:
        Failing()(text)
    except RuntimeError:
        pass
join_group(sim, folder)
x = buffer()
with torchwhere.watch(out=folder / "run"):
    call("CUDA error: out of memory")
    dist.all_reduce(x)
    settle(2)
    survived = part.device_status()["problem"]
    call("CUDA error: device-side assert triggered")
    time.sleep(0.1)
    asked = sim.queries()
    for _ in range(20):
        dist.all_reduce(x)
        time.sleep(0.01)
    asked = sim.queries() - asked
print(json.dumps([survived, asked, part.device_status()["problem"]]))
""",
        tmp_path,
    )
    assert (survived, asked) == ("", 0)
    assert problem.endswith("CUDA error: device-side assert triggered")


def test_unknown_progress_is_reported(tools: Tools, tmp_path: Path) -> None:
    """Without the native extension nothing is marked. The verdict says for any accelerator that the
    progress of the device is not known; it does not say it of collectives on the CPU."""
    for name, device in (("device", "simulated"), ("cpu", "cpu")):
        folder = tmp_path / name
        folder.mkdir()
        tools._replace(env=tools.env | {"TORCHWHERE_NATIVE": "0"}).run(
            f"""
if "{device}" == "cpu":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
else:
    join_group(sim, folder)
with torchwhere.watch(out=folder / "run"):
    dist.all_reduce(torch.empty(4, device="{device}"))
print("{{}}")
""",
            folder,
        )
        missing = diagnose_folder(folder / "run").missing_data
        told = "device progress of rank 0: only what the CPUs issued was compared" in missing
        assert told == (device == "simulated"), missing


def test_a_blocked_driver_blocks_nothing(tools: Tools, tmp_path: Path) -> None:
    """If a query of the device does not return, the job continues, the watch ends, and a second
    watch works without device progress."""
    seconds, first, second = tools.run(
        """
join_group(sim, folder)
x = buffer()
with torchwhere.watch(out=folder / "run"):
    dist.all_reduce(x)
    settle(2)
    sim.block_queries(True)
    for _ in range(50):
        dist.all_reduce(x)
        time.sleep(0.002)
    begin = time.monotonic()
seconds = time.monotonic() - begin
first = part.device_status()
with torchwhere.watch(out=folder / "second"):
    dist.all_reduce(x)
second = part.device_status()
sim.block_queries(False)
print(json.dumps([seconds, first, second]))
""",
        tmp_path,
    )
    assert seconds < 30
    assert first["marked"] > first["harvested"]
    assert second["marked"] == first["marked"]
    for name in ("run", "second"):
        kinds = read_box(tmp_path / name / "rank0.box").records["kind"]
        assert np.count_nonzero(kinds == int(Kind.COLLECTIVE)) == (51 if name == "run" else 1)


def test_a_watch_ends_while_a_time_is_read(tools: Tools, tmp_path: Path) -> None:
    """If the device does not return the time of a mark, the watch ends, and nothing writes to its
    closed box when the time comes."""
    harvested = tools.run(
        """
join_group(sim, folder)
x = buffer()
with torchwhere.watch(out=folder / "run"):
    dist.all_reduce(x)
    settle(2)
    sim.block_times(True)
    dist.all_reduce(x)
    settle(3)
sim.block_times(False)
time.sleep(0.2)
print(json.dumps(part.device_status()["harvested"]))
""",
        tmp_path,
    )
    assert harvested == 3


def test_marks_beside_a_sub_interpreter(tools: Tools, tmp_path: Path) -> None:
    """Collectives are marked in a process that has created a sub-interpreter, although Python then
    says of each thread that it has the GIL."""
    status = tools.run(
        """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
join_group(sim, folder)
x = buffer()
with torchwhere.watch(out=folder / "run"):
    interpreters.destroy(interpreters.create())
    for _ in range(4):
        dist.all_reduce(x)
    settle(8)
    status = part.device_status()
print(json.dumps(status))
""",
        tmp_path,
    )
    assert (status["marked"], status["problem"]) == (8, "")


def test_a_full_queue_blocks_one_thread_only(tools: Tools, tmp_path: Path) -> None:
    """A stream takes a limited number of tasks. A mark on a full stream waits, like any work of the
    job. Meanwhile other threads have the GIL, and the marks of other streams are read."""
    for code in ("dist.all_reduce(x)", "linear(rows)", "torchwhere.step()"):
        folder = tmp_path / code.partition("(")[0]
        folder.mkdir()
        is_blocked, blocked, after = tools.run(
            f"""
import threading
join_group(sim, folder)
x, rows, linear = buffer(), torch.ones(2), torch.nn.Linear(2, 2)
def issue():
    for _ in range(4):
        {code}
        time.sleep(0.001)
with torchwhere.watch(out=folder / "run"):
    dist.all_reduce(x)
    linear(rows)
    settle(2)
    sim.limit_queue(2)
    sim.endless_kernel()
    for _ in range(2):
        sim.kernel(0)
    thread = threading.Thread(target=issue)
    thread.start()
    thread.join(1)
    is_blocked, before = thread.is_alive(), part.device_status()["harvested"]
    sim.set_stream(1)
    dist.all_reduce(x)
    settle(before + 2)
    blocked = part.device_status()
    sim.release()
    thread.join()
    settle(blocked["marked"] + 1)
    after = part.device_status()
print(json.dumps([is_blocked, blocked, after]))
""",
            folder,
        )
        assert is_blocked, code
        assert blocked["problem"] == after["problem"] == ""
        assert after["marked"] > blocked["marked"]


def test_a_watch_ends_while_a_mark_waits(tools: Tools, tmp_path: Path) -> None:
    """If a thread waits for a full stream, the watch ends all the same. A second watch marks
    nothing as long as that thread waits."""
    seconds, second, third = tools.run(
        """
import threading
join_group(sim, folder)
x = buffer()
with torchwhere.watch(out=folder / "run"):
    dist.all_reduce(x)
    settle(2)
    sim.limit_queue(2)
    sim.endless_kernel()
    for _ in range(2):
        sim.kernel(0)
    thread = threading.Thread(target=dist.all_reduce, args=(x,))
    thread.start()
    thread.join(0.5)
    begin = time.monotonic()
seconds = time.monotonic() - begin
with torchwhere.watch(out=folder / "second"):
    torchwhere.step()
second = part.device_status()
sim.release()
thread.join()
with torchwhere.watch(out=folder / "third"):
    dist.all_reduce(x)
    settle(2)
third = part.device_status()
print(json.dumps([seconds, second, third]))
""",
        tmp_path,
    )
    assert seconds < 30
    assert second["marked"] == 2
    assert (third["marked"], third["problem"]) == (2, "")


def test_a_forked_child_does_not_touch_the_device(tools: Tools, tmp_path: Path) -> None:
    """A process that a job forks neither marks nor polls; the parent continues to do both."""
    child, marked, status = tools.run(
        """
join_group(sim, folder)
x = buffer()
with torchwhere.watch(out=folder / "run"):
    dist.all_reduce(x)
    settle(2)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        queries = sim.queries()
        torch.nn.Linear(2, 2)(torch.ones(2))
        torchwhere.step()
        time.sleep(0.2)
        os.write(writing, json.dumps([sim.queries() - queries, part.device_status()]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    child = json.loads(os.read(reading, 4096))
    marked = part.device_status()["marked"]
    dist.all_reduce(x)
    settle(marked + 2)
    status = part.device_status()
print(json.dumps([child, marked, status]))
""",
        tmp_path,
    )
    queries, of_child = child
    assert (queries, of_child["marked"], of_child["problem"]) == (0, 0, "a forked process")
    assert (status["marked"], status["problem"]) == (marked + 2, "")


def test_two_threads_that_mark(tools: Tools, tmp_path: Path) -> None:
    """One thread ends steps, while another one issues collectives and calls a module: neither
    waits for the other."""
    steps, calls = tools.run(
        """
import threading
join_group(sim, folder)
x, linear, calls = buffer(), torch.nn.Linear(2, 2), 0
def issue():
    global calls
    while not is_over.is_set():
        dist.all_reduce(x)
        linear(torch.ones(2))
        calls += 1
is_over, thread = threading.Event(), threading.Thread(target=issue)
with torchwhere.watch(out=folder / "run"):
    thread.start()
    for steps in range(20_000):
        torchwhere.step()
    is_over.set()
    thread.join()
print(json.dumps([steps, calls]))
""",
        tmp_path,
    )
    assert steps == 19_999
    assert calls > 0


def test_a_second_watch_marks_again(tools: Tools, tmp_path: Path) -> None:
    """The events of a watch are free for the next one, and the thread that reads them ends with
    each watch."""
    statuses, threads = tools.run(
        """
join_group(sim, folder)
x, statuses, threads = buffer(), [], []
dist.all_reduce(x)  # starts the threads of the device
before = len(os.listdir("/proc/self/task"))
for number in range(3):
    with torchwhere.watch(out=folder / f"run{number}"):
        dist.all_reduce(x)
        settle(2)
        statuses.append(part.device_status())
    deadline = time.monotonic() + 30
    while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    threads.append(len(os.listdir("/proc/self/task")) - before)
print(json.dumps([statuses, threads]))
""",
        tmp_path,
    )
    assert [(status["marked"], status["problem"]) for status in statuses] == [(2, "")] * 3
    assert threads == [0, 0, 0]


def test_ddp_on_a_thread_of_the_device(tools: Tools, tmp_path: Path) -> None:
    """Backward runs in a thread of the device, without a Python stack. The reductions of DDP have
    their parameters, their line and the time when the device reached them all the same."""
    names = tools.run(
        """
from simulated_jobs import ddp
join_group(sim, folder)
model = ddp()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.ones(2, 32, device="simulated")
with torchwhere.watch(out=folder / "run"):
    for _ in range(6):
        model(rows).sum().backward()
        optimizer.step()
    settle(part.device_status()["marked"])
print(json.dumps(sorted(name for name, _ in model.module.named_parameters())))
""",
        tmp_path,
    )
    box = read_box(tmp_path / "run" / "rank0.box")
    reached_ns = device_times(box)[0][box.records["kind"] == int(Kind.COLLECTIVE)]
    assert (reached_ns > 0).all()
    events = [
        event.to_dict()
        for event in torchwhere.read_run(tmp_path / "run").events(kinds={"collective"})
    ]
    for step in range(6):
        reductions = [e for e in events if e["step"] == step and e["pass"] == "backward"]
        assert sorted(name for event in reductions for name in event["for"]) == names
        assert all(event["line"].startswith("<string>:") for event in reductions)
        assert all(event["thread"] != "MainThread" for event in reductions)


# -- verdicts --------------------------------------------------------------------------------------


@pytest.fixture
def ranks(request: pytest.FixtureRequest, tools: Tools, tmp_path: Path) -> Iterator[list[Program]]:
    """The four ranks of a job."""
    program = (HERE / "simulated_jobs.py", request.param, tools.library, tmp_path, 2 * FOUND_S)
    ranks = [
        tools.warm.start(*program, env=tools.env | {"RANK": str(rank), "WORLD_SIZE": "4"})
        for rank in range(4)
    ]
    yield ranks
    for rank in ranks:
        rank.kill(signal.SIGKILL)
        rank.end()


def verdict_of(run: Path, expected: Expected) -> Verdict:
    """The first verdict of the expected kind, or the last of another one. Until then, no job that
    progresses is called a hang, and no rank without a fault is named for one."""
    kind = expected.kind
    until = time.monotonic() + (HEALTHY_S if kind == "healthy" else FOUND_S)
    verdict = None
    while time.monotonic() < until or verdict is None:
        time.sleep(1)
        try:
            verdict = diagnose_folder(run, stall_s=STALL_S)
        except TorchwhereError:  # no rank has started
            assert time.monotonic() < until
            continue
        if verdict.kind in HANGS:  # devices in software are late if the machine lacks CPUs
            assert kind not in ("healthy", "straggler"), verdict
            assert set(verdict.culprits) <= set(expected.culprits), verdict
        if verdict.kind == kind and kind != "healthy":
            break
    return verdict


@pytest.mark.parametrize("ranks", JOBS, indirect=True)
def test_fault(request: pytest.FixtureRequest, ranks: list[Program], tmp_path: Path) -> None:
    """The doctor names the fault and the rank, while the job runs and after it was killed."""
    expected = JOBS[request.node.callspec.params["ranks"]][1]
    live = verdict_of(tmp_path / "run", expected)
    assert (live.kind, live.culprits) == (expected.kind, expected.culprits), live
    assert bool(live.facts.get("on_device")) == expected.on_device, live
    for rank in ranks:
        rank.kill(signal.SIGKILL)
    while any(rank.runs() for rank in ranks):
        time.sleep(0.05)
    if expected.kind == "straggler":
        return
    after_kill = diagnose_folder(tmp_path / "run", stall_s=STALL_S)
    if expected.kind == "dead":
        # Without a monitor, it may be unknown which process ended first, or whether it hung before.
        assert after_kill.kind in ("dead", "missing"), after_kill
        assert set(after_kill.culprits) <= set(expected.culprits), after_kill
        return
    kind = "dead" if expected.kind == "healthy" else expected.kind
    assert (after_kill.kind, after_kill.culprits) == (kind, expected.culprits), after_kill


# -- training --------------------------------------------------------------------------------------


def test_training_is_bit_identical(tools: Tools, tmp_path: Path) -> None:
    """A watch, with and without module events, sets marks and changes no bit of the parameters."""
    (unwatched, *watched), marks = tools.run(
        """
import hashlib
from contextlib import nullcontext
from simulated_jobs import SIZE, ddp
join_group(sim, folder)

def trained(watch):
    "Train, and hash the parameters after each step."
    torch.default_generator.manual_seed(0)  # the device has no random numbers
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    hashes = []
    with watch:
        for _ in range(12):
            model(torch.randn(2, SIZE).to("simulated")).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            sim.synchronize()
            parameters = [p.detach().cpu().numpy().tobytes() for p in model.parameters()]
            hashes.append(hashlib.sha256(b"".join(parameters)).hexdigest())
        marks.append(part.device_status()["marked"])
    return hashes

marks = []
runs = [trained(nullcontext())]
for is_verbose in (False, True):
    watch = torchwhere.watch(out=folder / f"run{is_verbose}", module_events=is_verbose)
    runs.append(trained(watch))
print(json.dumps([runs, marks]))
""",
        tmp_path,
    )
    assert len(set(unwatched)) == 12  # each step changed the parameters
    assert watched == [unwatched, unwatched]
    assert marks[0] == 0
    assert min(marks[1:]) > 12
