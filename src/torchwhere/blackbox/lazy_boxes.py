"""The boxes of a large job: each is read when it is used, and the last few stay in memory.

Thousands of boxes at once take gigabytes. A pass over all ranks reads each box again and holds only
a few.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.reader import BoxReader, read_or_empty
from torchwhere.blackbox.summary import BoxSummary

_KEPT = 16


class LazyBoxes(Mapping[int, Box]):
    """Boxes by rank. A box that is gone, or that belongs to another rank by now, is empty and has a
    problem."""

    def __init__(
        self,
        summaries: Mapping[int, BoxSummary],
        *,
        on_read: Callable[[], None] | None = None,
        kept: int = _KEPT,
    ) -> None:
        self.summaries = summaries
        self._most = kept
        self._on_read = on_read
        self._reader = BoxReader()
        self._kept: OrderedDict[int, Box] = OrderedDict()

    def __getitem__(self, rank: int) -> Box:
        box = self._kept.get(rank)
        if box is None:
            box = self._kept[rank] = self._read(rank)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return box

    def _read(self, rank: int) -> Box:
        summary = self.summaries[rank]
        if self._on_read is not None:
            self._on_read()
        box = read_or_empty(self._reader.read, summary.path)
        if box.rank == rank:
            return box
        problems = box.problems or ["it was replaced while the run was read"]
        return Box(path=summary.path, meta={"rank": rank}, problems=problems)

    def __iter__(self) -> Iterator[int]:
        return iter(self.summaries)

    def __len__(self) -> int:
        return len(self.summaries)

    def __contains__(self, rank: object) -> bool:
        return rank in self.summaries
