"""Installs the parts of a watch in order, and removes them in the reverse order.

If one part cannot be installed, all parts that are installed by then are removed. If one part
cannot be removed, a log line says so, and all other parts are still removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Protocol

from torchwhere.hooks.error_limiter import log


def do_nothing() -> None:
    """The default for a step that a part does not need."""


@dataclass(frozen=True, slots=True)
class InstallablePart:
    """One part of a watch, for example a hook.

    Attributes:
        name: The part as a log line names it.
        install: Installs the part. It may return sentences for the log: what this torch lacks.
        remove: Removes the part. It also runs after an `install` that raised.
        abandon: Runs instead of `remove` in a forked child. None means that `remove` works there.
    """

    name: str
    _: KW_ONLY
    install: Callable[[], list[str] | None] = do_nothing
    remove: Callable[[], object] = do_nothing
    abandon: Callable[[], object] | None = None


class _Hook(Protocol):
    def install(self) -> list[str] | None: ...
    def remove(self) -> None: ...


def hook_part(name: str, *, hook: _Hook) -> InstallablePart:
    """Return the part of a hook that a forked child removes like its parent."""
    return InstallablePart(name, install=hook.install, remove=hook.remove)


class Installation:
    """The installed parts of one watch.

    Keeps only what removes them: a step that installs may refer to the model, which a watch must
    not keep alive.
    """

    def __init__(self) -> None:
        self._installed: list[InstallablePart] = []

    def install(self, parts: Iterable[InstallablePart]) -> list[str]:
        """Install all parts, or none.

        Returns:
            Sentences for the log: what this torch lacks, and what is not recorded for that reason.
        """
        sentences: list[str] = []
        try:
            for part in parts:
                self._installed.append(replace(part, install=do_nothing))
                sentences += part.install() or []
        except BaseException:
            self.remove()
            raise
        return sentences

    def remove(self) -> None:
        """Remove everything that is installed."""
        self._run_all([(part.name, part.remove) for part in self._installed])

    def abandon(self) -> None:
        """Remove everything in a forked child, which must not touch what belongs to its parent."""
        self._run_all([(part.name, part.abandon or part.remove) for part in self._installed])

    def _run_all(self, steps: list[tuple[str, Callable[[], object]]]) -> None:
        self._installed = []
        # An exit stack runs all steps, the last one first, also if one is interrupted by Ctrl-C.
        with contextlib.ExitStack() as stack:
            for name, step in steps:
                stack.callback(_run_or_log, name, step)


def _run_or_log(name: str, step: Callable[[], object]) -> None:
    try:
        step()
    except Exception as error:
        # the job's own logging handlers may raise
        with contextlib.suppress(Exception):
            log.warning(
                "torchwhere: could not remove %s: %s: %s", name, type(error).__name__, error
            )
