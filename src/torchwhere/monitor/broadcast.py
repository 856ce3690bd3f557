"""The state that the lead monitor publishes: in a store, or as a file in a shared folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields

_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LeadState:
    """What the lead publishes for all other monitors, again every second."""

    token: str = ""  # identifies the lead's process
    run: str = ""  # the run, by the launcher's name of it
    number: int = 0
    t_ns: int = 0  # wall clock of the lead
    requests: int = 0  # how many times it has asked for snapshots
    excused_hosts: tuple[int, ...] = ()  # hosts that need not answer: they have just sent one
    wanted_stacks: tuple[int, ...] = ()  # ranks whose Python stack it wants
    verdicts: tuple[str, ...] = ()  # the verdicts it has printed
    ends_ranks: bool = False  # whether the ranks shall be ended
    has_left: bool = False  # whether this is its last state
    age_ns: int = 0  # how long ago its ranks started; durations need no common clock
    ended_ns: int = 0  # how long ago its ranks ended

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> LeadState | None:
        """Read a state from any data; None if it is not one."""
        try:
            values = json.loads(text) if len(text) <= _MOST_BYTES else None
        except (ValueError, RecursionError):
            return None
        if not isinstance(values, dict):
            return None
        arguments = {field.name: values.get(field.name, field.default) for field in fields(cls)}
        for name, value in arguments.items():
            if isinstance(value, list):
                arguments[name] = tuple(value)
        state = cls(**arguments)
        return state if state._is_valid() else None

    def _is_valid(self) -> bool:
        texts = (self.token, self.run)
        numbers = (self.number, self.t_ns, self.requests, self.age_ns, self.ended_ns)
        flags = (self.ends_ranks, self.has_left)
        return (
            all(type(text) is str for text in texts)
            and all(type(number) is int for number in numbers)
            and all(type(flag) is bool for flag in flags)
            and _is_tuple_of(int, self.excused_hosts)
            and _is_tuple_of(int, self.wanted_stacks)
            and _is_tuple_of(str, self.verdicts)
        )


def _is_tuple_of(kind: type, values: object) -> bool:
    return isinstance(values, tuple) and all(type(value) is kind for value in values)


def run_key() -> str:
    """The launcher's name of the run: the same on all hosts, and the same after a restart."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "none")
