"""Counts the collectives of a block of a running program: `with torchwhere.comms() as c:`.

Joins the running watch, or starts its own in memory, and gives the `Comms` of this rank, during the
block and after it. `torchwhere comms` gives the same later from the boxes. Each collective is
counted when it is recorded: the counts are exact, however long the block and however small the
ring. Tests use `expect` and `expect_same_as`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from torch import nn

from torchwhere.api import watch
from torchwhere.blackbox.box import Box
from torchwhere.core.atomic_file import destination, write_errors
from torchwhere.diagnose.comms import snapshot
from torchwhere.diagnose.comms.expect import KnownNames, check
from torchwhere.diagnose.comms.sums import RunningSums
from torchwhere.diagnose.comms.tree import Comms, add, group_label
from torchwhere.hooks import _torch
from torchwhere.model.module_walk import check_module
from torchwhere.recorder.session import Session
from torchwhere.render import expectation
from torchwhere.render.text import comms_lines

REGENERATE = "TORCHWHERE_REGENERATE"
_RECORDS = 1 << 10  # small, because each record is read as soon as it is written
_lock = threading.RLock()


def join(model: nn.Module | None) -> Session:
    """Join the running watch, or start one in memory. Returns its session, for `leave`."""
    watch.start(model, records=_RECORDS)
    session = watch.current()
    assert session is not None
    return session


def leave(session: Session) -> None:
    """Leave the watch that `join` returned, unless it has ended already."""
    if watch.current() is session:
        watch.stop()


def listen(session: Session, tap: Callable[[int, Any], None]) -> None:
    """Call `tap` for every collective. This replaces the list and never changes it: another thread
    may be iterating over it."""
    with _lock:
        session.collectives.taps = [*session.collectives.taps, tap]


def stop_listening(session: Session, tap: Callable[[int, Any], None]) -> None:
    """Undo `listen`."""
    with _lock:
        session.collectives.taps = [other for other in session.collectives.taps if other != tap]


class comms(contextlib.ContextDecorator):  # noqa: N801 - called like a function: `with comms() as c:`
    """The collectives of a block: a context manager and a decorator.

    It counts from zero each time the block is entered. If the block is entered again inside itself,
    or on another thread at the same time, it continues to count. Results are available during the
    block and after it.

    Args:
        model: The model whose modules are named. Without it, torchwhere finds the root module at
            the first call of a module. Inside a watch it is not needed.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`.

    Example:
        with torchwhere.comms(model) as c:
            model(batch).sum().backward()
        print(c)
        c.expect(all_reduce=2, others=0)
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        check_module(model, "comms(model)", or_none=True)
        self._model = model
        self._depth = 0
        self._session: Session | None = None
        self._sums = RunningSums()
        # names for the ids in the sums, after the block
        self._box = Box(path=Path("<live>"))
        self._modules: list[list[str]] = []
        self._cached: tuple[int, Comms] = (0, Comms())  # number of collectives, and their tree

    # -- the block ---------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with _lock:
            self._depth += 1
            if self._depth == 1:
                self._sums, self._cached = RunningSums(), (0, Comms())
                self._session = join(self._model)
                listen(self._session, self._tap)
        return self

    def __exit__(self, *_error: object) -> None:
        with _lock:
            self._depth -= 1
            session = self._session
            if self._depth or session is None:
                return
            stop_listening(session, self._tap)
            session.name_groups(anew=self._sums.total > 0)
            self._box, self._modules = _box_of(session), _modules_of(session)
            self._session, self._cached = None, (0, Comms())
            leave(session)

    @_torch.unseen
    def _tap(self, number: int, _call: Any) -> None:
        session = self._session
        if session is not None:
            self._sums.take(session.recorder.box.copy_of(number))

    def _comms(self) -> Comms:
        """The tree of the collectives so far; built again after further collectives."""
        with _lock:
            total, tree = self._cached
            if self._sums.total != total:
                sums = self._sums.sums()
                tree = Comms()
                add(tree, self._box if self._session is None else _box_of(self._session), sums)
                self._cached = sum(sums.counts), tree
            return tree

    # -- results -----------------------------------------------------------------------------------

    @property
    def counts(self) -> Counter[str]:
        """Calls of each collective, by its public name: `c.counts["all_reduce"]`. 0 for a
        collective without calls."""
        return self._comms().counts

    @property
    def by_module(self) -> Mapping[str | None, Counter[str]]:
        """Calls by the module that issued them, without the modules below it: "" is the root, None
        is outside any module."""
        return self._comms().by_module

    @property
    def by_pass(self) -> Mapping[str, Counter[str]]:
        """Calls by pass: forward, recompute, backward, optimizer, outside."""
        return self._comms().by_pass

    @property
    def by_group(self) -> Mapping[str, Counter[str]]:
        """Calls by process group: its mesh dimension, or else its description."""
        return self._comms().by_group

    @property
    def by_line(self) -> Mapping[str | None, Counter[str]]:
        """Calls by the `file:line` of your code that led to them; None where the line is
        unknown."""
        return self._comms().by_line

    @property
    def bytes(self) -> int:
        """Bytes of all collectives. One call counts the larger of its input and its output."""
        return self._comms().bytes

    def counts_in(
        self,
        module: str | None = None,
        *,
        pass_: str | None = None,
        group: str | None = None,
        for_: str | None = None,
    ) -> Counter[str]:
        """Return the calls of some of the collectives. The arguments are those of `expect`.

        Args:
            module: Only collectives issued in this module or below it.
            pass_: Only collectives of this pass.
            group: Only collectives on this process group.
            for_: Only collectives that move parameters of this module.

        Returns:
            The calls of each collective, by its public name.

        Example:
            c.counts_in("layers", pass_="backward")["reduce_scatter_tensor"]
        """
        return self._comms().only(module=module, pass_=pass_, group=group, for_=for_).counts

    def table(self, *, width: int | None = None) -> str:
        """Return the tree of modules and their collectives as text, as `torchwhere comms` shows it.

        Args:
            width: Cut the lines to this number of columns.

        Example:
            print(c.table(width=100))
        """
        lines = comms_lines(self._comms(), width=width)
        return "\n".join("".join(text for text, _ in line) for line in lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as values for JSON, as `torchwhere comms --json` prints it.

        Equal layers are not folded.

        Example:
            c.to_dict()["root"]["count"]
        """
        return self._comms().to_dict()

    def json(self) -> str:
        """Return `to_dict()` as JSON text.

        Example:
            Path("comms.json").write_text(c.json())
        """
        return json.dumps(self.to_dict())

    def as_rows(self) -> list[dict[str, Any]]:
        """Return one row for each module, pass, op, group and beneficiary, with count and bytes.

        Example:
            [row["module"] for row in c.as_rows() if row["op"] == "all_reduce"]
        """
        return self._comms().as_rows()

    def to_pandas(self) -> Any:
        """Return the rows of `as_rows` as a `pandas.DataFrame`.

        Raises:
            TorchwhereError: pandas is not installed.

        Example:
            c.to_pandas().groupby("op")["bytes"].sum()
        """
        return self._comms().to_pandas()

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        counts = ", ".join(f"{op}={count}" for op, count in sorted(self.counts.items()))
        return f"<comms: {counts or 'no collectives'}>"

    def _repr_html_(self) -> str:
        return self._comms()._repr_html_()

    # -- expectations ------------------------------------------------------------------------------

    def expect(
        self,
        *,
        module: str | None = None,
        pass_: str | None = None,
        group: str | None = None,
        for_: str | None = None,
        **wanted: int,
    ) -> None:
        """Check the numbers of collectives, for example in a test.

        Args:
            module: Only collectives issued in this module or below it.
            pass_: Only collectives of this pass.
            group: Only collectives on this process group.
            for_: Only collectives that move parameters of this module.
            **wanted: The wanted numbers. `all_reduce=2` compares the calls of an op.
                `all_gather_into_tensor__le=4` compares with another operator: `__eq`, `__ne`,
                `__le`, `__lt`, `__ge` or `__gt`. `calls` and `bytes` are those of all ops, `others`
                the calls of all ops that are not named here.

        Raises:
            AssertionError: A number is different. The message shows the difference.
            ValueError: An op, module, pass or group does not exist, or nothing is wanted.

        Example:
            c.expect(module="head", all_reduce=2, bytes__le=1 << 20)
        """
        filters = {"module": module, "pass_": pass_, "group": group, "for_": for_}
        expected = check(self._comms(), filters=filters, wanted=wanted, names=self._names())
        if not expected.holds:
            raise AssertionError(expectation.failure(expected))

    def _names(self) -> KnownNames:
        session = self._session
        modules = self._modules if session is None else _modules_of(session)
        box = self._box if session is None else _box_of(session)
        return KnownNames(
            modules={name for names in modules for name in names},
            groups={group_label(box, group) for group in box.groups()},
        )

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """Save the collectives to a file, for `expect_same_as`.

        The file has one line for each module, pass and op. All ranks can write it at once: each
        write is atomic.

        Args:
            path: The file, usually one that is committed next to the test.

        Raises:
            TorchwhereError: The file cannot be written.

        Example:
            c.snapshot("tests/golden/comms.json")
        """
        target = Path(path)
        text = snapshot.dumps(snapshot.rows(self._comms()))
        with write_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        with destination(target) as file:
            file.write(text.encode())

    def expect_same_as(
        self, path: str | os.PathLike[str], *, regenerate: bool | None = None
    ) -> None:
        """Check that the collectives equal those of a snapshot.

        Args:
            path: The file that `snapshot` wrote.
            regenerate: Write the snapshot again instead of checking. The default is the environment
                variable TORCHWHERE_REGENERATE.

        Raises:
            AssertionError: The collectives differ, or there is no snapshot yet. The message shows
                the difference.
            ValueError: The file is not a snapshot.

        Example:
            c.expect_same_as("tests/golden/comms.json")
        """
        if regenerate if regenerate is not None else bool(os.environ.get(REGENERATE)):
            self.snapshot(path)
            return
        try:
            expected = snapshot.loads(Path(path).read_text())
        except FileNotFoundError:
            raise AssertionError(
                f"there is no snapshot {path} yet: run once with {REGENERATE}=1, or call"
                " expect_same_as(path, regenerate=True)"
            ) from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        differences = snapshot.differences(expected, snapshot.rows(self._comms()))
        if differences:
            raise AssertionError(expectation.difference_text(path, differences))


def _box_of(session: Session) -> Box:
    """A box with the current names of this rank, as a reader of the file would see them."""
    session.name_groups(anew=False)
    box = session.recorder.box
    return Box(path=box.path or Path("<memory>"), meta=box.meta, names=box.names())


def _modules_of(session: Session) -> list[list[str]]:
    """All names of each module of the watched models."""
    names = session.recorder.locator.names
    names.complete()
    return list(names.modules.values())
