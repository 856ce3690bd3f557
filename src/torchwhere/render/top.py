"""The live screen as lines, for a width and a height; and the same as plain text, for a file or a
pipe.

Takes a run as it is now (`diagnose/live`), what somebody wants to see of it (`top_view.View`) and
the doctor's last verdict as JSON has it. Gives lines of (text, style); `screen.py` paints them.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len

from torchwhere.diagnose.live.ranks import RankNow
from torchwhere.diagnose.live.run import RunNow
from torchwhere.render.text import Column, Line, fitted, plain, plural, ranks_text, table
from torchwhere.render.top_rows import (
    Charset,
    age,
    cell,
    collective_text,
    heading,
    row_line,
    row_style,
    speed,
    state_word,
    widths,
)
from torchwhere.render.top_view import View

Verdict = dict[str, Any]  # as `torchwhere doctor --json` gives it

HELP = (
    ("up, down, j, k", "one line"),
    ("PgUp, PgDn, Home, End", "a page, the first, the last"),
    ("enter", "a rank: its place, threads, last events, stack; a cohort (+): open, close"),
    ("n", "jump to the slowest: trouble first, then who is behind"),
    ("s", "sort by trouble, rank, age, step, speed"),
    ("/", "filter: words in rank, state, pass, module, line, collective, host; esc: none"),
    ("c", "ranks that do the same in one line, or each in its own"),
    ("p", "pause, go on"),
    ("h, ?", "this page"),
    ("q", "quit; Ctrl-Z suspends"),
    ("", ""),
    (
        "age",
        "since the rank last moved: entered or left a module, issued a collective, began a step",
    ),
    ("!", "stands still for longer than its steps usually take, is dead, or is stopped"),
    ("STUCK, BEHIND", "stands still and waits for nobody; others wait for it"),
    ("waiting for 2", "has issued a collective that rank 2 has not issued yet"),
    ("verdict", "what the doctor says: asked in the background, when something is wrong"),
)
_MOST_SINGLE = 64  # ranks with a line of their own in plain text
_SMALL = 12  # lines; a lower screen has a shorter head


# -- sentences -------------------------------------------------------------------------------------


def title(run: RunNow) -> str:
    count = len(run.ranks)
    parts = [
        plural(count, "rank") if count == run.world_size else f"{count} of {run.world_size} ranks"
    ]
    steps = [rank.step for rank in run.ranks if rank.step is not None]
    if steps:
        parts.append(
            f"step {max(steps)}" if min(steps) == max(steps) else f"steps {min(steps)}-{max(steps)}"
        )
    if run.steps_per_s is not None:
        parts.append(f"{speed(run.steps_per_s)} steps/s")
    return "  ".join(parts)


def impression(run: RunNow) -> tuple[str, str]:
    """What one sees at once, before any doctor has come: a sentence and its style."""
    if run.problem is not None:
        return run.problem, "bold red" if run.ranks else "bold"
    culprits, waiting = run.culprits, run.waiting
    if culprits:
        first = max(culprits, key=lambda rank: rank.age_s)
        alike = [rank for rank in culprits if state_word(rank) == state_word(first)]
        who = f"rank{'s' * (len(alike) > 1)} {_few([rank.rank for rank in alike])}"
        said = f"{who} {state_word(first)} for {age(first.age_s)}"
        said += (
            f", {plural(len(culprits) - len(alike), 'more')}" if len(culprits) > len(alike) else ""
        )
        if waiting:
            said += (
                f"; {plural(len(waiting), 'rank')} wait{'s' * (len(waiting) == 1)} in"
                f" {collective_text(waiting[0])}"
            )
        return said, "bold red"
    if run.is_over:
        return (
            f"all {len(run.ranks)} ranks have finished"
            if len(run.ranks) > 1
            else "the rank has finished"
        ), "bold"
    finished = sum(rank.state == "finished" for rank in run.ranks)
    return (
        f"{len(run.ranks) - finished} moving" + (f", {finished} finished" if finished else ""),
        "green",
    )


def _few(ranks: list[int]) -> str:
    text = ranks_text(ranks[:64])
    return text if len(text) <= 24 and len(ranks) <= 64 else f"{ranks[0]} and {len(ranks) - 1} more"


def verdict_sentence(verdict: Verdict) -> str:
    lines = str(verdict.get("text") or "").splitlines()
    kind = lines[0].partition("  ")[0] if lines else str(verdict.get("kind"))
    said = lines[1] if len(lines) > 1 else ""
    if verdict.get("kind") == "healthy":
        # how far it was is no news on a live screen
        said = said.partition(". ")[0].removesuffix(".")
    return f"{kind}: {said}" if said else kind


def remarks(run: RunNow) -> list[str]:
    """What is not there to be seen."""
    said = (
        [
            f"no box of rank {ranks_text(run.missing[:8])}"
            + (" and more" if len(run.missing) > 8 else "")
        ]
        if run.missing
        else []
    )
    return [*said, *run.caveats]


# -- the screen ------------------------------------------------------------------------------------


def body_height(
    run: RunNow, verdict: Verdict | None, width: int, height: int, snapshots: Charset
) -> int:
    """How many rows have room."""
    return max(1, height - len(_head(run, verdict, width, height, snapshots, View())) - 2)


def screen_lines(
    run: RunNow,
    view: View,
    *,
    verdict: Verdict | None,
    width: int,
    height: int,
    snapshots: Charset,
    page: Sequence[Line] = (),
) -> list[Line]:
    """Exactly so many lines, none wider than the screen. `page` is what stands on a page other than
    the list."""
    head = _head(run, verdict, width, height, snapshots, view)
    room = max(1, height - len(head) - 2)
    if view.page == "list":
        body = _list(run, view, verdict, width, room, snapshots)
    else:
        page = _help(snapshots) if view.page == "help" else page
        view.top = max(0, min(view.top, len(page) - room - 1))
        body = list(page[view.top : view.top + room + 1])
    body += [[] for _ in range(room + 1 - len(body))]
    foot: Line = [(snapshots.fit(snapshots.of(_foot(run, view)), width), "reverse")]
    lines = [*head, *body[: room + 1], foot]
    return (
        [fitted_in(line, width, snapshots) for line in lines[: height - 1]] + [lines[-1]]
        if height > 1
        else lines[:1]
    )


def fitted_in(line: Line, width: int, snapshots: Charset) -> Line:
    """Cut with a mark that the terminal can show."""
    return [
        (snapshots.of(text) if snapshots.is_ascii else text, style)
        for text, style in fitted(line, width)
    ]


def _head(
    run: RunNow, verdict: Verdict | None, width: int, height: int, snapshots: Charset, view: View
) -> list[Line]:
    said, style = impression(run)
    is_roomy = height >= _SMALL
    lines: list[Line] = [[(_first_line(run, width, snapshots), "bold")]]
    lines.append(
        [
            ("PAUSED  " if view.is_paused else "", "reverse"),
            (snapshots.fit(snapshots.of(said), width), style),
        ]
    )
    if verdict is not None and (is_roomy or not run.culprits):
        words = textwrap.wrap(snapshots.of(verdict_sentence(verdict)), max(width, 10))
        is_well = verdict.get("kind") == "healthy"
        most = 3 if height >= 20 else 1
        lines += [
            [(line, "" if is_well else "bold")] for line in words[: most if not is_well else 1]
        ]
    elif run.culprits and is_roomy:
        lines.append([("asking the doctor", "dim")])
    lines += [
        [(snapshots.fit(snapshots.of(said), width), "yellow")]
        for said in remarks(run)[: 2 if is_roomy else 0]
    ]
    return lines[: max(1, height - 3)]


def _first_line(run: RunNow, width: int, snapshots: Charset) -> str:
    """Which run, how many ranks, how far; of a long folder's name the end."""
    said = title(run) + (f"  {run.unread} boxes to read" if run.unread else "")
    if width < 60:
        return snapshots.fit(
            f"{snapshots.of(run.folder.rstrip('/').rpartition('/')[2])} {said}", width
        )
    clock, name = (
        time.strftime("%H:%M:%S", time.localtime(run.t_ns / 1e9)),
        snapshots.of(run.folder),
    )
    room = max(8, width - len(f"torchwhere top    {said} {clock}"))
    name = snapshots.fit(name, room, keep_end=True) if cell_len(name) > room else name
    return snapshots.fit(f"torchwhere top  {name}  {said}", width - len(clock) - 1) + f" {clock}"


def _list(
    run: RunNow, view: View, verdict: Verdict | None, width: int, height: int, snapshots: Charset
) -> list[Line]:
    rows = view.rows(run, height)
    if not rows:
        said = (
            f"nothing has {view.typing if view.typing is not None else view.filter!r}"
            if run.ranks
            else ""
        )
        return [[], [(snapshots.fit(snapshots.of(said), width), "")]]
    shown = rows[view.top : view.top + height]
    columns = widths(rows, width, step=max((rank.step or 0 for rank in run.ranks), default=0))
    lines = [
        row_line(row, columns, snapshots, is_selected=row.id == view.selected) for row in shown
    ]
    return [
        heading(columns, snapshots),
        *lines,
        *_rest(run, verdict, width, height - len(lines), snapshots),
    ]


def _rest(
    run: RunNow, verdict: Verdict | None, width: int, room: int, snapshots: Charset
) -> list[Line]:
    """Where there is room below the ranks, all that the doctor says of their trouble."""
    if verdict is None or not run.culprits or room < 4:
        return []
    lines: list[Line] = [[]]
    for said in str(verdict.get("text") or "").splitlines():
        inset = " " * (len(said) - len(said.lstrip()) + 2)
        lines += [
            [(line, "")]
            for line in textwrap.wrap(snapshots.of(said), max(width, 20), subsequent_indent=inset)
        ]
    return lines


def _foot(run: RunNow, view: View) -> str:
    if view.typing is not None:
        return f"/{view.typing}_   enter: keep  esc: cancel"
    if view.page != "list":
        return "esc back  up/down scroll  q quit"
    found = (
        f"filter {view.filter!r}: {len(view.kept(run))} of {len(run.ranks)}  "
        if view.filter
        else ""
    )
    return f"{found}q quit  ? help  s sort:{view.sort}  / filter  n slowest  enter open  p pause"


def _help(snapshots: Charset) -> list[Line]:
    return [[(snapshots.fit(key, 22), "bold"), (snapshots.of(text), "")] for key, text in HELP]


# -- plain text ------------------------------------------------------------------------------------


def plain_lines(run: RunNow, *, verdict: Verdict | None, width: int | None) -> Iterator[Line]:
    """One look as a block of lines: uncut where there is no terminal."""
    clock = time.strftime("%H:%M:%S", time.localtime(run.t_ns / 1e9))
    yield fitted([(f"{plain(run.folder)}  {title(run)}  {clock}", "bold")], width)
    said, style = impression(run)
    yield fitted([(plain(said), style)], width)
    if verdict is not None:
        yield fitted([(plain(verdict_sentence(verdict)), "")], width)
    for remark in remarks(run):
        yield fitted([(plain(remark), "yellow")], width)
    if run.ranks:
        yield from _plain_table(run, width)


def _plain_table(run: RunNow, width: int | None) -> Iterator[Line]:
    rows = View(folds=len(run.ranks) > _MOST_SINGLE).rows(run, len(run.ranks))
    keys = ("rank", "state", "step", "pass", "module", "line", "last", "age", "speed")
    columns = [
        Column("!"),
        Column("rank"),
        Column("state"),
        Column("step", right=True),
        Column("pass"),
    ]
    columns += [
        Column("module", keep_end=True),
        Column("line", keep_end=True),
        Column("last collective"),
    ]
    columns += [Column("age", right=True), Column("steps/s", right=True)]
    narrowing = (
        ("last collective", 20),
        ("module", 12),
        ("line", 16),
        ("pass", 0),
        ("module", 0),
        ("last collective", 0),
        ("line", 0),
    )
    lines = (
        [_mark(row.cohort.lead), *(plain(cell(row, key, 1000)) for key in keys)] for row in rows
    )
    styles = ["bold", *(row_style(row.cohort.lead) for row in rows)]
    for line, style in zip(
        table(columns, lines, width=width, narrowing=narrowing), styles, strict=True
    ):
        yield [(text, "bold red" if style == "culprit" else style) for text, _ in line]


def _mark(rank: RankNow) -> str:
    return "!" if rank.is_trouble else ""
