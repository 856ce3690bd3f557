"""A progress bar on a terminal; nothing elsewhere, and nothing for short work."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_SHORT_S = 0.5  # shorter work gets no bar
_REFRESH_S = 0.1  # redrawn by calls; a refresh thread of rich could outlive the command


@contextlib.contextmanager
def progress_bar(text: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function `on_progress(done, total)`, or None without a terminal. Leaves no line."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
    task, begin = progress.add_task(text, total=None), time.monotonic()
    is_over, drawn_at = False, begin

    def on_progress(done: int, total: int) -> None:
        nonlocal drawn_at
        if is_over:  # the caller still reads lazily, and prints
            return
        now = time.monotonic()
        if not progress.live.is_started and done < total and now - begin > _SHORT_S:
            progress.start()
        is_due = progress.live.is_started and now - drawn_at > _REFRESH_S
        drawn_at = now if is_due else drawn_at
        progress.update(task, completed=done, total=total, refresh=is_due)

    try:
        yield on_progress
    finally:
        is_over = True
        progress.stop()
