"""The words in which ranks are compared: groups, streams, what a collective is, and from where it
was issued.

Made from the names in a box; equal on two ranks if and only if the ranks mean the same.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchwhere.core.place import Pass

# What ranks must agree on in one collective, beyond its name. Ranks may give all_to_all different
# shapes, only one rank of a scatter has the list of tensors, and what was sent may be received in
# another shape of as many bytes.
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
P2P = frozenset({"send", "recv"})


class StreamKey(NamedTuple):
    """What is counted in one sequence: the collectives of a group, or the messages from one rank to
    another (else -1)."""

    group: int
    source: int = -1
    destination: int = -1


@dataclass(frozen=True, slots=True)
class Group:
    """A process group, the same on all its ranks."""

    name: str
    ranks: tuple[int, ...]
    desc: str = field(default="", compare=False)
    backend: str | None = field(default=None, compare=False)
    mesh_dim: str | None = field(default=None, compare=False)

    @property
    def title(self) -> str:
        """What people call it: its mesh dimension, its description, or its name."""
        if self.mesh_dim:
            return self.mesh_dim
        if self.desc in ("default_pg", "") and self.name in ("0", ""):
            return "default"
        return self.desc if self.desc not in ("", "undefined") else self.name


class Signature(NamedTuple):
    """A collective, less its number and its place. `group` is a number of whoever made this."""

    text: str  # the JSON object of the box
    group: int
    signature_id: tuple[str, str]  # what ranks must agree on
    op: str
    peer: int

    @property
    def bytes(self) -> int:
        """How much it moves; 0 where that is not known."""
        match = _BYTES.search(self.text)  # a twentieth of the time that parsing takes
        return int(match[1]) if match is not None else 0

    @property
    def is_bookkeeping(self) -> bool:
        """Whether it is DDP's own: which parameters were used. No function of torch.distributed
        issued it, and gradients are no integers. DDP does it when the last gradient happens to be
        there, in whatever module that is."""
        return (
            self.op == "all_reduce" and '"dtype": "int' in self.text and '"api": null' in self.text
        )

    def key(self, rank: int) -> StreamKey:
        """The stream it is counted in, on a rank."""
        if self.op not in P2P:
            return StreamKey(self.group)
        return (
            StreamKey(self.group, rank, self.peer)
            if self.op == "send"
            else StreamKey(self.group, self.peer, rank)
        )


class CallSite(NamedTuple):
    """A place, less its rank and step, and what was issued there was for."""

    # module, pass, line, beneficiary: a sound program's ranks agree
    site_id: tuple[str | None, int, str | None, str | None]
    call: int | None
    graph: str | None
    thread: str | None
    certainty: str
    param: str | None
    is_async: bool
    is_shadow: bool = False  # `Join` issued it, for a rank that is out of input

    @property
    def compared(self) -> tuple[str | None, int, str | None, str | None] | None:
        """What ranks are held against each other for; None where a place says nothing of what was
        issued.

        A shadow stands for whatever the others issue. A callback that torch runs on a thread of its
        own has no place at all, and it is chance whether it runs there or inside the call. Where it
        is known whose data moves, it does not matter in which module the program was just then: DDP
        reduces a bucket when the last of its gradients happens to be there.
        """
        module, pass_, line, beneficiary = self.site_id
        if self.is_shadow or (module is None and line is None and beneficiary is None):
            return None
        return (None if beneficiary is not None else module), pass_, line, beneficiary

    def is_counted_by(self, steppers: tuple[str, ...]) -> bool:
        """Whether the step it was issued in is its own: another thread comes to a call in whatever
        step the counting one is just then. Threads of the autograd engine run while the one that
        counts waits for them."""
        if not steppers:
            return True
        return (self.thread,) == steppers or (len(steppers) == 1 and self.is_of_engine)

    @property
    def is_of_engine(self) -> bool:
        return (
            self.site_id[1] == Pass.BACKWARD
            and self.thread is not None
            and self.thread.startswith("native-")
        )


def group_of(text: str) -> Group | None:
    """The group that an entry of a table describes; None if it describes none."""
    value = parsed(text)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    ranks = value.get("ranks")
    members = (
        tuple(rank for rank in ranks if isinstance(rank, int)) if isinstance(ranks, list) else ()
    )
    return Group(
        value["name"],
        members,
        desc=str(value.get("desc") or ""),
        backend=value.get("backend"),
        mesh_dim=value.get("mesh_dim"),
    )


class Signatures:
    """Reads what the entries of tables say of collectives.

    In a large job most of them differ in the group and the peer alone, and there are tens of
    thousands: what is left of a text without these two is parsed once.
    """

    # As the recorder writes them; a text of any other form is parsed as it is.
    _FORM = re.compile(
        r'(\{"op": "(\w+)", .*"group": ")([^"\\]*)(", "dtype": .*"peer": )(null|\d+)(, .*\})'
    )

    def __init__(self) -> None:
        self._forms: dict[tuple[str, ...], tuple[str, str] | None] = {}

    def read(self, text: str) -> tuple[Signature | None, str]:
        """The signature, and the name of its group: what group that is, its rank knows."""
        match = self._FORM.fullmatch(text)
        if match is None:
            fields = parsed(text)
            return _signature(text, fields) if isinstance(fields, dict) else (None, "")
        head, op, group, middle, peer, tail = match.groups()
        key = (head, middle, tail, "" if op in P2P else peer)
        if key not in self._forms:
            found = (
                _signature(text, fields)[0] if isinstance(fields := parsed(text), dict) else None
            )
            self._forms[key] = found.signature_id if found is not None else None
        signature_id = self._forms[key]
        return (
            (Signature(text, -1, signature_id, op, -1 if peer == "null" else int(peer)), group)
            if signature_id is not None
            else (None, "")
        )


def must_agree(op: str) -> tuple[str, ...]:
    """The fields of a collective that are the same on all its ranks."""
    return _MUST_AGREE.get(op, _MUST_AGREE_ELSE)


def _signature(text: str, fields: dict[str, Any]) -> tuple[Signature, str]:
    op, peer = str(fields.get("op")), fields.get("peer")
    agreed = {name: fields.get(name) for name in must_agree(op)}
    signature_id = "p2p" if op in P2P else op, json.dumps(agreed, sort_keys=True)
    return Signature(text, -1, signature_id, op, peer if isinstance(peer, int) else -1), str(
        fields.get("group")
    )


def parsed(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except (ValueError, RecursionError):
        return None
