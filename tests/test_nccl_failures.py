"""What the doctor says about jobs of four NCCL ranks that failed on a GPU, from what they left.

`nccl_jobs.py` describes the jobs. `torchwhere run` recorded them: boxes, fault files, what the
monitor saw, and the dumps of the flight recorder. No launcher ended the ranks, except in the runs
whose name ends with `torchrun`.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from nccl_jobs import JOBS, VICTIM
from test_nccl_runs import STALL_S, unpacked
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.pipeline.verdict import diagnose_folder

FAILING = sorted(
    name for name, (_, expected) in JOBS.items() if expected.fails and expected.is_recorded
)
OTHERS = [0, 1, 3]
MESSAGE = re.compile(r"^Uncaught C\+\+ exception: .*?(?=^Fatal Python error)", re.DOTALL | re.M)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("nccl_failures.txz", tmp_path_factory.mktemp("failures"))


def verdict_of(run: Path) -> Verdict:
    return diagnose_folder(run, stall_s=STALL_S)


@pytest.mark.parametrize("name", [*FAILING, "illegal_address_torchrun", "timeout_cpu_torchrun"])
def test_the_cause(runs: Path, name: str) -> None:
    """The doctor names the rank whose code or device failed, not those that failed because of
    it."""
    expected = JOBS[name.removesuffix("_torchrun")][1]
    verdict = verdict_of(runs / name)
    assert (verdict.kind, verdict.culprits) == (expected.kind, expected.culprits)
    assert bool(verdict.facts.get("on_device")) == expected.on_device


@pytest.mark.parametrize(
    ("name", "reactions"),
    [
        ("device_assert", {"lost peer": OTHERS}),
        ("illegal_address", {"lost peer": OTHERS}),
        ("exited", {"lost peer": OTHERS}),
        ("raised", {"lost peer": OTHERS}),
        ("timeout_cpu", {"timed out": OTHERS}),
        ("timeout_cpu_torchrun", {"timed out": OTHERS}),
        ("timeout_device", {"timed out": OTHERS}),
        ("illegal_address_torchrun", None),  # SIGTERM ended the others before they noticed
    ],
)
def test_reactions(runs: Path, name: str, reactions: dict[str, list[int]] | None) -> None:
    """The verdict lists the ranks that failed because of the culprit, and how."""
    verdict = verdict_of(runs / name)
    assert verdict.facts.get("failed_because_of_it") == reactions
    assert any(line.startswith("Because of it, ranks 0-1, 3") for line in verdict.explanation) == (
        reactions is not None
    )


@pytest.mark.parametrize(
    ("name", "error"),
    [("device_assert", "device-side assert"), ("illegal_address", "illegal address")],
)
def test_errors_of_devices(runs: Path, name: str, error: str) -> None:
    """The verdict says what failed on the device, and only for the rank whose device failed."""
    assert verdict_of(runs / name).facts["device_errors"] == {VICTIM: error}


def test_sentences(runs: Path) -> None:
    """The verdict on an error of a device says where its device was, and what to look at."""
    assert list(verdict_of(runs / "illegal_address").explanation) == [
        (
            "Rank 2 exited: exception: AcceleratorError: CUDA error: an illegal memory access was"
            " encountered."
        ),
        "  last place: forward of <root>, nccl_jobs.py:93, step 7",
        "  rank 2, device: last reached outside any module, nccl_jobs.py:100, step 6",
        (
            "Likely cause: a kernel reads or writes outside of its tensors. The CPU may report"
            " the error after it has passed the failing line. Look at: the log of rank 2 and a run"
            " with CUDA_LAUNCH_BLOCKING=1, which shows the line; compute-sanitizer."
        ),
        'The others wait for it in all_reduce of float32 [131584], #22 of group "default".',
        "  waiting: ranks 0-1, 3, in backward of layers.2.0, nccl_jobs.py:96, step 6",
        "Because of it, ranks 0-1, 3 failed: the connection to another rank was lost.",
        'According to the flight recorder, #22 of group "default" is started on ranks 0-1, 3.',
    ]


def test_a_dump_is_missing(runs: Path) -> None:
    """Where a rank has left no dump, the verdict does not say that all devices have started the
    collective."""
    lines = verdict_of(runs / "raised").explanation
    assert (
        'According to the flight recorder, #22 of group "default" is started on ranks 0-1, 3.'
        in lines
    )
    assert not any("All devices have started it" in line for line in lines)


def test_aborted_calls(runs: Path) -> None:
    """A call that ended because its communicator was aborted is not complete."""
    assert (
        'According to the flight recorder, #21 of group "default" is issued on rank 3; scheduled'
        " on rank 1."
    ) in verdict_of(runs / "exited").explanation


# -- with less data --------------------------------------------------------------------------------


def test_an_abort_without_a_message(runs: Path) -> None:
    """A rank that a native thread ended first, without a message, is the likely cause."""
    verdict = verdict_of(runs / "illegal_address_unexplained")
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("dead", (VICTIM,), "inferred")
    assert verdict.explanation[0] == "Rank 2 exited: Aborted in a native thread."


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("has_monitor", [True, False])
def test_without_messages(runs: Path, tmp_path: Path, name: str, has_monitor: bool) -> None:
    """Without the messages of uncaught exceptions, which need the native extension, and without a
    monitor, the doctor may not know the cause, but never blames another rank."""
    run = shutil.copytree(runs / name, tmp_path / name)
    for path in run.glob("*.fault"):
        path.write_text(MESSAGE.sub("", path.read_text()))
    monitor = run / "monitor-node0.json"
    content = json.loads(monitor.read_text())
    for status in content["ranks"].values():
        status["ended"] = status["ended"] and status["ended"].partition(":")[0]
    monitor.write_text(json.dumps(content))
    if not has_monitor:
        monitor.unlink()
    verdict = verdict_of(run)
    assert verdict.kind != "healthy"
    assert set(verdict.culprits) <= {VICTIM}
