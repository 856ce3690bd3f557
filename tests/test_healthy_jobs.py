"""Healthy jobs of several kinds beside a monitor with default settings: no verdict.

`TORCHWHERE_HEALTHY_S=600` runs each of them for ten minutes.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from test_own_processes import free_port, run_python
from test_pauses import SLOW_FILE

pytestmark = pytest.mark.exhaustive
SECONDS = float(os.environ.get("TORCHWHERE_HEALTHY_S", "20"))
SAVE_S = 35  # longer than the default of --stall

# `goes_on` is the same on all ranks.
COMMON = """
import os, sys, time
import torch, torch.distributed as dist

end = time.monotonic() + float(sys.argv[1])

def goes_on():
    flag = torch.tensor([time.monotonic() < end])
    dist.broadcast(flag, 0)
    return bool(flag)
"""

DDP = f"""{COMMON}{SLOW_FILE}
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while goes_on():
    for step in range(60):
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        time.sleep(0.05)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), SlowFile({SAVE_S}))
    dist.barrier()
print("done")
dist.destroy_process_group()
"""

FSDP2 = f"""{COMMON}
import torch.distributed.checkpoint as checkpoint
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while goes_on():
    for step in range(60):
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
    checkpoint.save({{"model": model.state_dict()}}, checkpoint_id="checkpoint")
print("done")
dist.destroy_process_group()
"""

TRAINER = """
import sys, time
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        tokens = torch.randint(50, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}

class Slower(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        time.sleep(0.1)

steps = int(5 * float(sys.argv[1]))
config = GPT2Config(
    vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2, loss_type="ForCausalLM"
)
arguments = TrainingArguments(
    output_dir="trainer", per_device_train_batch_size=4, max_steps=steps, report_to=[],
    use_cpu=True, disable_tqdm=True, eval_strategy="steps", eval_steps=25, save_steps=50,
    save_total_limit=1,
)
Trainer(
    model=GPT2LMHeadModel(config), args=arguments, train_dataset=Rows(64),
    eval_dataset=Rows(200), callbacks=[Slower()],
).train()
print("done")
"""

LIGHTNING = """
import sys, time
import lightning, torch, torchwhere

class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch, index):
        time.sleep(0.05)
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self, batch, index):
        time.sleep(0.05)
        self.log("loss", self.layer(batch[0]).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

rows = torch.utils.data.TensorDataset(torch.randn(80, 4))
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=max(2, int(float(sys.argv[1]) / 2)),
    logger=False, enable_progress_bar=False, enable_model_summary=False,
)
loaders = [torch.utils.data.DataLoader(rows, 2) for _ in range(2)]
with torchwhere.watch(out="run"):
    trainer.fit(Lit(), *loaders)
print("done")
"""

SPAWN = f"""{COMMON}
import torch.multiprocessing as mp
import torchwhere

def work(rank, port):
    address = f"tcp://localhost:{{port}}"
    with torchwhere.watch(out="run"):
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        while goes_on():
            dist.all_reduce(torch.ones(4))
            time.sleep(0.05)
        dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (int(sys.argv[2]),), nprocs=2)
    print("done")
"""

needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="no Lightning here")
needs_trainer = pytest.mark.skipif(find_spec("transformers") is None, reason="no transformers here")


@pytest.mark.parametrize(
    ("script", "is_torchrun", "done_count"),
    [
        pytest.param(DDP, True, 2, id="ddp"),
        pytest.param(FSDP2, True, 2, id="fsdp2"),
        pytest.param(TRAINER, True, 2, id="trainer", marks=needs_trainer),
        pytest.param(LIGHTNING, False, 2, id="lightning", marks=needs_lightning),
        pytest.param(SPAWN, False, 1, id="spawn"),
    ],
)
def test_no_alarm(tmp_path: Path, script: str, is_torchrun: bool, done_count: int) -> None:
    """The monitor of a healthy job gives no verdict, also if a save takes longer than `--stall`."""
    (tmp_path / "train.py").write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "torchwhere", "run", "--out", "run", "train.py", SECONDS, free_port()]
    done = run_python(
        *(torchrun if is_torchrun else []),
        *command,
        folder=tmp_path,
        timeout=400 + 2 * SECONDS,
    )
    assert (done.returncode, done.stdout.count("done")) == (0, done_count), done.stderr
    assert "HANG" not in done.stderr
    assert [*(tmp_path / "run").glob("verdict*")] == []
    assert [*(tmp_path / "run").glob("monitor-*.json")] != []  # a monitor was there
