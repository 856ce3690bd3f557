"""Fixtures: every test is checked for what it leaves behind; ranks are real processes that all tests
share."""

from __future__ import annotations

import faulthandler
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import leaks
from rank_pool import Pool
from simulated_programs import Tools, make_tools
from warm_python import WarmPython

torch.set_num_threads(1)
# pytest leaves SIGBUS to faulthandler: what the tests find before a watch must be there after it.
faulthandler.enable()
# Tests use the Python code, whatever this machine has built; with TORCHWHERE_NATIVE=1 they use the
# native extension.
if os.environ.setdefault("TORCHWHERE_NATIVE", "0") == "1":
    from torchwhere.native.build import build

    build()
# What DeepSpeed compiles is kept with the environment. Torch waits for ever for the lock of a build
# that was killed.
extensions = Path(
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
)
for lock in extensions.glob("*/lock"):
    if time.time() - lock.stat().st_mtime > 300:
        lock.unlink()


# These files take longest. They start first, so that no worker is alone with one at the end.
LONGEST_FIRST = ("test_upstream.py", "test_hosts.py", "test_doctor.py", "test_page.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        name = item.path.name
        return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=turn)


@pytest.fixture(scope="module", autouse=True)
def only_new_objects_are_collected() -> None:
    """The two snapshots of each test collect garbage, which takes 0.3 s for all objects of torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_outlives_a_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """No hook, kernel, patch, mode, thread, handler, open box or variable outlives a test.

    A test whose libraries leave things of their own checks itself, around the watch alone.
    """
    before = leaks.snapshot()
    yield
    if request.node.get_closest_marker("checks_itself") is None:
        leaks.wait_for_threads(before)
    left = leaks.differences(before, leaks.snapshot())
    gc.freeze()  # the snapshots of the next test collect only new objects, and not for 0.1 to 0.7 s
    assert not left or request.node.get_closest_marker("checks_itself"), f"left behind: {left}"


@pytest.fixture(scope="session", autouse=True)
def building(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[str] | None]:
    """`torchwhere native`, if a test needs the library. The build takes a while, so it starts
    before the first test. Test processes of one run share a cache: one builds, the others wait."""
    if not any("library" in getattr(item, "fixturenames", ()) for item in request.session.items):
        yield None
        return
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    env = os.environ | {"XDG_CACHE_HOME": str(shared / "cache")}
    line = ["flock", str(shared / "building"), sys.executable, "-m", "torchwhere", "native"]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        yield process


@pytest.fixture(scope="session")
def library(building: subprocess.Popen[str]) -> Path:
    """The native extension, in its own cache."""
    out, err = building.communicate(timeout=900)
    assert building.returncode == 0, err
    state, _, path = out.strip().partition(": ")
    assert state in ("built", "already built")
    return Path(path)


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmPython]:
    """Runs Python programs in forks of a process that has imported torch."""
    python = WarmPython()
    yield python
    python.close()


@pytest.fixture(scope="session")
def tools(warm: WarmPython, library: Path, tmp_path_factory: pytest.TempPathFactory) -> Tools:
    return make_tools(warm, library, tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    sys.excepthook = hook  # torch installs one of its own and leaves it
