"""Looks at ranks several times: their states, whether their threads ran, and their stacks.

Takes processes from `rank_processes.py`. The looks themselves pause nothing (py-spy without
native frames, /proc). They end early if the stack of every rank changes from look to look, so that
a job that progresses is looked at for 2 s. Otherwise the native frames of ranks with unchanged
stacks are read once at the end, which pauses a process for as long as py-spy reads it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torchwhere.core.worker_pool import Progress
from torchwhere.processes import proc_files, py_spy
from torchwhere.processes.dump_paths import dump_paths
from torchwhere.processes.fault_handler import without_own_frames
from torchwhere.processes.observation import HelperObservation, RankObservation, ThreadStack
from torchwhere.processes.proc_files import ThreadClock
from torchwhere.processes.py_spy import Refusal, SpiedThread
from torchwhere.processes.rank_processes import HelperProcess, RankProcess

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 8.0
_LEAST_LOOKS = 3
_MOST_HELPERS = 16  # of a rank


class Look(NamedTuple):
    """All ranks at one moment, by process id."""

    at: float  # monotonic seconds
    threads: Mapping[int, list[SpiedThread] | Refusal]
    clocks: Mapping[int, Mapping[int, ThreadClock]]  # by process and thread


def observe(
    processes: Sequence[RankProcess],
    *,
    stall_s: float,
    on_progress: Progress | None = None,
) -> list[RankObservation]:
    """Look at ranks for `stall_s` seconds, or less if all of them move.

    Args:
        processes: The ranks.
        stall_s: The longest time.
        on_progress: Called with the seconds so far, and with `stall_s`.
    """
    looks = [_look(processes)]
    if not _has_stacks(looks[0]):  # waiting does not help
        return [_observation(process, looks) for process in processes]
    pause_s, moves = _FIRST_PAUSE_S, False
    while not moves and (left_s := looks[0].at + stall_s - time.monotonic()) > 0:
        if not any(map(_is_alive, processes)):  # the job is over
            break
        time.sleep(min(pause_s, left_s))
        looks.append(_look(processes))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        moves = len(looks) >= _LEAST_LOOKS and _have_all_moved(processes, *looks[-2:])
        if on_progress is not None:
            on_progress(round(min(stall_s, looks[-1].at - looks[0].at)), round(stall_s))
    observations = [_observation(process, looks) for process in processes]
    return observations if moves else _with_native(observations)


# -- looks -----------------------------------------------------------------------------------------


def _look(processes: Sequence[RankProcess]) -> Look:
    pids = [process.pid for process in processes if _is_alive(process)]
    clocks = {
        pid: {
            thread_id: clock
            for thread_id in proc_files.thread_ids(pid)
            if (clock := proc_files.thread_clock(pid, thread_id)) is not None
        }
        for pid in pids
    }
    return Look(time.monotonic(), py_spy.read_threads(pids), clocks)


def _has_stacks(look: Look) -> bool:
    return any(isinstance(threads, list) for threads in look.threads.values())


def _is_alive(process: RankProcess) -> bool:
    return proc_files.running(process.pid, started=process.started) is not None


def _have_all_moved(processes: Sequence[RankProcess], before: Look, after: Look) -> bool:
    """Whether the stack of every main thread has changed between two looks."""
    return all(
        _main_frames(before, process.pid) is not None
        and _main_frames(after, process.pid) is not None
        and _main_frames(before, process.pid) != _main_frames(after, process.pid)
        for process in processes
    )


def _main_frames(look: Look, pid: int) -> list[py_spy.PythonFrame] | None:
    main = py_spy.main_thread(look.threads.get(pid), pid)
    return main.frames if main is not None else None


# -- one rank --------------------------------------------------------------------------------------


def _observation(process: RankProcess, looks: Sequence[Look]) -> RankObservation:
    pid, launched, last = process.pid, process.launched, looks[-1]
    stat = proc_files.process_stat(pid)
    is_alive = stat is not None and _is_alive(process)
    threads = last.threads.get(pid, Refusal.UNSUPPORTED)
    stacks = _stacks(pid, looks)
    variables = proc_files.environment(pid)
    folder = proc_files.current_folder(pid)
    return RankObservation(
        rank=process.rank,
        pid=pid,
        host=socket.gethostname(),
        seen_ns=time.time_ns(),
        seconds=last.at - looks[0].at,
        state=stat.state if stat is not None and is_alive else None,
        waits_in=proc_files.waits_in(pid),
        is_assumed=process.is_assumed,
        world_size=launched.world_size,
        local_world_size=launched.local_world_size,
        job=variables.get("SLURM_JOB_ID", ""),
        folder=folder,
        started_ns=proc_files.started_ns(stat) if stat is not None else 0,
        flight_recorder=dump_paths(variables, folder),
        main=stacks.get(pid),
        others=tuple(stack for thread_id, stack in stacks.items() if thread_id != pid),
        problem=str(threads) if isinstance(threads, Refusal) and is_alive else None,
        helpers=_helpers(process.helpers[:_MOST_HELPERS]),
    )


def _stacks(pid: int, looks: Sequence[Look]) -> dict[int, ThreadStack]:
    """The threads of a process at the last look, by thread id; the main thread has the id of the
    process."""
    last = looks[-1].threads.get(pid)
    if not isinstance(last, list):
        return {}
    main = py_spy.main_thread(last, pid)
    return {
        pid if thread is main else thread.thread_id: _stack(pid, thread, looks) for thread in last
    }


def _stack(pid: int, thread: SpiedThread, looks: Sequence[Look]) -> ThreadStack:
    thread_id = thread.thread_id or pid
    first, last = (look.clocks.get(pid, {}).get(thread_id) for look in (looks[0], looks[-1]))
    run_ns = last.run_ns - first.run_ns if first is not None and last is not None else 0
    earlier = [_frames_of(look.threads.get(pid), thread) for look in looks[:-1]]
    return ThreadStack(
        name=thread.name,
        stack=without_own_frames(list(thread.frames)),
        holds_gil=thread.holds_gil,
        has_run=first is None or first != last,
        run_s=run_ns / 1e9,
        is_same=all(frames == thread.frames for frames in earlier),
    )


def _frames_of(
    threads: list[SpiedThread] | Refusal | None, thread: SpiedThread
) -> list[py_spy.PythonFrame] | None:
    """The frames of the same thread at an earlier look."""
    for other in threads if isinstance(threads, list) else ():
        if other.thread_id == thread.thread_id and other.name == thread.name:
            return other.frames
    return None


def _helpers(processes: Sequence[HelperProcess]) -> tuple[HelperObservation, ...]:
    mains = py_spy.main_threads(process.pid for process in processes)
    stats = {process.pid: proc_files.process_stat(process.pid) for process in processes}
    return tuple(
        HelperObservation(
            pid=process.pid,
            kind=str(process.kind),
            state=stat.state if (stat := stats[process.pid]) is not None else None,
            stack=without_own_frames(mains[process.pid].frames) if process.pid in mains else (),
        )
        for process in processes
    )


# -- native frames ---------------------------------------------------------------------------------


def _with_native(observations: Sequence[RankObservation]) -> list[RankObservation]:
    """Add native frames of ranks that may wait: they show a wait in C++ below the last Python
    frame."""
    waiting = [
        observation.pid
        for observation in observations
        if observation.main is not None
        and (observation.main.is_same or not observation.main.has_run)
        and not observation.status.is_stopped
    ]
    native = py_spy.read_threads(waiting, native=True)
    return [_added(observation, native.get(observation.pid)) for observation in observations]


def _added(
    observation: RankObservation, threads: list[SpiedThread] | Refusal | None
) -> RankObservation:
    if threads is None or observation.main is None:
        return observation
    main = py_spy.main_thread(threads, observation.pid)
    if main is None:
        return replace(
            observation, native_problem=str(threads) if isinstance(threads, Refusal) else None
        )
    if without_own_frames(list(main.frames)) != observation.main.stack:  # it moves
        return replace(observation, main=replace(observation.main, is_same=False, has_run=True))
    return replace(observation, main=replace(observation.main, native=main.native, has_native=True))
