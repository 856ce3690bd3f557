"""Ids of groups, signatures and call sites: local ones, shared ones, and the map between them.

An `Encoder` gives equal things equal ids (`LocalIds`). Every worker process has its own encoder, so
a local id means something only together with its encoder. `JobCalls` translates local ids to ids
that all ranks of the job share (`SharedIds`); an `IdMap` holds the translation for one encoder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import (
    FLAG_ASYNC,
    FLAG_REPLAYED,
    FLAG_SHADOW,
    NO_CALL,
    EntryType,
    certainty_of,
)
from torchwhere.blackbox.string_table import Group, group_of, json_value
from torchwhere.core.arrays import AnyArray, Bools, Ints, Words
from torchwhere.core.events import Kind
from torchwhere.core.grouping import Interner
from torchwhere.core.place import PASS_LABELS
from torchwhere.diagnose.calls.keys import (
    CallSite,
    Signature,
    SignatureParser,
    StreamKey,
)
from torchwhere.diagnose.calls.order import RecordClasses

_NAMED = ("module", "line", "graph", "beneficiary", "param")
# The fields of a record that decide its call site, with what the string table has for them.
_SITE_FIELDS = ("pass", "flags", "thread", "call", *_NAMED)


class NewIds(NamedTuple):
    """The values that got a local id since the batch before, in the order of their ids."""

    groups: list[Group]
    signatures: list[Signature]
    call_sites: list[CallSite]


class _PreviousBox(NamedTuple):
    """The record classes of the box before, and what its string table had for them."""

    examples: Ints
    signature_entries: list[int]  # table entries of the signatures; 0 if not a collective
    entries: list[int]  # all table entries that the call sites use
    names: list[tuple[int, str] | None]
    threads: dict[int, str | None]
    call_sites: list[int]


class LocalIds:
    """Gives groups, signatures and call sites ids that are valid within one encoder.

    Ranks of one pipeline stage mostly use the same call sites. So the ids of the box before are
    mostly right for the next box, and checking that is faster than looking them up.
    """

    def __init__(self) -> None:
        self._parser = SignatureParser()
        self._parsed_groups: dict[str, Group | None] = {}
        self._groups: dict[str, int] = {}
        # Signatures without a group: which group a name stands for depends on the rank.
        self._drafts: dict[str, tuple[Signature | None, str]] = {}
        self._signature_ids: dict[tuple[str, int], int] = {}
        self._signatures: list[Signature] = []
        self._call_sites: dict[tuple[Any, ...], int] = {}
        self._previous: _PreviousBox | None = None
        self._new = NewIds([], [], [])

    def take_new(self) -> NewIds:
        """Returns what got an id since the last call."""
        new, self._new = self._new, NewIds([], [], [])
        return new

    # -- groups ------------------------------------------------------------------------------------

    def groups_of(self, box: Box) -> dict[str, int]:
        """Returns the groups of a rank by name. If a name occurs twice, the latest entry wins."""
        texts = sorted(
            (entry, text)
            for entry, (entry_type, text) in box.names.items()
            if entry_type == EntryType.GROUP
        )
        latest = {}
        for _, text in texts:
            group = self._group(text)
            if group is not None:
                latest[group.name] = (text, group)
        return {name: self._group_id(text, group) for name, (text, group) in latest.items()}

    def counts(self, box: Box, groups: dict[str, int]) -> dict[StreamKey, int]:
        """Returns how many calls a rank has counted in each stream."""
        counts = {}
        for (entry, source, destination), count in box.counters().items():
            group = self._group(box.name(entry) or "")
            if group is not None and group.name in groups:
                counts[StreamKey(groups[group.name], source, destination)] = count
        return counts

    def _group(self, text: str) -> Group | None:
        try:
            return self._parsed_groups[text]
        except KeyError:
            return self._parsed_groups.setdefault(text, group_of(json_value(text)))

    def _group_id(self, text: str, group: Group) -> int:
        # By text, because a string caches its hash; hashing a group of thousands of ranks is slow.
        group_id = self._groups.get(text)
        if group_id is None:
            group_id = self._groups[text] = len(self._groups)
            self._new.groups.append(group)
        return group_id

    # -- calls -------------------------------------------------------------------------------------

    def pairs(
        self, box: Box, records: AnyArray, classes: RecordClasses, groups: dict[str, int]
    ) -> tuple[list[tuple[int, int]], list[StreamKey | None]]:
        """Returns signature and call site of each class of records, and the stream of each class.

        The stream is None for records that are not collectives, and if the group is unknown.
        """
        entries, call_sites = self._call_sites_of(box, records, classes)
        by_entry: dict[int, tuple[int, StreamKey | None]] = {}
        for entry in entries:
            if entry not in by_entry:
                signature = self._signature_id(box.name(entry) or "", groups)
                key = self._signatures[signature].key(box.rank) if signature >= 0 else None
                by_entry[entry] = signature, key
        pairs = [
            (by_entry[entry][0], call_site)
            for entry, call_site in zip(entries, call_sites, strict=True)
        ]
        return pairs, [by_entry[entry][1] for entry in entries]

    def _signature_id(self, text: str, groups: dict[str, int]) -> int:
        """Returns the id; -1 if the entry is lost or its group is unknown."""
        if text not in self._drafts:
            self._drafts[text] = self._parser.parse(text)
        draft, name = self._drafts[text]
        if draft is None or name not in groups:
            return -1
        group = groups[name]
        signature_id = self._signature_ids.get((text, group))
        if signature_id is None:
            signature_id = self._signature_ids[text, group] = len(self._signatures)
            self._signatures.append(draft._replace(group=group))
            self._new.signatures.append(self._signatures[-1])
        return signature_id

    def _call_sites_of(
        self, box: Box, records: AnyArray, classes: RecordClasses
    ) -> tuple[list[int], list[int]]:
        """Returns the table entry of the signature and the call site id of each class."""
        previous, name_of = self._previous, box.names.get
        if (
            previous is not None
            and previous.examples is classes.examples
            and all(map(is_, map(name_of, previous.entries), previous.names))
            and all(box.thread(number) == name for number, name in previous.threads.items())
        ):
            return previous.signature_entries, previous.call_sites
        examples = records[classes.examples]
        is_call = (examples["kind"] == int(Kind.COLLECTIVE)).tolist()
        entries = sorted({int(entry) for name in _NAMED for entry in examples[name].tolist()})
        rows = zip(*(examples[name].tolist() for name in _SITE_FIELDS), strict=True)
        self._previous = _PreviousBox(
            examples=classes.examples,
            signature_entries=np.where(is_call, examples["subject"], 0).tolist(),
            entries=entries,
            names=[name_of(entry) for entry in entries],
            threads={number: box.thread(number) for number in examples["thread"].tolist()},
            call_sites=[
                self._call_site_id(box, row) if is_one else -1
                for row, is_one in zip(rows, is_call, strict=True)
            ],
        )
        return self._previous.signature_entries, self._previous.call_sites

    def _call_site_id(self, box: Box, row: tuple[int, ...]) -> int:
        pass_, flags, thread, call, *entries = row
        names = tuple(map(box.name, entries))
        key = (names, pass_, box.thread(thread), call, flags, bool(entries[0]))
        site_id = self._call_sites.get(key)
        if site_id is None:
            site_id = self._call_sites[key] = len(self._call_sites)
            module, line, graph, beneficiary, param = names
            is_lost = bool(entries[0]) and module is None
            site = CallSite(
                site_id=(module, pass_, line, beneficiary),
                call=None if module is None or call == NO_CALL else call,
                graph=graph,
                thread=box.thread(thread),
                certainty=certainty_of(flags, is_lost=is_lost or pass_ not in PASS_LABELS),
                param=param,
                is_async=bool(flags & FLAG_ASYNC),
                is_shadow=bool(flags & FLAG_SHADOW),
                is_replayed=bool(flags & FLAG_REPLAYED),
            )
            self._new.call_sites.append(site)
        return site_id


class SharedIds:
    """Ids of groups, signatures and call sites that mean the same on all ranks of a job."""

    def __init__(self) -> None:
        self.groups = Interner[Group]()
        self.signature_ids = Interner[tuple[str, str]]()
        # id 0: a place that says nothing about the call (`CallSite.compared`)
        self.site_ids = Interner[Any]([None])
        self._parsed: dict[str, Any] = {}

    def group(self, key: StreamKey) -> Group:
        return self.groups[key.group]

    def parsed(self, text: str) -> Any:
        """Parses a JSON text once. Callers must not change the result."""
        if text not in self._parsed:
            self._parsed[text] = json_value(text)
        return self._parsed[text]


@dataclass(slots=True)
class IdMap:
    """Translates the local ids of one encoder to shared ids."""

    groups: list[int] = field(default_factory=list)
    signatures: list[Signature] = field(default_factory=list)  # by local id
    call_sites: list[CallSite] = field(default_factory=list)  # by local id
    # The shared id of local id i is at i + 1: a call of an unknown group has the local id -1.
    signature_ids: Words = field(default_factory=lambda: np.zeros(1, np.uint64))
    site_ids: Words = field(default_factory=lambda: np.zeros(1, np.uint64))
    # for each signature, whether its call site is compared
    has_site_id: Bools = field(default_factory=lambda: np.ones(1, np.bool_))

    def extend(self, new: NewIds, shared: SharedIds) -> None:
        """Adds the next local ids of the encoder."""
        self.groups += map(shared.groups.id_of, new.groups)
        self.signatures += new.signatures
        self.call_sites += new.call_sites
        signature_ids = [
            shared.signature_ids.id_of(signature.signature_id) for signature in new.signatures
        ]
        site_ids = [shared.site_ids.id_of(site.compared) for site in new.call_sites]
        has_site_id = [not signature.is_bookkeeping for signature in new.signatures]
        self.signature_ids = np.append(self.signature_ids, np.array(signature_ids, np.uint64))
        self.site_ids = np.append(self.site_ids, np.array(site_ids, np.uint64))
        self.has_site_id = np.append(self.has_site_id, np.array(has_site_id, np.bool_))
