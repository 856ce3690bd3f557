"""The faults of `faulty_jobs.py` on NCCL, with four ranks on one GPU: what the doctor says while the
job runs, and after it was killed.

`make test-gpu` runs this file. It needs one NVIDIA GPU, and is skipped elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from faulty_jobs import FAULTS, STALL_S
from test_doctor import Nursery, kill, wait_for_verdict
from test_gpu import Verdicts, mps, selected
from torchwhere.native.build import build
from torchwhere.native.load import SWITCH
from torchwhere.pipeline.verdict import diagnose_folder

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.checks_itself,
]

VICTIM = 2
AT_ONCE = 2  # kernels that wait for each other occupy the GPU: more jobs starve each other
NOT_ON_NCCL = {
    "recv_from_any_rank",  # NCCL cannot receive from any rank
    "oom_kill",  # a limit of the CPU's memory
    "cable_pulled",  # all ranks share one network interface
    # NCCL connects pairs at the first message: rings of messages deadlock without a fault
    "wrong_peer",
    "healthy_turns",
}
# on NCCL a rank may be in several collectives, so the rank that left is missing from one of them
KINDS_ON_NCCL = dict.fromkeys(("leaves_loop_early", "leaves_mesh_loop_early"), ("missing",))
NAMES = [name for name in FAULTS if name not in NOT_ON_NCCL]


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Verdicts]]]:
    """For each fault two verdicts: live, and after all processes were killed."""
    build()
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("TORCHWHERE_TEST_BACKEND", "nccl"), (SWITCH, "1")):
            patch.setenv(name, value)
        nursery = Nursery()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            yield {
                name: pool.submit(_diagnose, nursery, name, folder / name)
                for name in selected(request)
            }
            pool.shutdown(cancel_futures=True)
        nursery.close()


def _diagnose(nursery: Nursery, name: str, folder: Path) -> Verdicts:
    folder.mkdir()
    with mps(folder):
        with nursery.lock:
            pids = nursery.start(name, VICTIM, folder)
        try:
            live = wait_for_verdict(folder / "run", FAULTS[name][1], most_s=45)
        finally:
            kill(pids[::-1])
    run = folder / "run"
    return Verdicts(run, live, diagnose_folder(run, stall_s=STALL_S), {})


@pytest.mark.parametrize("name", NAMES)
def test_fault(name: str, verdicts: dict[str, Future[Verdicts]]) -> None:
    """The doctor finds on NCCL the fault and the rank that it finds on gloo."""
    expected = FAULTS[name][1]
    kinds = {*expected.kinds, *KINDS_ON_NCCL.get(name, ())}
    run, live, after_kill, _ = verdicts[name].result()
    assert live.kind in kinds, (run, live)
    # nothing was wrong, but the job was killed before it had finished
    ended = kinds if kinds != {"healthy"} else {"dead"}
    assert after_kill.kind in ended, (run, after_kill)
    for verdict in (live, after_kill):
        assert set(verdict.culprits) == expected.culprits(VICTIM), (run, verdict)
