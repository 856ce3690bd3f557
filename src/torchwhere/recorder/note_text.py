"""The JSON text of a note, whose fields may contain tensors.

A small tensor of the CPU becomes its numbers. To read a tensor of an accelerator, the CPU would
have to wait for the device. So its numbers get placeholders, and the native extension replaces them
when the device has computed them (`native/note_numbers.h`). Larger tensors become a description.
"""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from torchwhere.blackbox.writer import BoxWriter

NOT_COMPUTED = "not computed yet"
MOST_NUMBERS = 16  # of one tensor
_MAX_TEXT = 1 << 14
_TOKEN = f"number {uuid4()}"  # in place of a number, until its offset is known
_QUOTED_TOKEN = json.dumps(_TOKEN)
_NUMBER_WIDTH = 24  # as in note_numbers.h
_PLACEHOLDER = json.dumps(NOT_COMPUTED).ljust(_NUMBER_WIDTH)
# Types that note_numbers.h can read.
_TYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


def json_text(fields: dict[str, Any]) -> str:
    """The text of an event, shortened field by field if it is too long for a box."""
    return NoteText(fields, reads_device=False).text


class NoteText:
    """The text of one note, and the tensors whose numbers it lacks.

    Args:
        fields: The fields of the note.
        reads_device: Whether numbers of the device can be read later.
    """

    def __init__(self, fields: dict[str, Any], *, reads_device: bool) -> None:
        self._tensors: list[torch.Tensor] = []
        self._offsets: list[int] = []
        self._reads_device = reads_device
        text = self._with_placeholders(json.dumps(fields, default=self._value))
        # The box stores a text completely or not at all.
        if len(text) > _MAX_TEXT:
            self._tensors = []
            short = {key: _described(value)[: _MAX_TEXT // 8] for key, value in fields.items()}
            text = json.dumps(dict(list(short.items())[:4]) | {"cut": True})
        self.text = text

    def complete(self, box: BoxWriter, position: int, place: int) -> None:
        """Replace the placeholders, as soon as the device has computed the numbers. `position` is
        that of the text in the box."""
        if self._tensors and box.native is not None and box.native_box is not None:
            at = box.geometry.texts_at + position % box.geometry.text_bytes
            addresses = [tensor._cdata for tensor in self._tensors]
            box.native.device_note(box.native_box, at, place, addresses, self._offsets)

    def _with_placeholders(self, text: str) -> str:
        first, *rest = text.split(_QUOTED_TOKEN)
        for part in rest:
            self._offsets.append(len(first))  # JSON is ASCII: also the offset in bytes
            first += _PLACEHOLDER + part
        return first

    def _value(self, value: Any) -> Any:
        """What JSON shows for a value of another type."""
        if not isinstance(value, torch.Tensor):
            return str(value)
        if value.device.type == "cpu":
            return _numbers(value)
        local = _readable(value) if self._reads_device else None
        if local is None:
            return _description(value)
        self._tensors.append(local)
        return np.full(tuple(local.shape), _TOKEN, dtype=object).tolist()


def _numbers(tensor: torch.Tensor) -> Any:
    """The numbers of a tensor of the CPU, or its text."""
    try:
        return tensor.tolist() if tensor.numel() <= MOST_NUMBERS else str(tensor)
    except Exception:  # a wrapper that has no numbers, as in vmap or under fake tensors
        return _description(tensor)


def _local(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that has the numbers. Of a DTensor only a replicated one has them."""
    placements = getattr(tensor, "placements", ())
    if not placements:
        return tensor
    is_replicated = all(placement.is_replicate() for placement in placements)
    return getattr(tensor, "_local_tensor", None) if is_replicated else None


def _readable(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that has the numbers, if the device can send them."""
    try:
        local = _local(tensor)
        return local if local is not None and _is_readable(local) else None
    except Exception:  # sparse CSR and nested tensors have no `is_contiguous`
        return None


def _is_readable(tensor: torch.Tensor) -> bool:
    if any(type(size) is not int for size in tensor.shape):  # symbolic, or jagged
        return False
    is_small = 0 < tensor.numel() <= MOST_NUMBERS
    return is_small and tensor.dtype in _TYPES and tensor.is_contiguous()


def _description(tensor: torch.Tensor) -> str:
    return f"tensor of shape {list(tensor.shape)}, {tensor.dtype}, on {tensor.device}"


def _described(value: Any) -> str:
    """The value as a text. Does not wait for a device."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=lambda v: _description(v) if torch.is_tensor(v) else str(v))
