"""The file `gpu-<host>.json` in the folder of a run: the GPUs of a host, as its monitor sampled
them.

The file has a bounded size: the last `KEPT` samples of each GPU, about 6 KB a GPU. It is replaced
atomically. A damaged file is ignored.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from torchwhere.core.atomic_file import replace_file
from torchwhere.gpus.samples import HostGpus

KEPT = 24  # samples of each GPU
SAMPLE_S = 5.0
_PREFIX = "gpu-"
_MOST_BYTES = 1 << 22


def write_gpus(folder: Path, host_gpus: HostGpus) -> bool:
    """Replace the file of a host. Returns False if the system refuses."""
    name = re.sub(r"[^\w.-]", "_", host_gpus.host)
    content = json.dumps(host_gpus.to_dict(), separators=(",", ":"))
    return replace_file(folder / f"{_PREFIX}{name}.json", content)


def read_gpus(folder: Path) -> list[HostGpus]:
    """Read the files of all hosts."""
    hosts = []
    for path in sorted(folder.glob(f"{_PREFIX}*.json")):
        value = _json(path)
        if isinstance(value, dict):
            hosts.append(HostGpus.from_dict(value))
    return hosts


def _json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
