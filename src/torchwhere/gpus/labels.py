"""Short labels for a GPU and for the memory of a rank, as `top` and the report show them."""

from __future__ import annotations

from torchwhere.blackbox.memory import MemorySample
from torchwhere.core.units import memory_amount
from torchwhere.gpus.samples import Gpu


def gpu_label(gpu: Gpu) -> str:
    """`GPU 3: 1755 of 1980 MHz, 54 C, 412 of 700 W, 98% busy, 61.0 GiB of 141 GiB used`."""
    sample = gpu.samples[-1] if gpu.samples else None
    if sample is None:
        return f"GPU {gpu.index}: no sample"
    total = memory_amount(gpu.total_bytes or 0)
    amounts = (
        (sample.sm_mhz, f"{sample.sm_mhz} of {gpu.sm_max_mhz} MHz"),
        (sample.temperature_c, f"{sample.temperature_c} C"),
        (sample.power_w, f"{sample.power_w or 0:.0f} of {sample.power_limit_w or 0:.0f} W"),
        (sample.busy_percent, f"{sample.busy_percent}% busy"),
        (sample.used_bytes, f"{memory_amount(sample.used_bytes or 0)} of {total} used"),
    )
    labels = [label for value, label in amounts if value is not None]
    xids = [f"Xid {xid.number}" for xid in gpu.xids]
    return f"GPU {gpu.index}: {', '.join(labels + xids)}"


def memory_label(sample: MemorySample) -> str:
    """`60.1 GiB allocated, 65.0 GiB reserved, at the end of step 41`."""
    return (
        f"{memory_amount(sample.allocated_bytes)} allocated,"
        f" {memory_amount(sample.reserved_bytes)} reserved, at the end of step {sample.step}"
    )
