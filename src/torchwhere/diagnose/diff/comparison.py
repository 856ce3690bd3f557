"""Compares ranks that should do the same: their events and their logs, without what may differ.

Takes the boxes of a run, or text files, one for each rank; gives a `Diff`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchwhere.blackbox.run import BoxRun
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.results import Shown, plain_fields
from torchwhere.diagnose.diff.cohorts import Comparison
from torchwhere.diagnose.diff.events import compare_events
from torchwhere.diagnose.diff.log_lines import Stripper, patterns
from torchwhere.diagnose.diff.logs import Log, compare_logs, ranks_of

LOG_NAMES = "log_rank_*.txt"  # as torchwhere.rank_log and DeepSpeed's log_rank_file write them
_LOG_ENDINGS = (".txt", ".log", ".out", ".err")


@dataclass(frozen=True, slots=True, repr=False)
class Diff(Shown):
    """Where the ranks of a run diverge. `str()` shows the first place.

    Attributes:
        logs: The comparison of the logs; None if there was nothing to compare.
        events: The comparison of the events; None if there was nothing to compare.

    Example:
        diff = torchwhere.read_run("run/").diff()
        print("equal" if diff.is_equal else diff)
    """

    logs: Comparison | None
    events: Comparison | None

    @property
    def is_equal(self) -> bool:
        """Whether neither the logs nor the events diverge."""
        return not any(side.divergences for side in (self.logs, self.events) if side is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparisons as values for JSON."""
        return {"equal": self.is_equal} | plain_fields(self)


def diff(
    run: BoxRun | None,
    *,
    logs: Sequence[Path] = (),
    ranks: set[int] | None = None,
    strip: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> Diff:
    """Compare the events of a run and the log files.

    Args:
        run: The boxes; None to compare only logs.
        logs: Log files, one for each rank.
        ranks: Compare only these ranks.
        strip: Regular expressions for parts of a line or a name that may differ.
        ignore: Regular expressions for lines and events to leave out.
    """
    stripping, ignoring = patterns(strip), patterns(ignore)
    summaries = {} if run is None else run.summaries
    boxes = {rank: box for rank, box in summaries.items() if ranks is None or rank in ranks}
    hosts = {rank: str(box.meta.get("host") or "") for rank, box in boxes.items()}
    files = ranks_of(logs) if logs else {}
    texts = {
        rank: Log(path, Stripper(rank, hosts.get(rank), stripping), ignoring)
        for rank, path in files.items()
        if ranks is None or rank in ranks
    }
    if len(boxes) < 2 and len(texts) < 2:
        raise TorchwhereError(
            "nothing to compare: there are neither boxes nor logs of two ranks or more"
        )
    events = None
    if run is not None and len(boxes) > 1:
        events = compare_events(run.boxes, sorted(boxes), strip=stripping, ignore=ignoring)
    return Diff(logs=compare_logs(texts) if len(texts) > 1 else None, events=events)


def find_logs(folder: Path, where: str | None) -> list[Path]:
    """The log files of the run folder or, with `where`, of another folder or of a pattern like
    `logs/*/stdout.log`."""
    if where is None:
        return sorted(folder.glob(LOG_NAMES))
    if Path(where).is_dir():
        paths = sorted(Path(where).glob(LOG_NAMES)) or sorted(
            path
            for path in Path(where).rglob("*")
            if path.suffix in _LOG_ENDINGS and path.is_file()
        )
    else:
        pattern = Path(where)
        root = Path(pattern.anchor) if pattern.is_absolute() else Path()
        matches = root.glob(str(pattern.relative_to(pattern.anchor)))
        paths = sorted(path for path in matches if path.is_file())
    if not paths:
        raise TorchwhereError(f"--logs {where}: there is no such file")
    return paths
