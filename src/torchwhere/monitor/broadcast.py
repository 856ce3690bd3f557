"""The state that the lead monitor publishes: in a store, or as a file in a shared folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from typing import Any

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
        contents: dict[str, Any] = {}
        for field in fields(cls):
            value = values.get(field.name, field.default)
            contents[field.name] = tuple(value) if isinstance(value, list) else value
            if type(contents[field.name]) is not type(field.default):
                return None
        state = cls(**contents)
        return state if state._has_valid_entries() else None

    def _has_valid_entries(self) -> bool:
        numbers = (*self.excused_hosts, *self.wanted_stacks)
        return all(type(number) is int for number in numbers) and all(
            type(verdict) is str for verdict in self.verdicts
        )


def run_key() -> str:
    """The launcher's name of the run: the same on all hosts, and the same after a restart."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "none")
