"""What the live screen shows of a run, and how keys change it: order, filter, selection, pages.

It knows no terminal: `TopView.rows` gives the rows for a run and a number of lines, `TopView.press`
takes the name of a key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchwhere.core.place import shown
from torchwhere.diagnose.doctor.verdict import State
from torchwhere.diagnose.live.ranks import RankNow
from torchwhere.diagnose.live.run import LiveCohort, RunNow, cohorts, is_culprit, single

Id = tuple[str, int]  # "cohort" or "rank", and the lowest rank


@dataclass(frozen=True, slots=True)
class TopRow:
    """One line: a rank, a cohort of ranks that do the same, or a rank of an opened cohort."""

    cohort: LiveCohort
    is_inner: bool = False
    is_open: bool = False

    @property
    def id(self) -> Id:
        ranks = self.cohort.ranks
        if len(ranks) == 1:
            return "rank", ranks[0].rank
        return "cohort", min(rank.rank for rank in ranks)


def _severity(rank: RankNow) -> int:
    if is_culprit(rank):
        return 2
    return 1 if rank.is_trouble else 0


def _speed(rank: RankNow) -> float:
    return rank.steps_per_s if rank.steps_per_s is not None else float("inf")


def _step(rank: RankNow) -> float:
    return rank.step if rank.step is not None else -1


SORTS: dict[str, Callable[[RankNow], Any]] = {
    "trouble": lambda rank: (-_severity(rank), rank.rank),
    "rank": lambda rank: rank.rank,
    "age": lambda rank: (-rank.age_s, rank.rank),
    "step": lambda rank: (_step(rank), rank.rank),
    "speed": lambda rank: (_speed(rank), rank.rank),
}


def slowness(rank: RankNow) -> tuple[Any, ...]:
    """A sort key: trouble is slowest, then a low step, a low speed, a long time without a move."""
    return (
        _severity(rank),
        rank.state is not State.FINISHED,
        -_step(rank),
        -_speed(rank),
        rank.age_s,
    )


@dataclass(slots=True)
class TopView:
    """What the user has chosen to see."""

    sort: str = "trouble"
    filter: str = ""
    typing: str | None = None  # the filter, while it is typed
    # whether ranks that do the same share a line; None: only if they do not fit otherwise
    folds: bool | None = None
    page: str = "list"  # list, detail, help
    is_paused: bool = False
    selected: Id | None = None
    opened: set[int] = field(default_factory=set)  # cohorts, by their lowest rank
    index: int = 0  # of the selected row
    top: int = 0  # the first row or line on the screen
    detail_of: int = -1

    # -- rows --------------------------------------------------------------------------------------

    def rows(self, run: RunNow, height: int) -> list[TopRow]:
        ranks = sorted(self.matching(run), key=SORTS[self.sort])
        folds = self.folds if self.folds is not None else len(ranks) > max(height, 1)
        rows: list[TopRow] = []
        for cohort in cohorts(ranks) if folds else map(single, ranks):
            row = TopRow(cohort)
            is_open = row.id[0] == "cohort" and row.id[1] in self.opened
            rows.append(TopRow(cohort, is_open=is_open))
            if is_open:
                rows += [TopRow(single(rank), is_inner=True) for rank in cohort.ranks]
        self._follow(rows, height)
        return rows

    def matching(self, run: RunNow) -> list[RankNow]:
        """The ranks that match all words of the filter."""
        words = (self.typing if self.typing is not None else self.filter).lower().split()
        if not words:
            return list(run.ranks)
        return [rank for rank in run.ranks if all(map(_filter_text(rank).__contains__, words))]

    def _follow(self, rows: list[TopRow], height: int) -> None:
        """Keep the same row selected and on the screen."""
        ids = [row.id for row in rows]
        if self.selected in ids:
            self.index = ids.index(self.selected)
        self.index = max(0, min(self.index, len(rows) - 1))
        self.selected = ids[self.index] if rows else None
        self.top = max(0, min(self.top, self.index, max(0, len(rows) - height)))
        self.top = max(self.top, self.index - height + 1)

    # -- keys --------------------------------------------------------------------------------------

    def press(self, key: str, run: RunNow, height: int) -> bool:
        """Handle a key. Returns False for `q`, which quits."""
        if self.typing is not None:
            self._type(key)
            return True
        if key == "q":
            return False
        if key in ("h", "?"):
            self._turn_to("list" if self.page == "help" else "help")
        elif key == "p":
            self.is_paused = not self.is_paused
        elif self.page != "list":
            self._press_on_page(key, height)
        else:
            self._press_on_list(key, run, height)
        return True

    def _type(self, key: str) -> None:
        assert self.typing is not None
        if key == "enter":
            self.filter, self.typing = self.typing, None
        elif key == "escape":
            self.typing = None
        elif key == "backspace":
            self.typing = self.typing[:-1]
        elif len(key) == 1 and key.isprintable():
            self.typing += key

    def _press_on_page(self, key: str, height: int) -> None:
        if key in ("escape", "enter", "left", "backspace"):
            self._turn_to("list")
        else:
            self.top = max(0, self.top + (_MOVES[key](height) if key in _MOVES else 0))

    def _press_on_list(self, key: str, run: RunNow, height: int) -> None:
        rows = self.rows(run, height)
        if key in _MOVES and rows:
            self.index = max(0, min(len(rows) - 1, self.index + _MOVES[key](height)))
            self.selected = rows[self.index].id
        elif key in ("enter", "right", "left", " ") and rows:
            self._open(rows[self.index])
        elif key == "s":
            names = list(SORTS)
            self.sort = names[(names.index(self.sort) + 1) % len(names)]
        elif key == "c":
            self.folds = not (
                self.folds if self.folds is not None else len(self.matching(run)) > height
            )
        elif key == "/":
            self.typing = self.filter
        elif key == "escape":
            self.filter = ""
        elif key == "n" and rows:
            slowest = max(
                range(len(rows)), key=lambda at: max(map(slowness, rows[at].cohort.ranks))
            )
            self.index, self.selected = slowest, rows[slowest].id

    def _open(self, row: TopRow) -> None:
        kind, rank = row.id
        if kind == "cohort":
            self.opened ^= {rank}
        else:
            self.detail_of = rank
            self._turn_to("detail")

    def _turn_to(self, page: str) -> None:
        self.page, self.top = page, 0


_FAR = 1 << 40
_MOVES: dict[str, Callable[[int], int]] = {
    "up": lambda height: -1,
    "k": lambda height: -1,
    "down": lambda height: 1,
    "j": lambda height: 1,
    "pageup": lambda height: -height,
    "pagedown": lambda height: height,
    "home": lambda height: -_FAR,
    "end": lambda height: _FAR,
}


def _filter_text(rank: RankNow) -> str:
    """The text that a filter searches."""
    place, issued = rank.place, rank.issued
    last = f"{issued.op} #{issued.number} {rank.group}" if issued is not None else ""
    stuck = "stuck" if is_culprit(rank) and rank.state is State.RUNNING else ""
    texts = (
        f"rank {rank.rank}",
        rank.state,
        stuck,
        place.pass_,
        shown(place.module),
        place.full_line,
        last,
        rank.host,
        rank.detail,
    )
    return "\n".join(str(text) for text in texts if text).lower()
