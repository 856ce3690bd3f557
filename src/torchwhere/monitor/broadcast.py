"""What the monitor of host 0 says to those of other hosts: through a store, or as a file in a
folder that all share."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields

_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LeadState:
    """What the monitor of host 0 says to all others, again every second."""

    token: str = ""  # of this monitor
    run: str = ""  # of which run and restart
    number: int = 0
    t_ns: int = 0  # its wall clock
    asked: int = 0  # how often snapshots were asked for
    spared: tuple[int, ...] = ()  # who need not answer, having written just now
    stacks: tuple[int, ...] = ()  # ranks whose Python stack is wanted
    said: tuple[str, ...] = ()  # verdicts it has told
    ends: bool = False  # the ranks are to be ended
    is_over: bool = False  # it says no more
    age_ns: int = 0  # how long it has been there; durations need no common clock
    gone_ns: int = 0  # how long its own ranks have been gone

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> LeadState | None:
        """Of whatever came; None if it is no word."""
        try:
            value = json.loads(text) if len(text) <= _MOST_BYTES else None
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict):
            return None
        known = {each.name: value.get(each.name, each.default) for each in fields(cls)}
        known = {
            name: tuple(each) if isinstance(each, list) else each for name, each in known.items()
        }
        state = cls(**known)
        return state if state._is_sound() else None

    def _is_sound(self) -> bool:
        numbers = (self.number, self.t_ns, self.asked, self.age_ns, self.gone_ns)
        lists = (self.spared, self.stacks, self.said)
        if not (
            type(self.token) is type(self.run) is str
            and all(type(number) is int for number in numbers)
        ):
            return False
        if not (
            all(isinstance(each, tuple) for each in lists)
            and type(self.ends) is type(self.is_over) is bool
        ):
            return False
        return all(type(rank) is int for rank in (*self.spared, *self.stacks)) and all(
            type(each) is str for each in self.said
        )


def run_key() -> str:
    """The run that a launcher's environment speaks of, the same on all hosts. Restarts it does not
    count: see `_last_life`."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "none")
