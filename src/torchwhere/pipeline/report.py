"""Makes the report on a run: reads its boxes once, hears its ranks, has the doctor judge, and
computes all that the page shows.

Everything here reads. 10,000 ranks of a thousand events take 15 s of CPU time; of that the boxes,
which are most, are read by as many processes as there are cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchwhere.core.gc_pause import gc_paused
from torchwhere.core.version import __version__
from torchwhere.diagnose.calls.load import Progress, load_calls_with
from torchwhere.diagnose.doctor.rules import STALL_S
from torchwhere.diagnose.report.digest import Digest
from torchwhere.diagnose.report.report import Report, make_report
from torchwhere.pipeline.verdict import diagnose_run, saved_statuses
from torchwhere.render.verdict import verdict_json


def report_on(
    folder: str | Path, *, on_progress: Progress | None = None, stall_s: float = STALL_S
) -> Report:
    """The report on the newest run in a folder. Raises `TorchwhereError` when there is nothing
    there to read.

    `on_progress` is told how many boxes have been read, of how many; `stall_s` is how long a wait
    is a hang.
    """
    with gc_paused():
        run, job_calls, digests = load_calls_with(Digest, folder, on_progress=on_progress)
        verdict = diagnose_run(
            run, saved_statuses(run.folder), stall_s=stall_s, job_calls=job_calls
        )
        return make_report(run, job_calls=job_calls, verdict=verdict, digests=digests)


def report_json(report: Report) -> dict[str, Any]:
    """The report as the page gets it: with the verdict's text, and who made it."""
    found = report.to_dict()
    verdict = verdict_json(report.verdict) | {"headline": report.headline}
    return found | {"torchwhere": __version__, "verdict": verdict}
