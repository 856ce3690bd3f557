"""Writes the boxes of a simulated job on hosts with different clocks.

A program is a list of acts for each rank. `Player` simulates the programs in true time, including
the waits of ranks for each other. Each host has its own clock, with an offset and a drift, and a
rank records the times of that clock. A test can thus compare aligned times with the true ones.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchwhere.blackbox.file_format import FLAG_ASYNC, EntryType
from torchwhere.blackbox.file_names import box_name
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import Kind

WALL_NS = 1_800_000_000_000_000_000
BOOT_NS = 10**13  # the monotonic clocks when the job begins
TRANSFER_NS = 80_000


@dataclass(frozen=True)
class Act:
    """One thing that a rank does: work, or an event."""

    action: str  # "work", "call", "send", "recv", "mark"
    group: tuple[int, ...] = ()
    op: str = "all_reduce"
    work_ns: int = 0
    peer: int = -1
    is_async: bool = False
    kind: Kind = Kind.STEP_BEGIN
    line: str = ""


def work(ns: float) -> Act:
    return Act("work", work_ns=int(ns))


def call(group: Sequence[int], op: str = "all_reduce", *, is_async: bool = False) -> Act:
    return Act("call", tuple(group), op, is_async=is_async)


def send(peer: int, *, is_async: bool = False, line: str = "") -> Act:
    return Act("send", peer=peer, is_async=is_async, op="send", line=line)


def recv(peer: int, *, is_async: bool = False, line: str = "") -> Act:
    return Act("recv", peer=peer, is_async=is_async, op="recv", line=line)


def mark(kind: Kind) -> Act:
    return Act("mark", kind=kind)


@dataclass(frozen=True)
class Skew:
    """The offset and the drift of a clock."""

    offset_ns: int = 0
    ppm: float = 0.0

    def shows(self, true_ns: float) -> int:
        """Return the reading of the clock at a true time after the begin of the job."""
        return int(true_ns * (1 + self.ppm / 1e6)) + self.offset_ns


@dataclass
class Player:
    """Simulates the programs; `log` has the records of each rank with their true times."""

    programs: list[list[Act]]
    waits: bool = True  # False: calls return at once, as on a GPU
    seed: int = 0
    # shortest and longest time from the last arrival to the end of a call
    transfer_ns: tuple[float, float] = (TRANSFER_NS, TRANSFER_NS)
    log: list[list[tuple[float, Act, int]]] = field(default_factory=list)

    def play(self) -> Player:
        dice = random.Random(self.seed)
        ranks = range(len(self.programs))
        now, at = [dice.random() * 1e5 for _ in ranks], [0 for _ in ranks]
        counts: list[defaultdict[object, int]] = [defaultdict(int) for _ in ranks]
        arrivals: defaultdict[object, dict[int, float]] = defaultdict(dict)
        waiting: dict[int, tuple[object, int]] = {}
        done: dict[object, float] = {}
        self.log = [[] for _ in ranks]
        moved = True
        while moved:
            moved = False
            for rank in ranks:
                while at[rank] < len(self.programs[rank]):
                    if rank in waiting:
                        key, size = waiting[rank]
                        if len(arrivals[key]) < size:
                            break
                        if key not in done:
                            done[key] = max(arrivals[key].values()) + dice.uniform(
                                *self.transfer_ns
                            )
                        now[rank] = max(now[rank], done[key]) + dice.random() * 20_000
                        del waiting[rank]
                        at[rank] += 1
                        moved = True
                        continue
                    act = self.programs[rank][at[rank]]
                    moved = True
                    now[rank] += 2_000 + dice.random() * 3_000
                    if act.action == "work":
                        now[rank] += act.work_ns
                    else:
                        key, size = self._key(rank, act)
                        number = counts[rank][key]
                        counts[rank][key] += 1
                        self.log[rank].append((now[rank], act, number))
                        if act.action != "mark":
                            arrivals[key, number][rank] = now[rank]
                        if act.action in ("call", "recv") and not act.is_async and self.waits:
                            waiting[rank] = (key, number), size
                            continue
                    at[rank] += 1
        return self

    def _key(self, rank: int, act: Act) -> tuple[object, int]:
        if act.action == "call":
            return act.group, len(act.group)
        pair = (rank, act.peer) if act.action == "send" else (act.peer, rank)
        return ("p2p", pair), 2

    def write(
        self,
        folder: Path,
        skews: Sequence[Skew],
        hosts: Sequence[str],
        *,
        offsets: Sequence[int] | None = None,
        records: int | None = None,
        backend: str = "gloo",
        queued: Sequence[float] | None = None,
    ) -> None:
        """Write the boxes.

        Args:
            folder: The folder of the run.
            skews: The clock of each rank.
            hosts: The host of each rank.
            offsets: The error of the wall-clock offset that each rank records.
            records: The capacity of each ring; by default all records fit.
            backend: The backend of all groups.
            queued: The share of its time that each rank waits for a CPU.
        """
        for rank, events in enumerate(self.log):
            offset = (offsets or [0] * len(self.log))[rank]
            meta = {
                "rank": rank,
                "world_size": len(self.log),
                "run_id": "skewed",
                "host": hosts[rank],
                "pid": 100 + rank,
                "started_ns": WALL_NS,
                "clock_offset_ns": WALL_NS - BOOT_NS + offset,
            }
            box = BoxWriter(
                folder / box_name(rank), meta=meta, records=records or max(8, len(events))
            )
            self._fill(box, events, skews[rank], backend)
            for second in range(int(events[-1][0] / 1e9) + 1 if queued is not None else 0):
                box.beat(
                    BOOT_NS + skews[rank].shows(second * 1e9),
                    cpu_delay_ns=int((queued or [])[rank] * 1e9),
                )
            box.close()

    def _fill(
        self, box: BoxWriter, events: list[tuple[float, Act, int]], skew: Skew, backend: str
    ) -> None:
        box.intern(EntryType.THREAD, "0\tMainThread")
        step = -1
        for true_ns, act, number in events:
            t_ns = BOOT_NS + skew.shows(true_ns)
            step += act.action == "mark" and act.kind is Kind.STEP_BEGIN
            collective = 0
            if act.action != "mark":
                members = act.group or tuple(range(len(self.programs)))
                name = "-".join(map(str, members))
                group = {
                    "name": name,
                    "desc": "",
                    "ranks": list(members),
                    "backend": backend,
                    "mesh_dim": None,
                }
                box.intern(EntryType.GROUP, json.dumps(group))
                peer = act.peer if act.peer >= 0 else None
                fields = {
                    "op": act.op,
                    "group": name,
                    "dtype": "float32",
                    "shapes": [[4]],
                    "bytes": 16,
                    "peer": peer,
                }
                collective = box.intern(EntryType.COLLECTIVE, json.dumps(fields))
            kind = act.kind if act.action == "mark" else Kind.COLLECTIVE
            flags = FLAG_ASYNC * act.is_async
            line = box.intern(EntryType.LINE, act.line) if act.line else 0
            box.record(
                kind,
                t_ns,
                1,
                flags,
                0,
                max(step, 0),
                0,
                0,
                line,
                0,
                collective,
                0,
                0,
                number if act.action != "mark" else 0,
            )
