"""Lists of ranks as text. Every view spells them the same way: `0-3, 7`."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def ranks_text(ranks: Iterable[int], *, most: int | None = None) -> str:
    """Ranks in order with runs folded: `0-3, 7`.

    With `most`, the text lists that many runs and counts the ranks of the others:
    `0-3, 7 and 12 more`.
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    hidden = runs[most:] if most is not None else []
    listed = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:most])
    return listed + (f" and {sum(b - a + 1 for a, b in hidden)} more" if hidden else "")


def ranks_phrase(ranks: Collection[int], *, most: int | None = 12) -> str:
    """The same as a noun phrase: `rank 2`, `ranks 0-3, 7`, `no rank`."""
    if not ranks:
        return "no rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks, most=most)}"
