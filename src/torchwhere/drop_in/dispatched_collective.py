"""The collective that a dispatch mode sees on a thread, until a kernel below reports it.

A kernel on the `BackendSelect` key reports the same collective, unless a dispatch mode or a tensor
subclass answers it above that key, as `LocalTensorMode` does. `LocalTensorMode` may also run the
collective once for each rank that it simulates. So a collective that the mode sees counts once:
with the first report, or, without a report, when it is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torchwhere.drop_in.counted_ops import COUNTED_AS
from torchwhere.hooks.compilation import being_compiled


class DispatchedCollective(threading.local):
    """The collective that the dispatch mode runs on this thread; `packet` is None outside one."""

    def __init__(self, on_unreported: Callable[[Any], None]) -> None:
        self._on_unreported = on_unreported
        self.packet: Any = None
        self.is_reported = False

    def begin(self, func: Any) -> None:
        """Remember that `func` is about to run."""
        self.packet, self.is_reported = COUNTED_AS.get(func.name()), False

    def end(self, *, is_done: bool) -> None:
        """Count the collective if no kernel reported it. `is_done` is false if it raised."""
        packet, self.packet = self.packet, None
        if packet is not None and is_done and not self.is_reported and being_compiled() is None:
            self._on_unreported(packet)
