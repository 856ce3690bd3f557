"""The time of the devices of all ranks of a run, step by step.

Each box is read twice: for the arrivals of its device at collectives, and for its own times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.core.results import plain
from torchwhere.diagnose.clocks.call_arrivals import JobArrivals
from torchwhere.diagnose.clocks.host_clocks import HostClocks
from torchwhere.diagnose.device_time.calls import NO_RANK, device_arrivals, device_calls
from torchwhere.diagnose.device_time.steps import PARTS, DeviceSteps, device_steps


@dataclass(frozen=True, slots=True)
class UsualStep:
    """The usual step of one rank on its device: medians over its steps.

    Attributes:
        steps: How many steps there are.
        device_ns: The time of a step. The other times are parts of it: see `DeviceSteps`.
            Medians of the parts need not add up.
        waited_for: The rank that it waited for in most steps; None without a wait.
        waited_steps: In how many steps.
        open_calls: How many collectives have no recorded end, in all steps.
    """

    steps: int
    device_ns: int
    compute_ns: int
    hidden_ns: int
    unclear_ns: int
    exposed_ns: int
    waited_ns: int
    waited_for: int | None
    waited_steps: int
    open_calls: int


@dataclass(frozen=True, slots=True)
class JobDeviceTimes:
    """The time of the devices of some ranks.

    Attributes:
        by_rank: The steps of each rank that has any.
        clocks: The clocks by which devices are compared, in words.

    Example:
        device = torchwhere.phases("run/").device
        print(device.usual(0).waited_for)
    """

    by_rank: dict[int, DeviceSteps]
    clocks: str

    def usual(self, rank: int) -> UsualStep:
        """The usual step of a rank."""
        own = self.by_rank[rank]
        names = [f"{part}_ns" for part in ("device", *PARTS, "waited")]
        counts = Counter(last for last in own.waited_for.tolist() if last != NO_RANK)
        (last, times), *_ = counts.most_common(1) or [(None, 0)]
        return UsualStep(
            steps=len(own),
            **{name: int(np.median(getattr(own, name))) for name in names},
            waited_for=last,
            waited_steps=times,
            open_calls=int(own.open_calls.sum()),
        )

    def to_dict(self) -> dict[str, Any]:
        return {"clocks": self.clocks, "ranks": plain(self.by_rank)}


def device_times_of(
    read: Callable[[], Iterable[Box]], *, clocks: HostClocks, ranks: set[int] | None = None
) -> JobDeviceTimes | None:
    """The time of the devices of a run, on all ranks or on `ranks`; None if no box has it.

    `read` gives the boxes of all ranks, in order. It is called twice.
    """
    job_arrivals, with_device = JobArrivals(clocks), set()
    for box in read():
        arrivals = device_arrivals(box)
        if arrivals is not None:
            job_arrivals.add(arrivals)
            with_device.add(box.rank)
    chosen = with_device if ranks is None else with_device & ranks
    by_rank = {}
    for box in read() if chosen else ():
        arrivals = device_arrivals(box) if box.rank in chosen else None
        if arrivals is None:
            continue
        calls = device_calls(box, arrivals, clocks=clocks, job_arrivals=job_arrivals)
        steps = device_steps(box, calls, clocks=clocks)
        if steps is not None:
            by_rank[box.rank] = steps
    return JobDeviceTimes(by_rank, clocks.description(with_device)) if by_rank else None
