"""Programs that use the accelerator of `simulated_device.cpp` and the native extension."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from torchwhere.native import build as building
from warm_python import WarmPython

HERE = Path(__file__).parent
_INTERFACE = building._HEADERS[0] / "c10" / "core" / "impl" / "DeviceGuardImplInterface.h"
captures = pytest.mark.skipif(
    "isStreamCapturing" not in _INTERFACE.read_text(),
    reason="this torch does not ask a device whether a stream is captured",
)
PROGRAM = """
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
import torch, torch.distributed as dist, torchwhere
from simulated_jobs import buffer, join_group, load_device
from torchwhere.native.load import native

library, folder = Path(sys.argv[1]), Path(sys.argv[2])
sim, part = load_device(library), native()

def settle(count):
    "Wait until the harvester has seen so many marks."
    deadline = time.monotonic() + 60
    while part.device_status()["harvested"] < count:
        assert time.monotonic() < deadline, part.device_status()
        time.sleep(0.01)

"""


class Tools(NamedTuple):
    """Starts programs that use the accelerator and the native extension."""

    warm: WarmPython
    library: Path  # the accelerator
    env: dict[str, str]

    def run(self, code: str, folder: Path) -> Any:
        """Run a program to its end. Returns what it prints as JSON."""
        done = self.warm.run(
            "-c", PROGRAM + code, self.library, folder, HERE, cwd=folder, env=self.env, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert "hook" not in done.stderr, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


def make_tools(warm: WarmPython, library: Path, folder: Path) -> Tools:
    """Compile the accelerator in this folder. `library` is the native extension."""
    shared = folder / "simulated_device.so"
    command = building._command(building.check_tools(), "c++20", shared)
    source = command.index(str(building.SOURCES / "native.cpp"))
    command[source] = str(HERE / "simulated_device.cpp")
    subprocess.run([*command, "-ltorch_python", "-ltorch"], check=True, timeout=400)
    settings = {"TORCHWHERE_NATIVE": "1", "XDG_CACHE_HOME": str(library.parent.parent)}
    ranks = {"RANK": "0", "WORLD_SIZE": "1"}
    return Tools(warm, shared, os.environ | settings | ranks)
