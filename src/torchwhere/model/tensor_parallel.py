"""Finds the tensor-parallel style that `parallelize_module` applied to a module."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from torchwhere.model.meshes import placement_texts


def plan_of(module: nn.Module) -> str:
    """The style that `parallelize_module` applied to a module, from the hooks that it registered:
    `ColwiseParallel: Replicate() to Shard(-1)`."""
    if not module._forward_pre_hooks and not module._forward_hooks:
        return ""
    layouts: dict[str, list[str]] = {}  # by style: of the inputs, and of the outputs
    for hook in [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]:
        for value in _enclosed(hook):
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


def _enclosed(hook: Any) -> Iterator[Any]:
    for cell in getattr(hook, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def _layout_text(layout: Any) -> str:
    placements = layout if isinstance(layout, (tuple, list)) else (layout,)
    return ", ".join(placement_texts(item for item in placements if hasattr(item, "is_replicate")))
