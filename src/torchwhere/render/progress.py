"""A progress bar, on a terminal; nothing elsewhere, and nothing for what is done at once."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_AT_ONCE_S = 0.5  # what takes no longer has no bar
_OFTEN_S = 0.1  # it is drawn anew, as it is told; with no thread, which rich would not wait for


@contextlib.contextmanager
def progress_bar(text: str) -> Iterator[Callable[[int, int], None] | None]:
    """Gives what is to be told how much is done, of how much; None where nobody looks. It leaves no
    line behind."""
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
    is_over, drawn = False, begin

    def tell(done: int, total: int) -> None:
        nonlocal drawn
        if is_over:  # somebody goes on reading, and prints
            return
        now = time.monotonic()
        if not progress.live.is_started and done < total and now - begin > _AT_ONCE_S:
            progress.start()
        is_due = progress.live.is_started and now - drawn > _OFTEN_S
        drawn = now if is_due else drawn
        progress.update(task, completed=done, total=total, refresh=is_due)

    try:
        yield tell
    finally:
        is_over = True
        progress.stop()
