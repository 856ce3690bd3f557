"""What was seen of the ranks of a job that torchwhere does not watch: states and stacks.

`processes/observe.py` creates these values. They are also the content of `attach-<host>.json`
(`docs/attach.md`). Reading a file never raises: a value of the wrong type counts as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchwhere.processes.status import ProcessStatus

_MOST_ENTRIES = 4096


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One Python thread at the last look."""

    name: str
    stack: tuple[str, ...]  # `file:line in function`, innermost first
    native: tuple[str, ...] = ()  # native functions inside the innermost Python frame
    holds_gil: bool = False
    has_run: bool = True  # since the first look
    run_s: float = 0.0  # CPU time since the first look
    is_same: bool = False  # its stack was the same at all looks
    has_native: bool = False  # `native` was read, and is empty only if Python itself runs

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> ThreadStack:
        return cls(
            name=_text(value.get("name")),
            stack=_texts(value.get("stack")),
            native=_texts(value.get("native")),
            holds_gil=value.get("holds_gil") is True,
            has_run=value.get("has_run") is not False,
            run_s=_seconds(value.get("run_s")),
            is_same=value.get("is_same") is True,
            has_native=value.get("has_native") is True,
        )


@dataclass(frozen=True, slots=True)
class HelperObservation:
    """A helper process of a rank, such as a DataLoader worker."""

    pid: int
    kind: str
    state: str | None
    stack: tuple[str, ...] = ()  # of its main thread

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> HelperObservation:
        return cls(
            pid=_number(value.get("pid")) or 0,
            kind=_text(value.get("kind")),
            state=_optional_text(value.get("state")),
            stack=_texts(value.get("stack")),
        )


@dataclass(frozen=True, slots=True)
class RankObservation:
    """One rank, seen from outside for a while."""

    rank: int
    pid: int
    host: str
    seen_ns: int  # wall clock of the last look
    seconds: float  # between the first and the last look
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
    def is_still(self) -> bool:
        """Whether its main thread did not run between the first and the last look."""
        return self.main is not None and not self.main.has_run

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
        rank = _number(value.get("rank"))
        if rank is None:
            return None
        main = value.get("main")
        recorder = value.get("flight_recorder")
        return cls(
            rank=rank,
            pid=_number(value.get("pid")) or 0,
            host=_text(value.get("host")),
            seen_ns=_number(value.get("seen_ns")) or 0,
            seconds=_seconds(value.get("seconds")),
            state=_optional_text(value.get("state")),
            waits_in=_text(value.get("waits_in")),
            is_assumed=value.get("is_assumed") is True,
            world_size=_number(value.get("world_size")),
            local_world_size=_number(value.get("local_world_size")),
            job=_text(value.get("job")),
            folder=_text(value.get("folder")),
            started_ns=_number(value.get("started_ns")) or 0,
            flight_recorder={name: text for name, text in recorder.items() if isinstance(text, str)}
            if isinstance(recorder, dict)
            else {},
            main=ThreadStack.from_dict(main) if isinstance(main, dict) else None,
            others=tuple(map(ThreadStack.from_dict, _objects(value.get("others")))),
            problem=_optional_text(value.get("problem")),
            native_problem=_optional_text(value.get("native_problem")),
            helpers=tuple(map(HelperObservation.from_dict, _objects(value.get("helpers")))),
            devices=tuple(
                {name: str(text) for name, text in device.items()}
                for device in _objects(value.get("devices"))
            ),
        )


def _number(value: Any) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
    return value if is_number else None


def _seconds(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e9 else 0.0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _optional_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: Any) -> tuple[str, ...]:
    entries = value[:_MOST_ENTRIES] if isinstance(value, list) else []
    return tuple(entry for entry in entries if isinstance(entry, str))


def _objects(value: Any) -> list[dict[str, Any]]:
    entries = value[:_MOST_ENTRIES] if isinstance(value, list) else []
    return [entry for entry in entries if isinstance(entry, dict)]
