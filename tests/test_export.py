"""Events for other tools: an export contains exactly the recorded events, completely or not at all,
and the queries in the docs work."""

from __future__ import annotations

import contextlib
import gc
import gzip
import io
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import polars
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchwhere
from synthetic_boxes import LATE_NS, make
from synthetic_job import Job
from torchwhere import cli
from torchwhere.api import watch
from torchwhere.api.export import export
from torchwhere.blackbox.box import Box
from torchwhere.blackbox.columns import COLUMNS, FLAG, NUMBER, TEXT
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.events import KIND_LABELS, Event, Kind, json_text

PAGE = (Path(__file__).parent.parent / "docs" / "export.md").read_text()
LONE = "\ud800"  # a lone surrogate: valid in JSON, invalid in UTF-8


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen ranks of a job in which one rank is always late, and of one in which a rank swaps two
    collectives."""
    folder = tmp_path_factory.mktemp("jobs")
    for fault, victim in (("straggler", 5), ("swapped", 3)):
        (folder / fault).mkdir()
        make(Job(16, steps=12, records=512, fault=fault, victim=victim), folder / fault)
    return folder


def rows(target: Path, rank: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        pq.ParquetFile(target / f"rank={rank}" / "part-0.parquet").read().to_pylist()
    )
    return found


def by_duckdb(query: str) -> list[tuple[Any, ...]]:
    """Runs a query in its own process: DuckDB reports leaks at exit if its objects were frozen, as
    here."""
    code = "import duckdb, json, sys; print(json.dumps(duckdb.sql(sys.argv[1]).fetchall()))"
    done = subprocess.run(
        [sys.executable, "-c", code, query], capture_output=True, text=True, check=True, timeout=400
    )
    return [tuple(row) for row in json.loads(done.stdout)]


def expected(event: Event) -> dict[str, Any]:
    """A row, computed from an event."""
    found: dict[str, Any] = dict.fromkeys(COLUMNS)
    kinds = ("start", "end", "note", "exception", "compile_begin", "group_begin")
    told = event.kind in (*kinds, "capture_begin", "capture_end", "replay")
    rest = {
        name: value
        for name, value in event.fields.items()
        if told and name not in ("text", "reason", "type")
    }
    if event.kind == "compile_begin":
        rest.pop("what", None)
    own = {name: value for name, value in event.fields.items() if name not in rest}
    found |= {name: value for name, value in own.items() if name in COLUMNS} | event.place.to_dict()
    found |= {
        "record": event.number,
        "kind": event.kind,
        "t_ns": event.t_ns,
        "fields": rest or None,
    }
    nested = {name for name, value in found.items() if isinstance(value, (list, dict))}
    return {name: json_text(found[name]) if name in nested else found[name] for name in COLUMNS}


# -- what is written is what was recorded ----------------------------------------------------------


def eventful(folder: Path) -> None:
    """A run with an event of every kind that needs no compilation."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchwhere.watch(model, out=folder, module_events=True, records=512):
        for number in range(2):
            with torchwhere.phase("data"):
                torchwhere.note(
                    "ready",
                    size=number,
                    nested={"a": [1, float("nan")]},
                    step="mine",
                    what=3,
                    odd=LONE,
                )
            model(torch.ones(2, 4)).sum().backward()
            dist.all_reduce(torch.ones(3), group=dist.new_group([0]), async_op=True).wait()
            optimizer.step()
        session = watch.current()
        assert session is not None
        for report in (session.cuda_graph_hook.begins, session.cuda_graph_hook.ends):
            report(optimizer)  # any object stands for a CUDA graph
        session.cuda_graph_hook.replays(optimizer)
        session.recorder.box.record(Kind.MEMORY, time.monotonic_ns())
        with contextlib.suppress(RuntimeError):
            model(torch.ones(2, 5))


@pytest.mark.usefixtures("one_rank")
def test_rows_are_the_events(tmp_path: Path) -> None:
    """Each row has the event's values in their columns; values without a column are in `fields`;
    nested values are JSON."""
    eventful(tmp_path / "run")
    written = export(tmp_path / "run", out=tmp_path / "events.parquet")
    events = list(torchwhere.read_run(tmp_path / "run").events())
    found = rows(tmp_path / "events.parquet", 0)
    assert {event.kind for event in events} == set(KIND_LABELS) - {"compile_begin", "compile_end"}
    assert len(found) == written.events == len(events)
    for row, event in zip(found, events, strict=True):
        assert row == expected(event)
    note = next(row for row in found if row["kind"] == "note")
    assert json.loads(note["fields"])["nested"] == {"a": [1, "nan"]}
    assert json.loads(note["fields"])["what"] == 3


def test_many_ranks(jobs: Path, tmp_path: Path) -> None:
    """Every rank has a file with all its events, in order; readers find the rank in the name of its
    folder."""
    written = export(jobs / "swapped", out=tmp_path / "events.parquet")
    run = torchwhere.read_run(jobs / "swapped")
    for rank in (0, 3, 15):
        assert rows(tmp_path / "events.parquet", rank) == [
            expected(event) for event in run.events(ranks={rank})
        ]
    per_rank = by_duckdb(
        f"SELECT rank, count(*) FROM '{tmp_path}/events.parquet/*/*.parquet' GROUP BY rank ORDER BY"
        " rank"
    )
    assert per_rank == [(rank, len(box.records)) for rank, box in sorted(run.boxes.items())]
    assert written.events == sum(len(box.records) for box in run.boxes.values())
    assert written.ranks == tuple(range(16))
    frame = pandas.read_parquet(tmp_path / "events.parquet")
    assert frame.groupby("rank", observed=True).size().to_dict() == {
        rank: len(box.records) for rank, box in run.boxes.items()
    }


def test_types_are_the_same_in_every_file(jobs: Path, tmp_path: Path) -> None:
    """A file without any collective has the same plain columns and types as one full of them."""
    export(jobs / "swapped", out=tmp_path / "full.parquet", ranks=[0])
    export(jobs / "swapped", out=tmp_path / "poor.parquet", ranks=[0], kinds={"step_begin"})
    export(jobs / "swapped", out=tmp_path / "none.parquet", ranks=[0], kinds={"exception"})
    schemas = [
        pq.ParquetFile(tmp_path / name / "rank=0" / "part-0.parquet").schema_arrow
        for name in ("full.parquet", "poor.parquet", "none.parquet")
    ]
    types = {TEXT: "string", NUMBER: "int64", FLAG: "bool"}
    assert {field.name: str(field.type) for field in schemas[0]} == {
        name: types[sort] for name, sort in COLUMNS.items()
    }
    assert schemas[0].equals(schemas[1])
    assert schemas[0].equals(schemas[2])
    assert {row["kind"] for row in rows(tmp_path / "poor.parquet", 0)} == {"step_begin"}
    assert rows(tmp_path / "none.parquet", 0) == []


def test_batches(jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A box with more events than a batch is written in several row groups, and reads the same."""
    export(jobs / "swapped", out=tmp_path / "one.parquet", ranks=[1])
    monkeypatch.setattr("torchwhere.api.parquet.BATCH", 100)
    export(jobs / "swapped", out=tmp_path / "many.parquet", ranks=[1])
    assert (
        pq.ParquetFile(tmp_path / "many.parquet" / "rank=1" / "part-0.parquet").num_row_groups > 3
    )
    assert rows(tmp_path / "one.parquet", 1) == rows(tmp_path / "many.parquet", 1)


def test_metadata(jobs: Path, tmp_path: Path) -> None:
    """A file names its rank, the lost records and the members of its groups; it is compressed with
    zstd."""
    export(jobs / "swapped", out=tmp_path / "events.parquet", ranks=[7])
    file = pq.ParquetFile(tmp_path / "events.parquet" / "rank=7" / "part-0.parquet")
    said = {key.decode(): json.loads(value) for key, value in file.metadata.metadata.items()}
    box = torchwhere.read_run(jobs / "swapped").boxes[7]
    assert said["torchwhere.rank"] == box.meta
    assert said["torchwhere.counts"]["overwritten"] == box.counts.overwritten > 0
    assert {group["name"]: group["ranks"] for group in said["torchwhere.groups"]}["0"] == "0-15"
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"


def test_damaged_boxes(jobs: Path, tmp_path: Path) -> None:
    """Cut or overwritten boxes are exported as far as they are readable; nothing raises, nothing is
    invented."""
    chance = random.Random(7)
    for at in range(16):
        folder = tmp_path / str(at)
        folder.mkdir()
        data = bytearray((jobs / "swapped" / "rank2.box").read_bytes())
        if at % 2:
            data = data[: chance.randrange(5000, len(data))]
        for _ in range(chance.randrange(40)):
            data[chance.randrange(4096, len(data))] ^= 1 << chance.randrange(8)
        (folder / "rank2.box").write_bytes(data)
        export(folder, out=folder / "events.parquet")
        found = [expected(event) for event in torchwhere.read_run(folder).events()]
        assert rows(folder / "events.parquet", 2) == found


def test_json_lines(jobs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON lines are what `torchwhere events --json` prints, compressed or not."""
    export(jobs / "swapped", out=tmp_path / "events.jsonl", ranks=[1, 4], kinds=["optimizer"])
    export(jobs / "swapped", out=tmp_path / "events.jsonl.gz", ranks=[1, 4], kinds=["optimizer"])
    cli.main(
        [
            "events",
            str(jobs / "swapped"),
            "--json",
            "--rank",
            "1",
            "--rank",
            "4",
            "--kind",
            "optimizer",
        ]
    )
    printed = capsys.readouterr().out
    assert (tmp_path / "events.jsonl").read_text() == printed
    assert gzip.decompress((tmp_path / "events.jsonl.gz").read_bytes()).decode() == printed
    assert printed.count("\n") > 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "events.jsonl.gz"]


def test_one_box_at_a_time(jobs: Path, tmp_path: Path) -> None:
    """For any number of ranks, each box is freed before the next one is read."""
    most = []

    def count(done: int, _total: int) -> None:
        if done in (3, 18, 30):
            most.append(sum(isinstance(one, Box) for one in gc.get_objects()))

    before = sum(isinstance(one, Box) for one in gc.get_objects())
    export(jobs / "swapped", out=tmp_path / "events.parquet", on_progress=count)
    assert len(most) == 3
    assert max(most) - before <= 1


# -- whole or not at all ---------------------------------------------------------------------------


class Enough(Exception):
    """Stands for Ctrl-C."""


def interrupted(folder: Path, target: Path, *, after: int) -> None:
    def tell(done: int, _total: int) -> None:
        if done == after:
            raise Enough

    with pytest.raises(Enough):
        export(folder, out=target, on_progress=tell)


def times(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")}


def test_an_interrupted_export_goes_on(jobs: Path, tmp_path: Path) -> None:
    """An interrupted export does not have the final name; the next one writes only what is
    missing."""
    target = tmp_path / "events.parquet"
    interrupted(jobs / "swapped", target, after=16 + 6)
    assert not target.exists()
    before = times(tmp_path / "events.parquet.part")
    assert len(before) == 6
    (tmp_path / "events.parquet.part" / "rank=9").mkdir()
    (tmp_path / "events.parquet.part" / "rank=9" / ".part-0.parquet.123").write_text("half")
    written = export(jobs / "swapped", out=target)
    after = times(target)
    assert {name: after[name] for name in before} == before
    assert len(after) == 16
    assert [path.name for path in tmp_path.iterdir()] == ["events.parquet"]
    assert not list(target.rglob(".*"))
    assert written.events == sum(len(rows(target, rank)) for rank in range(16))


def test_going_on_takes_nothing_of_another_run(jobs: Path, tmp_path: Path) -> None:
    """An export never reuses files of another run, other kinds or other ranks."""
    target = tmp_path / "events.parquet"
    interrupted(jobs / "straggler", target, after=16 + 6)
    export(jobs / "swapped", out=target, ranks=[0, 1, 8])
    assert sorted(path.name for path in target.iterdir()) == ["rank=0", "rank=1", "rank=8"]
    assert rows(target, 1) == [
        expected(event) for event in torchwhere.read_run(jobs / "swapped").events(ranks={1})
    ]


def test_an_interrupted_file_is_deleted(jobs: Path, tmp_path: Path) -> None:
    """Interrupted JSON lines leave no file."""
    interrupted(jobs / "swapped", tmp_path / "events.jsonl", after=20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["events.parquet", "events.jsonl"])
def test_a_full_disk(jobs: Path, tmp_path: Path, name: str) -> None:
    """On a full disk the command says so and leaves no file under the final name; with free space
    it writes everything."""
    code = (
        "import resource, sys; from torchwhere.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)\n"
        "sys.exit(main())"
    )
    arguments = ["export", jobs / "swapped", "-o", tmp_path / name, "--rank", "3"]
    done = [
        subprocess.run(
            [sys.executable, "-c", code, room, *arguments],
            capture_output=True,
            text=True,
            timeout=400,
        )
        for room in ("4096", "4000000")
    ]
    assert [one.returncode for one in done] == [2, 0]
    assert done[0].stderr.startswith(f"torchwhere: cannot write {tmp_path / name}: ")
    assert "File too large" in done[0].stderr
    assert (tmp_path / name).exists()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_existing_files_stay(jobs: Path, tmp_path: Path) -> None:
    """An earlier export is replaced only on request, any other file never."""
    target = tmp_path / "events.parquet"
    export(jobs / "straggler", out=target)
    with pytest.raises(
        TorchwhereError,
        match=r"events.parquet exists: give another name, or --force to replace it$",
    ):
        export(jobs / "swapped", out=target)
    assert len(rows(target, 15)) > 0
    export(jobs / "swapped", out=target, ranks=[0], force=True)
    assert [path.name for path in target.iterdir()] == ["rank=0"]
    for name in ("mine.parquet", "mine.jsonl", "other.parquet.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("dear")
    (tmp_path / "file.parquet").write_text("dear")
    for name in ("mine.parquet", "mine.jsonl", "other.parquet", "file.parquet"):
        with pytest.raises(
            TorchwhereError, match=r"exists and is not an export: give another name$"
        ):
            export(jobs / "swapped", out=tmp_path / name, force=True)
    assert len(list(tmp_path.glob("*/thesis.tex"))) == 3


# -- the command, and bad input --------------------------------------------------------------------


def command(*arguments: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["export", *map(str, arguments)])
    return code, out.getvalue(), err.getvalue()


def test_the_command(jobs: Path, tmp_path: Path) -> None:
    """The command prints what it wrote and what was missing, as text or as JSON."""
    target = tmp_path / "deep" / "events.parquet"
    code, out, err = command(
        jobs / "swapped", "-o", target, "--rank", 3, "--kind", "optimizer", "--kind", "note"
    )
    assert (code, err) == (0, "")
    first, second = out.splitlines()
    assert re.fullmatch(rf"\d+ events of 1 rank in {target} \([\d,]+ bytes\)", first)
    assert re.fullmatch(
        r"  not exported, overwritten in the ring \(see --records\): [\d,]+ older events", second
    )
    code, out, _ = command(jobs / "swapped", "-o", target, "--rank", 3, "--force", "--json")
    said = json.loads(out)
    assert (code, said["path"], said["format"], said["ranks"]) == (0, str(target), ".parquet", [3])
    assert said["events"] == len(rows(target, 3))
    assert said["bytes"] == (target / "rank=3" / "part-0.parquet").stat().st_size


def test_missing_ranks_are_listed(jobs: Path, tmp_path: Path) -> None:
    """Ranks without a box, and foreign files, are in the summary."""
    run = tmp_path / "run"
    run.mkdir()
    for rank in (0, 2):
        (run / f"rank{rank}.box").write_bytes((jobs / "swapped" / f"rank{rank}.box").read_bytes())
    (run / "odd.box").write_text("nothing")
    code, out, _ = command(run, "-o", tmp_path / "events.parquet")
    assert code == 0
    assert "2 of 16 ranks are watched: no box of ranks 1, 3-15" in out
    assert "odd.box: no readable header: not a black box, or damaged" in out


def test_bad_input(jobs: Path, tmp_path: Path) -> None:
    """Each error is one line with advice, and exit code 2."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    run = jobs / "swapped"
    for arguments, said in (
        (
            (tmp_path / "no", "-o", "x.parquet"),
            f"there is no folder {tmp_path}/no. Record one with: torchwhere run --out",
        ),
        ((tmp_path / "empty", "-o", "x.parquet"), f"{tmp_path}/empty holds no black box (*.box)."),
        (
            (run, "-o", "x.csv"),
            (
                "cannot tell the format of x.csv: its name must end with one of .parquet, .jsonl,"
                " .jsonl.gz"
            ),
        ),
        ((run, "-o", tmp_path / "x.parquet", "--rank", 99), f"{run} has no box of rank 99"),
        ((run, "-o", tmp_path / "file" / "x.parquet"), f"cannot write {tmp_path}/file/x.parquet: "),
        ((run, "-o", tmp_path / "file" / "x.jsonl"), f"cannot write {tmp_path}/file/x.jsonl: "),
    ):
        code, out, err = command(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith(f"torchwhere: {said}")
        assert err.count("\n") == 1
    with pytest.raises(ValueError, match=r"^unknown kind 'nope'; the kinds are start, end, "):
        export(run, out=tmp_path / "x.parquet", kinds=["nope"])
    with pytest.raises(TypeError, match=r"^export\(out=\.\.\.\): expected a path, got int$"):
        export(run, out=3)  # type: ignore[arg-type]


def test_without_pyarrow(jobs: Path, tmp_path: Path) -> None:
    """Without pyarrow the message has the install command, and JSON lines work; neither needs
    torch."""
    code = (
        "import sys; sys.modules['pyarrow'] = sys.modules['torch'] = None; from torchwhere.cli"
        " import main; sys.exit(main())"
    )
    done = [
        subprocess.run(
            [sys.executable, "-c", code, "export", jobs / "swapped", "-o", tmp_path / name],
            capture_output=True,
            text=True,
        )
        for name in ("x.parquet", "x.jsonl")
    ]
    assert [one.returncode for one in done] == [2, 0]
    assert (
        done[0].stderr
        == "torchwhere: export to Parquet needs pyarrow, which is not installed here: pip install"
        " 'torchwhere[parquet]'\n"
    )
    assert (tmp_path / "x.jsonl").stat().st_size > 1000


# -- the page --------------------------------------------------------------------------------------


@pytest.fixture
def exported(jobs: Path, tmp_path: Path) -> Iterator[Path]:
    """The folder that the queries of the docs page expect."""
    before = os.getcwd()
    os.chdir(tmp_path)
    yield jobs
    os.chdir(before)


def answers(number: int) -> Iterator[list[tuple[Any, ...]]]:
    """The results of a query of the docs page, by DuckDB and by Polars."""
    yield by_duckdb(re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)[number])
    names: dict[str, Any] = {}
    exec(re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)[number], names)
    assert isinstance(names["answer"], polars.DataFrame)
    yield names["answer"].rows()


def test_bytes_by_module_and_pass(exported: Path) -> None:
    """The first question gives what `torchwhere comms` counts."""
    export(exported / "swapped", out="events.parquet")
    counted = torchwhere.read_run(exported / "swapped").comms()
    known: dict[tuple[Any, ...], list[int]] = {}
    for row in counted.as_rows():
        sums = known.setdefault((row["module"], row["pass"], row["op"]), [0, 0])
        sums[0] += row["count"]
        sums[1] += row["bytes"]
    for found in answers(0):
        assert {row[:3]: list(row[3:]) for row in found} == known
        assert [row[4] for row in found] == sorted(
            (sums[1] for sums in known.values()), reverse=True
        )


def test_last_to_come_in_each_step(exported: Path) -> None:
    """The second query names the rank that is late in every step, and by how much."""
    export(exported / "straggler", out="events.parquet")
    for found in answers(1):
        assert [row[1] for row in found] == [5] * len(found)
        assert len(found) > 4
        # the first step is cut
        assert [row[2] for row in found[1:]] == pytest.approx(
            [LATE_NS / 1e6] * (len(found) - 1), abs=0.1
        )


def test_first_step_that_differs(exported: Path) -> None:
    """The third query names the step and the rank that differ, and no rank if all are equal."""
    export(exported / "swapped", out="events.parquet")
    last = max(
        event.place.step or 0 for event in torchwhere.read_run(exported / "swapped").events()
    )
    for found in answers(2):
        assert found == [(last - 2, [3])]
    export(exported / "straggler", out="events.parquet", force=True)
    assert list(answers(2)) == [[], []]


def test_the_page_has_every_column_and_option() -> None:
    """The docs page lists all columns with their types, and all options of the command."""
    table = PAGE.partition("| column | type |")[2].partition("\n\n")[0]
    found = {}
    for line in table.splitlines()[2:]:
        names, sort = line.split("|")[1:3]
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), sort.strip())
    types = {TEXT: "string", NUMBER: "int64", FLAG: "bool"}
    assert found == {"rank": "integer"} | {name: types[sort] for name, sort in COLUMNS.items()}
    options = set(re.findall(r"`(--?[\w-]+)", PAGE.partition("| option |")[2].partition("\n\n")[0]))
    done = subprocess.run(
        [sys.executable, "-m", "torchwhere", "export", "--help"],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert (
        set(re.findall(r"(?<![\w-])(--?[a-z][\w-]*)", done.stdout.partition("options:")[2]))
        - {"-h", "--help"}
        == options
    )
