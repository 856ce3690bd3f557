"""The device section of a report: the time of each step on the device of each rank, in parts.

It reads all boxes again, because the wait of one rank depends on the devices of all others. So a
run with more than `MOST_RANKS` ranks has no such section.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchwhere.blackbox.run import RunSummary, read_again
from torchwhere.core.results import Fact, plain_fields
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.clocks.host_clocks import HostClocks
from torchwhere.diagnose.device_time.job import JobDeviceTimes, device_times_of
from torchwhere.diagnose.device_time.steps import MOST_STEPS, PARTS
from torchwhere.diagnose.report.facts import NoDeviceTimes
from torchwhere.diagnose.report.steps import by_step, rounded
from torchwhere.diagnose.report.texts import milliseconds

MOST_RANKS = 256
TIMES = ("device", *PARTS, "waited")


def device_times(
    run: RunSummary[Any], job_calls: JobCalls, clocks: HostClocks
) -> tuple[JobDeviceTimes | None, list[Fact]]:
    """The times of the devices, or why the report does not have them."""
    ranks = [
        rank
        for rank, rank_calls in job_calls.by_rank.items()
        if rank_calls.rank_summary.device is not None and rank in run.boxes
    ]
    if not ranks:
        return None, []
    if len(run.boxes) > MOST_RANKS:
        return None, [NoDeviceTimes(len(run.boxes), MOST_RANKS)]
    return device_times_of(lambda: read_again(run, sorted(ranks)), clocks=clocks), []


def device_json(times: JobDeviceTimes) -> dict[str, Any]:
    """The last steps, and for each part a row for each rank with its time in each step, in ms."""
    ranks = list(times.by_rank)
    steps = np.unique(np.concatenate([own.steps for own in times.by_rank.values()]))[-MOST_STEPS:]
    usual = [times.usual(rank) for rank in ranks]
    return {
        "steps": steps.tolist(),
        "ranks": ranks,
        "ms": {
            part: [
                list(rounded(by_step(steps, own.steps, getattr(own, f"{part}_ns"))))
                for own in times.by_rank.values()
            ]
            for part in TIMES
        },
        "usual": [
            {
                "steps": step.steps,
                **{part: milliseconds(getattr(step, f"{part}_ns")) for part in TIMES},
                **plain_fields(step, "waited_for", "waited_steps", "open_calls"),
            }
            for step in usual
        ],
        "clocks": times.clocks,
    }
