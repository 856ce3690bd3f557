"""Process groups: who is in them, what they are called, and how far each has counted.

A collective is matched between ranks by its group and its number in that group, never by a clock.
Numbers start where the group's own sequence number stands when we first see it, so ranks that begin
to watch at different moments still agree.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

from torchwhere.blackbox.file_format import EntryType
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.hooks import _torch

# their own sequence number goes up by one per collective, as ours does
_COUNTING_BACKENDS = ("gloo", "nccl")


WHOLE_GROUP = (-1, -1)
_MOST_COUNTS = 32  # of groups, in the header of a box


@dataclass(slots=True)
class StreamCounter:
    """What is counted in one sequence: the collectives of a group, or the messages from one rank to
    another."""

    numbers: Iterator[int]  # the next is that of the next collective
    # index of its words in the box; None when there are more streams than room for them
    counter: int | None


@dataclass(slots=True)
class WatchedGroup:
    """One process group as seen from this rank."""

    name: str
    desc: str
    ranks: list[int]
    backend: str
    mesh_dim: str | None
    entry: int = 0  # id in the table
    # what repeats of a collective, to its id in the table
    signatures: dict[Any, int] = field(default_factory=dict)
    # by (source, destination), or WHOLE_GROUP
    streams: dict[tuple[int, int], StreamCounter] = field(default_factory=dict)

    def global_rank(self, rank: int) -> int:
        return self.ranks[rank] if 0 <= rank < len(self.ranks) else rank

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "desc": self.desc,
            "ranks": self.ranks,
            "backend": self.backend,
            "mesh_dim": self.mesh_dim,
        }


class WatchedGroups:
    """All groups of this process, those made before the watch began too."""

    def __init__(self, box: BoxWriter, *, on_new: Callable[[], None]) -> None:
        self._box = box
        self._on_new = on_new
        # by the id of the process group, while that is there
        self._known: dict[int, WatchedGroup] = {}
        self._alive: dict[int, Any] = {}
        self._has_new = False
        self._count_from: Callable[[int], Iterator[int]] = (
            itertools.count if box.native is None else box.native.Count
        )

    def of(self, boxed: Any) -> WatchedGroup:
        """The group of a c10d call, from the boxed process group in its arguments."""
        pg = dist.ProcessGroup.unbox(boxed)
        return self._known.get(id(pg)) or self._meet(pg)

    def stream(
        self, group: WatchedGroup, ends: tuple[int, int], *, first: int = 0
    ) -> StreamCounter:
        """The sequence that messages between `ends` are counted in, from `first` on."""
        stream = group.streams.get(ends)
        if stream is None:
            stream = group.streams[ends] = StreamCounter(
                self._count_from(first), self._box.counter_at((group.entry, *ends))
            )
        return stream

    def refresh(self) -> None:
        """Meet every group there is, used or not, and name mesh dimensions. Called at the start,
        between steps, at the end."""
        world = _torch.private("process_groups")
        if world is not None and dist.is_initialized() and len(world.pg_map) != len(self._known):
            for pg in list(world.pg_map):
                if isinstance(pg, dist.ProcessGroup) and id(pg) not in self._known:
                    self._meet(pg)
        if self._has_new:
            self._has_new = False
            self._name_dimensions()

    def looked_at(self) -> tuple[Any, ...]:
        """While these have the size they have now, `refresh` has nothing to do."""
        world = _torch.private("process_groups")
        return (self._known,) if world is None else (self._known, world.pg_map)

    def _name_dimensions(self) -> None:
        """From the meshes themselves: a dimension as wide as the world has no group of its own, and
        older torch describes the groups it makes by other words. Looks at all objects there are, so
        never inside a step."""
        dims = _mesh_dims()
        for group in list(self._known.values()):
            if group.mesh_dim != dims.get(group.name, group.mesh_dim):
                group.mesh_dim = dims[group.name]
                self._box.intern(EntryType.GROUP, json.dumps(group.to_dict()))

    def finish(self) -> None:
        """At the end: a mesh may have been made over groups that were known before it."""
        self._has_new = True
        self.refresh()

    def _meet(self, pg: Any) -> WatchedGroup:
        group = WatchedGroup(
            name=pg.group_name,
            desc=pg.group_desc,
            ranks=_ranks(pg),
            backend=_backend(pg),
            mesh_dim=_mesh_dim(pg.group_desc),
        )
        group.entry = self._box.intern(EntryType.GROUP, json.dumps(group.to_dict()))
        counted = _counted_so_far(pg, group.backend)
        self.stream(group, WHOLE_GROUP, first=counted)
        if counted:
            self._keep_count(group.name, counted)
        self._keep(pg, group)
        self._has_new = True
        self._on_new()
        return group

    def _keep(self, pg: Any, group: WatchedGroup) -> None:
        """Until the job destroys it: held by us, its threads and connections would outlive it. One
        that only C++ holds has no Python object but this; it would be another one the next time."""
        world = _torch.private("process_groups")
        is_held = world is not None and pg in world.pg_map
        self._known[id(pg)] = group
        self._alive[id(pg)] = weakref.ref(pg, partial(self._forget, id(pg))) if is_held else pg

    def _forget(self, key: int, _dead: object) -> None:
        self._known.pop(key, None)
        self._alive.pop(key, None)

    def _keep_count(self, name: str, counted: int) -> None:
        """Where our own count begins: gloo's has messages in it, so that a reader may have to count
        anew."""
        counts = self._box.meta.get("counted", {})
        if len(counts) < _MOST_COUNTS:
            self._box.meta = self._box.meta | {"counted": counts | {name: counted}}
            self._box.write_meta()


def _ranks(pg: Any) -> list[int]:
    try:
        return list(dist.get_process_group_ranks(pg))
    except (KeyError, ValueError, RuntimeError):  # not in the public table: known by its size only
        return list(range(pg.size()))


def _backend(pg: Any) -> str:
    """`gloo`, `nccl`; where devices differ, which for which: `cpu:gloo,cuda:nccl`."""
    world = _torch.private("process_groups")
    entry = world.pg_map.get(pg) if world is not None else None
    name = str(entry[0]) if entry else str(pg.name())
    if name == "undefined":  # made without naming one
        per_device = str(world.pg_backend_config.get(pg, name))
        names = {part.rpartition(":")[2] for part in per_device.split(",")}
        return names.pop() if len(names) == 1 else per_device
    return name


def _mesh_dim(desc: str) -> str | None:
    """DeviceMesh describes the groups it makes as `mesh_<dimension>`. What the meshes say comes
    later and counts more."""
    return desc.removeprefix("mesh_") if desc.startswith("mesh_") else None


def _mesh_dims() -> dict[str, str]:
    """Group name to mesh dimension name, from the meshes alive in this process (nothing else lists
    them)."""
    device_mesh = sys.modules.get("torch.distributed.device_mesh")
    if device_mesh is None:
        return {}
    found: dict[str, str] = {}
    for mesh in gc.get_referrers(device_mesh.DeviceMesh):
        if isinstance(mesh, device_mesh.DeviceMesh) and mesh.mesh_dim_names:
            # a mesh that this rank is not part of, or whose world is gone
            with contextlib.suppress(Exception):
                found |= {
                    pg.group_name: dim
                    for dim, pg in zip(mesh.mesh_dim_names, mesh.get_all_groups(), strict=True)
                }
    return found


def _counted_so_far(pg: Any, backend: str) -> int:
    if not any(name in backend for name in _COUNTING_BACKENDS):
        return 0
    try:
        return int(pg._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return 0
