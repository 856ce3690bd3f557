"""Bytes and durations as short text: `4.2 MB`, `1.3 ms`, memory in PyTorch's units: `1.5 GiB`."""

from __future__ import annotations


def amount(nbytes: float) -> str:
    """`512 B`, `4.2 MB`, `310 GB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 999.5:
            return _text(nbytes, unit, is_whole=unit == "B")
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def memory_amount(nbytes: float) -> str:
    """`512 bytes`, `1.5 GiB`: memory of a device, in the units of PyTorch's own messages."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return _text(nbytes, unit, is_whole=unit == "bytes")


def duration(ns: float) -> str:
    """`80 ns`, `1.3 ms`, `12.50 s`, `3.4 h`."""
    for unit, size in (("ns", 1), ("us", 1e3), ("ms", 1e6)):
        if ns < 999.5 * size:
            return _text(ns / size, unit, is_whole=unit == "ns")
    seconds = ns / 1e9
    if seconds < 99.995:
        return f"{seconds:.2f} s"
    if seconds < 999.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5999.5 else f"{seconds / 3600:.1f} h"


def _text(value: float, unit: str, *, is_whole: bool) -> str:
    digits = 0 if is_whole or value >= 99.95 else 1
    return f"{value:.{digits}f} {unit}"
