"""The ranks of a report, as columns: state, place, how far behind, last collective, host, groups.
An item for every rank.

Takes a run, a hearing and the verdict on it; gives `Ranks`. Texts that many ranks share stand in a
list of their own, and the columns have indices into it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torchwhere.blackbox.run import RunSummary
from torchwhere.diagnose.calls.keys import Group, StreamKey
from torchwhere.diagnose.calls.rank_calls import JobCalls
from torchwhere.diagnose.clocks.host_clocks import Moments
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.diagnose.report.texts import call_text, cut, milliseconds, place_text

UNKNOWN = "unknown"
NOWHERE = "not known"
_MOST_MESHES = 8


@dataclass(slots=True)
class TextTable:
    """A column of texts: those that differ, and of each rank the index of its own."""

    texts: list[str] = field(default_factory=list)
    of: list[int | None] = field(default_factory=list)
    _known: dict[str, int] = field(default_factory=dict)

    def add(self, text: str) -> None:
        self.of.append(self.number(text))

    def number(self, text: str) -> int:
        number = self._known.get(text)
        if number is None:
            number = self._known[text] = len(self.texts)
            self.texts.append(cut(text))
        return number


@dataclass(slots=True)
class MeshAxes:
    """One dimension of a mesh, or one family of groups: which of them each rank is in."""

    name: str
    of: list[int | None]
    groups: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {"name": cut(self.name), "of": self.of, "groups": self.groups}


@dataclass(slots=True)
class Ranks:
    """Columns of one length, by rank."""

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
    age_ms: list[float | None] = field(default_factory=list)
    meshes: list[MeshAxes] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "state": self.state.of,
            "states": self.state.texts,
            "step": self.step,
            "behind": self.behind,
            "behind_calls": self.behind_calls,
            "place": self.place.of,
            "places": self.place.texts,
            "last": self.last.of,
            "lasts": self.last.texts,
            "last_number": self.last_number,
            "host": self.host.of,
            "hosts": self.host.texts,
            "pid": self.pid,
            "meshes": [mesh.to_dict() for mesh in self.meshes],
            "age_ms": self.age_ms,
        }


def newest_ns(run: RunSummary[Any], when: Moments) -> int:
    """When the newest record of all ranks was written."""
    return max((when.one(rank, box.last_ns) for rank, box in run.boxes.items()), default=0)


def ranks(run: RunSummary[Any], job_calls: JobCalls, verdict: Verdict, when: Moments) -> Ranks:
    """All ranks: those that were heard, those whose box could not be, and those without one."""
    known = sorted({*range(run.world_size), *run.boxes})
    found = Ranks(known)
    newest = newest_ns(run, when)
    for rank in known:
        _add_report(found, rank, job_calls, verdict)
        box = run.boxes.get(rank)
        meta = box.meta if box is not None else {}
        found.host.add(str(meta.get("host") or NOWHERE))
        pid = meta.get("pid")
        found.pid.append(pid if isinstance(pid, int) else None)
        last_ns = box.last_ns if box is not None else 0
        found.age_ms.append(milliseconds(newest - when.one(rank, last_ns)) if last_ns else None)
    furthest = max((step for step in found.step if step is not None), default=0)
    found.behind = [furthest - step if step is not None else 0 for step in found.step]
    found.behind_calls = _behind_calls(known, job_calls)
    found.meshes = meshes(known, _used_groups(job_calls))
    return found


def _add_report(found: Ranks, rank: int, job_calls: JobCalls, verdict: Verdict) -> None:
    report, rank_calls = verdict.ranks.get(rank), job_calls.by_rank.get(rank)
    found.state.add(str(report.state) if report is not None else UNKNOWN)
    found.step.append(report.place.step if report is not None else None)
    found.place.add(place_text(report.place) if report is not None else NOWHERE)
    last = report.last if report is not None else None
    if last is None or rank_calls is None or rank_calls.last is None:
        found.last.of.append(None)
        found.last_number.append(None)
        return
    found.last.add(
        call_text(last.get("op"), job_calls.group(rank_calls.last[0]).title, last.get("bytes"))
    )
    found.last_number.append(rank_calls.last[1])


def _behind_calls(known: list[int], job_calls: JobCalls) -> list[int]:
    """How many collectives each rank is behind the furthest of a group, in the group where it is
    furthest behind."""
    most: dict[StreamKey, int] = {}
    for rank_calls in job_calls.by_rank.values():
        for key, count in rank_calls.counts.items():
            if key.source == key.destination == -1 and count > most.get(key, 0):
                most[key] = count
    found = []
    for rank in known:
        said = job_calls.by_rank.get(rank)
        counts = said.counts.items() if said is not None else ()
        found.append(max((most[key] - count for key, count in counts if key in most), default=0))
    return found


def _used_groups(job_calls: JobCalls) -> list[Group]:
    """Those in which something was issued; a job may have made others. All, where there is none."""
    used = {
        key.group
        for rank_calls in job_calls.by_rank.values()
        for key, count in rank_calls.counts.items()
        if count
    }
    groups = list(job_calls.shared_ids.groups)
    return [groups[number] for number in sorted(used)] or groups


def meshes(known: list[int], groups: Iterable[Group]) -> list[MeshAxes]:
    """The dimensions along which ranks are grouped, named ones first. A family whose groups overlap
    is none, and neither is one that has all ranks in one group."""
    at = {rank: index for index, rank in enumerate(known)}
    families: dict[str, dict[tuple[int, ...], Group]] = {}  # two groups of the same ranks are one
    for group in groups:
        if 0 < len(group.ranks) < len(known):
            families.setdefault(group.title, {})[group.ranks] = group
    found: list[tuple[bool, int, str, MeshAxes]] = []
    for title, family in families.items():
        of: list[int | None] = [None] * len(known)
        size = sum(rank in at for members in family for rank in members)
        for number, members in enumerate(sorted(family)):
            for rank in members:
                if rank in at:
                    of[at[rank]] = number
        if size == sum(number is not None for number in of):
            is_named = any(group.mesh_dim for group in family.values())
            found.append(
                (
                    not is_named,
                    -size,
                    title,
                    MeshAxes(title, of, [str(number) for number in range(len(family))]),
                )
            )
    return [mesh for *_, mesh in sorted(found, key=lambda one: one[:3])[:_MOST_MESHES]]
