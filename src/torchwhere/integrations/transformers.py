"""A callback for the `Trainer` of Hugging Face transformers: steps, epochs, phases, metadata.

The Trainer has no callback at the start of an evaluation or a checkpoint. It decides about both at
the end of a step or an epoch, so the callback begins the phase there.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from torchwhere.api.annotate import note, step
from torchwhere.integrations.framework_phases import LoopPhases

_ARGUMENTS = (
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
    "seed",
)


class TransformersCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that records the steps, epochs and phases of a `transformers.Trainer`.

    The step in every view of torchwhere is then `state.global_step`, also after the Trainer has
    resumed from a checkpoint. The phases are `train`, `evaluate` and `save`. A note at the start of
    the training has the main arguments, and a note at the start of each epoch has its number.

    The callback does nothing without a watch. Start one with `torchwhere.watch` or with
    `torchwhere run`.

    Example:
        from torchwhere.integrations.transformers import TransformersCallback

        trainer = Trainer(model=model, args=args, callbacks=[TransformersCallback()])
        with torchwhere.watch(out="run/"):
            trainer.train()
    """

    def __init__(self) -> None:
        self._phases = LoopPhases()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Record the arguments, and take over the step."""
        step(state.global_step)
        note(
            "training begins",
            framework=f"transformers {transformers.__version__}",
            model=type(others.get("model")).__name__,
            **{name: getattr(args, name, None) for name in _ARGUMENTS},
        )

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Record the number of the epoch, from 0."""
        note("epoch begins", epoch=int(state.epoch or 0))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Begin the phase `train`."""
        self._phases.begin("train")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """End the phase `train`, and go to the next step."""
        self._phases.end()
        step(state.global_step)
        self._begin_due(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Begin what the Trainer does at the end of an epoch."""
        self._phases.end()
        self._begin_due(control)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Begin the phase `evaluate`, if a program has called `evaluate` or `predict` itself."""
        self._phases.begin("evaluate")

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """End the phase `evaluate`. A checkpoint may follow."""
        self._phases.end()
        self._begin_due(control)

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Any,
        **others: Any,
    ) -> None:
        """End the phase `evaluate`."""
        self._phases.end()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """End the phase `save`."""
        self._phases.end()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """End the phase that is still open, if any."""
        self._phases.end()

    def _begin_due(self, control: TrainerControl) -> None:
        """Begin the phase of what the Trainer is about to do: it evaluates before it saves."""
        if control.should_evaluate:
            self._phases.begin("evaluate")
        elif control.should_save:
            self._phases.begin("save")
