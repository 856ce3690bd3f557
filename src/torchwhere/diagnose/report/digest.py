"""Collects the data of a report from each box: steps, module times, phases, compilations.

The workers that load the boxes (`diagnose/calls/job_calls.py`) pass each box to a `Digest` and send
it back with their batch of calls. A box of a thousand records takes 0.04 ms, one with module events
0.4 ms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import NO_STEP
from torchwhere.blackbox.phase_sums import PhaseKey, PhaseSum, phase_sums
from torchwhere.core.arrays import AnyArray, Ints
from torchwhere.core.events import Kind, SideKind
from torchwhere.core.place import PASS_LABELS
from torchwhere.diagnose.phases import last_ns
from torchwhere.diagnose.report.spans import module_times
from torchwhere.diagnose.report.texts import cut

MOST_STEPS = 100
_MOST_COMPILATIONS = 64  # of a rank, the last ones: a graph may recompile in every step
_NONE = np.empty(0, np.int64)

ModuleKey = tuple[str | None, str]  # name and pass


class CompilationRow(NamedTuple):
    """One compilation of a graph on a rank."""

    graph: str
    part: str
    because: str | None
    step: int | None
    took_ns: int | None


class DigestedBox(NamedTuple):
    """The data of one box."""

    path: Path
    first_ns: int = 0  # wall clock of the first record
    steps: Ints = _NONE  # the last complete steps
    took_ns: Ints = _NONE
    modules: tuple[ModuleKey, ...] = ()
    # calls, total ns, self ns, calls in complete steps
    module_numbers: Ints = np.empty((4, 0), np.int64)
    phases: dict[PhaseKey, PhaseSum] = {}  # noqa: RUF012 - never changed
    until_ns: int = 0  # the time at which the phase sums were read
    compilations: tuple[CompilationRow, ...] = ()
    has_parts: bool = False  # whether the box has the parts of steps

    @property
    def complete_steps(self) -> tuple[int, int] | None:
        """The first and the last of the complete steps."""
        return (int(self.steps[0]), int(self.steps[-1])) if len(self.steps) else None


@dataclass(slots=True)
class Digest:
    """The data of several boxes."""

    boxes: list[DigestedBox] = field(default_factory=list)
    _modules: dict[tuple[ModuleKey, ...], tuple[ModuleKey, ...]] = field(default_factory=dict)

    def take(self, box: Box) -> Box:
        """Collect the data of a box, and return the box."""
        self.boxes.append(self._digested(box))
        return box

    def _digested(self, box: Box) -> DigestedBox:
        records = box.records
        kinds = np.bincount(records["kind"], minlength=256)
        steps, took_ns = step_times(records)
        complete = (int(steps[0]), int(steps[-1])) if len(steps) else None
        modules, numbers = (
            self._module_times(box, complete)
            if kinds[Kind.MODULE_ENTER]
            else ((), np.empty((4, 0), np.int64))
        )
        phases = phase_sums(box)
        return DigestedBox(
            path=box.path,
            first_ns=box.wall_ns(int(records["t_ns"][0])) if len(records) else 0,
            steps=steps,
            took_ns=took_ns,
            modules=modules,
            module_numbers=numbers,
            phases=phases,
            until_ns=last_ns(box) if phases else 0,
            compilations=_compilations(box) if kinds[Kind.COMPILE_BEGIN] else (),
            has_parts=bool((box.side_records["kind"] == SideKind.STEP_TIMES).any()),
        )

    def _module_times(
        self, box: Box, complete: tuple[int, int] | None
    ) -> tuple[tuple[ModuleKey, ...], Any]:
        times = module_times(box.records, complete)
        if times is None:
            return (), np.empty((4, 0), np.int64)
        passes = (PASS_LABELS.get(pass_, "outside") for pass_ in times.passes)
        keys = tuple(zip(map(box.name, times.modules), passes, strict=True))
        # ranks of one stage share one tuple
        return self._modules.setdefault(keys, keys), times.numbers


def step_times(records: AnyArray) -> tuple[Ints, Ints]:
    """The numbers of the last steps that begin and end in these records, and their durations."""
    begins = np.flatnonzero(records["kind"] == int(Kind.STEP_BEGIN))
    ends = np.flatnonzero(records["kind"] == int(Kind.STEP_END))
    before = np.searchsorted(begins, ends) - 1
    begins, ends = begins[before[before >= 0]], ends[before >= 0]
    is_same = (records["step"][begins] == records["step"][ends]) & (
        records["step"][ends] != NO_STEP
    )
    begins, ends = begins[is_same][-MOST_STEPS:], ends[is_same][-MOST_STEPS:]
    times = records["t_ns"].astype(np.int64)
    # for a step that ran twice, the last
    steps, last = np.unique(records["step"][ends][::-1].astype(np.int64), return_index=True)
    return steps, np.maximum(times[ends] - times[begins], 0)[::-1][last]


def _compilations(box: Box) -> tuple[CompilationRow, ...]:
    records = box.records
    begins = np.flatnonzero(records["kind"] == int(Kind.COMPILE_BEGIN))[-_MOST_COMPILATIONS:]
    ends = records[records["kind"] == int(Kind.COMPILE_END)]
    compilations = []
    for index in map(int, begins):
        event, row = box.event(index), records[index]
        same = ends[(ends["subject"] == row["subject"]) & (ends["number"] > row["number"])]
        because = event.fields.get("because")
        compilations.append(
            CompilationRow(
                graph=cut(event.fields.get("what")),
                part=cut(event.fields.get("part") or "forward"),
                because=cut(str(because).partition("\n")[0].strip()) if because else None,
                step=event.place.step,
                took_ns=int(same["t_ns"][0]) - int(row["t_ns"]) if len(same) else None,
            )
        )
    return tuple(compilations)
