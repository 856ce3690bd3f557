"""The exception class of torchwhere: a *run* (its folder, boxes or process) cannot be used.

Wrong arguments raise `ValueError` or `TypeError`, as elsewhere in Python. torchwhere never raises
into a training step: the hooks catch, count and log their own errors (`hooks/error_limiter.py`).
"""

from __future__ import annotations


class TorchwhereError(Exception):
    """A run cannot be recorded or read. The message says what happened and what to do.

    Wrong arguments raise `ValueError` or `TypeError` instead.

    Example:
        try:
            verdict = torchwhere.doctor("run/")
        except torchwhere.TorchwhereError as error:
            print(error)
    """


def nothing_recorded(problem: str, folder: object) -> TorchwhereError:
    """Make the error for a folder without a run: the problem, and how to record one."""
    return TorchwhereError(f"{problem}. Record one with: torchwhere run --out {folder} train.py")


FAILED = "exception: "  # the end reason of a watch starts with this if an exception ended it


def failure(error: BaseException) -> str:
    """End reason of a watch that an exception has ended."""
    return f"{FAILED}{described(error)}"


def end_reason(error: BaseException | None) -> str:
    """End reason of a watch whose process ends: with an exception, or with None."""
    if error is None:
        return "exit 0"
    if not isinstance(error, SystemExit):
        return failure(error)
    code = 0 if error.code is None else error.code
    return f"exit {int(code) if isinstance(code, int) else 1}"


def described(error: BaseException) -> str:
    """A user's exception in one line, even if its own `__str__` raises."""
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:
        return type(error).__name__
