"""Finds the ranks of a job that runs on this host, and the helper processes of each rank.

Takes process ids, or searches all processes. Reads only /proc: the environment that a process
started with (rank, world size), its threads (a process group has threads with fixed names), its
parents. A process that gets its rank as an argument (`mp.spawn`) has no rank variables: its rank is
assumed from the order in which the processes started.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchwhere.core.errors import TorchwhereError
from torchwhere.core.grouping import grouped
from torchwhere.processes import proc_files
from torchwhere.processes.launcher import Launch, launch
from torchwhere.processes.workers import HelperKind, children_of, descendants, kind_of

_GROUP_THREADS = ("pt_gloo_", "pt_nccl_", "pt_ucc_", "pt_mpi_")
_TORCHRUN = re.compile(
    r"(^|/)torchrun$|^torch\.distributed\.(run|launch)$|/distributed/(run|launch)\.py$"
)
# These start ranks, and may have rank variables of their own, as torchrun under srun.
_LAUNCHER = re.compile(
    _TORCHRUN.pattern + r"|(^|/)(accelerate|deepspeed|mpirun|mpiexec|srun)$"
    r"|^(deepspeed\.launcher|accelerate\.commands)\."
)
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")  # options of Python that have a value
_SLURM_JOB = "SLURM_JOB_ID"
# Variables that are equal in all ranks of a job; the first that is set tells jobs apart.
_JOBS = (("MASTER_ADDR", "MASTER_PORT"), (_SLURM_JOB, "SLURM_STEP_ID"), ("PMIX_NAMESPACE",))
_MOST_LISTED = 16  # jobs in a message
_OWN_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True, slots=True)
class HelperProcess:
    """A Python process that a rank has started."""

    pid: int
    kind: HelperKind


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One rank of a job on this host."""

    pid: int
    rank: int
    launched: Launch
    started: int  # ticks since boot
    helpers: tuple[HelperProcess, ...] = ()

    @property
    def is_assumed(self) -> bool:
        """Whether the rank is not in its environment."""
        return self.launched.rank is None


def ranks_of(pids: Sequence[int]) -> list[RankProcess]:
    """The ranks with these process ids; of a launcher, the ranks that it started.

    Raises:
        TorchwhereError: A process does not exist, or is neither a rank nor the launcher of one.

    Example:
        ranks_of([4711, 4712])
    """
    host = _Host()
    chosen: dict[int, None] = {}
    for pid in pids:
        chosen |= dict.fromkeys(host.ranks_at(pid))
    return _numbered(host, list(chosen))


def ranks_of_torchrun() -> list[RankProcess]:
    """The ranks that the only torchrun of this host started.

    Raises:
        TorchwhereError: There is no torchrun, or there are several.
    """
    host = _Host()
    agents = [pid for pid in host.stats if host.is_like(pid, _TORCHRUN)]
    agents = [pid for pid in agents if host.ranks_below(pid)]
    if not agents:
        raise TorchwhereError(
            "no torchrun with ranks runs on this host as this user. Give the process ids of the"
            " ranks, or --all"
        )
    if len(agents) > 1:
        listed = " or ".join(f"torchwhere attach {pid}" for pid in agents[:_MOST_LISTED])
        raise TorchwhereError(f"this host runs {len(agents)} torchruns. Choose one: {listed}")
    return _numbered(host, host.ranks_below(agents[0]))


def all_ranks() -> list[RankProcess]:
    """The ranks of the only job of this host: Python processes with torch that have rank variables
    or a process group. In a job of Slurm (`srun --overlap --jobid`), the ranks of that job.

    Raises:
        TorchwhereError: There is no rank, or there are ranks of several jobs.
    """
    host = _Host()
    own = os.environ.get(_SLURM_JOB)
    jobs = (host.jobs(slurm_job=own) if own else []) or host.jobs()
    if not jobs:
        raise TorchwhereError(
            "no rank runs on this host as this user: no Python process with torch has rank"
            " variables or a process group. Give process ids, or run as the user of the job or as"
            " root"
        )
    if len(jobs) > 1:
        listed = " or ".join(
            f"torchwhere attach {' '.join(map(str, pids))}" for pids in jobs[:_MOST_LISTED]
        )
        raise TorchwhereError(f"this host runs {len(jobs)} jobs. Choose one: {listed}")
    return _numbered(host, jobs[0])


def jobs_of_host() -> list[list[int]]:
    """The process ids of the ranks of each job on this host."""
    return _Host().jobs()


def box_of(pid: int) -> Path | None:
    """The box that a watched rank writes; None if it is not watched."""
    boxes = (path for path in proc_files.mapped_files(pid) if path.endswith(".box"))
    return next(map(Path, boxes), None)


class _Host:
    """The processes of this host at one moment."""

    def __init__(self) -> None:
        self.stats = proc_files.all_processes()
        self.stats.pop(os.getpid(), None)
        self._children = children_of(self.stats)
        self._environments: dict[int, dict[str, str]] = {}

    def environment(self, pid: int) -> Mapping[str, str]:
        if pid not in self._environments:
            self._environments[pid] = proc_files.environment(pid)
        return self._environments[pid]

    def descendants(self, pid: int) -> Iterator[int]:
        return descendants(pid, self._children)

    # -- one process -------------------------------------------------------------------------------

    def is_python(self, pid: int) -> bool:
        program = os.path.basename(proc_files.executable(pid))
        if program.startswith(("python", "pypy")):
            return True
        return any("/libpython" in path for path in proc_files.mapped_files(pid))

    def is_like(self, pid: int, pattern: re.Pattern[str]) -> bool:
        """Whether the program, script or module that a process runs matches."""
        return pattern.search(_program(proc_files.command_line(pid))) is not None

    def has_group(self, pid: int) -> bool:
        """Whether a process has a process group, by the names of its threads."""
        return any(name.startswith(_GROUP_THREADS) for name in proc_files.thread_names(pid))

    def has_torch(self, pid: int) -> bool:
        return any("/libtorch" in path for path in proc_files.mapped_files(pid))

    def is_rank(self, pid: int) -> bool:
        """Whether a process has rank variables or a process group, and is not a launcher."""
        has_rank = launch(self.environment(pid)).rank is not None or self.has_group(pid)
        if not has_rank or not self.is_python(pid) or self.is_like(pid, _LAUNCHER):
            return False
        return kind_of(pid) is HelperKind.SUBPROCESS  # a worker may have outlived its rank

    def job_of(self, pid: int) -> Hashable:
        """What tells the job of a rank from other jobs."""
        variables = self.environment(pid)
        for names in _JOBS:
            if all(name in variables for name in names):
                return tuple(variables[name] for name in names)
        return self.stats[pid].parent

    # -- ranks -------------------------------------------------------------------------------------

    def outermost(self, pids: Iterable[int]) -> list[int]:
        """These processes without helpers, which inherit the rank variables of their rank.

        A rank may also start other ranks, as Lightning does: those have process groups.
        """
        ranks = sorted(pids)
        started = {child for pid in ranks for child in self.descendants(pid)}
        return [pid for pid in ranks if pid not in started or self.has_group(pid)]

    def jobs(self, *, slurm_job: str | None = None) -> list[list[int]]:
        """The ranks of this host by job: processes with torch, with rank variables or a group; of
        all jobs, or those that a job of Slurm started."""
        ranks = self.outermost(
            pid
            for pid in self.stats
            if slurm_job in (None, self.environment(pid).get(_SLURM_JOB))
            and self.is_rank(pid)
            and self.has_torch(pid)
        )
        return list(grouped((self.job_of(pid), pid) for pid in ranks).values())

    def ranks_below(self, pid: int) -> list[int]:
        return self.outermost(child for child in self.descendants(pid) if self.is_rank(child))

    def ranks_at(self, pid: int) -> list[int]:
        """A process, if it is a rank; else the ranks that it started."""
        if pid not in self.stats:
            raise TorchwhereError(
                f"there is no process {pid} on this host. List them with: ps -ef | grep python"
            )
        below = self.ranks_below(pid)
        if self.is_rank(pid):
            return self.outermost([pid, *below])
        if below:
            return below
        self._check_single(pid)
        return [pid]

    def _check_single(self, pid: int) -> None:
        """Raise `TorchwhereError` if a process without rank variables cannot be a rank."""
        if not proc_files.executable(pid):
            raise TorchwhereError(
                f"process {pid} ({proc_files.name_of(pid)}) belongs to another user. Run torchwhere"
                " as that user or as root"
            )
        if not self.is_python(pid):
            raise TorchwhereError(
                f"process {pid} ({proc_files.name_of(pid)}) is not a Python process, and it has not"
                " started a rank. Give the process ids of the ranks, or --all"
            )
        if self.is_like(pid, _LAUNCHER):
            raise TorchwhereError(
                f"process {pid} ({proc_files.name_of(pid)}) is a launcher without ranks: they have"
                " exited, or it has not started them yet. See where it waits with: py-spy dump"
                f" --pid {pid}"
            )

    def helpers_of(self, pid: int, *, ranks: Sequence[int]) -> tuple[HelperProcess, ...]:
        return tuple(
            HelperProcess(helper, kind_of(helper))
            for helper in self.descendants(pid)
            if helper not in ranks and self.is_python(helper) and not self._is_own_helper(helper)
        )

    def _is_own_helper(self, pid: int) -> bool:
        """Whether a process belongs to Python's multiprocessing itself."""
        text = " ".join(proc_files.command_line(pid))
        return any(name in text for name in _OWN_HELPERS)


def _program(arguments: Sequence[str]) -> str:
    """What a command line runs: the script or module of Python, else the program."""
    if not arguments or not os.path.basename(arguments[0]).startswith("python"):
        return arguments[0] if arguments else ""
    options = iter(arguments[1:])
    for option in options:
        if option == "-m":
            return next(options, "")
        if not option.startswith("-"):
            return option
        if option == "-c":
            return ""
        if option in _WITH_VALUE:
            next(options, None)
    return ""


def _numbered(host: _Host, pids: Sequence[int]) -> list[RankProcess]:
    """The ranks in order."""
    launched = {pid: launch(host.environment(pid)) for pid in pids}
    return [
        RankProcess(
            pid, rank, launched[pid], host.stats[pid].started, host.helpers_of(pid, ranks=pids)
        )
        for rank, pid in sorted(_by_rank(host, launched).items())
    ]


def _by_rank(host: _Host, launched: Mapping[int, Launch]) -> dict[int, int]:
    """The process id of each rank. Assumes the ranks of processes without rank variables."""
    if all(process.rank is None for process in launched.values()):
        in_order = sorted(launched, key=lambda pid: (host.stats[pid].started, pid))
        return dict(enumerate(in_order))
    by_rank: dict[int, int] = {}
    for pid, process in launched.items():
        if process.rank is None:
            raise TorchwhereError(
                f"process {pid} has no rank variables, but others have. Give only ranks"
            )
        other = by_rank.setdefault(process.rank, pid)
        if other != pid:
            raise TorchwhereError(
                f"processes {other} and {pid} both have rank {process.rank}. Give the process ids"
                " of one job"
            )
    return by_rank
