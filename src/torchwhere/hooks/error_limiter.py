"""Limits the errors of torchwhere itself: logs the first error of a hook, removes the hook after
the third.

Hooks catch only `Exception`: a KeyboardInterrupt belongs to the user. Errors go to `logging`, never
to `warnings`, which a job may have turned into exceptions.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from torchwhere.hooks import _torch

log = logging.getLogger("torchwhere")

MAX_ERRORS = 3


class ErrorLimiter:
    """Counts the errors of one hook, and calls `remove` at the third.

    Call it with an exception, or run the code of the hook inside it: `with errors:`. An error then
    ends the block and goes no further. A hot path has its own `try`, which takes 0.1 us less.
    """

    def __init__(self, hook: str, remove: Callable[[], None]) -> None:
        self.hook = hook
        self.count = 0
        # set at the end of the watch: a thread that is still inside a hook then finds no box
        self.is_over = False
        self._remove = remove

    def __enter__(self) -> None:
        """Begin a block."""

    @_torch.unseen
    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if isinstance(error, Exception):
            self(error)
            return True
        return False

    @_torch.unseen
    def __call__(self, error: Exception) -> None:
        if self.is_over:
            return
        self.count += 1
        with contextlib.suppress(Exception):  # a logging handler of the job may raise
            if self.count == 1:
                log.warning(
                    "torchwhere: the hook for %s failed (%s: %s). The training is not affected;"
                    " after %d failures torchwhere removes this hook.",
                    self.hook,
                    type(error).__name__,
                    error,
                    MAX_ERRORS,
                )
            if self.count == MAX_ERRORS:
                self._remove()
