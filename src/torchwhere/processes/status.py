"""Status of a rank's process, seen from outside: does it exist, does it run, what is its stack.

A box records what a rank did, but not that its process is gone. `processes/look.py` creates these
statuses; this file holds them and converts them to JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from torchwhere.core.records import read_record

STOPPED = frozenset("Tt")
_MOST_WORKERS = 64  # of a rank in a file


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A process that a rank has started, for example a DataLoader worker."""

    pid: int
    name: str
    state: str | None = None  # as for a rank
    stack: tuple[str, ...] = ()  # likewise

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process. `alive` is None if it could not be seen: another host, another user."""

    alive: bool | None = None
    # from /proc: R running, S sleeping, D in the kernel, T stopped; the last one if it is gone
    state: str | None = None
    ended: str | None = None  # how it ended, if known
    # `file:line in function`, innermost first, of the thread that trains
    stack: tuple[str, ...] = ()
    alive_ns: int | None = None  # wall clock of the last look that found it alive
    gone_ns: int | None = None  # and of the first look that did not
    stack_ns: int | None = None  # wall clock of the stack
    oom_kills: int | None = None  # in its cgroup, at the last look that found it alive
    holds_gil: bool | None = None  # its main thread, if known
    out_of_memory: str | None = None  # a sentence, if the kernel killed it because memory ran out
    workers: tuple[WorkerStatus, ...] = ()  # when its stack was read
    exit_code: int | None = None  # as Python reports it: -9 for SIGKILL; None if unknown

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it, also if it is gone since."""
        return self.state in STOPPED

    def after(self, before: ProcessStatus) -> ProcessStatus:
        """This status, completed with what only an earlier one knows: when the process was last
        alive, how it ended, its stack."""
        alive = before.alive if self.alive is None else self.alive
        stack = self if self._has_newer_stack(before) else before
        is_first_to_find_it_gone = before.alive is not False  # later kills hit other processes
        return ProcessStatus(
            alive=alive,
            state=self.state if self.alive else before.state,
            ended=self.ended or before.ended,
            stack=stack.stack,
            stack_ns=stack.stack_ns,
            workers=stack.workers,
            alive_ns=self.alive_ns or before.alive_ns,
            gone_ns=None if alive else before.gone_ns or self.gone_ns,
            holds_gil=self.holds_gil if self.holds_gil is not None else before.holds_gil,
            oom_kills=(
                self.oom_kills
                if is_first_to_find_it_gone and self.oom_kills is not None
                else before.oom_kills
            ),
            out_of_memory=(
                self.out_of_memory or before.out_of_memory
                if is_first_to_find_it_gone and self._may_have_more_kills(before)
                else before.out_of_memory
            ),
            exit_code=before.exit_code if self.exit_code is None else self.exit_code,
        )

    def _has_newer_stack(self, before: ProcessStatus) -> bool:
        # the stack of a crash has no time: it is the last one
        is_newer = self.stack_ns is None or self.stack_ns >= (before.stack_ns or 0)
        return bool(self.stack) and (is_newer or not before.stack)

    def _may_have_more_kills(self, before: ProcessStatus) -> bool:
        if self.oom_kills is None or before.oom_kills is None:
            return True
        return self.oom_kills > before.oom_kills

    def shortened(self, *, frames: int, characters: int) -> ProcessStatus:
        """This status with at most so many frames in a stack, and characters in a text."""

        def short(stack: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(line[:characters] for line in stack[:frames])

        workers = tuple(
            replace(worker, name=worker.name[:characters], stack=short(worker.stack))
            for worker in self.workers[:_MOST_WORKERS]
        )
        return replace(self, stack=short(self.stack), workers=workers)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> ProcessStatus:
        """Read the content of a file. Ignores values of the wrong type."""
        return read_record(cls, value) or cls()
