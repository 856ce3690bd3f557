"""The rows of the live screen as lines: which columns have room at a width, and what stands in
each.

The widths depend on the screen and on how long ranks and steps are, not on the rest: a screen that
is painted twice a second must not jump. Everything that comes from the job is made harmless first
(`Charset`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from torchwhere.core.place import Certainty, shown
from torchwhere.diagnose.doctor.verdict import State
from torchwhere.diagnose.live.cohorts import LiveCohort
from torchwhere.diagnose.live.ranks import RankNow
from torchwhere.diagnose.live.run import is_culprit
from torchwhere.render.text import Line, plain, ranks_text
from torchwhere.render.top_view import TopRow

_SHORT_PASS = {
    "forward": "fwd",
    "backward": "bwd",
    "optimizer": "opt",
    "recompute": "rec",
    "outside": "-",
}
VARIOUS = "(various)"
_MOST_RANKS = 24  # cells of a cohort's ranks


@dataclass(frozen=True, slots=True)
class Charset:
    """What a terminal can show: all of Unicode, or ASCII alone."""

    is_ascii: bool = False

    def of(self, text: object) -> str:
        found = plain(text)
        return found.encode("ascii", "replace").decode() if self.is_ascii else found

    def fit(self, text: str, width: int, *, keep_end: bool = False, right: bool = False) -> str:
        """In exactly so many cells."""
        room = width - cell_len(text)
        if room >= 0:
            return " " * room + text if right else text + " " * room
        mark = "~" if self.is_ascii else "…"
        if width < 2:
            return set_cell_size(text, width)
        kept = (
            set_cell_size(text[::-1], width - 1)[::-1]
            if keep_end
            else set_cell_size(text, width - 1)
        )
        return mark + kept if keep_end else kept + mark


# -- cells -----------------------------------------------------------------------------------------


def age(seconds: float) -> str:
    """In at most five cells."""
    if seconds < 99.95:
        return f"{seconds:.1f}s"
    for unit, size, most in (("s", 1, 600), ("m", 60, 600 * 60), ("h", 3600, 1000 * 3600)):
        if seconds < most:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"


def speed(steps_per_s: float | None) -> str:
    """In at most five cells."""
    if steps_per_s is None:
        return "-"
    return (
        f"{steps_per_s:.2f}"
        if steps_per_s < 9.995
        else f"{steps_per_s:.1f}"
        if steps_per_s < 99.95
        else f"{steps_per_s:.0f}"
    )


def state_word(rank: RankNow) -> str:
    """Capitals for those who are the reason that others wait."""
    if rank.state in (State.DEAD, State.STOPPED):
        return str(rank.state).upper()
    if rank.state is State.FINISHED:
        return "FINISHED" if rank.is_blamed else "finished"
    if rank.is_stalled and not rank.waits_for:
        return "STUCK"
    return "BEHIND" if rank.is_blamed else str(rank.state)


def _state(cohort: LiveCohort, width: int) -> str:
    rank = cohort.ranks[0]
    word = state_word(rank)
    if (
        rank.waits_for
        and rank.state is State.WAITING
        and len({other.waits_for for other in cohort.ranks[:64]}) == 1
    ):
        longer = f"{word} for {_some(rank.waits_for)}"
        word = longer if len(longer) <= width else word
    return {"finished": "done", "FINISHED": "DONE"}.get(word, word) if len(word) > width else word


def _some(ranks: Sequence[int]) -> str:
    return ranks_text(ranks) if len(ranks) <= 4 else f"{len(ranks)} ranks"


def _ranks(row: TopRow, width: int) -> str:
    ranks = [rank.rank for rank in row.cohort.ranks]
    if len(ranks) == 1:
        return f"  {ranks[0]}" if row.is_inner and width > 5 else str(ranks[0])
    runs, count = ranks_text(ranks).split(", "), f" ({len(ranks)})"
    for kept in range(min(len(runs), width), 0, -1):
        text = ",".join(runs[:kept]) + (",.." if kept < len(runs) else "") + count
        if len(text) <= width:
            return text
    return f"{ranks[0]}..{count}"


def _same(texts: Iterable[str]) -> str:
    found = set(texts)
    return found.pop() if len(found) == 1 else VARIOUS


def module_text(rank: RankNow) -> str:
    place = rank.place
    if place.module is None and place.certainty is Certainty.UNKNOWN:
        return "?"
    phase = rank.live_box.phase() if place.module is None else None
    return (
        f"({phase})"
        if phase
        else shown(place.module) + (f" call {place.call}" if place.call else "")
    )


def collective_text(rank: RankNow) -> str:
    return (
        f"{rank.issued.op} #{rank.issued.number} {rank.group}" if rank.issued is not None else "-"
    )


def _place(cohort: LiveCohort, text: Callable[[RankNow], str]) -> str:
    """Ranks that stand still have one place; of many that move, what a few of them have in
    common."""
    return (
        text(cohort.ranks[0])
        if not cohort.is_moving
        else _same(text(rank) for rank in cohort.ranks[:8])
    )


# -- columns ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Spec:
    key: str
    heading: str
    least: int
    most: int
    right: bool = False
    keep_end: bool = False


# In the order they stand in. `_PRIORITY` is the order in which they get room.
_COLUMNS = (
    _Spec("rank", "rank", 4, _MOST_RANKS),
    _Spec("state", "state", 7, 20),
    _Spec("step", "step", 4, 9, right=True),
    _Spec("pass", "pass", 4, 9),
    _Spec("module", "module", 11, 60, keep_end=True),
    _Spec("line", "line", 12, 48, keep_end=True),
    _Spec("last", "last collective", 15, 40),
    _Spec("age", "age", 5, 5, right=True),
    _Spec("speed", "st/s", 5, 5, right=True),
)
_PRIORITY = ("rank", "state", "age", "step", "line", "last", "module", "pass", "speed")
_GROWING = ("last", "line", "state", "module", "pass", "module", "line", "last", "state", "rank")
_WANTED = {"last": 24, "line": 20, "state": 14, "module": 16}  # before anything grows further
MARKS = 2  # cells before the first column


def widths(rows: Sequence[TopRow], width: int, *, step: int) -> dict[str, int]:
    """How wide each column is; those without room are not there."""
    specs = {spec.key: spec for spec in _COLUMNS}
    many = [row for row in rows if len(row.cohort.ranks) > 1]
    longest = max(
        (len(str(max(rank.rank for rank in row.cohort.ranks))) for row in rows), default=1
    )
    needed = {key: spec.least for key, spec in specs.items()}
    needed["rank"] = (
        max(4, min(_MOST_RANKS if width >= 60 else 12, 2 * longest + 9))
        if many
        else max(4, longest)
    )
    needed["step"] = max(4, len(str(step)))
    left, found = width - MARKS + 1, {}
    for key in _PRIORITY:
        if needed[key] + 1 <= left:
            found[key] = needed[key]
            left -= needed[key] + 1
    for turn, key in enumerate(_GROWING):
        if key in found:
            most = (
                specs[key].most if turn >= len(_GROWING) // 2 else _WANTED.get(key, specs[key].most)
            )
            more = max(0, min(left, most - found[key]))
            found[key] += more
            left -= more
    return {spec.key: found[spec.key] for spec in _COLUMNS if spec.key in found}


def heading(columns: dict[str, int], snapshots: Charset) -> Line:
    specs = {spec.key: spec for spec in _COLUMNS}
    cells = [
        snapshots.fit(specs[key].heading, width, right=specs[key].right)
        for key, width in columns.items()
    ]
    return [(" " * MARKS + " ".join(cells), "bold")]


def row_line(
    row: TopRow, columns: dict[str, int], snapshots: Charset, *, is_selected: bool
) -> Line:
    lead = row.cohort.lead
    specs = {spec.key: spec for spec in _COLUMNS}
    cells = []
    for key, width in columns.items():
        text = snapshots.of(cell(row, key, width))
        cells.append(
            snapshots.fit(text, width, right=specs[key].right, keep_end=specs[key].keep_end)
        )
    mark = "!" if lead.is_trouble else "+" if len(row.cohort.ranks) > 1 and not row.is_open else " "
    style = row_style(lead)
    text = (">" if is_selected else " ") + mark + " ".join(cells)
    return [(text, f"{style} reverse".strip() if is_selected and style != "culprit" else style)]


def row_style(rank: RankNow) -> str:
    if is_culprit(rank):
        return "culprit"
    if rank.is_trouble:
        return "red"
    return "dim" if rank.state is State.FINISHED else ""


def cell(row: TopRow, key: str, width: int) -> str:
    cohort = row.cohort
    rank = cohort.lead
    if key == "rank":
        return _ranks(row, width)
    if key == "state":
        return _state(cohort, width)
    if key == "step":
        return "-" if rank.step is None else str(rank.step)
    if key == "pass":
        found = _place(cohort, lambda rank: rank.place.pass_)
        return found if len(found) <= width else _SHORT_PASS.get(found, "*")
    if key in ("module", "line", "last"):
        texts = {
            "module": module_text,
            "line": lambda rank: rank.place.line or "-",
            "last": collective_text,
        }
        return _place(cohort, texts[key])
    return age(rank.age_s) if key == "age" else speed(rank.steps_per_s)
