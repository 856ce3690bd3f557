"""Follows a training loop that uses an `Accelerator`: the first step, checkpoints, metadata.

The user owns the loop, so there is no callback. torchwhere counts the steps of the prepared
optimizers by itself, and gradient accumulation does not count. It cannot know at which step a
resumed run begins, and how long a checkpoint takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import accelerate
from accelerate import Accelerator

from torchwhere.api.annotate import note
from torchwhere.api.watch import current
from torchwhere.integrations.framework_phases import wrap_method

# Methods of an accelerator that take long, and the phase that they are in.
_PHASES = {"save_state": "save", "save_model": "save", "load_state": "load"}


@contextmanager
def follow_accelerator(accelerator: Accelerator, *, first_step: int = 0) -> Iterator[None]:
    """Record the checkpoints and the settings of an `Accelerator` during a block.

    While the block runs, `save_state`, `save_model` and `load_state` of the accelerator are in the
    phases `save` and `load`. A note at its start has the main settings. After it, the accelerator
    is as before. Does nothing without a watch.

    Args:
        accelerator: The accelerator of the loop.
        first_step: The number of optimizer steps before this block, for a run that resumes from a
            checkpoint. Steps are counted from there.

    Raises:
        ValueError: `first_step` is not an integer of 0 or more.

    Example:
        with torchwhere.watch(out="run/"), follow_accelerator(accelerator, first_step=1000):
            for batch in loader:
                ...
            accelerator.save_state("checkpoint")
    """
    if not isinstance(first_step, int) or first_step < 0:
        raise ValueError(
            f"follow_accelerator(first_step={first_step!r}): expected a number of steps, 0 or more"
        )
    session = current()
    if session is None:
        yield
        return
    if first_step != session.recorder.step:
        with session.errors:
            session.next_step(first_step)
    note(
        "training begins",
        framework=f"accelerate {accelerate.__version__}",
        distributed_type=str(accelerator.distributed_type),
        num_processes=accelerator.num_processes,
        mixed_precision=accelerator.mixed_precision,
        gradient_accumulation_steps=accelerator.gradient_accumulation_steps,
    )
    with ExitStack() as stack:
        for method, name in _PHASES.items():
            stack.callback(wrap_method(accelerator, method, name))
        yield
