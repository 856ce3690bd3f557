"""A progress bar, on a terminal; nothing elsewhere, and nothing for what is done at once."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_AT_ONCE_S = 0.5  # what takes no longer has no bar


@contextlib.contextmanager
def progress_bar(text: str) -> Iterator[Callable[[int, int], None] | None]:
    """Gives what is to be told how much is done, of how much; None where nobody looks. It leaves no line behind."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task, begin = progress.add_task(text, total=None), time.monotonic()

    is_over = False

    def tell(done: int, total: int) -> None:
        if is_over:  # somebody goes on reading, and prints
            return
        if not progress.live.is_started and done < total and time.monotonic() - begin > _AT_ONCE_S:
            progress.start()
        progress.update(task, completed=done, total=total)

    try:
        yield tell
    finally:
        is_over = True
        progress.stop()
