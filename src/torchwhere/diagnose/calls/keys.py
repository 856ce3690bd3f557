"""The values by which ranks are compared: process groups, streams, signatures and call sites.

They are made from the string table of a box. Two ranks have equal values exactly if they mean the
same thing.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from torchwhere.blackbox.string_table import P2P, json_value, stream_ends
from torchwhere.core.place import Pass

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
    group: int  # a local id: see `ids.py`
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
