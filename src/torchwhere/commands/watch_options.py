"""The options of a watch: arguments of `torchwhere run`, and the text of `TORCHWHERE_OPTIONS`.

`run` writes that variable and `TORCHWHERE_OUT` for the processes that the job starts, so that they
watch themselves: `torchwhere_startup` reads the variables when Python starts. Without an installed
`torchwhere_startup.pth`, for example in a source tree, a folder on the PYTHONPATH does the same
(`startup/python_path/`). A user may set both variables too.
"""

from __future__ import annotations

import argparse
import os
import shlex
import site
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from torchwhere.commands.arguments import at_least, chosen_stall_s
from torchwhere.commands.monitor import add_options

OUT = "TORCHWHERE_OUT"
OPTIONS = "TORCHWHERE_OPTIONS"
_DEFAULT_RECORDS = 1 << 16
_PACKAGE = Path(__file__).parent.parent
_PYTHON_PATH = _PACKAGE / "startup" / "python_path"
_PTH_FILE = "torchwhere_startup.pth"


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """How processes are watched.

    Attributes:
        module_events: Whether every module call is an event.
        records: The number of events in the ring of each rank.
        sets_variables: Whether the environment variables of NCCL are set.
        monitor: The options of the monitor, which the first rank of each host starts; None starts
            no monitor.
    """

    module_events: bool
    records: int
    sets_variables: bool
    monitor: tuple[str, ...] | None

    def to_text(self) -> str:
        """The options as text for `TORCHWHERE_OPTIONS`."""
        options = ["--records", str(self.records)]
        if self.module_events:
            options.append("--module-events")
        if not self.sets_variables:
            options.append("--no-env")
        return shlex.join([*options, *(["--no-monitor"] if self.monitor is None else self.monitor)])


def add_watch_options(sub: argparse.ArgumentParser) -> None:
    """Add the options that both `run` and `TORCHWHERE_OPTIONS` take."""
    sub.add_argument(
        "--module-events", action="store_true", help="record every module call as an event"
    )
    sub.add_argument(
        "--records",
        type=at_least(16),
        default=_DEFAULT_RECORDS,
        help="number of events that each box keeps; older ones are overwritten (default:"
        " %(default)s)",
    )
    sub.add_argument(
        "--no-monitor", action="store_true", help="do not start the monitor process of this host"
    )
    sub.add_argument(
        "--no-env",
        action="store_true",
        help="leave the environment variables of NCCL alone (default: on a machine with a GPU, set"
        " those that the doctor needs and that are not set)",
    )
    add_options(sub)


def watch_options(arguments: argparse.Namespace) -> WatchOptions:
    """The options among the parsed arguments of `add_watch_options`."""
    return WatchOptions(
        module_events=arguments.module_events,
        records=arguments.records,
        sets_variables=not arguments.no_env,
        monitor=None if arguments.no_monitor else _monitor_options(arguments),
    )


def _monitor_options(arguments: argparse.Namespace) -> tuple[str, ...]:
    options = ["--stall", str(chosen_stall_s(arguments))]
    if arguments.json:
        options.append("--json")
    if arguments.end_with is not None:
        options += ["--end-with", arguments.end_with.name]
    return tuple(options)


class _Parser(argparse.ArgumentParser):
    """Raises `ValueError` for a wrong argument: argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def options_of_environment() -> WatchOptions:
    """The options in `TORCHWHERE_OPTIONS`.

    Raises:
        ValueError: The text has an option that `run` does not have, or a wrong value.
    """
    parser = _Parser(add_help=False)
    add_watch_options(parser)
    return watch_options(parser.parse_args(shlex.split(os.environ.get(OPTIONS, ""))))


# -- the processes that the job starts -------------------------------------------------------------


def watch_children(out: str, options: WatchOptions) -> None:
    """Set the variables for all processes that this one starts, or becomes, from now on."""
    os.environ[OUT] = os.path.abspath(out)
    os.environ[OPTIONS] = options.to_text()
    if not _is_installed():
        folders = [str(_PYTHON_PATH), str(_PACKAGE.parent)]
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        others = [path for path in paths if path and path not in folders]
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *others])


def _is_installed() -> bool:
    """Whether Python runs the start-up hook by itself."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    return any(os.path.isfile(os.path.join(folder, _PTH_FILE)) for folder in folders)
