"""Ranks in few words: runs folded, `0-3, 8`."""

from __future__ import annotations

from collections.abc import Iterable


def ranks_text(ranks: Iterable[int], *, most: int | None = None) -> str:
    """A list of ranks, runs folded: `0-3, 8`. With `most`, so many runs, and of the rest how many
    ranks they are."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    rest = runs[most:] if most is not None else []
    listed = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:most])
    return listed + (f" and {sum(b - a + 1 for a, b in rest)} more" if rest else "")
