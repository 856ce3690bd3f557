"""The results of a `CommDebugMode` as text or JSON: the table for a terminal, the table of older
versions, and the tree for a browser.

Takes the dicts of the mode and a noise level. The output has exactly the form of torch's
`_comm_mode.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchwhere.drop_in.comm_modules import GLOBAL, CommModeModuleTracker

_YELLOW, _RED, _PLAIN = "\033[1;33m", "\033[1;31m", "\033[0m"
_MAX_DEPTH = 900  # of nested modules; the json module cannot write much deeper trees

trivial_ops = {
    "aten.detach.default",
    "aten.t.default",
    "aten.view.default",
    "aten._to_copy.default",
    "aten.as_strided.default",
    "aten.transpose.int",
}

Counts = dict[str, dict[str, dict[Any, int]]]  # by module, by `forward` and `backward`, by op
Operations = dict[str, dict[str, list[dict[str, Any]]]]  # by module, under `operations_list`


@dataclass(frozen=True, slots=True)
class ModeResults:
    """Everything that the tables show."""

    modules: CommModeModuleTracker
    counts: Counts
    operations: Operations


def table(results: ModeResults, noise_level: int) -> str:
    """Return the table for a terminal."""
    return "".join(f"{line}\n" for line in _lines(results, noise_level))


def _lines(results: ModeResults, noise_level: int) -> Iterator[str]:
    for fqn, helper in results.modules.module_helper_dict.items():
        indent = "    " * helper["depth"]
        yield f"{indent}{fqn}"
        if noise_level > 0:
            yield from _module_lines(helper, indent)
        for heading, collectives, operations in _passes(results, fqn, noise_level):
            if collectives or operations:
                yield f"{indent}  {heading}"
                yield from (
                    f"{_YELLOW}{indent}    *{op}: {count}{_PLAIN}"
                    for op, count in collectives.items()
                )
                for operation in _shown(operations, noise_level):
                    yield from _operation_lines(operation, indent)


def _module_lines(helper: Mapping[str, Any], indent: str) -> Iterator[str]:
    if helper.get("module_type"):
        yield f"{indent}*module type: {helper['module_type']}"
    if "parameters" in helper:
        yield f"{indent}*Parameter List"
        yield from (
            f"{indent} *{name}: {placement}" for name, placement in helper["parameters"].items()
        )


def _passes(
    results: ModeResults, fqn: str, noise_level: int
) -> list[tuple[str, dict[Any, int], list[dict[str, Any]]]]:
    """Return the three passes of a module: heading, collectives and operations of each."""
    counts = results.counts.get(fqn, {})
    listed = results.operations.get(fqn, {}).get("operations_list", []) if noise_level > 0 else []
    forward = [op for op in listed if not op["is_bw"]]
    backward = [op for op in listed if op["is_bw"] and not op["is_activation_checkpointing"]]
    checkpointing = [op for op in listed if op["is_activation_checkpointing"]]
    return [
        ("FORWARD PASS", counts.get("forward", {}), forward),
        ("BACKWARD PASS", counts.get("backward", {}), backward),
        ("ACTIVATION CHECKPOINTING", {}, checkpointing),
    ]


def _shown(operations: Iterable[dict[str, Any]], noise_level: int) -> Iterator[dict[str, Any]]:
    """Yield the operations of a level. 3: all; 2: all but trivial ones; 1: of these, those on
    DTensors."""
    for operation in operations:
        is_quiet = noise_level < 3 and str(operation["name"]) in trivial_ops
        if not is_quiet and (noise_level > 1 or operation["input_sharding"]):
            yield operation


def _operation_lines(operation: Mapping[str, Any], indent: str) -> Iterator[str]:
    yield f"{_YELLOW}{indent}    **{operation['name']}{_PLAIN}"
    if operation["input_shape"]:
        yield f"{_RED}{indent}      shape: {operation['input_shape']}{_PLAIN}"
        yield f"{_RED}{indent}      sharding: {operation['input_sharding']}{_PLAIN}"
        yield f"{_RED}{indent}      device mesh: {operation['device_mesh']}{_PLAIN}"


def older_table(results: ModeResults) -> str:
    """Return the table of torch 2.4: one line for each kind of collective, forward and backward
    together."""
    lines = []
    for fqn, helper in results.modules.module_helper_dict.items():
        indent = "  " * helper["depth"]
        lines.append(f"{indent}{fqn}\n")
        counts = Counter[Any]()
        for collectives in results.counts.get(fqn, {}).values():
            counts.update(collectives)
        lines += [f"{_YELLOW}{indent}  *{op}: {count}{_PLAIN}\n" for op, count in counts.items()]
    return "".join(lines)


def json_tree(
    results: ModeResults, noise_level: int, *, fqn: str = GLOBAL, depth: int = 0
) -> dict[str, Any]:
    """Return a module and its submodules as the viewer of torch reads them."""
    helper = results.modules.module_helper_dict[fqn]
    has_module_data = noise_level > 0 and helper.get("module_type")
    forward, backward, checkpointing = (
        [_as_json(op) for op in _shown(operations, noise_level)]
        for _, _, operations in _passes(results, fqn, noise_level)
    )
    counts = results.counts.get(fqn, {})
    below = results.modules.parent_dict.get(fqn, []) if depth < _MAX_DEPTH else []
    return {
        "fqn": fqn,
        "module_type": helper["module_type"] if has_module_data else "",
        "parameters": list(helper.get("parameters", {}).items()) if has_module_data else [],
        "children": [
            json_tree(results, noise_level, fqn=child, depth=depth + 1) for child in below
        ],
        "collectives_forward": _json_counts(counts.get("forward", {})),
        "collectives_backward": _json_counts(counts.get("backward", {})),
        "operations_forward": forward,
        "operations_backward": backward,
        "operations_checkpointing": checkpointing,
    }


def _json_counts(counts: Mapping[Any, int]) -> list[tuple[str, int]]:
    return [(str(op), count) for op, count in counts.items()]


def _as_json(operation: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **operation,
        "name": str(operation["name"]),
        "input_shape": [str(shape) for shape in operation["input_shape"]],
        "input_sharding": [str(placements) for placements in operation["input_sharding"]],
    }
