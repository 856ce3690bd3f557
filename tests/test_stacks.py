"""What Python stacks show: the user's line, whether a rank is inside its last collective, and what
blocks it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from skewed_job import Player, Skew, call
from torchwhere.blackbox.run import read_run
from torchwhere.core.events import Event
from torchwhere.core.place import Place
from torchwhere.diagnose.calls.job_calls import calls_of_run
from torchwhere.diagnose.doctor.stacks import holding, is_in_collective, user_line
from torchwhere.hooks import modules
from torchwhere.processes.fault_handler import without_own_frames
from torchwhere.processes.py_spy import PythonFrame
from torchwhere.processes.status import ProcessStatus
from torchwhere.render.verdict_text.phrases import hold_text

LIB = "/venv/lib/python3.11/site-packages"
C10D = f"{LIB}/torch/distributed/distributed_c10d.py"
TRAIN = "/home/me/train.py"
IMPORT = "<frozen importlib._bootstrap>:1176 in _find_and_load"


def issued(
    api: str | None = "all_reduce",
    *,
    line: str = "train.py:9",
    thread: str = "MainThread",
    **fields: Any,
) -> Event:
    """A collective, as in `RankCalls`."""
    place = Place(rank=0, step=3, pass_="outside", line=line, thread=thread)
    return Event(
        "collective",
        7,
        0,
        place,
        {"op": "all_reduce", "api": api, "backend": "gloo", "async": False} | fields,
    )


def seen(*frames: str, state: str = "S") -> ProcessStatus:
    return ProcessStatus(alive=True, state=state, stack=frames)


STANDING = {
    "in the function that issued it": (
        issued(),
        [f"{C10D}:3252 in all_reduce", f"{TRAIN}:9 in main"],
        True,
    ),
    "deep in a library that called it": (
        issued(),
        [
            f"{C10D}:3252 in all_reduce",
            f"{LIB}/deepspeed/engine.py:88 in step",
            f"{TRAIN}:12 in main",
        ],
        True,
    ),
    "past it, on the same line": (issued(), [f"{TRAIN}:9 in main"], False),
    "in another function of torch.distributed": (
        issued(),
        [f"{C10D}:5863 in new_group", f"{TRAIN}:9 in main"],
        False,
    ),
    "in user code that torch.distributed called": (
        issued("batch_isend_irecv", **{"async": True}),
        [
            f"{TRAIN}:4 in forward",
            f"{LIB}/torch/distributed/pipelining/stage.py:762 in forward_one_chunk",
            f"{TRAIN}:9 in main",
        ],
        None,
    ),
    "importing torch.distributed": (
        issued(None),
        [f"{LIB}/torch/distributed/tensor/_api.py:290 in <module>", IMPORT, f"{TRAIN}:2 in main"],
        False,
    ),
    "in a backward that DDP reduces in": (
        issued(None, **{"async": True}),
        [
            f"{LIB}/torch/autograd/graph.py:869 in _engine_run_backward",
            f"{LIB}/torch/_tensor.py:6 in backward",
            f"{TRAIN}:9 in main",
        ],
        True,
    ),
    "in a hook of that backward": (
        issued(None, **{"async": True}),
        [
            f"{TRAIN}:30 in hook",
            f"{LIB}/torch/autograd/graph.py:869 in _engine_run_backward",
            f"{TRAIN}:9 in main",
        ],
        None,
    ),
    "where torch waits for what was issued before": (
        issued("all_gather_into_tensor", **{"async": True}),
        [
            (
                f"{LIB}/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:310 in"
                " foreach_all_gather_copy_out"
            ),
            f"{TRAIN}:9 in main",
        ],
        True,
    ),
    "on the line that issued it and waits for it": (
        issued("batch_isend_irecv", **{"async": True}),
        [f"{TRAIN}:9 in main"],
        True,
    ),
    "on a later line, which may be its wait": (
        issued("isend", **{"async": True}),
        [f"{TRAIN}:11 in main"],
        None,
    ),
    "issued by another thread": (issued(thread="Thread-1"), [f"{TRAIN}:11 in main"], None),
    "of a device that sleeps elsewhere": (issued(backend="nccl"), [f"{TRAIN}:11 in main"], None),
    "nothing was issued": (None, [f"{C10D}:3252 in all_reduce", f"{TRAIN}:9 in main"], False),
    "no stack": (issued(), [], None),
}


def test_is_inside_the_call() -> None:
    """Only a stack inside the call, or inside its wait, counts; an unclear stack gives no
    answer."""
    found = {
        name: is_in_collective(call, seen(*stack)) for name, (call, stack, _) in STANDING.items()
    }
    assert found == {name: expected for name, (_, _, expected) in STANDING.items()}


def test_a_device_is_waited_for_anywhere() -> None:
    """A rank that spins outside torch.distributed, as in `.item()`, may wait for its device."""
    assert is_in_collective(issued(backend="nccl"), seen(f"{TRAIN}:11 in main", state="R")) is True


HELD = {
    "in data loading": [
        f"{TRAIN}:30 in __getitem__",
        f"{LIB}/torch/utils/data/_utils/fetch.py:44 in fetch",
        f"{TRAIN}:9 in main",
    ],
    "importing a module": [
        f"{LIB}/torch/_dynamo/variables/functions.py:102 in <module>",
        IMPORT,
        f"{TRAIN}:9 in main",
    ],
    "in compilation": [
        f"{LIB}/torch/_inductor/graph.py:9 in run",
        f"{LIB}/torch/_dynamo/convert_frame.py:1 in __call__",
        f"{TRAIN}:9 in f",
    ],
    "waiting for a queue": [
        "/usr/lib/python3.11/threading.py:320 in wait",
        "/usr/lib/python3.11/queue.py:180 in get",
        f"{TRAIN}:9 in main",
    ],
    "waiting for another process": [
        "/usr/lib/python3.11/threading.py:320 in wait",
        "/usr/lib/python3.11/multiprocessing/pool.py:768 in wait",
        f"{TRAIN}:9 in main",
    ],
    "waiting for a lock or a thread": [
        "/usr/lib/python3.11/threading.py:1112 in join",
        f"{TRAIN}:9 in main",
    ],
    "waiting for a subprocess": [
        "/usr/lib/python3.11/threading.py:320 in wait",
        "/usr/lib/python3.11/subprocess.py:1209 in communicate",
        f"{TRAIN}:9 in main",
    ],
    "building a C++ extension": [
        "/usr/lib/python3.11/subprocess.py:1209 in communicate",
        f"{LIB}/torch/utils/cpp_extension.py:2640 in _run_ninja_build",
        f"{LIB}/torch/utils/cpp_extension.py:1818 in load",
        f"{TRAIN}:9 in main",
    ],
    "waiting for another process to build a C++ extension, or for a stale `lock` file that a killed process left beside it": [
        f"{LIB}/torch/utils/file_baton.py:59 in wait",
        f"{LIB}/torch/utils/cpp_extension.py:2400 in _jit_compile",
        f"{LIB}/torch/utils/cpp_extension.py:1818 in load",
        f"{LIB}/deepspeed/ops/op_builder/builder.py:580 in jit_load",
        f"{TRAIN}:9 in main",
    ],
    "waiting for a file lock": [
        f"{LIB}/filelock/_api.py:344 in acquire",
        f"{LIB}/datasets/builder.py:9 in download_and_prepare",
        f"{TRAIN}:9 in main",
    ],
    "in new_group, which needs all ranks of the group": [
        f"{C10D}:2169 in _new_process_group_helper",
        f"{C10D}:5863 in new_group",
        f"{LIB}/torch/distributed/c10d_logger.py:97 in wrapper",
        f"{TRAIN}:9 in main",
    ],
    "in torch.distributed, outside any recorded collective": [
        f"{C10D}:12 in all_reduce",
        f"{TRAIN}:9 in main",
    ],
    "sleeping: in a blocking call, or waiting for a lock": [
        f"{TRAIN}:9 in log",
        f"{LIB}/torch/_dynamo/eval_frame.py:1 in _fn",
        "/usr/lib/python3.11/threading.py:1002 in _bootstrap",
    ],
}


def test_what_blocks_a_rank(tmp_path: Path) -> None:
    """The reason comes from the code that the user's line called, not from its callers."""
    Player([[call([0, 1])], [call([0, 1])]]).play().write(tmp_path, [Skew(), Skew()], ["a", "a"])
    rank_calls = calls_of_run(read_run(tmp_path)).by_rank[0]
    elsewhere = replace(
        rank_calls, rank_summary=rank_calls.rank_summary._replace(in_collective_since_ns=None)
    )
    holds = [holding(elsewhere, seen(*stack)) for stack in HELD.values()]
    assert [hold_text(hold) for hold in holds if hold is not None] == list(HELD)


def test_a_compiled_graph_that_runs_is_not_compiling(tmp_path: Path) -> None:
    """The frames of a running compiled graph pass through the compiler's files."""
    Player([[call([0, 1])], [call([0, 1])]]).play().write(tmp_path, [Skew(), Skew()], ["a", "a"])
    rank_calls = calls_of_run(read_run(tmp_path)).by_rank[0]
    stack = (
        "/tmp/torchinductor_me/ab/cab.py:40 in call",
        f"{LIB}/torch/_inductor/compile_fx.py:9 in run",
        f"{TRAIN}:9 in f",
    )
    hold = holding(rank_calls, seen(*stack, state="R"))
    assert hold is not None
    assert (
        hold_text(hold)
        == "running: an endless loop, a long computation, or native code that holds the GIL"
    )


def test_the_files_are_there() -> None:
    """The torch files that identify a compilation or a build exist in this torch."""
    home = Path(torch.__file__).parent
    dynamo = ("convert_frame", "symbolic_convert", "output_graph", "eval_frame")
    inductor = (
        "compile_fx",
        "graph",
        "scheduler",
        "lowering",
        "codecache",
        "async_compile",
        "select_algorithm",
    )
    files = [
        *(home / f"_dynamo/{name}.py" for name in dynamo),
        *(home / f"_inductor/{name}.py" for name in inductor),
    ]
    files += [home / "utils/file_baton.py", home / "utils/cpp_extension.py"]
    assert [path.name for path in files if not path.exists()] == []


USER_LINES = {
    (f"{C10D}:1 in wait", f"{TRAIN}:9 in main"): f"{TRAIN}:9",
    ("/home/me/torchwhere/examples/train.py:3 in main",): "/home/me/torchwhere/examples/train.py:3",
    (
        "/home/me/src/torchwhere/examples/train.py:3 in main",
    ): "/home/me/src/torchwhere/examples/train.py:3",
    ("/home/me/torchwhere/src/torchwhere/launch.py:3 in run",): None,
    ("/tmp/torchinductor_me/ab/cab.py:40 in call", "<eval_with_key>.3:4 in forward"): None,
    ("no frame",): "no frame",
    (): None,
}


def test_user_line() -> None:
    """Frames of torch, of generated code and of torchwhere are not the user's; a checkout of
    torchwhere is a normal folder."""
    assert {stack: user_line(stack) for stack in USER_LINES} == USER_LINES


def test_own_frames_are_left_out() -> None:
    """A stack shows neither torchwhere's hooks nor the code that runs the script."""
    hooks = Path(modules.__file__)
    frames = [
        PythonFrame(f"{LIB}/torch/nn/modules/linear.py", 5, "forward"),
        PythonFrame(str(hooks), 7, "watched_call"),
        PythonFrame(TRAIN, 9, "main"),
        PythonFrame("<frozen runpy>", 88, "_run_code"),
        PythonFrame(str(hooks.parent.parent / "commands" / "launch.py"), 3, "run"),
    ]
    assert without_own_frames(frames) == (
        f"{LIB}/torch/nn/modules/linear.py:5 in forward",
        f"{TRAIN}:9 in main",
    )
