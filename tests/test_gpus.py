"""GPUs as NVML reports them: samples, the side file, and what a verdict says about a GPU."""

from __future__ import annotations

import json
import socket
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fake_nvml
from fake_nvml import FakeNvml
from torchwhere.blackbox.file_format import HEADER_BYTES, pack_header
from torchwhere.blackbox.reader import read_box
from torchwhere.diagnose.doctor.gpu_evidence import _FAULTS, _LIMITS, NoGpuData
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.gpus.labels import gpu_label
from torchwhere.gpus.nvml import NvmlError, Problem, open_nvml
from torchwhere.gpus.samples import (
    KEPT,
    Gpu,
    GpuSample,
    HostGpus,
    Xid,
    bare_uuid,
    gpus_of,
    read_gpus,
    write_gpus,
)
from torchwhere.monitor.gpu_sampler import GpuSampler, uses_nvidia_gpu
from torchwhere.pipeline.report import report_on
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.render.verdict_text.gpu import _REASONS, _UNKNOWN
from torchwhere.snapshots.decode import decode_snapshot
from torchwhere.snapshots.encode import HostSnapshot, encode_boxes

STALL_S = 4.0
WAIT_S = 30.0


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    module = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


# -- NVML ------------------------------------------------------------------------------------------


def test_a_sample_has_what_nvml_knows(nvml: FakeNvml) -> None:
    """A sample holds all numbers of a GPU; what a GPU does not support is None."""
    connection = open_nvml()
    first, second = connection.gpus()
    assert (first.uuid, first.index, first.pci) == (
        "aaaaaaaa-0000-0000-0000-000000000001",
        0,
        "00000000:1a:00.0",
    )
    assert (first.sm_max_mhz, first.total_bytes, first.ecc_at_start) == (1980, 141 << 30, 5)
    assert second.instances == tuple(map(bare_uuid, fake_nvml.INSTANCES))
    assert replace(connection.sample(first), t_ns=0) == GpuSample(
        t_ns=0,
        sm_mhz=810,
        memory_mhz=3201,
        reasons=("sw_thermal_slowdown", "hw_thermal_slowdown"),
        temperature_c=92,
        power_w=401.5,
        power_limit_w=700.0,
        used_bytes=3 << 30,
        busy_percent=97,
        ecc_uncorrected=5,
    )
    other = connection.sample(second)
    assert (other.ecc_uncorrected, other.busy_percent, other.power_limit_w) == (None, None, None)
    connection.close()
    assert nvml.closed == 2


def test_xids_name_their_gpu(nvml: FakeNvml) -> None:
    """Xid errors come with the UUID of their GPU, each of them once."""
    connection = open_nvml()
    connection.gpus()
    nvml.pending_xids = [(1, 79), (0, 31)]
    xids = connection.xids()
    assert [(uuid, xid.number) for uuid, xid in xids] == [
        (bare_uuid(fake_nvml.SECOND), 79),
        (bare_uuid(fake_nvml.FIRST), 31),
    ]
    assert connection.xids() == []


def test_xids_without_permission(nvml: FakeNvml) -> None:
    """A user who may not register for Xid errors still gets samples."""
    nvml.may_register = False
    connection = open_nvml()
    assert [gpu.knows_xids for gpu in connection.gpus()] == [False, False]
    assert connection.sample(connection.gpus()[0]).sm_mhz == 810


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (fake_nvml.LIBRARY_NOT_FOUND, Problem.NO_LIBRARY),
        (fake_nvml.DRIVER_NOT_LOADED, Problem.NO_DRIVER),
        (fake_nvml.NO_PERMISSION, Problem.NO_PERMISSION),
        (999, Problem.FAILED),
    ],
)
def test_nvml_that_does_not_start(nvml: FakeNvml, error: int, problem: Problem) -> None:
    """Each way in which NVML can be unavailable has a name of its own."""
    nvml.init_error = error
    with pytest.raises(NvmlError) as caught:
        open_nvml()
    assert caught.value.problem is problem


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nvidia-ml-py the problem is the package."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlError) as caught:
        open_nvml()
    assert caught.value.problem is Problem.NO_PACKAGE


def test_a_host_without_gpus(nvml: FakeNvml) -> None:
    """A driver that lists no GPU is a problem, not an empty answer."""
    nvml.count = 0
    with pytest.raises(NvmlError) as caught:
        open_nvml().gpus()
    assert caught.value.problem is Problem.NO_GPU


# -- the sampler and its file ----------------------------------------------------------------------


def wait_for(folder: Path, condition: Any) -> HostGpus:
    """The content of the file, once it fulfils a condition."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        hosts = read_gpus(folder)
        if hosts and condition(hosts[0]):
            return hosts[0]
        time.sleep(0.01)
    pytest.fail(f"the file never had it: {read_gpus(folder)}")


def test_the_sampler_writes_a_bounded_file(nvml: FakeNvml, tmp_path: Path) -> None:
    """The file keeps the last samples only, and the Xid errors and ECC errors of the run."""
    sampler = GpuSampler(tmp_path, every_s=0.001)
    sampler.start()
    sampler.start()  # a second call changes nothing
    wait_for(tmp_path, lambda host: len(host.gpus[0].samples) == KEPT)
    nvml.pending_xids.append((0, 79))
    nvml.ecc = 7
    wait_for(tmp_path, lambda host: bool(host.gpus[0].xids))
    sampler.stop()
    (host,) = read_gpus(tmp_path)
    first, second = host.gpus
    assert (host.host, host.driver, host.problem) == (socket.gethostname(), "570.1", None)
    assert len(first.samples) == len(second.samples) == KEPT
    assert [xid.number for xid in first.xids] == [79]
    assert second.xids == ()
    assert (first.ecc_at_start, first.samples[-1].ecc_uncorrected) == (5, 7)
    assert (tmp_path / f"gpu-{socket.gethostname()}.json").stat().st_size < 24_000
    assert nvml.closed == 2


def test_the_sampler_says_why_there_are_no_samples(nvml: FakeNvml, tmp_path: Path) -> None:
    """A driver that fails leaves a file with the reason, and no exception."""
    nvml.init_error = fake_nvml.DRIVER_NOT_LOADED
    sampler = GpuSampler(tmp_path)
    sampler.start()
    host = wait_for(tmp_path, lambda host: host.problem is not None)
    sampler.stop()
    assert (host.problem, host.problem_detail) == ("no_driver", "NVML error 9")


def test_a_driver_that_fails_later_keeps_its_samples(nvml: FakeNvml, tmp_path: Path) -> None:
    """If NVML breaks during the run, the samples until then stay in the file."""
    sampler = GpuSampler(tmp_path, every_s=0.001)
    sampler.start()
    wait_for(tmp_path, lambda host: bool(host.gpus[0].samples))
    nvml.nvmlDeviceGetClockInfo = None  # type: ignore[assignment,method-assign]
    host = wait_for(tmp_path, lambda host: host.problem is not None)
    sampler.stop()
    assert host.problem == "failed"
    assert host.problem_detail.startswith("TypeError")
    assert host.gpus[0].samples


def test_only_nvidia_gpus_of_this_host_are_sampled() -> None:
    """CPU jobs, AMD GPUs and GPUs of other hosts start no sampler."""
    here, device = socket.gethostname(), {"type": "cuda", "hip": False}
    assert uses_nvidia_gpu([{"host": here}, {"host": here, "devices": [device]}])
    assert not uses_nvidia_gpu([{"host": here}])
    assert not uses_nvidia_gpu([{"host": "elsewhere", "devices": [device]}])
    assert not uses_nvidia_gpu([{"host": here, "devices": [device | {"hip": True}]}])


def test_the_file_reads_back(tmp_path: Path) -> None:
    """Everything that is written is read again."""
    sample = GpuSample(7, 810, 3201, ("sw_power_cap",), 92, 401.5, 700.0, 1 << 30, 97, 0)
    gpu = Gpu("u", 3, "H200", "pci", 1980, 3201, 1 << 37, ("m",), 2, True, (Xid(79, 8),), (sample,))
    host = HostGpus("node a/1", None, "", "570", (gpu,))
    assert write_gpus(tmp_path, host)
    assert read_gpus(tmp_path) == [host]


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"gpus": 3}', '{"gpus": [1, {"samples": [3, {"sm_mhz": "x"}], "xids": [{}]}]}'],
)
def test_a_damaged_file_is_harmless(tmp_path: Path, content: str) -> None:
    """A file with anything in it raises nothing and invents no number."""
    (tmp_path / "gpu-a.json").write_text(content)
    for host in read_gpus(tmp_path):
        assert all(sample.sm_mhz is None for gpu in host.gpus for sample in gpu.samples)


# -- what a verdict says ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    with tarfile.open(Path(__file__).parent / "nccl_runs.txz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def with_devices(source: Path, folder: Path, uuids: list[str]) -> Path:
    """A copy of a run whose boxes name these GPUs, as a box of today does."""
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for rank, uuid in enumerate(uuids):
        path = folder / f"rank{rank}.box"
        box = read_box(path)
        assert box.geometry is not None
        keys = ("rank", "world_size", "run_id", "host", "pid", "started_ns", "clock_offset_ns")
        device = {"type": "cuda", "index": 0, "uuid": uuid, "pci": "", "hip": False}
        meta = {key: box.meta[key] for key in keys if key in box.meta} | {"devices": [device]}
        header = pack_header(box.geometry, json.dumps(meta).encode())
        path.write_bytes(header * 2 + path.read_bytes()[2 * HEADER_BYTES :])
    return folder


def gpu_of_rank(folder: Path, rank: int, *samples: GpuSample, **fields: Any) -> Gpu:
    """A GPU with samples in the last seconds of a rank's run."""
    box = read_box(folder / f"rank{rank}.box")
    end_ns = max(box.last_ns, box.beat_ns)
    timed = tuple(
        replace(sample, t_ns=end_ns - (len(samples) - number) * 10**9)
        for number, sample in enumerate(samples)
    )
    return Gpu(f"u{rank}", rank, sm_max_mhz=1980, samples=timed, **fields)


def judged(folder: Path, gpus: list[Gpu], *, problem: str | None = None) -> Verdict:
    host = read_box(folder / "rank0.box").meta["host"]
    write_gpus(folder, HostGpus(host, problem, gpus=tuple(gpus)))
    return diagnose_folder(folder, stall_s=STALL_S)


FAST = GpuSample(0, sm_mhz=1755, temperature_c=60, reasons=())
HOT = GpuSample(0, sm_mhz=810, temperature_c=92, reasons=("sw_thermal_slowdown",))
CAPPED = GpuSample(0, sm_mhz=1500, temperature_c=70, reasons=("sw_power_cap",))
UUIDS = ["u0", "u1", "u2", "u3"]


def gpu_lines(verdict: Verdict) -> list[str]:
    return [line for line in verdict.explanation if " of host " in line]


def test_a_straggler_that_is_hot(recorded: Path, tmp_path: Path) -> None:
    """The verdict on a slow device says that NVML reports a thermal slowdown."""
    run = with_devices(recorded / "slow_ddp", tmp_path, UUIDS)
    gpus = [gpu_of_rank(run, rank, *([HOT if rank == 2 else FAST] * 4)) for rank in range(4)]
    verdict = judged(run, gpus)
    host = read_box(run / "rank0.box").meta["host"]
    assert gpu_lines(verdict) == [
        (
            f"  GPU 2 of host {host} (rank 2) runs at 810 of 1980 MHz: thermal slowdown, 92 C;"
            " the GPUs of other ranks run at 1755 MHz"
        )
    ]
    (fact,) = verdict.facts["gpus"]
    assert (fact["rank"], fact["slowdowns"]) == (2, ["sw_thermal_slowdown"])
    assert (fact["sm_mhz"], fact["sm_max_mhz"], fact["others_sm_mhz"]) == (810, 1980, 1755)


def test_a_power_cap_of_all_gpus_explains_nothing(recorded: Path, tmp_path: Path) -> None:
    """A limit that slows down all GPUs alike is not why one of them is late."""
    run = with_devices(recorded / "slow_ddp", tmp_path, UUIDS)
    verdict = judged(run, [gpu_of_rank(run, rank, CAPPED, CAPPED) for rank in range(4)])
    assert verdict.facts["gpus"][0]["slowdowns"] == []
    assert "NVML reports no slowdown" in gpu_lines(verdict)[0]


def test_a_power_cap_of_one_gpu(recorded: Path, tmp_path: Path) -> None:
    """A limit that slows down only the late GPU is named."""
    run = with_devices(recorded / "slow_ddp", tmp_path, UUIDS)
    gpus = [gpu_of_rank(run, rank, *([CAPPED if rank == 2 else FAST] * 2)) for rank in range(4)]
    assert "power cap" in gpu_lines(judged(run, gpus))[0]


def test_a_moment_of_heat_explains_nothing(recorded: Path, tmp_path: Path) -> None:
    """A slowdown in few of the samples is not the cause."""
    run = with_devices(recorded / "slow_ddp", tmp_path, UUIDS)
    gpus = [gpu_of_rank(run, rank, HOT, FAST, FAST, FAST) for rank in range(4)]
    assert judged(run, gpus).facts["gpus"][0]["slowdowns"] == []


def test_a_hang_with_errors_of_the_gpu(recorded: Path, tmp_path: Path) -> None:
    """The verdict on a device hang names Xid and ECC errors of this run, and not older ones."""
    run = with_devices(recorded / "endless_ddp", tmp_path, UUIDS)
    started_ns = read_box(run / "rank2.box").meta["started_ns"]
    gpus = [gpu_of_rank(run, rank, FAST) for rank in range(4)]
    bad = replace(FAST, ecc_uncorrected=5)
    gpus[2] = gpu_of_rank(
        run, 2, bad, xids=(Xid(13, started_ns - 1), Xid(79, started_ns + 1)), ecc_at_start=3
    )
    verdict = judged(run, gpus)
    host = read_box(run / "rank0.box").meta["host"]
    assert gpu_lines(verdict) == [
        (
            f"  GPU 2 of host {host} (rank 2): Xid 79: the GPU has fallen off the bus, 2.2 s before"
            " the last progress of the job"
        ),
        f"  GPU 2 of host {host} (rank 2): uncorrected ECC errors: 2",
    ]
    assert (verdict.facts["gpus"][0]["xids"], verdict.facts["gpus"][0]["ecc_errors"]) == ([79], 2)


def test_ranks_that_share_a_gpu(recorded: Path, tmp_path: Path) -> None:
    """Ranks with one UUID are on one GPU, and a MIG instance is called that."""
    run = with_devices(recorded / "slow_ddp", tmp_path, ["x", "x", "m", "x"])
    gpu = replace(gpu_of_rank(run, 2, HOT), uuid="x", instances=("m",))
    verdict = judged(run, [gpu])
    assert gpu_lines(verdict)[0].startswith("  MIG instance of GPU 2 of host ")
    assert gpu_lines(verdict)[1].endswith("(rank 2): shared with ranks 0-1, 3")
    assert verdict.facts["gpus"][0]["mig"] is True


def test_samples_of_another_time_do_not_count(recorded: Path, tmp_path: Path) -> None:
    """A GPU that is slow after the run says nothing about the run."""
    run = with_devices(recorded / "slow_ddp", tmp_path, UUIDS)
    gpus = [gpu_of_rank(run, rank, HOT) for rank in range(4)]
    late = [
        replace(gpu, samples=tuple(replace(s, t_ns=s.t_ns + 60 * 10**9) for s in gpu.samples))
        for gpu in gpus
    ]
    verdict = judged(run, late)
    assert gpu_lines(verdict) == []
    assert verdict.facts["gpus"][0]["sm_mhz"] is None


def test_a_gpu_that_is_not_known(recorded: Path, tmp_path: Path) -> None:
    """The verdict says in one line why it has no facts on the GPU, and is otherwise the same."""
    plain = diagnose_folder(recorded / "slow_ddp", stall_s=STALL_S)
    assert "clocks and errors of the GPU of rank 2: its box does not name a GPU" in (
        plain.missing_data
    )
    run = with_devices(recorded / "slow_ddp", tmp_path, UUIDS)
    unsampled = diagnose_folder(run, stall_s=STALL_S)
    assert any("no monitor of its host saved samples" in line for line in unsampled.missing_data)
    verdict = judged(run, [], problem="no_package")
    assert any("pip install 'torchwhere[gpu]'" in line for line in verdict.missing_data)
    assert verdict.explanation == plain.explanation
    assert verdict.culprits == plain.culprits == (2,)


def test_each_reason_and_problem_has_a_text() -> None:
    """No reason, problem or gap is without its words."""
    assert set(_REASONS) == {*_FAULTS, *_LIMITS}
    assert set(_UNKNOWN) == {*NoGpuData, *Problem}


# -- labels ----------------------------------------------------------------------------------------


def test_the_label_of_a_gpu() -> None:
    """A label has the last sample and the Xid errors, without what NVML does not know."""
    sample = GpuSample(7, sm_mhz=1755, temperature_c=54, busy_percent=98, used_bytes=61 << 30)
    gpu = Gpu("u", 3, sm_max_mhz=1980, total_bytes=141 << 30, xids=(Xid(79, 8),), samples=(sample,))
    assert gpu_label(gpu) == (
        "GPU 3: 1755 of 1980 MHz, 54 C, 98% busy, 61.0 GiB of 141 GiB used, Xid 79"
    )
    assert gpu_label(Gpu("u", 3)) == "GPU 3: no sample"


def test_the_report_shows_the_gpu_of_a_rank(recorded: Path, tmp_path: Path) -> None:
    """The details of a rank in the report name its GPU."""
    run = with_devices(recorded / "slow_ddp", tmp_path, UUIDS)
    host = read_box(run / "rank0.box").meta["host"]
    gpus = tuple(gpu_of_rank(run, rank, FAST) for rank in range(4))
    write_gpus(run, HostGpus(host, gpus=gpus))
    details = report_on(run, stall_s=STALL_S).to_dict()["details"]
    assert details["2"]["gpus"] == ["GPU 2: 1755 of 1980 MHz, 60 C"]
    assert details["2"]["memory"] is None


# -- other hosts -----------------------------------------------------------------------------------


def test_gpus_travel_in_a_snapshot(recorded: Path, tmp_path: Path) -> None:
    """The monitor of another host sends its GPUs along: the lead finds the GPU of each rank, with
    times by its own clock."""
    run = with_devices(recorded / "slow_ddp", tmp_path, UUIDS)
    gpus = tuple(gpu_of_rank(run, rank, FAST, xids=(Xid(79, 100),)) for rank in range(4))
    boxes = {rank: read_box(run / f"rank{rank}.box") for rank in range(4)}
    host = HostGpus(socket.gethostname(), gpus=gpus)
    snapshot = decode_snapshot(encode_boxes(boxes, gpus=host, ahead_ns=40))
    assert isinstance(snapshot, HostSnapshot)
    assert snapshot.gpus is not None
    summaries = {summary.box_summary.rank: summary for summary in snapshot.batch.rank_summaries}
    for rank, gpu in enumerate(gpus):
        (sent,) = gpus_of(summaries[rank].box_summary.meta, [snapshot.gpus])
        assert sent.uuid == gpu.uuid
        assert sent.samples[0].t_ns == gpu.samples[0].t_ns - 40
        assert sent.xids[0].t_ns == 60


def test_errors_count_where_no_rank_is_blamed(recorded: Path, tmp_path: Path) -> None:
    """If a verdict blames no rank, a GPU with an error is named all the same, and only that one."""
    run = with_devices(recorded / "healthy_ddp", tmp_path, UUIDS)
    started_ns = read_box(run / "rank3.box").meta["started_ns"]
    gpus = [gpu_of_rank(run, rank, HOT) for rank in range(3)]
    gpus.append(gpu_of_rank(run, 3, HOT, xids=(Xid(48, started_ns + 1),)))
    verdict = judged(run, gpus)
    assert (verdict.kind, verdict.culprits) == ("dead", ())
    assert [fact["rank"] for fact in verdict.facts["gpus"]] == [3]
    assert gpu_lines(verdict)[0].endswith("(rank 3): Xid 48: a double-bit ECC error")


def test_a_rank_that_exits_has_no_clocks(recorded: Path, tmp_path: Path) -> None:
    """The clocks of a GPU say nothing about an exit."""
    run = with_devices(recorded / "killed", tmp_path, UUIDS)
    verdict = judged(run, [gpu_of_rank(run, rank, HOT) for rank in range(4)])
    assert verdict.culprits == (2,)
    assert "gpus" not in verdict.facts


# -- a real GPU ------------------------------------------------------------------------------------

# What the sampler wrote on an H200 (driver 580.159.04) while a process failed with a device-side
# assert. Only the UUID is another one.
H200 = {
    "host": "node0",
    "problem": None,
    "problem_detail": "",
    "driver": "580.159.04",
    "gpus": [
        {
            "uuid": "u2",
            "index": 0,
            "sm_max_mhz": 1980,
            "knows_xids": True,
            "ecc_at_start": 0,
            "xids": [{"number": 43, "t_ns": 1794837258673817810}],
            "samples": [
                {
                    "t_ns": 1794837260658186680,
                    "sm_mhz": 1980,
                    "memory_mhz": 3201,
                    "reasons": [],
                    "temperature_c": 46,
                    "power_w": 133.78,
                    "power_limit_w": 700.0,
                    "used_bytes": 648347648,
                    "busy_percent": 0,
                    "ecc_uncorrected": 0,
                }
            ],
        }
    ],
}


def test_what_an_h200_reports(tmp_path: Path) -> None:
    """The file of a real GPU reads completely, with the Xid error of a device-side assert."""
    (tmp_path / "gpu-node0.json").write_text(json.dumps(H200))
    (host,) = read_gpus(tmp_path)
    (gpu,) = host.gpus
    assert [xid.number for xid in gpu.xids] == [43]
    assert gpu_label(replace(gpu, total_bytes=141 << 30)) == (
        "GPU 0: 1980 of 1980 MHz, 46 C, 134 of 700 W, 0% busy, 618 MiB of 141 GiB used, Xid 43"
    )
