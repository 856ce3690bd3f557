"""Builds the `Layout` of a live model, which says how the model is sharded over the ranks. Changes
nothing.

Takes a module (wrapped or not), a DeepSpeed engine, a pipeline stage or schedule, or a list of
them. It issues no collective, so each rank sees its own part; `torchwhere layout run/` compares the
ranks. Names contain no parts of wrappers. The walk visits each module once, in about 15 us a
module.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchwhere.core.model_layout import Branch, Layout, Node, Param, is_number
from torchwhere.model import units
from torchwhere.model.fsdp import RESHARD_UNDECIDED, HeldParam, class_name
from torchwhere.model.meshes import Meshes, placement_texts
from torchwhere.model.module_walk import child_name, walk
from torchwhere.model.units import Manager
from torchwhere.model.wrappers import enclosed, innermost, inwards

# Levels of modules in a layout. Its data is nested like the modules, and Python's recursion limit
# is 1000 calls.
_DEEPEST = 100


def layout(model: Any) -> Layout:
    """Describe how a model is sharded over the ranks, as this rank sees it: units, meshes,
    placements, policies, shapes and bytes.

    Args:
        model: A module (wrapped or not), a DeepSpeed engine, a pipeline stage or schedule, or a
            list of them.

    Returns:
        The layout. For a list, the names of the second and later models begin with `<Class>` or
        `<stage 2>`.

    Raises:
        TypeError: `model` is something else.
        ValueError: `model` is an empty list.

    Example:
        >>> print(torchwhere.layout(model))
    """
    first, *others = _models(model)
    models = [("", *first)]
    times: Counter[str] = Counter()
    for other, stage in others:
        name = f"stage {stage.stage_index}" if stage else class_name(innermost(other))
        times[name] += 1
        number = f"#{times[name]}" if times[name] > 1 else ""
        models.append((f"<{name}{number}>", other, stage))
    return layout_of(models)


def _models(model: Any) -> list[tuple[nn.Module, Any]]:
    things = (
        list(model)
        if isinstance(model, (list, tuple)) and not isinstance(model, nn.Module)
        else [model]
    )
    if not things:
        raise ValueError("layout([]): there is no model in the list")
    models: list[tuple[nn.Module, Any]] = []
    for thing in things:
        stages = units.stages_of(thing)
        if stages is not None:
            models += [(stage.submod, stage) for stage in stages]
        elif isinstance(thing, nn.Module):
            models.append((thing, units.stage_around(thing)))
        else:
            raise TypeError(
                "layout(model): expected a torch.nn.Module, a pipeline stage or schedule, or a"
                f" list of them, got {type(thing).__name__}. Pass the model itself, wrapped or not."
            )
    return models


def layout_of(models: Iterable[tuple[str, nn.Module, Any]]) -> Layout:
    """The layout of several models. Each has a name ("" for the main model), the model, and its
    pipeline stage or None."""
    meshes = Meshes()
    roots = tuple(
        Branch(name, _Walk(meshes, model, prefix=name).node(stage)) for name, model, stage in models
    )
    is_gone = any(mesh.is_gone for mesh in meshes.table())
    has_world = dist.is_available() and dist.is_initialized()
    return Layout(
        rank=dist.get_rank() if has_world else 0,
        world_size=dist.get_world_size() if has_world else 1,
        roots=roots,
        meshes=meshes.table(),
        notes=(
            ("the process groups are destroyed: the meshes may lack ranks and groups",)
            if is_gone
            else ()
        ),
    )


@dataclass(slots=True)
class _Frame:
    """A module whose children are being walked."""

    key: str  # its name in the module above
    name: str
    module: nn.Module  # inside all wrappers
    managers: list[Manager]
    params: list[Param]
    todo: Iterator[tuple[str, nn.Module]]
    is_cut: bool = False
    done: list[tuple[str, Node]] = field(default_factory=list)


class _Walk:
    """One walk through one model."""

    def __init__(self, meshes: Meshes, root: nn.Module, *, prefix: str) -> None:
        self._meshes = meshes
        self._root = root
        self._prefix = prefix
        self._folder = TreeFolder()
        self._around: list[Manager] = []  # units that contain the current module, outermost first
        self._module_names: dict[int, str] = {}  # first name of each module
        self._param_names: dict[object, str] = {}  # first name of each parameter

    def node(self, stage: Any) -> Node:
        frames = [self._enter("", self._prefix, self._root, depth=0, above=self._above(stage))]
        while True:
            frame = frames[-1]
            child = next(frame.todo, None)
            if child is None:
                frames.pop()
                node = self._leave(frame)
                if not frames:
                    return node
                frames[-1].done.append((frame.key, node))
                continue
            key, module = child
            name = child_name(frame.name, key)
            first_name = self._module_names.get(id(module))
            if first_name is not None:
                cls = class_name(innermost(module))
                node = self._folder.node(cls, children=(), same_as=first_name)
                frame.done.append((key, node))
            else:
                frames.append(self._enter(key, name, module, depth=len(frames)))

    def _above(self, stage: Any) -> list[Manager]:
        """Units around the root that are not modules: a pipeline stage, and ZeRO if the model was
        passed without its engine."""
        managers = [units.stage_manager(stage, self._meshes)] if stage is not None else []
        is_engine = any(manager.kind.startswith("ZeRO") for manager in self._managers(self._root))
        zero = None if is_engine else units.zero_of(self._root, self._meshes)
        return managers + ([zero] if zero is not None else [])

    def _managers(self, module: nn.Module) -> list[Manager]:
        """The units that begin at a module or at the wrappers around it, outermost first."""
        managers: list[Manager] = []
        for part in inwards(module):
            managers += units.managers_at(part, self._meshes)
        return managers

    def _enter(
        self, key: str, name: str, module: nn.Module, *, depth: int, above: Iterable[Manager] = ()
    ) -> _Frame:
        managers = [*above, *self._managers(module)]
        for manager in managers:
            self._decide_reshard(manager)
            self._around.append(manager)
        self._module_names[id(module)] = name
        inner = innermost(module)
        self._module_names[id(inner)] = name
        children = [(key, child) for key, child in inner._modules.items() if child is not None]
        is_cut = depth >= _DEEPEST and bool(children)
        params = [
            param
            for held_as in self._slots(inner)
            if (param := self._param(inner, name, held_as)) is not None
        ]
        return _Frame(key, name, inner, managers, params, iter(() if is_cut else children), is_cut)

    def _decide_reshard(self, manager: Manager) -> None:
        """Before the first forward, FSDP2 does not know which unit is the root. In a whole model it
        is the outermost unit."""
        if manager.facts.get("reshard") == RESHARD_UNDECIDED:
            is_inside = any(outer.kind == manager.kind for outer in self._around)
            manager.facts["reshard"] = "after forward" if is_inside else "after backward"

    def _leave(self, frame: _Frame) -> Node:
        if frame.managers:
            del self._around[-len(frame.managers) :]
        return self._folder.node(
            class_name(frame.module),
            children=frame.done,
            units=tuple(
                manager.unit(self._also(manager, frame.module)) for manager in frame.managers
            ),
            plan=plan_of(frame.module),
            params=tuple(frame.params),
            note=f"more than {_DEEPEST} levels: the rest is left out" if frame.is_cut else "",
        )

    def _also(self, manager: Manager, module: nn.Module) -> list[str]:
        """The other modules of a unit that begins at several ones: `fully_shard([norm, head])`. A
        unit around a wrapper (`checkpoint_wrapper`) begins at the module inside it."""
        others = [other for other in manager.modules if innermost(other) is not module]
        return [self._names.get(id(other), "?") for other in others]

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        return {id(part): name for name, part in walk(self._root, prefix=self._prefix)}

    def _slots(self, module: nn.Module) -> list[str]:
        """The names of a module's own parameters, also of those that FSDP1 has removed from it."""
        # a flat parameter has `_fqns`
        names = [key for key, param in module._parameters.items() if not hasattr(param, "_fqns")]
        removed = [name for manager in self._around for name in manager.removed.get(id(module), ())]
        return names + [name for name in removed if name not in module._parameters]

    def _param(self, module: nn.Module, name: str, key: str) -> Param | None:
        tensor = module._parameters[key] if key in module._parameters else None  # noqa: SIM401 - a ScriptModule has no `get`
        full = child_name(name, key)
        unit, held = self._held(module, key, tensor)
        if held is None:
            return None
        tied = self._param_names.setdefault(held.key, full)
        param = _param(key, held, unit, None if tied == full else tied)
        if param.tied is None and unit is not None:
            manager = self._around[-1 - unit]
            manager.params += 1
            manager.bytes += param.bytes
            manager.local_bytes += param.local_bytes
        return param

    def _held(
        self, module: nn.Module, key: str, tensor: torch.Tensor | None
    ) -> tuple[int | None, HeldParam | None]:
        for up, manager in enumerate(reversed(self._around)):
            held = manager.find_param(module, key, tensor)
            if held is not None:
                return up, held
        return None, None if tensor is None else units.held_param(tensor, self._meshes)


def _param(name: str, held: HeldParam, unit: int | None, tied: str | None) -> Param:
    size = held.dtype.itemsize
    return Param(
        name=name,
        shape=held.shape,
        local_shape=held.local_shape,
        dtype=str(held.dtype).removeprefix("torch."),
        bytes=math.prod(held.shape) * size,
        local_bytes=math.prod(held.local_shape) * size,
        requires_grad=held.requires_grad,
        device=held.device,
        mesh=held.mesh,
        placements=held.placements,
        unit=unit,
        tied=tied,
        note=held.note,
    )


class TreeFolder:
    """Creates the nodes of one tree, children first.

    Linear in the number of modules: it compares nodes by the identity of their children, which are
    already folded.
    """

    def __init__(self) -> None:
        self._nodes: dict[object, Node] = {}

    def node(self, cls: str, *, children: Iterable[tuple[str, Node]], **facts: Any) -> Node:
        folded = _folded(children)
        key = (cls, *sorted(facts.items()), tuple((b.name, b.count, id(b.node)) for b in folded))
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(cls, children=folded, **facts)
        return node


def _folded(children: Iterable[tuple[str, Node]]) -> tuple[Branch, ...]:
    branches: list[Branch] = []
    for name, node in children:
        run = branches[-1] if branches else None
        if run is not None and run.node is node and _follows(run, name):
            branches[-1] = Branch(run.name, node, run.count + 1)
        else:
            branches.append(Branch(name, node))
    return tuple(branches)


def _follows(run: Branch, name: str) -> bool:
    is_numbered = is_number(name) and is_number(run.name)
    return is_numbered and int(name) == int(run.name) + run.count


def plan_of(module: nn.Module) -> str:
    """The style that `parallelize_module` applied to a module, from the hooks that it registered:
    `ColwiseParallel: Replicate() to Shard(-1)`."""
    if not module._forward_pre_hooks and not module._forward_hooks:
        return ""
    layouts: dict[str, list[str]] = {}  # by style: of the inputs, and of the outputs
    for hook in [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]:
        for value in enclosed(hook):
            if isinstance(value, functools.partial) and value.func.__name__ in (
                "_prepare_input_fn",
                "_prepare_output_fn",
            ):
                style = value.func.__qualname__.split(".")[0]
                layouts.setdefault(style, []).append(_layout_text(value.args[0]))
            elif type(value).__module__.startswith("torch.distributed.tensor.parallel"):
                layouts.setdefault(type(value).__name__, [])
    return "; ".join(
        f"{style}: {' to '.join(filter(None, texts))}".rstrip(": ")
        for style, texts in layouts.items()
    )


def _layout_text(layout: Any) -> str:
    placements = layout if isinstance(layout, (tuple, list)) else (layout,)
    return ", ".join(placement_texts(item for item in placements if hasattr(item, "is_replicate")))
