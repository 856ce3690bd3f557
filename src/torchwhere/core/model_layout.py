"""What a layout is: how a model lies over the ranks, as one of them sees it. A tree of modules,
with units and parameters.

`torchwhere.layout(model)` makes one from a live model, the black box keeps it, `from_dict` gives it
back. Siblings that are laid out alike are one `Branch` with a count: a model of 100,000 modules is
as large in here as what differs in it. This file knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from torchwhere.core.results import Shown, Tabular

Facts = tuple[tuple[str, Any], ...]  # a dictionary that can be compared and hashed

FLAT = "Shard(flat)"  # FSDP1 and ZeRO-3 cut the flattened parameters, wherever the cut falls


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a grid. `ranks` and `groups` are texts like `0-3` or `0-12:4` (every fourth); empty
    where not known.

    `groups` has the ranks that this rank is together with along each dimension.
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]  # names; empty ones where the mesh has none
    device: str = ""
    ranks: str = ""
    groups: tuple[str, ...] = ()
    is_gone: bool = False  # its process groups were destroyed

    @property
    def label(self) -> str:
        """`dp=2 x tp=4`; `4 ranks` for a group without a name."""
        if not any(self.dims):
            return " x ".join(map(str, self.shape)) + (" rank" if self.shape == (1,) else " ranks")
        return " x ".join(
            f"{dim}={size}" if dim else str(size)
            for dim, size in zip(self.dims, self.shape, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        return _as_dict(self)


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter as a module holds it. `shape` is that of the whole, `local_shape` that of this
    rank's part.

    `unit` says who manages it: 0 the innermost unit around it, 1 the one around that; None: no unit
    does. A tied parameter is counted where it comes first; elsewhere `tied` has that name.
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str = ""
    bytes: int = 0
    local_bytes: int = 0
    requires_grad: bool = True
    device: str = ""
    mesh: int | None = None  # which of the layout's meshes the placements are on
    placements: tuple[str, ...] = ()
    unit: int | None = None
    tied: str | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return _as_dict(self)


@dataclass(frozen=True, slots=True)
class Unit:
    """What manages parameters together: an FSDP unit, DDP, ZeRO; or holds a part of the model: a
    pipeline stage.

    `params`, `bytes` and `local_bytes` are of the parameters it manages itself, those of units
    inside it not among them.
    """

    kind: str  # FSDP1, FSDP2, replicate, DDP, DataParallel, ZeRO-1, ZeRO-2, ZeRO-3, pipeline stage
    mesh: int | None = None
    # what it does with a parameter along each dimension of its mesh
    placements: tuple[str, ...] = ()
    dtypes: Facts = ()  # mixed precision: param, reduce, output, buffer, master
    reshard: str | None = None  # what becomes of gathered parameters after forward
    offload: str | None = None
    settings: Facts = ()  # what only this kind has
    also: tuple[str, ...] = ()  # other modules that are in this unit, by name
    params: int = 0
    bytes: int = 0
    local_bytes: int = 0
    padding_bytes: int = 0  # allocated on this rank beyond its part
    state_bytes: int | None = None  # of the optimizer on this rank, where the unit has it

    def to_dict(self) -> dict[str, Any]:
        return _as_dict(self)


@dataclass(frozen=True, slots=True)
class Node:
    """A module: the units that begin at it (the outermost first), the parameters it holds itself,
    and what is below it."""

    cls: str
    units: tuple[Unit, ...] = ()
    # how its inputs and outputs are distributed: the style given to parallelize_module
    plan: str = ""
    params: tuple[Param, ...] = ()
    children: tuple[Branch, ...] = ()
    same_as: str | None = None  # another name of a module that is walked elsewhere
    note: str = ""
    # of this one and all below it; so are the next three
    modules: int = field(init=False, default=1, compare=False)
    count: int = field(init=False, default=0, compare=False)
    bytes: int = field(init=False, default=0, compare=False)
    local_bytes: int = field(init=False, default=0, compare=False)

    def __post_init__(self) -> None:
        own = [param for param in self.params if param.tied is None]
        totals = {
            "modules": 1 + sum(branch.count * branch.node.modules for branch in self.children),
            "count": len(own) + sum(branch.count * branch.node.count for branch in self.children),
            "bytes": sum(p.bytes for p in own) + sum(b.count * b.node.bytes for b in self.children),
            "local_bytes": (
                sum(p.local_bytes for p in own)
                + sum(b.count * b.node.local_bytes for b in self.children)
            ),
        }
        for name, value in totals.items():
            object.__setattr__(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "class": self.cls,
            "params": [param.to_dict() for param in self.params],
            "children": [branch.to_dict() for branch in self.children],
            "bytes": self.bytes,
            "local_bytes": self.local_bytes,
        }
        if self.units:
            found["units"] = [unit.to_dict() for unit in self.units]
        return found | {
            key: value for key in ("plan", "same_as", "note") if (value := getattr(self, key))
        }


@dataclass(frozen=True, slots=True)
class Branch:
    """A child, or `count` of them that are laid out alike: then `name` is the first number of the
    run."""

    name: str
    node: Node
    count: int = 1

    @property
    def label(self) -> str:
        return self.name if self.count == 1 else f"{self.name}-{int(self.name) + self.count - 1}"

    def names(self) -> Iterator[str]:
        yield from (
            [self.name]
            if self.count == 1
            else (str(int(self.name) + at) for at in range(self.count))
        )

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "count": self.count, **self.node.to_dict()}


@dataclass(frozen=True, slots=True)
class Layout(Shown, Tabular):
    """How a model lies over the ranks, as `rank` sees it. `str()` is the tree as text, notebooks
    show it as HTML."""

    rank: int
    world_size: int
    roots: tuple[Branch, ...]  # one model, or the stages and models that this rank has
    meshes: tuple[Mesh, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(root.node.bytes for root in self.roots)

    @property
    def local_bytes(self) -> int:
        return sum(root.node.local_bytes for root in self.roots)

    def params(self) -> Iterator[tuple[str, Param]]:
        """Every parameter with its full name, unfolded, in the order of the model."""
        for name, node in self.modules():
            yield from (
                (f"{name}.{param.name}" if name else param.name, param) for param in node.params
            )

    def units(self) -> Iterator[tuple[str, Unit]]:
        """Every unit with the full name of the module it begins at, unfolded."""
        for name, node in self.modules():
            yield from ((name, unit) for unit in node.units)

    def modules(self) -> Iterator[tuple[str, Node]]:
        """Every module with its full name, unfolded."""
        pending = [("", _each(self.roots))]
        while pending:
            above, children = pending[-1]
            for name, node in children:
                full = f"{above}.{name}" if above and name else above or name
                yield full, node
                pending.append((full, _each(node.children)))
                break
            else:
                pending.pop()

    def as_rows(self) -> list[dict[str, Any]]:
        """The parameters, one a row, with their full names and the mesh they lie on."""
        return [self._as_row(name, param) for name, param in self.params()]

    def _as_row(self, name: str, param: Param) -> dict[str, Any]:
        meshes = dict(enumerate(self.meshes))
        mesh = meshes[param.mesh].label if param.mesh in meshes else None
        return {"rank": self.rank} | param.to_dict() | {"name": name, "mesh": mesh}

    def to_dict(self) -> dict[str, Any]:
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
        """A layout as `to_dict` gave it: unknown keys are skipped, absent ones are as if empty.
        ValueError for other things."""
        try:
            return cls(
                rank=int(data["rank"]),
                world_size=int(data["world_size"]),
                roots=tuple(map(_branch, data["roots"])),
                meshes=tuple(_made(Mesh, mesh) for mesh in data.get("meshes", ())),
                notes=tuple(map(str, data.get("notes", ()))),
            )
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"not a layout as Layout.to_dict() gives it ({type(error).__name__}: {error})"
            ) from None

    def __repr__(self) -> str:
        kinds = dict.fromkeys(unit.kind for unit in _distinct_units(self.roots))
        what = ", ".join([*(root.node.cls for root in self.roots), *kinds])
        return (
            f"Layout(rank {self.rank} of {self.world_size}: {what}; {self.local_bytes:,} of"
            f" {self.bytes:,} bytes here)"
        )


def _each(branches: Iterable[Branch]) -> Iterator[tuple[str, Node]]:
    for branch in branches:
        yield from ((name, branch.node) for name in branch.names())


def _distinct_units(branches: Iterable[Branch]) -> Iterator[Unit]:
    for branch in branches:
        yield from branch.node.units
        yield from _distinct_units(branch.node.children)


# -- siblings that are alike -----------------------------------------------------------------------


class TreeFolder:
    """Folds a tree while it is built from below: equal nodes become one object, runs of equal
    numbered siblings one branch.

    Linear in the number of modules: nodes are compared by the identity of what is below them, which
    is already folded.
    """

    def __init__(self) -> None:
        self._known: dict[object, Node] = {}

    def node(self, cls: str, *, children: Iterable[tuple[str, Node]], **facts: Any) -> Node:
        folded = tuple(_folded(children))
        key = (cls, *sorted(facts.items()), tuple((b.name, b.count, id(b.node)) for b in folded))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Node(cls, children=folded, **facts)
        return known


def _folded(children: Iterable[tuple[str, Node]]) -> Iterator[Branch]:
    run: Branch | None = None
    for name, node in children:
        if run is not None and run.node is node and is_number(name) and _follows(run, name):
            run = Branch(run.name, node, run.count + 1)
            continue
        if run is not None:
            yield run
        run = Branch(name, node)
    if run is not None:
        yield run


def _follows(run: Branch, name: str) -> bool:
    return is_number(run.name) and int(name) == int(run.name) + run.count


def is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10 and (name == "0" or name[0] != "0")


# -- ranks as text ---------------------------------------------------------------------------------


def ranks_to_text(ranks: Iterable[int]) -> str:
    """Ranks in their order, runs of equal steps folded: `0-3`, `0-12:4, 1`."""
    runs: list[list[int]] = []  # first, last, step, how many
    for rank in ranks:
        if runs:
            run = runs[-1]
            step = rank - run[1]
            if step > 0 and (run[3] == 1 or step == run[2]):
                run[1:] = [rank, step, run[3] + 1]
                continue
        runs.append([rank, rank, 1, 1])
    return ", ".join(_run_text(*run) for run in runs)


def _run_text(first: int, last: int, step: int, count: int) -> str:
    if count == 1:
        return str(first)
    if count == 2 and step > 1:
        return f"{first}, {last}"
    return f"{first}-{last}" if step == 1 else f"{first}-{last}:{step}"


def ranks_from_text(text: str) -> list[int]:
    """The ranks that `ranks_to_text` wrote; ValueError for another text."""
    found: list[int] = []
    for run in text.split(", ") if text else ():
        span, _, step = run.partition(":")
        first, _, last = span.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found


# -- to and from JSON ------------------------------------------------------------------------------


def _as_dict(thing: Mesh | Param | Unit) -> dict[str, Any]:
    found = {name: getattr(thing, name) for name in _NAMES[type(thing)]}
    plain = {
        name: list(value) if isinstance(value, tuple) else value for name, value in found.items()
    }
    return plain | {name: dict(found[name]) for name in ("dtypes", "settings") if name in found}


def _branch(data: Any) -> Branch:
    name, count = str(data.get("name", "")), int(data.get("count", 1))
    if count < 1 or (count > 1 and not is_number(name)):
        raise ValueError(f"a branch {name!r} of {count}")
    return Branch(name, _node(data), count)


def _node(data: Any) -> Node:
    return Node(
        cls=str(data["class"]),
        units=tuple(_made(Unit, unit) for unit in data.get("units", ())),
        plan=str(data.get("plan", "")),
        params=tuple(_made(Param, param) for param in data.get("params", ())),
        children=tuple(map(_branch, data.get("children", ()))),
        same_as=_text(data.get("same_as")),
        note=str(data.get("note", "")),
    )


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value))


def _ints(value: Any) -> tuple[int, ...]:
    return tuple(map(int, value))


def _facts(value: Any) -> Facts:
    return tuple((str(key), fact) for key, fact in value.items())


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


# How a field is read; the same name means the same thing in every class. What is not here is a text
# or None.
_READ: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("shape", "local_shape"), _ints),
    **dict.fromkeys(("dims", "groups", "placements", "also"), _texts),
    **dict.fromkeys(("dtypes", "settings"), _facts),
    **dict.fromkeys(
        ("bytes", "local_bytes", "padding_bytes", "state_bytes", "params", "mesh", "unit"), _int
    ),
    **dict.fromkeys(("requires_grad", "is_gone"), bool),
}
_NAMES: dict[Any, list[str]] = {
    cls: [one.name for one in fields(cls)] for cls in (Mesh, Param, Unit)
}
Made = TypeVar("Made", Mesh, Param, Unit)


def _made(cls: Callable[..., Made], data: Any) -> Made:
    as_text: Callable[[Any], Any] = _text
    return cls(
        **{name: _READ.get(name, as_text)(data[name]) for name in _NAMES[cls] if name in data}
    )
