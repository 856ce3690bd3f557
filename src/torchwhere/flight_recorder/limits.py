"""Limits on untrusted files, and the errors for files that are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchwhere.core.errors import TorchwhereError


@dataclass(frozen=True, slots=True)
class Caps:
    """The limits for one file. A dump of 2,000 entries with stacks has 0.3 MB, 150,000 items and
    18,000 containers."""

    bytes: int = 64 << 20
    # of instructions and, counted separately, of shared values as if each use were written out
    items: int = 8_000_000
    containers: int = 1_000_000
    memo: int = 1_000_000
    depth: int = 32


CAPS = Caps()


class RefusedFileError(TorchwhereError):
    """A refused file; the message has the reason and, for a pickle, the byte."""


class CutShortError(RefusedFileError):
    """A file that ends too early. `partial` is a dict of the values that were complete."""

    def __init__(self, text: str, partial: dict[str, Any]) -> None:
        super().__init__(text)
        self.partial = partial
