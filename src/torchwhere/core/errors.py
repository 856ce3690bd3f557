"""The one exception of torchwhere's own: something about a *run* (its folder, its boxes, its
process) is not as needed.

Wrong arguments are `ValueError` or `TypeError`, as everywhere in Python. Nothing in here is ever
raised into a training step: the senses catch, count and say their own errors (see
`hooks/error_limiter.py`).
"""

from __future__ import annotations


class TorchwhereError(Exception):
    """A run cannot be recorded or read as asked; the message says what happened and what to do."""


FAILED = "exception: "  # begins the reason for which a watch ended, if it was one


def failure(error: BaseException) -> str:
    """The reason for which a watch ended that an exception has left."""
    return f"{FAILED}{described(error)}"


def described(error: BaseException) -> str:
    """An exception of the user's in one line, also one whose own `__str__` raises."""
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:
        return type(error).__name__
