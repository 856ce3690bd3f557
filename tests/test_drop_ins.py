"""Each drop-in can replace its original: it has every name that torch or DeepSpeed needs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys

import pytest
from upstream.startup import SWAPPED

import used_names

# The original modules, and the drop-in for each.
DROP_INS = {**SWAPPED, "deepspeed.utils.debug": "torchwhere.drop_in.deepspeed_debug"}
EACH = pytest.mark.parametrize(
    "original",
    [
        pytest.param(name, marks=[pytest.mark.checks_itself] * name.startswith("deepspeed"))
        for name in DROP_INS
    ],
)
PACKAGES = ("torch", "deepspeed")


def installed(original: str) -> str:
    """Return the name of a module, or skip the test if its package is not installed."""
    if importlib.util.find_spec(original.partition(".")[0]) is None:
        pytest.skip(f"{original.partition('.')[0]} is not installed")
    return original


@EACH
def test_every_name_is_there(original: str) -> None:
    """Public names of the original, and names that an installed package imports from it, exist in
    the drop-in."""
    drop_in = importlib.import_module(DROP_INS[installed(original)])
    wanted = used_names.defined(original)
    assert wanted
    for package in PACKAGES:
        wanted |= used_names.used(package, original)
    assert {name for name in wanted if not hasattr(drop_in, name)} == set()


@EACH
def test_a_star_import_brings_every_public_name(original: str) -> None:
    """`from drop_in import *` gives the names that `from original import *` gives, except for names
    that the original only imports."""
    brought: dict[str, object] = {}
    exec(f"from {DROP_INS[installed(original)]} import *", brought)
    assert used_names.defined(original) - set(brought) == set()


@EACH
def test_every_member_is_there(original: str) -> None:
    """Classes have the public members of the original's, and the private ones that an installed
    package uses."""
    module = importlib.import_module(installed(original))
    drop_in = importlib.import_module(DROP_INS[original])
    used = set().union(*(used_names.members_used(package, original) for package in PACKAGES))
    missing = set()
    for name in used_names.defined(original):
        cls = getattr(module, name)
        if inspect.isclass(cls):
            members = used_names.members(original, name) - set().union(
                *(dir(base) for base in cls.__bases__)
            )
            wanted = {member for member in members if not member.startswith("_") or member in used}
            missing |= {
                f"{name}.{member}"
                for member in wanted
                if not hasattr(getattr(drop_in, name)(), member)
            }
    assert missing == set()


def test_what_torch_uses_is_found() -> None:
    """The scan finds names that torch imports relatively, absolutely and inside functions, and
    members it calls."""
    logging_utils, mod_tracker = (
        "torch._functorch._aot_autograd.logging_utils",
        "torch.distributed._tools.mod_tracker",
    )
    assert used_names.used("torch", logging_utils) >= {
        "callback_set",  # relative, in several lines
        "setup_stacktrace_preservation_hooks",
        "set_model_name",  # in a function of torch.compiler
    }
    assert "ModTracker" in used_names.used("torch", mod_tracker)
    assert used_names.members_used("torch", mod_tracker) >= {
        "_get_mod_name",
        "get_known_fqn",
        "parents",
    }
    assert used_names.defined("torch.utils.module_tracker") == {"ModuleTracker"}


# A whole process in which the drop-in is the original, from before torch first imports it.
PROGRAM = """
import importlib, sys
import torch
original, drop_in = sys.argv[1:]
swapped = sys.modules[original] = importlib.import_module(drop_in)
parent, _, name = original.rpartition(".")
setattr(importlib.import_module(parent), name, swapped)

import torch._functorch.aot_autograd
import torch.distributed as dist
import torch.distributed._tools
import torch.distributed.fsdp
import torch.distributed.tensor.debug
import torch.utils.flop_counter
from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from torch.utils._debug_mode import DebugMode

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
expected = model(torch.ones(2, 4))
compiled = torch.compile(model, backend="aot_eager")
loss = compiled(torch.ones(2, 4))
assert torch.equal(loss, expected)
loss.sum().backward()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = DeviceMesh("cpu", [0])
with torch.distributed.tensor.debug.CommDebugMode() as comm_mode:
    distribute_tensor(torch.ones(4), mesh, [Shard(0)]).sum()
    model(torch.ones(2, 4)).sum().backward()
comm_mode = torch.distributed.tensor.debug.CommDebugMode()
with comm_mode:
    model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(torch.ones(1))
assert comm_mode.get_total_counts() == 1
assert "Sequential.0" in comm_mode.generate_comm_debug_tracing_table(noise_level=0)

with torch.utils.flop_counter.FlopCounterMode(display=False) as flops:
    model(torch.ones(2, 4)).sum().backward()
assert flops.get_flop_counts()["Sequential.0"] == {torch.ops.aten.addmm: 64, torch.ops.aten.mm: 64}, flops.get_flop_counts()

debug = DebugMode(record_nn_module=True)
with debug:
    model(torch.ones(2, 4))
lines = [line.strip() for line in debug.debug_string().splitlines()]
assert [line for line in lines if line.startswith("[nn.Mod]")] == [
    "[nn.Mod] Sequential", "[nn.Mod] Sequential.0", "[nn.Mod] Sequential.1", "[nn.Mod] Sequential.2"
], lines

sharded = torch.distributed.fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4)))
sharded(torch.ones(2, 4)).sum().backward()
whole = torch.distributed.fsdp.FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
whole.state_dict()
dist.destroy_process_group()
assert sys.modules[original] is swapped
print("all of it ran")
"""


@pytest.mark.parametrize(
    "original",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] * (not name.endswith("_comm_mode")))
        for name in SWAPPED
    ],
)
def test_torch_runs_on_the_drop_in(original: str) -> None:
    """With a drop-in in place of its original, AOTAutograd, FSDP, DTensor and torch's other tools
    import and run."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, original, DROP_INS[original]],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert (done.returncode, done.stdout) == (0, "all of it ran\n"), done.stderr


DEEPSPEED_PROGRAM = """
import importlib, sys
import deepspeed
from torchwhere.drop_in import deepspeed_debug
for name in [name for name in sys.modules if name.startswith("deepspeed")]:
    del sys.modules[name]
sys.modules["deepspeed.utils.debug"] = deepspeed_debug
import deepspeed
from deepspeed.runtime.zero import partition_parameters
assert partition_parameters.debug_param2name_id_shape is deepspeed_debug.debug_param2name_id_shape
print("all of it ran")
"""


def test_deepspeed_runs_on_the_drop_in() -> None:
    """DeepSpeed, with its engine and ZeRO, imports the drop-in in place of its own module."""
    installed("deepspeed.utils.debug")
    done = subprocess.run(
        [sys.executable, "-c", DEEPSPEED_PROGRAM], capture_output=True, text=True, timeout=400
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["all of it ran"]), done.stderr
