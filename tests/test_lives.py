"""Boxes of one job that was restarted: each life apart, though agents count restarts each for
itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from torchwhere.blackbox.run import read_run
from torchwhere.blackbox.writer import BoxWriter

SECOND = 1_000_000_000


def leave(
    folder: Path,
    rank: int,
    life: int,
    *,
    restart: int,
    port: int = 29500,
    host: str = "",
    late_s: float = 0.0,
    world: int = 4,
) -> Path:
    """A box of one rank, in one life; lives are ten seconds apart."""
    meta = {
        "rank": rank,
        "world_size": world,
        "run_id": "job",
        "store": f"{'node0' if rank else 'localhost'}:{port}",
        "restart": restart,
        "host": host or ("a" if rank < 2 else "b"),
        "pid": 100 * (life + 1) + rank,
        "started_ns": 1_800_000_000 * SECOND + round((10 * life + late_s) * SECOND) + rank,
    }
    path = folder / f"rank{rank}-{life}-{restart}.box"
    BoxWriter(path, meta=meta, records=16).close()
    return path


def newest(folder: Path) -> set[str]:
    return {box.path.stem for box in read_run(folder).boxes.values()}


def test_hosts_that_count_differently(tmp_path: Path) -> None:
    """Host b has failed and counts, host a was only restarted: one life by time, also while ranks
    of it are yet to come."""
    for rank in range(4):
        leave(tmp_path, rank, 0, restart=0)
    for rank in (3, 1, 0, 2):
        leave(tmp_path, rank, 1, restart=int(rank > 1), late_s=0.1 * (rank in (0, 2)))
    assert newest(tmp_path) == {"rank0-1-0", "rank1-1-0", "rank2-1-1", "rank3-1-1"}
    assert len(read_run(tmp_path).earlier) == 4
    for rank in (0, 2):
        (tmp_path / f"rank{rank}-1-{rank // 2}.box").unlink()
    assert newest(tmp_path) == {"rank1-1-0", "rank3-1-1"}


def test_a_store_for_each_life(tmp_path: Path) -> None:
    """Where each life has a port of its own that decides, whatever clocks and counts say; its
    address may have two names."""
    for rank in range(4):
        leave(tmp_path, rank, 0, restart=0, port=4001, late_s=30 if rank > 1 else 0)
        leave(tmp_path, rank, 1, restart=0, port=4002, late_s=30 if rank > 1 else 0)
    assert newest(tmp_path) == {f"rank{rank}-1-0" for rank in range(4)}


def test_clocks_far_apart(tmp_path: Path) -> None:
    """Where all hosts count the same no clock is needed: host b's is behind by more than a life."""
    for rank, life in ((rank, life) for rank in range(4) for life in (0, 1)):
        leave(tmp_path, rank, life, restart=life, late_s=-25 if rank > 1 else 0)
    assert newest(tmp_path) == {f"rank{rank}-1-1" for rank in range(4)}


@pytest.mark.parametrize("missing", range(4))
def test_a_missing_box(tmp_path: Path, missing: int) -> None:
    """A rank whose box is gone is missing: one of an earlier life does not stand in for it."""
    for rank, life in ((rank, life) for rank in range(4) for life in (0, 1)):
        leave(tmp_path, rank, life, restart=life)
    (tmp_path / f"rank{missing}-1-1.box").unlink()
    assert newest(tmp_path) == {f"rank{rank}-1-1" for rank in range(4) if rank != missing}
    assert read_run(tmp_path).missing == [missing]


def test_watched_twice(tmp_path: Path) -> None:
    """A process that begins a second box is the same rank in the same life: its newest counts, and
    the others stay."""
    for rank in range(4):
        first = leave(tmp_path, rank, 0, restart=0)
        shutil.move(first, tmp_path / f"old{rank}.box")
        leave(tmp_path, rank, 0, restart=0, late_s=1 + rank)
    (tmp_path / "rank3-0-0.box").unlink()
    assert newest(tmp_path) == {"rank0-0-0", "rank1-0-0", "rank2-0-0", "old3"}
