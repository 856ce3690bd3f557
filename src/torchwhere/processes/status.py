"""What was seen of a rank's process from outside: is it there, does it run, where is its Python
stack.

Boxes say what a rank did; they cannot say that it is gone. Whoever looked at the processes, just
now or while the job ran, says so here. `processes/look.py` looks; this file only holds what was
found, and knows how to keep it in a file.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

STOPPED = frozenset("Tt")


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process. `alive` is None where nobody could look: another host, another user."""

    alive: bool | None = None
    # as /proc says: R running, S sleeping, D in the kernel, T stopped; of one that is gone, the
    # last
    state: str | None = None
    ended: str | None = None  # how it ended, where that is known
    stack: tuple[str, ...] = ()  # `file:line in function`, innermost first, of the main thread
    alive_ns: int | None = None  # wall clock of the last look that found it alive
    gone_ns: int | None = None  # and of the first one that did not
    stack_ns: int | None = None  # when it was asked for its stack
    oom_kills: int | None = None  # in its cgroup so far, when it was last seen alive
    holds_gil: bool | None = None  # its main thread, where that is known
    # that it was killed for want of memory, in words, where that is known
    out_of_memory: str | None = None
    exit_code: int | None = None  # as Python says it: -9 for SIGKILL; None where nobody saw it

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal, or was until it was gone."""
        return self.state in STOPPED

    def after(self, before: ProcessStatus) -> ProcessStatus:
        """This look, with what an earlier one knew and this one cannot: when it was last alive, how
        it ended, its stack."""
        alive = before.alive if self.alive is None else self.alive
        # it was found gone by then: what was killed since is another one
        is_settled = before.alive is False
        is_more = (
            self.oom_kills is not None
            and before.oom_kills is not None
            and self.oom_kills > before.oom_kills
        )
        # a crash has no moment, and is the last
        is_newer = self.stack_ns is None or self.stack_ns >= (before.stack_ns or 0)
        stack = self if self.stack and (is_newer or not before.stack) else before
        grew = self.oom_kills is None or before.oom_kills is None or is_more
        return ProcessStatus(
            alive=alive,
            state=self.state if self.alive else before.state,
            ended=self.ended or before.ended,
            stack=stack.stack,
            stack_ns=stack.stack_ns,
            alive_ns=self.alive_ns or before.alive_ns,
            gone_ns=None if alive else before.gone_ns or self.gone_ns,
            holds_gil=self.holds_gil if self.holds_gil is not None else before.holds_gil,
            oom_kills=before.oom_kills if is_settled or self.oom_kills is None else self.oom_kills,
            out_of_memory=before.out_of_memory
            if is_settled or not grew
            else self.out_of_memory or before.out_of_memory,
            exit_code=before.exit_code if self.exit_code is None else self.exit_code,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> ProcessStatus:
        """Of whatever a file holds: what has not the right form is left out."""
        alive, state, ended, stack = (
            value.get(name) for name in ("alive", "state", "ended", "stack")
        )
        oom_kills, out_of_memory, exit_code = (
            value.get(name) for name in ("oom_kills", "out_of_memory", "exit_code")
        )
        moments = {name: value.get(name) for name in ("alive_ns", "gone_ns", "stack_ns")}
        return cls(
            alive=alive if isinstance(alive, bool) else None,
            state=state if isinstance(state, str) else None,
            ended=ended if isinstance(ended, str) else None,
            stack=tuple(line for line in stack if isinstance(line, str))
            if isinstance(stack, (list, tuple))
            else (),
            **{
                name: moment if isinstance(moment, int) else None
                for name, moment in moments.items()
            },
            holds_gil=holds_gil if isinstance(holds_gil := value.get("holds_gil"), bool) else None,
            oom_kills=oom_kills if isinstance(oom_kills, int) else None,
            out_of_memory=out_of_memory if isinstance(out_of_memory, str) else None,
            exit_code=exit_code if isinstance(exit_code, int) else None,
        )
