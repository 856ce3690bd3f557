"""A model layout: how a model is distributed over the ranks, as one rank sees it. It is a tree of
modules with units and parameters.

`torchwhere.layout(model)` reads a layout from a live model, the black box stores it as JSON, and
`Layout.from_dict` reads the JSON. Siblings with the same layout are one `Branch` with a count, so a
model of 100,000 modules takes only as much memory as its different modules. This file does not
import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torchwhere.core.layout_json import Facts, JsonFields, read_fields, text_or_none
from torchwhere.core.results import Shown, Tabular

FLAT = "Shard(flat)"  # FSDP1 and ZeRO-3 shard the flattened parameters at any element


@dataclass(frozen=True, slots=True)
class Mesh(JsonFields):
    """A device mesh: ranks in a grid.

    Attributes:
        shape: The number of ranks along each dimension.
        dims: The names of the dimensions; an empty string for a dimension without a name.
        device: The type of the devices.
        ranks: The ranks as text, like `0-3` or `0-12:4` (every fourth rank); empty if unknown.
        groups: For each dimension, the ranks in this rank's group, as text.
        is_gone: Whether its process groups were destroyed.
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    device: str = ""
    ranks: str = ""
    groups: tuple[str, ...] = ()
    is_gone: bool = False

    @property
    def label(self) -> str:
        """The mesh as text: `dp=2 x tp=4`, or `4 ranks` for a group without a name."""
        if not any(self.dims):
            noun = "rank" if self.shape == (1,) else "ranks"
            return f"{' x '.join(map(str, self.shape))} {noun}"
        return " x ".join(
            f"{dim}={size}" if dim else str(size)
            for dim, size in zip(self.dims, self.shape, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Param(JsonFields):
    """A parameter of a module.

    Attributes:
        name: Its name in the module.
        shape: The shape of the whole parameter.
        local_shape: The shape of the shard on this rank.
        dtype: The data type, without `torch.`.
        bytes: The bytes of the whole parameter.
        local_bytes: The bytes of the shard on this rank.
        requires_grad: Whether it requires a gradient.
        device: The type of its device.
        mesh: The index of its mesh in the meshes of the layout.
        placements: Its placement along each dimension of the mesh.
        unit: Which unit manages it: 0 is the innermost one around it, 1 the next one, None none.
        tied: A tied parameter counts under its first name; elsewhere this is that name.
        note: A remark.
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str = ""
    bytes: int = 0
    local_bytes: int = 0
    requires_grad: bool = True
    device: str = ""
    mesh: int | None = None
    placements: tuple[str, ...] = ()
    unit: int | None = None
    tied: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Unit(JsonFields):
    """Parameters that are managed together: an FSDP unit, DDP, ZeRO, or a pipeline stage.

    Attributes:
        kind: `FSDP1`, `FSDP2`, `replicate`, `DDP`, `DataParallel`, `DeepSpeed`, `ZeRO-1`, `ZeRO-2`,
            `ZeRO-3` or `pipeline stage`.
        mesh: The index of its mesh in the meshes of the layout.
        placements: The placements of its parameters, one for each dimension of its mesh.
        dtypes: The data types of mixed precision: param, reduce, output, buffer, master.
        reshard: When it reshards gathered parameters.
        offload: Where it offloads parameters.
        settings: Settings of this kind of unit.
        also: The names of other modules in this unit.
        params: The number of parameters that it manages itself, without those of nested units.
        bytes: The bytes of these parameters.
        local_bytes: The bytes of their shards on this rank.
        padding_bytes: The bytes allocated on this rank beyond its shards.
        state_bytes: The bytes of the optimizer state on this rank, if the unit holds it.
    """

    kind: str
    mesh: int | None = None
    placements: tuple[str, ...] = ()
    dtypes: Facts = ()
    reshard: str | None = None
    offload: str | None = None
    settings: Facts = ()
    also: tuple[str, ...] = ()
    params: int = 0
    bytes: int = 0
    local_bytes: int = 0
    padding_bytes: int = 0
    state_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A module: the units that start at it (outermost first), its own parameters, its children."""

    cls: str
    units: tuple[Unit, ...] = ()
    plan: str = ""  # the style given to parallelize_module
    params: tuple[Param, ...] = ()
    children: tuple[Branch, ...] = ()
    same_as: str | None = None  # name under which the tree describes this shared module
    note: str = ""
    # the next four are totals of this module and all modules below it
    modules: int = field(init=False, default=1, compare=False)
    count: int = field(init=False, default=0, compare=False)
    bytes: int = field(init=False, default=0, compare=False)
    local_bytes: int = field(init=False, default=0, compare=False)

    def __post_init__(self) -> None:
        params = [param for param in self.params if param.tied is None]
        own = {
            "modules": 1,
            "count": len(params),
            "bytes": sum(param.bytes for param in params),
            "local_bytes": sum(param.local_bytes for param in params),
        }
        for name, value in own.items():
            below = sum(branch.count * getattr(branch.node, name) for branch in self.children)
            object.__setattr__(self, name, value + below)

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "class": self.cls,
            "params": [param.to_dict() for param in self.params],
            "children": [branch.to_dict() for branch in self.children],
            "bytes": self.bytes,
            "local_bytes": self.local_bytes,
        }
        if self.units:
            data["units"] = [unit.to_dict() for unit in self.units]
        texts = {"plan": self.plan, "same_as": self.same_as, "note": self.note}
        return data | {key: text for key, text in texts.items() if text}

    @classmethod
    def from_dict(cls, data: Any) -> Node:
        return cls(
            cls=str(data["class"]),
            units=tuple(read_fields(Unit, unit) for unit in data.get("units", ())),
            plan=str(data.get("plan", "")),
            params=tuple(read_fields(Param, param) for param in data.get("params", ())),
            children=tuple(map(Branch.from_dict, data.get("children", ()))),
            same_as=text_or_none(data.get("same_as")),
            note=str(data.get("note", "")),
        )


@dataclass(frozen=True, slots=True)
class Branch:
    """A child module, or `count` numbered siblings with the same layout: then `name` is the first
    number."""

    name: str
    node: Node
    count: int = 1

    @property
    def label(self) -> str:
        return self.name if self.count == 1 else f"{self.name}-{int(self.name) + self.count - 1}"

    def names(self) -> list[str]:
        if self.count == 1:
            return [self.name]
        first = int(self.name)
        return [str(first + index) for index in range(self.count)]

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "count": self.count, **self.node.to_dict()}

    @classmethod
    def from_dict(cls, data: Any) -> Branch:
        name, count = str(data.get("name", "")), int(data.get("count", 1))
        if count < 1 or (count > 1 and not is_number(name)):
            raise ValueError(f"a branch {name!r} of {count}")
        return cls(name, Node.from_dict(data), count)


@dataclass(frozen=True, slots=True)
class Layout(Shown, Tabular):
    """How a model is laid out over the ranks, as one rank sees it.

    `str()` returns the tree as text; notebooks show it as HTML.

    Attributes:
        rank: The rank that describes its model.
        world_size: The number of ranks.
        roots: The model, or all models and pipeline stages on this rank.
        meshes: The meshes that parameters and units refer to by index.
        notes: Remarks about the whole layout.

    Example:
        layout = torchwhere.layout(model)
        for name, param in layout.params():
            print(name, param.shape, param.local_shape, param.placements)
    """

    rank: int
    world_size: int
    roots: tuple[Branch, ...]
    meshes: tuple[Mesh, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """The bytes of all parameters."""
        return sum(root.node.bytes for root in self.roots)

    @property
    def local_bytes(self) -> int:
        """The bytes of the shards on this rank."""
        return sum(root.node.local_bytes for root in self.roots)

    def params(self) -> Iterator[tuple[str, Param]]:
        """Yield every parameter with its full name, in the order of the model."""
        for name, node in self.modules():
            for param in node.params:
                yield f"{name}.{param.name}" if name else param.name, param

    def units(self) -> Iterator[tuple[str, Unit]]:
        """Yield every unit with the full name of the module at which it starts."""
        for name, node in self.modules():
            for unit in node.units:
                yield name, unit

    def modules(self) -> Iterator[tuple[str, Node]]:
        """Yield every module with its full name. Equal siblings appear one by one."""
        pending = [("", _unfolded(self.roots))]
        while pending:
            parent, children = pending[-1]
            name_and_node = next(children, None)
            if name_and_node is None:
                pending.pop()
                continue
            name, node = name_and_node
            full_name = f"{parent}.{name}" if parent and name else parent or name
            yield full_name, node
            pending.append((full_name, _unfolded(node.children)))

    def as_rows(self) -> list[dict[str, Any]]:
        """Return one row for each parameter, with its full name and its mesh."""
        meshes: dict[int | None, Mesh] = dict(enumerate(self.meshes))
        return [
            {"rank": self.rank}
            | param.to_dict()
            | {"name": name, "mesh": meshes[param.mesh].label if param.mesh in meshes else None}
            for name, param in self.params()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as values for JSON; `from_dict` reads them."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "bytes": self.bytes,
            "local_bytes": self.local_bytes,
            "notes": list(self.notes),
            "meshes": [mesh.to_dict() for mesh in self.meshes],
            "roots": [root.to_dict() for root in self.roots],
        }

    @classmethod
    def from_dict(cls, data: Any) -> Layout:
        """Make a layout from the result of `to_dict`.

        Unknown keys are skipped, and missing keys count as empty.

        Raises:
            ValueError: `data` is not the result of `to_dict`.
        """
        try:
            return cls(
                rank=int(data["rank"]),
                world_size=int(data["world_size"]),
                roots=tuple(map(Branch.from_dict, data["roots"])),
                meshes=tuple(read_fields(Mesh, mesh) for mesh in data.get("meshes", ())),
                notes=tuple(map(str, data.get("notes", ()))),
            )
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"not the result of Layout.to_dict() ({type(error).__name__}: {error})"
            ) from None

    def __repr__(self) -> str:
        kinds = dict.fromkeys(unit.kind for unit in _distinct_units(self.roots))
        contents = ", ".join([*(root.node.cls for root in self.roots), *kinds])
        return (
            f"Layout(rank {self.rank} of {self.world_size}: {contents}; {self.local_bytes:,} of"
            f" {self.bytes:,} bytes here)"
        )


def _unfolded(branches: Iterable[Branch]) -> Iterator[tuple[str, Node]]:
    for branch in branches:
        for name in branch.names():
            yield name, branch.node


def _distinct_units(branches: Iterable[Branch]) -> Iterator[Unit]:
    for branch in branches:
        yield from branch.node.units
        yield from _distinct_units(branch.node.children)


def is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10 and (name == "0" or name[0] != "0")
