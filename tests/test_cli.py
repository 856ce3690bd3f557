"""The command line: what each command prints for a real run, and its errors.

TORCHWHERE_REGENERATE=1 writes them anew; look at the difference before you keep it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import html
import inspect
import io
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console
from rich.text import Text

import torchwhere
from torchwhere.blackbox import file_format
from torchwhere.blackbox.run import read_run
from torchwhere.cli import COMMANDS, main
from torchwhere.commands.arguments import chosen_stall_s
from torchwhere.core.events import KIND_LABELS
from torchwhere.diagnose.comms.tree import comms
from torchwhere.render.text import comms_lines

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
PICTURE = ROOT / "docs" / "images" / "comms.svg"
BIN = Path(sys.executable).parent
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("RANK", "WORLD_SIZE", "FORCE_COLOR", "NO_COLOR")
}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "COLUMNS": "", "TERM": "xterm-256color"}

EXHAUSTIVE = pytest.mark.exhaustive
PLACE_FIELDS = {"kind", "rank", "step", "pass", "module", "call", "line", "graph", "thread", "t_ns"}
COLLECTIVE_FIELDS = {
    "op",
    "raw_op",
    "group",
    "number",
    "dtype",
    "shapes",
    "bytes",
    "for",
    "async",
    "peer",
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that `make demo` makes: two ranks, FSDP2."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    command = [
        BIN / "torchrun",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "torchwhere",
        "run",
        "--out",
        folder,
    ]
    subprocess.run(
        [*command, "examples/train_fsdp2.py"],
        cwd=ROOT,
        env=ENVIRONMENT,
        check=True,
        capture_output=True,
        timeout=400,
    )
    return folder


@pytest.fixture
def copy(demo: Path, tmp_path: Path) -> Path:
    """A copy of the run for tests that damage it."""
    return Path(shutil.copytree(demo, tmp_path / "run"))


def call_process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in its own process."""
    command = [BIN / "torchwhere", *map(str, arguments)]
    return subprocess.run(
        command, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=400
    )


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command here: a process takes 0.3 s, and few tests are about the process."""
    command = [*map(str, arguments)]
    with (
        mock.patch.dict(os.environ, ENVIRONMENT, clear=True),
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
        try:
            code = main(command)
        except SystemExit as error:  # argparse has printed the help or an error
            code = int(error.code or 0)
    return subprocess.CompletedProcess(command, code, stdout.getvalue(), stderr.getvalue())


def out(*arguments: object) -> str:
    done = call(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def refused(*arguments: object) -> str:
    """The error of a command that exits with 2 and prints nothing else."""
    done = call(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr.removeprefix("torchwhere: ").removesuffix("\n")


def objects(*arguments: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out(*arguments, "--json").splitlines()]


def assert_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("TORCHWHERE_REGENERATE"):
        path.write_text(text)
    assert text == path.read_text()


def without_times(text: str) -> str:
    """Events without the only column that always differs."""
    text = re.sub(r"^(rank +step) +time", r"\1   time", text)
    return re.sub(r"^( +\d+ +\d+) +\d+\.\d{3} ", r"\1  0.000 ", text, flags=re.MULTILINE)


# -- what is printed -------------------------------------------------------------------------------


def test_events_table(demo: Path) -> None:
    """`events` prints one aligned line per event, rank after rank."""
    assert_golden("demo-events.txt", without_times(out("events", demo, "--last", 30)))


def test_comms_tree(demo: Path) -> None:
    """`comms` prints the collectives below the modules that issued them."""
    assert_golden("demo-comms.txt", out("comms", demo))


def test_comms_json(demo: Path) -> None:
    """`comms --json` prints the same tree, with full names, as one object."""
    (found,) = objects("comms", demo)
    assert_golden("demo-comms.json", json.dumps(found, indent=1) + "\n")


def test_groups(demo: Path) -> None:
    """`groups` lists the process groups and their members."""
    assert (
        out("groups", demo)
        == "group  description  mesh dimension  backend  ranks\n0      default      -              "
        " gloo     0-1\n"
    )
    (group,) = objects("groups", demo)
    assert {key: group[key] for key in ("name", "desc", "ranks")} == {
        "name": "0",
        "desc": "default_pg",
        "ranks": [0, 1],
    }


def test_events_json_contract(demo: Path) -> None:
    """`events --json` prints one object per line with the documented fields, and the same numbers
    on both ranks."""
    events = objects("events", demo)
    assert all(event.keys() >= PLACE_FIELDS for event in events)
    collectives = [event for event in events if event["kind"] == "collective"]
    assert all(event.keys() >= PLACE_FIELDS | COLLECTIVE_FIELDS for event in collectives)
    streams = [
        [(e["group"], e["number"], e["op"], e["bytes"]) for e in collectives if e["rank"] == rank]
        for rank in (0, 1)
    ]
    assert streams[0] == streams[1]
    first = collectives[0]
    assert first | {"t_ns": 0, "thread": ""} == first | {
        "t_ns": 0,
        "thread": "",
        "kind": "collective",
        "rank": 0,
        "step": 0,
        "pass": "forward",
        "module": "",
        "call": 0,
        "line": "examples/train_fsdp2.py:44",
        "graph": None,
        "op": "all_gather_into_tensor",
        "group": "0",
        "number": 0,
        "dtype": "float32",
        "for": "",
        "peer": None,
    }


def test_events_can_be_chosen(demo: Path) -> None:
    """`--rank`, `--last` and `--kind` select events, and may be combined and repeated."""
    assert {event["rank"] for event in objects("events", demo, "--rank", 1)} == {1}
    assert [event["rank"] for event in objects("events", demo, "--last", 2)] == [0, 0, 1, 1]
    kinds = objects(
        "events", demo, "--kind", "optimizer", "--kind", "end", "--rank", 0, "--last", 2
    )
    assert [event["kind"] for event in kinds] == ["optimizer", "end"]
    assert {event["rank"] for event in objects("events", demo, "--rank", 0, "--rank", 1)} == {0, 1}
    (one,) = objects("comms", demo, "--rank", 1)
    assert one["ranks"] == [1]


def test_nothing_chosen(demo: Path) -> None:
    """If no event is of the requested kind, the command says so; this is not an error."""
    done = call("events", demo, "--kind", "compile_begin")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "",
        f"torchwhere: {demo} has no such events\n",
    )


@pytest.mark.parametrize(
    "command",
    [
        "events",
        *(pytest.param(name, marks=EXHAUSTIVE) for name in ("events --json", "comms", "groups")),
    ],
)
def test_head_may_stop_it(demo: Path, command: str) -> None:
    """`| head` ends a command early without any message, whichever process writes first."""
    for reader in ("head -n 1", "true"):
        script = f"set -o pipefail; {BIN}/torchwhere {command} {demo} | {reader}"
        done = subprocess.run(
            ["bash", "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=400
        )
        assert (done.returncode, done.stderr) == (0, "")


def terminal(*arguments: object, width: int, **environment: str) -> str:
    """The output of a command on a terminal of some width."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    process = subprocess.Popen(
        [BIN / "torchwhere", *map(str, arguments)], stdout=slave, env=ENVIRONMENT | environment
    )
    os.close(slave)
    printed = b""
    try:
        while block := os.read(master, 65536):
            printed += block
    except OSError:  # the other side has closed
        pass
    finally:
        os.close(master)
    assert process.wait(60) == 0
    return printed.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("width", [80, 200])
def test_fits_the_terminal(demo: Path, width: int) -> None:
    """On a terminal no line is wider than the terminal, and names are cut where they are least
    informative."""
    comms = terminal("comms", demo, width=width, TERM="dumb")
    events = terminal("events", demo, "--last", 12, "--rank", 0, width=width, TERM="dumb")
    assert max(map(len, (comms + events).splitlines())) <= width
    assert_golden(f"demo-{width}-columns.txt", comms + "\n" + without_times(events))


def test_colours(demo: Path) -> None:
    """A terminal gets colours unless NO_COLOR is set; a pipe gets none unless FORCE_COLOR is
    set."""
    assert "\x1b[32mforward" in terminal("comms", demo, width=120)
    assert "\x1b[32mforward" in call_process("comms", demo, FORCE_COLOR="1").stdout
    assert "\x1b[3" not in terminal("comms", demo, width=120, NO_COLOR="1")
    assert "\x1b" not in call_process("comms", demo).stdout


def test_terminal_without_unicode(demo: Path) -> None:
    """If the output encoding lacks Unicode, the tree is drawn in ASCII, and nothing fails."""
    done = call_process("comms", demo, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "| forward   all_gather_into_tensor" in done.stdout


def test_hostile_notes(tmp_path: Path) -> None:
    """Hostile notes, names and fields stay text on the terminal and valid JSON in a pipe."""
    evil = "\x1b]0;owned\x07\x1b[2J\r\n\u202eevil\x9b31m"
    with torchwhere.watch(out=tmp_path):
        torchwhere.note(evil, loss=float("nan"), **{evil: float("-inf")})
        torchwhere.note("long " * 10_000)
        with torchwhere.phase(evil):
            pass
    table = out("events", tmp_path)
    assert all(line.isprintable() and len(line) < 1200 for line in table.splitlines())
    assert "evil" in table
    assert all(
        line.isprintable()
        for line in terminal("events", tmp_path, width=80, TERM="dumb").splitlines()
    )

    def not_json(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = out("events", tmp_path, "--json").splitlines()
    note = next(
        found
        for line in lines
        if (found := json.loads(line, parse_constant=not_json))["kind"] == "note"
    )
    assert (note["text"], note["loss"], note[evil]) == (evil, "nan", "-inf")


# -- what the pages show ---------------------------------------------------------------------------


def test_pages_show_what_is_printed(demo: Path) -> None:
    """The docs show exactly what each command prints for the demo run."""
    shown = 0
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text()
        for command, old in re.findall(r"```console\n\$ torchwhere (.*)\n((?:.*\n)*?)```", text):
            printed = out(*command.replace("run/demo", str(demo)).split())
            shown += 1
            if os.environ.get("TORCHWHERE_REGENERATE"):
                text = text.replace(old, printed)
                page.write_text(text)
            else:
                assert without_times(old) == without_times(printed)
    assert shown == 2


def test_picture_is_of_this_version(demo: Path) -> None:
    """The picture in the README shows the current output of `comms`."""
    lines = list(comms_lines(comms(read_run(demo)), width=100))
    if os.environ.get("TORCHWHERE_REGENERATE"):
        console = Console(record=True, width=96, file=io.StringIO(), highlight=False)
        for line in [*lines, []]:
            console.print(Text.assemble(*line), soft_wrap=True)
        picture = console.export_svg(title="torchwhere comms run/demo", unique_id="comms")
        # no remote fonts
        PICTURE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))
    texts = html.unescape(
        "".join(re.findall(r"<text [^>]*>([^<]*)</text>", PICTURE.read_text()))
    ).replace("\xa0", " ")
    assert "".join(texts.split()) == "torchwherecommsrun/demo" + "".join(
        part for line in lines for part, _ in line
    ).replace(" ", "")


# -- for programs ----------------------------------------------------------------------------------

STUCK = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
os.write(1, b"{ours}\\n")  # one write: the ranks share a pipe
for step in range(100):
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1 and step == 3:
        time.sleep(600)
"""


def test_verdicts_of_monitors_as_json(tmp_path: Path) -> None:
    """A monitor prints its verdicts on stdout, one object per line; `run` prints them on stderr,
    because stdout belongs to the job."""
    (tmp_path / "train.py").write_text(STUCK)
    (tmp_path / "run").mkdir()
    launch = [
        BIN / "torchrun",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "torchwhere",
        "run",
        "--out",
        "run",
        "--json",
    ]
    pipes: dict[str, Any] = {
        "cwd": tmp_path,
        "env": ENVIRONMENT,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    job = subprocess.Popen(
        [*launch, "--stall", "4", "--end-with", "KILL", "train.py"], text=True, **pipes
    )
    while len(list((tmp_path / "run").glob("*.box"))) < 2:
        assert job.poll() is None
        time.sleep(0.05)
    command = [BIN / "torchwhere", "monitor", "run", "--stall", "1", "--json"]
    by_hand = subprocess.run(command, text=True, timeout=400, **pipes)
    printed, said = job.communicate(timeout=400)
    assert (by_hand.returncode, by_hand.stderr) == (0, "")
    first = json.loads(by_hand.stdout.splitlines()[0])
    assert printed.splitlines() == ["{ours}"] * 2
    second = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert "--- torchwhere ---" not in said
    assert "torchwhere: ending rank 1 " in said
    for verdict in (first, second):
        assert (verdict["kind"], verdict["culprits"]) == ("missing", [1])
        assert verdict["text"].startswith("HANG  2 ranks")
    assert set(first) == set(json.loads(call("doctor", tmp_path / "run", "--json").stdout))


JSON_COMMANDS = {
    "events": 12,
    "comms": 1,
    "groups": 1,
    "layout": 1,
    "phases": 1,
    "diff": 1,
    "doctor": 1,
    "top": 1,
    "flight-recorder -o dumps": 1,
    "export -o events.jsonl": 1,
    "report": 1,
    "report -o report.json": 1,
    "trace": 1,
    "trace -o traces/": 1,
}


@pytest.mark.parametrize("command", JSON_COMMANDS)
def test_json_and_nothing_else(
    demo: Path,
    tmp_path: Path,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With `--json` stdout has one object, for `events` one per line, and nothing else; after an
    error it is empty."""
    monkeypatch.chdir(tmp_path)
    name, *options = command.split()
    assert main([name, str(demo), "--json", *options]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) >= JSON_COMMANDS[command]
    assert len(found) == 1 or command == "events"
    (tmp_path / "empty").mkdir()
    assert main([name, "empty", "--json", *options, *["--force"] * (name == "export")]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err[:12], said.err.count("\n")) == ("", "torchwhere: ", 1)


def test_every_command_has_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command has `--json`."""

    def help_of(*command: str) -> str:
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        return capsys.readouterr().out

    names = re.findall(r"^    ([a-z-]+)\b", help_of(), re.MULTILINE)
    assert {command.partition(" ")[0] for command in JSON_COMMANDS} == set(names) - {
        "run",
        "monitor",
        "native",
        "attach",  # needs a process
    }
    assert all("--json" in help_of(name) for name in names)


def test_one_default_for_stall() -> None:
    """Every command with `--stall`, and `torchwhere.doctor`, calls a wait a hang after 30 s; with
    `--end-with` after 120 s, unless `--stall` is given."""
    commands = argparse.ArgumentParser().add_subparsers()
    for command in COMMANDS:
        command.add(commands)
    defaults = {name: sub.get_default("stall") for name, sub in commands.choices.items()}
    assert {name: value for name, value in defaults.items() if value is not None} == {
        "attach": 30.0,
        "doctor": 30.0,
        "top": 30.0,
    }
    for name in ("run", "monitor"):
        for options, expected in (
            ([], 30.0),
            (["--end-with", "SIGTERM"], 120.0),
            (["--end-with", "SIGTERM", "--stall", "30"], 30.0),
        ):
            assert chosen_stall_s(commands.choices[name].parse_args([*options, "."])) == expected
    assert inspect.signature(torchwhere.doctor).parameters["stall_s"].default == 30.0


# -- what cannot be written ------------------------------------------------------------------------

WRITING = [
    "report -o {}.html",
    "trace -o {}.json.gz",
    "trace -o {}/",
    "export -o {}.jsonl",
    "export -o {}.parquet",
]


@pytest.mark.parametrize("command", [*WRITING, "flight-recorder -o {}"])
@pytest.mark.parametrize("place", ["/proc/x", "{}/file/x", "/dev/full/x"])
def test_output_that_cannot_be_written(
    command: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command says that it cannot write before it opens a box: here no box is readable."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank0.box").write_bytes(b"no box at all")
    (tmp_path / "file").touch()
    target = place.format(tmp_path)
    name, *options = command.format(target).split()
    assert main([name, str(tmp_path / "run"), *options]) == 2
    assert capsys.readouterr().err.startswith(f"torchwhere: cannot write {target}")
    assert sorted(os.listdir(tmp_path)) == ["file", "run"]


INTERRUPTED = """
import os, signal, sys
from torchwhere.blackbox import reader
from torchwhere.cli import main
read = reader.BoxReader.read
def interrupted(self, path):
    seen.append(path)
    if len(seen) == {count}:
        os.kill(os.getpid(), signal.SIGINT)
    return read(self, path)
seen = []
reader.BoxReader.read = interrupted
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", WRITING)
def test_interrupted(command: str, copy: Path, tmp_path: Path) -> None:
    """Ctrl-C while reading or writing ends with one line and exit code 130; earlier files are
    unchanged, and there are no others."""
    name, *options = command.format(tmp_path / "old").split()
    again = ["--force"] * (name == "export")
    assert call(name, copy, *options).returncode == 0
    before = contents(tmp_path)
    (copy / "rank1.box").unlink()  # so that a new one would be written
    for count in (1, 2):
        python = [
            sys.executable,
            "-c",
            INTERRUPTED.format(count=count),
            name,
            copy,
            *options,
            *again,
        ]
        done = subprocess.run(python, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
        assert (done.returncode, done.stdout, done.stderr.splitlines()[-1]) == (
            130,
            "",
            "torchwhere: interrupted",
        )
        assert "Traceback" not in done.stderr
        assert contents(tmp_path) == before


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder but the boxes and resumable partial output."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path): path.read_bytes()
        for path in files
        if path.suffix != ".box" and ".parquet.part" not in str(path)
    }


@pytest.mark.parametrize(
    "command",
    ["comms", *(pytest.param(name, marks=EXHAUSTIVE) for name in ("events --json", "doctor"))],
)
def test_full_or_closed_output(demo: Path, command: str) -> None:
    """A full disk behind stdout gives one line and exit code 2; a closed stdout is not an error."""
    for end, code, message in (
        (">/dev/full", 2, "cannot continue: No space left on device\n"),
        (">&-", 0, ""),
        ("2>&-", 0, ""),
    ):
        script = f"{BIN}/torchwhere {command} {demo} {end}"
        done = subprocess.run(
            ["bash", "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=400
        )
        printed = done.returncode, done.stderr.rpartition("torchwhere: ")[2]
        assert printed == (code, message), script


# -- what cannot be read ---------------------------------------------------------------------------


def test_unknown_folder(tmp_path: Path) -> None:
    """A missing folder is refused, with the command that records one."""
    nowhere = tmp_path / "nowhere"
    expected = (
        f"there is no folder {nowhere}. Record one with: torchwhere run --out {nowhere} train.py"
    )
    assert [refused(command, nowhere) for command in ("events", "comms", "groups")] == [
        expected
    ] * 3


@pytest.mark.parametrize("command", ["doctor", "events", "comms", "groups", "top"])
def test_path_of_a_box(demo: Path, command: str) -> None:
    """The path of a box means the run in its folder, with all ranks."""
    done = call(command, demo / "rank1.box")
    assert (done.returncode, done.stderr) == (0, "")
    compared = slice(1, 2) if command == "top" else slice(None)  # `top` shows the time and ages
    assert done.stdout.splitlines()[compared] == call(command, demo).stdout.splitlines()[compared]


def test_path_of_a_box_from_python(demo: Path, tmp_path: Path) -> None:
    """`read_run`, `doctor` and `export` take the path of a box for its folder."""
    assert sorted(torchwhere.read_run(demo / "rank1.box").boxes) == [0, 1]
    assert sorted(torchwhere.doctor(demo / "rank1.box").ranks) == [0, 1]
    torchwhere.export(demo / "rank1.box", out=tmp_path / "events.jsonl")
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert {json.loads(line)["rank"] for line in lines} == {0, 1}


def test_empty_folder(tmp_path: Path) -> None:
    """A folder without boxes is refused, with the command that records some."""
    expected = (
        f"{tmp_path} holds no black box (*.box). Record one with: torchwhere run --out {tmp_path}"
        " train.py"
    )
    assert refused("events", tmp_path) == expected


def with_version(box: Path, version: int) -> None:
    """Rewrite both headers of a box as those of another version of the format."""
    data = bytearray(box.read_bytes())
    for start in (copy * file_format.HEADER_BYTES for copy in range(file_format.HEADER_COPIES)):
        struct.pack_into("<I", data, start + len(file_format.MAGIC), version)
        end = start + file_format.HEADER_BYTES - 4
        struct.pack_into("<I", data, end, zlib.crc32(data[start:end]))
    box.write_bytes(data)


def test_folder_of_another_version(copy: Path) -> None:
    """A box of another format among readable ones is a warning. If all boxes have an older format,
    one sentence says what to do."""
    with_version(copy / "rank1.box", 99)
    problem = (
        "written by a newer torchwhere (format 99); this version reads format"
        f" {file_format.VERSION}. Update torchwhere."
    )
    done = call("groups", copy)
    assert (done.returncode, "default" in done.stdout) == (0, True)
    assert (
        done.stderr
        == f"torchwhere: 1 of 2 ranks is watched: no box of rank 1\ntorchwhere: rank1.box: {problem}\n"
    )
    for rank in (0, 1):
        with_version(copy / f"rank{rank}.box", 1)
    assert refused("events", copy) == (
        "rank0.box was written by an older torchwhere (format 1); this version reads format 2."
        " Record the run again."
    )


def test_not_a_box(copy: Path) -> None:
    """A file that only looks like a box is named, and the other boxes are shown."""
    (copy / "rank7\x1b[2J.box").write_bytes(b"hello")
    done = call("comms", copy)
    assert done.returncode == 0
    assert (
        done.stderr
        == "torchwhere: rank7\N{REPLACEMENT CHARACTER}[2J.box: no readable header: not a black box,"
        " or damaged\n"
    )


def test_names_that_are_not_files(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder, a pipe or a dangling link with the name of a box is skipped without waiting."""
    (copy / "rank2.box").mkdir()
    os.mkfifo(copy / "rank3.box")
    (copy / "rank4.box").symlink_to("nowhere")
    for command in ("events", "comms", "groups", "diff", "doctor", "top", "phases", "layout"):
        assert main([command, str(copy)]) == 0, command
    assert main(["report", str(copy), "-o", "/dev/null"]) == 0
    assert main(["trace", str(copy), "-o", "/dev/null"]) == 0
    assert main(["export", str(copy), "-o", str(copy / "x.jsonl")]) == 0
    assert call("monitor", copy).returncode == 0
    assert "cannot read" not in capsys.readouterr().err


def test_missing_rank(copy: Path) -> None:
    """A run with missing ranks is shown as far as it exists, and the missing ranks are listed."""
    (copy / "rank1.box").unlink()
    done = call("comms", copy)
    assert (done.returncode, done.stderr) == (
        0,
        "torchwhere: 1 of 2 ranks is watched: no box of rank 1\n",
    )
    assert done.stdout.startswith("1 rank, steps 0-5, all on default")


def test_rank_that_does_not_exist(demo: Path) -> None:
    """A rank that does not exist is refused, with a list of those that do."""
    for command in ("events", "comms", "groups"):
        assert (
            refused(command, demo, "--rank", 7) == f"{demo} has no box of rank 7; it has ranks 0-1"
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["events", "x", "--kind", "colective"], "argument --kind: invalid choice: 'colective'"),
        (["events", "x", "--last", "0"], "argument --last: '0' is not a number of 1 or more"),
        (["events", "x", "--rank", "one"], "argument --rank: invalid int value: 'one'"),
        (
            ["run", "--records", "15", "x.py"],
            "argument --records: '15' is not a number of 16 or more",
        ),
        (
            ["doctor", "x", "--stall", "-1"],
            "argument --stall: '-1' is not a number of seconds of 0.01 or more",
        ),
        (["run"], "the following arguments are required: script"),
        ([], "the following arguments are required: COMMAND"),
        (["coms"], "invalid choice: 'coms'"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    """Wrong arguments end with exit code 2 and a message that names the argument."""
    done = call(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_kinds_are_named_in_the_help() -> None:
    """The help of `events` lists every kind of event."""
    words = set(re.findall(r"\w+", out("events", "--help")))
    assert set(KIND_LABELS) <= words


def test_version() -> None:
    """`--version` prints the version."""
    assert call_process("--version").stdout == f"torchwhere {torchwhere.__version__}\n"


# -- without torch ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torchless(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A Python with torchwhere, numpy and rich, without torch."""
    import numpy
    import rich

    folder = tmp_path_factory.mktemp("torchless")
    for home, names in (
        (Path(numpy.__file__).parents[1], ("numpy", "numpy.libs")),
        (Path(rich.__file__).parents[1], RICH),
    ):
        for name in names:
            if (home / name).exists():
                (folder / name).symlink_to(home / name)
    for name in ("torchwhere", "torchwhere_startup.py"):
        (folder / name).symlink_to(ROOT / "src" / name)

    def python(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-P", *map(str, arguments)]
        environment = ENVIRONMENT | {"PYTHONPATH": str(folder)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)

    assert "No module named 'torch'" in python("-c", "import torch").stderr
    return python


RICH = ("rich", "pygments", "markdown_it", "mdurl")


def test_reading_without_torch(demo: Path, torchless: Callable[..., Any]) -> None:
    """A run can be read without torch: table, tree, groups and JSON are the same."""
    for command in (["events"], ["events", "--json"], ["comms"], ["comms", "--json"], ["groups"]):
        done = torchless("-m", "torchwhere", *command, demo)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == out(*command, demo)


NEEDS_TORCH = (
    "torchwhere.{} needs PyTorch, which is not installed here: pip install torch. "
    "Reading what was recorded (torchwhere events, comms) works without it."
)


def test_watching_without_torch(tmp_path: Path, torchless: Callable[..., Any]) -> None:
    """Without torch, a watch says what to install; the rest of the package can be imported."""
    (tmp_path / "train.py").write_text("print('ran')")
    done = torchless("-m", "torchwhere", "run", "--out", tmp_path / "boxes", tmp_path / "train.py")
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        f"torchwhere: {NEEDS_TORCH.format('start')}\n",
    )
    done = torchless(
        "-c",
        "import torchwhere\ntry: torchwhere.watch()\nexcept torchwhere.TorchwhereError as error:"
        " print(error)",
    )
    assert (done.stdout, done.stderr) == (f"{NEEDS_TORCH.format('watch')}\n", "")


# -- wrong calls -----------------------------------------------------------------------------------


def test_wrong_calls() -> None:
    """Wrong arguments of functions raise the usual Python exception at once, with the expected
    value."""
    with pytest.raises(
        TypeError, match=r"^watch\(model\): expected a torch.nn.Module or None, got str$"
    ):
        torchwhere.watch("run/")  # type: ignore[arg-type]
    for records in (15, 0, -1, 1e6, None):
        expected = re.escape(
            f"records={records!r}: the ring needs at least 16 records (the default is 65536)"
        )
        with pytest.raises(ValueError, match=f"^{expected}$"):
            torchwhere.watch(records=records)  # type: ignore[arg-type]
    for stall_s in (-1, 0, float("nan")):
        with pytest.raises(ValueError, match=rf"^stall_s={stall_s!r}: expected a number of sec"):
            torchwhere.doctor("run/", stall_s=stall_s)
    for name in ("", None, 3):
        with pytest.raises(
            ValueError, match=rf"^phase\({re.escape(repr(name))}\): expected a name$"
        ):
            torchwhere.phase(name)  # type: ignore[arg-type]
    for number in (-1, 1.5, "2", file_format.NO_STEP):
        expected = (
            f"step({number!r}): expected a step number of 0 or more, below 4294967295, or no"
            " argument for the next step"
        )
        expected = re.escape(expected)
        with pytest.raises(ValueError, match=f"^{expected}$"):
            torchwhere.step(number)  # type: ignore[arg-type]


def test_without_a_watch() -> None:
    """Without a watch every function may be called: it does nothing, and `where` returns an unknown
    place."""
    torchwhere.note("text")
    torchwhere.step(3)
    torchwhere.stop()
    with torchwhere.phase("data"):
        assert str(torchwhere.where()) == "rank 0, outside any module, (unknown)"
