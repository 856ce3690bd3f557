"""`torchwhere run` runs the script as Python itself would. Real launches, compared with plain
`python`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from torchwhere.blackbox.file_names import STALL_MARK
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.run import read_run
from torchwhere.processes.fault_handler import stall_stack
from warm_python import WarmPython

BIN = Path(sys.executable).parent
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("RANK", "WORLD_SIZE", "FORCE_COLOR")
}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1"}
SEEN = """
import json, os, sys

def seen():
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "name": __name__,
        "path": sys.path[:2],
        "file": __file__,
        "package": __package__,
        "is_main": vars(main) is globals(),
    }
"""


class Ended(NamedTuple):
    """How a process ended."""

    code: int
    out: str
    err: str


def start(*command: object, folder: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*map(str, command)], cwd=folder, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True
    )


def end(process: subprocess.Popen[str]) -> Ended:
    out, err = process.communicate(timeout=400)
    return Ended(process.returncode, out, err)


def ending(folder: Path, rank: int = 0) -> str:
    """The recorded reason why a rank's watch ended."""
    *_, last = read_run(folder).boxes[rank].events()
    assert last.kind == "end"
    return str(last.fields["reason"])


# -- a job that goes well --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks under torchrun; the script is in another folder than the working directory."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "code").mkdir()
    (folder / "code" / "neighbour.py").write_text("NAME = 'neighbour'\n")
    (folder / "code" / "train.py").write_text(
        SEEN
        + """
import neighbour, torch, torch.distributed as dist
if __name__ == "__main__":
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    with open(f"seen{dist.get_rank()}.json", "w") as file:
        json.dump(seen() | {"neighbour": neighbour.NAME}, file)
    dist.destroy_process_group()
"""
    )
    launcher = (BIN / "torchrun", "--standalone", "--nproc-per-node", 2, "-m", "torchwhere", "run")
    ended = end(
        start(
            *launcher,
            "--out",
            "boxes",
            "code/train.py",
            "--lr",
            "1e-3",
            "--out",
            "mine",
            folder=folder,
        )
    )
    assert ended.code == 0, ended.err
    return folder


def test_script_finds_itself_at_home(job: Path) -> None:
    """Under torchrun a script sees its own arguments, is `__main__`, and imports from its own
    folder first."""
    for rank in (0, 1):
        seen = json.loads((job / f"seen{rank}.json").read_text())
        assert seen["argv"] == ["code/train.py", "--lr", "1e-3", "--out", "mine"]
        assert seen["path"][0] == str(job / "code")
        assert str(job) not in seen["path"]
        assert seen["file"] == str(job / "code" / "train.py")
        assert (seen["name"], seen["package"], seen["is_main"], seen["neighbour"]) == (
            "__main__",
            None,
            True,
            "neighbour",
        )


def test_every_rank_is_recorded(job: Path) -> None:
    """Each rank leaves a box with its start, its collectives and the reason of its end."""
    run = read_run(job / "boxes")
    assert sorted(run.boxes) == [0, 1]
    assert run.caveats() == []
    for rank, box in run.boxes.items():
        first, *_ = box.events()
        (collective,) = box.events(kinds={"collective"})
        assert (first.kind, first.fields["text"]) == ("start", "code/train.py --lr 1e-3 --out mine")
        assert (collective.fields["op"], collective.place.line, collective.place.rank) == (
            "all_reduce",
            "code/train.py:18",
            rank,
        )
        assert ending(job / "boxes", rank) == "exit 0"


def test_module_as_script(tmp_path: Path) -> None:
    """`run -m pkg.train` is `python -m pkg.train`, arguments and relative imports included."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "sizes.py").write_text("WIDTH = 8\n")
    (tmp_path / "pkg" / "train.py").write_text(
        SEEN + "from .sizes import WIDTH\nprint(json.dumps(seen() | {'width': WIDTH}))\n"
    )
    plain = start(sys.executable, "-m", "pkg.train", "-x", folder=tmp_path)
    watched = start(
        BIN / "torchwhere", "run", "--out", "boxes", "-m", "pkg.train", "-x", folder=tmp_path
    )
    expected, found = end(plain), end(watched)
    assert (found.code, found.err) == (0, "")
    assert json.loads(found.out) == json.loads(expected.out)
    assert json.loads(found.out)["argv"] == [str(tmp_path / "pkg" / "train.py"), "-x"]
    assert ending(tmp_path / "boxes") == "exit 0"


# -- scripts that do not go well -------------------------------------------------------------------

NESTED = "def fails():\n    raise {error}\n\ndef calls():\n    fails()\n\ncalls()\n"
SCRIPTS = {
    "raises": (
        """
try:
    1 / 0
except ArithmeticError as error:
    raise ValueError("two\\nlines") from error
"""
    ),
    "exits": "import sys\nsys.exit(3)\n",
    "exits_with_text": "import sys\nsys.exit('no data in /data')\n",
    "interrupted": "raise KeyboardInterrupt\n",
    "syntax": "def f(:\n    pass\n",
    "broken_pipe": NESTED.format(error="BrokenPipeError('mine')"),
    "torchwheres_own": "from torchwhere import read_run\nread_run('nowhere')\n",
    "own_hook": (
        """
import sys

class Odd(Exception):
    def __str__(self):
        raise RuntimeError("not to be printed")

sys.excepthook = lambda kind, error, tb: print(kind, tb.tb_frame.f_code.co_filename, tb.tb_lineno)
raise Odd
"""
    ),
    "in_a_module": (
        """
import torch
from torch import nn

class Broken(nn.Module):
    def forward(self, x):
        raise ValueError("boom")

nn.Sequential(nn.Linear(2, 2), Broken())(torch.ones(1, 2))
"""
    ),
    "main_stays": (
        """
import atexit, multiprocessing, pickle

class Thing:
    pass

def answer(of: 1 + 1 = 2):
    return 42

if __name__ == "__main__":
    atexit.register(lambda: print(pickle.loads(pickle.dumps(Thing())).__class__.__module__))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(answer.__annotations__, pool.apply(answer))
"""
    ),
}
REASONS = {
    "raises": "exception: ValueError: two\nlines",
    "exits": "exit 3",
    "exits_with_text": "exit 1",
    "interrupted": "exception: KeyboardInterrupt",
    "broken_pipe": "exception: BrokenPipeError: mine",
    "in_a_module": "exception: ValueError: boom",
    "own_hook": "exception: Odd",
    "main_stays": "exit 0",
}
FROM_SCRATCH = ("raises", "main_stays")  # in a new Python, not in a fork that has imported torch
NOTES = {
    "raises": "torchwhere: rank 0, step 0, outside any module, raises.py:5; no collective so far",
    "in_a_module": (
        "torchwhere: rank 0, step 0, forward of 1, in_a_module.py:7; no collective so far"
    ),
}


@pytest.fixture(scope="module")
def scripts(
    warm: WarmPython, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, tuple[Ended, Ended]]]:
    """Each script, once with plain Python and once under a watch."""
    folder = tmp_path_factory.mktemp("scripts")

    def both(name: str) -> tuple[Ended, Ended]:
        (folder / f"{name}.py").write_text(SCRIPTS[name])
        plain = start(sys.executable, f"{name}.py", folder=folder)
        command = ("-m", "torchwhere", "run", "--out", name, f"{name}.py")
        if name in FROM_SCRATCH:
            watched = end(start(sys.executable, *command, folder=folder))
        else:
            watched = Ended(*warm.run(*command, cwd=folder, env=ENVIRONMENT))
        return end(plain), watched

    return folder, {name: both(name) for name in SCRIPTS}


FRAME = r'^  File ".*/{file}.*\n(    .*\n)*'


def without_note(traceback: str) -> str:
    return re.sub(r"^torchwhere: .*\n", "", traceback, flags=re.MULTILINE)


def without_module_calls(traceback: str) -> str:
    """A traceback without the frames between a module call and its forward: torch and torchwhere
    have frames there."""
    frames = "|".join(
        FRAME.format(file=file) for file in ("torchwhere/hooks/", "torch/nn/modules/module.py")
    )
    return re.sub(frames, "", traceback, flags=re.MULTILINE)


@pytest.mark.parametrize("name", SCRIPTS)
def test_ends_as_without_us(scripts: Any, name: str) -> None:
    """Exit code, output, exception and traceback of a script equal those of plain Python, except
    for our note."""
    plain, watched = scripts[1][name]
    assert watched.code == plain.code
    assert watched.out == plain.out
    if name == "in_a_module":
        assert without_module_calls(without_note(watched.err)) == without_module_calls(plain.err)
    else:
        assert without_note(watched.err) == plain.err


def test_the_reason_is_recorded(scripts: Any) -> None:
    """The last event of a run says how it ended: its exit code or its exception."""
    folder, _ = scripts
    assert {name: ending(folder / name) for name in REASONS} == REASONS


def test_a_note_says_the_place(scripts: Any) -> None:
    """An exception carries one note with rank, step, pass, module and line; a deliberate exit
    carries none."""
    _, ended = scripts
    for name, note in NOTES.items():
        assert ended[name][1].err.splitlines()[-1] == note
    for name in ("exits", "exits_with_text", "main_stays"):
        assert "torchwhere:" not in ended[name][1].err
    assert all(watched.err.count("torchwhere: rank") <= 1 for _, watched in ended.values())


def test_an_exception_is_an_event(scripts: Any) -> None:
    """An exception of a script is in its box, with its place, also if it was raised outside any
    module."""
    folder, _ = scripts
    for name, place in (
        ("broken_pipe", (None, "broken_pipe.py:2")),
        ("in_a_module", ("1", "in_a_module.py:7")),
    ):
        (event,) = read_run(folder / name).events(kinds={"exception"})
        assert event.fields["text"] == REASONS[name].removeprefix("exception: ")
        assert (event.place.module, event.place.line) == place


# -- scripts that cannot be started ----------------------------------------------------------------


def test_the_console_script_is_not_the_users(tmp_path: Path) -> None:
    """If no frame of a stack is the user's own, the console script `torchwhere` is not shown as the
    user's line, neither in an event nor in a stack."""
    (tmp_path / "site-packages").mkdir()
    script = tmp_path / "site-packages" / "train.py"
    script.write_text(
        "import faulthandler, torchwhere\n"
        "torchwhere.note('here')\n"
        "with open('stack', 'w') as file:\n"
        "    faulthandler.dump_traceback(file, all_threads=False)\n"
    )
    ended = end(start(BIN / "torchwhere", "run", "--out", "boxes", script, folder=tmp_path))
    assert (ended.code, ended.err) == (0, "")
    (note,) = read_run(tmp_path / "boxes").boxes[0].events(kinds={"note"})
    assert "bin/torchwhere" not in str(note.place.line)
    text = (tmp_path / "stack").read_text()
    assert "bin/torchwhere" in text
    stack, _ = stall_stack(text.replace(text.splitlines()[0], f"{STALL_MARK}2"), last_ns=1)
    assert stack == (f"{script}:4 in <module>",)


def test_script_that_does_not_exist(tmp_path: Path) -> None:
    """A missing script or module gives one line and exit code 2, and nothing is written."""
    (tmp_path / "folder.py").mkdir()
    script = start(BIN / "torchwhere", "run", "--out", "boxes", "nope.py", folder=tmp_path)
    module = start(BIN / "torchwhere", "run", "--out", "boxes", "-m", "nope.train", folder=tmp_path)
    assert end(script) == (
        2,
        "",
        (
            "torchwhere: there is no script nope.py. Give the path of a file, -m and a module name, or"
            " a program such as torchrun.\n"
        ),
    )
    assert end(module) == (
        2,
        "",
        (
            "torchwhere: there is no module nope.train. Give a module name as for python -m, or"
            " leave out -m and give the path of a file.\n"
        ),
    )
    folder = end(start(BIN / "torchwhere", "run", "--out", "boxes", "folder.py", folder=tmp_path))
    assert (
        folder.err
        == "torchwhere: there is no script folder.py. Give the path of a file, -m and a module name,"
        " or a program such as torchrun.\n"
    )
    assert not (tmp_path / "boxes").exists()


@pytest.mark.parametrize("knows_rank", [True, False])
def test_two_watchers_on_one_folder(warm: WarmPython, tmp_path: Path, knows_rank: bool) -> None:
    """A second job in the folder of a running job runs, and the first job is not disturbed. If the
    second is rank 0 for certain, it is not recorded; otherwise it has a box of another name."""
    (tmp_path / "first.py").write_text("input()\nprint('first is done')\n")
    (tmp_path / "second.py").write_text("print('second')\n")
    command = ("-m", "torchwhere", "run", "--out", "boxes")
    reading, writing = os.pipe()
    first = warm.start(*command, "first.py", cwd=tmp_path, env=ENVIRONMENT, stdin=reading)
    os.close(reading)
    rank = {"RANK": "0", "WORLD_SIZE": "1"} if knows_rank else {}
    try:
        while not (tmp_path / "boxes" / "rank0.box").exists():
            assert first.runs()
            time.sleep(0.01)
        second = warm.run(*command, "second.py", cwd=tmp_path, env=ENVIRONMENT | rank)
    finally:
        os.write(writing, b"\n")
        os.close(writing)
        code, out, _ = first.end()
    assert (second.returncode, second.stdout) == (0, "second\n")
    warning = (
        "torchwhere: nothing is recorded, boxes/rank0.box is being written by another process. Give"
        " every job its own folder (out=..., --out).\n"
    )
    assert second.stderr == (warning if knows_rank else "")
    assert (code, out) == (0, "first is done\n")
    boxes = sorted(path.name for path in (tmp_path / "boxes").glob("*.box"))
    assert len(boxes) == (1 if knows_rank else 2)
    (end,) = read_box(tmp_path / "boxes" / "rank0.box").events(kinds={"end"})
    assert end.fields["reason"] == "exit 0"


def test_folder_that_cannot_be_written(warm: WarmPython, tmp_path: Path) -> None:
    """If the folder is not writable, the script runs all the same, with one warning."""
    (tmp_path / "train.py").write_text("print('trained')\n")
    (tmp_path / "boxes").write_text("a file, not a folder")
    command = ("-m", "torchwhere", "run", "--out", "boxes", "train.py")
    ended = Ended(*warm.run(*command, cwd=tmp_path, env=ENVIRONMENT))
    assert (ended.code, ended.out) == (0, "trained\n")
    assert (
        ended.err
        == "torchwhere: nothing is recorded, boxes/rank0.box cannot be written: File exists\n"
    )
