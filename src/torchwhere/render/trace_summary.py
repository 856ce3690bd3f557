"""What `torchwhere trace` prints about a trace: its content, its clocks, and how to record more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torchwhere.core.rank_text import ranks_phrase
from torchwhere.core.sanitize import plural
from torchwhere.diagnose.clocks.clocks import Clock, Clocks, Evidence
from torchwhere.render.trace_counts import TraceCounts

NO_MODULES = (
    "the run has no module calls. To record them, use torchwhere run --module-events or"
    " watch(module_events=True)"
)
_MOST_CLOCKS = 8  # printed
_MOST_DOUBT_NS = 1e6  # a smaller uncertainty is not printed
_MOST_FILES = 3  # named


def lacking_text(ranks: Sequence[int]) -> str:
    """The ranks that are not drawn because they have none of the wanted steps."""
    return f"left out, none of these steps: {ranks_phrase(ranks)}"


def other_files_text(folder: Path, names: Sequence[str]) -> str:
    """The files of an earlier trace that are still in the folder."""
    hidden = len(names) - _MOST_FILES
    listed = ", ".join(names[:_MOST_FILES]) + (f" and {hidden} more" if hidden > 0 else "")
    return (
        f"{folder} also holds {listed}, from another trace. HTA reads every file in the folder:"
        " delete those"
    )


def trace_summary(
    out: str, counts: TraceCounts, *, clocks: Clocks, size: int, is_folder: bool
) -> Iterator[str]:
    """What was written, the clocks that were corrected, and how to open it."""
    unfinished = f", {counts.unfinished} unfinished" if counts.unfinished else ""
    yield (
        f"{out}: {plural(len(counts.ranks), 'rank')}, {counts.slices:,} slices{unfinished},"
        f" {counts.flows:,} arrows, {size / 1e6:.1f} MB"
    )
    others = [clock for clock in clocks.clocks if clock.evidence is not Evidence.REFERENCE]
    for clock in others[:_MOST_CLOCKS]:
        yield f"clock of {clock.host or '?'} ({ranks_phrase(clock.ranks)}): {_clock_text(clock)}"
    if len(others) > _MOST_CLOCKS:
        yield f"and {len(others) - _MOST_CLOCKS} more clocks; --json lists all of them"
    yield "One file for each rank, for HTA" if is_folder else "Open it in https://ui.perfetto.dev"


def _clock_text(clock: Clock) -> str:
    if clock.evidence is Evidence.UNMATCHED:
        return "not aligned, because it shares no call with the first clock"
    doubt_ns = clock.uncertainty_ns or 0.0
    doubt = f", at most {doubt_ns / 1e6:,.1f} ms off" if doubt_ns > _MOST_DOUBT_NS else ""
    if clock.evidence is Evidence.WALL_CLOCK:
        return f"not changed, because nothing contradicts it{doubt}"
    offset_ns = clock.line.offset_ns
    direction = "ahead" if offset_ns >= 0 else "behind"
    return (
        f"was {abs(offset_ns) / 1e6:,.3f} ms {direction}, {clock.line.slope * 1e6:+.1f} ppm, by"
        f" {clock.calls:,} calls ({clock.evidence}){doubt}"
    )
