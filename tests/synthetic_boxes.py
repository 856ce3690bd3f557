"""The boxes of a job that never ran (`synthetic_job.py`): thousands of them in seconds.

    python tests/synthetic_boxes.py FOLDER --ranks 1024 --fault missing --victim 77

Ranks of one stage have the same records but for their times, which are made up: ranks are a few
microseconds apart.
"""

from __future__ import annotations

import argparse
import json
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from synthetic_job import FAULTS, LAYERS, Act, Job, Play, group_of, step_of_stage
from torchwhere.blackbox import file_format
from torchwhere.blackbox.file_format import (
    FLAG_ASYNC,
    FLAG_ON_DEVICE,
    EntryType,
    Geometry,
    pack_entry,
    pack_header,
    pack_text,
)
from torchwhere.blackbox.ring import RECORD_DTYPE
from torchwhere.core.events import Kind

CALL_NS = 1_000_000  # from one event to the next
LATE_NS = 30_000_000  # delay of the straggler in every step
WALL_NS = 1_800_000_000_000_000_000
START_NS = 10**12  # on the clock of the ranks
_GEMM = [4096, 8192]
_T_AT = 8  # offset of the time in a record


class Names:
    """The name table of one rank. Ranks of one stage have the same ids for the same names."""

    def __init__(self, job: Job, rank: int) -> None:
        self.ids: dict[tuple[int, str], int] = {}
        self.packed: list[bytes] = []
        stage = job.at(rank)[0]
        self._add(EntryType.THREAD, "0\tMainThread", "0\tMainThread")
        for name in _module_names(stage):
            self._add(EntryType.MODULE, name, name)
        self.groups = {
            kind: self._add(EntryType.GROUP, kind, _group_text(job, rank, kind))
            for kind in ("world", "tp", "dp", "pp")
        }
        for act in [*step_of_stage(stage, job.pp), Act(Kind.COLLECTIVE, "tp wrong")]:
            self._add(EntryType.LINE, act.line, act.line)
            if act.kind is Kind.COLLECTIVE and (EntryType.COLLECTIVE, act.label) not in self.ids:
                self._add(EntryType.COLLECTIVE, act.label, _signature(job, rank, act.label))
            elif act.kind is not Kind.COLLECTIVE and act.label:
                self._add(EntryType.PHASE, act.label, act.label)
            if act.beneficiary:
                self._add(EntryType.BENEFICIARY, act.beneficiary, act.beneficiary)

    def _add(self, sort: EntryType, key: str, text: str) -> int:
        if (sort, key) not in self.ids:
            self.ids[sort, key] = len(self.ids) + 1
            self.packed.append(_packed(len(self.ids), sort, text))
        return self.ids[sort, key]

    def row(self, act: Act) -> tuple[int, int, int, int]:
        """Ids of module, line, what and aim."""
        sort = EntryType.COLLECTIVE if act.kind is Kind.COLLECTIVE else EntryType.PHASE
        keys = (
            (EntryType.MODULE, act.module),
            (EntryType.LINE, act.line),
            (sort, act.label),
            (EntryType.BENEFICIARY, act.beneficiary),
        )
        module, line, what, beneficiary = (self.ids.get(key, 0) if key[1] else 0 for key in keys)
        return module, line, what, beneficiary


@cache
def _module_names(stage: int) -> list[str]:
    parts = ("", ".norm", ".attn", ".attn.qkv", ".attn.out", ".mlp", ".mlp.up", ".mlp.down")
    return [
        "",
        "layers",
        *(f"layers.{stage * LAYERS + i}{part}" for i in range(LAYERS) for part in parts),
    ]


@cache
def _packed(entry_id: int, sort: int, text: str) -> bytes:
    return pack_entry(entry_id, sort, text.encode())


@cache
def _text_of_group(name: str, desc: str, ranks: range | tuple[int, ...], dim: str | None) -> str:
    return json.dumps(
        {"name": name, "desc": desc, "ranks": list(ranks), "backend": "nccl", "mesh_dim": dim}
    )


def _group_text(job: Job, rank: int, kind: str) -> str:
    if kind == "world":
        return _text_of_group("0", "default_pg", range(job.ranks), None)
    return _text_of_group(
        job.group_name(rank, kind), f"mesh_{kind}", tuple(job.group(rank, kind)), kind
    )


_OPS = {
    "norm": "all_reduce",
    "grads": "reduce_scatter_tensor",
    "tp forward": "all_reduce",
    "tp backward": "all_reduce",
}


def _signature(job: Job, rank: int, what: str) -> str:
    peer = job.peer(rank, what)
    op = "all_reduce" if what == "tp wrong" else _OPS.get(what, what.partition(" ")[0])
    shape = {"norm": [1], "tp wrong": [4096, 8191]}.get(what, _GEMM)
    fields = {
        "op": op,
        "raw_op": f"c10d::{op}_",
        "group": job.stream(rank, what).group,
        "dtype": "float32" if what == "norm" else "bfloat16",
        "shapes": [shape],
        "out_shapes": [[shape[0] // job.dp, shape[1]]] if what == "grads" else [],
        "bytes": 4 if what == "norm" else 2 * shape[0] * shape[-1],
        "peer": peer,
        "reduce_op": None if peer is not None else "sum",
        "api": "isend" if op == "send" and peer is not None else op,
    }
    return json.dumps(fields)


class RecordTemplate:
    """The records of one rank without times: shared by all ranks of a stage."""

    def __init__(self, job: Job, rank: int) -> None:
        names = Names(job, rank)
        numbers: defaultdict[str, int] = defaultdict(int)
        rows: list[tuple[int, ...]] = []
        late: list[int] = []
        for step, acts in enumerate(job.steps_of(rank)):
            first = next(i for i, act in enumerate(acts) if act.label == "tp forward")
            for index, act in enumerate(act for act in acts if act.kind is not None):
                assert act.kind is not None
                module, line, what, beneficiary = names.row(act)
                is_call = act.kind is Kind.COLLECTIVE
                more = numbers[_counted_as(act.label)] if is_call else 0
                numbers[_counted_as(act.label)] += 1
                rows.append(
                    (
                        len(rows),
                        0,
                        act.kind,
                        act.pass_,
                        FLAG_ASYNC * act.is_async | FLAG_ON_DEVICE * is_call,
                        0,
                        step,
                        module,
                        0,
                        line,
                        0,
                        what,
                        beneficiary,
                        0,
                        more,
                        0,
                    )
                )
                late.append(step + (index > first or (index == first and rank == job.victim)))
        self.records = np.array(rows, RECORD_DTYPE)
        self.records["crc"] = [
            zlib.crc32(row.tobytes()[: file_format.RECORD_CRC_AT]) for row in self.records
        ]
        index = np.arange(len(rows), dtype=np.uint64)
        self.times = (
            START_NS
            + index * CALL_NS
            + (np.array(late, np.uint64) * LATE_NS if job.fault == "straggler" else 0)
        )
        self.acts = [act for acts in job.steps_of(rank) for act in acts if act.kind is not None]
        self.before_last = len(self.acts) - sum(
            act.kind is not None for act in job.steps_of(rank)[-1]
        )


def _counted_as(what: str) -> str:
    return "tp" if what.startswith("tp") else what


@cache
def _time_tables() -> list[npt.NDArray[np.uint32]]:
    """What each byte of the time adds to a record's CRC, which is linear over GF(2)."""
    zero = zlib.crc32(bytes(file_format.RECORD_CRC_AT))
    tail = [bytes(file_format.RECORD_CRC_AT - _T_AT - position - 1) for position in range(8)]
    return [
        np.array(
            [zlib.crc32(bytes(_T_AT + p) + bytes([v]) + tail[p]) ^ zero for v in range(256)],
            np.uint32,
        )
        for p in range(8)
    ]


class Maker:
    """Makes the boxes of a job."""

    def __init__(self, job: Job, folder: Path, done: list[int]) -> None:
        self._job, self._folder, self._done = job, folder, done
        self._reels: dict[int, RecordTemplate] = {}

    def write(self, rank: int) -> None:
        job, geometry = self._job, Geometry(capacity=self._job.records)
        reel, names = self._reel(rank), Names(job, rank)
        played = job.steps_of(rank)[-1][: self._done[rank]]
        count = reel.before_last + sum(act.kind is not None for act in played)
        records, text = self._timed(reel, rank, count), b""
        if job.fault == "dead" and rank == job.victim:
            records, text = _ended(records)
        head = bytearray(geometry.texts_at)
        meta = json.dumps(_meta(job, rank)).encode()
        head[: geometry.cursors_at] = pack_header(geometry, meta) * file_format.HEADER_COPIES
        _put_cursor(head, geometry, names, reel.acts[count - 1], records[-1])
        _put_tallies(head, geometry, job, rank, names, reel.acts[:count], records["t_ns"])
        ring = np.frombuffer(head, RECORD_DTYPE, geometry.capacity, geometry.ring_at)
        kept = records[-geometry.capacity :]
        ring[kept["number"] % geometry.capacity] = kept
        fd = os.open(self._folder / f"rank{rank}.box", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        os.pwrite(fd, head, 0)
        os.pwrite(fd, text, geometry.texts_at)
        os.pwrite(fd, b"".join(names.packed), geometry.table_at)
        os.close(fd)

    def _reel(self, rank: int) -> RecordTemplate:
        key = -1 if rank == self._job.victim else self._job.at(rank)[0]
        if key not in self._reels:
            self._reels[key] = RecordTemplate(self._job, rank)
        return self._reels[key]

    def _timed(self, reel: RecordTemplate, rank: int, count: int) -> npt.NDArray[Any]:
        records = reel.records[:count].copy()
        records["t_ns"] = reel.times[:count] + rank * 7919 % 5000
        columns = np.ascontiguousarray(records["t_ns"]).view(np.uint8).reshape(-1, 8)
        for position, table in enumerate(_time_tables()):
            records["crc"] ^= table[columns[:, position]]
        return records


def _ended(records: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], bytes]:
    """Adds a last record that says how the rank ended, and its text."""
    last = records[-1:].copy()
    last["number"] += 1
    last["kind"], last["subject"], last["beneficiary"], last["extra"], last["flags"] = (
        Kind.END,
        0,
        0,
        0,
        0,
    )
    last["crc"] = zlib.crc32(last.tobytes()[: file_format.RECORD_CRC_AT])
    return np.concatenate([records, last]), pack_text(0, json.dumps({"reason": "exit 1"}).encode())


def _meta(job: Job, rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "world_size": job.ranks,
        "local_rank": rank % 8,
        "run_id": "synthetic",
        "restart": 0,
        "host": f"node{rank // 8:04}",
        "pid": 1000 + rank % 8,
        "started_ns": WALL_NS,
        "clock_offset_ns": WALL_NS - START_NS,
        "folder": "/job",
    }


def _put_cursor(head: bytearray, geometry: Geometry, names: Names, act: Act, last: Any) -> None:
    module, line, _, _ = names.row(act)
    words = np.frombuffer(head, "<u8", 8, geometry.cursors_at)
    words[file_format.CURSOR_PLACE] = (
        module << file_format.MODULE_SHIFT | int(act.pass_) << file_format.PASS_SHIFT
    )
    (
        words[file_format.CURSOR_TIME],
        words[file_format.CURSOR_STEP],
        words[file_format.CURSOR_THREAD],
    ) = (
        last["t_ns"],
        last["step"],
        1,
    )
    words[file_format.CURSOR_LINE], words[file_format.CURSOR_RECORD] = line, last["number"]


def _put_tallies(
    head: bytearray,
    geometry: Geometry,
    job: Job,
    rank: int,
    names: Names,
    acts: list[Act],
    times: npt.NDArray[Any],
) -> None:
    counts = Counter([_counted_as(act.label) for act in acts if act.kind is Kind.COLLECTIVE])
    last = {
        _counted_as(act.label): index
        for index, act in enumerate(acts)
        if act.kind is Kind.COLLECTIVE
    }
    words = np.frombuffer(head, "<u8", 4 * file_format.COUNTERS, geometry.counters_at).reshape(
        -1, 4
    )
    for slot, (what, count) in enumerate(counts.items()):
        stream = job.stream(rank, what)
        group = names.groups["pp" if stream.source >= 0 else group_of(what)]
        words[slot, 0] = group << 40 | (stream.source + 1) << 20 | (stream.destination + 1)
        words[slot, 1:] = count, times[last[what]], last[what]


def make(
    job: Job,
    folder: Path,
    *,
    part: tuple[int, int] = (0, 1),
    done: Callable[[int, int], int] | None = None,
) -> None:
    """Write the boxes of a job into a folder; of several processes that share the work, the
    `part`-th of so many.

    `done` says how much of its last step each rank gets done, of how much, where that is not to be
    played.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [len(job.steps_of(rank)[-1]) for rank in range(job.ranks)] if done is not None else []
    maker = Maker(
        job,
        folder,
        [done(*each) for each in enumerate(lengths)] if done is not None else Play(job).done,
    )
    for rank in range(part[0], job.ranks, part[1]):
        maker.write(rank)


RANKS, VICTIM = 1024, 437  # of a job as tests make it
Made = Callable[..., Path]


def made_once(new_folder: Callable[[str], Path], *, records: int) -> Made:
    """Returns a function that makes the boxes of a job, each job once, in its own folder."""
    known: dict[Job, Path] = {}
    usual = records

    def make_once(fault: str, *, ranks: int = RANKS, steps: int = 5, records: int = usual) -> Path:
        job = Job(ranks, steps=steps, records=records, fault=fault, victim=VICTIM % ranks)
        if job not in known:
            known[job] = new_folder(f"{fault}-{ranks}")
            make(job, known[job])
        return known[job]

    return make_once


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the boxes of a job that never ran.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=41)
    parser.add_argument("--records", type=int, default=2048)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--victim", type=int, default=0)
    parser.add_argument(
        "--part",
        type=int,
        nargs=2,
        default=(0, 1),
        metavar=("I", "N"),
        help="write every N-th box, from the I-th on",
    )
    given = parser.parse_args()
    job = Job(
        given.ranks,
        steps=given.steps,
        records=given.records,
        fault=given.fault,
        victim=given.victim,
    )
    make(job, given.folder, part=tuple(given.part))


if __name__ == "__main__":
    main()
