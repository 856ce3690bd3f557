"""The files `attach-<host>.json`: what `torchwhere attach` saw of the ranks of one host.

One folder holds the files of all hosts of a job; a later look at a host replaces its file. A file
has states, stacks and rank variables, and no other variables of the job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchwhere.core.atomic_file import destination
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.version import __version__
from torchwhere.processes.observation import RankObservation

_PREFIX = "attach-"
_FORMAT = 1
_MOST_BYTES = 1 << 28


def write_observations(folder: Path, ranks: Sequence[RankObservation]) -> Path:
    """Write the ranks of one host to its file, and return the path.

    Raises:
        TorchwhereError: The folder cannot be written.
    """
    host = re.sub(r"[^\w.-]", "_", ranks[0].host)
    path = folder / f"{_PREFIX}{host}.json"
    values = {
        "format": _FORMAT,
        "torchwhere": __version__,
        "ranks": [observation.to_dict() for observation in ranks],
    }
    with destination(path) as file:
        file.write(json.dumps(values, indent=1).encode())
    return path


def read_observations(folder: str | Path) -> dict[int, RankObservation]:
    """Read the ranks of all hosts. If two files have the same rank, the newer look counts.

    Raises:
        TorchwhereError: The folder has no file that can be read.
    """
    paths = sorted(Path(folder).glob(f"{_PREFIX}*.json"))
    if not paths:
        raise TorchwhereError(
            f"{folder} holds nothing that torchwhere attach has written ({_PREFIX}*.json). Write it"
            f" with: torchwhere attach --all --out {folder}"
        )
    ranks: dict[int, RankObservation] = {}
    for path in paths:
        for value in _ranks_in(path):
            observation = RankObservation.from_dict(value)
            if observation is not None and observation.seen_ns >= (
                ranks[observation.rank].seen_ns if observation.rank in ranks else 0
            ):
                ranks[observation.rank] = observation
    if not ranks:
        raise TorchwhereError(f"{paths[0]} has no ranks. Write it again with torchwhere attach")
    return dict(sorted(ranks.items()))


def _ranks_in(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise TorchwhereError(f"cannot read {path}: {error}") from None
    ranks = content.get("ranks") if isinstance(content, dict) else None
    if not isinstance(ranks, list) or content.get("format") != _FORMAT:
        raise TorchwhereError(
            f"{path} was not written by this version of torchwhere attach. Write it again"
        )
    return [value for value in ranks if isinstance(value, dict)]
