"""Lines that pass below some points and above others: how high such a line can be at a moment.

What bounds the difference of two clocks are points like these. There may be many; of each block of
time the nearest one counts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MOST_SLOPE = 1e-3  # no two clocks part so fast: two times that are too close together
_BLOCKS = 32


def nearest(times: Floats, values: Floats, ends: Floats, sign: int) -> tuple[Floats, Floats]:
    """The lowest point of each block of time; the highest for -1."""
    found = np.zeros(_BLOCKS), np.full(_BLOCKS, sign * np.inf)
    on = np.isfinite(values) & np.isfinite(times)
    times, values = times[on], values[on]
    if len(times):
        width = max(float(ends[1] - ends[0]), 1.0)
        block = np.clip(((times - ends[0]) / width * _BLOCKS).astype(np.int64), 0, _BLOCKS - 1)
        order = np.lexsort((sign * values, block))
        blocks, first = np.unique(block[order], return_index=True)
        found[0][blocks], found[1][blocks] = times[order[first]], values[order[first]]
    return found


def highest(below_at: Floats, below: Floats, above_at: Floats, above: Floats) -> Floats:
    """The highest that any line of a strip is at 0. The slope is eliminated: two points bound it
    from two sides."""
    found = (below + MOST_SLOPE * np.abs(below_at)).min(axis=1)
    x, u = below_at[:, :, None], below[:, :, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        # below one on the left and below one on the right
        z, v = below_at[:, None, :], below[:, None, :]
        between = np.where((x < 0) & (z > 0), (u * z - v * x) / (z - x), np.inf)
        # below one that is near and above one that is far, on the same side
        z, v = above_at[:, None, :], above[:, None, :]
        beyond = np.where((x * z > 0) & (np.abs(x) < np.abs(z)), (u * z - v * x) / (z - x), np.inf)
    both = np.minimum(between, beyond)
    least: Floats = np.minimum(found, np.where(np.isnan(both), np.inf, both).min(axis=(1, 2)))
    return least
