"""Who died, and who died of it: when one process ends, those who are in a collective with it fail a moment later.

Takes what ranks said last and what was seen of their processes. A rank that says a peer hung up on it, or that crashed in C
while it stood in a collective, reacts to another one. Where nobody failed by himself, the one to blame is a rank that left
nothing to read, or one that went without a word; where several may have, nobody is blamed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torchwhere.diagnose.doctor.sighting import Sighting
from torchwhere.diagnose.hearing.testimony import Hearing, Testimony
from torchwhere.events import Event

# What gloo, NCCL and the store say when the process at the other end is gone; a wait that took too long says something else.
_HUNG_UP = re.compile(r"closed by peer|connection reset|connection closed|broken pipe|remote process exited", re.IGNORECASE)
# And when nobody came for too long, and they gave up.
_GAVE_UP = re.compile(
    r"timed out waiting \d+ ?ms for|collective operation timeout|failed to pass monitoredBarrier|wait timeout", re.IGNORECASE
)
_OUT_OF_MEMORY = re.compile(
    r"\bMemoryError\b|OutOfMemoryError|\bout of memory\b|can't allocate memory|cannot allocate memory", re.IGNORECASE
)
_SAME_DEATH_NS = 1_000_000_000  # who went within a second of the last one went with it
_NO_WORD = "without a word: killed by a signal, by the system for want of memory, or crashed in C"
_UNSEEN = Sighting()


@dataclass(slots=True)
class Deaths:
    """How the ranks of a job ended, those that have."""

    hearing: Hearing
    sightings: Mapping[int, Sighting]
    now_ns: int | None  # the last moment at which one of them was seen alive
    _somebody_hung_up: bool | None = None

    def has_failed(self, rank: int) -> bool:
        """Whether a rank ended, and not well: by its own last words, or by those that its crash left."""
        end = self.hearing.testimonies[rank].end
        if end is not None:
            return not ended_well(end)
        return self._sighting(rank).ended is not None or self._unfinished(rank) is not None

    def is_dead(self, rank: int) -> bool:
        """Whether a rank has failed, was killed for want of memory, or went without a word while the others went on."""
        return self.has_failed(rank) or self._sighting(rank).out_of_memory is not None or self._is_gone_first(rank)

    def was_hung_up_on(self, rank: int) -> bool:
        """Whether a rank ended because the process at the other end was gone."""
        return _HUNG_UP.search(self._last_words(rank)) is not None

    def gave_up(self, rank: int) -> bool:
        """Whether a rank ended because a collective took too long: it waited for somebody."""
        return _GAVE_UP.search(self._last_words(rank)) is not None

    def _last_words(self, rank: int) -> str:
        testimony = self.hearing.testimonies[rank]
        if testimony.end is not None:
            return str(testimony.end.fields.get("reason"))
        return (last_exception(testimony) or "") if self._sighting(rank).alive is not True else ""

    def _is_victim(self, rank: int) -> bool:
        return self.was_hung_up_on(rank) or self.gave_up(rank)

    def first_of_awaited(self, awaited: list[int], unheard: list[int]) -> list[int]:
        """Of dead ranks that others wait for, those that went by themselves; where all were hung up on, those of which nothing
        is known."""
        own = [rank for rank in awaited if not self._is_victim(rank)]
        return own or unheard or awaited

    def first(self, unheard: list[int]) -> list[int]:
        """Where nobody waits for the dead, as all had come to one collective: those that failed by themselves; else those of
        which nothing is known; else, if it is clear, the one that crashed or fell silent."""
        failed = self.failed()
        own = [rank for rank in failed if not self._reacted(rank)]
        if own or unheard:
            return own or unheard
        crashed = [rank for rank in failed if not self._is_victim(rank)]
        return crashed or self._silent()

    def failed(self) -> list[int]:
        return [rank for rank in self.hearing.testimonies if self.has_failed(rank)]

    def how(self, rank: int) -> str:
        """How a dead rank ended."""
        testimony, sighting = self.hearing.testimonies[rank], self._sighting(rank)
        if testimony.end is not None:
            said = str(testimony.end.fields.get("reason"))
        elif (unfinished := self._unfinished(rank)) is not None:
            said = f"exception: {unfinished}"
        else:
            return sighting.out_of_memory or sighting.ended or _NO_WORD
        return f"out of memory: {said}" if _OUT_OF_MEMORY.search(said.partition("\n")[0]) else said

    def _sighting(self, rank: int) -> Sighting:
        return self.sightings.get(rank, _UNSEEN)

    def _unfinished(self, rank: int) -> str | None:
        """An exception that was the last thing a rank recorded before it was gone: it did not come to say that it ends."""
        return last_exception(self.hearing.testimonies[rank]) if self._sighting(rank).alive is False else None

    def _reacted(self, rank: int) -> bool:
        testimony = self.hearing.testimonies[rank]
        is_crash = testimony.end is None and self._unfinished(rank) is None and self._sighting(rank).out_of_memory is None
        return self._is_victim(rank) or (is_crash and testimony.in_collective_since_ns is not None)

    def _is_gone_first(self, rank: int) -> bool:
        """Whether a process that is gone, without a word, went by itself and not when all was over.

        It did if others were seen alive when it was gone already, or if they say that a peer hung up on them, and none of those
        who ended by themselves, as of waiting too long, can be that peer.
        """
        sighting = self._sighting(rank)
        if sighting.alive is not False or self.hearing.testimonies[rank].end is not None:
            return False
        if self.now_ns is not None and self.now_ns - (sighting.alive_ns or 0) > _SAME_DEATH_NS:
            return True
        if self._somebody_hung_up is None:
            failed = {rank: self.was_hung_up_on(rank) for rank in self.failed()}
            self._somebody_hung_up = bool(failed) and all(failed.values())
        return self._somebody_hung_up

    def _silent(self) -> list[int]:
        """Those that went without a word, the first of them; nobody, where there are several and no one saw when they went."""
        silent = [rank for rank in self.hearing.testimonies if not self.has_failed(rank) and self._is_gone_first(rank)]
        seen = {rank: ns for rank in silent if (ns := self._sighting(rank).alive_ns) is not None}
        if len(silent) < 2 or len(seen) < len(silent):
            return silent if len(silent) < 2 else []
        first = min(seen.values())
        return [rank for rank in silent if seen[rank] - first <= _SAME_DEATH_NS]


def ended_well(end: Event) -> bool:
    return str(end.fields.get("reason")) in ("stop", "exit", "exit 0")


def last_exception(testimony: Testimony) -> str | None:
    """The text of an exception that is a rank's last record."""
    error = testimony.exception
    return str(error.fields.get("text")) if error is not None and error.number == testimony.statement.records - 1 else None
