"""What the flight recorder adds to a verdict on a run, by itself: its dumps are found, and asked
for.

Takes the boxes of a run, which say where their processes write dumps, and a verdict. Dumps that
were written since the job began count. On a stall, the ranks of this host that listen on NCCL's
pipe (TORCH_NCCL_DEBUG_INFO_PIPE_FILE) and have written none since their last record are asked for
one, once: a dump from after it cannot become better.

Limits: only plain files are read, with the unpickler that knows plain data alone; beyond `_MOST`
dumps it is left to the user (`torchwhere doctor run/ --flight-recorder DUMPS`). What cannot be read
is said among what is not known, and never raises.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchwhere.blackbox.run import BoxRun
from torchwhere.blackbox.summary import BoxOrSummary
from torchwhere.core.errors import TorchwhereError
from torchwhere.diagnose.doctor.verdict import Verdict, VerdictKind
from torchwhere.diagnose.doctor.wait_text import ranks_text
from torchwhere.flight_recorder.dumps import Dumps, read_files
from torchwhere.flight_recorder.verdict import completion

_STALLED = (VerdictKind.MISSING, VerdictKind.DEADLOCK, VerdictKind.TOGETHER)
_ASKED_FOR = (*_STALLED, VerdictKind.MISMATCH)
# names of dumps in the run's own folder; not what torchwhere wrote
_BESIDE = re.compile(r"(?!torchwhere_).*rank_?(\d{1,7})")
_MOST = 256
_PATIENCE_S = 5.0  # NCCL looks at its pipe once a second, and stacks take a second or two
_SETTLED_S = 0.2  # a file that has not grown for so long is whole
_SAME_MOMENT_NS = 5_000_000_000  # between the box's clock and the file system's


def with_evidence(
    verdict: Verdict, boxes: Mapping[int, BoxOrSummary], folder: Path, *, may_ask: bool
) -> Verdict:
    """The verdict with what dumps add to it. `may_ask`: whether the job is there and may be asked
    for them."""
    if verdict.kind not in (*_ASKED_FOR, VerdictKind.DEAD):
        return verdict
    if may_ask and verdict.kind in _ASKED_FOR:
        _ask(boxes)
    files = find_dumps(boxes, folder)
    if not files:
        return verdict
    if len(files) > _MOST:
        where = files[min(files)].parent
        said = (
            f"{len(files)} dumps of the flight recorder in {where} were not read: give them with"
            " --flight-recorder"
        )
        return replace(verdict, missing_data=(*verdict.missing_data, said))
    try:
        dumps = read_files(folder, [("", rank, path) for rank, path in sorted(files.items())])
    except TorchwhereError as error:
        return replace(verdict, missing_data=(*verdict.missing_data, f"flight recorder: {error}"))
    return _added(verdict, dumps)


# -- finding ---------------------------------------------------------------------------------------


def find_dumps(boxes: Mapping[int, BoxOrSummary], folder: Path) -> dict[int, Path]:
    """The dumps of this job, by rank: where its processes write them, or beside the boxes; none
    that is older than the job."""
    began_ns = min(
        (ns for box in boxes.values() if isinstance(ns := box.meta.get("started_ns"), int)),
        default=0,
    )
    found: dict[int, Path] = {}
    for name in _names(folder):
        if (match := _BESIDE.fullmatch(name)) is not None and (folder / name).is_file():
            found[int(match[1])] = folder / name
    for rank, box in boxes.items():
        prefix = _setting(box, "dump")
        if prefix is not None:
            found[rank] = Path(f"{prefix}{rank}")
    return {
        rank: path
        for rank, path in found.items()
        if rank in boxes and _written_ns(path) >= began_ns - _SAME_MOMENT_NS
    }


def _names(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError:
        return []


def _setting(box: BoxOrSummary, name: str) -> str | None:
    settings = box.meta.get("flight_recorder")
    value = settings.get(name) if isinstance(settings, dict) else None
    return value if isinstance(value, str) and value and "\0" not in value else None


def _written_ns(path: Path) -> int:
    """When a plain file was last written; -1 where there is none, or nothing in it."""
    with contextlib.suppress(OSError, ValueError):
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size:
            return status.st_mtime_ns
    return -1


# -- asking ----------------------------------------------------------------------------------------


def _ask(boxes: Mapping[int, BoxOrSummary]) -> None:
    """Have the ranks of this host write a dump, those that have written none since they stand
    still; and wait for it."""
    host = socket.gethostname()
    asked: dict[Path, int] = {}  # when each was written before
    for rank, box in boxes.items():
        pipe, prefix = _setting(box, "pipe"), _setting(box, "dump")
        if pipe is None or prefix is None or box.meta.get("host") != host:
            continue
        dump = Path(f"{prefix}{rank}")
        before = _written_ns(dump)
        if before < box.last_ns and len(asked) < _MOST and _write(Path(f"{pipe}{rank}.pipe")):
            asked[dump] = before
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and not all(
        _is_new(dump, before) for dump, before in asked.items()
    ):
        time.sleep(0.05)


def _is_new(dump: Path, before: int) -> bool:
    written = _written_ns(dump)
    return written > before and time.time_ns() - written > _SETTLED_S * 1e9


def _write(pipe: Path) -> bool:
    """Write to a pipe, if it is one and somebody reads it; never wait for it."""
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return stat.S_ISFIFO(os.fstat(fd).st_mode) and os.write(fd, b"1\n") > 0
        finally:
            os.close(fd)
    except OSError:
        return False


# -- saying ----------------------------------------------------------------------------------------


def _added(verdict: Verdict, dumps: Dumps) -> Verdict:
    known, collective = completion(dumps), verdict.collective or {}
    number = collective.get("number")
    told = [group for group in known if group["group"] == collective.get("group")]
    sentences = _sentences(told[0], number) if told and isinstance(number, int) else ()
    return replace(
        verdict,
        explanation=(*verdict.explanation, *sentences),
        # Not its notes on what dumps lack: the boxes have that.
        missing_data=(
            *verdict.missing_data,
            *(f"flight recorder: {said}" for said in BoxRun.caveats(dumps)[:4]),
        ),
        facts=verdict.facts | {"flight_recorder": known[:64]},
    )


def _sentences(group: dict[str, Any], number: int) -> tuple[str, ...]:
    """How far each rank is with a collective, by its device: what a stack on the host cannot
    say."""
    by_state: dict[str, list[int]] = {}
    for each in group["ranks"]:
        by_state.setdefault(_state(each, number), []).extend(each["ranks"])
    parts = [f"{state} on {ranks_text(sorted(ranks))}" for state, ranks in by_state.items()]
    said = f'By the flight recorder, #{number} of group "{group["group"]}" is {"; ".join(parts)}.'
    if {"started", "scheduled"} <= by_state.keys():
        late = ranks_text(sorted(by_state["scheduled"]))
        return (
            said,
            f"The device of {late} has not come to it: look at what was queued there before.",
        )
    if by_state.keys() == {"started"}:
        return (said, "All devices are in it: look at the network between them.")
    return (said,)


def _state(reached: dict[str, Any], number: int) -> str:
    if reached["issued"] < number:
        return "not issued"
    if reached["started"] is None:
        return "issued"
    return (
        "completed"
        if reached["completed"] >= number
        else "started"
        if reached["started"] >= number
        else "scheduled"
    )
