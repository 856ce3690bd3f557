"""Drop-in for `deepspeed.utils.debug`, with the same names and texts. DeepSpeed itself is optional.

Better than the original: names have no prefixes of wrappers and survive re-wrapping; `status=none`
without ZeRO; whole shapes of FSDP1 shards; placements of DTensors; lines of different processes
never mix; one file for each rank; every node of a graph is visited once; ranks work before
`init_process_group`. These functions show more: `torchwhere.names`, `describe`, `print_rank`,
`rank_log`, `backward_graph`.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from torchwhere.api import names as naming

# `dist.get_rank()` as in the original; this one works before there is a process group too
from torchwhere.api import printing as dist
from torchwhere.api.describe import made_in, names_of
from torchwhere.model import parameters
from torchwhere.model.graph_walk import is_leaf, walk
from torchwhere.model.module_names import NameTable
from torchwhere.model.wrappers import innermost

UNKNOWN, NONE = "unknown", "none"

# The original has both names. It sets `fcntl` when it first prints; nothing here uses it.
fcntl = None
fh: io.FileIO | None = None  # the file that `log_rank_file` wrote to last


# -- names -----------------------------------------------------------------------------------------


class WeakIdNameMap:
    """Maps modules or parameters to their names, without keeping them alive.

    Setting a name puts a weak reference on the object, as in the original. The names that
    `debug_extract_module_and_param_names` finds put none on a parameter.

    Example:
        >>> param_names[model.head.weight]
        'head.weight'
    """

    def __init__(self, table: NameTable | None = None, *, of_modules: bool = False) -> None:
        self._table = NameTable() if table is None else table
        self._of_modules = of_modules
        self._given: Any = WeakIdKeyDictionary()  # names that the user set

    def __setitem__(self, thing: object, name: str) -> None:
        self._given[thing] = name

    def __getitem__(self, thing: object) -> str:
        if thing in self._given:
            return str(self._given[thing])
        names = self._found_names(thing)
        if not names:
            raise KeyError(thing)
        return names[0]

    def __contains__(self, thing: object) -> bool:
        return thing in self._given or bool(self._found_names(thing))

    def __len__(self) -> int:
        own = sum(not self._found_names(thing) for thing in self._given)
        return own + len(self._table.modules if self._of_modules else self._table.params)

    def _found_names(self, thing: object) -> list[str]:
        if self._of_modules:
            return self._table.modules.get(id(thing), [])
        return self._table.params.of(thing)

    def clear(self) -> None:
        """Remove all names."""
        self._given.clear()
        (self._table.modules if self._of_modules else self._table.params).clear()
        self._table.forget_roots()


_table = NameTable()
_names: naming.Names | None = None  # of the last model
module_names = WeakIdNameMap(_table, of_modules=True)
param_names = WeakIdNameMap(_table)


def debug_clear_module_and_param_names() -> None:
    """Remove all names of modules and parameters."""
    global _names
    module_names.clear()
    param_names.clear()
    _table.clear()
    _names = None


def debug_extract_module_and_param_names(model: nn.Module) -> None:
    """Store the names of all modules and parameters of `model`, and remove all other names.

    Example:
        >>> debug_extract_module_and_param_names(model)
        >>> debug_param2name(model.head.weight)
        'head.weight'
    """
    global _names
    naming.check(model, caller="debug_extract_module_and_param_names")
    debug_clear_module_and_param_names()
    _names = naming.Names(model, table=_table)


def debug_module2name(module: nn.Module) -> str:
    """Return the module's name, or `unknown`."""
    if module in module_names:
        return module_names[module]
    names: list[str] = []
    if isinstance(module, nn.Module):  # it may be new in the model, or wrap a module of the model
        names = _table.module_names(module) or _table.module_names(innermost(module))
    return names[0] if names else UNKNOWN


def debug_module2name_id(module: Any) -> str:
    """Return `name=...`, and `id=...` if DeepSpeed has numbered the module, as older versions
    do."""
    number = getattr(module, "id", None)
    return f"name={debug_module2name(module)}" + (
        f" id={number}" if isinstance(number, int) else ""
    )


def debug_module2name_class(module: Any) -> str:
    """Return `name=... ClassName`."""
    return f"name={debug_module2name(module)} {type(module).__name__}"


def debug_param2name(param: torch.Tensor) -> str:
    """Return the parameter's name, or `unknown`."""
    if param in param_names:
        return param_names[param]
    names = _table.param_names(param) if isinstance(param, torch.Tensor) else []
    return names[0] if names else UNKNOWN


def ds_id(param: Any) -> Any:
    """Return ZeRO's number of a parameter, or `none`."""
    return getattr(param, "ds_id", NONE)


def ds_shape(param: Any) -> Any:
    """Return the whole shape of a parameter, which ZeRO or FSDP1 may have sharded; for a DTensor,
    the global shape."""
    if hasattr(param, "ds_shape"):
        return param.ds_shape
    if parameters.is_flat(param):
        return torch.Size(parameters.shapes(param)[0])
    if getattr(param, "_fsdp_flattened", False) and _names is not None and param in _names:
        return torch.Size(_names.facts(param).shape)
    return _of(param, "shape")


def debug_param2name_id(param: Any) -> str:
    """Return `name=... id=...`."""
    return f"name={debug_param2name(param)} id={ds_id(param)}"


def debug_param2name_id_shape(param: Any) -> str:
    """Return `name=... id=... shape=...`, and the placements of a DTensor."""
    return f"{_id_shape(param)}{_placements(param)}"


def debug_param2name_id_shape_device(param: Any) -> str:
    """Return `name=... id=... shape=... device=...`."""
    return f"{_id_shape(param)} device={_of(param, 'device')}{_placements(param)}"


def debug_param2name_id_numel(param: Any) -> str:
    """Return `name=... id=... numel=...`."""
    return f"{debug_param2name_id(param)} numel={_of(param, 'numel')()}"


def debug_param2name_id_shape_status(param: Any) -> str:
    """Return `name=... id=... shape=... status=...`; the status is ZeRO's or `none`."""
    return f"{_id_shape(param)} status={getattr(param, 'ds_status', NONE)}{_placements(param)}"


def _of(param: object, attribute: str) -> Any:
    try:
        return getattr(param, attribute)
    except AttributeError:
        raise TypeError(
            f"expected a parameter, got {type(param).__name__}, which has no {attribute}"
        ) from None


def _id_shape(param: Any) -> str:
    return f"{debug_param2name_id(param)} shape={ds_shape(param)}"


def _placements(param: Any) -> str:
    placements = parameters.placements(param)
    return "" if placements is None else f" placements=({', '.join(placements)})"


# -- printing --------------------------------------------------------------------------------------


def printflock(*msgs: object) -> None:
    """Print a message without text of other processes in between."""
    _print(*msgs)


def print_rank(*msg: object, force: bool = False) -> None:
    """Print a message on all ranks, after `[rank]`, if `force` is true.

    Example:
        >>> print_rank("loss", loss.item(), force=True)
        [3] loss 0.25
    """
    if force:
        _print(f"[{dist.get_rank()}]", *msg)


def print_rank0(*msg: object, force: bool = False) -> None:
    """Print a message on rank 0 only, if `force` is true."""
    if force and dist.get_rank() == 0:
        _print("[0]", *msg)


def _print(*values: object) -> None:
    dist.print_whole(" ".join(map(str, values)) + "\n")


def log_rank_file(rank: int, *msgs: object) -> None:
    """Append each message as a line to `log_rank_<rank>.txt` in the working directory.

    `torchwhere diff` compares the files of the ranks.
    """
    global fh
    fh = dist.append("".join(f"{message}\n" for message in msgs), folder=".", rank=rank)


# -- the graph behind a tensor ---------------------------------------------------------------------


def print_backward_tensors(tensor: torch.Tensor) -> None:
    """Print every autograd node behind a tensor once, and the leaf tensors with data and gradients.

    Raises:
        ValueError: If the tensor has no graph.

    Example:
        >>> print_backward_tensors(model(x).sum())
    """
    if not hasattr(tensor, "grad_fn"):
        return
    if tensor.grad_fn is None:
        raise ValueError(
            "print_backward_tensors(tensor): this tensor has no graph (its grad_fn is None)"
        )
    for node in walk([tensor.grad_fn]).nodes:
        if is_leaf(node):
            leaf = node.variable
            names = [debug_param2name(leaf)] if leaf in param_names else names_of(leaf)
            called = f", name: {names[0]}" if names else ""
            data = "freed" if _is_freed(leaf) else leaf
            text = (
                f"Tensor - id: {id(leaf)}, shape: {leaf.shape}, data: {data}, grad:"
                f" {leaf.grad}{called}"
            )
            _print(f"{node}\n{text}")
        else:
            _print(f"Backward tensors in {node}{made_in(node)}")


def _is_freed(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is freed, like that of a whole parameter which FSDP2 has
    resharded: printing it would crash."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return False
    try:
        return tensor.untyped_storage().size() == 0
    except (NotImplementedError, RuntimeError):  # some subclasses and layouts have no storage
        return False
