"""`torchwhere.describe(anything)`: one line that says what a live object is, and where it belongs.

Knows modules, parameters, tensors, autograd nodes, process groups and meshes; anything else gets
its class and a short `repr`. Names come from the running watch and from the models that
`torchwhere.names()` was asked about, while they live. Never raises: what an object does not tell
any more (a destroyed group, a `__repr__` of its own that fails) is said instead.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchwhere.api import names as naming
from torchwhere.core.place import Certainty, shown
from torchwhere.core.rank_text import ranks_to_text
from torchwhere.model import parameters, watched
from torchwhere.model.fsdp import class_name
from torchwhere.model.module_names import NameTable
from torchwhere.model.wrappers import innermost

_LONGEST = 200  # of a text that an object gives of itself
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _LONGEST


def describe(thing: object) -> str:
    """What `thing` is, in one line."""
    try:
        return one_line(_describer(thing)(thing))
    except Exception as error:
        return (
            f"{type(thing).__name__}, which could not be described ({type(error).__name__}:"
            f" {one_line(str(error))})"
        )


def one_line(text: str) -> str:
    """A text from outside as one line: line breaks and runs of spaces are one space."""
    return " ".join(text.split())


def _describer(thing: object) -> Callable[[Any], str]:
    if isinstance(thing, nn.Module):
        return _module
    if isinstance(thing, torch.Tensor):
        return _tensor
    if isinstance(thing, torch.autograd.graph.Node):
        return _node
    if dist.is_available():
        if isinstance(thing, dist.ProcessGroup):
            return _group
        if isinstance(thing, DeviceMesh):
            return _mesh
    return _anything


# -- names -----------------------------------------------------------------------------------------


def names_of(thing: nn.Module | torch.Tensor) -> list[str]:
    """All names of a module, parameter or buffer, from whoever knows it; empty if nobody does."""
    watch = watched.running()
    tables = [watch.names] if watch is not None else []
    found = _known_names(thing, tables)
    if not found and _may_have_name(thing):  # it may have come since the names were taken
        for table in tables:  # asked like this the watch does not take it for a stranger for good
            table.refresh()
        found = _known_names(thing, tables) or next(
            (names for known in naming.known() if (names := known.get(thing))), []
        )
    return found


def _known_names(thing: nn.Module | torch.Tensor, tables: list[NameTable]) -> list[str]:
    for known in naming.known():
        if found := known.known_names(thing):
            return found
    if isinstance(thing, torch.Tensor):
        return next((names for table in tables if (names := table.params.of(thing))), [])
    tried = [(id(one), table) for table in tables for one in (thing, innermost(thing))]
    return next((names for key, table in tried if (names := table.modules.get(key) or [])), [])


def _may_have_name(thing: nn.Module | torch.Tensor) -> bool:
    """Whether it is worth walking a model for it: a result of a computation is nobody's
    parameter."""
    return isinstance(thing, (nn.Module, nn.Parameter, nn.Buffer))


def _named(kind: str, names: list[str]) -> str:
    also = f" (also {', '.join(map(shown, names[1:]))})" if len(names) > 1 else ""
    return f"{kind} {shown(names[0])}{also}" if names else f"{kind} of no known model"


# -- modules and tensors ---------------------------------------------------------------------------


def _module(module: nn.Module) -> str:
    inner = innermost(module)
    words = _own_words(inner)
    label = f"{class_name(inner)}({words})" if words else class_name(inner)
    if inner is not module:
        label = f"{type(module).__name__} around {label}"
    count = sum(1 for _ in inner.parameters())
    numel = sum(_numel(param) for param in inner.parameters())
    holds = f", {count:,} parameter{'s' * (count != 1)} of {numel:,} elements" if count else ""
    names = names_of(module)
    return f"{_named('module', names)}: {label}{holds}"


def _own_words(module: nn.Module) -> str:
    try:
        return _short(module.extra_repr())
    except Exception:
        return ""


def _numel(param: Any) -> int:
    return int(param.ds_numel) if hasattr(param, "ds_numel") else int(param.numel())


def _tensor(tensor: torch.Tensor) -> str:
    names = names_of(tensor)
    origin = (
        ""
        if tensor.is_leaf or tensor.grad_fn is None
        else f", from {_node(tensor.grad_fn).removeprefix('node ')}"
    )
    kind = _kind(tensor, is_named=bool(names))
    label = _named(kind, names) if names or kind.endswith("parameter") else kind
    return f"{label}: {', '.join(_tensor_facts(tensor))}{origin}"


def _kind(tensor: torch.Tensor, *, is_named: bool) -> str:
    if parameters.is_flat(tensor):
        return parameters.FLAT_PARAMETER
    kind = ""
    if isinstance(tensor, nn.Parameter):
        kind = "parameter"
    elif is_named or isinstance(tensor, nn.Buffer):
        kind = "buffer"
    return f"DTensor {kind}".rstrip() if parameters.is_dtensor(tensor) else kind or "tensor"


def _tensor_facts(tensor: Any) -> list[str]:
    shape, local = _shapes(tensor)
    found = [f"{list(shape)} {parameters.short_dtype(tensor)} {tensor.device}"]
    found += [f"{list(local)} of it here"] if local != shape else []
    if parameters.is_dtensor(tensor):
        mesh = parameters.mesh_of(tensor.device_mesh)
        found.append(
            f"{', '.join(parameters.placements(tensor) or ())} on"
            f" {mesh.label}{', which is gone' * mesh.is_gone}"
        )
    if (number := parameters.zero_id(tensor)) is not None:
        found.append(f"ZeRO id {number}, {parameters.zero_status(tensor)}")
    if parameters.is_flat(tensor):
        held = parameters.originals(tensor)
        found.append(
            f"holds {', '.join(held)}"
            if len(held) <= 2
            else f"holds {held[0]} .. {held[-1]} ({len(held)} parameters)"
        )
    if tensor.requires_grad:
        found.append("requires grad")
    return found


def _shapes(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if getattr(tensor, "_fsdp_flattened", False) and not parameters.is_flat(tensor):
        # FSDP1 has cut it into a piece of a row: only its unit knows its shape
        for known in naming.known():
            if known.known_names(tensor):
                found = known.facts(tensor)
                return found.shape, found.local_shape
    return parameters.shapes(tensor)


# -- autograd nodes --------------------------------------------------------------------------------


def _node(node: Any) -> str:
    operation = node.name().rpartition("::")[2]
    variable = getattr(node, "variable", None)
    if isinstance(variable, torch.Tensor):
        return f"node {operation} into {_tensor(variable)}"
    return f"node {operation}{made_in(node)}"


def made_in(node: Any) -> str:
    """The module call that made a node, if the watch saw it."""
    watch = watched.running()
    if watch is None:
        return ""
    place = watch.place_of_node(node)
    if place.certainty is Certainty.UNKNOWN:
        return ", made where the watch did not see it"
    if place.module is None:
        return ", made outside any module"
    call = f" call {place.call}" if place.call else ""
    return (
        f" of {shown(place.module)}{call}{' (inferred)' * (place.certainty is Certainty.INFERRED)}"
    )


# -- groups and meshes -----------------------------------------------------------------------------


def _group(group: Any) -> str:
    try:
        ranks = dist.get_process_group_ranks(group)
    except Exception:  # torch's table of groups no longer has it
        return "process group that was destroyed"
    name, desc = group.group_name, group.group_desc
    own = dist.get_group_rank(group, dist.get_rank()) if dist.get_rank() in ranks else None
    place = "this rank is not in it" if own is None else f"this is its rank {own}"
    label = f"{desc} ({name})" if desc not in ("undefined", "", name) else name
    return (
        f"process group {label}: {dist.get_backend(group)}, {_ranks(ranks_to_text(ranks))}; {place}"
    )


def _mesh(mesh: Any) -> str:
    found = parameters.mesh_of(mesh)
    dims = found.label if any(found.dims) else " x ".join(map(str, found.shape))
    text = (
        f"device mesh {dims} on {found.device}{', ' + _ranks(found.ranks) if found.ranks else ''}"
    )
    if found.is_gone:
        return f"{text}; its process groups are gone: the world it was made in was destroyed"
    at = mesh.get_coordinate()
    if at is None:
        return f"{text}; this rank is not in it"
    coordinates = zip(found.dims, at, strict=True)
    own = ", ".join(f"{dim}={i}" if dim else str(i) for dim, i in coordinates)
    return f"{text}; this rank is at {own}"


def _ranks(text: str) -> str:
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


# -- the rest --------------------------------------------------------------------------------------


def _anything(thing: object) -> str:
    if thing is None:
        return "None"
    kind = type(thing).__qualname__
    if isinstance(thing, type):
        return f"class {thing.__module__}.{thing.__qualname__}"
    try:
        return f"{kind}: {_short(_repr.repr(thing))}"
    except Exception as error:
        return f"{kind}, whose __repr__ raises {type(error).__name__}"


def _short(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
