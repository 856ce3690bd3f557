"""Where ranks that should do the same part: their logs and their events, without what may differ.

Takes a run (its boxes), or files of text, one a rank; gives a `Diff`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchwhere.blackbox.run import BoxRun
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.results import Shown
from torchwhere.diagnose.diff.cohorts import Comparison
from torchwhere.diagnose.diff.events import compare_events
from torchwhere.diagnose.diff.log_lines import Stripper, patterns
from torchwhere.diagnose.diff.logs import Log, compare_logs, ranks_of

LOG_NAMES = "log_rank_*.txt"  # as torchwhere.rank_log and DeepSpeed's log_rank_file write them
_LOG_ENDINGS = (".txt", ".log", ".out", ".err")


@dataclass(frozen=True, slots=True, repr=False)
class Diff(Shown):
    """What ranks have in common and where they part; None for what there was not."""

    logs: Comparison | None
    events: Comparison | None

    @property
    def is_equal(self) -> bool:
        return not any(found.divergences for found in (self.logs, self.events) if found is not None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "equal": self.is_equal,
            "logs": self.logs.to_dict() if self.logs is not None else None,
            "events": self.events.to_dict() if self.events is not None else None,
        }


def diff(
    run: BoxRun | None,
    *,
    logs: Sequence[Path] = (),
    ranks: set[int] | None = None,
    strip: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> Diff:
    """Compare the events of a run and the logs in some files. `strip` and `ignore` are regular
    expressions: what else may differ in a line or a name, and lines and events to leave out."""
    stripping, ignoring = patterns(strip), patterns(ignore)
    labels = (
        {rank: one for rank, one in run.summaries.items() if ranks is None or rank in ranks}
        if run is not None
        else {}
    )
    files = (
        {rank: path for rank, path in ranks_of(logs).items() if ranks is None or rank in ranks}
        if logs
        else {}
    )
    hosts = {rank: str(box.meta.get("host") or "") for rank, box in labels.items()}
    texts = {
        rank: Log(path, Stripper(rank, hosts.get(rank), stripping), ignoring)
        for rank, path in files.items()
    }
    if len(labels) < 2 and len(texts) < 2:
        raise TorchwhereError(
            "nothing to compare: there are neither boxes nor logs of two ranks or more"
        )
    return Diff(
        logs=compare_logs(texts) if len(texts) > 1 else None,
        events=compare_events(run.boxes, sorted(labels), strip=stripping, ignore=ignoring)
        if run is not None and len(labels) > 1
        else None,
    )


def find_logs(folder: Path, where: str | None) -> list[Path]:
    """The log files: those in the run's folder, or those of another folder or of a pattern like
    `logs/*/stdout.log`."""
    if where is None:
        return sorted(folder.glob(LOG_NAMES))
    if Path(where).is_dir():
        found = sorted(Path(where).glob(LOG_NAMES))
        found = found or sorted(
            path
            for path in Path(where).rglob("*")
            if path.suffix in _LOG_ENDINGS and path.is_file()
        )
    else:
        pattern = Path(where)
        root = Path(pattern.anchor) if pattern.is_absolute() else Path()
        found = sorted(
            path for path in root.glob(str(pattern.relative_to(pattern.anchor))) if path.is_file()
        )
    if not found:
        raise TorchwhereError(f"--logs {where}: there is no such file")
    return found
