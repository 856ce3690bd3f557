"""The frameworks people train with, each for real: DeepSpeed ZeRO, transformers' Trainer,
accelerate, Lightning."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import leaks
import torchwhere
from models import Model, batch
from rank_pool import Pool

pytestmark = pytest.mark.checks_itself
STEPS = 3


@contextlib.contextmanager
def watching(folder: Path) -> Iterator[None]:
    """Watch, and prove that the watch itself leaves nothing, whatever the framework does."""
    before = leaks.snapshot()
    with torchwhere.watch(out=folder):
        yield
    after = leaks.snapshot()
    for theirs in ("environment", "threads", "hooks of Python", "signal handlers", "import hooks"):
        before[theirs] = after[theirs] = None
    assert not any("torchwhere" in type(finder).__module__ for finder in sys.meta_path)
    assert leaks.differences(before, after) == []


def recorded(folder: Path) -> list[dict[str, Any]]:
    if dist.is_initialized():
        dist.barrier()
    rank = dist.get_rank() if dist.is_initialized() else 0
    return [event.to_dict() for event in torchwhere.read_run(folder).boxes[rank].events()]


# -- DeepSpeed -------------------------------------------------------------------------------------


def _deepspeed(folder: Path, stage: int) -> dict[str, Any]:
    import deepspeed

    torch.manual_seed(0)
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 100,
        },
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters()
    )
    seen = []
    model.layers[1].up.register_forward_hook(lambda *_: seen.append(torchwhere.where()))
    with watching(folder):
        for step in range(2 * STEPS):
            loss = engine(batch(seed=step)).pow(2).mean()
            engine.backward(loss)
            engine.step()
        step = torchwhere.where().step
    places = [(place.pass_, place.module, place.call, place.step) for place in seen]
    return {"events": recorded(folder), "places": places, "step": step}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_c21_deepspeed_zero(two_ranks: Pool, tmp_path: Path, stage: int) -> None:
    """ZeRO's gathers and reductions are recorded; names stay although the data is partitioned; one
    step per engine step."""
    names = {name for name, _ in Model().named_parameters()}
    for answer in two_ranks.run(_deepspeed, tmp_path, stage, checks_itself=True):
        assert answer["step"] == STEPS
        assert answer["places"] == [
            ("forward", "layers.1.up", call, step) for step in range(STEPS) for call in range(2)
        ]
        collectives = [event for event in answer["events"] if event["kind"] == "collective"]
        fast_path = {(event["pass"], event["op"]) for event in collectives}
        reduces_in = "outside" if stage == 1 else "backward"  # ZeRO-1 reduces once backward is over
        assert any(pass_ == reduces_in and "reduce" in op for pass_, op in fast_path), fast_path
        modules = {event["module"] for event in collectives if event["module"]}
        assert modules <= {"", "layers"} | {name.rpartition(".")[0] for name in names} | {
            "layers.0",
            "layers.1",
        }
        if stage == 3:
            gathers = [
                event
                for event in collectives
                if event["op"].startswith("all_gather") and event["pass"] == "forward"
            ]
            assert {name for event in gathers for name in event["for"] or ()} == names
        assert all(event["certainty"] == "exact" for event in collectives)


# -- transformers and accelerate -------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(50, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2, loss_type="ForCausalLM"
        )
    )


def test_transformers_trainer(tmp_path: Path) -> None:
    """A Trainer, watched from outside without the model: names as in the user's model, one step per
    optimizer step."""
    from transformers import Trainer, TrainingArguments

    model = _gpt2()
    seen = []
    model.transformer.h[1].mlp.c_fc.register_forward_hook(
        lambda *_: seen.append(torchwhere.where())
    )
    options = {
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "trainer"),
            disable_tqdm=True,
            logging_strategy="no",
            **options,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
        with watching(tmp_path / "run"):
            trainer.train()
            step = torchwhere.where().step
    assert step == STEPS
    assert [(place.module, place.step) for place in seen] == [
        ("transformer.h.1.mlp.c_fc", step) for step in range(STEPS)
    ]
    assert "test_frameworks.py:" in str(seen[0].line)


class SlowRows(Rows):
    """Each row takes 20 ms, so that a batch takes longer than a step of the small model."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.02)
        return super().__getitem__(index)


def test_parts_of_a_step_of_the_trainer(tmp_path: Path) -> None:
    """Under a Trainer a slow dataset is data time; saving and evaluating have their own columns; the
    parts of each step add up to it."""
    from transformers import Trainer, TrainingArguments

    steps = 6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "trainer"),
            disable_tqdm=True,
            logging_strategy="no",
            per_device_train_batch_size=4,
            max_steps=steps,
            report_to=[],
            use_cpu=True,
            save_strategy="steps",
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
        )
        trainer = Trainer(
            model=_gpt2(), args=arguments, train_dataset=SlowRows(), eval_dataset=Rows()
        )
        with watching(tmp_path / "run"):
            trainer.train()
    parts = torchwhere.phases(tmp_path / "run").parts
    assert parts is not None
    own = parts.by_rank[0]
    assert tuple(map(sum, zip(*own.parts_ns.values(), strict=True))) == own.step_ns
    # accelerate gets a batch before it is needed: four rows of 20 ms in most steps
    assert max(own.parts_ns["data"]) >= 4 * 20_000_000
    assert all(own.mean_ns(part) > 0 for part in ("forward", "backward", "optimizer"))
    # The Trainer saves and evaluates after the optimizer has stepped: in the next step.
    after_two = [number % 2 == 0 for number in own.steps]
    for part in ("checkpoint", "evaluation"):
        assert [took_ns > 0 for took_ns in own.parts_ns[part]] == after_two


def _accelerate(folder: Path) -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.DataLoader([batch()[0] for _ in range(16)], batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    with watching(folder):
        for rows in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(rows).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
        step = torchwhere.where().step
    return {"events": recorded(folder), "step": step}


def test_accelerate(two_ranks: Pool, tmp_path: Path) -> None:
    """accelerate over DDP with gradient accumulation: one step per real optimizer step, reductions
    for named parameters."""
    names = {name for name, _ in Model().named_parameters()}
    for answer in two_ranks.run(_accelerate, tmp_path, checks_itself=True):
        assert answer["step"] == 2
        reductions = [
            e for e in answer["events"] if e["kind"] == "collective" and e["pass"] == "backward"
        ]
        assert reductions
        for event in reductions:
            assert set(event["for"]) <= names
            assert event["param"] in event["for"]


# -- Lightning -------------------------------------------------------------------------------------


def test_lightning(tmp_path: Path) -> None:
    """A Lightning fit: its closure runs inside the optimizer, the places are those of forward and
    backward all the same."""
    import lightning

    seen = []

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
            return self.model(rows).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    lit = Lit()
    lit.model.head.register_forward_hook(lambda *_: seen.append(torchwhere.where()))
    lit.model.head.weight.register_post_accumulate_grad_hook(
        lambda _: seen.append(torchwhere.where())
    )
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet
    )
    data = torch.utils.data.DataLoader([batch()[0] for _ in range(8)], batch_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with watching(tmp_path / "run"):
            trainer.fit(lit, data)
            step = torchwhere.where().step
    assert step == STEPS
    assert [(place.pass_, place.module, place.step) for place in seen] == [
        (pass_, "model.head", step) for step in range(STEPS) for pass_ in ("forward", "backward")
    ]
