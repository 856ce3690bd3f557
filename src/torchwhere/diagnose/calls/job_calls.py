"""The collectives of one rank in one stream, as arrays: views of a transcript, in the language that
all ranks share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.diagnose.calls.encode import CallBatch, RankSummary
from torchwhere.diagnose.calls.keys import CallSite, Signature

# of a word that says what a call is
FORM_SHIFT, _MEANING_MASK = np.uint64(32), np.uint64(0xFFFFFFFF)


@dataclass(slots=True)
class IdMap:
    """What one clerk has numbered, and what we call it."""

    groups: list[int] = field(default_factory=list)
    signatures: list[Signature] = field(default_factory=list)
    call_sites: list[CallSite] = field(default_factory=list)
    # The numbers of both in our own language, one further on: a call whose group is not known has
    # the signature -1.
    signature_ids: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(1, np.uint64))
    site_ids: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(1, np.uint64))
    # of signatures
    has_site_id: npt.NDArray[np.bool_] = field(default_factory=lambda: np.ones(1, np.bool_))


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """The arrays of a transcript, and what their codes stand for."""

    batch: CallBatch
    encoder: IdMap
    packed_ids: npt.NDArray[np.uint64]  # of each pair: form above, meaning below


class Counted(NamedTuple):
    """How often some ranks issued what: columns, an item for each rank and sort of call."""

    ranks: npt.NDArray[np.int64]
    pairs: npt.NDArray[np.int32]  # signature and spot, numbers of the clerk
    counts: npt.NDArray[np.int64]
    within: npt.NDArray[np.int64]  # of these, in the steps that were asked for
    signatures: list[Signature]
    call_sites: list[CallSite]
    groups: list[int]  # of the signatures' groups, the numbers in our own language


# not frozen: that takes four times as long to make, and there are hundreds of thousands
@dataclass(slots=True)
class StreamCalls:
    """The collectives that one rank issued in one stream, as far as its ring goes back without a
    hole, in order."""

    first: int  # number
    signature_id: int  # of all of them, if they have but one; else -1
    _length: int
    _at: int
    _statement: RankSummary
    _page: DecodedBatch

    def __len__(self) -> int:
        return self._length

    @property
    def last(self) -> int:
        return self.first + self._length - 1

    def at(self, number: int) -> int | None:
        """The index of a number; None where the ring does not have it."""
        return number - self.first if self.first <= number <= self.last else None

    def _cut(self, first: int | None, end: int | None) -> slice:
        begin = self._at + (0 if first is None else first - self.first)
        return slice(begin, self._at + (self._length if end is None else end - self.first))

    def packed_ids(
        self, first: int | None = None, end: int | None = None
    ) -> npt.NDArray[np.uint64]:
        """Form and meaning of the calls from number `first` to before `end`, in one word: equal if
        ranks issued the same."""
        found: npt.NDArray[np.uint64] = self._page.packed_ids[self._statement.pairs_at :][
            self._page.batch.codes[self._cut(first, end)]
        ]
        return found

    def codes(self) -> npt.NDArray[Any]:
        """Equal for calls of this rank that are the same in all but number, step and time."""
        found: npt.NDArray[Any] = self._page.batch.codes[self._cut(None, None)]
        return found

    def steps(self, first: int | None = None, end: int | None = None) -> npt.NDArray[np.int64]:
        return self._page.batch.steps[self._cut(first, end)].astype(np.int64) + self._statement.step

    def times_ns(self, first: int | None = None, end: int | None = None) -> npt.NDArray[np.int64]:
        """Wall clock of the rank's host."""
        said = self._statement
        return (
            self._page.batch.ticks[self._cut(first, end)].astype(np.int64) * said.tick_ns
            + said.start_ns
        )

    def set_back(self, by_ns: int) -> StreamCalls:
        """The same by another clock, of which that of the rank's host is ahead."""
        said = self._statement
        return (
            self
            if not by_ns
            else replace(self, _statement=said._replace(start_ns=said.start_ns - by_ns))
        )

    def in_step(self, first: int, end: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Of the calls from number `first` to before `end`, whether it is no chance in which step
        they were issued; and whether they are shadows, which belong to a step of others."""
        call_sites, which = self._call_sites(first, end)
        is_counted = np.array(
            [call_site.is_counted_by(self._statement.steppers) for call_site in call_sites],
            np.bool_,
        )
        return is_counted[which], np.array(
            [call_site.is_shadow for call_site in call_sites], np.bool_
        )[which]

    def are_async(self, first: int, end: int) -> npt.NDArray[np.bool_]:
        """Whether the calls from number `first` to before `end` returned at once."""
        call_sites, which = self._call_sites(first, end)
        return np.array([call_site.is_async for call_site in call_sites], np.bool_)[which]

    def _call_sites(self, first: int, end: int) -> tuple[list[CallSite], npt.NDArray[np.int64]]:
        """The spots that some calls were issued from, and which of them each call was."""
        page, said = self._page, self._statement
        used, which = np.unique(page.batch.codes[self._cut(first, end)], return_inverse=True)
        numbers = page.batch.pairs[said.pairs_at + used.astype(np.int64), 1]
        return [page.encoder.call_sites[number] for number in numbers.tolist()], which

    def record(self, number: int) -> int:
        """The number of the record: when it came among all that the rank did."""
        return (
            int(self._page.batch.records[self._at + number - self.first]) + self._statement.record
        )

    def records(self) -> npt.NDArray[np.int64]:
        """The numbers of the records of all of them."""
        return (
            self._page.batch.records[self._cut(None, None)].astype(np.int64)
            + self._statement.record
        )

    def of(self, number: int) -> tuple[Signature, CallSite]:
        """What was issued, and from where."""
        page, said = self._page, self._statement
        signature, call_site = page.batch.pairs[
            said.pairs_at + int(page.batch.codes[self._at + number - self.first])
        ]
        return page.encoder.signatures[signature], page.encoder.call_sites[call_site]


def signature_ids(packed_ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """What ranks must agree on, of words as `StreamCalls.whats` gives them."""
    return (packed_ids >> FORM_SHIFT).astype(np.int64)


def site_ids(packed_ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Module, pass, line and beneficiary: what ranks agree on in a sound program. 0 where that is
    not known."""
    return (packed_ids & _MEANING_MASK).astype(np.int64)
