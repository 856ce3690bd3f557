"""Counts the files of torchwhere that one `all_reduce` passes, from the hook to the verdict.

    python -m bench.files_passed

Prints the files in which a function runs, for one `all_reduce` in a watched process (Python code,
after a few such calls) and for one `torchwhere.doctor()` on 16 synthetic ranks (in a process that
has called it before, so that imports do not count).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torchwhere

ROOT = Path(__file__).parent.parent
SOURCES = str(Path(torchwhere.__file__).parent) + os.sep


def files_passed(call: Callable[[], object]) -> list[str]:
    """Run a function and return the files of torchwhere that it passes, in order of first use."""
    files: dict[str, None] = {}

    def trace(frame: FrameType, _event: str, _argument: object) -> None:
        name = frame.f_code.co_filename
        if name.startswith(SOURCES):
            files.setdefault(name.removeprefix(SOURCES))

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return list(files)


def recording() -> list[str]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(4)

    def issue() -> None:  # always from the same line, as in a training loop
        dist.all_reduce(tensor)

    with tempfile.TemporaryDirectory() as folder, torchwhere.watch(out=folder):
        for _ in range(5):
            issue()
        files = files_passed(issue)
    dist.destroy_process_group()
    return files


def diagnosing() -> list[str]:
    sys.path.insert(0, str(ROOT / "tests"))
    from synthetic_boxes import make
    from synthetic_job import Job

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        make(Job(16, steps=8, records=1024, fault="missing", victim=9), folder)
        torchwhere.doctor(folder)
        return files_passed(lambda: torchwhere.doctor(folder))


def main() -> None:
    os.environ["TORCHWHERE_NATIVE"] = "0"
    for title, files in (("recording", recording()), ("one doctor call", diagnosing())):
        print(f"{title}: {len(files)} files")
        print("  " + "\n  ".join(files))


if __name__ == "__main__":
    main()
