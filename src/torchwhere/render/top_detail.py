"""The page of one rank: its place, threads, last events, and its stack if the doctor has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.device import device_lanes
from torchwhere.blackbox.memory import memory_samples
from torchwhere.blackbox.summary import started_ns
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.live.ranks import RankNow
from torchwhere.gpus.labels import gpu_label, memory_label
from torchwhere.gpus.samples import Gpu
from torchwhere.render.lines import Line, plain
from torchwhere.render.text import events_lines
from torchwhere.render.top_rows import (
    Charset,
    age,
    last_text,
    line_text,
    module_text,
    speed,
    state_text,
    step_text,
)
from torchwhere.render.verdict import text_lines

_EVENTS = 12
_FRAMES = 24


def detail_lines(
    rank: RankNow,
    box: Box | None,
    *,
    verdict: dict[str, Any] | None,
    width: int,
    charset: Charset,
    gpus: Sequence[Gpu] = (),
) -> Iterator[Line]:
    """The lines of the page. `box` is None if it cannot be read."""
    lines = (
        *_facts(rank),
        *_gpu_facts(box, gpus),
        *_threads(box),
        *_stack(rank.rank, verdict),
        *_events(box, width),
        *_verdict(verdict),
    )
    for line in lines:
        yield [(charset.of(text), style) for text, style in line]


def _facts(rank: RankNow) -> Iterator[Line]:
    place, meta = rank.place, rank.live_box.meta
    yield [
        (f"rank {rank.rank}", "bold"),
        (f"  {state_text(rank)}", "bold red" if rank.is_trouble else "bold"),
    ]
    if rank.detail:
        yield _fact("detail", rank.detail)
    yield _fact("process", f"{meta.get('pid')} on {rank.host or '?'}")
    yield _fact("step", f"{step_text(rank)}, {speed(rank.steps_per_s)} steps/s")
    yield _fact(
        "place",
        f"{place.pass_} of {module_text(rank)}" if place.module is not None else place.pass_,
    )
    yield _fact("line", line_text(rank))
    yield _fact("last", last_text(rank))
    yield from _device_facts(rank)
    yield _fact("age", age(rank.age_s) + (" (stalled)" if rank.is_stalled else ""))
    if rank.waits_for:
        yield _fact("waits for", ranks_phrase(rank.waits_for))
    if rank.is_blamed:
        yield _fact("blamed", "other ranks wait for this one")


def _device_facts(rank: RankNow) -> Iterator[Line]:
    device = rank.device
    if device is None:
        return
    yield _fact("GPU", device.reached_text())
    if device.next is not None:
        yield _fact("GPU next", device.next_text())
    if device.behind_text():
        yield _fact("GPU is", device.behind_text())
    if device.pending and device.looked_ns:
        yield _fact("GPU age", age(max(0, device.looked_ns - device.t_ns) / 1e9))


def _gpu_facts(box: Box | None, gpus: Sequence[Gpu]) -> Iterator[Line]:
    samples = memory_samples(box) if box is not None else []
    if samples:
        yield _fact("memory", memory_label(samples[-1]))
    for gpu in gpus:
        yield _fact("device", gpu_label(gpu))


def _fact(name: str, text: object) -> Line:
    return [(f"  {name:<10}", "dim"), (plain(text), "")]


def _threads(box: Box | None) -> Iterator[Line]:
    if box is None:
        yield [("the box of this rank cannot be read", "bold")]
        return
    yield [("threads", "bold")]
    for cursor in box.cursors():
        phase = f", phase {cursor.phase}" if cursor.phase else ""
        place = str(cursor.place).partition(", thread ")[0].partition(", ")[2]
        yield _fact(plain(cursor.place.thread or "?")[:24], f" {place}{phase}")


def _stack(rank: int, verdict: dict[str, Any] | None) -> Iterator[Line]:
    reports = (verdict or {}).get("ranks") or {}
    stack = reports.get(str(rank), {}).get("stack")
    if stack:
        yield [("stack, innermost first, at the time of the verdict", "bold")]
        for frame in stack[:_FRAMES]:
            yield [(f"  {plain(frame).rpartition('/site-packages/')[2]}", "")]


def _events(box: Box | None, width: int) -> Iterator[Line]:
    if box is not None:
        yield [("last events", "bold")]
        events = box.events(last=_EVENTS)
        yield from events_lines(
            events, started_ns=started_ns(box), width=width, has_device=bool(device_lanes(box))
        )


def _verdict(verdict: dict[str, Any] | None) -> Iterator[Line]:
    if verdict is not None:
        yield [("verdict", "bold")]
        for line in text_lines(verdict):
            yield [(f"  {plain(line)}", "")]
