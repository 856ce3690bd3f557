"""Which role a monitor has, by what the launcher of the job says: torchrun, srun, mpirun."""

from __future__ import annotations

from pathlib import Path

from torchwhere.monitor.discovery import Rendezvous
from torchwhere.monitor.follower import Follower
from torchwhere.monitor.lead import Lead
from torchwhere.monitor.roles import SingleHost
from torchwhere.processes.launcher import launch


def role(folder: Path, *, stall_s: float) -> SingleHost:
    """What a launcher's environment makes of the monitor that was started in it."""
    launched = launch()
    if not launched.has_other_hosts:
        return SingleHost()
    rendezvous = Rendezvous.from_environment()
    if launched.is_on_first_host:
        return Lead(folder, stall_s=stall_s, rendezvous=rendezvous)
    return Follower(folder, rendezvous=rendezvous)
