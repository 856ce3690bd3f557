"""What a trace in Chrome's format must be, checked strictly: keys by phase, nesting, arrows, names.

`checked(text)` gives the trace as it is read by a program, or fails with what is wrong.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

KEYS = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "cat", "ph", "ts", "pid", "tid", "s", "args"},
    "C": {"name", "ph", "ts", "pid", "args"},
    "s": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "t": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "ph", "id", "ts", "pid", "tid", "bp"},
}
METADATA = {
    "process_name",
    "process_labels",
    "process_sort_index",
    "thread_name",
    "thread_sort_index",
}
Event = dict[str, Any]


def _refused(text: str) -> float:
    raise AssertionError(f"{text} is no JSON")


def checked(text: str) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(text, parse_constant=_refused)
    events: list[Event] = trace["traceEvents"]
    by_phase: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_phase[event["ph"]].append(event)
        _check_keys(event)
    _check_names(by_phase["M"], events)
    tracks = _check_nesting(by_phase["X"])
    _check_arrows(by_phase["s"] + by_phase["t"] + by_phase["f"], tracks)
    return trace


def _check_keys(event: Event) -> None:
    if event["ph"] == "M":
        assert event["name"] in METADATA
        assert set(event) - {"tid"} == {"name", "ph", "pid", "args"}
        assert ("tid" in event) == event["name"].startswith("thread")
        return
    assert set(event) == KEYS[event["ph"]], event
    assert isinstance(event["name"], str)
    assert event["ts"] >= 0
    assert event.get("dur", 0) >= 0
    assert all(isinstance(event[key], int) for key in ("pid", "tid", "id") if key in event)
    if event["ph"] == "C":
        assert all(isinstance(value, (int, float)) for value in event["args"].values())


def _check_names(metadata: list[Event], events: list[Event]) -> None:
    """Every process and every thread has a name, one."""
    processes = [event["pid"] for event in metadata if event["name"] == "process_name"]
    threads = [(event["pid"], event["tid"]) for event in metadata if event["name"] == "thread_name"]
    assert len(set(processes)) == len(processes)
    assert len(set(threads)) == len(threads)
    assert {event["pid"] for event in events} == set(processes)
    assert {(event["pid"], event["tid"]) for event in events if "tid" in event} == set(threads)


def ns(us: float) -> int:
    return round(us * 1000)


def _check_nesting(slices: list[Event]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Slices of a track lie inside each other or beside each other, in the order of the file; gives
    their times."""
    tracks: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    open_: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    last: defaultdict[tuple[int, int], int] = defaultdict(int)
    for event in slices:
        track, begin, end = (
            (event["pid"], event["tid"]),
            ns(event["ts"]),
            ns(event["ts"]) + ns(event["dur"]),
        )
        assert begin >= last[track], f"not in order: {event}"
        last[track] = begin
        while open_[track] and open_[track][-1] <= begin:
            open_[track].pop()
        assert not open_[track] or end <= open_[track][-1], f"lies across another: {event}"
        open_[track].append(end)
        tracks[track].append((begin, end))
    return tracks


def _check_arrows(flows: list[Event], tracks: dict[tuple[int, int], list[tuple[int, int]]]) -> None:
    """An arrow has one beginning and one end, goes forward in time, and each of its points is on a
    slice."""
    by_id: defaultdict[int, list[Event]] = defaultdict(list)
    for event in flows:
        by_id[event["id"]].append(event)
        at = ns(event["ts"])
        assert any(begin <= at <= end for begin, end in tracks[event["pid"], event["tid"]]), (
            f"on no slice: {event}"
        )
    for points in by_id.values():
        # as readers do: of equal times the file decides
        ordered = sorted(points, key=lambda event: ns(event["ts"]))
        assert [event["ph"] for event in ordered] == ["s", *["t"] * (len(points) - 2), "f"], ordered
        # An arrow of a call passes each rank once. One from a CPU to its device stays in its rank.
        ranks = 1 if points[0]["cat"] == "issue" else len(points)
        assert len({event["pid"] for event in points}) == ranks
