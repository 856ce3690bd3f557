"""Everything known about one rank: the collectives it issued, where it is now, and how it ended.

An event is put together only when it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import NO_STEP
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.replays import NO_ROW, replay_rows
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.events import Event, Kind
from torchwhere.core.place import PASS_LABELS, Certainty, Place, line_fields
from torchwhere.diagnose.calls.encode import RankSummary
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.stream_calls import SharedIds, StreamCalls

_MOST_RANKS_SHOWN = 64


@dataclass(slots=True)
class RankCalls:
    """One rank: its calls by stream, and the summary of everything else in its box."""

    rank: int
    rank_summary: RankSummary
    counts: dict[StreamKey, int]  # all calls ever issued, by stream
    calls: dict[StreamKey, StreamCalls]  # those still in the ring
    shared_ids: SharedIds = field(repr=False)
    last: tuple[StreamKey, int] | None = None  # stream and number of its last collective
    _box: Box | None = None

    @property
    def box_summary(self) -> BoxSummary:
        return self.rank_summary.box_summary

    @property
    def end(self) -> Event | None:
        return self.rank_summary.end

    @property
    def exception(self) -> Event | None:
        """The last exception."""
        return self.rank_summary.exceptions[-1] if self.rank_summary.exceptions else None

    @property
    def is_compiling(self) -> bool:
        return self.rank_summary.is_compiling

    @property
    def in_collective_since_ns(self) -> int | None:
        """Wall-clock time of the last record if the rank is still in that collective; else None."""
        return self.rank_summary.in_collective_since_ns

    @property
    def device_moved_ns(self) -> int:
        """Wall-clock time at which the device reached its last mark; 0 if that is not known."""
        state = self.rank_summary.device
        return state.device_place.t_ns if state is not None else 0

    @property
    def place(self) -> Place:
        """Module and pass of the main thread, or of the thread that trains if that is another."""
        return self.rank_summary.place or Place(
            rank=self.rank, step=None, pass_="outside", certainty=Certainty.UNKNOWN
        )

    @property
    def has_lost_its_newest(self) -> bool:
        """Whether the rank counted calls after the last one that can be read.

        Then its box was cut or damaged.
        """
        has_wrapped = self.box_summary.counts.overwritten > 0
        # No generator: this runs several times for all ranks of a job.
        for key, count in self.counts.items():
            calls = self.calls.get(key)
            if count and (not has_wrapped if calls is None else calls.first + len(calls) < count):
                return True
        return False

    @property
    def box(self) -> Box | None:
        """The whole box, read when it is asked for; None if the file is gone.

        While the job runs, the box may be newer than the other data of this rank.
        """
        if self._box is None:
            try:
                self._box = read_box(self.box_summary.path)
            except TorchwhereError:
                return None
        return self._box

    def _calls_with(self, key: StreamKey, number: int) -> StreamCalls | None:
        """Returns the calls of a stream if the ring still has this number."""
        calls = self.calls.get(key)
        return None if calls is None or calls.at(number) is None else calls

    def issued(self, key: StreamKey, number: int) -> Event | None:
        """Returns one collective as an event; None if the ring has lost it."""
        calls = self._calls_with(key, number)
        if calls is None:
            return None
        return Event(
            Kind.COLLECTIVE.label,
            calls.record(number),
            int(calls.times_ns(number, number + 1)[0]),
            self._place(calls, number),
            self.fields(key, number),
        )

    def issuer(self, key: StreamKey, number: int) -> Event | None:
        """Returns the event that made a rank issue a collective: the replay of a CUDA graph, or the
        collective itself."""
        calls = self._calls_with(key, number)
        if calls is None or not calls.of(number)[1].is_replayed or self.box is None:
            return self.issued(key, number)
        records = self.box.records["number"]
        row = int(np.searchsorted(records, calls.record(number)))
        is_there = row < len(records) and int(records[row]) == calls.record(number)
        replay = int(replay_rows(self.box)[row]) if is_there else NO_ROW
        return self.issued(key, number) if replay == NO_ROW else self.box.event(replay)

    def until(self, record: int) -> RankCalls:
        """Returns this rank as it was when it had issued the call with a record number."""
        calls = {key: calls.until(record) for key, calls in self.calls.items()}
        later = {key: len(self.calls[key]) - len(before) for key, before in calls.items()}
        counts = {key: count - later.get(key, 0) for key, count in self.counts.items()}
        whole = {key: before for key, before in calls.items() if len(before)}
        return replace(
            self, counts=counts, calls=whole, last=self.call_of_record(record), _box=self._box
        )

    @property
    def last_collective(self) -> Event | None:
        return None if self.last is None else self.issued(*self.last)

    def order(self, key: StreamKey, number: int) -> int:
        """Returns the position of a call among everything the rank did.

        A call that the ring has lost came before all others: -1.
        """
        calls = self._calls_with(key, number)
        return -1 if calls is None else calls.record(number)

    def call_of_record(self, record: int) -> tuple[StreamKey, int] | None:
        """Returns the stream and the number of the call with a record number; None if it is not
        loaded."""
        for key, calls in self.calls.items():
            records = calls.records()
            at = int(np.searchsorted(records, record))
            if at < len(records) and records[at] == record:
                return key, calls.first + at
        return None

    def is_async(self, key: StreamKey, number: int) -> bool | None:
        """Whether a call was asynchronous; None if the ring has lost it."""
        calls = self._calls_with(key, number)
        return None if calls is None else calls.of(number)[1].is_async

    def issued_ns(self, key: StreamKey, number: int) -> int:
        """Returns the wall-clock time of a call; 0 if the ring has lost it."""
        calls = self._calls_with(key, number)
        return 0 if calls is None else int(calls.times_ns(number, number + 1)[0])

    def is_on_device(self, key: StreamKey, number: int) -> bool:
        """Whether the tensors of a call are on an accelerator; False if the ring has lost it."""
        calls = self._calls_with(key, number)
        return calls is not None and calls.of(number)[1].is_on_device

    def reached_ns(self, key: StreamKey, number: int) -> int:
        """Returns the wall-clock time at which the device reached a call; the time of its issue if
        it is not on a device; 0 if that is not known."""
        calls = self._calls_with(key, number)
        if calls is None or not calls.of(number)[1].is_on_device:
            return self.issued_ns(key, number)
        delay_ns = int(calls.device_delays_ns(number, number + 1)[0])
        return self.issued_ns(key, number) + delay_ns if delay_ns >= 0 else 0

    def place_of(self, key: StreamKey, number: int) -> Place | None:
        """Returns where a call was issued; None if the ring has lost it."""
        calls = self._calls_with(key, number)
        return None if calls is None else self._place(calls, number)

    def fields(self, key: StreamKey, number: int) -> dict[str, Any]:
        """Returns the fields of a call as its event has them. The ring must still have the call."""
        signature, call_site = self.calls[key].of(number)
        group = self.shared_ids.group(key)
        beneficiary = call_site.site_id[3]
        fields: dict[str, Any] = self.shared_ids.parsed(signature.text)
        replayed = {"replayed": True} if call_site.is_replayed else {}
        return (
            fields
            | replayed
            | {
                "group_desc": group.desc,
                "mesh_dim": group.mesh_dim,
                "backend": group.backend,
                "group_size": len(group.ranks) or None,
                "group_ranks": list(group.ranks) if len(group.ranks) <= _MOST_RANKS_SHOWN else None,
                "number": number,
                "for": self.shared_ids.parsed(beneficiary) if beneficiary else None,
                "async": call_site.is_async,
            }
        )

    def _place(self, calls: StreamCalls, number: int) -> Place:
        call_site, step = calls.of(number)[1], int(calls.steps(number, number + 1)[0])
        module, pass_, line, _ = call_site.site_id
        return Place(
            rank=self.rank,
            step=None if step == NO_STEP else step,
            pass_=PASS_LABELS.get(pass_, "outside"),
            module=module,
            call=call_site.call,
            **line_fields(line),
            graph=call_site.graph,
            thread=call_site.thread,
            certainty=Certainty(call_site.certainty),
            param=call_site.param,
        )
