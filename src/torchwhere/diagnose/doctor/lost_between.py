"""Finds the two records between which a late rank loses its time most often."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from torchwhere.core.events import Event, Kind
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.stream_calls import CallWindow


class Moment(NamedTuple):
    """A record of a rank: what it did, and where."""

    action: str
    pass_: str | None  # of the module
    module: str | None
    line: str | None


def lost_between(
    job_calls: JobCalls, window: CallWindow, row: int, columns: list[int]
) -> tuple[Moment | None, Moment | None, str | None]:
    """The two records between which a late rank loses its time most often, and the phase."""
    box, calls = job_calls.by_rank[window.ranks[row]].box, window.calls[row]
    if box is None:
        return None, None, None
    spans: Counter[tuple[Moment, Moment, str | None]] = Counter()
    for column in columns:
        number = window.first + column
        span = calls.record(max(number - 1, calls.first)), calls.record(number)
        begin, at = (int(index) for index in np.searchsorted(box.records["number"], span))
        gaps = np.diff(box.records["t_ns"][begin : at + 1].astype(np.int64))
        if not len(gaps) or at >= len(box.records):
            continue
        end = begin + int(gaps.argmax()) + 1
        end += int(box.records["kind"][end] == Kind.MEMORY)  # written with the end of the step
        earlier, later = box.event(end - 1), box.event(end)
        phase = earlier.fields.get("phase") if earlier.kind == "phase_begin" else None
        spans[_moment(earlier), _moment(later), phase] += 1
    return spans.most_common(1)[0][0] if spans else (None, None, None)


def _moment(event: Event) -> Moment:
    fields, place = event.fields, event.place
    return Moment(
        action=str(fields.get("op") or fields.get("phase") or event.kind),
        pass_=place.pass_ if place.module is not None else None,
        module=place.module,
        line=place.full_line or None,
    )
