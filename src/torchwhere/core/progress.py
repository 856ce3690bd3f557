"""Reports how much of a long task is done."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]  # gets the number of items done so far, and of all items


class ProgressCounter:
    """Counts the items that are done, and reports each new count."""

    def __init__(self, total: int, on_progress: Progress | None) -> None:
        self._done, self._total, self._on_progress = 0, total, on_progress

    def add(self, items: int = 1) -> None:
        self._done = min(self._done + items, self._total)
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)
