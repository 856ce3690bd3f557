"""The causes of verdicts on dumps. `dump_hang.py` finds them."""

from __future__ import annotations

from dataclasses import dataclass

from torchwhere.core.rank_text import Ranks
from torchwhere.diagnose.doctor.finding import CallRef, Cause
from torchwhere.diagnose.dump_progress import MessageStream


@dataclass(frozen=True, slots=True)
class ReferredCall:
    """A pending call, with a reference to its record."""

    reference: CallRef
    ends: tuple[int, int] | None  # of a message: source and destination


@dataclass(frozen=True, slots=True)
class NothingPending(Cause):
    """Nothing in the dumps is pending."""


@dataclass(frozen=True, slots=True)
class UnconfirmedCalls(Cause):
    """Nothing is pending, but the last calls of some ranks may have been aborted."""

    ranks: Ranks


@dataclass(frozen=True, slots=True)
class ProgressedMeanwhile(Cause):
    """Some dumps are older than others: the job progressed while they were written."""

    outdated: Ranks


@dataclass(frozen=True, slots=True)
class JustIssued(Cause):
    """A call that its ranks issued only a moment before their dumps were written."""

    ranks: Ranks
    call: CallRef
    age_s: float  # at most, when the dumps were written


@dataclass(frozen=True, slots=True)
class JustCompleted(Cause):
    """Ranks on which others seem to wait, and that completed calls a moment before."""

    ranks: Ranks
    age_s: float  # at most, when the dumps were made


@dataclass(frozen=True, slots=True)
class MissingMessage(Cause):
    """A rank that has not issued its end of a message."""

    rank: int
    call: ReferredCall


@dataclass(frozen=True, slots=True)
class FewInCall(Cause):
    """A collective that few of its ranks have issued. The others are in no call."""

    ranks: Ranks  # in it
    call: ReferredCall
    others: Ranks  # have not issued it


@dataclass(frozen=True, slots=True)
class UnreachedCall(Cause):
    """Devices that have not reached a call that their CPU has issued."""

    ranks: Ranks
    call: ReferredCall
    waiting: Ranks
    buffered: tuple[MessageStream, int] | None = None  # sends that completed before their receive
    may_progress: bool = False  # whether the dumps do not show that the wait is long


@dataclass(frozen=True, slots=True)
class UnreachedByAll(Cause):
    """A call that its ranks have issued, and that no device has reached."""

    ranks: Ranks
    call: ReferredCall


@dataclass(frozen=True, slots=True)
class BehindRanks(Cause):
    """Ranks that have not completed a call that others have completed."""

    ranks: Ranks
    call: ReferredCall
    completed_by: Ranks
    absent: Ranks  # without a dump
    is_clear: bool  # whether the device of the rank has failed; else its dump may be older


@dataclass(frozen=True, slots=True)
class IncompleteCall(Cause):
    """A call that its ranks have issued and not completed: the cause may be any of them."""

    ranks: Ranks  # in it
    call: ReferredCall
    went_on: Ranks  # have completed it
    unknown: Ranks  # whether they have issued it is unknown, although they have a dump
    older: Ranks  # of these, those with an older dump than the others
    absent: Ranks  # without a dump
    waiting: Ranks  # in other calls, for these ranks
    has_timing: bool
    have_reached: bool  # all ranks with a dump: by timing, or because their CPU waits in it (gloo)
    may_progress: bool = False  # whether the dumps do not show that the wait is long


@dataclass(frozen=True, slots=True)
class OrderCohort:
    """Ranks that wait in the same call."""

    ranks: Ranks
    in_all: Ranks  # those that take part in the calls of all cohorts: only they chose the order
    call: ReferredCall


@dataclass(frozen=True, slots=True)
class DifferentOrder(Cause):
    """Ranks that issued the calls of several groups in different orders."""

    cohorts: tuple[OrderCohort, ...]  # the usual order first
    shift: int  # how many calls fewer of the first group the second cohort has issued
