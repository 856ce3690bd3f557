"""The default of every `--stall` and `stall_s`: how long a wait lasts before it is called a hang.

30 s, because the monitor acts on it without being asked: it prints a verdict and, with
`--end-with`, ends the job. In a healthy job ranks often wait 10 to 20 s in a collective while rank
0 saves or evaluates, and in the first step while a graph is compiled. A verdict 20 s later costs
less than a healthy job that was ended. All commands share the value, so that they agree on the same
job.

Two shorter times are not this default and have their own names. After `no_progress_s`, all commands
say that a job makes no progress, before any of them calls it a hang. A job that has ended cannot be
given more time, so there a wait counts from `ENDED_S` on.
"""

from __future__ import annotations

STALL_S = 30.0
ENDED_S = 5.0
NO_PROGRESS_S = 1.5  # so that a stop is shown within two seconds
_START_S = 30.0  # before the first module, collective or step, and during compilation
_STEPS = 5  # a rank may be still for as long as so many of its steps take


def no_progress_s(
    step_s: float | None,
    *,
    is_waiting: bool,
    is_starting: bool = False,
    least_s: float = NO_PROGRESS_S,
) -> float:
    """The time after which a view says that a rank makes no progress.

    Args:
        step_s: The usual duration of a step; None if it is not known.
        is_waiting: Whether the rank waits for others in a collective.
        is_starting: Whether the rank has not begun to train, or compiles a graph.
        least_s: The shortest time.

    Example:
        no_progress_s(2.0, is_waiting=False)  # 10.0
    """
    if is_starting:
        return max(least_s, _START_S)
    if step_s is None:  # a first step is slow, but waiting for ranks behind is a reason
        return least_s if is_waiting else max(least_s, _START_S / 3)
    return max(least_s, _STEPS * step_s)
