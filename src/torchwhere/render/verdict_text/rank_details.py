"""Texts on one rank: how it exited, or what blocks it."""

from __future__ import annotations

import re
import signal

from torchwhere.diagnose.doctor.context import Condition, Context, Detail, StoppedHeartbeat
from torchwhere.diagnose.doctor.rank_exits import ExitReason
from torchwhere.diagnose.doctor.stacks import Activity, Hold

NO_EXIT_RECORD = (
    "left no exit record: killed by a signal (perhaps the OOM killer), os._exit(), or a native"
    " crash"
)
_WATCHDOG = re.compile(
    r"^Aborted in a native thread: \[PG ID [^]]*\] Process group watchdog thread terminated with"
    r" exception: (?:\[Rank \d+\] )?"
)
_CONDITIONS = {
    Condition.OUTLIVED_WATCH: (
        "its watch has ended, but its process still runs: what it does now is not recorded"
    ),
    Condition.STOPPED_BY_SIGNAL: (
        "stopped by a signal (SIGSTOP or a debugger): continue it with kill -CONT"
    ),
}
_ACTIVITIES = {
    Activity.HOLDING_GIL: (
        "blocked in native code that holds the GIL: none of its Python threads can run"
    ),
    Activity.DATA_LOADING: "in data loading",
    Activity.IMPORT: "importing a module",
    Activity.COMPILATION: "in compilation",
    Activity.BUILD: "building a C++ extension",
    Activity.BUILD_LOCK: (
        "waiting for another process to build a C++ extension, or for a stale `lock` file that a"
        " killed process left beside it"
    ),
    Activity.FILE_LOCK: "waiting for a file lock",
    Activity.PROCESS: "waiting for another process",
    Activity.POOL: "waiting for a thread or process pool",
    Activity.SUBPROCESS: "waiting for a subprocess",
    Activity.QUEUE: "waiting for a queue",
    Activity.THREAD: "waiting for a lock or a thread",
    Activity.SOCKET: "waiting for a socket",
    Activity.GROUP_CREATION: "in {function}, which needs all ranks of the group",
    Activity.GROUP_END: "in {function}, which waits for pending collectives of this rank",
    Activity.COLLECTIVE: "waiting in {function}",
    Activity.DISTRIBUTED: "in torch.distributed, outside any recorded collective",
    Activity.RUNNING: (
        "running: an endless loop, a long computation, or native code that holds the GIL"
    ),
    Activity.SLEEPING: "sleeping: in a blocking call, or waiting for a lock",
}


def detail_text(detail: Detail) -> str:
    """How a rank exited, or what blocks it."""
    if isinstance(detail, Condition):
        return _CONDITIONS[detail]
    if isinstance(detail, ExitReason):
        return exit_text(detail)
    if isinstance(detail, StoppedHeartbeat):
        return (
            f"its heartbeat stopped {detail.earlier_s:.0f} s before the others': in native code"
            " that holds the GIL, stopped by a signal, or gone"
        )
    return hold_text(detail)


def hold_text(hold: Hold) -> str:
    """What blocks a rank."""
    return _ACTIVITIES[hold.activity].format(function=hold.function)


def exit_text(reason: ExitReason) -> str:
    """How a rank exited."""
    if reason.recorded is not None:
        recorded = _WATCHDOG.sub("aborted by the watchdog of NCCL: ", reason.recorded)
        return f"out of memory: {recorded}" if reason.is_out_of_memory else recorded
    code = reason.exit_code
    if code is None:
        return NO_EXIT_RECORD
    if code >= 0:
        return f"exit code {code} without an exit record: os._exit(), or an exit in native code"
    names = {int(number): number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


def rank_detail_text(context: Context, rank: int) -> str:
    """How a rank exited, or what blocks it; else its state."""
    detail = context.detail(rank)
    return detail_text(detail) if detail is not None else str(context.state(rank))
