"""Phrases on places, calls and exceptions that all sentences of a verdict share."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Sized
from dataclasses import replace

from torchwhere.core.events import Event
from torchwhere.core.place import Certainty, Place, shown
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.doctor.context import Condition, Context, Detail, StoppedHeartbeat
from torchwhere.diagnose.doctor.exit_records import ExitReason
from torchwhere.diagnose.doctor.finding import CallRef
from torchwhere.diagnose.doctor.stacks import Activity, Hold
from torchwhere.diagnose.doctor.waits import Wait


def all_ranks_text(count: int, *, single: str, several: str) -> str:
    """All ranks of a job and their verb: `All 4 ranks have`, `The only rank has`."""
    return f"The only rank {single}" if count == 1 else f"All {count} ranks {several}"


def agree(subjects: Sized, single: str, several: str) -> str:
    """The form of a word for one subject, or for several: `is` or `are`."""
    return single if len(subjects) == 1 else several


def subject_text(ranks: Collection[int]) -> str:
    """Ranks at the beginning of a sentence: `Rank 2`, `Ranks 0-3, 7`."""
    return ranks_phrase(ranks).capitalize()


def common_place_text(
    context: Context,
    ranks: Iterable[int],
    *,
    noun: str,
    call: tuple[StreamKey, int] | None = None,
) -> str:
    """The place of ranks, or where they issued a call; if there are several, how many: `in 3
    places`."""
    at = {rank: context.by_rank[rank].place_of(*call) if call else None for rank in ranks}
    places = {in_place(place or context.place(rank)) for rank, place in at.items()}
    return places.pop() if len(places) == 1 else f"in {len(places)} {noun}"


def more_text(subjects: Sized, most: int) -> list[str]:
    """Say how many follow after the first `most`, if there are more."""
    return [f"  and {len(subjects) - most} more"] if len(subjects) > most else []


_UNKNOWN_PLACE = "an unknown place"


def after_comma(place: str) -> str:
    """A place at the end of a clause: `, in forward of layers.0`; empty if it is unknown."""
    return f", {place}" if place.removeprefix("at ") != _UNKNOWN_PLACE else ""


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
        parts.append(place.full_line)
    if place.step is not None:
        parts.append(f"step {place.step}")
    return ", ".join(parts) or _UNKNOWN_PLACE


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
    return f"{op_text(call)}{after_comma(place_text(place))}"


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


def numbered_call_text(context: Context, call: CallRef | Wait) -> str:
    """`all_reduce of float32 [4, 8], #5 of group "default"`."""
    return f'{op_text(context.issued(call))}, #{call.number} of group "{context.title(call.key)}"'


def records_text(context: Context) -> str:
    """What the verdict was read from."""
    return "dumps" if context.run.is_of_dumps else "boxes"


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


# -- how a rank exited, or what blocks it ----------------------------------------------------------


NO_EXIT_RECORD = (
    "left no exit record: killed by a signal (perhaps the OOM killer), os._exit(), or a native"
    " crash"
)
_WATCHDOG = re.compile(
    r"^Aborted in a native thread: \[PG ID [^]]*\] Process group watchdog thread terminated with"
    r" exception: (?:\[Rank \d+\] )?"
)
_CONDITIONS = {
    Condition.OUTLIVED_WATCH: (
        "its watch has ended, but its process still runs: what it does now is not recorded"
    ),
    Condition.STOPPED_BY_SIGNAL: (
        "stopped by a signal (SIGSTOP or a debugger): continue it with kill -CONT"
    ),
}
_ACTIVITIES = {
    Activity.HOLDING_GIL: (
        "blocked in native code that holds the GIL: none of its Python threads can run"
    ),
    Activity.DATA_LOADING: "in data loading",
    Activity.IMPORT: "importing a module",
    Activity.SAVING: "saving a checkpoint",
    Activity.LOADING_CHECKPOINT: "loading a checkpoint",
    Activity.COMPILATION: "in compilation",
    Activity.EVALUATION: "evaluating the model",
    Activity.BUILD: "building a C++ extension",
    Activity.BUILD_LOCK: (
        "waiting for another process to build a C++ extension, or for a stale `lock` file that a"
        " killed process left beside it"
    ),
    Activity.FILE_LOCK: "waiting for a file lock",
    Activity.PROCESS: "waiting for another process",
    Activity.POOL: "waiting for a thread or process pool",
    Activity.SUBPROCESS: "waiting for a subprocess",
    Activity.QUEUE: "waiting for a queue",
    Activity.THREAD: "waiting for a lock or a thread",
    Activity.SOCKET: "waiting for a socket",
    Activity.GROUP_CREATION: "in {function}, which needs all ranks of the group",
    Activity.GROUP_END: "in {function}, which waits for pending collectives of this rank",
    Activity.COLLECTIVE: "waiting in {function}",
    Activity.DEVICE: "waiting in {function} for its device",
    Activity.DISTRIBUTED: "in torch.distributed, outside any recorded collective",
    Activity.RUNNING: (
        "running: an endless loop, a long computation, or native code that holds the GIL"
    ),
    Activity.SLEEPING: "sleeping: in a blocking call, or waiting for a lock",
}


def detail_text(detail: Detail) -> str:
    """How a rank exited, or what blocks it."""
    if isinstance(detail, Condition):
        return _CONDITIONS[detail]
    if isinstance(detail, ExitReason):
        return exit_text(detail)
    if isinstance(detail, StoppedHeartbeat):
        return (
            f"its heartbeat stopped {detail.earlier_s:.0f} s before the others': in native code"
            " that holds the GIL, stopped by a signal, or gone"
        )
    return hold_text(detail)


def hold_text(hold: Hold) -> str:
    """What blocks a rank."""
    return _ACTIVITIES[hold.activity].format(function=hold.function)


def exit_text(reason: ExitReason) -> str:
    """How a rank exited."""
    if reason.recorded is not None:
        recorded = _WATCHDOG.sub("aborted by the watchdog of NCCL: ", reason.recorded)
        return f"out of memory: {recorded}" if reason.is_out_of_memory else recorded
    code = reason.exit_code
    if code is None:
        return NO_EXIT_RECORD
    if code >= 0:
        return f"exit code {code} without an exit record: os._exit(), or an exit in native code"
    names = {int(number): number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


def rank_detail_text(context: Context, rank: int) -> str:
    """How a rank exited, or what blocks it; else its state."""
    detail = context.detail(rank)
    return detail_text(detail) if detail is not None else str(context.state(rank))
