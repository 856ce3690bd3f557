"""Records captures and replays of CUDA graphs.

A capture has a begin and an end record. A replay has a record with the place of the CPU. One record
for each collective of the graph follows, with the place where the collective was captured. Marks on
the device before and after the replay show whether the device has reached and finished it. There
are no marks inside a graph.
"""

from __future__ import annotations

import json
import time

import torch

from torchwhere.blackbox.file_format import EntryType
from torchwhere.core.errors import described
from torchwhere.core.events import Kind
from torchwhere.core.place import line_text
from torchwhere.hooks import python_stack
from torchwhere.hooks.cuda_graphs import CapturedGraph, CudaGraphs
from torchwhere.hooks.device import DONE, REACHED, DeviceHook, ReplayMark
from torchwhere.hooks.error_limiter import log
from torchwhere.hooks.locate import PlaceIds
from torchwhere.recorder.collectives import CollectiveRecorder
from torchwhere.recorder.recorder import Recorder

_NO_RECORD = -1


class CudaGraphRecorder:
    """Writes the records of captures and replays."""

    def __init__(
        self,
        recorder: Recorder,
        collectives: CollectiveRecorder,
        graphs: CudaGraphs,
        device: DeviceHook,
    ) -> None:
        self._recorder = recorder
        self._collectives = collectives
        self._graphs = graphs
        self._device = device
        self._box = recorder.box
        self._counter = recorder.box.counter
        self._here = recorder.locator.threads.here
        self._has_warned = False

    def capture_begins(self, captured: CapturedGraph) -> None:
        """Record that a capture has begun on the current stream."""
        self._collectives.choose_kernel()
        # the caller's frame: a frame that holds itself keeps the graph alive until a collection
        frame = python_stack.caller(1)
        line, _ = self._recorder.line_and_graph(frame)
        text = self._recorder.locator.text_of(line)
        captured.captured_at = line_text(text) if text is not None else None
        captured.device_index = _current_device()
        captured.entry = self._entry(captured)
        self._recorder.event(Kind.CAPTURE_BEGIN, subject=captured.entry, frame=frame)

    def capture_ends(self, captured: CapturedGraph, error: BaseException | None) -> None:
        """Record that a capture has ended. A graph whose capture failed cannot be replayed."""
        self._collectives.choose_kernel()
        entry = captured.entry if error is None else self._entry(captured, error=described(error))
        self._recorder.event(Kind.CAPTURE_END, subject=entry, extra=len(captured.collectives))

    def _entry(self, captured: CapturedGraph, **fields: str) -> int:
        about = {"cuda_graph": captured.number, "captured_at": captured.captured_at}
        return self._box.intern(EntryType.CUDA_GRAPH, json.dumps(about | fields))

    def replays(self, captured: CapturedGraph | None) -> list[ReplayMark]:
        """Record a replay and its collectives, just before it is launched.

        Returns the marks to set on the device after the launch.
        """
        device_index = captured.device_index if captured is not None else _current_device()
        outer = self._graphs.capture_of(device_index)
        if outer is not None:  # the replay becomes part of another graph, and does not run now
            outer.collectives += captured.collectives if captured is not None else ()
            return []
        t_ns, track = time.monotonic_ns(), self._here()
        place_ids = self._recorder.locator.place_ids(track)
        line, graph = self._recorder.line_and_graph(python_stack.caller(1))
        number = self._recorder.write(
            Kind.REPLAY,
            track,
            place_ids,
            line=line,
            graph=graph,
            subject=0 if captured is None else captured.entry,
            extra=0 if captured is None else len(captured.collectives),
            t_ns=t_ns,
        )
        totals: dict[int, int] = {}
        if captured is None:
            self._warn()
        elif captured.collectives:
            totals = self._collectives.replay(captured, track, t_ns)
        if device_index < 0 or not self._device.is_on:
            return []
        return self._marks(device_index, place_ids, number, totals, t_ns)

    def _marks(
        self,
        device_index: int,
        place_ids: PlaceIds,
        number: int,
        totals: dict[int, int],
        t_ns: int,
    ) -> list[ReplayMark]:
        """Mark the replay on the device, once for each stream of collectives in it.

        Returns the marks to set at its end. A graph without collectives needs none: a mark costs
        about 2 us, and the next one on the stream shows that the replay is over.
        """
        step = self._counter.step
        # the last record of a lane must be that of a collective, or of a replay with collectives
        record = number if totals else _NO_RECORD
        marks = [
            ReplayMark(device_index, record, counter, total, place_ids.packed, step, t_ns)
            for counter, total in (totals or {-1: 0}).items()
        ]
        for mark in marks:
            self._device.mark_replay(mark, REACHED)
        return marks if totals else []

    def replayed(self, marks: list[ReplayMark]) -> None:
        """Mark the end of a replay that was launched."""
        for mark in marks:
            self._device.mark_replay(mark._replace(t_ns=time.monotonic_ns()), DONE)

    def _warn(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "torchwhere: the job replays a CUDA graph that was captured before the watch began. Its"
            " collectives are not recorded. Start the watch before the capture to record them."
        )


def _current_device() -> int:
    """The index of the current GPU; -1 if this process does not use one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return -1
    return torch.cuda.current_device()
