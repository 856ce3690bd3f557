"""What NVML knows about the GPUs of ranks: clocks, slowdowns, errors.

Takes the samples that monitors saved (`gpus/`) and the ranks that a finding blames. A box names the
device of its rank by UUID. Only samples from the time of the run count: before and after it a GPU
is idle. A slowdown counts if it lasted for most of the last samples, and if the GPUs of other ranks
run faster: under full load a power cap slows down all of them. `xids.py` says which Xid errors
count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import Finding
from torchwhere.diagnose.doctor.verdict import NO_FAULT, VerdictKind
from torchwhere.diagnose.doctor.xids import (
    CLEANUP,
    OF_PROCESS,
    SETTLE_NS,
    SeenXid,
    XidTimes,
    may_be_own,
)
from torchwhere.gpus.samples import (
    Gpu,
    GpuSample,
    bare_uuid,
    devices_of,
    gpu_of,
    gpus_of,
    host_name,
    host_of,
)

_MOST_RANKS = 4
_MOST_DEVICES = 4  # of a rank
_RECENT = 12  # samples
_SLOWER = 0.9  # of the clock of other GPUs
_SILENT_S = 20.0  # four intervals without a sample
# These always slow down a GPU. A power cap or a setting may be the same for all GPUs.
_FAULTS = (
    "hw_slowdown",
    "hw_thermal_slowdown",
    "sw_thermal_slowdown",
    "hw_power_brake_slowdown",
)
_LIMITS = ("sw_power_cap", "applications_clocks", "sync_boost")


class NoGpuData(StrEnum):
    """Why nothing is known about the GPU of a rank, beside the problems of NVML itself."""

    NOT_NAMED = "not_named"  # its box does not name the device
    NOT_SAMPLED = "not_sampled"  # no monitor of its host has saved samples
    NOT_LISTED = "not_listed"  # NVML does not list the device
    NOT_NVIDIA = "not_nvidia"


class UnknownGpu(NamedTuple):
    """A rank whose GPU is unknown, and why: a value of `NoGpuData` or of `Problem`."""

    rank: int
    host: str
    why: str


@dataclass(frozen=True, slots=True)
class GpuEvidence:
    """The GPU of one rank, as NVML saw it during the run."""

    rank: int
    host: str
    gpu: Gpu
    is_instance: bool  # the rank has a MIG instance of it
    shared_with: tuple[int, ...]  # other ranks on the same GPU
    sample: GpuSample | None
    slowdowns: tuple[str, ...]  # reasons, if they explain why it is slow
    others_mhz: int | None  # SM clock of the GPUs of other ranks
    xids: tuple[SeenXid, ...]  # those that may have to do with the fault
    has_own_error: bool  # the rank reports an error of its device
    ecc_errors: int  # uncorrected, since the start of the monitor
    silent_s: float | None  # NVML did not answer for so long before the end

    @property
    def has_error(self) -> bool:
        return bool(self.ecc_errors) or any(xid.number != CLEANUP for xid in self.xids)

    @property
    def may_be_of_others(self) -> bool:
        """Whether another process on this GPU may have caused an Xid error."""
        is_of_process = any(xid.number in OF_PROCESS for xid in self.xids)
        return is_of_process and bool(self.shared_with) and not self.has_own_error

    def to_dict(self) -> dict[str, Any]:
        sample = self.sample or GpuSample(0)
        return {
            "rank": self.rank,
            "host": self.host,
            "index": self.gpu.index,
            "uuid": self.gpu.uuid,
            "name": self.gpu.name,
            "mig": self.is_instance,
            "shared_with": list(self.shared_with),
            "sm_mhz": sample.sm_mhz,
            "sm_max_mhz": self.gpu.sm_max_mhz,
            "others_sm_mhz": self.others_mhz,
            "temperature_c": sample.temperature_c,
            "power_w": sample.power_w,
            "power_limit_w": sample.power_limit_w,
            "slowdowns": list(self.slowdowns),
            "xids": [xid.number for xid in self.xids],
            "xids_after_progress_s": [xid.after_progress_s for xid in self.xids],
            "xids_may_be_of_others": self.may_be_of_others,
            "ecc_errors": self.ecc_errors,
            "silent_s": self.silent_s,
        }


def gpu_evidence(context: Context, finding: Finding) -> tuple[list[GpuEvidence], list[UnknownGpu]]:
    """The GPUs of the ranks that a finding blames; if it blames none, those with errors.

    Clocks say something only about a rank that is slow and a device that hangs.
    """
    if finding.kind in NO_FAULT:
        return [], []
    # The clocks of a device that is slow or hangs matter even if nothing is wrong with them.
    is_on_device = bool(finding.facts.get("on_device"))
    is_straggler = finding.kind is VerdictKind.STRAGGLER
    gpus = RankGpus(context, XidTimes.of(context, finding))
    evidence: list[GpuEvidence] = []
    unknown: list[UnknownGpu] = []
    for rank in finding.culprits or context.run.summaries:
        for entry in gpus.of(rank):
            if isinstance(entry, UnknownGpu):
                unknown.append(entry)
                continue
            is_why = is_on_device or (is_straggler and entry.slowdowns)
            if entry.has_error or (rank in finding.culprits and is_why):
                evidence.append(entry)
    return evidence[:_MOST_RANKS], unknown[:_MOST_RANKS] if is_on_device else []


@dataclass(frozen=True)
class RankGpus:
    """The GPUs of all ranks of a run."""

    context: Context
    xid_times: XidTimes

    def of(self, rank: int) -> Iterator[GpuEvidence | UnknownGpu]:
        """What is known about each device of a rank."""
        box = self.context.run.summaries.get(rank)
        meta = box.meta if box is not None else {}
        host = host_name(meta)
        devices, host_gpus = devices_of(meta), host_of(meta, self.context.gpus)
        if not devices:
            yield UnknownGpu(rank, host, NoGpuData.NOT_NAMED)
        for device in devices[:_MOST_DEVICES]:
            if device.get("type") != "cuda" or device.get("hip"):
                yield UnknownGpu(rank, host, NoGpuData.NOT_NVIDIA)
                continue
            if host_gpus is None:
                yield UnknownGpu(rank, host, NoGpuData.NOT_SAMPLED)
                continue
            gpu = gpu_of(device, host_gpus)
            if gpu is None:
                yield UnknownGpu(rank, host, host_gpus.problem or NoGpuData.NOT_LISTED)
            else:
                yield self._evidence(rank, host, gpu, uuid=bare_uuid(device.get("uuid")))

    def _evidence(self, rank: int, host: str, gpu: Gpu, *, uuid: str) -> GpuEvidence:
        begin_ns, end_ns = self._span_ns(rank)
        samples = _during(gpu, begin_ns, end_ns)
        ranks = self._gpus_by_rank
        others = {other.uuid: other for other in ranks.values() if other is not gpu}.values()
        recent = [_during(other, begin_ns, end_ns)[-1:] for other in others]
        clocks = [sample.sm_mhz for (sample,) in filter(None, recent) if sample.sm_mhz is not None]
        others_mhz = int(median(clocks)) if clocks else None
        sample, slowdowns = _slowdown(samples, others_mhz)
        last_ns = samples[-1].t_ns if samples else None
        silent_s = (end_ns - last_ns) / 1e9 if last_ns is not None else None
        sharing = tuple(other for other, used in ranks.items() if used is gpu and other != rank)
        eccs = [sample.ecc_uncorrected for sample in gpu.samples if sample.ecc_uncorrected]
        return GpuEvidence(
            rank=rank,
            host=host,
            gpu=gpu,
            is_instance=uuid in gpu.instances,
            shared_with=sharing,
            sample=sample,
            slowdowns=slowdowns,
            others_mhz=others_mhz,
            xids=self.xid_times.seen(gpu, rank, (rank, *sharing)),
            has_own_error=may_be_own(self.context, rank),
            ecc_errors=max(0, max(eccs, default=0) - (gpu.ecc_at_start or 0)),
            silent_s=silent_s if silent_s is not None and silent_s > _SILENT_S else None,
        )

    @cached_property
    def _gpus_by_rank(self) -> dict[int, Gpu]:
        """The first GPU of each rank that has one."""
        boxes = self.context.run.summaries.items()
        gpus = {rank: gpus_of(box.meta, self.context.gpus) for rank, box in boxes}
        return {rank: own[0] for rank, own in gpus.items() if own}

    def _span_ns(self, rank: int) -> tuple[int, int]:
        """When a rank began, and its last sign of life."""
        box = self.context.run.summaries[rank]
        started = box.meta.get("started_ns")
        return started if isinstance(started, int) else 0, max(box.last_ns, box.beat_ns)


def _during(gpu: Gpu, begin_ns: int, end_ns: int) -> list[GpuSample]:
    return [sample for sample in gpu.samples if begin_ns <= sample.t_ns <= end_ns + SETTLE_NS][
        -_RECENT:
    ]


def _slowdown(
    samples: Sequence[GpuSample], others_mhz: int | None
) -> tuple[GpuSample | None, tuple[str, ...]]:
    """The sample to show, and the reasons that most samples give, if the GPU is slow."""
    if not samples:
        return None, ()
    slow = [sample for sample in samples if set(sample.reasons or ()) & {*_FAULTS, *_LIMITS}]
    if 2 * len(slow) <= len(samples):
        return samples[-1], ()
    shown = slow[-1]
    is_slower = (
        shown.sm_mhz is not None and others_mhz is not None and shown.sm_mhz < _SLOWER * others_mhz
    )
    reasons = shown.reasons or ()
    faults = tuple(reason for reason in _FAULTS if reason in reasons)
    limits = tuple(reason for reason in _LIMITS if reason in reasons)
    return shown, faults or (limits if is_slower else ())
