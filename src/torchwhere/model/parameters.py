"""Describes one parameter or buffer, however it is sharded: plain, DTensor, FSDP1, FSDP2, ZeRO.

`facts` takes a tensor, its names and its FSDP unit, and returns `ParameterFacts`. It gives the
shape of the whole parameter and of this rank's part, whether or not the parameter is gathered at
the moment. It reads attributes that torch and DeepSpeed have on their objects. If an attribute is
missing, the fact is unknown; this is never an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from torchwhere.core.model_layout import Mesh
from torchwhere.model.fsdp import HeldParam, Slot, fsdp1_facts, fsdp1_params, fsdp2_params
from torchwhere.model.fsdp_states import fsdp2_groups, fsdp2_state, is_fsdp1
from torchwhere.model.meshes import Meshes, placement_texts
from torchwhere.model.module_names import NameTable
from torchwhere.model.module_walk import child_name, walk
from torchwhere.model.wrappers import WRAPPER_PARTS, loaded_class

Shape = tuple[int, ...]

PARAMETER, BUFFER, FLAT_PARAMETER = "parameter", "buffer", "flat parameter"
# the name of the flat parameter of an FSDP1 unit, unless FSDP1 keeps the original parameters
FLAT_KEY = "_flat_param"
_UNNAMED_PARTS = WRAPPER_PARTS - {"module"}  # a user's module may be called `module`


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """One parameter or buffer. `local_shape` and `local_numel` describe the part that this rank
    stores."""

    name: str
    aliases: tuple[str, ...]  # its other names, if it is tied
    kind: str  # `parameter`, `buffer`, or `flat parameter` (FSDP1)
    shape: Shape
    local_shape: Shape
    numel: int
    local_numel: int
    dtype: str
    device: str
    requires_grad: bool
    id: int | None = None  # the number that ZeRO gave it (`ds_id`), the same on all ranks
    zero_status: str | None = None  # ZeRO-3: AVAILABLE, NOT_AVAILABLE, INFLIGHT
    # of a DTensor or a parameter in an FSDP unit: one for each mesh dimension
    placements: tuple[str, ...] | None = None
    mesh: str | None = None  # the dimensions of the mesh: `dp=2 x tp=4`
    unit: str | None = None  # the FSDP unit that gathers it; "" is the root
    flat: str | None = None  # FSDP1: the flat parameter that contains it
    holds: tuple[str, ...] = ()  # the original parameters in a flat parameter

    @property
    def is_sharded(self) -> bool:
        return (
            self.local_numel != self.numel
            or self.placements is not None
            or self.zero_status is not None
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# -- facts from the tensor alone -------------------------------------------------------------------


def is_dtensor(tensor: object) -> bool:
    return isinstance(tensor, loaded_class("torch.distributed.tensor", "DTensor"))


def is_flat(tensor: object) -> bool:
    """Whether a tensor is the flat parameter of an FSDP1 unit."""
    return getattr(tensor, "_is_flat_param", False) is True and hasattr(tensor, "_fqns")


def shapes(tensor: Any) -> tuple[Shape, Shape]:
    """The shape of the whole parameter, and of this rank's part."""
    if hasattr(tensor, "ds_shape"):  # ZeRO-3: while it is partitioned, the tensor itself is empty
        part = getattr(tensor, "ds_tensor", None)
        return tuple(tensor.ds_shape), tuple(tensor.shape if part is None else part.shape)
    if is_dtensor(tensor):
        with torch.no_grad():
            return tuple(tensor.shape), tuple(tensor.to_local().shape)
    if is_flat(tensor):
        now = tuple(tensor.shape)
        return tuple(getattr(tensor, "_unpadded_unsharded_size", now)), tuple(
            getattr(tensor, "_sharded_size", now)
        )
    return tuple(tensor.shape), tuple(tensor.shape)


def zero_id(tensor: object) -> int | None:
    number = getattr(tensor, "ds_id", None)
    return number if isinstance(number, int) else None


def zero_status(tensor: object) -> str | None:
    status = getattr(tensor, "ds_status", None)
    return None if status is None else str(getattr(status, "name", status))


def placements(tensor: Any) -> tuple[str, ...] | None:
    return placement_texts(tensor.placements) if is_dtensor(tensor) else None


def mesh_of(mesh: Any) -> Mesh:
    """Describe a DeviceMesh."""
    meshes = Meshes()
    meshes.of_mesh(mesh)
    return meshes.table()[0]


def short_dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# -- facts from the model --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """One original parameter of an FSDP unit, whichever tensor the module has at the moment."""

    unit: str
    held: HeldParam | None = None
    mesh: str | None = None
    placements: tuple[str, ...] | None = None
    flat: Any = None  # FSDP1: the flat parameter that contains it


def fsdp_parts(named_modules: Iterable[tuple[str, nn.Module]]) -> dict[Slot, Part]:
    """Every parameter that an FSDP1 or FSDP2 unit manages, by its module and its name there."""
    parts: dict[Slot, Part] = {}
    names: dict[int, str] = {}
    meshes = Meshes()
    modules = [(names.setdefault(id(module), name), module) for name, module in named_modules]
    for name, module in modules:
        if is_fsdp1(module):
            parts.update(_flat_parts(name, module, meshes))
        elif (state := fsdp2_state(module)) is not None:
            parts.update(_grouped_parts(name, state, names, meshes))
    return parts


def _flat_parts(unit: str, wrapper: Any, meshes: Meshes) -> Iterator[tuple[Slot, Part]]:
    handle, managed = wrapper._handle, fsdp1_facts(wrapper, meshes)
    if handle is None:
        return
    flat, label = handle.flat_param, _label(meshes, managed["mesh"])
    yield (
        (id(handle._fully_sharded_module), FLAT_KEY),
        Part(unit, None, label, managed["placements"], flat),
    )
    for slot, held in fsdp1_params(wrapper, managed["mesh"], managed["placements"]).items():
        yield slot, Part(unit, held, label, held.placements, flat)


def _grouped_parts(
    unit: str, state: Any, names: dict[int, str], meshes: Meshes
) -> Iterator[tuple[Slot, Part]]:
    for group in fsdp2_groups(state):
        begins_at = [
            names[id(module)] for module in getattr(group, "modules", ()) if id(module) in names
        ]
        for slot, held in fsdp2_params(group, meshes).items():
            yield (
                slot,
                Part(
                    ", ".join(begins_at) or unit, held, _label(meshes, held.mesh), held.placements
                ),
            )


def flat_names(table: NameTable) -> dict[int, list[str]]:
    """The names of the flat parameters that FSDP1 computes with (`layers.0._flat_param`), by their
    ids. They are leaves of the autograd graph, but if FSDP1 keeps the original parameters they are
    in no module."""
    names = {}
    for prefix, root in table.roots():
        for name, module in walk(root, prefix=prefix):
            flat: Any = getattr(getattr(module, "_handle", None), "flat_param", None)
            if flat is not None:
                names[id(flat)] = [child_name(name, FLAT_KEY)]
    return names


def _label(meshes: Meshes, number: int | None) -> str | None:
    return None if number is None else meshes.table()[number].label


def facts(
    tensor: Any,
    names: list[str],
    *,
    kind: str,
    part: Part | None = None,
    flat_name: str | None = None,
) -> ParameterFacts:
    """Describe a tensor. `names[0]` is the name that is shown; the others are aliases."""
    held = part.held if part is not None else None
    shape, local_shape = shapes(tensor) if held is None else (held.shape, held.local_shape)
    is_itself_flat = is_flat(tensor) and flat_name is None
    return ParameterFacts(
        name=names[0],
        aliases=tuple(names[1:]),
        kind=FLAT_PARAMETER if is_itself_flat else kind,
        shape=shape,
        local_shape=local_shape,
        numel=prod(shape),
        local_numel=prod(local_shape),
        dtype=short_dtype(tensor),
        device=str(tensor.device),
        requires_grad=bool(tensor.requires_grad),
        id=zero_id(tensor),
        zero_status=zero_status(tensor),
        placements=placements(tensor) if part is None else part.placements,
        mesh=_mesh_label(tensor) if part is None else part.mesh,
        unit=part.unit if part is not None else None,
        flat=flat_name,
        holds=originals(tensor, unit=names[0].rpartition(".")[0]) if is_itself_flat else (),
    )


def _mesh_label(tensor: Any) -> str | None:
    return mesh_of(tensor.device_mesh).label if is_dtensor(tensor) else None


def originals(flat: Any, *, unit: str = "") -> tuple[str, ...]:
    """The names of the original parameters in a flat parameter. They begin with `unit` and contain
    no parts of wrappers."""
    parts = ((part for part in fqn.split(".") if part not in _UNNAMED_PARTS) for fqn in flat._fqns)
    return tuple(child_name(unit, ".".join(named)) for named in parts)
