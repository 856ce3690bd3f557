"""The sums over phases that a box keeps: how often each phase ran, how long in all, how long at
most, and what still runs.

They stand in the counters, two slots a phase, so they are exact however often the ring has gone
round, and readable at any time. `phase_sums` reads them from a box; `hooks/phases.py` writes them.
A phase is known by its *path*: the names of the phases around it, outermost first, and its own. The
empty path is the step itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import EntryType

# What a slot holds: the "source" of its `who`. Its thread is the main one, or any other.
ENDED, RUNNING, ENDED_ELSEWHERE, RUNNING_ELSEWHERE = range(4)

MOST_PATHS = 192  # two slots each: the streams keep at least a quarter of all
OTHERS = "<other phases>"  # where those beyond go


class PhaseKey(NamedTuple):
    """Which phase: its path, and whether it ran on the main thread."""

    path: tuple[str, ...]
    is_main: bool


@dataclass(frozen=True, slots=True)
class PhaseSum:
    """What one phase took on one rank."""

    count: int = 0  # how often it ended
    total_ns: int = 0  # of those
    max_ns: int = 0
    running: int = 0  # begun and not ended
    begun_ns: int = 0  # when those began, by the clock of the records, added up


def phase_sums(box: Box) -> dict[PhaseKey, PhaseSum]:
    """The sums of a box, in the order the phases were first seen. Words of different moments may
    not fit together."""
    found: dict[PhaseKey, PhaseSum] = {}
    for who, *words in sorted(box.counter_words(), key=lambda words: words[0] >> 40):
        path, which = _path(box, who >> 40), (who >> 20 & 0xFFFFF) - 1
        if path is None or not 0 <= which <= RUNNING_ELSEWHERE or who & 0xFFFFF:
            continue
        key = PhaseKey(path, which < ENDED_ELSEWHERE)
        known = found.get(key, PhaseSum())
        if which in (ENDED, ENDED_ELSEWHERE):
            found[key] = replace(known, count=words[0], total_ns=words[1], max_ns=words[2])
        else:
            found[key] = replace(known, running=words[0], begun_ns=words[1])
    return found


def _path(box: Box, entry_id: int) -> tuple[str, ...] | None:
    if box.names.get(entry_id, (0, ""))[0] != EntryType.PHASE_PATH:
        return None
    names = box.value(entry_id)
    return tuple(map(str, names)) if isinstance(names, list) else None
