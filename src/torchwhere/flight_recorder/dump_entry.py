"""Reads one entry of a dump: a collective or a message.

Takes the value of an entry, gives a `DumpEntry` with checked types and bounds. Raises
`MalformedEntryError` for a value that is not an entry.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torchwhere.flight_recorder.limits import is_number, is_shapes, is_text
from torchwhere.flight_recorder.schema import PUBLIC_DTYPES, PUBLIC_OPS

_PROFILED = re.compile(r"(\w{1,32}):(\w{1,64})(?: (\d{1,7})(->|<-)(\d{1,7}))?")
_STATES = ("scheduled", "started", "completed")
_ENDS_OF_BATCHES = ("coalesced", "ALLGATHER_coalesced", "REDUCE_SCATTER_coalesced")
_MOST_FRAMES = 512
# Files that are not the user's: installed packages, Python, torch built from source, generated
# code, torchwhere.
_NOT_THE_USERS = re.compile(
    r"/(?:site|dist)-packages/|/lib/python\d|^<|torchinductor_|/torch/(?:_\w+|autograd|distributed|fx|nn|optim|utils)/"
    r"|/torch/_\w+\.py$"
    # older dumps have `sense`, an earlier name of `hooks`
    r"|/torchwhere/(?:\w+\.py|(?:api|commands|drop_in|hooks|model|native|recorder|sense)/)"
)
Shapes = tuple[tuple[int, ...], ...]


class MalformedEntryError(Exception):
    """A value does not have the required form."""


@dataclass(frozen=True, slots=True)
class DumpEntry:
    """One collective or message of a dump."""

    record_id: int
    pg_id: int
    group: str
    desc: str
    backend: str  # nccl, gloo
    op: str  # public name
    recorded_op: str
    seq: int  # of its group, from 1; for a message p2p_seq_id
    is_p2p: bool
    ends: tuple[int, int] | None  # source and destination, as ranks of the group
    t_ns: int
    inputs: Shapes
    outputs: Shapes
    dtype: str | None
    state: str
    is_retired: bool
    completed_ns: int  # when the recorder saw that it was complete; 0: not known
    seen_ns: int  # when it saw that it was complete, or had started; 0: not known
    timeout_ms: int  # 0: not known
    line: str | None  # of the user's code, with the full path
    place: dict[str, Any] | None  # torchwhere's own data, if it wrote the dump

    @property
    def signature(self) -> tuple[Any, ...]:
        """What ranks must agree on."""
        call = self.backend, self.recorded_op, self.group
        return *call, self.dtype, self.inputs, self.outputs

    @property
    def is_end_of_batch(self) -> bool:
        """Whether it only closes a batch of entries."""
        return self.recorded_op in _ENDS_OF_BATCHES


def read_entry(value: Any, lines: dict[int, str | None]) -> DumpEntry:
    """Read one entry. `lines`: of frames, by their id, since entries share the dicts of frames."""
    if type(value) is not dict:
        raise MalformedEntryError
    profiled = _PROFILED.fullmatch(_text(value.get("profiling_name")))
    group = value.get("process_group")
    if profiled is None or not isinstance(group, (tuple, list)) or len(group) != 2:
        raise MalformedEntryError
    is_p2p = value.get("is_p2p", profiled[2] in ("send", "recv")) is True
    state, own = value.get("state"), value.get("torchwhere")
    completed_ns = max(0, lenient_number(value.get("time_discovered_completed_ns")))
    started_ns = max(0, lenient_number(value.get("time_discovered_started_ns")))
    dtypes = value.get("input_dtypes") or value.get("output_dtypes") or [""]
    dtype = _text(dtypes[0]) if isinstance(dtypes, list) else ""
    return DumpEntry(
        record_id=_number(value.get("record_id")),
        pg_id=_number(value.get("pg_id", 0)),
        group=_text(group[0]),
        desc=_text(group[1]),
        backend=profiled[1],
        op=PUBLIC_OPS.get(profiled[2], profiled[2]),
        recorded_op=profiled[2],
        seq=_number(value.get("p2p_seq_id" if is_p2p else "collective_seq_id")),
        is_p2p=is_p2p,
        ends=_ends(profiled),
        t_ns=_number(value.get("time_created_ns", 0)),
        inputs=_shapes(value.get("input_sizes", [])),
        outputs=_shapes(value.get("output_sizes", [])),
        dtype=PUBLIC_DTYPES.get(dtype, dtype.lower()) or None,
        state=state if state in _STATES else "scheduled",
        is_retired=value.get("retired") is True,
        completed_ns=completed_ns,
        seen_ns=max(started_ns, completed_ns),
        timeout_ms=max(0, lenient_number(value.get("timeout_ms"))),
        line=_line(value.get("frames"), lines),
        place=own if type(own) is dict else None,
    )


def _text(value: Any) -> str:
    if not is_text(value):
        raise MalformedEntryError
    return value


def _number(value: Any) -> int:
    if not is_number(value):
        raise MalformedEntryError
    return value


def _ends(profiled: re.Match[str]) -> tuple[int, int] | None:
    """Source and destination: `send 0->3` and `recv 3<-0` both give (0, 3)."""
    if profiled[3] is None:
        return None
    here, there = int(profiled[3]), int(profiled[5])
    return (here, there) if profiled[4] == "->" else (there, here)


def _shapes(value: Any) -> Shapes:
    if not is_shapes(value):
        raise MalformedEntryError
    return tuple(map(tuple, value))


def _line(frames: Any, lines: dict[int, str | None]) -> str | None:
    """The innermost line of a stack in the user's code."""
    for frame in frames[:_MOST_FRAMES] if isinstance(frames, list) else ():
        if id(frame) not in lines:
            lines[id(frame)] = user_line(frame)
        if (line := lines[id(frame)]) is not None:
            return line
    return None


def user_line(frame: Any) -> str | None:
    """A frame as `file:line`; None if it is not in the user's code."""
    if type(frame) is not dict:
        return None
    file, line = frame.get("filename"), frame.get("line")
    if not is_text(file) or not is_number(line):
        return None
    return f"{file}:{line}" if file.endswith(".py") and not _NOT_THE_USERS.search(file) else None


def lenient_number(value: Any) -> int:
    """A number, also as a string, as in JSON dumps; -1 for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        value = int(value)
    return value if is_number(value) else -1
