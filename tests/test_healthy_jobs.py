"""Healthy jobs of several kinds beside a monitor with default settings: no verdict.

`TORCHWHERE_HEALTHY_S=600` runs each of them for ten minutes.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from job_scripts import LIGHTNING
from test_own_processes import free_port, run_python
from test_pauses import SLOW_FILE

pytestmark = pytest.mark.exhaustive
BIN = Path(sys.executable).parent
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

VALIDATED = f"""{LIGHTNING}
import sys, time
import torchwhere

class Paced(Lit):
    def training_step(self, batch, index):
        time.sleep(0.05)
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        self.log("loss", self.training_step(batch, index), sync_dist=True)

with torchwhere.watch(out="run"):
    epochs = max(2, int(float(sys.argv[1]) / 2))
    trainer(epochs=epochs, saves=True).fit(Paced(), loader(rows=80), loader(rows=80))
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

# A tensor-parallel pair, a compiled model that is compiled again for each new length, and workers
# that load data.
COMPILED = f"""{COMMON}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(64)

dist.init_process_group("gloo")
layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
parallelize_module(
    layers, init_device_mesh("cpu", (2,)), {{"0": ColwiseParallel(), "2": RowwiseParallel()}}
)
torch._dynamo.config.recompile_limit = 1000
model = torch.compile(layers, dynamic=False)
optimizer = torch.optim.SGD(layers.parameters(), 0.1)
loader = torch.utils.data.DataLoader(Rows(), 4, num_workers=2)
length = 1
while goes_on():
    length += 1
    for batch in loader:
        model(batch.repeat(length, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print("done")
dist.destroy_process_group()
"""

ACCELERATE = f"""{COMMON}
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
rows = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
while goes_on():
    for batch in rows:
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
    accelerator.save_state("state")
print("done")
accelerator.end_training()
"""

ZERO = f"""{COMMON}
import deepspeed

config = {{
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {{"type": "Adam", "params": {{"lr": 1e-3, "torch_adam": True}}}},
    "zero_optimization": {{"stage": 3, "stage3_param_persistence_threshold": 0}},
}}
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
while goes_on():
    for step in range(40):
        engine.backward(engine(torch.ones(4, 32)).sum())
        engine.step()
        time.sleep(0.05)
    engine.save_checkpoint("checkpoint")
print("done")
dist.destroy_process_group()
"""


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(library) is None, reason=f"needs {library}")


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
ACCELERATE_LAUNCH = (BIN / "accelerate", "launch", "--multi_gpu", "--num_processes", 2)
DEEPSPEED = (BIN / "deepspeed", "--num_accelerators", 2, "--no_local_rank")


@pytest.mark.parametrize(
    ("script", "launcher", "done_count"),
    [
        pytest.param(DDP, TORCHRUN, 2, id="ddp"),
        pytest.param(FSDP2, TORCHRUN, 2, id="fsdp2"),
        pytest.param(COMPILED, TORCHRUN, 2, id="compiled"),
        pytest.param(TRAINER, TORCHRUN, 2, id="trainer", marks=needs("transformers")),
        pytest.param(ACCELERATE, ACCELERATE_LAUNCH, 2, id="accelerate", marks=needs("accelerate")),
        pytest.param(ZERO, DEEPSPEED, 2, id="deepspeed", marks=needs("deepspeed")),
        pytest.param(VALIDATED, (), 2, id="lightning", marks=needs("lightning")),
        pytest.param(SPAWN, (), 1, id="spawn"),
    ],
)
def test_no_alarm(
    tmp_path: Path, script: str, launcher: tuple[object, ...], done_count: int
) -> None:
    """The monitor of a healthy job gives no verdict, also if a save takes longer than `--stall`."""
    (tmp_path / "train.py").write_text(script)
    # jobs of other tests may use the default port at the same time
    if launcher == DEEPSPEED:
        launcher += ("--master_port", free_port())
    if launcher == ACCELERATE_LAUNCH:
        launcher += ("--main_process_port", free_port())
    command = ["-m", "torchwhere", "run", "--out", "run", *launcher, "train.py"]
    done = run_python(
        *command,
        SECONDS,
        free_port(),
        folder=tmp_path,
        timeout=400 + 2 * SECONDS,
    )
    assert (done.returncode, done.stdout.count("done")) == (0, done_count), done.stderr
    assert "HANG" not in done.stderr
    assert [*(tmp_path / "run").glob("verdict*")] == []
    assert [*(tmp_path / "run").glob("monitor-*.json")] != []  # a monitor was there
