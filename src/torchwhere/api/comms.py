"""The collectives of a block of a running program: `with torchwhere.comms() as c:`.

Takes what the watch of this process records (one that is running, or its own in memory), gives this
rank's `Comms`, as `torchwhere comms` gives it afterwards from the boxes, while the block runs and
after it. Counted as it happens: exact however long the block and however small the ring. `expect`
and `expect_same_as` make tests of it.
"""

from __future__ import annotations

import functools
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
from torchwhere.diagnose.comms import snapshot
from torchwhere.diagnose.comms.expect import KnownNames, check
from torchwhere.diagnose.comms.sums import RunningSums
from torchwhere.diagnose.comms.tree import Comms, add, group_label
from torchwhere.hooks import _torch
from torchwhere.recorder.session import Session
from torchwhere.render import expectation
from torchwhere.render.text import comms_lines

REGENERATE = "TORCHWHERE_REGENERATE"
_RECORDS = 1 << 10  # of a watch of our own: each record is looked at as soon as it is written
_lock = threading.RLock()


def join(model: nn.Module | None) -> Session:
    """The watch that is running, joined, or a new one in memory. Ended by `leave`."""
    watch.start(model, records=_RECORDS)
    session = watch.current()
    assert session is not None
    return session


def leave(session: Session) -> None:
    """End what `join` began, unless somebody else has ended it already."""
    if watch.current() is session:
        watch.stop()


def listen(session: Session, tap: Callable[[int, Any], None]) -> None:
    """Be told of every collective. The list is replaced, never changed: another thread may be
    walking it."""
    with _lock:
        session.collectives.taps = [*session.collectives.taps, tap]


def stop_listening(session: Session, tap: Callable[[int, Any], None]) -> None:
    with _lock:
        session.collectives.taps = [other for other in session.collectives.taps if other != tap]


class comms:  # noqa: N801 - read as a noun of the program: `with comms() as c:`
    """The collectives of a block: a context manager and a decorator.

    `model` names the modules; without it the root is found at the first call. Inside a watch
    nothing else is needed. Each time the block is entered it is counted anew; entered again inside
    itself (or on another thread meanwhile), it goes on counting.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(
                f"comms(model): expected a torch.nn.Module or None, got {type(model).__name__}"
            )
        self._model = model
        self._depth = 0
        self._session: Session | None = None
        self._sums = RunningSums()
        # what the numbers in the sums mean, once the block is over
        self._box = Box(path=Path("<live>"))
        self._modules: list[list[str]] = []
        self._known: tuple[int, Comms] = (0, Comms())

    # -- the block ---------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with _lock:
            self._depth += 1
            if self._depth == 1:
                self._sums, self._known = RunningSums(), (0, Comms())
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
            self._session, self._known = None, (0, Comms())
            leave(session)

    def __call__(self, function: watch.Function) -> watch.Function:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return counted  # type: ignore[return-value]

    @_torch.unseen
    def _tap(self, number: int, _call: Any) -> None:
        session = self._session
        if session is not None:
            self._sums.take(session.recorder.box.copy_of(number))

    def _comms(self) -> Comms:
        """What was counted so far; put together anew when there is more of it."""
        with _lock:
            total, known = self._known
            if self._sums.total != total:
                counted = self._sums.sums()
                known, total = Comms(), sum(counted.counts)
                add(
                    known,
                    _box_of(self._session) if self._session is not None else self._box,
                    counted,
                )
                self._known = total, known
            return known

    # -- what it was -------------------------------------------------------------------------------

    @property
    def counts(self) -> Counter[str]:
        """How often each collective was issued, by its public name: `c.counts["all_reduce"]`. 0 for
        those that were not."""
        return self._comms().counts

    @property
    def by_module(self) -> Mapping[str | None, Counter[str]]:
        """The counts of each module by itself, without those below it. "" is the root, None is
        outside any module."""
        return self._comms().by_module

    @property
    def by_pass(self) -> Mapping[str, Counter[str]]:
        """The counts of each pass: forward, recompute, backward, optimizer, outside."""
        return self._comms().by_pass

    @property
    def by_group(self) -> Mapping[str, Counter[str]]:
        """The counts on each process group, by its mesh dimension, else its description."""
        return self._comms().by_group

    @property
    def by_line(self) -> Mapping[str | None, Counter[str]]:
        """The counts of each `file:line` of your code that led to them; None where no line did."""
        return self._comms().by_line

    @property
    def bytes(self) -> int:
        """Bytes of all of them; of each, the larger of what goes in and what comes out."""
        return self._comms().bytes

    def counts_in(
        self,
        module: str | None = None,
        *,
        pass_: str | None = None,
        group: str | None = None,
        for_: str | None = None,
    ) -> Counter[str]:
        """The counts of a module and those below it, of a pass, on a group, for a module: as
        `expect` looks at them."""
        return self._comms().only(module=module, pass_=pass_, group=group, for_=for_).counts

    def table(self, *, width: int | None = None) -> str:
        """The tree of modules with what each causes, as `torchwhere comms` shows it; cut to `width`
        columns if given."""
        lines = comms_lines(self._comms(), width=width)
        return "\n".join("".join(text for text, _ in line) for line in lines)

    def to_dict(self) -> dict[str, Any]:
        """The whole tree, unfolded, as `torchwhere comms --json` gives it."""
        return self._comms().to_dict()

    def json(self) -> str:
        return json.dumps(self.to_dict())

    def as_rows(self) -> list[dict[str, Any]]:
        """What was counted, one a row: module, pass, op, group, what it was for, count, bytes."""
        return self._comms().as_rows()

    def to_pandas(self) -> Any:
        """The same as a `pandas.DataFrame`."""
        return self._comms().to_pandas()

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        said = ", ".join(f"{op}={count}" for op, count in sorted(self.counts.items()))
        return f"<comms: {said or 'no collectives'}>"

    def _repr_html_(self) -> str:
        return self._comms()._repr_html_()

    # -- as a test ---------------------------------------------------------------------------------

    def expect(
        self,
        *,
        module: str | None = None,
        pass_: str | None = None,
        group: str | None = None,
        for_: str | None = None,
        **wanted: int,
    ) -> None:
        """Raise an AssertionError that shows the difference, unless the collectives are as wanted.

        `all_reduce=2`, `all_gather_into_tensor__le=4`: calls of an op, with `__eq __ne __le __lt
        __ge __gt`. `bytes` and `calls` are those of all ops, `others` the calls of ops not named
        here. Looked at are those issued in `module` and the modules below it, in pass `pass_`, on
        `group`, moving what belongs to `for_`; where none is given, everything.
        """
        filters = {"module": module, "pass_": pass_, "group": group, "for_": for_}
        verdict = check(self._comms(), filters=filters, wanted=wanted, names=self._names())
        if not verdict.holds:
            raise AssertionError(expectation.failure(verdict))

    def _names(self) -> KnownNames:
        session = self._session
        modules = self._modules if session is None else _modules_of(session)
        box = self._box if session is None else _box_of(session)
        return KnownNames(
            modules={one for names in modules for one in names},
            groups={group_label(box, one) for one in box.groups()},
        )

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """Keep what was found in a file, for `expect_same_as`: one line for each module, pass and
        op."""
        kept = Path(path)
        kept.parent.mkdir(parents=True, exist_ok=True)
        written = kept.with_name(f"{kept.name}.{os.getpid()}")  # every rank may do this at once
        written.write_text(snapshot.dumps(snapshot.rows(self._comms())))
        os.replace(written, kept)

    def expect_same_as(
        self, path: str | os.PathLike[str], *, regenerate: bool | None = None
    ) -> None:
        """Raise an AssertionError that shows the difference, unless the collectives are those of a
        snapshot.

        With `regenerate`, or the variable TORCHWHERE_REGENERATE set, the snapshot is written anew
        instead.
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
    """What a reader of this rank's box would know of names, now."""
    session.name_groups(anew=False)
    box = session.recorder.box
    return Box(path=box.path or Path("<memory>"), meta=box.meta, names=box.names())


def _modules_of(session: Session) -> list[list[str]]:
    """All names of all modules that are known."""
    names = session.recorder.locator.names
    names.complete()
    return list(names.modules.values())
