"""All_to_all calls whose parts do not fit: who sends what another one does not take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist

import torchwhere
from diagnosing import diagnose
from rank_pool import Pool
from torchwhere.blackbox.file_format import EntryType
from torchwhere.blackbox.file_names import box_name
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.run import read_run
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import Kind
from torchwhere.core.place import Certainty
from torchwhere.diagnose.doctor.verdict import Verdict, VerdictKind

FITTING = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]  # rows from each to each


def judged(
    folder: Path,
    sent: list[list[int]],
    taken: list[list[int]],
    *,
    with_splits: bool = True,
    instead: Mapping[int, object] = MappingProxyType({}),
) -> Verdict:
    """The verdict on ranks of which each sends rows of 2 elements to each, and takes rows from
    each; `instead` of these splits, some ranks recorded something else."""
    for rank, (out, into) in enumerate(zip(sent, taken, strict=True)):
        meta = {
            "rank": rank,
            "world_size": len(sent),
            "run_id": "split",
            "host": "a",
            "pid": 100 + rank,
            "started_ns": 1,
        }
        box = BoxWriter(folder / box_name(rank), meta=meta | {"clock_offset_ns": 0}, records=8)
        group = {
            "name": "0",
            "desc": "",
            "ranks": list(range(len(sent))),
            "backend": "gloo",
            "mesh_dim": None,
        }
        box.intern(EntryType.GROUP, json.dumps(group))
        shapes = {"shapes": [[sum(out), 2]], "out_shapes": [[sum(into), 2]]}
        fields = {
            "op": "all_to_all_single",
            "group": "0",
            "dtype": "float32",
            **shapes,
            "bytes": 1,
            "peer": None,
        }
        splits = {"splits": instead.get(rank, out), "out_splits": into} if with_splits else {}
        what = box.intern(EntryType.COLLECTIVE, json.dumps(fields | splits))
        box.record(Kind.COLLECTIVE, 10, 1, 0, 0, 0, 0, 0, 0, 0, what, 0, 0, 0)
        box.close()
    return diagnose(read_run(folder))


def columns(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def test_parts_that_fit(tmp_path: Path) -> None:
    """What each sends is what the other takes: nothing is said."""
    assert judged(tmp_path, FITTING, columns(FITTING)).kind is VerdictKind.HEALTHY


def test_a_part_that_does_not_fit(tmp_path: Path) -> None:
    """Of two ranks that do not agree either may be wrong, though the sums of all are the same."""
    sent = [row[:] for row in FITTING]
    sent[2][0] += 3
    verdict = judged(tmp_path, sent, columns(FITTING))
    assert (verdict.kind, verdict.culprits, verdict.certainty) == (
        VerdictKind.MISMATCH,
        (0, 2),
        Certainty.INFERRED,
    )
    assert verdict.explanation == (
        'In #0 of group "default", all_to_all_single, the send and receive splits do not match.',
        "  rank 2 sends 20 elements to rank 0, which expects 14",
        (
            "Look at: how the split sizes are computed, and whether they change after the ranks have"
            " exchanged them."
        ),
    )
    assert verdict.facts["pairs"] == [{"from": 2, "to": 0, "sent": 20, "taken": 14}]


def test_one_rank_in_all_pairs(tmp_path: Path) -> None:
    """A rank that agrees with nobody is the one, also where the sums are the same."""
    sent = [row[:] for row in FITTING]
    sent[1] = [5, 5, 5]
    assert judged(tmp_path, sent, columns(FITTING)).culprits == (1,)


def test_sums_alone(tmp_path: Path) -> None:
    """Where the parts were not recorded, the sums show that something is wrong, and not who."""
    sent = [row[:] for row in FITTING]
    sent[2][0] += 3
    verdict = judged(tmp_path, sent, columns(FITTING), with_splits=False)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISMATCH, ())
    assert (
        "  all ranks together send 96 elements and expect 90; the boxes do not show which split is"
        " wrong" in verdict.explanation
    )


def test_whatever_a_box_holds(tmp_path: Path) -> None:
    """Splits that are none are as good as none recorded; what was torn is not compared."""
    for at, odd in enumerate(["x", [1, 2], [1.5, 2, 3], [], None]):
        (tmp_path / str(at)).mkdir()
        sent = [*FITTING[:2], FITTING[2]]
        verdict = judged(tmp_path / str(at), sent, columns(FITTING), instead={2: odd})
        assert verdict.kind is (VerdictKind.MISMATCH if odd == [] else VerdictKind.HEALTHY), odd
    box = tmp_path / "0" / "rank1.box"
    box.write_bytes(box.read_bytes().replace(b"all_to_all", b"all_xx_all"))
    assert diagnose(read_run(tmp_path / "0")).kind is not VerdictKind.MISMATCH


def _exchange(folder: str) -> dict[str, object]:
    with torchwhere.watch(out=folder):
        rank = dist.get_rank()
        counts = torch.tensor([[1, 2], [3, 4]])
        out, into = counts[rank].tolist(), counts[:, rank].tolist()
        dist.all_to_all_single(torch.empty(sum(into), 2), torch.ones(sum(out), 2), into, out)
        dist.all_to_all_single(torch.empty(4), torch.ones(4))
    return {"rank": rank}


def test_splits_are_recorded(two_ranks: Pool, tmp_path: Path) -> None:
    """A real call carries its splits; one without has none."""
    two_ranks.run(_exchange, str(tmp_path))
    first, second = read_box(tmp_path / "rank1.box").events(kinds={"collective"})
    assert (first.fields["splits"], first.fields["out_splits"]) == ([3, 4], [2, 4])
    assert (second.fields["splits"], second.fields["out_splits"]) == ([], [])
