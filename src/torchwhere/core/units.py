"""Bytes and times as people read them: `4.2 MB`, `1.3 ms`."""

from __future__ import annotations


def amount(nbytes: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 999.5:
            return (
                f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 99.95 else f"{nbytes:.1f} {unit}"
            )
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def duration(ns: float) -> str:
    """Nanoseconds as people read them."""
    for unit, size in (("ns", 1), ("us", 1e3), ("ms", 1e6)):
        if ns < 999.5 * size:
            value = ns / size
            return (
                f"{value:.0f} {unit}" if unit == "ns" or value >= 99.95 else f"{value:.1f} {unit}"
            )
    seconds = ns / 1e9
    if seconds < 999.5:
        return f"{seconds:.2f} s" if seconds < 99.995 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5999.5 else f"{seconds / 3600:.1f} h"
