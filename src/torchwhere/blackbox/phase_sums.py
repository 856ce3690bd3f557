"""Sums over phases in a box: how often each phase ran, its total and longest time, and the phases
that still run.

The sums are in the counters, two slots for each phase. They stay exact when the ring of records
wraps around, and are readable at any time. `phase_sums` reads them from a box; `hooks/phases.py`
writes them. The key of a phase is its *path*: the names of the enclosing phases, outermost first,
and its own name. The empty path is the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import EntryType, unpack_stream

# Content of a slot: the "source" in its stream word. Main thread first, then all other threads.
ENDED, RUNNING, ENDED_ELSEWHERE, RUNNING_ELSEWHERE = range(4)

MOST_PATHS = 192  # two slots each: at least a quarter of the slots stays free for streams
OTHERS = "<other phases>"  # counts all further phases


class PhaseKey(NamedTuple):
    """Identifies a phase: its path, and whether it ran on the main thread."""

    path: tuple[str, ...]
    is_main: bool


@dataclass(frozen=True, slots=True)
class PhaseSum:
    """Times of one phase on one rank."""

    count: int = 0  # of ended runs
    total_ns: int = 0  # of ended runs
    max_ns: int = 0
    running: int = 0  # number of runs that have not ended
    begun_ns: int = 0  # sum of their start times, by the clock of the records


def phase_sums(box: Box) -> dict[PhaseKey, PhaseSum]:
    """The sums of a box, in the order of first use. The words of one slot may come from different
    moments."""
    sums: dict[PhaseKey, PhaseSum] = {}
    for stream, *words in sorted(box.counter_words(), key=lambda words: unpack_stream(words[0])[0]):
        entry_id, content, destination = unpack_stream(stream)
        path = _path(box, entry_id)
        if path is None or not 0 <= content <= RUNNING_ELSEWHERE or destination != -1:
            continue
        key = PhaseKey(path, content < ENDED_ELSEWHERE)
        phase_sum = sums.get(key, PhaseSum())
        if content in (ENDED, ENDED_ELSEWHERE):
            sums[key] = replace(phase_sum, count=words[0], total_ns=words[1], max_ns=words[2])
        else:
            sums[key] = replace(phase_sum, running=words[0], begun_ns=words[1])
    return sums


def _path(box: Box, entry_id: int) -> tuple[str, ...] | None:
    if box.entry_type(entry_id) != EntryType.PHASE_PATH:
        return None
    names = box.value(entry_id)
    return tuple(map(str, names)) if isinstance(names, list) else None
