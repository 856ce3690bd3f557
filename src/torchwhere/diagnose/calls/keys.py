"""The values by which ranks are compared: process groups, streams, signatures and call sites, and
their ids.

The values are made from the string table of a box. Two ranks have equal values exactly if they mean
the same thing. An `Encoder` gives equal values equal ids (`LocalIds`). Every worker process has its
own encoder, so a local id means something only together with its encoder. `JobCalls` translates
local ids to ids that all ranks of the job share (`stream_calls.SharedIds`).
"""

from __future__ import annotations

import json
import re
from functools import cache
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import (
    FLAG_ASYNC,
    FLAG_ON_DEVICE,
    FLAG_REPLAYED,
    FLAG_SHADOW,
    NO_CALL,
    EntryType,
    certainty_of,
)
from torchwhere.blackbox.string_table import P2P, Group, group_of, json_value, stream_ends
from torchwhere.core.arrays import Ints
from torchwhere.core.events import Kind
from torchwhere.core.place import PASS_LABELS, Pass

# The fields of a collective that must be equal on all ranks, beside its name. Ranks may pass
# different shapes to all_to_all. Only one rank of a scatter has the list of tensors. A recv may use
# a different shape with the same number of bytes as the send.
_MUST_AGREE = {
    "all_gather": ("dtype", "out_shapes"),
    "all_to_all": ("dtype",),
    "all_to_all_single": ("dtype",),
    "gather": ("dtype", "shapes", "peer"),
    "scatter": ("dtype", "peer"),
    "reduce_scatter": ("dtype", "shapes", "reduce_op"),
    "barrier": (),
    "monitored_barrier": (),
    "send": ("dtype", "bytes"),
    "recv": ("dtype", "bytes"),
}
_MUST_AGREE_ELSE = ("dtype", "shapes", "out_shapes", "reduce_op", "peer")
_BYTES = re.compile(r'"bytes": ?(\d{1,18})[,}]')


class StreamKey(NamedTuple):
    """Names a stream as `blackbox.string_table.StreamName` does, by the id of the group."""

    group: int
    source: int = -1
    destination: int = -1

    @property
    def is_p2p(self) -> bool:
        return self.source >= 0 or self.destination >= 0


class Signature(NamedTuple):
    """A collective without its number and its place."""

    text: str  # the JSON object from the box
    group: int  # a local id: see `LocalIds`
    signature_id: tuple[str, str]  # what all ranks must agree on
    op: str
    peer: int

    @property
    def bytes(self) -> int:
        """The bytes that the call moves; 0 if unknown."""
        match = _BYTES.search(self.text)  # takes a twentieth of the time of parsing
        return int(match[1]) if match is not None else 0

    @property
    def is_bookkeeping(self) -> bool:
        """Whether DDP issued it itself, to find out which parameters were used.

        No function of torch.distributed issues it, and gradients are not integers. DDP issues it
        when the last gradient is ready, in whatever module that happens.
        """
        return (
            self.op == "all_reduce" and '"dtype": "int' in self.text and '"api": null' in self.text
        )

    def key(self, rank: int) -> StreamKey:
        """Returns the stream that a rank counts this call in."""
        return StreamKey(self.group, *stream_ends(self.op, rank=rank, peer=self.peer))


class CallSite(NamedTuple):
    """A place without its rank and step, and what the call there was for."""

    # module, pass, line, beneficiary: equal on all ranks of a correct program
    site_id: tuple[str | None, int, str | None, str | None]
    call: int | None
    graph: str | None
    thread: str | None
    certainty: str
    param: str | None
    is_async: bool
    is_shadow: bool = False  # `Join` issued it for a rank that has run out of input
    is_replayed: bool = False  # part of a CUDA graph; the site is where it was captured
    is_on_device: bool = False  # its tensors are on an accelerator

    @property
    def compared(self) -> tuple[str | None, int, str | None, str | None] | None:
        """The part of the site by which ranks are compared; None if no part of it can be compared.

        A shadow call stands for any call of the other ranks. A callback that torch runs on its own
        thread has no place at all, and chance decides whether it runs there or inside the call. If
        the owner of the data is known, the module does not matter: DDP reduces a bucket when its
        last gradient is ready, wherever the program is then.
        """
        module, pass_, line, beneficiary = self.site_id
        if self.is_shadow or (module is None and line is None and beneficiary is None):
            return None
        return (None if beneficiary is not None else module), pass_, line, beneficiary

    def is_counted_by(self, steppers: tuple[str, ...]) -> bool:
        """Whether the recorded step of the call is its own.

        A thread that does not count steps issues its calls in whatever step the counting thread
        has reached. Threads of the autograd engine are an exception: they run while the counting
        thread waits for them.
        """
        if not steppers:
            return True
        return (self.thread,) == steppers or (len(steppers) == 1 and self.is_of_engine)

    @property
    def is_of_engine(self) -> bool:
        """Whether a thread of the autograd engine issued it."""
        return (
            self.site_id[1] == Pass.BACKWARD
            and self.thread is not None
            and self.thread.startswith("native-")
        )


class SignatureParser:
    """Parses the collective entries of string tables.

    A large job has tens of thousands of entries, and most differ only in the group and the peer.
    The rest of each text is parsed once.
    """

    # The form that the recorder writes; texts of other forms are parsed as a whole.
    _FORM = re.compile(
        r'(\{"op": "(\w+)", .*"group": ")([^"\\]*)(", "dtype": .*"peer": )(null|\d+)(, .*\})'
    )

    def __init__(self) -> None:
        self._signature_ids: dict[tuple[str, ...], tuple[str, str] | None] = {}

    def parse(self, text: str) -> tuple[Signature | None, str]:
        """Returns the signature, still without a group, and the name of its group."""
        match = self._FORM.fullmatch(text)
        if match is None:
            return _signature(text)
        head, op, group, middle, peer, tail = match.groups()
        key = (head, middle, tail, "" if op in P2P else peer)
        if key not in self._signature_ids:
            signature, _ = _signature(text)
            self._signature_ids[key] = None if signature is None else signature.signature_id
        signature_id = self._signature_ids[key]
        if signature_id is None:
            return None, ""
        return Signature(text, -1, signature_id, op, -1 if peer == "null" else int(peer)), group


def must_agree(op: str) -> tuple[str, ...]:
    """Returns the fields of a collective that must be equal on all its ranks."""
    return _MUST_AGREE.get(op, _MUST_AGREE_ELSE)


def _signature(text: str) -> tuple[Signature | None, str]:
    fields = json_value(text)
    if not isinstance(fields, dict):
        return None, ""
    op, peer = str(fields.get("op")), fields.get("peer")
    agreed = {name: fields.get(name) for name in must_agree(op)}
    signature_id = "p2p" if op in P2P else op, json.dumps(agreed, sort_keys=True)
    signature = Signature(text, -1, signature_id, op, peer if isinstance(peer, int) else -1)
    return signature, str(fields.get("group"))


# -- ids -------------------------------------------------------------------------------------------

_NAMED = ("module", "line", "graph", "beneficiary", "param")
# The fields of a record that decide its call site, with what the string table has for them.
_SITE_FIELDS = ("pass", "flags", "thread", "call", *_NAMED)
# The values that got a local id since the batch before, in the order of their ids.
NewValues = tuple[list[Group], list[Signature], list[CallSite]]


class _PreviousBox(NamedTuple):
    """The record classes of the box before, and what its string table had for them."""

    examples: Ints
    signature_entries: list[int]  # table entries of the signatures; 0 if not a collective
    entries: list[int]  # all table entries that the call sites use
    names: list[tuple[int, str] | None]
    threads: dict[int, str | None]
    call_sites: list[int]


def _parsed_group(text: str) -> Group | None:
    return group_of(json_value(text))


class LocalIds:
    """Gives groups, signatures and call sites ids that are valid within one encoder.

    Ranks of one pipeline stage mostly use the same call sites. So the ids of the box before are
    mostly right for the next box, and checking that is faster than looking them up.
    """

    def __init__(self) -> None:
        self._group = cache(_parsed_group)
        self._groups: dict[str, int] = {}
        # Signatures without a group: which group a name stands for depends on the rank.
        self._draft = cache(SignatureParser().parse)
        self._signature_ids: dict[tuple[str, int], int] = {}
        self._signatures: list[Signature] = []
        self._call_sites: dict[tuple[Any, ...], int] = {}
        self._previous: _PreviousBox | None = None
        self._new_values: NewValues = ([], [], [])

    def take_new(self) -> NewValues:
        """Returns what got an id since the last call."""
        new_values, self._new_values = self._new_values, ([], [], [])
        return new_values

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

    def _group_id(self, text: str, group: Group) -> int:
        # By text, because a string caches its hash; hashing a group of thousands of ranks is slow.
        group_id = self._groups.get(text)
        if group_id is None:
            group_id = self._groups[text] = len(self._groups)
            self._new_values[0].append(group)
        return group_id

    # -- calls -------------------------------------------------------------------------------------

    def pairs(
        self, box: Box, examples: Ints, groups: dict[str, int]
    ) -> tuple[list[tuple[int, int]], list[StreamKey | None]]:
        """Returns signature and call site of each class of records, and the stream of each class.

        `examples` are the indexes of one record of each class.
        The stream is None for records that are not collectives, and if the group is unknown.
        """
        entries, call_sites = self._call_sites_of(box, examples)
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
        draft, name = self._draft(text)
        if draft is None or name not in groups:
            return -1
        group = groups[name]
        signature_id = self._signature_ids.get((text, group))
        if signature_id is None:
            signature_id = self._signature_ids[text, group] = len(self._signatures)
            self._signatures.append(draft._replace(group=group))
            self._new_values[1].append(self._signatures[-1])
        return signature_id

    def _call_sites_of(self, box: Box, examples: Ints) -> tuple[list[int], list[int]]:
        """Returns the table entry of the signature and the call site id of each class."""
        previous, name_of = self._previous, box.names.get
        if (
            previous is not None
            and previous.examples is examples
            and all(map(is_, map(name_of, previous.entries), previous.names))
            and all(box.thread(number) == name for number, name in previous.threads.items())
        ):
            return previous.signature_entries, previous.call_sites
        records = box.records[examples]
        is_call = (records["kind"] == int(Kind.COLLECTIVE)).tolist()
        entries = sorted({int(entry) for name in _NAMED for entry in records[name].tolist()})
        rows = zip(*(records[name].tolist() for name in _SITE_FIELDS), strict=True)
        self._previous = _PreviousBox(
            examples=examples,
            signature_entries=np.where(is_call, records["subject"], 0).tolist(),
            entries=entries,
            names=[name_of(entry) for entry in entries],
            threads={number: box.thread(number) for number in records["thread"].tolist()},
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
                is_on_device=bool(flags & FLAG_ON_DEVICE),
            )
            self._new_values[2].append(site)
        return site_id
