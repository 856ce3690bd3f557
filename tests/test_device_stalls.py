"""Devices that do not progress although no collective is pending on them."""

from __future__ import annotations

from pathlib import Path

from device_boxes import DeviceBox, S
from torchwhere.core.events import Kind
from torchwhere.pipeline.verdict import diagnose_folder


def write_rank(folder: Path, *, rank: int, world_size: int, reached_s: float) -> None:
    """A rank whose CPU issued its last collective at 100 s, which the device has done, and whose
    device was last looked at after 130 s."""
    device = DeviceBox(folder / f"rank{rank}.box", rank=rank, world_size=world_size)
    device.box.record(Kind.START, 99 * S)
    record = device.issue(step=4, at_s=100)
    device.reach(record, at_s=100.1, done_s=100.2)
    is_stalled = reached_s < 130
    device.lane(
        place=device.place(),
        time=int(reached_s * S),
        step=4,
        record=record + 1,
        pending=3 if is_stalled else 0,
        next_place=device.place() if is_stalled else 0,
    )
    device.look(130)
    device.cpu(step=4, at_s=100.5)
    device.box.beat(130 * S)
    device.box.close()


def test_one_process(tmp_path: Path) -> None:
    """A job of one process whose device hangs is not healthy: the verdict says where the device
    is."""
    write_rank(tmp_path, rank=0, world_size=1, reached_s=101)
    verdict = diagnose_folder(tmp_path, stall_s=5)
    assert (verdict.kind, verdict.culprits) == ("missing", (0,))
    assert verdict.explanation[0] == "The device of rank 0 has not progressed for 29 s."
    assert any("issued after forward of layers.1.mlp" in line for line in verdict.explanation)


def test_two_ranks(tmp_path: Path) -> None:
    """Only the rank whose device hangs is named, not the rank whose device is idle."""
    write_rank(tmp_path, rank=0, world_size=2, reached_s=130)
    write_rank(tmp_path, rank=1, world_size=2, reached_s=101)
    verdict = diagnose_folder(tmp_path, stall_s=5)
    assert (verdict.kind, verdict.culprits) == ("missing", (1,))


def test_an_idle_device(tmp_path: Path) -> None:
    """A device that has reached all its marks is not stalled, however long the CPU does nothing."""
    write_rank(tmp_path, rank=0, world_size=1, reached_s=130)
    verdict = diagnose_folder(tmp_path, stall_s=5)
    assert verdict.culprits == ()
    assert not verdict.facts.get("on_device")
