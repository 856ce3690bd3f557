"""What was seen of the ranks of a job that torchwhere does not watch: states and stacks.

`processes/observe.py` creates these values. They are also the content of `attach-<host>.json`
(`docs/attach.md`), which `core/records.py` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchwhere.core.records import read_record
from torchwhere.processes.status import ProcessStatus


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One Python thread at the last look."""

    name: str = ""
    stack: tuple[str, ...] = ()  # `file:line in function`, innermost first
    native: tuple[str, ...] = ()  # native functions inside the innermost Python frame
    holds_gil: bool = False
    has_run: bool = True  # since the first look
    run_s: float = 0.0  # CPU time since the first look
    is_same: bool = False  # its stack was the same at all looks
    has_native: bool = False  # `native` was read, and is empty only if Python itself runs


@dataclass(frozen=True, slots=True)
class HelperObservation:
    """A helper process of a rank, such as a DataLoader worker."""

    pid: int = 0
    kind: str = ""
    state: str | None = None
    stack: tuple[str, ...] = ()  # of its main thread


@dataclass(frozen=True, slots=True)
class RankObservation:
    """One rank, seen from outside for a while."""

    rank: int
    pid: int = 0
    host: str = ""
    seen_ns: int = 0  # wall clock of the last look
    seconds: float = 0.0  # between the first and the last look
    state: str | None = None  # from /proc: R, S, D, T; None if it has exited
    waits_in: str = ""  # the kernel function in which its main thread sleeps
    is_assumed: bool = False  # its rank is assumed from the order of the processes
    world_size: int | None = None
    local_world_size: int | None = None
    job: str = ""  # SLURM's number of the job
    folder: str = ""  # its current folder
    started_ns: int = 0  # wall clock
    flight_recorder: dict[str, str] = field(default_factory=dict)  # prefixes of dump and pipe
    main: ThreadStack | None = None  # None: py-spy could not read it
    others: tuple[ThreadStack, ...] = ()
    problem: str | None = None  # why there is no stack: a value of `Refusal`
    native_problem: str | None = None  # why there are no native frames, if they were asked for
    helpers: tuple[HelperObservation, ...] = ()
    devices: tuple[dict[str, str], ...] = ()  # GPUs that it uses, by UUID

    @property
    def is_alive(self) -> bool:
        return self.state is not None

    @property
    def status(self) -> ProcessStatus:
        """The same as the doctor reads it."""
        main = self.main
        return ProcessStatus(
            alive=self.is_alive,
            state=self.state,
            stack=main.stack if main is not None else (),
            alive_ns=self.seen_ns if self.is_alive else None,
            gone_ns=None if self.is_alive else self.seen_ns,
            stack_ns=self.seen_ns,
            holds_gil=main.holds_gil if main is not None else None,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> RankObservation | None:
        """Read the content of a file; None if it has no rank."""
        # a negative number counts as unknown
        known = {name: content for name, content in value.items() if not _is_negative(content)}
        return read_record(cls, known)


def _is_negative(content: Any) -> bool:
    return isinstance(content, int) and content < 0
