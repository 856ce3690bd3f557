"""`python -m bench [--device cuda] [--json] [--only WORKLOAD ...]`: measures what watching costs,
in one interleaved run, and prints one table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import data_parallel, imports, rounds, table, toolboxes
from bench.contenders import (
    AGAIN,
    CONTENDERS,
    MODULE_EVENTS,
    NO_DEVICE,
    PYTHON,
    PYTHON_EVENTS,
    TORCHWHERE,
    UNWATCHED,
    build_native_extension,
)
from bench.figures import TARGETS, Column, column
from bench.workloads import CPU, Workload

OWN = (UNWATCHED, TORCHWHERE, MODULE_EVENTS, NO_DEVICE, PYTHON, PYTHON_EVENTS, AGAIN)


def main() -> int:
    warnings.simplefilter("ignore")  # ModTracker warns in every step
    workloads = {"cpu": CPU + data_parallel.CPU, "cuda": data_parallel.CUDA}
    arguments = _parse(workloads)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("bench: --device cuda, but torch sees no CUDA device here", file=sys.stderr)
        return 2
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    build_native_extension()
    chosen = [
        workload
        for workload in workloads[arguments.device]
        if _is_wanted(workload.key, arguments.only)
    ]
    columns = [
        _measure(workload, device=arguments.device, alone=arguments.alone) for workload in chosen
    ]
    if _is_wanted("import", arguments.only):
        columns.append(imports.column())
    keys = [
        key
        for key in toolboxes.SECTIONS
        if arguments.device == "cpu" and _is_wanted(key, arguments.only)
    ]
    sections = [] if arguments.alone else toolboxes.measure(keys)
    machine = _machine(arguments.device)
    if arguments.json:
        print(_as_json(machine, columns, sections))
    else:
        print(table.render(", ".join(machine.values()), columns) + toolboxes.render(sections))
    return 0


def _parse(workloads: dict[str, tuple[Workload, ...]]) -> argparse.Namespace:
    keys = [workload.key for group in workloads.values() for workload in group]
    keys += ["import", *toolboxes.SECTIONS]
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measure what it costs to watch a training job."
    )
    parser.add_argument(
        "--device", choices=list(workloads), default="cpu", help="cuda: GPT-2 124M on one GPU"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, with the figures of every round"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="WORKLOAD", choices=keys, help=f"run only: {', '.join(keys)}"
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="measure only torchwhere, without other tools: more rounds in the same time",
    )
    return parser.parse_args()


def _is_wanted(key: str, only: Sequence[str] | None) -> bool:
    return only is None or key in only


def _measure(workload: Workload, *, device: str, alone: bool) -> Column:
    start = time.monotonic()
    names = set(workload.contenders or [contender.name for contender in CONTENDERS])
    if alone:
        names.intersection_update(OWN)
    if device == "cpu":
        names.discard(NO_DEVICE)
    contenders = [contender for contender in CONTENDERS if contender.name in names]
    measured = column(workload, rounds.run(workload, contenders))
    seconds = time.monotonic() - start
    print(f"{workload.key}: {measured.rounds} rounds, {seconds:.0f} s", file=sys.stderr)
    return measured


def _machine(device: str) -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, one thread",
        "cpu": f"{os.cpu_count()} x {_cpu_model()}",
        "torch": f"torch {torch.__version__}",
        "python": f"Python {platform.python_version()}",
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def _as_json(
    machine: dict[str, str], columns: Sequence[Column], sections: Sequence[toolboxes.Section]
) -> str:
    targets = [
        {"workload": target.workload, "target": target.text, "measured": target.measured(columns)}
        for target in TARGETS
        if any(column.key == target.workload for column in columns)
    ]
    results = {
        "machine": machine,
        "workloads": [column.to_dict() for column in columns],
        "targets": targets,
        "toolboxes": [section.to_dict() for section in sections],
    }
    return json.dumps(results, indent=1)


if __name__ == "__main__":
    sys.exit(main())
