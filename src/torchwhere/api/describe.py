"""`torchwhere.describe(anything)`: one line that says what a live object is, and where it belongs.

Describes modules, parameters, tensors, autograd nodes, process groups and meshes; any other object
by its class and a short `repr`. Names come from the running watch and from the models that
`torchwhere.names()` was called with, while they are alive. Never raises: for a destroyed group or a
`__repr__` that fails, the line says so.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchwhere.api import names as naming
from torchwhere.blackbox.string_table import shown_description
from torchwhere.core.place import Certainty, shown
from torchwhere.core.rank_text import ranks_to_text
from torchwhere.core.sanitize import plural
from torchwhere.model import parameters, watched
from torchwhere.model.fsdp import class_name
from torchwhere.model.module_names import NameTable
from torchwhere.model.wrappers import innermost

_LONGEST = 200  # characters of an object's own `repr`
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _LONGEST


def describe(thing: object) -> str:
    """Return one line that says what an object is, and where it belongs.

    Args:
        thing: A module, parameter, tensor, autograd node, process group, device mesh, or any other
            object.

    Returns:
        One line of text, also for an object that cannot be described.

    Example:
        torchwhere.names(model)
        print(torchwhere.describe(model.head.weight))
        # parameter head.weight: [8, 8] float32 cpu, requires grad
    """
    try:
        return one_line(_describer(thing)(thing))
    except Exception as error:
        return (
            f"{type(thing).__name__}, which could not be described ({type(error).__name__}:"
            f" {one_line(str(error))})"
        )


def one_line(text: str) -> str:
    """Turn a text into one line: each line break or run of spaces becomes one space."""
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
    """All names of a module, parameter or buffer, in the watch or in a model that
    `torchwhere.names()` was called with; empty if it has none."""
    watch = watched.running()
    table = watch.names if watch is not None else None
    names = _known_names(thing, table)
    # The model may have changed since it was walked. The result of a computation has no name, so it
    # is not worth another walk.
    if not names and isinstance(thing, (nn.Module, nn.Parameter, nn.Buffer)):
        # `refresh` does not mark an unknown module as foreign for the rest of the watch
        if table is not None:
            table.refresh()
        candidates = (model.get(thing) for model in naming.names_of_live_models())
        names = _known_names(thing, table) or next(filter(None, candidates), [])
    return names


def _known_names(thing: nn.Module | torch.Tensor, table: NameTable | None) -> list[str]:
    for model in naming.names_of_live_models():
        if names := model.known_names(thing):
            return names
    if table is None:
        return []
    if isinstance(thing, torch.Tensor):
        return table.params.of(thing)
    return table.modules.get(id(thing)) or table.modules.get(id(innermost(thing))) or []


def _named(kind: str, names: list[str]) -> str:
    also = f" (also {', '.join(map(shown, names[1:]))})" if len(names) > 1 else ""
    return f"{kind} {shown(names[0])}{also}" if names else f"{kind} of no known model"


# -- modules and tensors ---------------------------------------------------------------------------


def _module(module: nn.Module) -> str:
    inner = innermost(module)
    arguments = _extra_repr(inner)
    label = f"{class_name(inner)}({arguments})" if arguments else class_name(inner)
    if inner is not module:
        label = f"{type(module).__name__} around {label}"
    params = list(inner.parameters())
    numel = sum(map(_numel, params))
    size = f", {plural(len(params), 'parameter')} of {numel:,} elements" if params else ""
    return f"{_named('module', names_of(module))}: {label}{size}"


def _extra_repr(module: nn.Module) -> str:
    try:
        return _short(module.extra_repr())
    except Exception:
        return ""


def _numel(param: Any) -> int:
    return int(param.ds_numel) if hasattr(param, "ds_numel") else int(param.numel())


def _tensor(tensor: torch.Tensor) -> str:
    names = names_of(tensor)
    has_origin = not tensor.is_leaf and tensor.grad_fn is not None
    origin = f", from {_node(tensor.grad_fn).removeprefix('node ')}" if has_origin else ""
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
    facts = [f"{list(shape)} {parameters.short_dtype(tensor)} {tensor.device}"]
    if local != shape:
        facts.append(f"{list(local)} on this rank")
    if parameters.is_dtensor(tensor):
        mesh = parameters.mesh_of(tensor.device_mesh)
        facts.append(
            f"{', '.join(parameters.placements(tensor) or ())} on"
            f" {mesh.label}{', which was destroyed' * mesh.is_gone}"
        )
    if (number := parameters.zero_id(tensor)) is not None:
        facts.append(f"ZeRO id {number}, {parameters.zero_status(tensor)}")
    if parameters.is_flat(tensor):
        facts.append(_holds(parameters.originals(tensor)))
    if tensor.requires_grad:
        facts.append("requires grad")
    return facts


def _holds(originals: Sequence[str]) -> str:
    if len(originals) <= 2:
        return f"holds {', '.join(originals)}"
    return f"holds {originals[0]} .. {originals[-1]} ({len(originals)} parameters)"


def _shapes(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The whole shape, and that of this rank's part."""
    if getattr(tensor, "_fsdp_flattened", False) and not parameters.is_flat(tensor):
        # FSDP1 made it a slice of a flat parameter: only its unit knows its shape.
        for model in naming.names_of_live_models():
            if model.known_names(tensor):
                facts = model.facts(tensor)
                return facts.shape, facts.local_shape
    return parameters.shapes(tensor)


# -- autograd nodes --------------------------------------------------------------------------------


def _node(node: Any) -> str:
    operation = node.name().rpartition("::")[2]
    variable = getattr(node, "variable", None)
    if isinstance(variable, torch.Tensor):
        return f"node {operation} into {_tensor(variable)}"
    return f"node {operation}{made_in(node)}"


def made_in(node: Any) -> str:
    """The module call that made a node, as the end of a sentence; empty without a watch."""
    watch = watched.running()
    if watch is None:
        return ""
    place = watch.place_of_node(node)
    if place.certainty is Certainty.UNKNOWN:
        return " of an unknown module call"
    if place.module is None:
        return ", made outside any module"
    call = f" call {place.call}" if place.call else ""
    inferred = " (inferred)" if place.certainty is Certainty.INFERRED else ""
    return f" of {shown(place.module)}{call}{inferred}"


# -- groups and meshes -----------------------------------------------------------------------------


def _group(group: Any) -> str:
    try:
        ranks = dist.get_process_group_ranks(group)
    except Exception:  # torch has removed it from its table of groups
        return "process group that was destroyed"
    name, desc = group.group_name, shown_description(group.group_desc)
    own = dist.get_group_rank(group, dist.get_rank()) if dist.get_rank() in ranks else None
    position = "this rank is not in it" if own is None else f"this is its rank {own}"
    label = f"{desc} ({name})" if desc not in ("", name) else name
    ranks_list = _ranks(ranks_to_text(ranks))
    return f"process group {label}: {dist.get_backend(group)}, {ranks_list}; {position}"


def _mesh(mesh: Any) -> str:
    facts = parameters.mesh_of(mesh)
    dims = facts.label if any(facts.dims) else " x ".join(map(str, facts.shape))
    ranks = f", {_ranks(facts.ranks)}" if facts.ranks else ""
    text = f"device mesh {dims} on {facts.device}{ranks}"
    if facts.is_gone:
        return f"{text}; its process groups were destroyed"
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return f"{text}; this rank is not in it"
    indices = zip(facts.dims, coordinate, strict=True)
    position = ", ".join(f"{dim}={index}" if dim else str(index) for dim, index in indices)
    return f"{text}; this rank is at {position}"


def _ranks(text: str) -> str:
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


# -- other objects ---------------------------------------------------------------------------------


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
