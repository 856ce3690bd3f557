"""The default of every `--stall` and `stall_s`: how long a wait lasts before it is called a hang.

30 s, because the monitor acts on it without being asked: it prints a verdict and, with
`--end-with`, ends the job. In a healthy job ranks often wait 10 to 20 s in a collective while rank
0 saves or evaluates, and in the first step while a graph is compiled. A verdict 20 s later costs
less than a healthy job that was ended. All commands share the value, so that they agree on the same
job.

Two shorter times are not this default and have their own names: `torchwhere top` marks a rank after
`diagnose.live.ranks.NO_PROGRESS_S`, before anything calls it a hang; a job that has ended cannot be
given more time, so there a wait counts from `ENDED_S` on.
"""

from __future__ import annotations

STALL_S = 30.0
ENDED_S = 5.0
