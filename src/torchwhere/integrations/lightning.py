"""A callback for the `Trainer` of Lightning: steps, epochs, phases, metadata.

Lightning has no callback at the end of a checkpoint, so the callback also wraps
`trainer.save_checkpoint` while the Trainer runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
from lightning.pytorch import Callback, LightningModule, Trainer

from torchwhere.api.annotate import note, step
from torchwhere.integrations.framework_phases import LoopPhases, wrap_method

_ARGUMENTS = ("max_steps", "max_epochs", "accumulate_grad_batches", "precision", "world_size")


class LightningCallback(Callback):  # type: ignore[misc]
    """A callback that records the steps, epochs and phases of a Lightning `Trainer`.

    The step in every view of torchwhere is then `trainer.global_step`, also after the Trainer has
    resumed from a checkpoint. The phases are `train`, `evaluate` (validation and test), `predict`
    and `save`. A note at the start of the training has the main arguments, and a note at the start
    of each epoch has its number.

    The callback does nothing without a watch. Start one with `torchwhere.watch` or with
    `torchwhere run`.

    Example:
        from torchwhere.integrations.lightning import LightningCallback

        trainer = lightning.Trainer(callbacks=[LightningCallback()])
        with torchwhere.watch(out="run/"):
            trainer.fit(model, data)
    """

    def __init__(self) -> None:
        self._phases = LoopPhases()
        self._restore: Callable[[], None] = lambda: None

    # -- steps and epochs --------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the arguments, and take over the step."""
        step(trainer.global_step)
        note(
            "training begins",
            framework=f"lightning {lightning.__version__}",
            model=type(pl_module).__name__,
            strategy=type(trainer.strategy).__name__,
            **{name: getattr(trainer, name, None) for name in _ARGUMENTS},
        )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the number of the epoch, from 0."""
        note("epoch begins", epoch=trainer.current_epoch)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin the phase `train`."""
        self._phases.begin("train")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the phase `train`, and go to the next step if an optimizer has stepped."""
        self._phases.end()
        step(trainer.global_step)

    # -- phases ------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the phase `evaluate`."""
        self._phases.begin("evaluate")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the phase `evaluate`."""
        self._phases.end()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the phase `evaluate`."""
        self._phases.begin("evaluate")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the phase `evaluate`."""
        self._phases.end()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the phase `predict`."""
        self._phases.begin("predict")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the phase `predict`."""
        self._phases.end()

    # -- checkpoints, and the end ------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wrap `trainer.save_checkpoint` in the phase `save`."""
        self._restore()
        self._restore = wrap_method(trainer, "save_checkpoint", "save")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the wrapper."""
        self._restore()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """End the open phase, and remove the wrapper."""
        self._phases.end()
        self._restore()
