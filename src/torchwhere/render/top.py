"""The live screen as lines, for a width and a height; and as plain text, for a file or a pipe.

Takes the state of a run (`diagnose/live`), what the user wants to see of it (`top_view.TopView`)
and the doctor's last verdict as JSON. Gives lines of (text, style); `screen.py` paints them.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len

from torchwhere.core.rank_text import ranks_phrase, watched_phrase
from torchwhere.core.sanitize import plural, steps_span
from torchwhere.diagnose.doctor.verdict import NO_FAULT
from torchwhere.diagnose.live.run import RunNow
from torchwhere.render.lines import Column, Line, fitted, plain, table
from torchwhere.render.top_rows import (
    COLUMNS,
    Charset,
    age,
    collective_text,
    heading,
    row_line,
    row_style,
    speed,
    state_text,
    widths,
)
from torchwhere.render.top_view import TopRow, TopView
from torchwhere.render.verdict import text_lines

Verdict = dict[str, Any]  # as `torchwhere doctor --json` prints it

HELP = (
    ("up, down, j, k", "move by one line"),
    ("PgUp, PgDn, Home, End", "move by a page, to the first, to the last"),
    ("enter", "open a rank: place, threads, last events, stack; open or close a cohort (+)"),
    ("n", "jump to the slowest rank: trouble first, then the lowest step"),
    ("s", "sort by trouble, rank, age, step, speed"),
    ("/", "filter by words in rank, state, pass, module, line, collective, host; esc: clear"),
    ("c", "show ranks that do the same on one line, or each on its own"),
    ("p", "pause, continue"),
    ("h, ?", "this page"),
    ("q", "quit; Ctrl-Z suspends"),
    ("", ""),
    (
        "age",
        "time since the rank last entered or left a module, issued a collective, began a step",
    ),
    ("!", "no move for longer than its steps usually take, or dead, or stopped"),
    ("STUCK", "it does not move, and does not wait for another rank"),
    ("BEHIND", "it moves, and other ranks wait for it"),
    ("waiting for 2", "it has issued a collective that rank 2 has not issued yet"),
    ("GPU at", "the last step, module or collective that the GPU has reached"),
    ("GPU behind", "steps and collectives that the CPU has issued and the GPU has not reached"),
    ("verdict", "the doctor's diagnosis, made in the background when something is wrong"),
)
_MOST_SINGLE = 64  # more ranks share lines in plain text
_SMALL = 12  # lines; a lower screen has a shorter head
_MOST_RUNS = 4  # of ranks in a sentence


# -- sentences -------------------------------------------------------------------------------------


def title(run: RunNow) -> str:
    count = len(run.ranks)
    parts = [
        plural(count, "rank") if count == run.world_size else f"{count} of {run.world_size} ranks"
    ]
    steps = [rank.step for rank in run.ranks if rank.step is not None]
    if steps:
        parts.append(steps_span(steps))
    if run.steps_per_s is not None:
        parts.append(f"{speed(run.steps_per_s)} steps/s")
    return "  ".join(parts)


def _clock(run: RunNow) -> str:
    return time.strftime("%H:%M:%S", time.localtime(run.t_ns / 1e9))


def impression(run: RunNow) -> tuple[str, str]:
    """What the counters alone show, before any verdict: a sentence and its style."""
    if run.problem is not None:
        return run.problem, "bold red" if run.ranks else "bold"
    if run.ended_unfinished:
        return _ended_sentence(run), "bold red"
    if run.culprits:
        return _culprits_sentence(run), "bold red"
    count = len(run.ranks)
    if run.is_over and run.missing:
        have = "rank has" if count == 1 else "ranks have"
        return f"the {count} watched {have} finished", "bold"
    if run.is_over:
        return f"all {count} ranks have finished" if count > 1 else "the rank has finished", "bold"
    finished = sum(rank.state == "finished" for rank in run.ranks)
    ended = f", {finished} finished" if finished else ""
    return f"{count - finished} moving{ended}", "green"


def _ended_sentence(run: RunNow) -> str:
    """All processes are gone: what their states were before explains nothing to a reader who looks
    for a running job."""
    process = "no watched process" if run.missing else "no process"
    ago = age(min(rank.age_s for rank in run.ranks))
    sentence = f"{process} is left, and the job had not finished; last progress {ago} ago"
    return f"{sentence}; {_waits_text(run, 'waited')}" if run.waiting else sentence


def _waits_text(run: RunNow, verb: str) -> str:
    calls = run.waits_in
    where = plural(len(calls), "collective") if len(calls) > 1 else collective_text(*calls)
    return f"{plural(len(run.waiting), 'rank')} {verb} in {where}"


def _culprits_sentence(run: RunNow) -> str:
    culprits, waiting = run.culprits, run.waiting
    first = max(culprits, key=lambda rank: rank.age_s)
    state = state_text(first)
    alike = [rank.rank for rank in culprits if state_text(rank) == state]
    sentence = f"{ranks_phrase(alike, most=_MOST_RUNS)} {state} for {age(first.age_s)}"
    others = len(culprits) - len(alike)
    if others:
        sentence += f", {others} more"
    if waiting:
        sentence += f"; {_waits_text(run, 'waits' if len(waiting) == 1 else 'wait')}"
    return sentence


def verdict_sentence(verdict: Verdict, run: RunNow) -> str:
    """The verdict in one sentence."""
    lines = text_lines(verdict)
    kind = lines[0].partition("  ")[0] if lines else str(verdict.get("kind"))
    sentence = lines[1] if len(lines) > 1 else ""
    if verdict.get("kind") in NO_FAULT:
        if run.culprits:
            still = age(max(rank.age_s for rank in run.culprits))
            paused = (verdict.get("facts") or {}).get("paused")
            if paused is not None:
                return f"paused: {paused['activity']}, no progress for {still}"
            return f"no progress for {still}, not yet called a hang (see --stall)"
        # The rest says how far the job is, which the screen shows anyway.
        sentence = sentence.partition(". ")[0].removesuffix(".")
    return f"{kind}: {sentence}" if sentence else kind


def device_line(run: RunNow, verdict: Verdict | None) -> str:
    """Where the CPU and the device of the first culprit are; empty if it has no device."""
    named = (verdict or {}).get("culprits") or [rank.rank for rank in run.culprits]
    culprit = next((rank for rank in run.ranks if rank.rank in named[:1]), None)
    if culprit is None or culprit.device is None:
        return ""
    return f"rank {culprit.rank}: {culprit.device}"


def remarks(run: RunNow) -> list[str]:
    """What cannot be seen."""
    if not run.missing:
        return list(run.caveats)
    watched = watched_phrase(run.world_size - len(run.missing), run.world_size)
    return [f"{watched}: no box of {ranks_phrase(run.missing, most=8)}", *run.caveats]


# -- the screen ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TopScreen:
    """The content and the size of the screen."""

    run: RunNow
    verdict: Verdict | None
    width: int
    height: int
    charset: Charset

    def text(self, text: str) -> str:
        """A text as wide as the screen."""
        return self.charset.fit(self.charset.of(text), self.width)

    def head(self, view: TopView) -> list[Line]:
        run = self.run
        sentence, style = impression(run)
        is_roomy = self.height >= _SMALL
        paused = "PAUSED  " if view.is_paused else ""
        lines: list[Line] = [
            [(self._first_line(), "bold")],
            [(paused, "reverse"), (self.text(sentence), style)],
        ]
        if self.verdict is not None and (is_roomy or not run.culprits):
            lines += self._verdict_lines(self.verdict)
        elif run.culprits and is_roomy:
            lines.append([("the doctor is running", "dim")])
        if is_roomy:
            most = 2 if self.height >= 20 else 1
            lines += self._wrapped(device_line(run, self.verdict), most=most)
            lines += [[(self.text(remark), "yellow")] for remark in remarks(run)[:2]]
        return lines[: max(1, self.height - 3)]

    def _wrapped(self, text: str, *, most: int, style: str = "") -> list[Line]:
        wrapped = textwrap.wrap(self.charset.of(text), max(self.width, 10))
        return [[(line, style)] for line in wrapped[:most]]

    def _verdict_lines(self, verdict: Verdict) -> list[Line]:
        sentence = verdict_sentence(verdict, self.run)
        if verdict.get("kind") in NO_FAULT:
            return self._wrapped(sentence, most=1)
        return self._wrapped(sentence, most=3 if self.height >= 20 else 1, style="bold")

    def _first_line(self) -> str:
        """Folder, number of ranks, step. The end of a long folder name is kept."""
        run, charset, width = self.run, self.charset, self.width
        state = title(run) + (f"  {run.unread} boxes to read" if run.unread else "")
        folder = charset.of(run.folder)
        if width < 60:
            return charset.fit(f"{folder.rstrip('/').rpartition('/')[2]} {state}", width)
        clock = _clock(run)
        room = max(8, width - len(f"torchwhere top    {state} {clock}"))
        if cell_len(folder) > room:
            folder = charset.fit(folder, room, keep_end=True)
        line = charset.fit(f"torchwhere top  {folder}  {state}", width - len(clock) - 1)
        return f"{line} {clock}"

    def ranks(self, view: TopView, room: int) -> list[Line]:
        """The heading, the rows of ranks that fit, and the whole verdict if there is room left."""
        rows = view.rows(self.run, room)
        if not rows:
            words = view.typing if view.typing is not None else view.filter
            return [[], [(self.text(f"no rank matches {words!r}" if self.run.ranks else ""), "")]]
        last_step = max((rank.step or 0 for rank in self.run.ranks), default=0)
        columns = widths(rows, self.width, step=last_step)
        lines = [
            row_line(row, columns, self.charset, is_selected=row.id == view.selected)
            for row in rows[view.top : view.top + room]
        ]
        return [heading(columns, self.charset), *lines, *self._whole_verdict(room - len(lines))]

    def _whole_verdict(self, room: int) -> list[Line]:
        if self.verdict is None or not self.run.culprits or room < 4:
            return []
        lines: list[Line] = [[]]
        for text in text_lines(self.verdict):
            inset = " " * (len(text) - len(text.lstrip()) + 2)
            wrapped = textwrap.wrap(
                self.charset.of(text), max(self.width, 20), subsequent_indent=inset
            )
            lines += [[(line, "")] for line in wrapped]
        return lines


def body_height(
    run: RunNow, verdict: Verdict | None, width: int, height: int, charset: Charset
) -> int:
    """How many rows fit."""
    head = _TopScreen(run, verdict, width, height, charset).head(TopView())
    return max(1, height - len(head) - 2)


def screen_lines(
    run: RunNow,
    view: TopView,
    *,
    verdict: Verdict | None,
    width: int,
    height: int,
    charset: Charset,
    page: Sequence[Line] = (),
) -> list[Line]:
    """Exactly `height` lines, none wider than `width`. `page` holds the lines of an opened page."""
    screen = _TopScreen(run, verdict, width, height, charset)
    head = screen.head(view)
    room = max(1, height - len(head) - 2)
    if view.page == "list":
        body = screen.ranks(view, room)
    else:
        page = _help(charset) if view.page == "help" else page
        view.top = max(0, min(view.top, len(page) - room - 1))
        body = list(page[view.top : view.top + room + 1])
    body += [[] for _ in range(room + 1 - len(body))]
    foot: Line = [(screen.text(_foot(run, view)), "reverse")]
    lines = [*head, *body[: room + 1], foot]
    if height == 1:
        return lines[:1]
    return [*(fitted_in(line, width, charset) for line in lines[: height - 1]), foot]


def fitted_in(line: Line, width: int, charset: Charset) -> Line:
    """Cut a line, with an ellipsis that the terminal can show."""
    return [(charset.of(text), style) for text, style in fitted(line, width)]


def _foot(run: RunNow, view: TopView) -> str:
    if view.typing is not None:
        return f"/{view.typing}_   enter: keep  esc: cancel"
    if view.page != "list":
        return "esc back  up/down scroll  q quit"
    matches = ""
    if view.filter:
        matches = f"filter {view.filter!r}: {len(view.matching(run))} of {len(run.ranks)}  "
    return f"{matches}q quit  ? help  s sort:{view.sort}  / filter  n slowest  enter open  p pause"


def _help(charset: Charset) -> list[Line]:
    return [[(charset.fit(key, 22), "bold"), (charset.of(text), "")] for key, text in HELP]


# -- plain text ------------------------------------------------------------------------------------


def plain_lines(run: RunNow, *, verdict: Verdict | None, width: int | None) -> Iterator[Line]:
    """One update as a block of lines; not cut without a terminal."""
    sentences = [(f"{plain(run.folder)}  {title(run)}  {_clock(run)}", "bold"), impression(run)]
    if verdict is not None:
        sentences.append((verdict_sentence(verdict, run), ""))
    sentences.append((device_line(run, verdict), ""))
    sentences += [(remark, "yellow") for remark in remarks(run)]
    for text, style in sentences:
        if text:
            yield fitted([(plain(text), style)], width)
    if run.ranks:
        yield from _plain_table(run, width)


def _plain_table(run: RunNow, width: int | None) -> Iterator[Line]:
    rows = TopView(folds=len(run.ranks) > _MOST_SINGLE).rows(run, len(run.ranks))
    columns = [
        Column(
            column.heading,
            right=column.right,
            keep_end=column.keep_end,
            optional=key in ("gpu", "behind"),
        )
        for key, column in COLUMNS.items()
    ]
    columns[-1].heading = "steps/s"  # the screen has room for less
    narrowing = (
        ("last collective", 20),
        ("module", 12),
        ("line", 16),
        ("GPU at", 16),
        ("pass", 0),
        ("module", 0),
        ("last collective", 0),
        ("GPU behind", 0),
        ("GPU at", 0),
        ("line", 0),
    )
    lines = (
        [_mark(row), *(plain(column.text(row, 1000)) for column in COLUMNS.values())]
        for row in rows
    )
    styles = ["bold", *(row_style(row.cohort.lead) for row in rows)]
    for line, style in zip(
        table([Column("!"), *columns], lines, width=width, narrowing=narrowing),
        styles,
        strict=True,
    ):
        yield [(text, "bold red" if style == "culprit" else style) for text, _ in line]


def _mark(row: TopRow) -> str:
    return "!" if row.cohort.lead.is_trouble else ""
