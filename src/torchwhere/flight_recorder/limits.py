"""Limits on untrusted files and on their values, and the errors for files that are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

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


# -- values ----------------------------------------------------------------------------------------


LARGEST = 1 << 62
_MOST_TEXT, _MOST_DIMS, _MOST_TENSORS = 4096, 64, 65_536


def is_number(value: Any, below: int = LARGEST) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < below


def is_text(value: Any) -> TypeGuard[str]:
    return type(value) is str and len(value) <= _MOST_TEXT


def is_shapes(value: Any) -> bool:
    """Whether a value is a list of the shapes of tensors."""
    return (
        type(value) is list
        and len(value) <= _MOST_TENSORS
        and all(
            type(shape) is list and len(shape) <= _MOST_DIMS and all(map(is_number, shape))
            for shape in value
        )
    )
