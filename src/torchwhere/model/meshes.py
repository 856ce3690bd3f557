"""Lists the meshes and process groups of a layout, each once, and formats placements.

After the process groups are destroyed, a mesh has only what can still be read, and `is_gone`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from torchwhere.core.model_layout import Mesh
from torchwhere.core.rank_text import ranks_to_text


class Meshes:
    """Numbers meshes by value: two objects with the same ranks and names are one mesh."""

    def __init__(self) -> None:
        self._numbers: dict[Mesh, int] = {}
        # by the id of a DeviceMesh; the reference prevents that another object gets this id
        self._by_id: dict[int, tuple[Any, int]] = {}

    def table(self) -> tuple[Mesh, ...]:
        """All meshes, in the order of their numbers."""
        return tuple(self._numbers)

    def of_mesh(self, mesh: Any) -> int:
        """The number of a DeviceMesh."""
        entry = self._by_id.get(id(mesh))
        if entry is None:
            entry = self._by_id[id(mesh)] = mesh, self._number(_read_mesh(mesh))
        return entry[1]

    def of_groups(self, groups: Sequence[tuple[str, Any]], *, device: str = "") -> int | None:
        """The number of a mesh that is described by this rank's process group along each dimension;
        None without a group."""
        dims = [(name, group) for name, group in groups if group is not None]
        if not dims:
            return None
        ranks = [_ranks(group) for _, group in dims]
        return self._number(
            Mesh(
                shape=tuple(
                    _size(group, members) for (_, group), members in zip(dims, ranks, strict=True)
                ),
                dims=tuple(
                    name or mesh_dim(str(getattr(group, "group_desc", ""))) or ""
                    for name, group in dims
                ),
                device=device,
                ranks=ranks_to_text(ranks[0] or ()) if len(ranks) == 1 else "",
                groups=tuple(ranks_to_text(members or ()) for members in ranks),
                is_gone=any(members is None for members in ranks),
            )
        )

    def _number(self, mesh: Mesh) -> int:
        return self._numbers.setdefault(mesh, len(self._numbers))


def _read_mesh(mesh: Any) -> Mesh:
    shape = tuple(int(size) for size in mesh.shape)
    try:
        grid, coordinate = mesh.mesh, mesh.get_coordinate()
        ranks = ranks_to_text(grid.flatten().tolist())
        groups = (
            ()
            if coordinate is None
            else tuple(_along(grid, coordinate, dim) for dim in range(len(shape)))
        )
    except Exception:  # after the process groups are destroyed, reading the ranks may fail
        ranks, groups = "", ()
    return Mesh(
        shape=shape,
        dims=tuple(mesh.mesh_dim_names or ("",) * len(shape)),
        device=str(mesh.device_type),
        ranks=ranks,
        groups=groups,
        is_gone=_is_gone(mesh),
    )


def _along(grid: Any, coordinate: Iterable[int], dim: int) -> str:
    at: list[Any] = list(coordinate)
    at[dim] = slice(None)
    return ranks_to_text(grid[tuple(at)].tolist())


def _is_gone(mesh: Any) -> bool:
    if not dist.is_initialized():
        return True
    try:
        mesh.get_all_groups()
    except Exception as error:
        # any other error: a mesh without groups (fake, or without this rank)
        return "resolve" in str(error)
    return False


def mesh_dim(desc: str) -> str | None:
    """The mesh dimension in the description of a process group: PyTorch describes the groups of a
    mesh as `mesh_<dimension>`."""
    return desc.removeprefix("mesh_") if desc.startswith("mesh_") else None


def _ranks(group: Any) -> list[int] | None:
    """The global ranks of a process group; None if it was destroyed."""
    try:
        return list(dist.get_process_group_ranks(group))
    except Exception:
        return None


def _size(group: Any, members: list[int] | None) -> int:
    if members is not None:
        return len(members)
    try:
        return int(group.size())
    except Exception:
        return 0


def placement_texts(placements: Iterable[Any]) -> tuple[str, ...]:
    """Placements in the notation of PyTorch: `Shard(0)`, `Replicate()`, `Partial(sum)`."""
    return tuple(_placement_text(placement) for placement in placements)


def _placement_text(placement: Any) -> str:
    if placement.is_replicate():
        return "Replicate()"
    kind = type(placement).__name__.lstrip("_")
    if hasattr(placement, "dim"):
        factor = getattr(placement, "split_factor", 1)
        return (
            f"{kind}({placement.dim})" if factor == 1 else f"{kind}({placement.dim}, sf={factor})"
        )
    return f"{kind}({getattr(placement, 'reduce_op', '')})"
