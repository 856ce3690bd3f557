"""Who died and who died of it, told from last words and from what was seen of the processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchwhere.blackbox.label import Label
from torchwhere.diagnose.doctor.deaths import Deaths
from torchwhere.diagnose.doctor.sighting import Sighting
from torchwhere.diagnose.hearing import testimony as testimonies
from torchwhere.diagnose.hearing.testimony import Hearing
from torchwhere.diagnose.hearing.transcript import Statement
from torchwhere.events import Event
from torchwhere.place import Place

HUNG_UP = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:50363"
GONE, ALIVE = Sighting(alive=False), Sighting(alive=True, alive_ns=9_000_000_000)


def rank_of(
    rank: int, *, end: str | None = None, exception: str | None = None, in_collective: bool = False
) -> testimonies.Testimony:
    """A rank with ten records, of which an exception or its end is the last one."""
    place = Place(rank=rank, step=0, pass_="outside")
    said = Statement(
        Label(Path(f"rank{rank}.box"), rank, ("", 0), True, 0, False, 0),
        records=10,
        end=Event("end", 9, 0, place, {"reason": end}) if end is not None else None,
        exceptions=(Event("exception", 9, 0, place, {"text": exception}),) if exception is not None else (),
        in_collective_since_ns=1 if in_collective else None,
    )
    hearing = Hearing()
    return testimonies.Testimony(rank, said, {}, {}, hearing.language)


def deaths(*ranks: testimonies.Testimony, seen: dict[int, Sighting] | None = None, now_ns: int | None = None) -> Deaths:
    hearing = Hearing()
    hearing.testimonies = {rank.rank: rank for rank in ranks}
    return Deaths(hearing, {rank.rank: GONE for rank in ranks} | (seen or {}), now_ns)


def test_killed_before_it_could_say_that_it_ends() -> None:
    """An exception that is the last record of a process which is gone counts as its end; one of a living process does not."""
    found = deaths(
        rank_of(0, exception=HUNG_UP), rank_of(1, exception="ValueError: bad"), rank_of(2, exception="ValueError: bad")
    )
    found.sightings = dict(found.sightings) | {2: ALIVE}
    assert [found.has_failed(rank) for rank in range(3)] == [True, True, False]
    assert [found.was_hung_up_on(rank) for rank in range(3)] == [True, False, False]
    assert found.how(1) == "exception: ValueError: bad"
    assert found.first([]) == [1]


def test_who_reacts_is_not_blamed() -> None:
    """Where ranks were hung up on, or crashed in a collective, the one of which nothing is known is the first."""
    crashed = Sighting(alive=False, ended="Aborted")
    ranks = rank_of(0, exception=HUNG_UP), rank_of(1, in_collective=True), rank_of(3, in_collective=True)
    found = deaths(*ranks, seen={1: crashed})
    assert found.first([2]) == [2]
    assert found.first([]) == [1]  # nobody is missing: the one that crashed
    assert found.first_of_awaited([0], [2]) == [2]
    assert found.first_of_awaited([0, 1], [2]) == [1]


@pytest.mark.parametrize(("now_ns", "blamed"), [(None, []), (9_000_000_000, [2])])
def test_who_fell_silent(now_ns: int | None, blamed: list[int]) -> None:
    """Of several that went without a word nobody is blamed, unless somebody saw which went first."""
    moments = {2: 1_000_000_000, 3: 8_900_000_000}
    seen = {rank: Sighting(alive=False, alive_ns=ns if now_ns is not None else None) for rank, ns in moments.items()}
    ranks = rank_of(0, end=f"exception: {HUNG_UP}"), rank_of(2, in_collective=True), rank_of(3, in_collective=True)
    found = deaths(*ranks, seen=seen, now_ns=now_ns)
    assert [found.is_dead(rank) for rank in (2, 3)] == [True, True]  # a peer hung up on rank 0
    assert found.first([]) == blamed


@pytest.mark.parametrize(
    "text",
    [
        "exception: MemoryError",
        "exception: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "exception: RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_out_of_memory_is_said(text: str) -> None:
    """An exception for want of memory is told as such, whoever raised it; another one is told as it is."""
    assert deaths(rank_of(0, end=text)).how(0) == f"out of memory: {text}"
    assert deaths(rank_of(0, end="exception: ValueError: memory")).how(0) == "exception: ValueError: memory"


def test_who_gave_up_waited_for_another() -> None:
    """A collective that timed out is no fault of the rank that was in it."""
    text = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"
    found = deaths(rank_of(0, end=f"exception: {text}"), rank_of(1, exception=HUNG_UP), rank_of(3, end="exit"))
    assert [found.gave_up(rank) for rank in (0, 1, 3)] == [True, False, False]
    assert found.first([2]) == [2]
    assert found.first([]) == []
    assert not deaths(rank_of(0, end="exception: TimeoutError: the disk timed out")).gave_up(0)
