"""The jobs of `faulty_jobs.py`, with a thread in every rank that dumps the flight recorder when it
is asked to.

Asked by a file `dump` in the job's folder. A rank that is stopped, killed or holds the GIL leaves
no dump, as in life.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch

import faulty_jobs

_run = faulty_jobs.run


def run(name: str, victim: int, rank: int, folder: str) -> None:
    threading.Thread(target=_dump_when_asked, args=(Path(folder), rank), daemon=True).start()
    try:
        _run(name, victim, rank, folder)
    finally:  # a program that sees its end coming
        _dump(Path(folder), rank)


def _dump_when_asked(folder: Path, rank: int) -> None:
    while not (folder / "dump").exists():
        time.sleep(0.05)
    _dump(folder, rank)


def _dump(folder: Path, rank: int) -> None:
    recorder = torch._C._distributed_c10d
    dumps = {
        "pickle": recorder._dump_fr_trace(True, True, False),
        "json": recorder._dump_fr_trace_json(True, False),
    }
    for kind, data in dumps.items():
        (folder / kind).mkdir(exist_ok=True)
        half_written = folder / kind / f".{rank}"
        half_written.write_bytes(data)
        os.replace(half_written, folder / kind / f"trace_rank_{rank}")


def serve() -> None:
    faulty_jobs.run = run
    faulty_jobs.serve()
