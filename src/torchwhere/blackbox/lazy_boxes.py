"""The boxes of a large job: each is read when it is asked for, and the last few are kept.

Thousands of boxes at once are gigabytes. Whoever goes through them rank by rank reads each one once
more, and holds one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.reader import BoxReader
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.errors import TorchwhereError

_KEPT = 16


class LazyBoxes(Mapping[int, Box]):
    """Boxes by rank. One that is gone by now, or another rank's, is an empty one that says so."""

    def __init__(
        self,
        labels: Mapping[int, BoxSummary],
        *,
        on_read: Callable[[int], None] | None = None,
        kept: int = _KEPT,
    ) -> None:
        self.labels = labels
        self._most = kept
        self._on_read = on_read  # told how many have been read
        self._count = 0
        self._reader = BoxReader()
        self._kept: OrderedDict[int, Box] = OrderedDict()

    def __getitem__(self, rank: int) -> Box:
        found = self._kept.get(rank)
        if found is None:
            found = self._kept[rank] = self._read(rank)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return found

    def _read(self, rank: int) -> Box:
        label = self.labels[rank]
        self._count += 1
        if self._on_read is not None:
            self._on_read(self._count)
        try:
            box = self._reader.read(label.path)
        except TorchwhereError as error:
            return Box(path=label.path, meta={"rank": rank}, problems=[str(error)])
        if box.rank == rank:
            return box
        return Box(
            path=label.path,
            meta={"rank": rank},
            problems=["it was replaced while the run was read"],
        )

    def __iter__(self) -> Iterator[int]:
        return iter(self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __contains__(self, rank: object) -> bool:
        return rank in self.labels
