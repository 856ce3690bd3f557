"""Samples the stack of the thread that trains: the doctor then names the line where a late rank
loses its time.

The heartbeat thread calls `take` a few times a second (`heartbeat.py`). A rank does not know
whether it is late: only a comparison of all ranks shows it, later. So every rank takes samples, and
they are rare enough for every job. A sample is one record: the pass and the module of the thread,
the part of the step, the innermost frame of the user's code, and the innermost frame of a library
that this frame has called.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import islice
from types import FrameType

from torchwhere.blackbox.file_format import MODULE_SHIFT, EntryType, pass_of
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import SideKind
from torchwhere.hooks import python_stack
from torchwhere.hooks.locate import Locator

LEAST_RECORDS = 1 << 14  # a smaller ring has no room for samples: they would push out events
_MOST_FRAMES = 256  # of a stack
_MOST_PLACES = 1 << 12  # distinct frames; samples in further ones have no line
_PACKAGES = f"site-packages{os.sep}"


def sample_taker(box: BoxWriter, locator: Locator) -> Callable[[], None] | None:
    """The function that takes a sample; None if the ring is too small for samples."""
    return StackSampler(box, locator).take if box.geometry.capacity >= LEAST_RECORDS else None


class StackSampler:
    """Writes samples of the thread that trains into the box."""

    def __init__(self, box: BoxWriter, locator: Locator) -> None:
        self._box = box
        self._locator = locator
        self._ids: dict[tuple[str, int, str], int] = {}

    def take(self) -> None:
        """Write one sample. Any other thread may call this."""
        track, thread = self._locator.threads.training(self._box.clock.clock_cursor)
        frame = sys._current_frames().get(thread)
        if track is None or frame is None:
            return
        users, librarys = self._frames(frame)
        place = track.top
        self._box.record(
            SideKind.SAMPLE,
            time.monotonic_ns(),
            pass_of(place),
            0,
            track.number,
            self._box.counter.step,
            place >> MODULE_SHIFT,
            0,
            0,
            0,
            users,
            librarys,
            0,
            self._box.clock.part,
        )

    def _frames(self, start: FrameType) -> tuple[int, int]:
        """The ids of the innermost frame of the user, and of the innermost frame of a library that
        it has called; 0 without such a frame.

        Reads no variables of a frame: that could keep tensors of the job alive.
        """
        library = 0
        for frame in islice(python_stack.outwards(start), _MOST_FRAMES):
            file = frame.f_code.co_filename
            if python_stack.is_users(file):
                return self._id(frame), library
            if not library and not python_stack.is_torchs(file):
                library = self._id(frame)
        return 0, library

    def _id(self, frame: FrameType) -> int:
        code = frame.f_code
        key = code.co_filename, frame.f_lineno, code.co_name
        entry_id = self._ids.get(key)
        if entry_id is None and len(self._ids) < _MOST_PLACES:
            file = key[0].rpartition(_PACKAGES)[2]
            line = python_stack.shortened(file, key[1] or 0, folder=self._locator.folder)
            entry_id = self._box.intern(EntryType.FRAME, json.dumps([line, key[2]]))
            self._ids[key] = entry_id
        return entry_id or 0
