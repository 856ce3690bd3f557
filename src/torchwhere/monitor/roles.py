"""Chooses the role of a monitor from the launcher's environment: torchrun, srun or mpirun."""

from __future__ import annotations

from pathlib import Path

from torchwhere.monitor.discovery import Rendezvous
from torchwhere.monitor.follower import Follower
from torchwhere.monitor.lead import Lead
from torchwhere.monitor.single import SingleHost
from torchwhere.processes.launcher import launch


def role_from_launcher(folder: Path, *, stall_s: float) -> SingleHost:
    """The role of a monitor that was started in the environment of a launcher."""
    launched = launch()
    if not launched.has_other_hosts:
        return SingleHost()
    rendezvous = Rendezvous.from_environment()
    if launched.is_on_first_host:
        return Lead(folder, stall_s=stall_s, rendezvous=rendezvous)
    return Follower(folder, rendezvous=rendezvous)
