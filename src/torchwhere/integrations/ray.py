"""Watches the workers of Ray Train: each worker is a separate process, which Ray starts.

Ray Train calls no callback in a worker, so the training function is wrapped. Ray counts no steps:
the steps are those of the optimizers.

With `TORCHWHERE_OUT` nothing wraps the training function. Ray kills its workers after the job, so
no exit handler ends their watches: `end_watch_with_training` lets them end with that function.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import ray
import ray.train

from torchwhere.api.annotate import note
from torchwhere.api.watch import quietly, record_exception, stop_all, watch
from torchwhere.core.errors import failure
from torchwhere.integrations.framework_phases import wrap_method


def watch_train_loop(
    train_loop: Callable[..., Any], *, out: str | os.PathLike[str]
) -> Callable[..., Any]:
    """Return a training function for Ray Train that watches the worker in which it runs.

    `ray.train.report` is in the phase `report`: it saves the checkpoint, and waits for the other
    workers. A note at the start has the name of the experiment and the place of the worker.

    Args:
        train_loop: The function that each worker runs, with or without a `config`.
        out: The folder of the run. If the workers are on several hosts, they must share it.

    Returns:
        The function to pass to the trainer in place of `train_loop`.

    Example:
        trainer = TorchTrainer(
            watch_train_loop(train_loop, out="/shared/run"),
            scaling_config=ScalingConfig(num_workers=2),
        )
    """
    folder = os.path.abspath(out)  # a worker has another working folder

    @functools.wraps(train_loop)  # Ray looks at the arguments of the function
    def watched(*args: Any) -> Any:
        with watch(out=folder):
            context = ray.train.get_context()
            note(
                "training begins",
                framework=f"ray {ray.__version__}",
                experiment=context.get_experiment_name(),
                num_workers=context.get_world_size(),
                node_rank=context.get_node_rank(),
            )
            restore = wrap_method(ray.train, "report", "report")
            try:
                return train_loop(*args)
            finally:
                restore()

    return watched


def end_watch_with_training() -> None:
    """End the watch of this worker when the training function of Ray Train ends.

    A wrapper of the function would be a frame in each traceback of the user, from which Ray removes
    a fixed number of frames. So this looks at the queue into which Ray puts the outcome. In a Ray
    without that queue the watch ends with the process, without an exit record.
    """
    try:
        from ray.train.v2._internal.execution.worker_group.thread_runner import ThreadRunner
    except ImportError:
        return
    original = ThreadRunner.run

    @functools.wraps(original)
    def run(runner: Any, *args: Any, **kwargs: Any) -> Any:
        ThreadRunner.run = original
        if hasattr(runner, "_exc_queue"):
            runner._exc_queue = _Outcomes(runner._exc_queue)
        return original(runner, *args, **kwargs)

    ThreadRunner.run = run


class _Outcomes:
    """The queue that gets None when the training function has returned, else its exception."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, outcome: BaseException | None) -> None:
        quietly(_end_watch, outcome)
        self._queue.put(outcome)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def _end_watch(outcome: BaseException | None) -> None:
    if outcome is None:
        stop_all("exit 0")
        return
    error = getattr(outcome, "_base_exc", outcome)  # Ray wraps an exception of the user
    record_exception(error)
    stop_all(failure(error))
