"""Which rank's failure is the cause, by the messages of CUDA and NCCL: those of torch 2.11."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from test_exits import GONE, exits, rank_of
from torchwhere.core.device_errors import DeviceError, device_error, is_final
from torchwhere.diagnose.doctor.exit_records import is_lost_peer, is_timeout
from torchwhere.diagnose.doctor.exits import Reaction
from torchwhere.diagnose.doctor.stacks import Activity, Hold, holding
from torchwhere.native.load import SWITCH
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.processes.fault_handler import crash_stack
from torchwhere.processes.status import ProcessStatus
from torchwhere.render.verdict_text.phrases import exit_text, hold_text

WATCHDOG = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with"
    " exception: "
)
TIMEOUT = (
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=23, OpType=ALLREDUCE,"
    " NumelIn=131584, NumelOut=131584, Timeout(ms)=7000) ran for 7035 milliseconds before timing"
    " out."
)
REMOTE = (
    "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3780, remote process exited or there was"
    " a network error, NCCL version 2.28.9\nncclRemoteError: A call failed possibly due to a"
    " network error or a remote process exiting prematurely."
)
ABORTED = "DistBackendError: NCCL communicator was aborted on rank 1."
STORE = (
    "DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed. Did the remote"
    " server shutdown or crash?"
)
ASSERT = "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert'"
IN_A_THREAD = "Aborted in a native thread"

# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (f"AcceleratorError: {ASSERT}", DeviceError.ASSERT),
        (f"{IN_A_THREAD}: {WATCHDOG}{ASSERT}", DeviceError.ASSERT),
        (
            "CUDA error: an illegal memory access\nCompile with .. to enable device-side assertions",
            DeviceError.ADDRESS,
        ),
        ("RuntimeError: CUDA error: misaligned address", DeviceError.ADDRESS),
        ("RuntimeError: CUDA error: unspecified launch failure", DeviceError.ADDRESS),
        ("CUDA error: uncorrectable ECC error encountered", DeviceError.MEMORY),
        (
            "NCCL error, unhandled cuda error\nCuda failure 'uncorrectable ECC error encountered'",
            DeviceError.MEMORY,
        ),
        (
            "CUDA error: uncorrectable NVLink error detected during the execution",
            DeviceError.LINK,
        ),
        ("Triton Error [CUDA]: an illegal memory access was encountered", DeviceError.ADDRESS),
        ("CUDA error: hardware stack error", DeviceError.ADDRESS),
        ("CUDA error: operation not supported on global/shared address space", DeviceError.ADDRESS),
        (
            "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
            DeviceError.LINK,
        ),
        ("CUDA error: unknown error", DeviceError.OTHER),
        ("HIP error: the operation cannot be performed", DeviceError.OTHER),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", None),
        ("AcceleratorError: CUDA error: out of memory", None),
        (f"{IN_A_THREAD}: {WATCHDOG}{TIMEOUT}", None),
        (REMOTE, None),
        ("ValueError: bad batch", None),
    ],
)
def test_errors_of_devices(message: str, error: DeviceError | None) -> None:
    """The doctor distinguishes an error of the device from errors of the network, of memory and of
    the program."""
    assert device_error(message) == error


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (f"AcceleratorError: {ASSERT}", True),
        ("CUDA error: the launch timed out and was terminated", True),
        ("CUDA error: hardware stack error", True),
        ("CUDA error: uncorrectable NVLink error detected during the execution", True),
        ("Triton Error [CUDA]: an illegal memory access was encountered", True),
        ("CUDA error: invalid argument\nCompile with .. to enable device-side assertions", False),
        ("CUDA error: out of memory", False),
        ("ValueError: the form contained errors", False),
    ],
)
def test_errors_that_end_the_use_of_a_device(message: str, expected: bool) -> None:
    """The hooks leave the device alone after an error that makes every call of it fail, and after no
    other one."""
    assert is_final(message) == expected


@pytest.mark.parametrize("message", [REMOTE, ABORTED, STORE])
def test_lost_peers(message: str) -> None:
    """A communicator that a peer ended, and a store that is gone, are consequences."""
    assert is_lost_peer(message)
    assert not is_timeout(message)


# -- which rank was first --------------------------------------------------------------------------


def test_a_device_error_among_reactions() -> None:
    """The rank with an error of its device is the cause; timeouts and lost peers are not."""
    aborted = {
        rank: replace(GONE, ended=f"{IN_A_THREAD}: {WATCHDOG}{text}")
        for rank, text in {0: TIMEOUT, 2: ASSERT, 3: REMOTE}.items()
    }
    job = exits(rank_of(0), rank_of(1, exception=REMOTE), rank_of(2), rank_of(3), seen=aborted)
    assert job.first([]) == [2]
    assert job.first_of_awaited([0, 2, 3], []) == [2]
    assert job.reactions(besides=[2]) == {Reaction.TIMED_OUT: [0], Reaction.LOST_PEER: [1, 3]}
    assert exit_text(job.how(2)).startswith("aborted by the watchdog of NCCL: CUDA error: device")


def test_an_aborted_communicator() -> None:
    """A rank whose watchdog aborts the communicator records only that; the message of the
    abort says why. An exception of the rank's own counts more than what its watchdog finds later.
    """
    late = {
        rank: replace(GONE, ended=f"{IN_A_THREAD}: {WATCHDOG}{text}")
        for rank, text in enumerate((TIMEOUT, REMOTE, ASSERT))
    }
    job = exits(
        rank_of(0, exception=ABORTED),
        rank_of(1, exception="ValueError: bad batch"),
        rank_of(2, exception=ABORTED),
        seen=late,
    )
    assert [job.reaction(rank) for rank in range(3)] == [Reaction.TIMED_OUT, None, None]
    assert [job.device_error(rank) for rank in range(3)] == [None, None, DeviceError.ASSERT]


def test_a_device_error_before_other_failures() -> None:
    """Of several ranks that failed by themselves, the one with an error of its device is first."""
    job = exits(
        rank_of(0, end="exception: ValueError: no result"), rank_of(1, end=f"exception: {ASSERT}")
    )
    assert job.first([]) == [1]


@pytest.mark.parametrize(
    ("gone_s", "first"), [((9.0, 9.1, 9.2, 9.3), []), ((69.0, 69.1, 9.0, 69.3), [2])]
)
def test_aborts_without_a_message(gone_s: tuple[float, ...], first: list[int]) -> None:
    """Where native threads ended all ranks without a message, only a rank that ended long before
    the others is blamed."""
    seen = {
        rank: replace(GONE, ended=IN_A_THREAD, gone_ns=int(at_s * 1e9))
        for rank, at_s in enumerate(gone_s)
    }
    assert exits(*map(rank_of, range(4)), seen=seen).first([]) == first


def test_a_group_that_is_destroyed() -> None:
    """A rank that hangs in `destroy_process_group` waits for its pending collectives."""
    stack = (
        "/lib/python3.12/torch/distributed/distributed_c10d.py:2331 in destroy_process_group",
        "/job/train.py:40 in main",
    )
    hold = holding(rank_of(2), ProcessStatus(alive=True, state="S", stack=stack))
    assert hold == Hold(Activity.GROUP_END, "destroy_process_group")
    assert hold_text(hold) == (
        "in destroy_process_group, which waits for pending collectives of this rank"
    )


# -- the fault file --------------------------------------------------------------------------------

STACKS = """
Thread 0x00007f7b6ff826c0 (most recent call first):
  <no Python frame>

Thread 0x00007f8d565ff140 (most recent call first):
  File "/job/train.py", line 93 in train
"""


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        (f"Fatal Python error: Aborted\n{STACKS}", IN_A_THREAD),
        (
            f"Uncaught C++ exception: {ASSERT}\nFatal Python error: Aborted\n{STACKS}",
            f"{IN_A_THREAD}: {ASSERT}",
        ),
        (f"Uncaught C++ exception: {ASSERT}\n", f"{IN_A_THREAD}: {ASSERT}"),
    ],
)
def test_a_crash_of_a_native_thread(text: str, ended: str) -> None:
    """The fault file says what a native thread threw; the stack is that of the main thread."""
    reason, stack = crash_stack(text)
    assert reason == ended
    assert stack == (("/job/train.py:93 in train",) if STACKS in text else ())


JOB = """
import ctypes, sys, threading, torchwhere
torchwhere.start(out=sys.argv[1])
throw = ctypes.CDLL("libstdc++.so.6")._ZSt21__throw_runtime_errorPKc
thread = threading.Thread(target=throw, args=(b"CUDA error: misaligned address\\nat some line",))
thread.start()
thread.join(60)
"""


# Sets a handler between two watches, which calls the one that it has found.
CHAINED = JOB.replace(
    "throw =",
    """
library = ctypes.CDLL("libstdc++.so.6")
set_handler, type_ = library._ZSt13set_terminatePFvvE, ctypes.CFUNCTYPE(None)
set_handler.restype = ctypes.c_void_p
handler = type_(lambda: type_(before)())
before = set_handler(handler)
torchwhere.stop()
torchwhere.start(out=sys.argv[1])
throw =""",
)


@pytest.mark.parametrize("job", [JOB, CHAINED])
def test_an_uncaught_exception_of_cpp(job: str, library: Path, tmp_path: Path) -> None:
    """A C++ exception that ends a process is in the verdict, which calls it an error of the
    device. The handlers of others still run."""
    command = [sys.executable, "-c", job, str(tmp_path / "run")]
    env = os.environ | {"XDG_CACHE_HOME": str(library.parent.parent), SWITCH: "1"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == -6
    assert "terminate called after throwing" in done.stderr  # by the first handler
    verdict = diagnose_folder(tmp_path / "run")
    assert (verdict.kind, verdict.culprits) == ("dead", (0,))
    assert verdict.explanation[0] == "Rank 0 exited: Aborted: CUDA error: misaligned address."
    assert verdict.facts["device_errors"] == {0: "illegal address"}
