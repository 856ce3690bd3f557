"""What happens to an error of torchwhere's own: it is counted, said once, and after a few its sense
switches itself off.

Only `Exception` is ever caught: a KeyboardInterrupt belongs to the user. Said through `logging`,
never `warnings`, which a job may have turned into exceptions.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from torchwhere.hooks import _torch

log = logging.getLogger("torchwhere")

FEW = 3


class ErrorLimiter:
    """The errors of one sense. Call it with an exception; `switch_off` is called at the third."""

    def __init__(self, sense: str, switch_off: Callable[[], None]) -> None:
        self.sense = sense
        self.count = 0
        # the watch has ended; a thread that was inside a call finds nothing to write to
        self.is_over = False
        self._switch_off = switch_off

    @_torch.unseen
    def __call__(self, error: Exception) -> None:
        if self.is_over:
            return
        self.count += 1
        with contextlib.suppress(Exception):  # the job's own logging handlers may raise
            if self.count == 1:
                log.warning(
                    "torchwhere: the sense for %s failed (%s: %s). The training is not affected;"
                    " after %d failures this sense switches itself off.",
                    self.sense,
                    type(error).__name__,
                    error,
                    FEW,
                )
            if self.count == FEW:
                self._switch_off()
