"""Jobs in worker processes: every job gives one result, whatever happens to a worker."""

from __future__ import annotations

from functools import partial

import pytest

from torchwhere.core import worker_pool
from torchwhere.core.worker_pool import HERE, run_jobs

MAKE_TASK = partial(partial, abs)  # creates the task `abs`


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_job_gives_one_result(workers: int) -> None:
    """All results arrive once, and with workers none of them is computed here."""
    results = list(run_jobs(MAKE_TASK, range(-20, 0), workers=workers))
    assert sorted(result for _, result in results) == list(range(1, 21))
    assert {worker for worker, _ in results} <= ({HERE} if not workers else set(range(workers)))


@pytest.mark.parametrize(
    "program", ["", "import sys; sys.stdout.write('nonsense')"], ids=["exits", "nonsense"]
)
def test_jobs_of_a_failed_worker_run_here(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of workers that end or write something else run in this process."""
    monkeypatch.setattr(worker_pool, "_PROGRAM", program)
    results = list(run_jobs(MAKE_TASK, range(-20, 0), workers=2))
    assert sorted(results) == [(HERE, number) for number in range(1, 21)]
