"""A simulated job with any number of ranks, with data, tensor and pipeline parallelism, and a fault
in one rank.

Every rank does the step of its pipeline stage: messages to and from its neighbours, two all-reduces
of the tensor-parallel group in each layer, asynchronous reductions of the data-parallel group, and
one all-reduce of the world. All steps but the last are complete. The last one is simulated call by
call, including the waits of ranks for each other: one rank has the fault, and the other ranks get
as far as they would in a real job.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from torchwhere.core.events import Kind
from torchwhere.core.place import Pass

FAULTS = ("none", "missing", "dead", "shape", "swapped", "deadlock", "straggler")
TP = 8
LAYERS = 4  # of a stage
MICROBATCHES = 2


class Act(NamedTuple):
    """One thing that a rank does in a step: an event, or (`kind` is None) a wait for all its
    asynchronous calls."""

    kind: Kind | None
    # the key of a collective's signature, or the name of a phase or an optimizer
    label: str = ""
    module: str = ""
    pass_: Pass = Pass.OUTSIDE
    line: str = "train.py:30"
    beneficiary: str = ""
    is_async: bool = False


class Stream(NamedTuple):
    """One sequence of numbered calls: of a group, or of a pair of ranks."""

    group: str
    source: int = -1
    destination: int = -1


Call = tuple[Stream, int]


@dataclass(frozen=True)
class Job:
    """The size of a job, and its fault."""

    ranks: int
    steps: int = 41  # complete ones, before the last
    records: int = 2048
    fault: str = "none"
    victim: int = 0

    @cached_property
    def pp(self) -> int:
        return max(1, min(8, self.ranks // (2 * TP)))

    @cached_property
    def dp(self) -> int:
        return self.ranks // TP // self.pp

    def at(self, rank: int) -> tuple[int, int, int]:
        """Return the stage of a rank and its places in the data- and tensor-parallel groups."""
        return rank // (self.dp * TP), rank // TP % self.dp, rank % TP

    def rank_at(self, stage: int, d: int, t: int) -> int:
        return (stage * self.dp + d) * TP + t

    def group_name(self, rank: int, kind: str) -> str:
        stage, d, t = self.at(rank)
        if kind == "world":
            return "0"
        tp_groups, dp_groups = self.pp * self.dp, self.pp * TP
        index = {
            "tp": stage * self.dp + d,
            "dp": tp_groups + stage * TP + t,
            "pp": tp_groups + dp_groups + d * TP + t,
        }
        return str(1 + index[kind])

    def group(self, rank: int, kind: str) -> list[int]:
        stage, d, t = self.at(rank)
        if kind == "tp":
            return [self.rank_at(stage, d, i) for i in range(TP)]
        if kind == "dp":
            return [self.rank_at(stage, i, t) for i in range(self.dp)]
        return (
            [self.rank_at(i, d, t) for i in range(self.pp)]
            if kind == "pp"
            else list(range(self.ranks))
        )

    def peer(self, rank: int, label: str) -> int | None:
        """Return the other rank of a message; None if there is no such message."""
        stage, d, t = self.at(rank)
        other = stage + {
            "recv forward": -1,
            "send forward": 1,
            "recv backward": 1,
            "send backward": -1,
        }.get(label, self.pp)
        return self.rank_at(other, d, t) if 0 <= other < self.pp else None

    def stream(self, rank: int, label: str) -> Stream:
        """Return the sequence that numbers a collective."""
        peer = self.peer(rank, label)
        if peer is None:
            return Stream(self.group_name(rank, group_of(label)))
        return Stream(
            self.group_name(rank, "pp"),
            *((rank, peer) if label.startswith("send") else (peer, rank)),
        )

    def steps_of(self, rank: int) -> list[list[Act]]:
        """Return the acts of a rank in each step if no other rank delays it. Those of the victim
        contain the fault."""
        acts = step_of_stage(self.at(rank)[0], self.pp)
        steps = [acts] * (self.steps + 1)
        if rank != self.victim:
            return steps
        first = next(i for i, act in enumerate(acts) if act.label == "tp forward")
        last = max(i for i, act in enumerate(acts) if act.label == "tp backward")
        if self.fault in ("missing", "dead"):  # leaves the last step in the middle
            steps[-1] = acts[:last]
        elif self.fault == "shape":
            steps[-1] = [*acts[:first], acts[first]._replace(label="tp wrong"), *acts[first + 1 :]]
        elif self.fault == "swapped":  # two steps before the end; no call fails
            steps[-3] = [*acts[:first], acts[first + 1], acts[first], *acts[first + 2 :]]
        # the reduction of the world comes before the last one of the tensor-parallel group
        elif self.fault == "deadlock":
            norm = next(i for i, act in enumerate(acts) if act.label == "norm")
            steps[-1] = [*acts[:last], acts[norm], *acts[last:norm], *acts[norm + 1 :]]
        return steps


def group_of(label: str) -> str:
    return {"norm": "world", "grads": "dp"}.get(label, "tp")


@cache
def step_of_stage(stage: int, stages: int) -> list[Act]:
    return list(_step(stage, last=stage == stages - 1))


def _step(stage: int, *, last: bool) -> Iterator[Act]:
    """Yield the acts of a step. All stages have the same number of events: the first and the last
    stage have phases instead of messages."""
    call, forward, backward = Kind.COLLECTIVE, Pass.FORWARD, Pass.BACKWARD
    layers = [f"layers.{stage * LAYERS + i}" for i in range(LAYERS)]
    yield Act(Kind.STEP_BEGIN)
    for _ in range(MICROBATCHES):
        yield (
            Act(call, "recv forward", line="train.py:41")
            if stage
            else Act(Kind.PHASE_BEGIN, "data", line="train.py:40")
        )
        for layer in layers:
            yield Act(call, "tp forward", f"{layer}.attn.out", forward, "model.py:88")
            yield Act(call, "tp forward", f"{layer}.mlp.down", forward, "model.py:95")
        yield (
            Act(Kind.PHASE_BEGIN, "loss")
            if last
            else Act(call, "send forward", line="train.py:45", is_async=True)
        )
        yield (
            Act(Kind.PHASE_END, "loss") if last else Act(call, "recv backward", line="train.py:47")
        )
        for layer in reversed(layers):
            yield Act(call, "tp backward", f"{layer}.mlp.up", backward, "train.py:50")
            yield Act(call, "tp backward", f"{layer}.attn.qkv", backward, "train.py:50")
        yield (
            Act(call, "send backward", line="train.py:53", is_async=True)
            if stage
            else Act(Kind.PHASE_END, "data")
        )
    for layer in reversed(layers):
        yield Act(call, "grads", layer, backward, "train.py:56", json.dumps(layer), is_async=True)
    yield Act(None)
    yield Act(call, "norm", line="train.py:60")
    yield Act(Kind.OPTIMIZER, "AdamW", line="train.py:61")
    yield Act(Kind.STEP_END)


# -- the last step, simulated ----------------------------------------------------------------------


class Play:
    """Simulates the last step; `done` is the number of acts that each rank completes."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._programs = [job.steps_of(rank)[-1] for rank in range(job.ranks)]
        self._sizes = {"world": job.ranks, "tp": TP, "dp": job.dp}
        self._arrived: defaultdict[Call, int] = defaultdict(int)
        self._counts: list[defaultdict[Stream, int]] = [defaultdict(int) for _ in range(job.ranks)]
        self._pending: list[list[Call]] = [[] for _ in range(job.ranks)]
        self._waiting: defaultdict[Call, list[int]] = defaultdict(list)
        self._complete: set[Call] = set()
        self.done = [0] * job.ranks
        self._runnable = list(range(job.ranks))
        while self._runnable:
            self._continue(self._runnable.pop())

    def _continue(self, rank: int) -> None:
        program = self._programs[rank]
        while self.done[rank] < len(program):
            act = program[self.done[rank]]
            if act.kind is None:
                pending = next(
                    (call for call in self._pending[rank] if call not in self._complete),
                    None,
                )
                if pending is not None:
                    self._waiting[pending].append(rank)
                    return
            self.done[rank] += 1
            if act.kind is Kind.COLLECTIVE and not self._issue(rank, act):
                return

    def _issue(self, rank: int, act: Act) -> bool:
        """Issue a call. Returns whether the rank continues."""
        stream = self._job.stream(rank, act.label)
        call = stream, self._counts[rank][stream]
        self._counts[rank][stream] += 1
        self._arrived[call] += 1
        if self._arrived[call] == (2 if stream.source >= 0 else self._sizes[group_of(act.label)]):
            self._complete.add(call)
            self._runnable += self._waiting.pop(call, [])
            return True
        (self._pending[rank] if act.is_async else self._waiting[call]).append(
            call if act.is_async else rank
        )  # type: ignore[arg-type]
        return act.is_async
