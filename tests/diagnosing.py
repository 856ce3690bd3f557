"""The verdict on a run that a test has read: what the pipeline does, without files and processes."""

from __future__ import annotations

from typing import Any

from torchwhere.blackbox.run import RunSummary
from torchwhere.diagnose.doctor.examine import examine
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.render.verdict_text.assemble import verdict_of


def diagnose(run: RunSummary[Any], **options: Any) -> Verdict:
    """Examine a run and make the verdict. The options are those of `examine`."""
    return verdict_of(examine(run, **options))
