"""The folder of a run, as users give it to commands and functions."""

from __future__ import annotations

import os


def run_folder(path: str | os.PathLike[str]) -> str:
    """The folder of a run, from its own path or from the path of one of its boxes.

    Example:
        run_folder("run/rank0.box")  # "run"
    """
    text = os.fspath(path)
    is_box = text.endswith(".box") and os.path.isfile(text)
    return os.path.dirname(text) or "." if is_box else text
