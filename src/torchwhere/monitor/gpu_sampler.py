"""Samples the GPUs of this host while a job runs, and writes them to the folder of the run.

Runs in a thread of the monitor process: if a GPU no longer answers, NVML may block, and the monitor
must continue. Then there are no further samples, and the time of the last one shows it. Starts only
if a rank of this host uses an NVIDIA GPU.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchwhere.gpus.nvml import Nvml, NvmlError, Problem, open_nvml
from torchwhere.gpus.samples import KEPT, SAMPLE_S, Gpu, HostGpus, Xid, write_gpus

_MOST_XIDS = 16
_STOP_S = 2.0
_XID_S = 0.5
_MOST_PAUSE_S = 15.0


def uses_nvidia_gpu(metas: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a rank of this host has recorded that it uses an NVIDIA GPU."""
    host = socket.gethostname()
    return any(
        isinstance(device, dict) and device.get("type") == "cuda" and not device.get("hip")
        for meta in metas
        if meta.get("host") == host
        for device in meta.get("devices") or ()
    )


class GpuSampler:
    """Samples until `stop`. `start` may be called again and again."""

    def __init__(self, folder: Path, *, every_s: float = SAMPLE_S) -> None:
        self._folder = folder
        self._every_s = every_s
        self._host = HostGpus(socket.gethostname())
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchwhere-gpus", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Take a last sample and stop. A blocked thread ends with the process."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            nvml = open_nvml()
        except NvmlError as error:
            self._fail(error.problem, str(error))
            return
        try:
            self._host = replace(self._host, driver=nvml.driver(), gpus=tuple(nvml.gpus()))
            self._watch(nvml)
        except NvmlError as error:
            self._fail(error.problem, str(error))
        except Exception as error:  # a driver may fail in ways that NVML does not name
            self._fail(Problem.FAILED, f"{type(error).__name__}: {error}")
        finally:
            nvml.close()

    def _watch(self, nvml: Nvml) -> None:
        """Sample now and then. Xid errors are looked for more often: they come before an exit."""
        next_at = 0.0
        while True:
            is_over, began = self._over.is_set(), time.monotonic()
            xids = nvml.xids()
            is_due = is_over or began >= next_at
            if xids or is_due:
                gpus = (_with_xids(gpu, xids) for gpu in self._host.gpus)
                gpus = (_with_sample(gpu, nvml) for gpu in gpus) if is_due else gpus
                self._host = replace(self._host, gpus=tuple(gpus))
                write_gpus(self._folder, self._host)
            if is_over:
                return
            if is_due:  # a slow driver is asked less often
                pause_s = min(10 * (time.monotonic() - began), _MOST_PAUSE_S)
                next_at = began + max(self._every_s, pause_s)
            self._over.wait(min(_XID_S, self._every_s))

    def _fail(self, problem: Problem, detail: str) -> None:
        self._host = replace(self._host, problem=problem, problem_detail=detail)
        write_gpus(self._folder, self._host)


def _with_sample(gpu: Gpu, nvml: Nvml) -> Gpu:
    return replace(gpu, samples=(*gpu.samples[-KEPT + 1 :], nvml.sample(gpu)))


def _with_xids(gpu: Gpu, xids: list[tuple[str | None, Xid]]) -> Gpu:
    own = [xid for uuid, xid in xids if uuid in (gpu.uuid, None)]
    return replace(gpu, xids=(*gpu.xids, *own)[-_MOST_XIDS:])
