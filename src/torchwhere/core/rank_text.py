"""Lists of ranks as text. Every view spells them the same way: `0-3, 7`.

Layouts store ordered ranks with `ranks_to_text`: a second spelling, which keeps the order and folds
equal steps (`0-12:4`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

Ranks = tuple[int, ...]


def ranks_text(ranks: Iterable[int], *, most: int | None = None) -> str:
    """Sorted ranks with runs folded: `0-3, 7`.

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


def watched_phrase(count: int, world_size: int) -> str:
    """How many ranks of a job have data: `2 of 8 ranks are watched`."""
    return f"{count} of {world_size} ranks {'is' if count == 1 else 'are'} watched"


def ranks_to_text(ranks: Iterable[int]) -> str:
    """Ranks in the given order, runs with equal steps folded: `0-3`, `0-12:4, 1`."""
    runs: list[list[int]] = []  # first, last, step, count
    for rank in ranks:
        if runs:
            run = runs[-1]
            step = rank - run[1]
            if step > 0 and (run[3] == 1 or step == run[2]):
                run[1:] = [rank, step, run[3] + 1]
                continue
        runs.append([rank, rank, 1, 1])
    return ", ".join(_run_text(*run) for run in runs)


def _run_text(first: int, last: int, step: int, count: int) -> str:
    if count == 1:
        return str(first)
    if step == 1:
        return f"{first}-{last}"
    return f"{first}, {last}" if count == 2 else f"{first}-{last}:{step}"


def ranks_from_text(text: str) -> list[int]:
    """Read the result of `ranks_to_text`. Raises ValueError for another text."""
    ranks: list[int] = []
    for run in text.split(", ") if text else ():
        span, _, step = run.partition(":")
        first, _, last = span.partition("-")
        ranks += range(int(first), int(last or first) + 1, int(step or 1))
    return ranks
