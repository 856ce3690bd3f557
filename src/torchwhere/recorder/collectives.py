"""Records collectives: place, beneficiary and number of each call.

Takes calls from the collective hook, on any thread. Writes one record per call, and updates the
counter of the call's stream and the cursor of the thread. Keeps the last collectives for the note
on an exception. Hot path: the step of a small model waits for `bucket`.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from torchwhere.blackbox.file_format import (
    CALL_MASK,
    COUNTER_COUNT,
    COUNTER_RECORD,
    COUNTER_TIME,
    CURSOR_LINE,
    CURSOR_RECORD,
    CURSOR_TIME,
    FLAG_INFERRED,
    FLAG_LOADS,
    FLAG_REPLAYED,
    FLAG_SAVES,
    FLAG_UNKNOWN,
    NO_CALL,
    EntryType,
)
from torchwhere.blackbox.step_clock import StepPart
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import Kind
from torchwhere.core.place import Pass
from torchwhere.hooks import _torch, compiled_graphs
from torchwhere.hooks.collectives import CollectiveCall
from torchwhere.hooks.cuda_graphs import CapturedCollective, CapturedGraph, CudaGraphs
from torchwhere.hooks.ddp import Bucket
from torchwhere.hooks.device import DeviceHook
from torchwhere.hooks.locate import Locator, PlaceIds
from torchwhere.hooks.threads import Track

if TYPE_CHECKING:
    from torchwhere.native import extension

Tap = Callable[[int, CollectiveCall], None]  # called with the number of the record, and the call

_COLLECTIVE = int(Kind.COLLECTIVE)
_REMEMBERED = 3  # collectives, for the note on an exception
_FLAGS = {
    StepPart.DATA: FLAG_LOADS,
    StepPart.CHECKPOINT: FLAG_SAVES,
    StepPart.EVALUATION: FLAG_LOADS | FLAG_SAVES,
}
_PART_FLAGS = tuple(_FLAGS.get(part, 0) for part in StepPart)


class CollectiveRecorder:
    """Writes one record for each collective that this process issues."""

    def __init__(
        self,
        box: BoxWriter,
        locator: Locator,
        device: DeviceHook,
        cuda_graphs: CudaGraphs,
    ) -> None:
        self._box = box
        self._locator = locator
        self._device = device
        self._cuda_graphs = cuda_graphs
        self._counter = box.counter
        self._clock = box.clock
        self._native = box.native
        # number of the record, op, index, group
        self._last: deque[tuple[int, str, int, str]] = deque(maxlen=_REMEMBERED)
        # op and group of the collectives that the native extension records by itself
        self._labels: list[tuple[str, str]] = []
        self._unit_ids: dict[str, int] = {}
        self._taps: list[Tap] = []
        self._here = locator.threads.here
        self._node = _torch.getter("current_node")

    @property
    def taps(self) -> list[Tap]:
        """Functions that are called for every collective, after its record is written."""
        return self._taps

    @taps.setter
    def taps(self, taps: list[Tap]) -> None:
        self._taps = taps
        self.choose_kernel()

    def choose_kernel(self) -> None:
        """Send all collectives to Python while a tap or the capture of a CUDA graph needs them."""
        if self._native is not None:
            self._native.defer_to_python(
                bool(self._taps or self._cuda_graphs.active or self._locator.compiling)
            )

    def last(self) -> list[str]:
        """Return the last collectives of this process as text, the oldest first."""
        last = list(self._last)
        if self._native is not None:  # those that the extension recorded without Python
            last += [
                (number, self._labels[label][0], index, self._labels[label][1])
                for number, index, label in self._native.recent()
            ]
        return [f"{op} #{index} on {group}" for _, op, index, group in sorted(last)[-_REMEMBERED:]]

    def collective(self, call: CollectiveCall) -> None:
        """Record a collective that is about to be launched."""
        locator = self._locator
        stack = call.stack
        track = self._here()
        track.may_issue = True
        if call.bucket is not None:
            place_ids = self._place_ids_of_bucket(call.bucket, track)
        else:
            place_ids = locator.place_ids(track)
        if place_ids.flags & FLAG_UNKNOWN and stack.unit is not None:
            place_ids = self._place_ids_of_unit(stack.unit, place_ids)
        graph = stack.graph
        if graph is None and place_ids.pass_ == Pass.BACKWARD and not place_ids.param:
            graph = compiled_graphs.backward_graph(self._node())
        line = locator.line_id(stack) or self._line_of_backward(track, place_ids)
        graph_id = 0
        if graph is not None or locator.compiling:
            graph_id = locator.graph_id(graph)
        beneficiary = self._beneficiary(call)
        self._record(call, track, place_ids, line, graph_id, beneficiary)
        if self._native is not None and call.may_repeat and not locator.compiling:
            self._teach_call(call, locator.line_id(stack), beneficiary)

    def bucket(self, bucket: Bucket) -> None:
        """Record that DDP reduces a bucket again: only the number of the call is new.

        Costs about half as much as `collective`.
        """
        track = self._here()
        place_ids = bucket.place_ids or self._place_ids_of_bucket(bucket, track)
        line = self._line_of_backward(track, place_ids)
        self._record(bucket.call, track, place_ids, line, 0, bucket.entry)
        if self._native is not None and bucket.place_ids is not None:
            self._teach_bucket(bucket)

    def _record(
        self,
        call: CollectiveCall,
        track: Track,
        place_ids: PlaceIds,
        line: int,
        graph: int,
        beneficiary: int,
    ) -> None:
        """Write the record and count the call. Touches little: cold Python code is slow."""
        if self._cuda_graphs.active:
            captured = self._cuda_graphs.capture_of(call.device_index)
            if captured is not None:
                self._capture(captured, call, place_ids, line, graph, beneficiary)
                return
        stream = call.stream
        t_ns = time.monotonic_ns()
        words = self._box.words
        index = next(stream.numbers)
        number = self._box.record(
            _COLLECTIVE,
            t_ns,
            place_ids.pass_,
            place_ids.flags | call.flags | _PART_FLAGS[self._clock.part],
            track.number,
            self._counter.step,
            place_ids.module,
            place_ids.call,
            line,
            graph,
            call.signature,
            beneficiary,
            place_ids.param,
            index,
        )
        counter = stream.counter
        cursor = track.cursor
        if counter is not None:
            words[counter + COUNTER_COUNT] = index + 1
            words[counter + COUNTER_TIME] = t_ns
            words[counter + COUNTER_RECORD] = number
        words[cursor + CURSOR_RECORD] = number
        # In backward nothing else writes the place of the thread: readers of the cursor need it.
        if place_ids.pass_ == Pass.BACKWARD:
            words[cursor] = place_ids.packed
            words[cursor + CURSOR_TIME] = t_ns
        self._last.append((number, call.op.name, index, call.group.title))
        for tap in self._taps:
            tap(number, call)
        if call.device_index < 0 or not self._device.is_on:
            return
        self._device.reach(
            call.device_index,
            number,
            -1 if counter is None else counter,
            index + 1,
            place_ids.packed,
            self._counter.step,
            t_ns,
            call.end,
        )

    # -- CUDA graphs -------------------------------------------------------------------------------

    def _capture(
        self,
        captured: CapturedGraph,
        call: CollectiveCall,
        place_ids: PlaceIds,
        line: int,
        graph: int,
        beneficiary: int,
    ) -> None:
        """Add a collective to the CUDA graph that is captured. It does not run now, so it has no
        record and no number."""
        captured.collectives.append(
            CapturedCollective(
                call.without_objects(),
                call.stream,
                place_ids.pass_,
                place_ids.flags | call.flags | FLAG_REPLAYED,
                (
                    place_ids.module,
                    place_ids.call,
                    line,
                    graph,
                    call.signature,
                    beneficiary,
                    place_ids.param,
                ),
            )
        )

    def replay(self, captured: CapturedGraph, track: Track, t_ns: int) -> dict[int, int]:
        """Record the collectives of a CUDA graph that is about to be replayed.

        Costs about half a microsecond for each collective. Returns the number of collectives that
        were issued in each stream of the graph, including these, by the counter of the stream; -1
        is the key of streams without a counter.
        """
        record, words, taps = self._box.record, self._box.words, self._taps
        thread, step, number = track.number, self._counter.step, 0
        lasts: dict[int | None, tuple[int, int]] = {}  # counter to number in the stream, and record
        recent: deque[tuple[int, int, CollectiveCall]] = deque(maxlen=_REMEMBERED)
        for call, stream, pass_, flags, others in captured.collectives:
            index = next(stream.numbers)
            number = record(_COLLECTIVE, t_ns, pass_, flags, thread, step, *others, index)
            lasts[stream.counter] = index, number
            recent.append((number, index, call))
            if taps:
                for tap in taps:
                    tap(number, call)
        for counter, (index, last) in lasts.items():
            if counter is not None:
                words[counter + COUNTER_COUNT] = index + 1
                words[counter + COUNTER_TIME] = t_ns
                words[counter + COUNTER_RECORD] = last
        if recent:
            words[track.cursor + CURSOR_RECORD] = number
        self._last.extend(
            (number, call.op.name, index, call.group.title) for number, index, call in recent
        )
        return {-1 if counter is None else counter: last[0] + 1 for counter, last in lasts.items()}

    # -- the native extension ----------------------------------------------------------------------

    def _teach_call(self, call: CollectiveCall, line: int, beneficiary: int) -> None:
        """Let the native extension record the next calls like this one by itself."""
        stack, native_box = call.stack, self._box.native_box
        has_name = beneficiary or stack.unit is None
        if self._native is None or native_box is None or not has_name:
            return
        if stack.unit is None and stack.variables:
            return
        self._native.learn_call(
            native_box,
            call.frame,
            self._label_of(call),
            cast("extension.Count", call.stream.numbers),
            -1 if call.stream.counter is None else call.stream.counter,
            call.device_index,
            call.end,
            _COLLECTIVE,
            call.flags,
            line,
            0 if stack.graph is None else self._locator.graph_id(stack.graph),
            call.signature,
            beneficiary,
        )

    def _label_of(self, call: CollectiveCall) -> int:
        """Return the index of op and group in `_labels`."""
        label = (call.op.name, call.group.title)
        if label not in self._labels:
            self._labels.append(label)
        return self._labels.index(label)

    # -- buckets of DDP ----------------------------------------------------------------------------

    def _teach_bucket(self, bucket: Bucket) -> None:
        """Let the native extension record the next all-reduces of this bucket by itself."""
        call, place_ids = bucket.call, bucket.place_ids
        stream = call.stream
        buckets: extension.Buckets = bucket.progress
        buckets.learn(
            bucket.index,
            self._label_of(call),
            cast("extension.Count", stream.numbers),
            -1 if stream.counter is None else stream.counter,
            _COLLECTIVE,
            place_ids.pass_,
            place_ids.flags | call.flags,
            place_ids.module,
            place_ids.call & CALL_MASK,
            call.signature,
            bucket.entry,
            place_ids.param,
        )

    # -- places ------------------------------------------------------------------------------------

    def _place_ids_of_bucket(self, bucket: Bucket, track: Track) -> PlaceIds:
        param, bucket.param = bucket.param, None
        if param is None:  # launched at the end of the backward, not by a parameter
            return self._locator.place_ids(track)
        place_ids = bucket.place_ids = self._locator.place_ids_of_param(param)
        return place_ids

    def _place_ids_of_unit(self, unit: torch.nn.Module, place_ids: PlaceIds) -> PlaceIds:
        """Return the place of an FSDP1 reduction: only the unit knows the flat parameter whose
        gradient starts it."""
        names = self._locator.names.module_names(unit)
        if not names:
            return place_ids
        return PlaceIds(
            place_ids.pass_, self._locator.module_id(names[0]), NO_CALL, 0, FLAG_INFERRED
        )

    def _line_of_backward(self, track: Track, place_ids: PlaceIds) -> int:
        """Return the line that called backward: a thread of the engine has no useful Python
        stack."""
        if place_ids.pass_ != Pass.BACKWARD:
            return 0
        words, main = self._box.words, self._locator.threads.main
        line: int = words[track.cursor + CURSOR_LINE]
        return line or (words[main.cursor + CURSOR_LINE] if main is not None else 0)

    # -- beneficiaries -----------------------------------------------------------------------------

    def _beneficiary(self, call: CollectiveCall) -> int:
        """Return the id of what the call serves: an FSDP unit, parameters, or a DDP bucket."""
        stack = call.stack
        if stack.unit is not None:
            names = self._locator.names.module_names(stack.unit)
            return self._unit_id(names[0]) if names else 0
        if stack.variables is not None:
            return self._id_of_params(_params_in(stack.variables))
        if call.bucket is None:
            return 0
        bucket = call.bucket
        bucket.entry = bucket.entry or self._box.intern(
            EntryType.BENEFICIARY, json.dumps(bucket.names)
        )
        return bucket.entry

    def _unit_id(self, unit: str) -> int:
        unit_id = self._unit_ids.get(unit)
        if unit_id is None:
            unit_id = self._box.intern(EntryType.BENEFICIARY, json.dumps(unit))
            self._unit_ids[unit] = unit_id
        return unit_id

    def _id_of_params(self, params: list[torch.Tensor]) -> int:
        all_names = map(self._locator.names.known_param_names, params)
        names = [names[0] for names in all_names if names]
        return self._box.intern(EntryType.BENEFICIARY, json.dumps(names)) if names else 0


def _params_in(variables: dict[str, Any]) -> list[torch.Tensor]:
    """Return the parameters in the variables of a frame: those of a DDP bucket that a communication
    hook got, or a list of them."""
    bucket, params = variables.get("bucket"), variables.get("params")
    if bucket is not None and hasattr(bucket, "parameters"):
        return list(bucket.parameters())
    if not isinstance(params, (list, tuple)):
        return []
    return [param for param in params if isinstance(param, torch.Tensor)]
