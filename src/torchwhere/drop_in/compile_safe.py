"""Hooks at module boundaries that run in compiled graphs too, without a graph break:
`ModTracker.compile_safe_hooks`.

The tensors that enter and leave a module go through a function that dynamo does not trace (a leaf
function). It calls the forward hook itself, and an autograd node calls the backward hook. Values
and gradients do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchwhere.hooks import _torch
from torchwhere.model.module_walk import check_module

Tensors = tuple[Any, ...]  # of tensors; in backward, None stands for a missing gradient
Hook = Callable[[str, Tensors], object]
PostForward = Callable[[str, Tensors, Tensors], object]
ModuleFilter = Callable[[str, nn.Module], bool]
_Leaf = Callable[..., Tensors]


@contextmanager
def compile_safe_hooks(
    model: nn.Module,
    pre_fw_hook: Hook | None = None,
    post_fw_hook: PostForward | None = None,
    pre_bw_hook: Hook | None = None,
    post_bw_hook: Hook | None = None,
    module_filter: ModuleFilter | None = None,
) -> Iterator[None]:
    """Call hooks at the boundaries of all submodules of `model` for which `module_filter(fqn,
    module)` is true, also in a compiled graph.

    The hooks get names and tuples of tensors: `pre_fw_hook(fqn, inputs)`, `post_fw_hook(fqn,
    inputs, outputs)`, `pre_bw_hook(fqn, grad_outputs)`, `post_bw_hook(fqn, grad_inputs)`. `model`
    itself gets no hooks: they would run outside its compiled graph. This needs no tracker.

    Example:
        >>> with ModTracker.compile_safe_hooks(model, pre_fw_hook=lambda fqn, inputs: log(fqn)):
        ...     torch.compile(model)(x)
    """
    _check(model, (pre_fw_hook, post_fw_hook, pre_bw_hook, post_bw_hook, module_filter))
    with ExitStack() as stack:
        for fqn, module in model.named_modules():
            if fqn and (module_filter is None or module_filter(fqn, module)):
                inputs: list[Tensors] = [()]  # of the running call, for post_fw_hook
                if pre_fw_hook is not None or post_bw_hook is not None or post_fw_hook is not None:
                    leaf = _leaf(fqn, partial(_enter, fqn, pre_fw_hook, inputs), post_bw_hook)
                    handle = module.register_forward_pre_hook(_before(leaf), with_kwargs=True)
                    stack.callback(handle.remove)
                if post_fw_hook is not None or pre_bw_hook is not None:
                    leaf = _leaf(fqn, partial(_leave, fqn, post_fw_hook, inputs), pre_bw_hook)
                    handle = module.register_forward_hook(_after(leaf))
                    stack.callback(handle.remove)
        yield


def _check(model: object, functions: tuple[object, ...]) -> None:
    check_module(model, "compile_safe_hooks(model)")
    for function in functions:
        if function is not None and not callable(function):
            raise TypeError(
                "compile_safe_hooks(): hooks and module_filter must be callable, got"
                f" {type(function).__name__}"
            )


def _enter(fqn: str, hook: Hook | None, inputs: list[Tensors], tensors: Tensors) -> None:
    inputs[0] = tensors
    if hook is not None:
        hook(fqn, tensors)


def _leave(fqn: str, hook: PostForward | None, inputs: list[Tensors], tensors: Tensors) -> None:
    if hook is not None:
        hook(fqn, inputs[0], tensors)
    inputs[0] = ()


def _leaf(fqn: str, on_forward: Callable[[Tensors], None], on_backward: Hook | None) -> _Leaf:
    """Return a function that returns its arguments, and calls one hook in forward and the other
    one in backward."""

    # Always needed: without a node, gradients do not cross a leaf function in a compiled graph.
    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, *tensors: Any) -> Any:
            return tensors

        @staticmethod
        def backward(_ctx: Any, *gradients: Any) -> Any:
            if on_backward is not None:
                on_backward(fqn, gradients)
            return gradients

    def passing(*tensors: Any) -> Tensors:
        on_forward(tensors)
        if any(tensor.requires_grad for tensor in tensors):
            passed = Passing.apply(*tensors)  # type: ignore[no-untyped-call]
            return passed if isinstance(passed, tuple) else (passed,)
        return tensors

    leaf_function = _torch.resolve(_torch.NAMES["leaf_function"].path)
    leaf: Any = (leaf_function or torch.compiler.disable)(passing)
    if leaf_function is not None:
        leaf.register_fake(_same)
    return cast(_Leaf, leaf)


def _same(*tensors: Any) -> Tensors:
    return tensors


def _before(leaf: _Leaf) -> Callable[..., Any]:
    def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _passed_through(leaf, (args, kwargs))

    return before


def _after(leaf: _Leaf) -> Callable[..., Any]:
    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        return _passed_through(leaf, output)

    return after


def _passed_through(leaf: _Leaf, value: Any) -> Any:
    """Return a nested structure whose tensors went through the leaf function."""
    flat, spec = tree_flatten(value)
    at = [index for index, item in enumerate(flat) if isinstance(item, torch.Tensor)]
    if not at:
        return value
    for index, tensor in zip(at, leaf(*[flat[index] for index in at]), strict=False):
        flat[index] = tensor
    return tree_unflatten(flat, spec)
