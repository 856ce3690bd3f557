"""The test files of PyTorch that run by default, each with a keyword that selects cases.

They exercise what torchwhere hooks or replaces, and run on a CPU with gloo. Cases that need a GPU
skip themselves.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TestFile:
    """A file below `test/`, and pytest's `-k` expression for it."""

    path: str
    keyword: str = ""


DEFAULT = (
    # module trackers and debug modes, where the drop-ins must behave like the originals
    TestFile("test_module_tracker.py"),
    TestFile("distributed/_tools/test_mod_tracker.py"),
    TestFile("distributed/_tools/test_runtime_estimator.py"),
    TestFile("distributed/_tools/test_mem_tracker.py"),
    TestFile("distributed/_tools/test_fsdp2_mem_tracker.py"),
    TestFile("distributed/_tools/test_sac_estimator.py"),
    TestFile("distributed/tensor/debug/test_debug_mode.py"),
    TestFile("distributed/tensor/debug/test_comm_mode.py"),
    TestFile("distributed/tensor/debug/test_comm_mode_features.py"),
    TestFile("test_flop_counter.py"),
    TestFile("functorch/test_logging.py"),
    TestFile("functorch/test_ac_logging.py"),
    TestFile("autograd/test_logging.py"),
    # modules, hooks, autograd, optimizers, checkpointing
    TestFile("nn/test_module_hooks.py"),
    TestFile("nn/test_parametrization.py"),
    TestFile("nn/test_load_state_dict.py"),
    TestFile("test_nn.py", "TestNN and (hook or module or parameter or state_dict or swap)"),
    TestFile("test_autograd.py", "checkpoint or hook or node or sequence or reentrant or graph"),
    TestFile("test_optim.py", "hook or state_dict"),
    TestFile("optim/test_swa_utils.py"),
    TestFile("test_utils.py", "Checkpoint"),
    TestFile("test_multiprocessing.py", "not cuda"),
    # compile
    TestFile("dynamo/test_hooks.py"),
    TestFile("dynamo/test_modules.py"),
    TestFile("dynamo/test_backward_higher_order_ops.py"),
    TestFile("functorch/test_aotdispatch.py", "TestAOTAutograd and not symbolic"),
    # collectives, DDP, FSDP, DTensor, pipelining, checkpoints
    TestFile("distributed/test_c10d_common.py"),
    TestFile("distributed/test_c10d_functional_native.py"),
    TestFile(
        "distributed/test_c10d_gloo.py", "allreduce or broadcast or allgather or ddp or barrier"
    ),
    TestFile("distributed/test_functional_api.py"),
    TestFile("distributed/test_device_mesh.py"),
    TestFile("distributed/_composable/test_replicate.py"),
    TestFile("distributed/_composable/test_replicate_with_fsdp.py"),
    TestFile("distributed/_composable/test_checkpoint.py"),
    TestFile("distributed/_composable/fsdp/test_fully_shard_init.py"),
    TestFile("distributed/_composable/fsdp/test_fully_shard_training.py"),
    TestFile("distributed/_composable/fsdp/test_fully_shard_state_dict.py"),
    TestFile("distributed/_composable/fsdp/test_fully_shard_logging.py"),
    TestFile("distributed/tensor/test_api.py"),
    TestFile("distributed/tensor/test_dtensor.py"),
    TestFile("distributed/tensor/test_redistribute.py"),
    TestFile("distributed/tensor/test_utils.py"),
    TestFile("distributed/tensor/parallel/test_parallelize_api.py"),
    TestFile("distributed/tensor/parallel/test_tp_style.py"),
    TestFile("distributed/pipelining/test_schedule.py"),
    TestFile("distributed/pipelining/test_pipe.py"),
    TestFile("distributed/checkpoint/test_state_dict_utils.py"),
    TestFile("distributed/checkpoint/test_file_system_checkpoint_cpu.py"),
)

# Cases that cannot pass on the drop-ins, and why.
INTENDED = {
    "test_flop_counter.py::TestFlopCounter::test_hook_registration": (
        "counts torch's global module hooks; the drop-in registers none"
    ),
}
