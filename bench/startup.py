"""`python -m bench.startup [ROUNDS]`: what the start-up hook costs a process without torch.

Measures the CPU time of `python -c pass` in a new virtual environment, alternating: without the
hook, with the installed .pth file, and with `sitecustomize` on the PYTHONPATH. The environment
contains nothing else, so a start is as short as it can be.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import venv
from pathlib import Path

import torchwhere_startup

SOURCE = Path(torchwhere_startup.__file__).parent
HOOK = SOURCE / "torchwhere" / "startup" / "python_path"
FILES = ("torchwhere_startup.py", "torchwhere_startup.pth")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    with tempfile.TemporaryDirectory() as folder:
        plain, hooked = (_environment(Path(folder) / name) for name in ("plain", "hooked"))
        (packages,) = hooked.parent.parent.glob("lib/python*/site-packages")
        for name in FILES:
            (packages / name).write_bytes((SOURCE / name).read_bytes())
        path = {"PYTHONPATH": f"{HOOK}{os.pathsep}{SOURCE}"}
        out = {"TORCHWHERE_OUT": "run"}
        contenders = {
            "without the hook": (plain, {}),
            "without the hook, a second time": (plain, {}),
            "installed, TORCHWHERE_OUT not set": (hooked, {}),
            "installed, TORCHWHERE_OUT set": (hooked, out),
            "on the PYTHONPATH, TORCHWHERE_OUT set": (plain, path | out),
        }
        times_ms: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, (python, variables) in contenders.items():
                times_ms[name].append(_start_ms(python, variables))
    base = times_ms["without the hook"]
    for name, times in times_ms.items():
        added = [time - other for time, other in zip(times, base, strict=True)]
        print(
            f"{name}: {statistics.median(times):.2f} ms, smallest {min(times):.2f};"
            f" added {statistics.median(added):.2f}, smallest {min(times) - min(base):.2f}"
        )


def _environment(folder: Path) -> Path:
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


def _start_ms(python: Path, variables: dict[str, str]) -> float:
    """The CPU time of one process, in ms."""
    environment = {"PATH": os.environ["PATH"]} | variables
    pid = os.posix_spawn(python, [str(python), "-c", "pass"], environment)
    _, status, usage = os.wait4(pid, 0)
    assert status == 0
    return 1000 * (usage.ru_utime + usage.ru_stime)


if __name__ == "__main__":
    main()
