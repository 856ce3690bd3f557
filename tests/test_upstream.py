"""`make upstream`: runs a small fake checkout plain, watched and on the drop-ins, and lists what
differs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from upstream import cases, differences, files
from upstream.cases import FAILED, NOT_RUN, PASSED, Outcome
from upstream.processes import FileRun

ROOT = Path(__file__).parent.parent

TESTS = """
import os, subprocess, sys, time, unittest
import torch
from torch import nn

CALL = "import torch; print(torch.nn.Module.__call__ is torch.nn.Module._wrapped_call_impl)"


class TestCases(unittest.TestCase):
    def test_passes(self):
        self.assertEqual(nn.Linear(2, 2)(torch.ones(2)).shape, (2,))

    def test_fails(self):
        self.fail("always")

    @unittest.skip("never")
    def test_is_skipped(self):
        pass

    def test_unpatched(self):
        self.assertIs(nn.Module.__call__, nn.Module._wrapped_call_impl, "patched\\nin two lines")

    def test_unpatched_in_a_child(self):
        self.assertEqual(subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True).stdout, "True\\n")

    def test_only_watched(self):
        self.assertIsNot(nn.Module.__call__, nn.Module._wrapped_call_impl)

    def test_originals(self):
        from torch.distributed._tools import ModTracker
        from torch.utils.module_tracker import ModuleTracker
        self.assertEqual({ModTracker.__module__, ModuleTracker.__module__},
                         {"torch.distributed._tools.mod_tracker", "torch.utils.module_tracker"})

    def test_flaky(self):
        from torch.utils.module_tracker import ModuleTracker
        path = os.path.join(os.path.dirname(__file__), "ran")
        if not ModuleTracker.__module__.startswith("torch.") and not os.path.exists(path):
            open(path, "w").close()
            self.fail("the first time")


def test_other_sitecustomize():
    assert sys.modules.get("sitecustomize") is None or os.environ["MARK"] == "seen"
"""


def run(
    checkout: Path, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(
        [
            str(ROOT / "src"),
            *filter(None, [(env or {}).get("PYTHONPATH"), os.environ.get("PYTHONPATH")]),
        ]
    )
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "upstream",
            str(checkout),
            *arguments,
            "--json",
            str(checkout / "found.json"),
        ],
        cwd=ROOT,
        env={**os.environ, **(env or {}), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "test").mkdir()
    return tmp_path


def found_in(checkout: Path) -> dict[str, Any]:
    return dict(json.loads((checkout / "found.json").read_text()))


@pytest.mark.exhaustive
def test_what_differs_is_listed(checkout: Path) -> None:
    """Cases that pass in only one mode are listed, also those of spawned processes; cases that
    always fail and flaky cases are not."""
    (checkout / "test" / "test_made_up.py").write_text(TESTS)
    (checkout / "own").mkdir()
    (checkout / "own" / "sitecustomize.py").write_text("import os\nos.environ['MARK'] = 'seen'\n")
    done = run(
        checkout, "test_made_up.py", "--repeat", "1", env={"PYTHONPATH": str(checkout / "own")}
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (file,) = found_in(checkout)["files"]
    case = "test_made_up.py::TestCases::test_"
    assert {
        (one["case"], one["mode"], one["plain"], one["other"]) for one in file["differences"]
    } == {
        (f"{case}unpatched", "watched", "passed", "failed"),
        (f"{case}unpatched_in_a_child", "watched", "passed", "failed"),
        (f"{case}only_watched", "watched", "failed", "passed"),
        (f"{case}originals", "drop-ins", "passed", "failed"),
    }
    assert [(one["case"], one["other"]) for one in file["flaky"]] == [
        (f"{case}flaky", "failed, passed")
    ]
    assert file["runs"]["plain"]["cases"][f"{case}is_skipped"] == "skipped"
    assert {
        run["cases"]["test_made_up.py::test_other_sitecustomize"] for run in file["runs"].values()
    } == {"passed"}
    row = r"^ +9 +6 +1 +4 +1 +\d+ s +\d+ s +\d+ s  test_made_up.py$"
    assert re.search(row, done.stdout, re.MULTILINE), done.stdout
    assert f"  {case}unpatched: passed plain, failed watched: AssertionError:" in done.stdout


@pytest.mark.exhaustive
def test_nothing_differs(checkout: Path) -> None:
    """Without a difference the exit code is 0; a missing file is named; `-k` and `--modes`
    select."""
    (checkout / "test" / "test_made_up.py").write_text(TESTS)
    done = run(
        checkout, "test_made_up.py", "gone.py", "-k", "passes or fails", "--modes", "watched"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not in this checkout: gone.py\n" in done.stdout
    found = found_in(checkout)
    assert found["missing"] == ["gone.py"]
    assert {mode: len(run["cases"]) for mode, run in found["files"][0]["runs"].items()} == {
        "plain": 2,
        "watched": 2,
    }


@pytest.mark.exhaustive
def test_a_hang_is_a_difference(checkout: Path) -> None:
    """A case that hangs when watched, and ignores SIGINT, is listed as not run; the cases before it
    have their results; its processes are killed."""
    (checkout / "test" / "test_hangs.py").write_text(
        "import os, signal, subprocess, sys\n"
        "def test_before(): pass\n"
        "def test_hangs():\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "    if os.environ.get('TORCHWHERE_UPSTREAM') == 'watched':\n"
        "        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "        open('child', 'w').write(str(child.pid))\n"
        "        child.wait()\n"
    )
    done = run(checkout, "test_hangs.py", "--limit", "40", "--repeat", "0", "--modes", "watched")
    assert done.returncode == 1, done.stdout + done.stderr
    (file,) = found_in(checkout)["files"]
    assert [(one["case"], one["other"]) for one in file["differences"]] == [
        ("test_hangs.py::test_hangs", "not run")
    ]
    assert [(run["timed_out"], len(run["cases"])) for run in file["runs"].values()] == [
        (False, 2),
        (True, 1),
    ]
    child = int((checkout / "test" / "child").read_text())
    deadline = time.monotonic() + 30  # a killed process may run for another moment
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.exhaustive
def test_the_limit_selects_the_same_cases(checkout: Path) -> None:
    """If the plain run reaches the time limit, the other runs have the cases that it has reached,
    and the rest is not a difference."""
    (checkout / "test" / "test_long.py").write_text(
        "import os, time\n"
        "def test_before(): pass\n"
        "def test_long():\n"
        "    if os.environ['TORCHWHERE_UPSTREAM'] == 'plain':\n"
        "        time.sleep(600)\n"
        "def test_after(): pass\n"
    )
    done = run(checkout, "test_long.py", "--limit", "30", "--repeat", "0", "--modes", "watched")
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = found_in(checkout)["files"]
    reached = {"test_long.py::test_before": "passed"}
    assert [run["cases"] for run in file["runs"].values()] == [reached, reached]


@pytest.mark.exhaustive
def test_forked_ranks(checkout: Path) -> None:
    """With `--fork`, processes that a test spawns are forks, and watched if the mode is. The test
    can import a module beside it."""
    (checkout / "test" / "inner").mkdir()
    (checkout / "test" / "inner" / "__init__.py").touch()
    (checkout / "test" / "inner" / "beside.py").touch()
    (checkout / "test" / "inner" / "test_ranks.py").write_text(
        "import multiprocessing, os\n"
        "import beside\n"
        "from torch import nn\n"
        "MEMORY = []\n"
        "def rank(queue):\n"
        "    is_watched = nn.Module.__call__ is not nn.Module._wrapped_call_impl\n"
        "    queue.put((len(MEMORY), is_watched))\n"
        "def test_ranks():\n"
        "    MEMORY.append(1)\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=rank, args=(queue,))\n"
        "    process.start()\n"
        "    assert queue.get() == (1, os.environ['TORCHWHERE_UPSTREAM'] == 'watched')\n"
        "    process.join()\n"
    )
    done = run(checkout, "inner/test_ranks.py", "--fork", "--repeat", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = found_in(checkout)["files"]
    assert [list(run["cases"].values()) for run in file["runs"].values()] == [["passed"]] * 3


@pytest.mark.exhaustive
def test_an_intended_difference(checkout: Path) -> None:
    """A case that cannot pass on the drop-ins is listed with its reason, and is not an error."""
    case, reason = next(iter(files.INTENDED.items()))
    file, group, test = case.split("::")
    (checkout / "test" / file).write_text(
        "import unittest\n"
        "from torch.utils.module_tracker import ModuleTracker\n"
        f"class {group}(unittest.TestCase):\n"
        f"    def {test}(self):\n"
        "        self.assertTrue(ModuleTracker.__module__.startswith('torch.'))\n"
    )
    done = run(checkout, file, "--modes", "drop-ins", "--repeat", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = found_in(checkout)["files"]
    assert [one["case"] for one in result["intended"]] == [case]
    assert result["differences"] == []
    assert f"intended: {case}: {reason}" in done.stdout


def test_nothing_to_run(tmp_path: Path) -> None:
    """For a folder without any of the files, the exit code is 2 and the error names the folder."""
    done = run(tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        f"upstream: no test file to run below {tmp_path}\n",
    )
    assert done.stdout.count("not in this checkout: ") == len(files.DEFAULT)


def test_case_log(tmp_path: Path) -> None:
    """A case that passes or fails and has an error in teardown failed, with its first error; a torn
    line is left out; without a log there are no cases."""
    log = tmp_path / "cases.jsonl"
    lines = [
        {"case": "a/test_b.py::C::test_c", "result": FAILED, "message": "first"},
        {"case": "a/test_b.py::C::test_c", "result": FAILED, "message": "second"},
        {"case": "a/test_b.py::C::test_d", "result": PASSED, "message": ""},
        {"case": "a/test_b.py::C::test_d", "result": FAILED, "message": "teardown"},
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"case": "a/te')
    assert cases.read(log) == {
        "a/test_b.py::C::test_c": Outcome(FAILED, "first"),
        "a/test_b.py::C::test_d": Outcome(FAILED, "teardown"),
    }
    assert cases.read(tmp_path / "none") == {}


def test_what_is_run_again() -> None:
    """Cases that differ run again in one process, and alone after a timeout; cases with varying
    results are flaky."""
    asked: list[tuple[str, list[str]]] = []

    def ran(results: dict[str, str], *, timed_out: bool = False) -> FileRun:
        return FileRun(
            {name: Outcome(result) for name, result in results.items()}, 0.0, timed_out, 0, ""
        )

    def rerun(mode: str, names: Any) -> FileRun:
        asked.append((mode, list(names)))
        if mode == "plain":
            return ran(dict.fromkeys(names, PASSED))
        if "hangs" in names:
            return ran({}, timed_out=True)
        return ran({name: PASSED if name == "varies" else FAILED for name in names})

    first = {
        "plain": ran({"same": PASSED, "hangs": PASSED, "fails": PASSED, "varies": PASSED}),
        "watched": ran({"same": PASSED, "fails": FAILED, "varies": FAILED}, timed_out=True),
    }
    steady, flaky = differences.confirmed(first, "watched", rerun=rerun, repeat=1)
    assert [(one.case, one.other) for one in steady] == [("hangs", NOT_RUN), ("fails", FAILED)]
    assert [(one.case, one.other) for one in flaky] == [("varies", "failed, passed")]
    all_of_them = ["hangs", "fails", "varies"]
    assert asked == [
        ("plain", all_of_them),
        ("watched", all_of_them),
        *(("watched", [name]) for name in all_of_them),
    ]
