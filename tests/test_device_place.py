"""Where the device of a rank is, beside its CPU: from recorded NCCL runs, and from boxes that the
tests write."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchwhere
from device_boxes import DeviceBox, S
from synthetic_boxes import make
from synthetic_job import Job
from test_nccl_runs import STALL_S, unpacked
from torchwhere.blackbox.device import device_place, device_state
from torchwhere.blackbox.live_box import LiveBox
from torchwhere.blackbox.live_names import NameReader
from torchwhere.blackbox.reader import parse_box, read_box
from torchwhere.core.device_place import CallState, DeviceCall, DevicePlace
from torchwhere.core.place import Pass, Place, unknown_place
from torchwhere.hooks.exceptions import is_of_device
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.recorder.own_device import device_note, own_device_place
from torchwhere.snapshots.checked import InvalidError, decode_device, encode_device


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("nccl_runs.txz", tmp_path_factory.mktemp("runs"))


@pytest.fixture
def device_box(tmp_path: Path) -> Iterator[DeviceBox]:
    """The box of a rank whose CPU is in step 7."""
    made = DeviceBox(tmp_path / "rank0.box")
    made.cpu(step=7, at_s=7)
    yield made
    made.box.close()


def place_in(device_box: DeviceBox) -> DevicePlace:
    path = device_box.box.path
    assert path is not None
    return device_place(read_box(path))


def prints(*arguments: object) -> str:
    command = [sys.executable, "-m", "torchwhere", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400).stdout


# -- recorded runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "rank", "text"),
    [
        (
            "endless_ddp",
            2,
            (
                "GPU: after all_reduce #21 of group default, nccl_jobs.py:36, step 6"
                " (1 step and 3 collectives behind)"
            ),
        ),
        (
            "endless_ddp",
            0,
            (
                "GPU: at all_reduce #23 of group default, backward of layers.0.0, nccl_jobs.py:35,"
                " step 6 (1 step and 1 collective behind)"
            ),
        ),
        (
            "endless_fsdp2",
            0,
            (
                "GPU: in all_gather_into_tensor #77 of group default, backward of layers.2.1,"
                " nccl_jobs.py:35, step 6 (15 steps and 183 collectives behind)"
            ),
        ),
        (
            "opposite_groups",
            2,
            (
                "GPU: in all_reduce #6 of group 2, nccl_jobs.py:51, step 5"
                " (170 steps and 341 collectives behind)"
            ),
        ),
        (
            "stopped",
            2,
            (
                "GPU: at all_reduce #11 of group default, backward of layers.0.0, nccl_jobs.py:35,"
                " step 2 (10 collectives issued since it was looked at)"
            ),
        ),
        ("healthy_ddp", 1, "GPU: after all_reduce #120 of group default, nccl_jobs.py:36, step 39"),
    ],
)
def test_recorded_runs(runs: Path, job: str, rank: int, text: str) -> None:
    """The place of the device is the last collective that it has reached, with its line, and what
    the CPU has issued since."""
    assert device_place(read_box(runs / job / f"rank{rank}.box")).device_text() == text


def test_a_polled_box_agrees_with_the_file(runs: Path) -> None:
    """A live box finds the same place of the device as the reader of the whole file."""
    names, boxes = NameReader(), sorted(runs.glob("*/*.box"))
    assert len(boxes) > 40
    for path in boxes:
        live_box = LiveBox(path, names)
        assert live_box.look()
        polled, read = live_box.device(), device_place(read_box(path))
        assert polled is not None
        assert polled == replace(read, cpu=polled.cpu)
        assert polled.steps_behind == read.steps_behind


# -- marks -----------------------------------------------------------------------------------------


def test_a_module_after_a_collective(device_box: DeviceBox) -> None:
    """If the device has reached a module since its last collective, its place is the module."""
    record = device_box.issue(step=6, at_s=6)
    device_box.reach(record, at_s=6.1)
    place = device_box.place()
    device_box.lane(place=place, time=int(6.5 * S), step=6, record=record + 1, pending=1)
    device = place_in(device_box)
    assert device.collective is None
    assert str(device.place) == "rank 0, step 6, forward of layers.1.mlp"
    assert str(device) == (
        "CPU: outside any module, step 7; GPU: forward of layers.1.mlp, step 6 (1 step behind)"
    )
    assert device.t_ns == int(1006.5 * S)


@pytest.mark.parametrize(
    ("done_s", "lane_s", "is_pending", "state"),
    [
        (0.0, 6.1, False, CallState.REACHED),
        (0.0, 6.1, True, CallState.RUNNING),
        (6.2, 6.2, False, CallState.DONE),
    ],
)
def test_states_of_a_collective(
    device_box: DeviceBox, done_s: float, lane_s: float, is_pending: bool, state: CallState
) -> None:
    """A collective is reached, runs while its second mark is pending, or is done."""
    record = device_box.issue(step=6, at_s=6)
    device_box.reach(record, at_s=6.1, done_s=done_s)
    pending = {"pending": 1, "next_record": record + 1} if is_pending else {}
    place = device_box.place(Pass.BACKWARD)
    device_box.lane(place=place, time=int(lane_s * S), step=6, record=record + 1, **pending)
    device = place_in(device_box)
    assert device.collective == DeviceCall("all_reduce", "default", 0, state)
    assert device.place == Place(0, 6, "backward", "layers.1.mlp", 0, "train.py:35")


def test_first_place_that_is_not_reached(device_box: DeviceBox) -> None:
    """The first pending mark gives the next place: that of the lane that moved last, if it has one,
    else the one that was issued first."""
    first, second = device_box.issue(step=6, at_s=6), device_box.issue(step=6, at_s=6.1)
    place = device_box.place(Pass.BACKWARD)
    device_box.lane(0, time=6 * S, step=6)
    device_box.lane(1, time=5 * S, pending=1, next_place=place, next_record=second + 1)
    device_box.lane(2, time=4 * S, pending=1, next_place=place, next_record=first + 1)
    assert place_in(device_box).next_text() == (
        "all_reduce #0 of group default, backward of layers.1.mlp, train.py:35, step 6"
    )
    device_box.lane(0, pending=1, next_place=device_box.place())
    device = place_in(device_box)
    assert (device.next_text(), device.next_collective) == ("forward of layers.1.mlp", None)
    assert device.pending == 3


def test_collectives_without_marks(device_box: DeviceBox) -> None:
    """A device without pending marks has reached everything that was issued before the last look:
    collectives that were captured into a graph have no marks. What was issued later is unknown."""
    record = device_box.issue(step=6, at_s=6)
    device_box.issue(step=7, at_s=7)
    device_box.reach(record, at_s=6.1)
    device_box.lane(place=device_box.place(), time=int(6.1 * S), step=6, record=record + 1)
    device_box.look(8)
    device = place_in(device_box)
    assert (device.collectives_behind, device.steps_behind, device.behind_text()) == (0, 0, "")
    device_box.issue(step=9, at_s=9)
    device = place_in(device_box)
    assert device.behind_text() == "2 collectives issued since it was looked at"
    assert device.steps_behind == 0


def test_streams_on_the_cpu_are_not_behind(device_box: DeviceBox) -> None:
    """Collectives that run on the CPU do not count as behind: no device reaches them."""
    device_box.issue(step=6, at_s=6)
    device_box.lane(place=device_box.place(), time=6 * S, step=7, pending=1)
    assert place_in(device_box).collectives_behind == 0


def test_damaged_device_sections(device_box: DeviceBox) -> None:
    """A cut or damaged box raises no error, and invents no names."""
    record = device_box.issue(step=6, at_s=6)
    device_box.reach(record, at_s=6.1)
    device_box.lane(place=device_box.place(), time=int(6.1 * S), record=record + 1, pending=1)
    assert device_box.box.path is not None
    whole, chance = device_box.box.path.read_bytes(), random.Random(0)
    geometry = device_box.box.geometry
    for attempt in range(200):
        data = bytearray(whole[: chance.randrange(len(whole))] if attempt % 2 else whole)
        for _ in range(20):
            at = chance.randrange(geometry.lanes_at, geometry.table_at)
            if at < len(data):
                data[at] = chance.randrange(256)
        device = device_place(parse_box(bytes(data)))
        modules = {place.module for place in (device.place, device.next) if place is not None}
        assert modules <= {None, "layers.1.mlp"}
        assert device.device_text()


# -- where() ---------------------------------------------------------------------------------------


def test_where_without_a_device() -> None:
    """Without a watch, and without a device, `where(device=True)` says that the progress of the
    device is not known, and why."""
    device = torchwhere.where(device=True)
    assert (device.place, device.problem) == (None, "no watch is running")
    with torchwhere.watch():
        device = torchwhere.where(device=True)
        assert device.cpu.line is not None
        assert device.place is None
        assert str(device).partition("; ")[2].startswith("device progress: not known (")
        assert device.to_dict()["problem"] == device.problem


def test_where_with_a_wrong_argument() -> None:
    """A value that is not a bool raises an error that names the argument."""
    with pytest.raises(TypeError, match=r"^where\(device='cuda'\): expected True or False$"):
        torchwhere.where(device="cuda")  # type: ignore[call-overload]


def test_own_box() -> None:
    """A process reads the place of its device from its own box, also from one in memory."""
    device_box = DeviceBox(None)
    record = device_box.issue(step=6, at_s=6)
    device_box.reach(record, at_s=6.1)
    device_box.issue(step=7, at_s=7)
    place = device_box.place(Pass.BACKWARD)
    device_box.lane(
        place=place, time=int(6.1 * S), step=6, record=record + 1, pending=1, next_place=place
    )
    device = own_device_place(device_box.box, Place(0, 7, "outside"))
    assert str(device) == (
        "CPU: outside any module, step 7; GPU: at all_reduce #0 of group default, backward of"
        " layers.1.mlp, train.py:35, step 6 (1 step and 1 collective behind)"
    )
    assert device_note(device) == (
        "the GPU had reached: at all_reduce #0 of group default, backward of layers.1.mlp,"
        " train.py:35, step 6; not reached: backward of layers.1.mlp, step 6"
    )
    device_box.box.close()


# -- exceptions ------------------------------------------------------------------------------------


class Failing(nn.Module):
    """Raises an exception of a given text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(self.text)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously",
        "CUDA error: an illegal memory access was encountered",
        "HIP error: invalid device function",
    ],
)
def test_note_on_a_device_error(tmp_path: Path, text: str) -> None:
    """An error of the device gets a second note on the place of the device, which is also in the
    event."""
    with torchwhere.watch(out=tmp_path), pytest.raises(RuntimeError) as raised:
        Failing(text)(torch.ones(1))
    place_note, device_note_ = raised.value.__notes__
    assert place_note.startswith("torchwhere: rank 0, step 0, forward of ")
    assert device_note_.startswith("torchwhere: device progress: not known (")
    (event,) = torchwhere.read_run(tmp_path).events(kinds={"exception"})
    assert device_note_ == f"torchwhere: {event.fields['device']}"


def test_note_on_another_error() -> None:
    """Other exceptions get one note, without a word on the device."""
    with torchwhere.watch(), pytest.raises(RuntimeError) as raised:
        Failing("CUDA out of memory. Tried to allocate 2.00 GiB")(torch.ones(1))
    assert len(raised.value.__notes__) == 1


def test_accelerator_error_is_of_the_device() -> None:
    """The exception class that newer torch raises counts, whatever its text."""
    error_type = getattr(torch, "AcceleratorError", None)
    if error_type is None:
        pytest.skip("this torch has no AcceleratorError")
    assert is_of_device(error_type("an error"))
    assert not is_of_device(RuntimeError("an error"))


# -- snapshots -------------------------------------------------------------------------------------


def decoded(value: Any) -> Any:
    return decode_device(json.loads(json.dumps(value)), 0, cpu=None, place=_decoded_place)


def _decoded_place(value: Any) -> Place:
    return Place(**{"pass_" if key == "pass" else key: field for key, field in value.items()})


def test_snapshot_of_a_device(runs: Path) -> None:
    """A snapshot holds the place of the device; one without the newer fields can be read."""
    state = device_state(read_box(runs / "endless_ddp" / "rank2.box"))
    assert state is not None
    expected = state._replace(device_place=replace(state.device_place, cpu=unknown_place()))
    encoded = encode_device(state)
    assert encoded is not None
    assert decoded(encoded) == expected
    newer = ("collective", "next", "next_collective", "collectives_behind")
    older = {key: value for key, value in encoded.items() if key not in newer}
    assert decoded(older).place == expected.place
    encoded["collective"]["state"] = "lost"
    with pytest.raises(InvalidError, match="the state of a collective is unknown"):
        decoded(encoded)


# -- views -----------------------------------------------------------------------------------------


def test_verdict(runs: Path) -> None:
    """The report on a rank has the place of its device: as text, as JSON, and in the table."""
    verdict = diagnose_folder(runs / "endless_ddp", stall_s=STALL_S)
    device = verdict.ranks[2].device
    assert device is not None
    assert device.cpu == verdict.ranks[2].place
    assert str(verdict.ranks[2]).endswith(device.device_text())
    assert verdict.to_dict()["ranks"]["2"]["device"] == {
        "step": 6,
        "pass": "outside",
        "module": None,
        "call": None,
        "line": "nccl_jobs.py:36",
        "framework_line": None,
        "collective": {"op": "all_reduce", "group": "default", "number": 21, "state": "done"},
        "next": {
            "step": 6,
            "pass": "backward",
            "module": "layers.2.0",
            "call": None,
            "line": "nccl_jobs.py:35",
            "framework_line": None,
            "collective": {"op": "all_reduce", "group": "default", "number": 22, "state": "issued"},
        },
        "steps_behind": 1,
        "collectives_behind": 3,
        "t_ns": device.t_ns,
        "problem": None,
        "cpu_waits_in": None,
    }
    row = verdict.as_rows()[2]
    assert (row["device_step"], row["device_collectives_behind"]) == (6, 3)
    assert "1 step and 3 collectives behind" in verdict._repr_html_()


def test_verdict_without_device_progress(runs: Path, tmp_path: Path) -> None:
    """A verdict on NCCL ranks says if the progress of their devices is not known; it says nothing
    if it is known."""
    make(Job(16, steps=2, records=64), tmp_path)
    missing = diagnose_folder(tmp_path, stall_s=STALL_S).missing_data
    assert missing[-1] == "device progress of ranks 0-15: only what the CPUs issued was compared"
    verdict = diagnose_folder(runs / "endless_ddp", stall_s=STALL_S)
    assert not any("device progress" in sentence for sentence in verdict.missing_data)


def test_events(runs: Path) -> None:
    """The table and the JSON of events show when the device reached a collective, and when it was
    done."""
    run = runs / "healthy_fsdp2"
    heading, *lines = prints("events", run, "--rank", 1, "--last", 2).splitlines()
    assert heading.split()[:5] == ["rank", "step", "time", "reached", "done"]
    step_begin, collective = (line.split() for line in lines)
    issued, reached, done = map(float, collective[2:5])
    assert issued <= reached <= done
    assert step_begin[3] == "outside"
    (line,) = prints(
        "events", run, "--rank", 1, "--last", 1, "--kind", "collective", "--json"
    ).splitlines()
    event = json.loads(line)
    assert event["t_ns"] <= event["reached_ns"] <= event["done_ns"]
    frame = torchwhere.read_run(run).to_pandas()
    row = frame[(frame["rank"] == 1) & (frame["kind"] == "collective")].iloc[-1]
    assert (row["reached_ns"], row["done_ns"]) == (event["reached_ns"], event["done_ns"])


def test_events_of_a_device_that_hangs(runs: Path) -> None:
    """A collective that the device has not reached has neither time."""
    run = torchwhere.read_run(runs / "endless_ddp")
    *_, event = run.events(ranks={2}, kinds={"collective"})
    assert {"reached_ns", "done_ns"}.isdisjoint(event.fields)


def test_a_note_with_the_name_of_a_device_time(device_box: DeviceBox) -> None:
    """A note of the user with such a field is not taken for a time."""
    device_box.lane(place=device_box.place(), time=6 * S)
    text = device_box.box.text(json.dumps({"text": "a note", "reached_ns": "soon"}))
    device_box.box.record(9, 6 * S, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, text)
    assert device_box.box.path is not None
    printed = prints("events", device_box.box.path.parent)
    assert "reached_ns=soon" in printed
