"""Where the logs of ranks part: text files, one a rank, line by line, without what may differ.

Takes the files by rank, gives a `Comparison`. Every file is read once, as a stream; what is kept of
a line is two numbers, and ranks whose lines are all equal share them. About 25 us a line.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchwhere.core.errors import TorchwhereError
from torchwhere.diagnose.diff.cohorts import (
    MOST_PARTINGS,
    Cohorts,
    ComparedItem,
    Comparison,
    Divergence,
    Version,
    in_order,
    ranks_named,
)
from torchwhere.diagnose.diff.log_lines import Stripper, skeleton

_CONTEXT = 3  # lines before
_AFTER = 2
_LOOK_AHEAD = 100  # lines in which two logs may come together again
_TOGETHER = 2  # lines that must be equal for that
_MOST_LINES = 200_000_000  # of all ranks
_COLUMNS = 4096  # lines that are compared at once
_END = 0  # of a log, in the place of a line's number
_NO_LINE = "\n"  # the same, in the place of its text

Numbers = npt.NDArray[np.int64]


@dataclass(slots=True)
class Log:
    """The log of one rank."""

    path: Path
    strip: Stripper
    ignore: tuple[re.Pattern[str], ...] = ()

    def lines(self) -> Iterator[tuple[int, str]]:
        """Its lines by number, those to ignore left out. Of what overwrote itself on a terminal,
        the last state."""
        try:
            with self.path.open(encoding="utf-8", errors="replace", newline="\n") as file:
                for number, line in enumerate(file, 1):
                    text = line.rstrip("\r\n").rpartition("\r")[2]
                    if not any(pattern.search(text) for pattern in self.ignore):
                        yield number, text
        except OSError as error:
            raise TorchwhereError(f"cannot read {self.path}: {error.strerror}") from None

    def entries(self, start: int, stop: int) -> list[ComparedItem]:
        """Some of its lines, counted from 0 without those to ignore."""
        return [
            ComparedItem(number, text) for number, text in islice(self.lines(), max(0, start), stop)
        ]


@dataclass(slots=True)
class _Read:
    """Logs that are equal, in numbers: what each line says, and what it says with its values."""

    ranks: list[int]
    flow: Numbers
    value: Numbers


def compare_logs(logs: Mapping[int, Log]) -> Comparison:
    """Where the logs of some ranks part."""
    most = max(1000, _MOST_LINES // max(1, len(logs)))
    reads, compared, is_cut = _read_all(logs, most)
    search = _LogSearch(reads, logs)
    search.run()
    remarks = [f"only the first {most:,} lines of each log were compared"] if is_cut else []
    if search.more:
        remarks.append(f"{search.more} further places where ranks part are not shown")
    cohorts = in_order(tuple(sorted(read.ranks)) for read in reads)
    return Comparison(
        tuple(sorted(logs)), compared, cohorts, tuple(search.divergences), remarks=tuple(remarks)
    )


def _read_all(logs: Mapping[int, Log], most: int) -> tuple[list[_Read], int, bool]:
    """The logs in numbers, equal ones together; how many lines; and whether one has more than
    `most`."""
    found: dict[tuple[bytes, bytes], _Read] = {}
    lines, is_cut = 0, False
    for rank, log in sorted(logs.items()):
        flow, value = array("q"), array("q")
        for _, text in islice(log.lines(), most + 1):
            said = log.strip(text)
            value.append(hash(said) | 1)  # never _END
            flow.append(hash(skeleton(said)) | 1)
        is_cut |= len(flow) > most
        del flow[most:], value[most:]
        lines += len(flow)
        read = found.setdefault(
            (flow.tobytes(), value.tobytes()), _Read([], np.array(flow), np.array(value))
        )
        read.ranks.append(rank)
    return list(found.values()), lines, is_cut


class _LogSearch:
    """Goes through logs that differ, line by line, as long as some of them may still part."""

    def __init__(self, reads: Sequence[_Read], logs: Mapping[int, Log]) -> None:
        self._reads = reads
        self._logs = logs
        self._cohorts = Cohorts([range(len(reads))])  # of reads, by index
        self._values_differ = False
        self.divergences: list[Divergence] = []
        self.more = 0

    def run(self) -> None:
        longest = max((len(read.flow) for read in self._reads), default=0)
        for start in range(0, longest + 1, _COLUMNS):
            if not self._cohorts.can_part:
                return
            flow, value = (self._block(name, start) for name in ("flow", "value"))
            for at in np.flatnonzero((value != value[0]).any(axis=0)):
                self._look(start + int(at), flow[:, at].tolist(), value[:, at].tolist())

    def _block(self, name: str, start: int) -> Numbers:
        block = np.full((len(self._reads), _COLUMNS), _END, np.int64)
        for row, read in zip(block, self._reads, strict=True):
            part = getattr(read, name)[start : start + _COLUMNS]
            row[: len(part)] = part
        return block

    def _look(self, line: int, flow: list[int], value: list[int]) -> None:
        for versions in self._cohorts.part(dict(enumerate(flow))):
            self._tell("flow", line, versions)
        for cohort in () if self._values_differ else self._cohorts.all:
            versions = _by(value, cohort)
            if len(versions) > 1:
                self._values_differ = True
                self._tell("value", line, versions)
                return

    def _tell(self, kind: str, line: int, versions: Sequence[Sequence[int]]) -> None:
        if len(self.divergences) >= MOST_PARTINGS:
            self.more += 1
            return
        told = [
            self._version(line, sorted(rank for at in reads for rank in self._reads[at].ranks))
            for reads in versions
        ]
        told.sort(key=lambda version: (-len(version.ranks), version.ranks))
        before = self._logs[told[0].ranks[0]].entries(line - _CONTEXT, line)
        remarks = self._together_again(line, told) if kind == "flow" and len(told) == 2 else ()
        self.divergences.append(Divergence(kind, None, tuple(before), tuple(told), remarks))

    def _version(self, line: int, ranks: list[int]) -> Version:
        found = self._logs[ranks[0]].entries(line, line + 1 + _AFTER)
        return Version(tuple(ranks), found[0] if found else None, tuple(found[1:]))

    def _together_again(self, line: int, versions: Sequence[Version]) -> tuple[str, ...]:
        """Whether two logs go on together: one of them may just have a line more."""
        said = []
        for version in versions:
            log = self._logs[version.ranks[0]]
            said.append(
                [skeleton(log.strip(entry.text)) for entry in log.entries(line, line + _LOOK_AHEAD)]
            )
            said[-1] += [_NO_LINE] * (_LOOK_AHEAD - len(said[-1]))
        found = rejoined(*said)
        if found is None or any(version.entry is None for version in versions):
            return (
                (f"they do not come together again in the next {_LOOK_AHEAD} lines",)
                if found is None
                else ()
            )
        names = [ranks_named(version.ranks) for version in versions]
        skipped = [
            f"{count} line{'s' * (count > 1)} of {name}"
            for count, name in zip(found, names, strict=True)
            if count
        ]
        return (f"they come together again after {' and '.join(skipped)}",)


def _by(found: Sequence[int], members: Sequence[int]) -> list[list[int]]:
    versions: dict[int, list[int]] = {}
    for member in members:
        versions.setdefault(found[member], []).append(member)
    return list(versions.values())


def rejoined(one: Sequence[str], other: Sequence[str]) -> tuple[int, int] | None:
    """How many lines of each to leave out, the fewest, for the next ones to be equal again."""
    at: dict[tuple[str, ...], int] = {}
    for start in range(len(other) - _TOGETHER + 1):
        at.setdefault(tuple(other[start : start + _TOGETHER]), start)
    pairs = [
        (start, at[tuple(one[start : start + _TOGETHER])])
        for start in range(len(one) - _TOGETHER + 1)
        if one[start] != _NO_LINE and tuple(one[start : start + _TOGETHER]) in at
    ]
    return min(pairs, key=sum, default=None)


# -- which file is whose ---------------------------------------------------------------------------

_RANK = re.compile(r"rank[_\-=.]?(\d+)", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")


def ranks_of(paths: Sequence[Path]) -> dict[int, Path]:
    """The files by rank: the number after "rank" in the name or, where there is none, the one that
    tells the files apart."""
    names = [str(path) for path in paths]
    numbers = [[int(found[-1])] if (found := _RANK.findall(name)) else [] for name in names]
    if not all(numbers):
        fields = [_DIGITS.findall(name) for name in names]
        same_shape = len({_DIGITS.sub("#", name) for name in names}) == 1
        differing = (
            [at for at, values in enumerate(zip(*fields, strict=True)) if len(set(values)) > 1]
            if same_shape
            else []
        )
        if len(differing) != 1:
            raise TorchwhereError(
                f"cannot tell which rank wrote {names[0]}: the files' names must differ in one"
                " number, or have it after `rank`"
            )
        numbers = [[int(found[differing[0]])] for found in fields]
    by_rank: dict[int, Path] = {}
    for (rank,), path in zip(numbers, paths, strict=True):
        if rank in by_rank:
            raise TorchwhereError(
                f"two logs of rank {rank}: {by_rank[rank]} and {path}. Say which: --logs"
                " 'folder/*/stdout.log'"
            )
        by_rank[rank] = path
    return by_rank
