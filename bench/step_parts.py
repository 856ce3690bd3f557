"""Measures what the parts of a step and the samples of the stack cost.

The parts: a batch of a `DataLoader`, with and without a watch; the record at the end of a step; a
change of the pass. The samples: one sample of a stack of 30 frames, and the CPU time of a watched
job with samples compared with the same job without them, in turns. All figures are CPU time.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.utils.data import DataLoader, Dataset

import torchwhere
from torchwhere.api.watch import current
from torchwhere.core.place import Pass
from torchwhere.core.stall import BEAT_S
from torchwhere.recorder.heartbeat import SAMPLES
from torchwhere.recorder.stack_samples import StackSampler

CALLS = 5_000
ROUNDS = 9
DEPTH = 30
_FORWARD = int(Pass.FORWARD) << 32


class _Batches(Dataset[int]):
    def __len__(self) -> int:
        return CALLS

    def __getitem__(self, index: int) -> int:
        return index


def rows() -> list[tuple[str, float, str]]:
    """Return rows for the table of the bench: name, figure, unit."""
    return [
        ("a batch of a DataLoader", _added(_load), "us"),
        ("two changes of the pass", _median(_change_pass), "us"),
        ("the record at the end of a step", _median(_end_step), "us"),
        (f"a sample of a stack of {DEPTH} frames", _median(_sample), "us"),
        (f"{SAMPLES} samples a second, of a busy thread", 1e2 * _share_of_samples(), "% of a core"),
    ]


@contextmanager
def _watched() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, torchwhere.watch(out=folder):
        yield


def _timed_us(run: Callable[[], object]) -> float:
    """CPU time of this thread for one of `CALLS` calls."""
    start = time.thread_time()
    run()
    return (time.thread_time() - start) / CALLS * 1e6


def _median(run: Callable[[], object]) -> float:
    with _watched():
        run()
        return statistics.median(_timed_us(run) for _ in range(ROUNDS))


def _added(run: Callable[[], object]) -> float:
    differences = []
    for _ in range(ROUNDS):
        plain, watched = 0.0, 0.0
        for is_watched in (False, True):
            with _watched() if is_watched else nullcontext():
                took = _timed_us(run)
            plain, watched = (plain, took) if is_watched else (took, watched)
        differences.append(watched - plain)
    return statistics.median(differences)


def _load() -> None:
    for _ in DataLoader(_Batches(), batch_size=None):
        pass


def _session_parts() -> tuple[torchwhere.api.watch.Session, int]:
    session = current()
    assert session is not None
    return session, session.recorder.locator.threads.here().cursor


def _change_pass() -> None:
    session, cursor = _session_parts()
    move, now = session.recorder.box.clock.move_clock, time.monotonic_ns
    for _ in range(CALLS):
        move(cursor, _FORWARD, now())
        move(cursor, 0, now())


def _end_step() -> None:
    session, cursor = _session_parts()
    end_step = session.recorder.box.clock.end_step
    for _ in range(CALLS):
        end_step(cursor, 0, 0)


def _sample() -> None:
    session, _ = _session_parts()
    sampler = StackSampler(session.recorder.box, session.recorder.locator)

    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
            return
        for _ in range(CALLS):
            sampler.take()

    deep(DEPTH)


def _share_of_samples() -> float:
    """CPU time that a thread takes for samples while this thread computes: a share of a core."""
    with _watched():
        session, _ = _session_parts()
        sampler = StackSampler(session.recorder.box, session.recorder.locator)
        is_over, took_s = threading.Event(), []

        def sample() -> None:
            start = time.thread_time()
            while not is_over.wait(BEAT_S / SAMPLES):
                sampler.take()
            took_s.append(time.thread_time() - start)

        thread = threading.Thread(target=sample)
        began = time.monotonic()
        thread.start()
        while time.monotonic() - began < 5:
            torch.ones(1000).sum()
        is_over.set()
        thread.join()
        return took_s[0] / (time.monotonic() - began)


if __name__ == "__main__":
    for name, figure, unit in rows():
        print(f"{name:<50} {figure:8.3f} {unit}")
