"""The default of every `--stall` and `stall_s`: how long a wait lasts before it is called a hang.

30 s, because the monitor acts on it without being asked: it prints a verdict and, with
`--end-with`, ends the job. In a healthy job ranks often wait 10 to 20 s in a collective while rank
0 saves or evaluates, and in the first step while a graph is compiled. A verdict 20 s later costs
less than a healthy job that was ended. All commands share the value, so that they agree on the same
job.

A monitor with `--end-with` has a higher default, `END_STALL_S`. A wrong verdict that is only
printed costs little; one that ends the job costs the work since the last checkpoint.

A wait may last longer than `--stall` in two cases (`wait_limit_s`):

- The awaited ranks do work that takes long in a healthy job too: they save, load, compile, evaluate
  or start. Such a wait is a pause, up to `PAUSE_STALLS` times `--stall`. With `END_STALL_S` that is
  600 s, after which NCCL's own default timeout would end the job.
- Ranks have waited as long at the same call site before: up to `AGAIN` times the longest of these
  waits, and at most `MOST_LONGER_S` longer than it.

So the doctor also reports a rank that hangs inside a pause, but later than other hangs.

Two shorter times are not this default and have their own names. After `no_progress_s`, all commands
say that a job makes no progress, before any of them calls it a hang. A job that has ended cannot be
given more time, so there a wait counts from `ENDED_S` on.
"""

from __future__ import annotations

BEAT_S = 1.0  # between the heartbeats of a rank
STALL_S = 30.0
END_STALL_S = 120.0
PAUSE_STALLS = 5  # saving and compiling take minutes in large jobs
AGAIN = 2  # shared file systems are often twice as slow as usual
MOST_LONGER_S = 600.0
ENDED_S = 5.0
ENDED_AGAIN = 1.5  # in a job that has ended: times the longest earlier wait at the same call site
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


def wait_limit_s(stall_s: float, *, earlier_s: float, is_pause: bool) -> float:
    """The time after which a wait in a running job is called a hang.

    Args:
        stall_s: The value of `--stall`.
        earlier_s: The longest earlier wait at the same call site; 0 if there was none.
        is_pause: Whether the awaited ranks do work that takes long in a healthy job too.

    Example:
        wait_limit_s(30.0, earlier_s=100.0, is_pause=True)  # 200.0
    """
    again_s = min(AGAIN * earlier_s, earlier_s + MOST_LONGER_S)
    return max(PAUSE_STALLS * stall_s if is_pause else stall_s, again_s)
