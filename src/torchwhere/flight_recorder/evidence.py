"""Adds flight recorder dumps to the verdict on a run: finds them, and asks the job to write them.

Takes the boxes of a run, which record where their processes write dumps, and a verdict. Only dumps
written since the job began count. On a stall, the ranks of this host that listen on NCCL's pipe
(TORCH_NCCL_DEBUG_INFO_PIPE_FILE) and have written no dump since their last record are asked for
one, once: a later dump would contain nothing new.

Limits: reads only plain files, with the unpickler for plain data. It leaves more than `_MOST` dumps
to the user (`torchwhere doctor run/ --flight-recorder DUMPS`). Errors go to the verdict's missing
data and are never raised.
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
from torchwhere.diagnose.dump_facts import (
    AllDevicesInCall,
    DevicesBehind,
    DeviceStates,
    DumpCaveat,
    DumpFact,
    TooManyDumps,
)
from torchwhere.flight_recorder.dumps import Dumps, read_files
from torchwhere.flight_recorder.verdict import completion, group_of

_STALLED = (VerdictKind.MISSING, VerdictKind.DEADLOCK, VerdictKind.TOGETHER)
_ASKED_FOR = (*_STALLED, VerdictKind.MISMATCH)
# names of dumps in the run's own folder, except those that torchwhere wrote
_BESIDE = re.compile(r"(?!torchwhere_).*rank_?(\d{1,7})")
_MOST = 256
_PATIENCE_S = 5.0  # NCCL checks its pipe once a second, and stacks take a second or two
_SETTLED_S = 0.2  # a file that has not grown for so long is complete
_CLOCK_SLACK_NS = 5_000_000_000  # between the clocks of the box and of the file system


def with_evidence(
    verdict: Verdict, boxes: Mapping[int, BoxOrSummary], folder: Path, *, may_ask: bool
) -> Verdict:
    """Add dumps to the verdict. `may_ask`: whether the job runs and may be asked to write them."""
    if verdict.kind not in (*_ASKED_FOR, VerdictKind.DEAD):
        return verdict
    if may_ask and verdict.kind in _ASKED_FOR:
        ask_for_dumps(boxes)
    files = find_dumps(boxes, folder)
    if not files:
        return verdict
    if len(files) > _MOST:
        unread = TooManyDumps(len(files), files[min(files)].parent)
        return replace(verdict, missing_data=(*verdict.missing_data, str(unread)))
    try:
        dumps = read_files(folder, [("", rank, path) for rank, path in sorted(files.items())])
    except TorchwhereError as error:
        caveat = str(DumpCaveat(str(error)))
        return replace(verdict, missing_data=(*verdict.missing_data, caveat))
    return _added(verdict, dumps)


# -- finding ---------------------------------------------------------------------------------------


def find_dumps(boxes: Mapping[int, BoxOrSummary], folder: Path | None) -> dict[int, Path]:
    """The dumps of this job by rank: where its processes write them, or in the folder of the boxes.
    Leaves out those older than the job."""
    starts = (box.meta.get("started_ns") for box in boxes.values())
    began_ns = min((start for start in starts if isinstance(start, int)), default=0)
    dumps: dict[int, Path] = {}
    for path in _files(folder) if folder is not None else ():
        match = _BESIDE.fullmatch(path.name)
        if match is not None and path.is_file():
            dumps[int(match[1])] = path
    for rank, box in boxes.items():
        prefix = _setting(box, "dump")
        if prefix is not None:
            dumps[rank] = Path(f"{prefix}{rank}")
    return {
        rank: path
        for rank, path in dumps.items()
        if rank in boxes and _written_ns(path) >= began_ns - _CLOCK_SLACK_NS
    }


def _files(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError:
        return []


def _setting(box: BoxOrSummary, name: str) -> str | None:
    settings = box.meta.get("flight_recorder")
    value = settings.get(name) if isinstance(settings, dict) else None
    return value if isinstance(value, str) and value and "\0" not in value else None


def _written_ns(path: Path) -> int:
    """The time of the last write to a plain file; -1 for an empty, missing or other file."""
    with contextlib.suppress(OSError, ValueError):
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size:
            return status.st_mtime_ns
    return -1


# -- asking ----------------------------------------------------------------------------------------


def ask_for_dumps(boxes: Mapping[int, BoxOrSummary], *, since_ns: int | None = None) -> None:
    """Ask the ranks of this host to write a dump, and wait for the files.

    Args:
        boxes: The ranks.
        since_ns: Leave out ranks with a dump since this time; by default, since they stalled.
    """
    host = socket.gethostname()
    asked: dict[Path, int] = {}  # the time of the previous dump
    for rank, box in boxes.items():
        pipe, prefix = _setting(box, "pipe"), _setting(box, "dump")
        if pipe is None or prefix is None or box.meta.get("host") != host:
            continue
        dump = Path(f"{prefix}{rank}")
        before = _written_ns(dump)
        newest_ns = box.last_ns if since_ns is None else since_ns
        if before < newest_ns and len(asked) < _MOST and _write(Path(f"{pipe}{rank}.pipe")):
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
    """Write to a pipe if it is one and has a reader; never block."""
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return stat.S_ISFIFO(os.fstat(fd).st_mode) and os.write(fd, b"1\n") > 0
        finally:
            os.close(fd)
    except OSError:
        return False


# -- facts -----------------------------------------------------------------------------------------


def _added(verdict: Verdict, dumps: Dumps) -> Verdict:
    groups, collective = completion(dumps), verdict.collective or {}
    number = collective.get("number")
    group = group_of(verdict, groups)
    facts: list[DumpFact] = []
    if group is not None and isinstance(number, int):
        members = collective.get("group_ranks")
        size = len(members) if isinstance(members, list) else members
        facts = _device_facts(group, number, size)
    # Without the notes on what dumps lack: the boxes have that.
    caveats = [str(DumpCaveat(caveat)) for caveat in BoxRun.caveats(dumps)[:4]]
    return replace(
        verdict,
        explanation=(*verdict.explanation, *map(str, facts)),
        missing_data=(*verdict.missing_data, *caveats),
        facts=verdict.facts | {"flight_recorder": groups[:64]},
    )


def _device_facts(group: dict[str, Any], number: int, size: int | None) -> list[DumpFact]:
    """The state of a collective of `size` ranks (None: unknown) on each device: host stacks do not
    show it."""
    by_state: dict[str, list[int]] = {}
    for reached in group["ranks"]:
        by_state.setdefault(_state(reached, number), []).extend(reached["ranks"])
    states = tuple((state, tuple(sorted(ranks))) for state, ranks in by_state.items())
    facts: list[DumpFact] = [DeviceStates(group["group"], number, states)]
    if {"started", "scheduled"} <= by_state.keys():
        facts.append(DevicesBehind(tuple(sorted(by_state["scheduled"]))))
    if by_state.keys() == {"started"} and size in (None, len(by_state["started"])):
        facts.append(AllDevicesInCall())
    return facts


def _state(reached: dict[str, Any], number: int) -> str:
    if reached["issued"] < number:
        return "not issued"
    if reached["completed"] is not None and reached["completed"] >= number:
        return "completed"
    if reached["started"] is None:
        return "issued"
    return "started" if reached["started"] >= number else "scheduled"
