"""A monitor's diary: what the ranks of its host did last, for a doctor who comes when a box is gone.

Takes boxes, writes one letter (`hearing/letter.py`), a few KB a rank, into the run's folder. It is written whenever the boxes
were read anyway, every few seconds, and once in every silence: a rank that hangs does so in one.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path

from torchwhere.blackbox.box import Box
from torchwhere.diagnose.hearing.letter import CALLS, MOST_BYTES, Letter, transcribe, write_letter
from torchwhere.monitor.role import write_whole
from torchwhere.recollection import LETTER_SUFFIX, MONITOR

SILENCE_S = 1.0
OFTEN_S = 5.0
_MOST_SHARE = 0.02  # of one core
MOST_RANKS = 256  # that are read at once; no host has as many


class Diary:
    """One letter, written over and over."""

    def __init__(self, folder: Path, *, teller: str = MONITOR) -> None:
        self.path = folder / f"{teller}-{socket.gethostname()}{LETTER_SUFFIX}"
        self._written_at = 0.0  # monotonic: before the boxes were read
        self._next_at = 0.0

    def is_due(self, moved_at: float) -> bool:
        """Whether what has moved since it was written down, last at `moved_at`, has come to rest, or goes on for too long."""
        now = time.monotonic()
        is_time = now - moved_at > SILENCE_S or now - self._written_at > OFTEN_S
        return is_time and self._written_at < moved_at and now > self._next_at

    def write(self, boxes: Mapping[int, Box], *, read_ns: int, read_at: float) -> None:
        """What boxes say that were read not before `read_ns` by the wall clock, `read_at` by the monotonic one."""
        if not boxes:
            return
        self._written_at = read_at
        data, calls = b"", CALLS
        while not data or (len(data) > MOST_BYTES and calls > 1):
            transcript, is_cut = transcribe(boxes.values(), calls=calls)
            data, calls = write_letter(Letter(socket.gethostname(), transcript, is_cut=is_cut, read_ns=read_ns)), calls // 2
        write_whole(self.path, data)
        self._next_at = time.monotonic() + (time.monotonic() - read_at) / _MOST_SHARE
