"""Describes process groups (ranks, names, mesh dimensions) and numbers their collectives.

Readers match a collective between ranks by its group and its number in that group, never by a
clock. The first number is the group's own sequence number at that moment, so ranks that start to
watch at different times still agree.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

from torchwhere.blackbox.file_format import EntryType
from torchwhere.blackbox.string_table import Group
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.hooks import _torch
from torchwhere.model.meshes import mesh_dim
from torchwhere.model.wrappers import live_objects, loaded_class

# backends whose sequence number goes up by one per collective, as ours does
_COUNTING_BACKENDS = ("gloo", "nccl")

WHOLE_GROUP = (-1, -1)
_MOST_COUNTS = 32  # groups with a count in the header of a box


@dataclass(slots=True)
class StreamCounter:
    """Numbers one sequence: the collectives of a group, or the messages from one rank to
    another."""

    numbers: Iterator[int]  # its next item is the number of the next collective
    # index of its words in the box; None if the box has no room for more streams
    counter: int | None


@dataclass(slots=True)
class WatchedGroup:
    """One process group as seen from this rank."""

    name: str
    desc: str
    ranks: list[int]
    backend: str
    mesh_dim: str | None
    title: str  # as all views name it
    entry: int = 0  # id in the table
    # ids of signatures in the table, by the facts that they hold
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
    """All groups of this process, including those created before the watch."""

    def __init__(self, box: BoxWriter, *, on_new: Callable[[], None]) -> None:
        self._box = box
        self._on_new = on_new
        # by the id of the process group, while it lives
        self._groups: dict[int, WatchedGroup] = {}
        self._alive: dict[int, Any] = {}
        self._has_new = False
        # reentrant: a signal handler may issue a collective while its thread adds a group
        self._lock = threading.RLock()
        # kept: at the end of the process, Python clears the extension before the last groups
        self._forget_calls = None if box.native is None else box.native.forget_calls
        self._count_from: Callable[[int], Iterator[int]] = (
            itertools.count if box.native is None else box.native.Count
        )

    def of(self, boxed: Any) -> WatchedGroup:
        """The group of a c10d call, from the boxed process group in its arguments."""
        pg = dist.ProcessGroup.unbox(boxed)
        return self._groups.get(id(pg)) or self._add(pg)

    def stream(
        self, group: WatchedGroup, ends: tuple[int, int], *, first: int = 0
    ) -> StreamCounter:
        """The counter of the messages between `ends`; a new one starts at `first`."""
        stream = group.streams.get(ends)
        if stream is None:
            new = StreamCounter(self._count_from(first), self._box.counter_at((group.entry, *ends)))
            stream = group.streams.setdefault(ends, new)  # another thread may have added one
        return stream

    def refresh(self) -> None:
        """Add every new group, used or not, and name mesh dimensions. Called at the start, between
        steps, and at the end."""
        all_groups = _all_groups()
        # a torch without distributed has no groups, and no `is_initialized`
        if all_groups and dist.is_initialized() and len(all_groups) != len(self._groups):
            for pg in list(all_groups):
                if isinstance(pg, dist.ProcessGroup) and id(pg) not in self._groups:
                    self._add(pg)
        if self._has_new:
            self._has_new = False
            self._name_dimensions()

    def looked_at(self) -> tuple[Any, ...]:
        """Containers: while their sizes do not change, `refresh` has nothing to do."""
        return self._groups, _all_groups()

    def _name_dimensions(self) -> None:
        """Name the mesh dimensions of groups, from the meshes themselves: a dimension as wide as
        the world has no group of its own, and older torch describes its groups differently. Looks
        at all live objects, so never call it inside a step."""
        dims = _mesh_dims()
        for group in list(self._groups.values()):
            if group.mesh_dim != dims.get(group.name, group.mesh_dim):
                group.mesh_dim = group.title = dims[group.name]
                if self._forget_calls is not None:
                    self._forget_calls()  # they have the title
                self._box.intern(EntryType.GROUP, json.dumps(group.to_dict()))

    def finish(self) -> None:
        """Name mesh dimensions again at the end: a mesh may use groups that are older than it."""
        self._has_new = True
        self.refresh()

    def _add(self, pg: Any) -> WatchedGroup:
        """Add a group, once: two threads may issue its first collectives at the same time."""
        with self._lock:
            return self._groups.get(id(pg)) or self._new(pg)

    def _new(self, pg: Any) -> WatchedGroup:
        dim = mesh_dim(pg.group_desc)  # `_name_dimensions` corrects it later
        group = WatchedGroup(
            name=pg.group_name,
            desc=pg.group_desc,
            ranks=_ranks(pg),
            backend=_backend(pg),
            mesh_dim=dim,
            title=Group(pg.group_name, (), pg.group_desc, None, dim).title,
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
        """Remember a group until the job destroys it. A strong reference would keep its threads and
        connections alive. A group that only C++ holds needs one: otherwise it would have a new
        Python object each time."""
        is_held = pg in _all_groups()
        self._groups[id(pg)] = group
        self._alive[id(pg)] = weakref.ref(pg, partial(self._forget, id(pg))) if is_held else pg

    def _forget(self, key: int, _dead: object) -> None:
        self._groups.pop(key, None)
        self._alive.pop(key, None)
        if self._forget_calls is not None:
            self._forget_calls()  # the native extension knows a group by its address

    def _keep_count(self, name: str, counted: int) -> None:
        """Write the first number of our count: gloo also counts messages, so a reader may have to
        count again."""
        counts = self._box.meta.get("counted", {})
        if len(counts) < _MOST_COUNTS:
            self._box.write_meta(counted=counts | {name: counted})


def _all_groups() -> dict[Any, Any]:
    """Torch's table of all process groups; empty if this torch does not have it."""
    return getattr(_torch.private("process_groups"), "pg_map", {})


def _ranks(pg: Any) -> list[int]:
    try:
        return list(dist.get_process_group_ranks(pg))
    except (KeyError, ValueError, RuntimeError):  # not in the public table: only the size is known
        return list(range(pg.size()))


def _backend(pg: Any) -> str:
    """`gloo` or `nccl`; if devices have different backends, all: `cpu:gloo,cuda:nccl`."""
    entry = _all_groups().get(pg)
    name = str(entry[0]) if entry else str(pg.name())
    if name == "undefined":  # created without a backend
        per_device = str(_torch.private("process_groups").pg_backend_config.get(pg, name))
        names = {part.rpartition(":")[2] for part in per_device.split(",")}
        return names.pop() if len(names) == 1 else per_device
    return name


def _mesh_dims() -> dict[str, str]:
    """Group name to mesh dimension name, from the live meshes of this process (torch has no list of
    them)."""
    cls = loaded_class("torch.distributed.device_mesh", "DeviceMesh")
    dims: dict[str, str] = {}
    for mesh in live_objects(cls) if cls else ():
        if mesh.mesh_dim_names:
            # a mesh without this rank, or whose process groups are destroyed
            with contextlib.suppress(Exception):
                dims |= {
                    pg.group_name: dim
                    for dim, pg in zip(mesh.mesh_dim_names, mesh.get_all_groups(), strict=True)
                }
    return dims


def _counted_so_far(pg: Any, backend: str) -> int:
    if not any(name in backend for name in _COUNTING_BACKENDS):
        return 0
    try:
        return int(pg._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return 0
