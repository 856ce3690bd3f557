"""`torchwhere top` on a terminal and into a pipe: polls the ranks, shows them, handles keys.

`poller.py` gives the state of the ranks, `background_doctor.py` the verdict, `render/top.py` the
lines; `render/screen.py` paints them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.reader import read_box
from torchwhere.core.errors import TorchwhereError, nothing_recorded
from torchwhere.diagnose.live.run import RunNow
from torchwhere.gpus.samples import Gpu, gpus_of, read_gpus
from torchwhere.render.lines import Line
from torchwhere.render.screen import Screen, has_colour, is_ascii
from torchwhere.render.top import body_height, screen_lines
from torchwhere.render.top_detail import detail_lines
from torchwhere.render.top_rows import Charset
from torchwhere.render.top_view import TopView
from torchwhere.top.background_doctor import BackgroundDoctor
from torchwhere.top.poller import RunPoller

_MOST_SHARE = 0.5  # of the time: a large job, whose polls take long, is polled less often
_READ_S = 1.0  # between two readings of the box whose page is open
_WHOLE_S = 120.0  # for one printed update: there are no keys to handle meanwhile
_INTERVAL_S = 0.5


def watch_screen(folder: str | Path, *, stall_s: float, interval_s: float) -> None:
    """Show the live screen until the user presses `q`."""
    screen = Screen(colour=has_colour())
    app = TopApp(folder, screen, stall_s=stall_s, interval_s=interval_s)
    try:
        with screen.taken():
            app.watch()
    finally:
        app.close()


class TopApp:
    """A poller, a background doctor, and a screen to show them on."""

    def __init__(
        self, folder: str | Path, screen: Screen, *, stall_s: float, interval_s: float
    ) -> None:
        self._screen, self._interval_s = screen, interval_s
        self._poller = RunPoller(folder)
        self._doctor = BackgroundDoctor(folder, stall_s=stall_s)
        self._view, self._charset = TopView(), Charset(is_ascii=is_ascii())
        self._run = RunNow(str(folder), time.time_ns())
        self._box: tuple[int, float, Box | None] = (-1, 0.0, None)  # rank, when it was read, box
        self._gpus: list[Gpu] = []  # of that rank

    def close(self) -> None:
        self._doctor.close()

    def watch(self) -> None:
        due_s = 0.0
        while True:
            begin = time.monotonic()
            if begin >= due_s:
                if not self._view.is_paused:
                    self._poll()
                due_s = begin + max(self._interval_s, (time.monotonic() - begin) / _MOST_SHARE)
            width, height = self._paint()
            for key in self._screen.keys(due_s - time.monotonic()):
                room = body_height(self._run, self._doctor.verdict, width, height, self._charset)
                if not self._view.press(key, self._run, room):
                    return

    def _poll(self) -> None:
        self._run = self._poller.poll(most_s=self._interval_s / 2)
        if self._run.ranks and not self._run.unread:
            self._doctor.update(self._run.troubled)

    def _paint(self) -> tuple[int, int]:
        width, height = self._screen.size
        page = self._detail(width) if self._view.page == "detail" else []
        lines = screen_lines(
            self._run,
            self._view,
            verdict=self._doctor.verdict,
            width=width,
            height=height,
            charset=self._charset,
            page=page,
        )
        self._screen.paint(lines)
        return width, height

    def _detail(self, width: int) -> list[Line]:
        number, now = self._view.detail_of, time.monotonic()
        rank = next((rank for rank in self._run.ranks if rank.rank == number), None)
        if rank is None:
            return [[(f"rank {number} is no longer in the run", "bold")]]
        if self._box[0] != number or (now > self._box[1] + _READ_S and not self._view.is_paused):
            self._box = number, now, _read(rank.live_box.path)
            self._gpus = gpus_of(rank.live_box.meta, read_gpus(self._poller.folder))
        lines = detail_lines(
            rank,
            self._box[2],
            verdict=self._doctor.verdict,
            width=width,
            charset=self._charset,
            gpus=self._gpus,
        )
        return list(lines)


def _read(path: Path) -> Box | None:
    try:
        return read_box(path)
    except TorchwhereError:
        return None


Update = tuple[RunNow, dict[str, Any] | None]


def updates(
    folder: str | Path, *, stall_s: float, interval_s: float | None, count: int | None
) -> Iterator[Update]:
    """Poll the run again and again, until the job is over or `count` updates are made.

    Each update has the last verdict. Without an interval and a count there is one update, with the
    verdict on it. Raises `TorchwhereError` if there is no run in that case; otherwise waits for
    one.
    """
    poller, doctor = RunPoller(folder), BackgroundDoctor(folder, stall_s=stall_s)
    is_once = interval_s is None and count is None
    pause_s = interval_s if interval_s is not None else _INTERVAL_S
    try:
        for number in itertools.count(1):
            begin = time.monotonic()
            run = poller.poll(most_s=_WHOLE_S)
            is_last = is_once or run.is_over or number == count
            if run.problem is not None and (is_last or run.ranks):
                raise _nothing_to_show(run.problem, run.folder)
            if run.ranks and not run.unread:
                doctor.update(run.troubled)
                if is_last:
                    doctor.wait()
            yield run, doctor.verdict
            if is_last:
                return
            took_s = time.monotonic() - begin
            time.sleep(max(pause_s, took_s / _MOST_SHARE) - took_s)
    finally:
        doctor.close()


def _nothing_to_show(problem: str, folder: str) -> TorchwhereError:
    if problem.endswith(" yet"):
        return nothing_recorded(problem.removesuffix(" yet"), folder)
    return TorchwhereError(problem)
