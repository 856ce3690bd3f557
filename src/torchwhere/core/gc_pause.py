"""Pauses Python's cycle collector while code creates millions of objects without cycles: the
collector would traverse them in vain."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the collector in this block. Restores the setting found at the start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
