"""The ranks of a report as columns: state, place, lag, last collective, host, groups.

Takes a run, its calls and its verdict; gives `Ranks`, with one item a column for every rank. Texts
that many ranks share are stored once, and the columns hold indexes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torchwhere.blackbox.run import RunSummary
from torchwhere.blackbox.string_table import Group
from torchwhere.core.grouping import Interner
from torchwhere.core.results import plain, plain_fields
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.clocks.host_clocks import HostClocks
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.diagnose.report.texts import call_text, cut, milliseconds, place_text

UNKNOWN = "unknown"
_MOST_MESHES = 8


@dataclass(slots=True)
class TextTable:
    """A column of texts: the distinct texts, and for each rank the index of its text."""

    of: list[int | None] = field(default_factory=list)
    _distinct: Interner[str] = field(default_factory=Interner)

    def add(self, text: str) -> None:
        self.of.append(self._distinct.id_of(text))

    @property
    def texts(self) -> list[str]:
        return list(map(cut, self._distinct))


@dataclass(slots=True)
class MeshAxes:
    """One mesh dimension, or one family of groups: the index of each rank's group."""

    name: str
    of: list[int | None]
    groups: list[str]

    def to_dict(self) -> dict[str, Any]:
        return plain_fields(self) | {"name": cut(self.name)}


@dataclass(slots=True)
class Ranks:
    """Columns of one length, in the order of `rank`."""

    rank: list[int]
    state: TextTable = field(default_factory=TextTable)
    step: list[int | None] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    behind_calls: list[int] = field(default_factory=list)
    place: TextTable = field(default_factory=TextTable)
    last: TextTable = field(default_factory=TextTable)
    last_number: list[int | None] = field(default_factory=list)
    host: TextTable = field(default_factory=TextTable)
    pid: list[int | None] = field(default_factory=list)
    meshes: list[MeshAxes] = field(default_factory=list)
    age_ms: list[float | None] = field(default_factory=list)
    device: TextTable = field(default_factory=TextTable)
    device_step: list[int | None] = field(default_factory=list)
    # of the device, behind its own CPU
    device_behind: list[int] = field(default_factory=list)
    device_behind_calls: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        for column in fields(self):
            values = getattr(self, column.name)
            if isinstance(values, TextTable):
                columns |= {column.name: values.of, f"{column.name}s": values.texts}
            else:
                columns[column.name] = plain(values)
        if self.device.texts:
            return columns
        return {name: values for name, values in columns.items() if not name.startswith("device")}


def newest_ns(run: RunSummary[Any], when: HostClocks) -> int:
    """The time of the newest record of all ranks."""
    return max((when.aligned_ns(rank, box.last_ns) for rank, box in run.boxes.items()), default=0)


def ranks(run: RunSummary[Any], job_calls: JobCalls, verdict: Verdict, when: HostClocks) -> Ranks:
    """All ranks of the run, with or without a readable box."""
    numbers = sorted({*range(run.world_size), *run.boxes})
    columns = Ranks(numbers)
    newest = newest_ns(run, when)
    for rank in numbers:
        _add_report(columns, rank, job_calls, verdict)
        box = run.boxes.get(rank)
        meta = box.meta if box is not None else {}
        columns.host.add(str(meta.get("host") or UNKNOWN))
        pid = meta.get("pid")
        columns.pid.append(pid if isinstance(pid, int) else None)
        last_ns = box.last_ns if box is not None else 0
        columns.age_ms.append(
            milliseconds(newest - when.aligned_ns(rank, last_ns)) if last_ns else None
        )
    furthest = max((step for step in columns.step if step is not None), default=0)
    columns.behind = [furthest - step if step is not None else 0 for step in columns.step]
    columns.behind_calls = _behind_calls(numbers, job_calls)
    columns.meshes = meshes(numbers, _used_groups(job_calls))
    return columns


def _add_report(columns: Ranks, rank: int, job_calls: JobCalls, verdict: Verdict) -> None:
    report, rank_calls = verdict.ranks.get(rank), job_calls.by_rank.get(rank)
    columns.state.add(str(report.state) if report is not None else UNKNOWN)
    columns.step.append(report.place.step if report is not None else None)
    columns.place.add(place_text(report.place) if report is not None else UNKNOWN)
    _add_device(columns, rank_calls)
    last = report.last if report is not None else None
    if last is None or rank_calls is None or rank_calls.last is None:
        columns.last.of.append(None)
        columns.last_number.append(None)
        return
    columns.last.add(
        call_text(last.get("op"), job_calls.group(rank_calls.last[0]).title, last.get("bytes"))
    )
    columns.last_number.append(rank_calls.last[1])


def _add_device(columns: Ranks, rank_calls: RankCalls | None) -> None:
    """Add the last point that the device of a rank has reached, and how far it is behind."""
    state = rank_calls.rank_summary.device if rank_calls is not None else None
    point = state.device_place if state is not None else None
    place = point.place if point is not None else None
    columns.device_step.append(place.step if place is not None else None)
    columns.device_behind.append(point.steps_behind if point is not None else 0)
    columns.device_behind_calls.append(point.collectives_behind if point is not None else 0)
    if point is None or place is None:
        columns.device.of.append(None)
    else:
        columns.device.add(replace(point, place=replace(place, step=None)).reached_text())


def _behind_calls(numbers: list[int], job_calls: JobCalls) -> list[int]:
    """For each rank the collectives that it is behind the furthest rank of a group, in the group
    with the largest lag."""
    most: dict[StreamKey, int] = {}
    for rank_calls in job_calls.by_rank.values():
        for key, count in rank_calls.counts.items():
            if not key.is_p2p and count > most.get(key, 0):
                most[key] = count
    behind = []
    for rank in numbers:
        calls = job_calls.by_rank.get(rank)
        counts = calls.counts.items() if calls is not None else ()
        behind.append(max((most[key] - count for key, count in counts if key in most), default=0))
    return behind


def _used_groups(job_calls: JobCalls) -> list[Group]:
    """Groups with at least one collective, or all groups if none has any."""
    used = {
        key.group
        for rank_calls in job_calls.by_rank.values()
        for key, count in rank_calls.counts.items()
        if count
    }
    groups = list(job_calls.shared_ids.groups)
    return [groups[number] for number in sorted(used)] or groups


def meshes(numbers: list[int], groups: Iterable[Group]) -> list[MeshAxes]:
    """The dimensions that group the ranks, named ones first. Leaves out families with overlapping
    groups, and groups of all ranks."""
    at = {rank: index for index, rank in enumerate(numbers)}
    families: dict[str, dict[tuple[int, ...], Group]] = {}  # merges groups with the same ranks
    for group in groups:
        if 0 < len(group.ranks) < len(numbers):
            families.setdefault(group.title, {})[group.ranks] = group
    ordered: list[tuple[tuple[bool, int, str], MeshAxes]] = []
    for title, family in families.items():
        of: list[int | None] = [None] * len(numbers)
        size = sum(rank in at for members in family for rank in members)
        for number, members in enumerate(sorted(family)):
            for rank in members:
                if rank in at:
                    of[at[rank]] = number
        if size == sum(number is not None for number in of):
            is_named = any(group.mesh_dim for group in family.values())
            axis = MeshAxes(title, of, [str(number) for number in range(len(family))])
            ordered.append(((not is_named, -size, title), axis))
    ordered.sort(key=lambda entry: entry[0])
    return [axis for _, axis in ordered[:_MOST_MESHES]]
