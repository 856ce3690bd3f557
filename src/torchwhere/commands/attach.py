"""`torchwhere attach`: why a running job that was not started with torchwhere hangs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchwhere.commands.arguments import (
    add_command,
    add_json,
    add_stall,
    at_least,
    print_message,
    print_verdict,
)
from torchwhere.core.errors import TorchwhereError

if TYPE_CHECKING:
    from torchwhere.pipeline.attach import AttachedJob
    from torchwhere.processes.rank_processes import RankProcess

_NOT_HEALTHY = 1


def add(commands: Any) -> None:
    sub = add_command(
        commands,
        "attach",
        "diagnose a running job that was not started with torchwhere",
        _attach,
        more=(
            "Needs py-spy. The job continues to run. Exit code: 0 no hang seen, 1 any other"
            " verdict, 2 no process to look at."
        ),
    )
    sub.add_argument(
        "pids",
        nargs="*",
        type=at_least(1),
        metavar="PID",
        help="process id of a rank, or of a launcher: then all ranks that it started",
    )
    sub.add_argument(
        "--torchrun", action="store_true", help="look at the ranks of the torchrun on this host"
    )
    sub.add_argument("--all", action="store_true", help="look at all ranks on this host")
    sub.add_argument(
        "--read",
        metavar="FOLDER",
        help="look at no process; diagnose from files that attach wrote, on one or more hosts",
    )
    sub.add_argument(
        "-o", "--out", metavar="FOLDER", help="also write states and stacks to a folder, as JSON"
    )
    add_stall(sub)
    add_json(sub)


def _attach(arguments: argparse.Namespace) -> int:
    from torchwhere.pipeline.attach import diagnose_attached

    _check_choice(arguments)
    if arguments.read is not None:
        job = _read(arguments.read)
    else:
        processes = _processes(arguments)
        folder = _watched_folder(processes)
        if folder is not None:
            return _doctor(arguments, folder)
        job = _look(arguments, processes)
    verdict = diagnose_attached(job)
    print_verdict(arguments, verdict, other_hosts=_other_hosts(arguments, job))
    return 0 if verdict.facts.get("no_hang_seen") else _NOT_HEALTHY


def _check_choice(arguments: argparse.Namespace) -> None:
    choices = (bool(arguments.pids), arguments.torchrun, arguments.all, arguments.read is not None)
    if sum(choices) != 1:
        raise TorchwhereError(
            "give process ids, --torchrun, --all or --read FOLDER, and only one of them"
        )
    if arguments.read is not None and arguments.out is not None:
        raise TorchwhereError("--read writes nothing: leave out --out")


def _processes(arguments: argparse.Namespace) -> list[RankProcess]:
    from torchwhere.processes import rank_processes

    if not Path("/proc/self/stat").exists():
        raise TorchwhereError("attach needs /proc, which only Linux has")
    if arguments.torchrun:
        return rank_processes.ranks_of_torchrun()
    return rank_processes.all_ranks() if arguments.all else rank_processes.ranks_of(arguments.pids)


def _look(arguments: argparse.Namespace, processes: list[RankProcess]) -> AttachedJob:
    from torchwhere.pipeline.attach import AttachedJob, check_readable, with_host_evidence
    from torchwhere.processes.observe import observe
    from torchwhere.render.progress import progress_bar

    out = Path(arguments.out) if arguments.out is not None else None
    if out is not None:
        _make_folder(out)
    with progress_bar(f"looking at {len(processes)} ranks, seconds") as on_progress:
        ranks = observe(processes, stall_s=arguments.stall, on_progress=on_progress)
    check_readable(ranks)
    job = with_host_evidence(AttachedJob({observation.rank: observation for observation in ranks}))
    if out is not None:
        _write(job, out)
    return job


def _make_folder(out: Path) -> None:
    import tempfile

    from torchwhere.core.atomic_file import write_errors

    with write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):  # before the looks, which take half a minute
            pass


def _write(job: AttachedJob, out: Path) -> None:
    from torchwhere.gpus.samples import write_gpus
    from torchwhere.pipeline.attach import copy_dumps
    from torchwhere.processes.observation_files import write_observations

    path = write_observations(out, list(job.ranks.values()))
    copy_dumps(job, out)
    for host in job.gpus:
        write_gpus(out, host)
    print_message(f"wrote {path}")


def _read(folder: str) -> AttachedJob:
    from torchwhere.gpus.samples import read_gpus
    from torchwhere.pipeline.attach import AttachedJob, saved_dumps
    from torchwhere.processes.observation_files import read_observations

    ranks = read_observations(folder)
    return AttachedJob(ranks, read_gpus(Path(folder)), saved_dumps(Path(folder), ranks))


def _other_hosts(arguments: argparse.Namespace, job: AttachedJob) -> list[str]:
    from torchwhere.diagnose.stack_hang import ObservedJob
    from torchwhere.render.other_hosts import other_hosts_lines

    observed = ObservedJob(job.ranks)
    slurm = next((rank.job for rank in job.ranks.values() if rank.job), "")
    out = arguments.read if arguments.read is not None else arguments.out
    return other_hosts_lines(observed.on_other_hosts, job=slurm, out=out)


# -- watched jobs ----------------------------------------------------------------------------------


def _watched_folder(processes: list[RankProcess]) -> Path | None:
    """The folder that the ranks write their boxes to; None if no rank is watched."""
    from torchwhere.processes.rank_processes import box_of

    boxes = (box_of(process.pid) for process in processes)
    return next((box.parent for box in boxes if box is not None and box.is_file()), None)


def _doctor(arguments: argparse.Namespace, folder: Path) -> int:
    from torchwhere.pipeline.verdict import diagnose_folder

    print_message(f"torchwhere watches this job. This is: torchwhere doctor {folder}")
    verdict = diagnose_folder(folder, stall_s=arguments.stall)
    print_verdict(arguments, verdict)
    return 0 if verdict.kind == "healthy" else _NOT_HEALTHY
