"""Begins the watch of a rank: the variables of NCCL, the session, and one monitor for each host.

`torchwhere run` calls it before the script, and the start-up hook when a process becomes a rank.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import zlib
from collections.abc import Sequence

from torchwhere.commands.arguments import print_message
from torchwhere.commands.watch_options import WatchOptions

# The process that has started the monitor, for the processes that it starts.
_MONITOR_OF = "TORCHWHERE_MONITOR_OF"


def begin_watch(out: str, options: WatchOptions) -> None:
    """Watch this process into the folder `out`. The first rank of a host starts the monitor."""
    from torchwhere.api.watch import current, start

    if options.sets_variables:
        set_nccl_variables(out)
    start(out=out, module_events=options.module_events, records=options.records)
    # Without a box there is nothing to monitor; `start` has logged why.
    session = current()
    if options.monitor is not None and session is not None and session.is_recorded:
        _start_monitor(out, options.monitor)


def set_nccl_variables(out: str) -> None:
    """Set the variables of NCCL that make a failure readable. Rank 0 prints which, and whether
    dumps may be lost."""
    from torchwhere.processes.launcher import launch
    from torchwhere.recorder import nccl_variables

    variables = nccl_variables.set_nccl_variables(out)
    if launch().rank:
        return
    if variables:
        values = " ".join(f"{name}={value}" for name, value in variables.items())
        print_message(
            f"set {values}, so that a job that fails leaves flight recorder dumps in the folder of"
            " the run; --no-env sets none"
        )
    if nccl_variables.may_lose_dumps():
        print_message(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING is 1 (torchrun sets it): NCCL may abort a rank before"
            " it has written its flight recorder dump. To get all dumps, set it to 3 before the job"
        )


def _start_monitor(out: str, options: Sequence[str]) -> None:
    """Start the monitor in its own session: it survives when this process is killed.

    It exits when all ranks of this host have exited. It watches the processes that this one starts,
    so these start none.
    """
    from torchwhere.hooks.error_limiter import log
    from torchwhere.processes.launcher import launch

    if not launch().is_first_of_host or _MONITOR_OF in os.environ:
        return
    name = _name_of_monitor(out)
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(name)
        except OSError:  # another rank of this host was first
            return
        command = [sys.executable, "-m", "torchwhere", "monitor", out]
        try:
            process = subprocess.Popen(
                [*command, "--launcher", str(os.getpid()), *options],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
                pass_fds=[claim.fileno()],  # the name is free again when the monitor exits
            )
        except OSError as error:
            log.warning("torchwhere: cannot start the monitor: %s", error.strerror or error)
            return
    process.returncode = 0  # this process never waits for it
    os.environ[_MONITOR_OF] = str(os.getpid())


def _name_of_monitor(out: str) -> str:
    """The name of a socket without a file that ranks of one host and one job share.

    Their launcher has started all of them. Under torchrun each attempt has its own monitor, which
    its local rank 0 starts: the name has its process id, because not all agents of torchrun count a
    restart.
    """
    from torchwhere.processes.launcher import pid_namespace

    attempt = os.getpid() if "TORCHELASTIC_RESTART_COUNT" in os.environ else 0
    folder = zlib.crc32(os.path.abspath(out).encode(errors="surrogateescape"))
    job = f"{pid_namespace()}/{os.getuid()}/{os.getppid()}/{attempt}/{folder}"
    return f"\0torchwhere/{job}"[:100]
