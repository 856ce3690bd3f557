"""Sentences on errors of devices, and on ranks that failed only because of another rank."""

from __future__ import annotations

from collections.abc import Sequence

from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.device_errors import DeviceError
from torchwhere.diagnose.doctor.exits import Reaction
from torchwhere.render.verdict_text.phrases import place_text

_CAUSES = {
    DeviceError.ASSERT: "an index or a label is out of range in a kernel",
    DeviceError.ADDRESS: "a kernel reads or writes outside of its tensors",
    DeviceError.MEMORY: "the memory of the GPU is faulty",
    DeviceError.LINK: "an NVLink of the GPU is faulty",
    DeviceError.OTHER: "a kernel, the driver or the GPU failed",
}
_OF_KERNEL = "the log of {rank} and a run with CUDA_LAUNCH_BLOCKING=1, which shows the line"
_OF_DEVICE = "nvidia-smi -q and the kernel log (Xid) on the host of {rank}"
_LOOK_AT = {
    DeviceError.ASSERT: _OF_KERNEL,
    DeviceError.ADDRESS: f"{_OF_KERNEL}; compute-sanitizer",
    DeviceError.MEMORY: _OF_DEVICE,
    DeviceError.LINK: f"nvidia-smi nvlink -e, {_OF_DEVICE}",
    DeviceError.OTHER: f"{_OF_DEVICE}, {_OF_KERNEL}",
}
_OF_CODE = frozenset({DeviceError.ASSERT, DeviceError.ADDRESS, DeviceError.OTHER})
_LATER = " The CPU may report the error after it has passed the failing line."
_REACTIONS = {
    Reaction.TIMED_OUT: "a collective timed out",
    Reaction.LOST_PEER: "the connection to another rank was lost",
    Reaction.RAISED_AGAIN: "an exception of another rank was raised again",
}


def device_errors_text(context: Context, ranks: Sequence[int]) -> list[str]:
    """What failed on the devices of ranks, where each device was, and what to look at."""
    lines = []
    for rank in ranks:
        rank_calls = context.job_calls.by_rank.get(rank)
        error = context.exits.device_error(rank) if rank_calls is not None else None
        if rank_calls is None or error is None:
            continue
        state = rank_calls.rank_summary.device
        if state is not None and state.place is not None:
            lines.append(f"  rank {rank}, device: last reached {place_text(state.place)}")
        late = _LATER if error in _OF_CODE else ""
        look_at = _LOOK_AT[error].format(rank=f"rank {rank}")
        lines.append(f"Likely cause: {_CAUSES[error]}.{late} Look at: {look_at}.")
    return lines


def reactions_text(context: Context, culprits: Sequence[int]) -> list[str]:
    """The ranks that failed only because of the culprits."""
    reactions = context.exits.reactions(besides=culprits)
    return [
        f"Because of it, {ranks_phrase(ranks)} failed: {_REACTIONS[reaction]}."
        for reaction, ranks in reactions.items()
        if reaction in _REACTIONS
    ]
