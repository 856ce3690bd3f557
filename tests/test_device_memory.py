"""The memory of the device: what is recorded, and what a verdict on an out-of-memory error says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import torchwhere
from models import Model, batch
from torchwhere.blackbox.file_format import (
    FLAG_AT_LEAST,
    FLAG_INFERRED,
    FLAG_UNKNOWN,
    MEMORY_RESERVED_SHIFT,
    EntryType,
)
from torchwhere.blackbox.file_names import box_name
from torchwhere.blackbox.memory import MemorySample, memory_samples
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import Kind
from torchwhere.core.place import Pass
from torchwhere.core.units import memory_amount
from torchwhere.diagnose.doctor.device_memory import (
    AllocatorReport,
    MemoryGrowth,
    growth,
    parse_report,
)
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.hooks.memory import MemoryNow, PeakRise, memory_now, units
from torchwhere.pipeline.verdict import diagnose_folder

GIB, MIB = 1 << 30, 1 << 20
WALL_NS = 1_800_000_000_000_000_000
STEP_NS = 10**9
# messages of torch 2.11, shortened at the end
FULL = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity"
    " of 139.81 GiB of which 101.50 GiB is free. Process 4711 has 30.00 GiB memory in use."
    " Including non-PyTorch memory, this process has 3.31 GiB memory in use. 2.80 GiB allowed; Of"
    " the allocated memory 2.50 GiB is allocated by PyTorch, and 48.00 MiB is reserved by PyTorch"
    " but unallocated. If reserved but unallocated memory is large try setting ..."
)


# -- what is recorded ------------------------------------------------------------------------------


def test_the_peak_of_a_step_is_its_rise() -> None:
    """If the allocator's peak has risen in a step, that is the step's peak; otherwise only the
    amount at its end is known. A reset by the job is not a rise."""
    rise = PeakRise()
    assert rise.of_step(MemoryNow(10, 20, 15)) == (10, False)
    assert rise.of_step(MemoryNow(12, 20, 40)) == (40, True)
    assert rise.of_step(MemoryNow(13, 20, 40)) == (13, False)
    assert rise.of_step(MemoryNow(14, 20, 14)) == (14, False)
    assert rise.of_step(MemoryNow(14, 20, 30)) == (30, True)


def test_the_numbers_of_the_allocator() -> None:
    """The amounts come from the sums over all pools of the allocator."""
    stats = {
        "allocated_bytes": {"all": {"current": 5, "peak": 9, "allocated": 50, "freed": 45}},
        "reserved_bytes": {"all": {"current": 7, "peak": 11, "allocated": 60, "freed": 53}},
    }
    assert memory_now(stats) == MemoryNow(allocated=5, reserved=7, peak=9)


def test_a_cpu_job_records_nothing(tmp_path: Path) -> None:
    """The box of a job without an accelerator has no memory records and names no device."""
    import torch

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torchwhere.watch(out=tmp_path):
        for _ in range(3):
            model(batch()).sum().backward()
            optimizer.step()
    box = read_box(tmp_path / "rank0.box")
    assert memory_samples(box) == []
    assert "devices" not in box.meta


class MemoryBox:
    """Writes a box with memory records, as the hook of a job does."""

    def __init__(self, folder: Path, rank: int, *, records: int = 256, world: int = 1) -> None:
        meta = {
            "rank": rank,
            "world_size": world,
            "run_id": "memory",
            "host": "a",
            "pid": 0,
            "started_ns": WALL_NS,
            "clock_offset_ns": WALL_NS,
        }
        self.box = BoxWriter(folder / box_name(rank), meta=meta, records=records)
        self.box.intern(EntryType.THREAD, "0\tMainThread")
        self._t_ns = 0

    def record(
        self,
        kind: Kind,
        *,
        step: int,
        module: str = "",
        flags: int = 0,
        subject: int = 0,
        extra: int = 0,
    ) -> None:
        self._t_ns += STEP_NS
        module_id = self.box.intern(EntryType.MODULE, module) if module else 0
        pass_ = int(Pass.FORWARD if module else Pass.OUTSIDE)
        self.box.record(
            kind, self._t_ns, pass_, flags, 0, step, module_id, 0, 0, 0, subject, 0, 0, extra
        )

    def memory(
        self, step: int, allocated: int, peak: int, *, module: str = "", flags: int = 0
    ) -> None:
        amounts = units(allocated) | units(allocated + GIB) << MEMORY_RESERVED_SHIFT
        self.record(
            Kind.MEMORY, step=step, module=module, flags=flags, subject=units(peak), extra=amounts
        )

    def fail(self, message: str, *, step: int, module: str) -> None:
        text = self.box.text(json.dumps({"text": message, "type": "OutOfMemoryError"}))
        self.record(Kind.EXCEPTION, step=step, module=module, extra=text)
        reason = self.box.text(json.dumps({"reason": f"exception: {message}"}))
        self.record(Kind.END, step=step, extra=reason)
        self.box.close()


def test_memory_records_read_back(tmp_path: Path) -> None:
    """A record holds amounts beyond 4 GiB, the place of the peak, and whether the peak is exact."""
    writer = MemoryBox(tmp_path, 0)
    writer.memory(3, 70 * GIB, 130 * GIB, module="layers.1")
    writer.memory(4, 71 * GIB, 72 * GIB, flags=FLAG_AT_LEAST | FLAG_UNKNOWN)
    writer.box.close()
    box = read_box(tmp_path / box_name(0))
    first, second = memory_samples(box)
    assert first[1:6] == (3, 70 * GIB, 71 * GIB, 130 * GIB, True)
    assert first.peak_place is not None
    assert (first.peak_place.module, first.peak_place.pass_) == ("layers.1", "forward")
    assert (second.peak_bytes, second.peak_is_exact) == (72 * GIB, False)
    event = next(iter(box.events())).to_dict()
    assert (event["kind"], event["peak_bytes"]) == ("memory", 130 * GIB)


def test_old_samples_come_from_the_table(tmp_path: Path) -> None:
    """A ring that has wrapped loses old records; the table still has some of them."""
    writer = MemoryBox(tmp_path, 0, records=16)
    for step in range(40):
        if step in (0, 10, 30):
            entry = {"step": step, "t_ns": step * STEP_NS + 1, "allocated_bytes": step * GIB}
            writer.box.intern(EntryType.MEMORY, json.dumps(entry | {"reserved_bytes": 99 * GIB}))
        writer.memory(step, step * GIB, step * GIB)
    writer.box.close()
    samples = memory_samples(read_box(tmp_path / box_name(0)))
    assert [sample.step for sample in samples] == [0, 10, *range(24, 40)]
    assert samples[1][2:] == (10 * GIB, 99 * GIB, None, False, None)


# -- what the exception says -----------------------------------------------------------------------


def test_the_message_of_torch() -> None:
    """All amounts of the message are read, and what other processes use follows from them."""
    report = parse_report(FULL)
    assert report is not None
    assert report.tried_bytes == 256 * MIB
    assert report.total_bytes == int(139.81 * GIB)
    assert report.allowed_bytes == int(2.8 * GIB)
    assert report.allocated_bytes == int(2.5 * GIB)
    assert report.unused_bytes == 48 * MIB
    assert report.other_bytes == pytest.approx(35 * GIB, rel=0.01)


@pytest.mark.parametrize(
    ("message", "report"),
    [
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 bytes.", (2,)),
        ("OutOfMemoryError: XPU out of memory. Tried to allocate 1.50 GiB. Half", (3 * GIB // 2,)),
        ("OutOfMemoryError: CUDA out of memory.", ()),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 1.2.3 GiB.", ()),
    ],
)
def test_messages_that_say_less(message: str, report: tuple[int, ...]) -> None:
    """What a message does not say, or says in another form, is unknown."""
    assert parse_report(message) == AllocatorReport(*report)


@pytest.mark.parametrize(
    "message", ["MemoryError", "ValueError: bad", "RuntimeError: cannot allocate memory"]
)
def test_other_failures_are_not_of_the_device(message: str) -> None:
    """Memory of the host, and other exceptions, say nothing about the device."""
    assert parse_report(message) is None


# -- what grew -------------------------------------------------------------------------------------


def ends(allocated: Callable[[int], float], *, steps: int = 40) -> list[MemorySample]:
    """Samples at the ends of steps, in MiB."""
    return [
        MemorySample(step * STEP_NS, step, int(allocated(step) * MIB), 0) for step in range(steps)
    ]


def test_growth_begins_where_the_memory_began_to_rise() -> None:
    """A leak that begins in step 10 grew since step 10."""
    samples = ends(lambda step: 1000 + 50 * max(0, step - 10))
    assert growth(samples) == MemoryGrowth(2, 1000 * MIB, 39, 2450 * MIB)
    samples = ends(lambda step: 1000 - step if step < 10 else 900 + 50 * (step - 10))
    assert growth(samples) == MemoryGrowth(10, 900 * MIB, 39, 2350 * MIB)


def test_growth_may_dip() -> None:
    """Small dips do not end a growth."""
    rise = growth(ends(lambda step: 1000 + 50 * step - (5 if step % 7 == 0 else 0)))
    assert rise is not None
    assert (rise.from_step, rise.to_step) == (2, 39)


@pytest.mark.parametrize(
    "allocated",
    [
        lambda step: 1000,
        lambda step: 1000 + step % 3 * 400,
        lambda step: 400 if step < 2 else 1200,  # the state of an optimizer
        lambda step: 1000 if step < 4 else 1500,  # a step up, and then none
        lambda step: 3000 - 20 * step,
    ],
    ids=["constant", "changing", "optimizer state", "one rise", "falling"],
)
def test_no_growth(allocated: Callable[[int], float]) -> None:
    """Memory that does not rise until the end did not grow."""
    assert growth(ends(allocated)) is None


def test_few_samples_show_no_growth() -> None:
    """The first steps are no proof of growth."""
    assert growth(ends(lambda step: 100 * step, steps=4)) is None
    assert growth([]) is None


# -- the verdict -----------------------------------------------------------------------------------


def verdict_on(
    folder: Path, held_mib: int, *, has_samples: bool = True, flags: int = FLAG_AT_LEAST
) -> Verdict:
    """The verdict on a rank that holds so much more in each step, and fails in step 20."""
    writer = MemoryBox(folder, 0)
    for step in range(20):
        writer.record(Kind.STEP_BEGIN, step=step)
        if has_samples:
            base = (500 + held_mib * step) * MIB
            writer.memory(step, base, base + 256 * MIB, module="wide")
        writer.record(Kind.STEP_END, step=step)
    writer.record(Kind.STEP_BEGIN, step=20)
    if has_samples:
        base = (500 + held_mib * 20) * MIB
        writer.memory(20, base, base + 300 * MIB, module="wide", flags=flags)
    writer.fail(FULL, step=20, module="wide")
    return diagnose_folder(folder)


def memory_lines(verdict: Verdict) -> list[str]:
    return [line for line in verdict.explanation if ", memory: " in line]


def test_a_leak(tmp_path: Path) -> None:
    """The verdict names rank and place, the amounts, what grew since when, and the peak."""
    verdict = verdict_on(tmp_path, 100)
    assert (verdict.kind, verdict.culprits) == ("dead", (0,))
    assert "  last place: forward of wide, step 20" in verdict.explanation
    assert memory_lines(verdict) == [
        (
            "  rank 0, memory: tried to allocate 256 MiB; 2.5 GiB allocated, 48.0 MiB reserved but"
            " not allocated, 102 GiB free of 140 GiB"
        ),
        (
            "  rank 0, memory: the job limits this process to 2.8 GiB of this device"
            " (torch.cuda.set_per_process_memory_fraction)"
        ),
        "  rank 0, memory: other processes use 35.0 GiB of this device",
        (
            "  rank 0, memory: allocated memory grew from 700 MiB at the end of step 2 to 2.3 GiB"
            " at the end of step 19: something holds tensors from step to step"
        ),
        ("  rank 0, memory: the peak was at least 2.7 GiB, in forward of wide, step 20"),
    ]
    (fact,) = verdict.facts["out_of_memory"]
    assert fact["growth"] == {
        "from_step": 2,
        "from_bytes": 700 * MIB,
        "to_step": 19,
        "to_bytes": 2400 * MIB,
    }
    assert fact["peak"]["place"]["module"] == "wide"
    json.dumps(verdict.to_dict())


def test_a_step_that_needs_more(tmp_path: Path) -> None:
    """Where nothing grew from step to step, the verdict says so."""
    verdict = verdict_on(tmp_path, 0)
    assert verdict.facts["out_of_memory"][0]["growth"] is None
    assert "it did not grow from step to step" in memory_lines(verdict)[3]


def test_a_peak_whose_module_is_inferred(tmp_path: Path) -> None:
    """If the CPU left several modules between two samples, the peak may have been in any of
    them."""
    verdict = verdict_on(tmp_path, 0, flags=FLAG_INFERRED)
    assert memory_lines(verdict)[-1] == (
        "  rank 0, memory: the peak was 800 MiB, in forward of wide, step 20, or shortly before"
    )


def test_a_box_without_samples(tmp_path: Path) -> None:
    """Without samples the verdict has the amounts of the message, and says what is unknown."""
    verdict = verdict_on(tmp_path, 0, has_samples=False)
    lines = memory_lines(verdict)
    assert "tried to allocate 256 MiB" in lines[0]
    assert lines[-1].endswith("what grew is not known: the box has no memory samples")
    assert verdict.facts["out_of_memory"][0]["peak"] is None


def test_amounts_of_memory() -> None:
    """Amounts are in the units of PyTorch's messages."""
    amounts = [0, 512, 1536, 256 * MIB, 3 * GIB // 2, 3000 * GIB]
    assert [memory_amount(nbytes) for nbytes in amounts] == [
        "0 bytes",
        "512 bytes",
        "1.5 KiB",
        "256 MiB",
        "1.5 GiB",
        "3000 GiB",
    ]
