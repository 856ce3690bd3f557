"""Runs a user's script under watch, as Python itself would run it: same arguments, same exceptions, same exit code."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from torchwhere.errors import TorchwhereError


def run(script: str, arguments: Sequence[str], *, out: str, is_module: bool, module_events: bool, records: int) -> int:
    """Run `script` (a path, or a module with `is_module`) under watch and give the exit code to end with."""
    if not is_module and not Path(script).is_file():
        raise TorchwhereError(f"there is no script {script}. Give a path to a file, or -m and a module's name.")
    from torchwhere.session import start, stop

    start(out=out, module_events=module_events, records=records)
    reason = "exit 0"
    try:
        _run_python(script, arguments, is_module=is_module)
        return 0
    except SystemExit as error:
        reason = f"exit {_exit_code(error)}"
        raise
    except BaseException as error:
        reason = f"exception: {type(error).__name__}: {error}"
        error.__traceback__ = _without_launcher(error.__traceback__)
        raise
    finally:
        stop(reason)


def _run_python(script: str, arguments: Sequence[str], *, is_module: bool) -> None:
    sys.argv = [script, *arguments]
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _without_launcher(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback as from `python script.py`: without the frames of this file and of runpy."""
    while traceback is not None and _is_launcher(traceback.tb_frame.f_code.co_filename):
        traceback = traceback.tb_next
    return traceback


def _is_launcher(filename: str) -> bool:
    return filename == __file__ or filename.startswith("<frozen runpy>") or filename.endswith(f"{os.sep}runpy.py")
