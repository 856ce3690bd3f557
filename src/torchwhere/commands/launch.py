"""Runs a user's script under watch, as Python itself would: same arguments, exceptions and exit
code.

`begin` finds the script, starts the watch and returns a function that runs the script. A problem
before the script's first line raises `TorchwhereError`. Every later exception belongs to the
script: it passes through unchanged, with a note that names the place.
"""

from __future__ import annotations

import importlib.util
import io
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from torchwhere.commands.arguments import BAD_INPUT, print_message
from torchwhere.commands.begin_watch import begin_watch
from torchwhere.commands.watch_options import WatchOptions, watch_children
from torchwhere.core.errors import TorchwhereError, end_reason
from torchwhere.processes import launcher
from torchwhere_startup import watch_forks


def begin(
    script: str,
    arguments: Sequence[str],
    *,
    out: str,
    is_module: bool,
    options: WatchOptions,
) -> Callable[[], None]:
    """Start the watch and return a function that runs `script`.

    `script` is a path, with `is_module` the name of a module, or a program on the PATH. A launcher
    is not a rank, so it is not watched: the processes that it starts are.
    """
    script, arguments, is_module = without_python(script, arguments, is_module=is_module)
    command = launcher_command(script, arguments, is_module=is_module)
    if command is None:
        _put_first(os.getcwd() if is_module else str(Path(script).resolve().parent))
        _check(script, is_module=is_module)
    from torchwhere import start  # noqa: F401 - raises a TorchwhereError without torch
    from torchwhere.native.first_run import prepare

    prepare(is_first_of_host=launcher.launch().is_first_of_host)
    watch_children(out, options)
    if command is not None:
        return lambda: _become(command)
    sys.argv = [script, *arguments]
    begin_watch(out, options)
    watch_forks()
    execute = _run_module if is_module else _run_path
    return lambda: _watched(execute, script)


def without_python(
    script: str, arguments: Sequence[str], *, is_module: bool
) -> tuple[str, Sequence[str], bool]:
    """Drop `python` from `torchwhere run python train.py`, so that the script or module is watched.
    With further options of Python, or with another Python, nothing changes."""
    program = None if is_module else shutil.which(script)
    if program is None or not arguments or not _is_this_python(program):
        return script, arguments, is_module
    if arguments[0] == "-m" and len(arguments) > 1:
        return arguments[1], arguments[2:], True
    if arguments[0].startswith("-"):
        return script, arguments, is_module
    return arguments[0], arguments[1:], False


def _is_this_python(program: str) -> bool:
    """Whether a program is this interpreter. That of another environment has other packages,
    although both may be links to one file."""
    own = os.path.abspath(sys.executable)
    is_beside = os.path.dirname(os.path.abspath(program)) == os.path.dirname(own)
    return is_beside and os.path.samefile(program, own)


def launcher_command(script: str, arguments: Sequence[str], *, is_module: bool) -> list[str] | None:
    """The command line of a launcher or of another program; None for a script to be watched."""
    if is_module:
        return (
            [sys.executable, "-m", script, *arguments]
            if script in launcher.LAUNCHER_PROGRAMS
            else None
        )
    if Path(script).is_file():
        if Path(script).name in launcher.LAUNCHER_PROGRAMS:
            return [sys.executable, script, *arguments]
        return [os.path.abspath(script), *arguments] if _is_program(script) else None
    program = shutil.which(script) if os.sep not in script else None
    return [program, *arguments] if program is not None else None


def _is_program(path: str) -> bool:
    """Whether a file is not for Python: a binary, or a script of another interpreter."""
    try:
        with open(path, "rb") as file:
            first_line = file.readline(256)
    except OSError:
        return False
    is_other_script = first_line.startswith(b"#!") and b"python" not in first_line
    return first_line.startswith(b"\x7fELF") or is_other_script


def _become(command: list[str]) -> None:
    """Replace this process by a program: its exit code and its signals are its own."""
    sys.stdout.flush()
    try:
        os.execv(command[0], command)
    except OSError as error:
        print_message(f"cannot run {command[0]}: {error.strerror or error}")
        raise SystemExit(BAD_INPUT) from None


def _check(script: str, *, is_module: bool) -> None:
    if is_module and importlib.util.find_spec(script.partition(".")[0]) is None:
        raise TorchwhereError(
            f"there is no module {script}. Give a module name as for python -m, or leave out -m and"
            " give the path of a file."
        )
    if not is_module and not Path(script).is_file():
        raise TorchwhereError(
            f"there is no script {script}. Give the path of a file, -m and a module name, or a"
            " program such as torchrun."
        )


def _put_first(folder: str) -> None:
    """Make `folder` the first entry of `sys.path`, in place of the entry for `torchwhere`
    itself."""
    if sys.flags.safe_path:
        return
    if sys.path and sys.path[0] in ("", os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0]))):
        sys.path[0] = folder
    else:
        sys.path.insert(0, folder)


def _watched(execute: Callable[[str], None], script: str) -> None:
    from torchwhere.api.watch import record_exception, stop

    reason = end_reason(None)
    try:
        execute(script)
    except BaseException as error:
        reason = end_reason(error)
        if not isinstance(error, SystemExit):
            _print_as(error, _without_launcher(error.__traceback__))
            record_exception(error)
        raise
    finally:
        stop(reason)


# -- running it as Python would --------------------------------------------------------------------


def _run_path(script: str) -> None:
    """Run a file like `python script.py`.

    `runpy.run_path` would remove `__main__` when the script ends. Code that runs later (atexit
    handlers, threads, pickles of the script's classes) still needs it.
    """
    path = os.path.abspath(script)
    main = ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    main.__package__ = None
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _run_module(name: str) -> None:
    """Run a module like `python -m name`."""
    runpy.run_module(name, run_name="__main__", alter_sys=True)


# -- the traceback of a failed script --------------------------------------------------------------


def _without_launcher(traceback: TracebackType | None) -> TracebackType | None:
    """Drop the frames of this file and of runpy: Python alone would print none of them."""
    while traceback is not None and _is_launcher(traceback.tb_frame.f_code.co_filename):
        traceback = traceback.tb_next
    return traceback


def _is_launcher(filename: str) -> bool:
    return (
        filename == __file__
        or filename.startswith("<frozen runpy>")
        or filename.endswith(f"{os.sep}runpy.py")
    )


def _print_as(error: BaseException, traceback: TracebackType | None) -> None:
    """Make `sys.excepthook` print `error` with `traceback`.

    On its way out the error collects frames of this command, which would only confuse.
    """
    hook = sys.excepthook

    def print_as(
        kind: type[BaseException], value: BaseException, collected: TracebackType | None
    ) -> None:
        if value is error:
            collected = value.__traceback__ = traceback
        hook(kind, value, collected)

    sys.excepthook = print_as
