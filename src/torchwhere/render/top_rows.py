"""The rows of the live screen as lines: which columns fit a width, and the text of each cell.

Widths depend only on the screen and on the length of ranks and steps: a screen that is painted
twice a second must not jump. Every text of the job is sanitized first (`Charset`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from torchwhere.blackbox.issued import Issued
from torchwhere.core.place import Certainty, shown
from torchwhere.core.rank_text import ranks_text
from torchwhere.core.sanitize import plural
from torchwhere.diagnose.doctor.verdict import State
from torchwhere.diagnose.live.ranks import RankNow
from torchwhere.diagnose.live.run import is_culprit
from torchwhere.render.lines import Line, cut_start, plain
from torchwhere.render.top_view import TopRow

_SHORT_PASS = {
    "forward": "fwd",
    "backward": "bwd",
    "optimizer": "opt",
    "recompute": "rec",
    "outside": "-",
}
_SHORT_STATE = {"finished": "done", "FINISHED": "DONE"}
VARIOUS = "(various)"
_MOST_COMPARED = 64  # ranks of a cohort
_MOST_RANKS = 24  # cells of a cohort's ranks


@dataclass(frozen=True, slots=True)
class Charset:
    """The characters that a terminal can show: Unicode, or only ASCII."""

    is_ascii: bool = False

    def of(self, text: object) -> str:
        safe = plain(text)
        return safe.encode("ascii", "replace").decode() if self.is_ascii else safe

    def fit(self, text: str, width: int, *, keep_end: bool = False, right: bool = False) -> str:
        """Pad or cut a text to exactly `width` cells."""
        room = width - cell_len(text)
        if room >= 0:
            return " " * room + text if right else text + " " * room
        mark = "~" if self.is_ascii else "…"
        if width < 2:
            return set_cell_size(text, width)
        if keep_end:
            return cut_start(text, width, mark=mark)
        return set_cell_size(text, width - 1) + mark


# -- cells -----------------------------------------------------------------------------------------


def age(seconds: float) -> str:
    """A duration in at most five characters."""
    if seconds < 99.95:
        return f"{seconds:.1f}s"
    for unit, size, most in (("s", 1, 600), ("m", 60, 600 * 60), ("h", 3600, 1000 * 3600)):
        if seconds < most:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"


def speed(steps_per_s: float | None) -> str:
    """A speed in at most five characters."""
    if steps_per_s is None:
        return "-"
    for below, digits in ((9.995, 2), (99.95, 1)):
        if steps_per_s < below:
            return f"{steps_per_s:.{digits}f}"
    return f"{steps_per_s:.0f}"


def state_text(rank: RankNow) -> str:
    """The state, in capitals if the rank is the reason that others wait."""
    if rank.state in (State.DEAD, State.STOPPED):
        return str(rank.state).upper()
    if rank.state is State.FINISHED:
        return "FINISHED" if rank.is_blamed else "finished"
    if rank.is_stalled and not rank.waits_for:
        return "STUCK"
    return "BEHIND" if rank.is_blamed else str(rank.state)


def _state(row: TopRow, width: int) -> str:
    ranks = row.cohort.ranks
    rank = ranks[0]
    text = state_text(rank)
    if rank.waits_for and rank.state is State.WAITING:
        awaited = {other.waits_for for other in ranks[:_MOST_COMPARED]}
        longer = f"{State.WAITING} for {_awaited_text(rank.waits_for)}"
        if len(awaited) == 1 and len(longer) <= width:
            return longer
    return text if len(text) <= width else _SHORT_STATE.get(text, text)


def _awaited_text(ranks: Sequence[int]) -> str:
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


def module_text(rank: RankNow) -> str:
    place = rank.place
    if place.module is None and place.certainty is Certainty.UNKNOWN:
        return "?"
    phase = rank.live_box.phase() if place.module is None else None
    if phase:
        return f"({phase})"
    return shown(place.module) + (f" call {place.call}" if place.call else "")


def collective_text(issued: Issued | None) -> str:
    return "-" if issued is None else f"{issued.op} #{issued.number} {issued.group.title}"


def last_text(rank: RankNow) -> str:
    return collective_text(rank.issued)


def line_text(rank: RankNow) -> str:
    return rank.place.full_line or "-"


def step_text(rank: RankNow) -> str:
    return "-" if rank.step is None else str(rank.step)


def _device_at(rank: RankNow) -> str:
    """Where the device is, in a few words; empty without a device."""
    device = rank.device
    if device is None or device.place is None:
        return ""
    if device.collective is not None:
        return device.collective.short_text
    pass_ = device.place.pass_
    return f"{_SHORT_PASS.get(pass_, pass_)} {shown(device.place.module)}".removeprefix("- ")


def _behind_text(rank: RankNow, width: int) -> str:
    """How far the device is behind the CPU: steps and collectives, or only steps."""
    device = rank.device
    if device is None:
        return ""
    if not device.pending:  # of what was issued since the last look, nothing is known
        return "?" if device.collectives_behind else "-"
    collectives = f"{device.collectives_behind:,} coll"
    if not device.steps_behind:
        return collectives
    steps = plural(device.steps_behind, "step")
    longer = f"{steps}, {collectives}"
    return longer if len(longer) <= width else steps


CellText = Callable[[TopRow, int], str]  # of a row, in a number of cells


def _of_lead(text: Callable[[RankNow], str]) -> CellText:
    return lambda row, width: text(row.cohort.lead)


def _of_all(text: Callable[[RankNow], str]) -> CellText:
    return lambda row, width: _shared(row, text)


def _shared(row: TopRow, text: Callable[[RankNow], str]) -> str:
    """The text of all ranks of a row. Stalled ranks share one; of moving ranks, a few are
    compared."""
    ranks = row.cohort.ranks
    texts = set(map(text, ranks[:8] if row.cohort.is_moving else ranks[:1]))
    return texts.pop() if len(texts) == 1 else VARIOUS


def _pass(row: TopRow, width: int) -> str:
    pass_ = _shared(row, lambda rank: rank.place.pass_)
    return pass_ if len(pass_) <= width else _SHORT_PASS.get(pass_, "*")


def _device_behind(row: TopRow, width: int) -> str:
    return _shared(row, lambda rank: _behind_text(rank, width))


# -- columns ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopColumn:
    """A column: its heading, its least and most cells, and the text that fits a number of cells."""

    heading: str
    least: int
    most: int
    text: CellText
    right: bool = False
    keep_end: bool = False


# In the order of the screen. `_PRIORITY` is the order in which they get room.
COLUMNS = {
    "rank": TopColumn("rank", 4, _MOST_RANKS, _ranks),
    "state": TopColumn("state", 7, 20, _state),
    "step": TopColumn("step", 4, 9, _of_lead(step_text), right=True),
    "pass": TopColumn("pass", 4, 9, _pass),
    "module": TopColumn("module", 11, 60, _of_all(module_text), keep_end=True),
    "line": TopColumn("line", 12, 48, _of_all(line_text), keep_end=True),
    "last": TopColumn("last collective", 15, 40, _of_all(last_text)),
    "gpu": TopColumn("GPU at", 12, 32, _of_all(_device_at), keep_end=True),
    "behind": TopColumn("GPU behind", 10, 18, _device_behind),
    "age": TopColumn("age", 5, 5, _of_lead(lambda rank: age(rank.age_s)), right=True),
    "speed": TopColumn("st/s", 5, 5, _of_lead(lambda rank: speed(rank.steps_per_s)), right=True),
}
_PRIORITY = ("rank", "state", "age", "step", "line", "last", "module", "pass", "speed")
_DEVICE_PRIORITY = ("rank", "state", "age", "step", "line", "gpu", "behind", "module", "pass")
_GROWING = ("behind", "last", "gpu", "line", "state", "module", "pass")
_WANTED = {"last": 24, "line": 20, "state": 14, "module": 16, "gpu": 22, "behind": 14}
_GROWING_LATER = ("module", "gpu", "line", "last", "state", "rank")
MARKS = 2  # cells before the first column


def widths(rows: Sequence[TopRow], width: int, *, step: int) -> dict[str, int]:
    """The width of each column; a column without room is left out."""
    needed = {key: column.least for key, column in COLUMNS.items()}
    needed["rank"] = _rank_width(rows, width)
    needed["step"] = max(4, len(str(step)))
    left = width - MARKS + 1
    chosen: dict[str, int] = {}
    has_device = any(row.cohort.lead.device is not None for row in rows)
    for key in dict.fromkeys((_DEVICE_PRIORITY if has_device else ()) + _PRIORITY):
        if needed[key] + 1 <= left:
            chosen[key] = needed[key]
            left -= needed[key] + 1
    mosts = {key: column.most for key, column in COLUMNS.items()}
    for keys, limits in ((_GROWING, mosts | _WANTED), (_GROWING_LATER, mosts)):
        for key in keys:
            if key in chosen:
                growth = max(0, min(left, limits[key] - chosen[key]))
                chosen[key] += growth
                left -= growth
    return {key: chosen[key] for key in COLUMNS if key in chosen}


def _rank_width(rows: Sequence[TopRow], width: int) -> int:
    longest = max(
        (len(str(max(rank.rank for rank in row.cohort.ranks))) for row in rows), default=1
    )
    if all(len(row.cohort.ranks) == 1 for row in rows):
        return max(4, longest)
    return max(4, min(_MOST_RANKS if width >= 60 else 12, 2 * longest + 9))


def heading(columns: dict[str, int], charset: Charset) -> Line:
    cells = [
        charset.fit(COLUMNS[key].heading, width, right=COLUMNS[key].right)
        for key, width in columns.items()
    ]
    return [(" " * MARKS + " ".join(cells), "bold")]


def row_line(row: TopRow, columns: dict[str, int], charset: Charset, *, is_selected: bool) -> Line:
    lead = row.cohort.lead
    cells = []
    for key, width in columns.items():
        column = COLUMNS[key]
        text = charset.of(column.text(row, width))
        cells.append(charset.fit(text, width, right=column.right, keep_end=column.keep_end))
    mark = " "
    if lead.is_trouble:
        mark = "!"
    elif len(row.cohort.ranks) > 1 and not row.is_open:
        mark = "+"
    style = row_style(lead)
    text = (">" if is_selected else " ") + mark + " ".join(cells)
    return [(text, f"{style} reverse".strip() if is_selected and style != "culprit" else style)]


def row_style(rank: RankNow) -> str:
    if is_culprit(rank):
        return "culprit"
    if rank.is_trouble:
        return "red"
    return "dim" if rank.state is State.FINISHED else ""
