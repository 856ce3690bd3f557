"""Sentences on what NVML reports about the GPUs of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.doctor.gpu_evidence import GpuEvidence, NoGpuData, UnknownGpu
from torchwhere.diagnose.doctor.xids import SeenXid
from torchwhere.gpus.nvml import Problem
from torchwhere.gpus.samples import GpuSample

_REASONS = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "thermal slowdown by the hardware",
    "sw_thermal_slowdown": "thermal slowdown",
    "hw_power_brake_slowdown": "power brake of the server",
    "sw_power_cap": "power cap",
    "applications_clocks": "clocks set by an administrator",
    "sync_boost": "clocks held back by another GPU of its sync boost group",
}
# Names of the Xid errors that are most often the cause of a failure, and of one that never is.
_XIDS = {
    13: "an exception in a kernel",
    31: "a page fault in a kernel",
    43: "a kernel failed",
    45: "cleanup after a process was ended, a consequence",
    48: "a double-bit ECC error",
    63: "a memory row was remapped",
    64: "a memory row could not be remapped",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many single-bit ECC errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the GPU's system processor does not answer",
}
_UNKNOWN: dict[str, str] = {
    NoGpuData.NOT_NAMED: "its box does not name a GPU",
    NoGpuData.NOT_SAMPLED: "no monitor of its host saved samples (`torchwhere run` starts one)",
    NoGpuData.NOT_LISTED: "NVML does not list it",
    NoGpuData.NOT_NVIDIA: "it is not an NVIDIA GPU",
    Problem.NO_PACKAGE: (
        "the package nvidia-ml-py is not installed: pip install 'torchwhere[gpu]'"
    ),
    Problem.NO_LIBRARY: "its host has no NVML library",
    Problem.NO_DRIVER: "the NVIDIA driver of its host is not loaded",
    Problem.NO_PERMISSION: "the monitor has no permission to use NVML",
    Problem.NO_GPU: "NVML lists no GPU on its host",
    Problem.FAILED: "NVML failed on its host",
}


def gpu_text(evidence: Sequence[GpuEvidence]) -> list[str]:
    """What NVML says about each GPU: errors first, then clocks."""
    return [f"  {sentence}" for gpu in evidence for sentence in _sentences(gpu)]


def unknown_gpu_text(unknown: Sequence[UnknownGpu]) -> list[str]:
    return [
        f"clocks and errors of the GPU of rank {gpu.rank}: {_UNKNOWN.get(gpu.why, gpu.why)}"
        for gpu in unknown
    ]


def _sentences(evidence: GpuEvidence) -> list[str]:
    kind = "MIG instance of GPU" if evidence.is_instance else "GPU"
    name = f"{kind} {evidence.gpu.index} of host {evidence.host} (rank {evidence.rank})"
    sentences = [f"{name}: Xid {_xid_text(xid)}" for xid in _first_of_each(evidence.xids)]
    if evidence.ecc_errors:
        sentences.append(f"{name}: uncorrected ECC errors: {evidence.ecc_errors}")
    if evidence.silent_s is not None:
        sentences.append(f"{name}: NVML gave no answer for {evidence.silent_s:.0f} s")
    if evidence.sample is not None and (evidence.slowdowns or not sentences):
        sentences.append(_clock_text(name, evidence, evidence.sample))
    if evidence.shared_with:
        its = ranks_phrase(evidence.shared_with)
        whose = f": the Xid error may be that of {its} or of another process"
        sentences.append(f"{name}: shared with {its}{whose if evidence.may_be_of_others else ''}")
    return sentences


def _first_of_each(xids: Sequence[SeenXid]) -> Iterator[SeenXid]:
    """The first error of each number."""
    numbers: set[int] = set()
    for xid in xids:
        if xid.number not in numbers:
            numbers.add(xid.number)
            yield xid


def _xid_text(xid: SeenXid) -> str:
    """`31: a page fault in a kernel, 1.2 s after the last progress of the job`."""
    text = f"{xid.number}: {_XIDS[xid.number]}" if xid.number in _XIDS else str(xid.number)
    if xid.after_progress_s is None:
        return text
    side = "after" if xid.after_progress_s >= 0 else "before"
    return f"{text}, {abs(xid.after_progress_s):.1f} s {side} the last progress of the job"


def _clock_text(name: str, evidence: GpuEvidence, sample: GpuSample) -> str:
    """`GPU 3 of host a runs at 810 of 1980 MHz: thermal slowdown, 92 C`."""
    if sample.sm_mhz is None:
        clock = f"{name}: its clock is not known"
    else:
        of_max = f" of {evidence.gpu.sm_max_mhz}" if evidence.gpu.sm_max_mhz is not None else ""
        clock = f"{name} runs at {sample.sm_mhz}{of_max} MHz"
    facts = [_REASONS[reason] for reason in evidence.slowdowns]
    if not facts:
        facts.append(
            "NVML reports no slowdown"
            if sample.reasons is not None
            else "NVML does not report slowdowns"
        )
    if sample.temperature_c is not None:
        facts.append(f"{sample.temperature_c} C")
    if sample.power_w is not None and sample.power_limit_w is not None:
        facts.append(f"{sample.power_w:.0f} of {sample.power_limit_w:.0f} W")
    others = ""
    if evidence.others_mhz is not None:
        others = f"; the GPUs of other ranks run at {evidence.others_mhz} MHz"
    return f"{clock}: {', '.join(facts)}{others}"
