"""What one clerk has met: groups, signatures and spots, by number. Two boxes that mean the same get
the same number.

Takes the names of a box, gives numbers, and hands over what is new since it was asked last. Ranks
of one stage name their spots alike, so that mostly those of the box before are right for the next
one too.
"""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import (
    FLAG_ASYNC,
    FLAG_INFERRED,
    FLAG_SHADOW,
    FLAG_UNKNOWN,
    NO_CALL,
    EntryType,
)
from torchwhere.core.events import Kind
from torchwhere.core.place import Certainty, Pass
from torchwhere.diagnose.calls.keys import (
    CallSite,
    Group,
    Signature,
    Signatures,
    StreamKey,
    group_of,
)
from torchwhere.diagnose.calls.order import Classes

_PASSES = frozenset(map(int, Pass))
_NAMED = ("module", "line", "graph", "beneficiary", "param")


class NewIds(NamedTuple):
    """What nobody was told yet, in the order of its numbers."""

    groups: list[Group]
    signatures: list[Signature]
    call_sites: list[CallSite]


class _Last(NamedTuple):
    """The classes of records of the box before, and what its table had to say of them."""

    examples: npt.NDArray[np.int64]
    packed_ids: list[int]  # ids of their signatures
    ids: list[int]  # of all names
    names: list[tuple[int, str] | None]
    threads: dict[int, str | None]
    call_sites: list[int]


class LocalIds:
    """Numbers for what the names in boxes stand for."""

    def __init__(self) -> None:
        self._reader = Signatures()
        self._parsed: dict[str, Group | None] = {}
        self._groups: dict[str, int] = {}
        # of what group, is another matter: names are a rank's own
        self._drafts: dict[str, tuple[Signature | None, str]] = {}
        self._signatures: dict[tuple[str, int], int] = {}
        self._told: list[Signature] = []
        self._call_sites: dict[tuple[Any, ...], int] = {}
        self._last: _Last | None = None
        self._news = NewIds([], [], [])

    def news(self) -> NewIds:
        found, self._news = self._news, NewIds([], [], [])
        return found

    # -- groups ------------------------------------------------------------------------------------

    def groups_of(self, box: Box) -> dict[str, int]:
        """The groups that a rank knew, by name; the latest entry of a name wins."""
        texts = sorted(
            [
                (entry_id, text)
                for entry_id, (sort, text) in box.names.items()
                if sort == EntryType.GROUP
            ]
        )
        latest = {group.name: text for _, text in texts if (group := self._group(text)) is not None}
        return {name: self._number_of_group(text) for name, text in latest.items()}

    def counts(self, box: Box, groups: dict[str, int]) -> dict[StreamKey, int]:
        """What a rank has counted, by stream."""
        found = {}
        for (entry_id, source, destination), count in box.counters().items():
            group = self._group(box.name(entry_id) or "")
            if group is not None and group.name in groups:
                found[StreamKey(groups[group.name], source, destination)] = count
        return found

    def _group(self, text: str) -> Group | None:
        try:
            return self._parsed[text]
        except KeyError:
            return self._parsed.setdefault(text, group_of(text))

    def _number_of_group(self, text: str) -> int:
        """By its text: the hash of a text is kept with it, that of a group of thousands is not."""
        number = self._groups.get(text)
        if number is None:
            number = self._groups[text] = len(self._groups)
            group = self._group(text)
            assert group is not None
            self._news.groups.append(group)
        return number

    # -- calls -------------------------------------------------------------------------------------

    def pairs(
        self, box: Box, records: npt.NDArray[Any], classes: Classes, groups: dict[str, int]
    ) -> tuple[list[tuple[int, int]], list[StreamKey | None]]:
        """Signature and spot of every class of records; and the streams they are counted in: None
        for what is no collective, and where the group is not known."""
        packed_ids, call_sites = self._call_sites_of(box, records, classes)
        known: dict[int, tuple[int, StreamKey | None]] = {}
        for what in packed_ids:
            if what not in known:
                number = self._signature(box.name(what) or "", groups)
                known[what] = number, self._told[number].key(box.rank) if number >= 0 else None
        return [
            (known[what][0], call_site)
            for what, call_site in zip(packed_ids, call_sites, strict=True)
        ], [known[what][1] for what in packed_ids]

    def _signature(self, text: str, groups: dict[str, int]) -> int:
        if text not in self._drafts:
            self._drafts[text] = self._reader.read(text)
        draft, group = self._drafts[text]
        if draft is None or group not in groups:
            return -1
        number = self._signatures.get((text, groups[group]))
        if number is None:
            number = self._signatures[text, groups[group]] = len(self._signatures)
            self._told.append(draft._replace(group=groups[group]))
            self._news.signatures.append(self._told[-1])
        return number

    def _call_sites_of(
        self, box: Box, records: npt.NDArray[Any], classes: Classes
    ) -> tuple[list[int], list[int]]:
        """Of every class of records, the id of its signature, 0 for what is no collective; and the
        number of its spot."""
        last, name_of = self._last, box.names.get
        if (
            last is not None
            and last.examples is classes.examples
            and all(map(is_, map(name_of, last.ids), last.names))
            and all(box.thread(number) == name for number, name in last.threads.items())
        ):
            return last.packed_ids, last.call_sites
        examples = records[classes.examples]
        rows = examples.tolist()
        ids = sorted({int(entry_id) for name in _NAMED for entry_id in examples[name].tolist()})
        self._last = _Last(
            examples=classes.examples,
            packed_ids=[row[11] if row[2] == Kind.COLLECTIVE else 0 for row in rows],
            ids=ids,
            names=[name_of(entry_id) for entry_id in ids],
            threads={row[5]: box.thread(row[5]) for row in rows},
            call_sites=[
                self._call_site(box, row) if row[2] == Kind.COLLECTIVE else -1 for row in rows
            ],
        )
        return self._last.packed_ids, self._last.call_sites

    def _call_site(self, box: Box, row: tuple[Any, ...]) -> int:
        _, _, _, pass_, flags, thread, _, module, call, line, graph, _, beneficiary, param, _, _ = (
            row
        )
        named, name = box.name(module), box.name
        found = (
            named,
            pass_,
            name(line),
            name(beneficiary),
            name(graph),
            box.thread(thread),
            name(param),
            call,
            flags,
            bool(module),
        )
        number = self._call_sites.get(found)
        if number is None:
            number = self._call_sites[found] = len(self._call_sites)
            is_lost = flags & FLAG_UNKNOWN or (module and named is None) or pass_ not in _PASSES
            sure = (
                Certainty.UNKNOWN
                if is_lost
                else Certainty.INFERRED
                if flags & FLAG_INFERRED
                else Certainty.EXACT
            )
            at = None if named is None or call == NO_CALL else call
            flagged = bool(flags & FLAG_ASYNC), bool(flags & FLAG_SHADOW)
            self._news.call_sites.append(
                CallSite(found[:4], at, found[4], found[5], sure, found[6], *flagged)
            )
        return number
