"""Phrases on places, calls and exceptions that all sentences of a verdict share."""

from __future__ import annotations

from dataclasses import replace

from torchwhere.core.events import Event
from torchwhere.core.place import Certainty, Place, shown
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.doctor.waits import Wait


def place_text(place: Place) -> str:
    """A place without its rank: `forward of layers.0, train.py:7, step 15`."""
    parts = []
    if place.module is not None:
        parts.append(f"{place.pass_} of {shown(place.module)}")
    elif place.pass_ != "outside":
        parts.append(place.pass_)
    elif place.certainty is not Certainty.UNKNOWN:
        parts.append("outside any module")
    if place.line:
        parts.append(place.line)
    if place.step is not None:
        parts.append(f"step {place.step}")
    return ", ".join(parts) or "an unknown place"


def in_place(place: Place) -> str:
    """A place after a verb: `in forward of layers.0, ...`, `outside any module, ...`."""
    text = place_text(place)
    if place.module is None and place.pass_ == "outside" and place.certainty is Certainty.UNKNOWN:
        return f"at {text}"
    return text if text.startswith("outside") else f"in {text}"


def call_text(call: Event) -> str:
    """`all_reduce of float32 [4, 8], backward of layers.0, train.py:9, step 3`."""
    place = call.place
    if call.fields.get("replayed") and place.line:
        place = replace(place, line=f"captured at {place.line}")
    return f"{op_text(call)}, {place_text(place)}"


def op_text(call: Event | None) -> str:
    """`all_reduce of float32 [4, 8]`."""
    if call is None:
        return "a collective"
    op, peer = call.fields.get("op"), call.fields.get("peer")
    text = f"{op}{tensors_text(call)}"
    if peer is not None:
        text += f" with {'peer' if op in ('send', 'recv') else 'root'} {peer}"
    return f"{text} in a CUDA graph" if call.fields.get("replayed") else text


def tensors_text(call: Event | None) -> str:
    """` of float32 [4, 8]`; empty if the shapes are unknown."""
    shapes = (call.fields.get("shapes") or []) if call is not None else []
    if call is None or not shapes:
        return ""
    return f" of {call.fields.get('dtype')} {shapes[0] if len(shapes) == 1 else shapes}"


def step_text(call: Event) -> str:
    return f" (step {call.place.step})" if call.place.step is not None else ""


def issued_call(job_calls: JobCalls, wait: Wait) -> Event | None:
    """The call that a rank waits in."""
    return job_calls.by_rank[wait.rank].issued(wait.key, wait.number)


def survived_text(error: Event | None) -> list[str]:
    """An exception that a rank survived."""
    if error is None:
        return []
    text = first_line(str(error.fields.get("text")))
    return [
        (
            f"Rank {error.place.rank} raised an exception earlier and continued: {text}"
            f" ({place_text(error.place)})."
        )
    ]


def first_line(text: str) -> str:
    return text.partition("\n")[0][:300]
