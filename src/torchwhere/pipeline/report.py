"""Makes the report on a run: reads its boxes once, diagnoses it, and computes what the page shows.

It only reads. 10,000 ranks with a thousand events each take 15 s of CPU time. Most of that is
reading boxes, which as many processes share as there are cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchwhere.core.stall import STALL_S
from torchwhere.core.version import __version__
from torchwhere.core.worker_pool import Progress, gc_paused
from torchwhere.diagnose.calls.job_calls import load_calls_with
from torchwhere.diagnose.report.digest import Digest
from torchwhere.diagnose.report.report import Report, make_report
from torchwhere.pipeline.verdict import diagnose_run
from torchwhere.render.verdict import verdict_json
from torchwhere.snapshots.read import saved_statuses


def report_on(
    folder: str | Path, *, on_progress: Progress | None = None, stall_s: float = STALL_S
) -> Report:
    """Make the report on the newest run in a folder.

    `on_progress(done, total)` counts the boxes while they are read. A wait of `stall_s` seconds is
    a hang. Raises `TorchwhereError` if there is nothing to read.
    """
    with gc_paused():
        run, job_calls, digests = load_calls_with(Digest, folder, on_progress=on_progress)
        verdict = diagnose_run(
            run, saved_statuses(run.folder), stall_s=stall_s, job_calls=job_calls
        )
        return make_report(run, job_calls=job_calls, verdict=verdict, digests=digests)


def report_json(report: Report) -> dict[str, Any]:
    """The data of the page: the report, the text of the verdict, and the version of torchwhere."""
    verdict = verdict_json(report.verdict) | {"headline": report.headline}
    return report.to_dict() | {"torchwhere": __version__, "verdict": verdict}
