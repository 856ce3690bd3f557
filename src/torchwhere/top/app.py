"""`torchwhere top` on a terminal, and into a pipe: visits the ranks, shows what they do, obeys
keys.

What is seen comes from `ward.py`, the verdict from `on_call.py`, the lines from `render/top.py`;
`render/screen.py` paints them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.reader import read_box
from torchwhere.core.errors import TorchwhereError
from torchwhere.diagnose.live.run import RunNow
from torchwhere.render.screen import Screen, has_colour, is_ascii
from torchwhere.render.text import Line
from torchwhere.render.top import body_height, screen_lines
from torchwhere.render.top_detail import detail_lines
from torchwhere.render.top_rows import Charset
from torchwhere.render.top_view import View
from torchwhere.top.background_doctor import BackgroundDoctor
from torchwhere.top.poller import RunPoller

_MOST_SHARE = 0.5  # of the time: of a job so large that a visit takes long, there are fewer
_READ_S = 1.0  # the box of a rank whose page is open is read this often
_WHOLE_S = 120.0  # for a look that is printed: nobody waits for keys to be obeyed


def watch_screen(folder: str | Path, *, stall_s: float, interval_s: float) -> None:
    """Until somebody presses `q`."""
    screen = Screen(colour=has_colour())
    live = TopApp(folder, screen, stall_s=stall_s, interval_s=interval_s)
    try:
        with screen.taken():
            live.watch()
    finally:
        live.close()


class TopApp:
    """A ward, a doctor on call, and a screen to show them on."""

    def __init__(
        self, folder: str | Path, screen: Screen, *, stall_s: float, interval_s: float
    ) -> None:
        self._screen, self._interval_s = screen, interval_s
        self._ward = RunPoller(folder, stall_s=stall_s)
        self._doctor = BackgroundDoctor(folder, stall_s=stall_s)
        self._view, self._snapshots = View(), Charset(is_ascii=is_ascii())
        self._run = RunNow(str(folder), time.time_ns())
        self._box: tuple[int, float, Box | None] = (-1, 0.0, None)

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
                room = body_height(self._run, self._doctor.verdict, width, height, self._snapshots)
                if not self._view.press(key, self._run, room):
                    return

    def _poll(self) -> None:
        self._run = self._ward.poll(most_s=self._interval_s / 2)
        if self._run.ranks and not self._run.unread:
            self._doctor.see(self._run.troubled)

    def _paint(self) -> tuple[int, int]:
        width, height = self._screen.size
        page = self._detail(width) if self._view.page == "detail" else []
        lines = screen_lines(
            self._run,
            self._view,
            verdict=self._doctor.verdict,
            width=width,
            height=height,
            snapshots=self._snapshots,
            page=page,
        )
        self._screen.paint(lines)
        return width, height

    def _detail(self, width: int) -> list[Line]:
        number, now = self._view.detail_of, time.monotonic()
        rank = next((rank for rank in self._run.ranks if rank.rank == number), None)
        if rank is None:
            return [[(f"rank {number} is not there any more", "bold")]]
        if self._box[0] != number or (now > self._box[1] + _READ_S and not self._view.is_paused):
            self._box = number, now, self._read(number)
        return list(
            detail_lines(
                rank,
                self._box[2],
                verdict=self._doctor.verdict,
                width=width,
                snapshots=self._snapshots,
            )
        )

    def _read(self, rank: int) -> Box | None:
        path = self._ward.path_of(rank)
        try:
            return read_box(path) if path is not None else None
        except TorchwhereError:
            return None


Look = tuple[RunNow, dict[str, Any] | None]


def looks(
    folder: str | Path, *, stall_s: float, interval_s: float | None, count: int | None
) -> Iterator[Look]:
    """One look after the other with the verdict there is, until the job is over, or so many.
    Without an interval: one, with the verdict on it. Raises `TorchwhereError` where there is no run
    then; otherwise it waits for one."""
    poller, doctor = RunPoller(folder, stall_s=stall_s), BackgroundDoctor(folder, stall_s=stall_s)
    is_once = interval_s is None and count is None
    pause_s = interval_s if interval_s is not None else 0.5
    try:
        for number in itertools.count(1):
            begin = time.monotonic()
            run = poller.poll(most_s=_WHOLE_S)
            is_last = is_once or run.is_over or number == count
            if run.problem is not None and (is_last or run.ranks):
                raise TorchwhereError(_nothing(run))
            if run.ranks and not run.unread:
                doctor.see(run.troubled)
                if is_last:
                    doctor.wait()
            yield run, doctor.verdict
            if is_last:
                return
            took = time.monotonic() - begin
            time.sleep(max(pause_s, took / _MOST_SHARE) - took)
    finally:
        doctor.close()


def _nothing(run: RunNow) -> str:
    problem = run.problem or ""
    advice = (
        f". Record one with: torchwhere run --out {run.folder} train.py"
        if problem.endswith(" yet")
        else ""
    )
    return problem.removesuffix(" yet") + advice
