"""Compares the five drop-ins with their originals, and measures the commands: one section for each
question, one row for each contender.

Each section runs in its own process: some originals leave hooks and objects behind that would slow
down later sections.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

SECTIONS = {
    "names": "naming 100,000 modules",
    "mod_tracker": "ModTracker, added to a module call",
    "comm_mode": "CommDebugMode",
    "phases": "a phase block",
    "graph_walk": "an autograd graph of 1,000,000 nodes",
    "printing": "100,000 lines from 8 processes",
    "doctor": "a verdict on a job that hangs",
    "trace": "a timeline of all ranks",
    "report": "the report page of 10,000 ranks",
}


@dataclass(frozen=True, slots=True)
class Section:
    """One question: the figures, or why there are none."""

    key: str
    title: str
    rows: tuple[tuple[str, float, str], ...] = ()
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(keys: Sequence[str]) -> list[Section]:
    return [_measured(key) for key in SECTIONS if key in keys]


def _measured(key: str) -> Section:
    print(f"{key} ...", file=sys.stderr, flush=True)
    # One thread: a fork of a process with OpenMP threads waits for them forever.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.toolboxes", key]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        return Section(key, SECTIONS[key], error=f"exit code {done.returncode}")
    rows = json.loads(done.stdout.splitlines()[-1])
    return Section(
        key,
        SECTIONS[key],
        tuple((str(name), float(figure), str(unit)) for name, figure, unit in rows),
    )


def render(sections: Sequence[Section]) -> str:
    lines = [""] if sections else []
    for section in sections:
        lines += ["", section.title]
        width = max((len(name) for name, _, _ in section.rows), default=0)
        lines += [
            f"  {name:{width}}  {figure:>10.4g} {unit}" for name, figure, unit in section.rows
        ]
        lines += [f"  failed: {section.error}"] if section.error else []
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(importlib.import_module(f"bench.{sys.argv[1]}").rows()))
