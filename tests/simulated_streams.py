"""Streams and events of the accelerator in software, with the interface of `torch.cuda`: FSDP uses
it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

DEVICE = "simulated"


class Event(torch.Event):
    def __new__(cls, *_: Any, **__: Any) -> Event:
        event: Event = super().__new__(cls, device=f"{DEVICE}:0")
        return event

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(current_stream() if stream is None else stream)


class Stream(torch.Stream):
    def __new__(cls, device: object = None, priority: int = 0, **ids: int) -> Stream:
        del device, priority
        stream: Stream = (
            super().__new__(cls, **ids) if ids else super().__new__(cls, device=f"{DEVICE}:0")
        )
        return stream

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: torch.Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(stream.record_event())


def current_stream(device: object = None) -> Stream:
    del device
    stream = torch.accelerator.current_stream()
    return Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def device_module(device: Any) -> ModuleType:
    """The module `torch.simulated`. `device` has the functions that control the accelerator."""
    module = ModuleType(f"torch.{DEVICE}")
    module.__dict__.update(
        Event=Event,
        Stream=Stream,
        current_stream=current_stream,
        current_device=lambda: 0,
        device_count=lambda: 1,
        is_available=lambda: True,
        is_initialized=device.is_initialized,
        set_device=device.set_device,
        stream=lambda stream: stream,  # a `torch.Stream` is a context manager
    )
    return module
