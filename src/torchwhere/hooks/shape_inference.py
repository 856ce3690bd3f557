"""Tells whether a module is called only to infer shapes: under fake tensors, or in the metadata
inference of a pipeline stage."""

from __future__ import annotations

import sys

from torchwhere.hooks import _torch, python_stack

PIPELINING = "torch.distributed.pipelining.stage"
# methods of a pipeline stage: since torch 2.13, and before
_SHAPE_INFERENCE = ("_forward_metadata_inference", "_shape_inference")


def infers_shapes() -> bool:
    """Whether the running module call only infers shapes."""
    fake_mode, modes = _torch.private("fake_mode"), _torch.private("dispatch_modes")
    if fake_mode is not None and (modes is None or modes()) and fake_mode() is not None:
        return True
    if PIPELINING not in sys.modules:
        return False
    frame = python_stack.caller(2)
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code.co_name in _SHAPE_INFERENCE:
            return True
        frame = frame.f_back
    return False
