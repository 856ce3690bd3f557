"""Compares the logs of ranks: text files, one for each rank, line by line, without what may differ.

Takes the files by rank, gives a `Comparison`. Each file is read once, as a stream. Two numbers for
each line stay in memory, and ranks with equal logs share them. About 25 us a line.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from torchwhere.core.arrays import Ints
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.results import Fact
from torchwhere.diagnose.diff.cohorts import (
    MOST_DIVERGENCES,
    Cohorts,
    ComparedItem,
    Comparison,
    Divergence,
    Version,
    in_order,
)
from torchwhere.diagnose.diff.facts import (
    LogsCut,
    LogsRejoin,
    LogsStayApart,
    MoreDivergences,
)
from torchwhere.diagnose.diff.log_lines import Stripper, skeleton

_CONTEXT = 3  # equal lines before a divergence
_AFTER = 2
_LOOK_AHEAD = 100  # lines in which two logs may agree again
_EQUAL_LINES = 2  # consecutive lines that must be equal for that
_MOST_LINES = 200_000_000  # of all ranks
_COLUMNS = 4096  # lines that are compared at once
_END = 0  # instead of a line's hash, after the end of a log
_NO_LINE = "\n"  # instead of a line's text, after the end of a log


@dataclass(slots=True)
class Log:
    """The log of one rank."""

    path: Path
    strip: Stripper
    ignore: tuple[re.Pattern[str], ...] = ()

    def lines(self) -> Iterator[tuple[int, str]]:
        """Its lines with their numbers, without ignored ones. A line that carriage returns
        overwrite counts in its last state."""
        try:
            with self.path.open(encoding="utf-8", errors="replace", newline="\n") as file:
                for number, line in enumerate(file, 1):
                    text = line.rstrip("\r\n").rpartition("\r")[2]
                    if not any(pattern.search(text) for pattern in self.ignore):
                        yield number, text
        except OSError as error:
            raise TorchwhereError(f"cannot read {self.path}: {error.strerror}") from None

    def entries(self, start: int, stop: int) -> list[ComparedItem]:
        """Some of its lines, counted from 0 without the ignored ones."""
        return [
            ComparedItem(number, text) for number, text in islice(self.lines(), max(0, start), stop)
        ]


@dataclass(slots=True)
class _HashedLog:
    """The hashes of equal logs: of each line with its numbers removed, and with them."""

    ranks: list[int]
    flow: Ints
    value: Ints


def compare_logs(logs: Mapping[int, Log]) -> Comparison:
    """Find where the logs of some ranks diverge."""
    most = max(1000, _MOST_LINES // max(1, len(logs)))
    hashed, compared, is_cut = _read_all(logs, most)
    search = _LogSearch(hashed, logs)
    search.run()
    facts: list[Fact] = [LogsCut(most)] if is_cut else []
    if search.not_listed:
        facts.append(MoreDivergences(search.not_listed))
    cohorts = in_order(tuple(sorted(log.ranks)) for log in hashed)
    return Comparison(
        tuple(sorted(logs)), compared, cohorts, tuple(search.divergences), facts=tuple(facts)
    )


def _read_all(logs: Mapping[int, Log], most: int) -> tuple[list[_HashedLog], int, bool]:
    """The hashed logs, equal ones merged; the number of lines; whether a log has more than
    `most`."""
    by_content: dict[tuple[bytes, bytes], _HashedLog] = {}
    lines, is_cut = 0, False
    for rank, log in sorted(logs.items()):
        flow, value = array("q"), array("q")
        for _, text in islice(log.lines(), most + 1):
            line = log.strip(text)
            value.append(hash(line) | 1)  # never _END
            flow.append(hash(skeleton(line)) | 1)
        is_cut |= len(flow) > most
        del flow[most:], value[most:]
        lines += len(flow)
        hashed = by_content.setdefault(
            (flow.tobytes(), value.tobytes()), _HashedLog([], np.array(flow), np.array(value))
        )
        hashed.ranks.append(rank)
    return list(by_content.values()), lines, is_cut


class _LogSearch:
    """Compares different logs line by line until no cohort can be split further."""

    def __init__(self, hashed: Sequence[_HashedLog], logs: Mapping[int, Log]) -> None:
        self._hashed = hashed
        self._logs = logs
        self._cohorts = Cohorts([range(len(hashed))])  # of hashed logs, by index
        self._values_differ = False
        self.divergences: list[Divergence] = []
        self.not_listed = 0

    def run(self) -> None:
        longest = max((len(log.flow) for log in self._hashed), default=0)
        for start in range(0, longest + 1, _COLUMNS):
            if not self._cohorts.can_split:
                return
            flow, value = (self._block(name, start) for name in ("flow", "value"))
            for at in np.flatnonzero((value != value[0]).any(axis=0)):
                self._compare(start + int(at), flow[:, at].tolist(), value[:, at].tolist())

    def _block(self, name: str, start: int) -> Ints:
        block = np.full((len(self._hashed), _COLUMNS), _END, np.int64)
        for row, log in zip(block, self._hashed, strict=True):
            part = getattr(log, name)[start : start + _COLUMNS]
            row[: len(part)] = part
        return block

    def _compare(self, line: int, flow: list[int], value: list[int]) -> None:
        for versions in self._cohorts.split(dict(enumerate(flow))):
            self._add("flow", line, versions)
        versions = [] if self._values_differ else self._cohorts.differing(dict(enumerate(value)))
        if versions:
            self._values_differ = True
            self._add("value", line, versions)

    def _add(self, kind: str, line: int, versions: Sequence[Sequence[int]]) -> None:
        if len(self.divergences) >= MOST_DIVERGENCES:
            self.not_listed += 1
            return
        shown = [
            self._version(line, sorted(rank for at in logs for rank in self._hashed[at].ranks))
            for logs in versions
        ]
        shown.sort(key=lambda version: (-len(version.ranks), version.ranks))
        before = self._logs[shown[0].ranks[0]].entries(line - _CONTEXT, line)
        facts = self._going_on(line, shown) if kind == "flow" and len(shown) == 2 else ()
        self.divergences.append(Divergence(kind, None, tuple(before), tuple(shown), facts))

    def _version(self, line: int, ranks: list[int]) -> Version:
        entries = self._logs[ranks[0]].entries(line, line + 1 + _AFTER)
        return Version(tuple(ranks), entries[0] if entries else None, tuple(entries[1:]))

    def _going_on(self, line: int, versions: Sequence[Version]) -> tuple[Fact, ...]:
        """Whether two logs agree again: one of them may have only an extra line."""
        texts = []
        for version in versions:
            log = self._logs[version.ranks[0]]
            entries = log.entries(line, line + _LOOK_AHEAD)
            lines = [skeleton(log.strip(entry.text)) for entry in entries]
            texts.append(lines + [_NO_LINE] * (_LOOK_AHEAD - len(lines)))
        extra = rejoined(*texts)
        if extra is None:
            return (LogsStayApart(_LOOK_AHEAD),)
        if any(version.entry is None for version in versions):
            return ()
        pairs = zip(extra, versions, strict=True)
        return (LogsRejoin(tuple((count, version.ranks) for count, version in pairs if count)),)


def rejoined(first: Sequence[str], second: Sequence[str]) -> tuple[int, int] | None:
    """The fewest lines to skip in each log so that the next lines are equal again."""
    at: dict[tuple[str, ...], int] = {}
    for start in range(len(second) - _EQUAL_LINES + 1):
        at.setdefault(tuple(second[start : start + _EQUAL_LINES]), start)
    pairs = [
        (start, at[tuple(first[start : start + _EQUAL_LINES])])
        for start in range(len(first) - _EQUAL_LINES + 1)
        if first[start] != _NO_LINE and tuple(first[start : start + _EQUAL_LINES]) in at
    ]
    return min(pairs, key=sum, default=None)


# -- the rank of a file ----------------------------------------------------------------------------

_RANK = re.compile(r"rank[_\-=.]?(\d+)", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")


def ranks_of(paths: Sequence[Path]) -> dict[int, Path]:
    """The files by rank: the number after "rank" in the path or, if a path has none, the only
    number in which the paths differ."""
    names = [str(path) for path in paths]
    numbers = [_RANK.findall(name) for name in names]
    ranks = [int(of_name[-1]) for of_name in numbers if of_name]
    if len(ranks) < len(names):
        ranks = _differing_numbers(names)
    by_rank: dict[int, Path] = {}
    for rank, path in zip(ranks, paths, strict=True):
        if rank in by_rank:
            raise TorchwhereError(
                f"two logs of rank {rank}: {by_rank[rank]} and {path}. Choose with --logs"
                " 'folder/*/stdout.log'"
            )
        by_rank[rank] = path
    return by_rank


def _differing_numbers(names: Sequence[str]) -> list[int]:
    """For each name its value of the only number in which all names differ."""
    if len({_DIGITS.sub("#", name) for name in names}) == 1:
        columns = list(zip(*map(_DIGITS.findall, names), strict=True))
        differing = [column for column in columns if len(set(column)) > 1]
        if len(differing) == 1:
            return [int(number) for number in differing[0]]
    raise TorchwhereError(
        f"cannot find the rank of {names[0]}: the file names must differ in one number, or have it"
        " after `rank`"
    )
