"""Numbers of an accelerator in notes: the job does not wait for them, and they arrive later.

The accelerator is software (`simulated_device.cpp`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import torchwhere
from simulated_programs import Tools, captures

pytestmark = pytest.mark.exhaustive  # two compilations

MOST_UNDER_WAY = 256  # as in device_numbers.h
NOT_COMPUTED, NOT_READ = "not computed yet", "not read"
NOTES = """
def notes(name="run"):
    return [event.fields for event in torchwhere.read_run(folder / name).events(kinds={"note"})]
"""


def notes(folder: Path) -> list[dict[str, Any]]:
    return [event.fields for event in torchwhere.read_run(folder).events(kinds={"note"})]


def test_a_number_arrives_after_the_work_before_it(tools: Tools, tmp_path: Path) -> None:
    """The device is busy for 1 s when the job notes its loss. The note is there at once. Its number
    arrives with the copy."""
    took_s, early, late = tools.run(
        NOTES
        + """
loss = torch.tensor(0.1, device="simulated")
with torchwhere.watch(out=folder / "run"):
    torchwhere.note("first", loss=loss)  # allocates the memory
    settle(1)
    sim.kernel(1.0)
    begin = time.perf_counter()
    torchwhere.note("train", loss=loss, rate=0.5)
    took_s, early = time.perf_counter() - begin, notes()[-1]
    settle(2)
    late = notes()[-1]
print(json.dumps([took_s, early, late]))
""",
        tmp_path,
    )
    assert early == {"text": "train", "loss": NOT_COMPUTED, "rate": 0.5}
    assert late == {"text": "train", "loss": pytest.approx(0.1), "rate": 0.5}
    assert took_s < 0.5


def test_all_types_and_shapes(tools: Tools, tmp_path: Path) -> None:
    """A number has as few digits as its type needs. A tensor of several numbers becomes a list, and
    a large one a description."""
    tools.run(
        """
values = {
    "half": torch.tensor(0.1, dtype=torch.float16),
    "bfloat": torch.tensor(0.1, dtype=torch.bfloat16),
    "float": torch.tensor(0.1),
    "double": torch.tensor(-1.7976931348623157e308, dtype=torch.float64),
    "long": torch.tensor(-(2**63)),
    "byte": torch.tensor([255], dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "bytes": torch.tensor([2, 0], dtype=torch.uint8).view(torch.bool),
    "special": torch.tensor([[float("nan"), float("inf")], [float("-inf"), -0.0]]),
    "large": torch.zeros(17),
    "empty": torch.zeros(0),
    "complex": torch.tensor(1j),
    "step": torch.arange(4.0),
}
values = {name: value.to("simulated") for name, value in values.items()}
values["step"] = values["step"][::2]
with torchwhere.watch(out=folder / "run"):
    torchwhere.note("all", nested={"deep": [values["float"], "text"]}, **values)
print("{}")
""",
        tmp_path,
    )
    (note,) = notes(tmp_path / "run")
    special = note.pop("special")
    assert math.isnan(special[0][0])
    assert [special[0][1], *special[1]] == [math.inf, -math.inf, 0.0]
    assert note == {
        "text": "all",
        "nested": {"deep": [0.1, "text"]},
        "half": 0.1,
        "bfloat": 0.1,
        "float": 0.1,
        "double": -1.7976931348623157e308,
        "long": -(2**63),
        "byte": [255],
        "bool": [True, False],
        "bytes": [True, False],
        "large": "tensor of shape [17], torch.float32, on simulated:0",
        "empty": "tensor of shape [0], torch.float32, on simulated:0",
        "complex": "tensor of shape [], torch.complex64, on simulated:0",
        "step": "tensor of shape [2], torch.float32, on simulated:0",
    }


def test_a_tensor_without_a_number_of_elements(tools: Tools, tmp_path: Path) -> None:
    """The extension raises an error for a tensor with a symbolic size: the process continues."""
    raised = tools.run(
        """
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torchwhere.api import watch

symbolic = ShapeEnv().create_unbacked_symint()
with FakeTensorMode(shape_env=symbolic.node.shape_env):
    sized = torch.empty(symbolic)
raised = ""
with torchwhere.watch(out=folder / "run"):
    box = watch._current.recorder.box
    try:
        part.device_note(box.native_box, box.geometry.texts_at, 0, [sized._cdata], [0])
    except RuntimeError as error:
        raised = str(error)
print(json.dumps(raised))
""",
        tmp_path,
    )
    assert "symbolic" in raised


def test_a_text_that_was_overwritten_at_once(tools: Tools, tmp_path: Path) -> None:
    """If texts of other threads overwrite a note before the extension reads it, its length may be any
    number: nothing outside the box is read."""
    harvested, problem = tools.run(
        """
from torchwhere.api import watch

loss = torch.tensor(0.5, device="simulated")
with torchwhere.watch(out=folder / "run"):
    box = watch._current.recorder.box
    at = box.geometry.texts_at
    box._map[at : at + 16] = b"\\xff" * 16
    part.device_note(box.native_box, at, 0, [loss._cdata], [0])
    settle(1)
    harvested = part.device_status()["harvested"]
print(json.dumps([harvested, part.device_status()["problem"]]))
""",
        tmp_path,
    )
    assert (harvested, problem) == (1, "")
    (end,) = torchwhere.read_run(tmp_path / "run").events(kinds={"end"})
    assert end.fields["reason"] == "stop"


@captures
def test_no_number_from_a_capture(tools: Tools, tmp_path: Path) -> None:
    """Nothing is enqueued on a stream that is being captured."""
    copies = tools.run(
        """
loss = torch.tensor(0.5, device="simulated")
with torchwhere.watch(out=folder / "run"):
    sim.capture(True)
    torchwhere.note("captured", loss=loss)
    copies = sim.copies()
    sim.capture(False)
    torchwhere.note("after it", loss=loss)
print(json.dumps([copies, sim.copies()]))
""",
        tmp_path,
    )
    assert copies == [0, 1]
    assert [note["loss"] for note in notes(tmp_path / "run")] == [NOT_READ, 0.5]


def test_the_number_of_copies_is_bounded(tools: Tools, tmp_path: Path) -> None:
    """A device that is behind gets no more copies. Later it gets copies again."""
    copies, first, last = tools.run(
        NOTES
        + """
loss = torch.tensor(0.5, device="simulated")
with torchwhere.watch(out=folder / "run"):
    sim.endless_kernel()
    for number in range(260):
        torchwhere.note("train", number=number, loss=loss)
    copies, first = sim.copies(), [note["loss"] for note in notes()]
    sim.release()
    settle(256)
    torchwhere.note("train", loss=loss)
    settle(257)
    last = [note["loss"] for note in notes()]
print(json.dumps([copies, first, last]))
""",
        tmp_path,
    )
    assert copies == MOST_UNDER_WAY
    assert first == [NOT_COMPUTED] * MOST_UNDER_WAY + [NOT_READ] * 4
    assert last == [0.5] * MOST_UNDER_WAY + [NOT_READ] * 4 + [0.5]


def test_a_device_that_hangs(tools: Tools, tmp_path: Path) -> None:
    """The end of a watch does not wait for a device that hangs. The next watch can read numbers, and
    a copy of the first one does not change it."""
    tools.run(
        """
loss = torch.tensor(0.5, device="simulated")
with torchwhere.watch(out=folder / "first"):
    sim.endless_kernel()
    torchwhere.note("train", loss=loss)
with torchwhere.watch(out=folder / "second"):
    torchwhere.note("train", loss=loss + 1)
    sim.release()
    settle(1)
print("{}")
""",
        tmp_path,
    )
    assert [note["loss"] for note in notes(tmp_path / "first")] == [NOT_COMPUTED]
    assert [note["loss"] for note in notes(tmp_path / "second")] == [1.5]


def test_the_end_of_a_watch_waits_for_numbers(tools: Tools, tmp_path: Path) -> None:
    tools.run(
        """
loss = torch.tensor(0.5, device="simulated")
with torchwhere.watch(out=folder / "run"):
    sim.kernel(0.3)
    torchwhere.note("train", loss=loss)
print("{}")
""",
        tmp_path,
    )
    assert [note["loss"] for note in notes(tmp_path / "run")] == [0.5]


def test_a_lost_device(tools: Tools, tmp_path: Path) -> None:
    """After an error of the device, nothing is copied."""
    copies = tools.run(
        """
loss = torch.tensor(0.5, device="simulated")
with torchwhere.watch(out=folder / "run"):
    torchwhere.note("before", loss=loss)
    settle(1)
    sim.lose()
    while not part.device_status()["problem"]:
        torchwhere.note("lost", loss=loss)
        time.sleep(0.05)
    copies = sim.copies()
    torchwhere.note("after it", loss=loss)
    assert sim.copies() == copies
print("{}")
""",
        tmp_path,
    )
    assert copies == {}
    found = [note["loss"] for note in notes(tmp_path / "run")]
    assert found[0] == 0.5
    assert found[-1] == NOT_READ
    assert 0.5 not in found[1:]


@captures
def test_an_error_that_the_job_has_seen(tools: Tools, tmp_path: Path) -> None:
    """After an error that makes the device unusable, a note with a tensor does not call the device
    at all."""
    before, after, copies = tools.run(
        """
loss = torch.tensor(0.5, device="simulated")
with torchwhere.watch(out=folder / "run"):
    torchwhere.note("before", loss=loss)
    settle(1)
    part.device_fail("CUDA error: the launch timed out and was terminated")
    before = sim.capture_queries()
    torchwhere.note("after it", loss=loss)
    after, copies = sim.capture_queries(), sim.copies()
print(json.dumps([before, after, copies]))
""",
        tmp_path,
    )
    assert 0 < before == after
    assert copies == 1
    assert [note["loss"] for note in notes(tmp_path / "run")] == [0.5, NOT_READ]


def test_a_text_that_is_overwritten(tools: Tools, tmp_path: Path) -> None:
    """The ring of texts is full before the number arrives. The newer texts stay as they are."""
    tools.run(
        """
loss = torch.tensor(0.5, device="simulated")
with torchwhere.watch(out=folder / "run"):
    sim.kernel(1.0)
    torchwhere.note("early", loss=loss)
    for number in range(60):
        torchwhere.note("x" * 10_000, number=number)
    settle(1)
print("{}")
""",
        tmp_path,
    )
    found = notes(tmp_path / "run")
    assert found[0] == {"text": None}
    kept = [note for note in found if note["text"] is not None]
    assert [note["number"] for note in kept] == list(range(60 - len(kept), 60))
    assert len(kept) > 20


def test_a_forked_child(tools: Tools, tmp_path: Path) -> None:
    """A forked child copies nothing."""
    copies = tools.run(
        """
loss = torch.tensor(0.5, device="simulated")
with torchwhere.watch(out=folder / "run"):
    torchwhere.note("parent", loss=loss)
    settle(1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        torchwhere.note("child", loss=loss)
        os.write(write, str(sim.copies()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    copies = int(os.read(read, 100))
print(json.dumps(copies))
""",
        tmp_path,
    )
    assert copies == 1


def test_modes_of_the_job_see_no_copy(tools: Tools, tmp_path: Path) -> None:
    """A dispatch mode of the job, inference mode and autograd do not see the copy."""
    seen = tools.run(
        """
from torch.utils._python_dispatch import TorchDispatchMode
seen = []
class Count(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        seen.append(str(function))
        return function(*args, **(kwargs or {}))
loss = torch.tensor(0.5, device="simulated", requires_grad=True)
with torchwhere.watch(out=folder / "run"):
    with Count():
        torchwhere.note("mode", loss=loss)
    with torch.inference_mode():
        torchwhere.note("inference", loss=loss)
        torchwhere.note("inference", loss=loss * 2)
    torchwhere.note("grad", loss=loss * 2)
assert loss._version == 0 and loss.grad is None
print(json.dumps(seen))
""",
        tmp_path,
    )
    assert seen == []
    assert [note["loss"] for note in notes(tmp_path / "run")] == [0.5, 0.5, 1.0, 1.0]


def test_wrapped_tensors(tools: Tools, tmp_path: Path) -> None:
    """A tensor inside `vmap` or a conjugate view has no numbers of its own in memory."""
    tools.run(
        """
rows = torch.arange(3.0).to("simulated")
with torchwhere.watch(out=folder / "run"):
    def noted(x):
        torchwhere.note("vmap", x=x)
        return x
    torch.func.vmap(noted)(rows)
    torchwhere.note("negative", x=torch._neg_view(rows))
    torchwhere.note("after it", x=rows)
print("{}")
""",
        tmp_path,
    )
    found = [note["x"] for note in notes(tmp_path / "run")]
    assert found[1:] == [[NOT_READ] * 3, [0.0, 1.0, 2.0]]
    assert found[0] == NOT_READ


def test_numbers_of_a_replicated_dtensor(tools: Tools, tmp_path: Path) -> None:
    """A replicated DTensor is a number. A sharded one is not."""
    tools.run(
        """
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
join_group(sim, folder)
mesh = DeviceMesh("simulated", [0], _init_backend=False, _rank=0)
local = torch.tensor([0.5], device="simulated")
with torchwhere.watch(out=folder / "run"):
    torchwhere.note("replicated", loss=DTensor.from_local(local, mesh, [Replicate()]))
    torchwhere.note("sharded", loss=DTensor.from_local(local, mesh, [Shard(0)]))
print("{}")
""",
        tmp_path,
    )
    found = [note["loss"] for note in notes(tmp_path / "run")]
    assert found == [[0.5], "tensor of shape [1], torch.float32, on simulated:0"]


def test_a_watch_ends_while_a_thread_writes_notes(tools: Tools, tmp_path: Path) -> None:
    """A number goes only into the box of its own watch."""
    tools.run(
        """
import threading
loss = torch.tensor(0.5, device="simulated")
def write():
    while not is_over.is_set():
        torchwhere.note("train", loss=loss)
is_over, threads = threading.Event(), []
for _ in range(2):
    threads.append(threading.Thread(target=write))
    threads[-1].start()
for number in range(8):
    with torchwhere.watch(out=folder / f"run{number}"):
        torchwhere.note("main", loss=loss)
        time.sleep(0.01)
is_over.set()
for thread in threads:
    thread.join()
print("{}")
""",
        tmp_path,
    )
    for number in range(8):
        found = [note.get("loss") for note in notes(tmp_path / f"run{number}")]
        assert found
        assert set(found) <= {0.5, NOT_COMPUTED, NOT_READ}
