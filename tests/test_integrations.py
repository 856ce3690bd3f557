"""The callbacks for training frameworks, each with the real framework; and the programs of the recipes
that use them."""

from __future__ import annotations

import json
import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchwhere
from rank_pool import Pool
from test_monitor import launch_ranks
from test_startup import HOOK
from torchwhere.core.events import Event
from torchwhere.pipeline.verdict import diagnose_folder
from warm_python import WarmPython

RECIPES = Path(__file__).parent.parent / "docs" / "recipes"
pytestmark = pytest.mark.checks_itself


def program(page: str) -> str:
    """The program of a recipe."""
    (text,) = re.findall(r"```python\n(.*?)```", (RECIPES / page).read_text(), re.DOTALL)
    return str(text)


@contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """Run in a folder, without warnings of the frameworks."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.chdir(folder)
        yield


@contextmanager
def launched() -> Iterator[None]:
    """Set what `accelerate launch --cpu` sets, if this process is a rank."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.is_initialized():
            patch.setenv("ACCELERATE_USE_CPU", "true")
            patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
            for name in ("RANK", "LOCAL_RANK"):
                patch.setenv(name, str(dist.get_rank()))
        yield


def events(folder: Path, *, rank: int = 0, kinds: set[str]) -> list[Event]:
    return list(torchwhere.read_run(folder).boxes[rank].events(kinds=kinds))


def notes(folder: Path, text: str, *, rank: int = 0) -> list[dict[str, Any]]:
    """The fields of the notes with this text."""
    fields = [event.fields for event in events(folder, rank=rank, kinds={"note"})]
    return [
        {key: value for key, value in note.items() if key != "text"}
        for note in fields
        if note["text"] == text
    ]


def phases(folder: Path, *, rank: int = 0) -> list[tuple[str, int | None]]:
    """Each phase that has begun, with its step."""
    begins = events(folder, rank=rank, kinds={"phase_begin"})
    ends = events(folder, rank=rank, kinds={"phase_end"})
    assert [event.fields["phase"] for event in begins] == [event.fields["phase"] for event in ends]
    return [(event.fields["phase"], event.place.step) for event in begins]


def steps(folder: Path, *, rank: int = 0) -> list[int | None]:
    return [event.place.step for event in events(folder, rank=rank, kinds={"step_begin"})]


def framework_files(folder: Path, *, rank: int = 0) -> set[str]:
    """The files of frameworks in which the collectives of a rank were called."""
    lines = [
        event.place.framework_line for event in events(folder, rank=rank, kinds={"collective"})
    ]
    return {line.partition(":")[0] for line in lines if line is not None}


# -- transformers ----------------------------------------------------------------------------------


def run_program(page: str, folder: Path) -> None:
    """Run the program of a recipe as `torchwhere run` does, in this process."""
    script = folder / "train.py"
    if not dist.is_initialized() or dist.get_rank() == 0:
        script.write_text(program(page))
    if dist.is_initialized():
        dist.barrier()
    with in_folder(folder), launched():
        if "torchwhere.watch(" in program(page):
            runpy.run_path(str(script), run_name="__main__")
        else:
            with torchwhere.watch(out="run/"):
                runpy.run_path(str(script), run_name="__main__")


def test_transformers_recipe(two_ranks: Pool, tmp_path: Path) -> None:
    """The Trainer of the recipe, on two ranks: its global step is the step, and train, evaluate and
    save are phases, in this order."""
    two_ranks.run(run_program, "transformers.md", tmp_path, checks_itself=True)
    run = tmp_path / "run"
    for rank in (0, 1):
        train = [("train", step) for step in range(6)]
        after_3, after_6 = [("evaluate", 3), ("save", 3)], [("evaluate", 6), ("save", 6)]
        assert phases(run, rank=rank) == [*train[:3], *after_3, *train[3:], *after_6]
        assert steps(run, rank=rank) == [0, 1, 2, 3, 4, 5, 6]
        (begin,) = notes(run, "training begins", rank=rank)
        assert (begin["model"], begin["max_steps"]) == ("GPT2LMHeadModel", 6)
        assert begin["framework"].startswith("transformers 5.")
        assert notes(run, "epoch begins", rank=rank) == [{"epoch": 0}]
        assert "accelerate/accelerator.py" in framework_files(run, rank=rank)
    lines = {event.place.line for event in events(run, kinds={"optimizer"})}
    assert lines == {
        f"train.py:{1 + program('transformers.md').splitlines().index('trainer.train()')}"
    }


def gpt2_trainer(folder: Path, **options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from torchwhere.integrations.transformers import TransformersCallback

    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    row = torch.arange(8)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row}] * 2,
        eval_dataset=[{"input_ids": row, "labels": row}],
        callbacks=[TransformersCallback()],
    )


def test_transformers_resumes(tmp_path: Path) -> None:
    """After a checkpoint is loaded, the step is the global step of the Trainer. An evaluation of the
    program itself is a phase too."""
    with in_folder(tmp_path):
        gpt2_trainer(tmp_path, max_steps=3, save_steps=3).train()
        resumed = gpt2_trainer(tmp_path, num_train_epochs=3, save_strategy="no")
        with torchwhere.watch(out=tmp_path / "run"):
            resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
            resumed.evaluate()
    assert steps(tmp_path / "run") == [0, 3, 4, 5, 6]
    assert phases(tmp_path / "run") == [("train", 3), ("train", 4), ("train", 5), ("evaluate", 6)]
    assert notes(tmp_path / "run", "epoch begins") == [{"epoch": 1}, {"epoch": 2}]


def test_callback_without_a_watch(tmp_path: Path) -> None:
    """Without a watch the callback does nothing, and training is bit-identical to training without
    it."""
    from torchwhere.integrations.transformers import TransformersCallback

    trained = []
    with in_folder(tmp_path):
        for has_callback in (True, False):
            torch.manual_seed(0)
            trainer = gpt2_trainer(tmp_path, max_steps=2, save_strategy="no")
            if not has_callback:
                trainer.remove_callback(TransformersCallback)
            trainer.train()
            trained.append([param.detach().clone() for param in trainer.model.parameters()])
    assert all(torch.equal(*params) for params in zip(*trained, strict=True))


# -- Lightning -------------------------------------------------------------------------------------


def test_lightning_recipe(tmp_path: Path) -> None:
    """The Trainer of the recipe: its global step is the step, and train, evaluate and save are
    phases."""
    run_program("lightning.md", tmp_path)
    run = tmp_path / "run"
    epochs = [[("train", 4 * epoch + step) for step in range(4)] for epoch in range(2)]
    names = [name for name, _ in phases(run)]
    assert [phase for phase in phases(run) if phase[0] == "train"] == [*epochs[0], *epochs[1]]
    assert {("evaluate", 0), ("evaluate", 4), ("evaluate", 8), ("save", 4)} <= set(phases(run))
    assert set(names) == {"train", "evaluate", "save"}
    assert steps(run) == list(range(9))
    assert notes(run, "epoch begins") == [{"epoch": 0}, {"epoch": 1}]
    (begin,) = notes(run, "training begins")
    assert (begin["model"], begin["max_epochs"]) == ("Regression", 2)


def test_lightning_ends(tmp_path: Path) -> None:
    """After an error, no phase is open, and the Trainer has its own `save_checkpoint` again."""
    import lightning
    from lightning.pytorch.demos.boring_classes import BoringModel

    from torchwhere.integrations.lightning import LightningCallback

    class Failing(BoringModel):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("planted")

    with in_folder(tmp_path):
        trainer = lightning.Trainer(
            max_steps=2,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            devices=1,
            callbacks=[LightningCallback()],
        )
        with torchwhere.watch(out=tmp_path / "run"):
            with pytest.raises(ValueError, match="planted"):
                trainer.fit(Failing())
            assert "save_checkpoint" not in vars(trainer)
    assert phases(tmp_path / "run")[-1] == ("train", 0)


# -- accelerate ------------------------------------------------------------------------------------


def test_accelerate_recipe(two_ranks: Pool, tmp_path: Path) -> None:
    """The loop of the recipe, on two ranks: steps are counted from the first one, once for each
    optimizer step, and a checkpoint is a phase."""
    two_ranks.run(run_program, "accelerate-loop.md", tmp_path, checks_itself=True)
    for rank in (0, 1):
        run = tmp_path / "run"
        assert steps(run, rank=rank) == [0, 1000, 1001, 1002, 1003, 1004]
        assert phases(run, rank=rank) == [("save", 1004)]
        (begin,) = notes(run, "training begins", rank=rank)
        assert (begin["num_processes"], begin["gradient_accumulation_steps"]) == (2, 2)
        assert "accelerate/accelerator.py" in framework_files(run, rank=rank)


def test_accelerator_is_restored(tmp_path: Path) -> None:
    """After the block, the accelerator has its own methods again, also after an error."""
    from accelerate import Accelerator

    from torchwhere.integrations.accelerate import follow_accelerator

    accelerator = Accelerator(cpu=True)
    before = set(vars(accelerator))

    def fails() -> None:
        assert "save_state" in vars(accelerator)
        raise ValueError("planted")

    with torchwhere.watch():
        with pytest.raises(ValueError, match="planted"), follow_accelerator(accelerator):
            fails()
        assert set(vars(accelerator)) == before
    with pytest.raises(ValueError, match="expected a number of steps, 0 or more"):
        follow_accelerator(accelerator, first_step=-1).__enter__()


# -- Ray Train -------------------------------------------------------------------------------------


@contextmanager
def ray_cluster(**variables: str) -> Iterator[None]:
    """Ray on this host, with these environment variables in its workers."""
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'ray[train]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})
        except Exception as error:
            ray.shutdown()
            pytest.skip(f"Ray does not start here: {error}")
        try:
            yield
        finally:
            ray.shutdown()


def test_ray_recipe(tmp_path: Path) -> None:
    """The job of the recipe, with two workers of Ray Train, leaves a box for each worker, with its
    steps and its report."""
    with ray_cluster(PYTHONPATH=":".join(filter(None, sys.path))), in_folder(tmp_path):
        Path("train.py").write_text(program("ray-train.md"))
        runpy.run_path("train.py", run_name="__main__")
    for rank in (0, 1):
        assert steps(tmp_path / "run", rank=rank) == [0, 1, 2, 3]
        assert phases(tmp_path / "run", rank=rank) == [("report", 3)]
        (begin,) = notes(tmp_path / "run", "training begins", rank=rank)
        assert (begin["num_workers"], begin["node_rank"]) == (2, 0)


FAILS = """
    if ray.train.get_context().get_world_rank() == 1:
        raise ValueError("bad batch")
    ray.train.report"""


def test_ray_workers_by_the_variable(tmp_path: Path) -> None:
    """The job of the recipe, unchanged and with TORCHWHERE_OUT in the runtime environment, leaves a
    box for each worker: the job is healthy after Ray has killed its workers. If the training
    function of a worker raises, the doctor names the worker and the exception."""
    path = ":".join([str(HOOK), *filter(None, sys.path)])
    watched = "from torchwhere.integrations.ray import watch_train_loop\n"
    unwatched = program("ray-train.md").replace(watched, "")
    unwatched = unwatched.replace('watch_train_loop(train_loop, out="run/")', "train_loop")
    assert "torchwhere" not in unwatched
    out = str(tmp_path / "run")
    with ray_cluster(PYTHONPATH=path, TORCHWHERE_OUT=out), in_folder(tmp_path):
        Path("train.py").write_text(unwatched)
        runpy.run_path("train.py", run_name="__main__")
        verdict = diagnose_folder(tmp_path / "run")
        assert (verdict.kind, sorted(verdict.ranks)) == ("healthy", [0, 1]), str(verdict)
        for rank in (0, 1):
            assert steps(tmp_path / "run", rank=rank) == [0, 1, 2, 3]
        Path("train.py").write_text(unwatched.replace("\n    ray.train.report", FAILS))
        with pytest.raises(Exception, match="Training failed"):
            runpy.run_path("train.py", run_name="__main__")
    verdict = diagnose_folder(tmp_path / "run")
    # Rank 0 waits in `report` for an actor that Ray kills: it may fail too, with ActorDiedError.
    assert (verdict.kind, verdict.culprits) == ("dead", (1,)), str(verdict)
    assert "ValueError: bad batch" in str(verdict)


# -- a barrier on one rank -------------------------------------------------------------------------

BARRIER = """
import torch, torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

class Net(torch.nn.Linear):
    def forward(self, x):
        return {"loss": super().forward(x).sum()}

class Barrier(TrainerCallback):
    def EVENT(self, args, state, control, **others):
        if state.is_world_process_zero:
            dist.barrier()  # here

args = TrainingArguments(
    output_dir="out", max_steps=4, per_device_train_batch_size=1, report_to=[], use_cpu=True,
    save_strategy="no", disable_tqdm=True, average_tokens_across_devices=False,
)
rows = [{"x": torch.ones(8)}] * 8
Trainer(model=Net(8, 8), args=args, train_dataset=rows, callbacks=[Barrier()]).train()
"""


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end"])
def test_barrier_in_a_callback(warm: WarmPython, tmp_path: Path, event: str) -> None:
    """If only rank 0 calls a barrier in a callback of the Trainer, only rank 0 is blamed."""
    script = BARRIER.replace("EVENT", event)
    launch_ranks(warm, tmp_path, 1, "--stall", "4", "--end-with", "SIGKILL", script=script)
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert (verdict["kind"], verdict["culprits"]) == ("mismatch", [0])
    if event == "on_train_begin":
        assert "only rank 0 issued its call in your own code" in verdict["text"]
    line = 1 + script.splitlines().index("            dist.barrier()  # here")
    assert verdict["ranks"]["0"]["line"] == f"train.py:{line}"
