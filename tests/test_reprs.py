"""Results in the hand of a person: each says itself on one line, as text, as inert HTML, as JSON,
and as a data frame."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchwhere
from synthetic_boxes import make
from synthetic_job import Job
from torchwhere import cli
from torchwhere.blackbox.columns import COLUMNS
from torchwhere.pipeline.report import report_on
from torchwhere.render import html as page
from torchwhere.render.lines import Column

HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m\u202e\n" + "x" * 10_000
HEBREW = "\u05e9\u05dc\u05d5\u05dd"  # runs from right to left
INERT = {
    "div",
    "style",
    "span",
    "p",
    "pre",
    "bdi",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "details",
    "summary",
}
TABLES = (
    "comms",
    "counted",
    "phases",
    "layouts",
    "layout",
    "groups",
    "verdict",
    "names",
    "backward",
    "graphs",
)


class Reducing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(torch.ones(2))
        return x * self.weight


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One result of every sort, from a run whose names are as bad as names can be."""
    folder = tmp_path_factory.mktemp("run")
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = _results(folder)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
        torch._dynamo.reset()
    return found


def _results(folder: Path) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module(HOSTILE, Reducing())
    model.add_module(HEBREW, nn.Linear(2, 1))
    with torchwhere.watch(model, out=folder), torchwhere.comms() as counted:
        for _ in range(2):
            with torchwhere.phase(HOSTILE), torchwhere.phase(HEBREW):
                loss = model(torch.ones(1, 2)).sum()
            torchwhere.note(HOSTILE, **{HEBREW: HOSTILE})
            torchwhere.step()
        place = torchwhere.where()
    compiled = torch.compile(lambda x: x * 3, backend="eager")
    compiled(torch.ones(2))
    graphs = torchwhere.graphs()
    run = torchwhere.read_run(folder)
    return {
        "place": place,
        "run": run,
        "box": run.boxes[0],
        "event": next(run.events(kinds={"note"})),
        "comms": run.comms(),
        "node": run.comms().root,
        "counted": counted,
        "phases": run.phases(),
        "layouts": run.layout(),
        "layout": torchwhere.layout(model),
        "groups": run.groups(),
        "verdict": torchwhere.doctor(folder),
        "rank": torchwhere.doctor(folder).ranks[0],
        "report": report_on(folder),
        "names": torchwhere.names(model),
        "backward": torchwhere.backward_graph(loss, model=model),
        "graphs": graphs,
        "graph": graphs[0],
        "model": model,  # names hold nothing alive
    }


@pytest.fixture
def diff(tmp_path: Path) -> Any:
    make(Job(8, steps=6, records=512, fault="swapped", victim=3), tmp_path)
    return torchwhere.read_run(tmp_path).diff()


class Tags(HTMLParser):
    """What a fragment consists of; fails where it is not closed as it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[tuple[str, str]] = []  # with the element they are in
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((data, self.open[-1]))


def shown(results: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((name, result) for name, result in results.items() if name != "model")


# -- every result ----------------------------------------------------------------------------------


def test_repr_is_one_line(results: dict[str, Any], diff: Any) -> None:
    """`repr` is one line of printable characters, and no longer than a person reads."""
    inner = {
        "row": results["phases"].rows[0],
        "cohort": results["layouts"].cohorts[0],
        "parting": diff.events.divergences[0],
    }
    inner |= {"comparison": diff.events, "version": diff.events.divergences[0].minority}
    for name, result in shown(results | {"diff": diff} | inner):
        said = repr(result)
        assert said.isprintable(), name
        assert 5 < len(said) < 400, name
    assert repr(results["run"]).endswith(f": 1 of 1 ranks, {len(results['box'].records)} events>")
    assert repr(results["comms"]) == "<Comms of 1 rank: all_reduce=2>"
    assert repr(results["verdict"]) == "<Verdict on 1 rank: healthy (exact)>"
    assert repr(results["groups"]) == "<Groups: 0>"
    assert repr(results["layouts"]) == "<Layouts of 1 rank: laid out alike>"
    assert repr(diff).startswith("<Diff: events of 8 ranks diverge in ")


def test_str_is_what_the_command_prints(results: dict[str, Any]) -> None:
    """`str` of a result is what its command prints into a pipe."""
    for name, command in (
        ("comms", "comms"),
        ("phases", "phases"),
        ("layouts", "layout"),
        ("groups", "groups"),
        ("verdict", "doctor"),
    ):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            cli.main([command, str(results["run"].folder)])
        assert f"{results[name]}\n" == out.getvalue(), name


def test_str_is_harmless(results: dict[str, Any], diff: Any) -> None:
    """No text has a control character in it but the ends of its lines."""
    for name, result in shown(results | {"diff": diff}):
        if name != "names":  # they say names as they are, to be looked up again
            assert all(line.isprintable() for line in str(result).split("\n")), name


def test_html_is_inert(results: dict[str, Any], diff: Any) -> None:
    """The HTML of every result is whole, loads and runs nothing, and shows hostile names as text,
    cut where they are absurd."""
    for name, result in shown(results | {"diff": diff}):
        if name == "node":
            continue
        found = Tags(result._repr_html_())
        assert found.seen <= INERT, name
        assert found.attributes <= {"class", "style", "title", "open"}, name
        assert all(
            text.replace("\n", "").isprintable() for text, tag in found.texts if tag != "style"
        ), name
        assert (
            max((len(text) for text, tag in found.texts if tag not in ("style", "pre")), default=0)
            < 1500
        ), name
    for name in ("comms", "counted", "phases", "layouts", "layout", "names", "event"):
        texts = "".join(text for text, _ in Tags(results[name]._repr_html_()).texts)
        assert "<script>alert(1)</script>\"'&\N{REPLACEMENT CHARACTER}[31m" in texts, name


def test_what_runs_to_the_left_is_kept_apart(results: dict[str, Any]) -> None:
    """A name in a script that runs from right to left stands in an element that keeps its direction
    to itself."""
    for name in ("phases", "layout", "names"):
        found = [tag for text, tag in Tags(results[name]._repr_html_()).texts if HEBREW in text]
        assert found
        assert set(found) == {"bdi"}, name
    assert page.isolated("a.b") == "a.b"


def test_json(results: dict[str, Any], diff: Any) -> None:
    """`to_dict()` of every result is JSON."""
    for name, result in shown(results | {"diff": diff}):
        if name != "box":
            found = result.to_dict()
            assert json.loads(json.dumps(found, allow_nan=False)), name


# -- tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_tables_become_data_frames(results: dict[str, Any], name: str) -> None:
    """A table as pandas has it: a row for each of its rows, in order."""
    rows, frame = results[name].as_rows(), results[name].to_pandas()
    assert len(frame) == len(rows) > 0
    assert list(frame.columns) == list(rows[0])
    first = next(iter(rows[0]))
    assert frame[first].tolist() == [row[first] for row in rows]


def test_rows_say_what_the_tables_say(results: dict[str, Any]) -> None:
    """The rows have the figures of the results they come from."""
    (row,) = results["comms"].as_rows()
    assert (row["module"], row["pass"], row["op"], row["count"], row["bytes"]) == (
        HOSTILE,
        "forward",
        "all_reduce",
        2,
        16,
    )
    assert results["counted"].as_rows() == results["comms"].as_rows()
    assert [row["phase"] for row in results["phases"].as_rows()] == [
        HOSTILE,
        f"{HOSTILE} > {HEBREW}",
    ]
    assert [row["count"] for row in results["phases"].as_rows()] == [2, 2]
    assert {row["name"]: row["shape"] for row in results["layout"].as_rows()}[
        f"{HEBREW}.weight"
    ] == [1, 2]
    (rank,) = results["verdict"].as_rows()
    assert (rank["rank"], rank["state"], rank["last_op"], rank["last_number"]) == (
        0,
        "finished",
        "all_reduce",
        1,
    )


def test_events_become_a_data_frame(tmp_path: Path) -> None:
    """The events of all ranks, or of some, in the columns of the export; what is missing is
    missing."""
    make(Job(16, steps=6, records=512), tmp_path)
    run = torchwhere.read_run(tmp_path)
    frame = run.to_pandas()
    events = list(run.events())
    assert list(frame.columns) == ["rank", *COLUMNS]
    assert frame["rank"].tolist() == [event.place.rank for event in events]
    assert frame["record"].tolist() == [event.number for event in events]
    for name in ("kind", "module", "op", "group"):
        found = [
            None if missing else value
            for value, missing in zip(frame[name], frame[name].isna(), strict=True)
        ]
        assert found == [event.to_dict().get(name) for event in events], name
    some = run.to_pandas(ranks=[1, 2], kinds=["collective"])
    assert set(some["rank"]) == {1, 2}
    assert int(some["bytes"].sum()) == sum(
        row["bytes"] for row in run.comms(ranks=[1, 2]).as_rows()
    )
    assert len(run.to_pandas(kinds=["exception"])) == 0


def test_without_pandas(results: dict[str, Any]) -> None:
    """Without pandas the message has the line to type; the rows are there all the same."""
    code = """
import sys
sys.modules["pandas"] = sys.modules["torch"] = None
import torchwhere
run = torchwhere.read_run(sys.argv[1])
print(len(run.comms().as_rows()))
for made in (run.comms().to_pandas, run.to_pandas):
    try:
        made()
    except torchwhere.TorchwhereError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, results["run"].folder],
        capture_output=True,
        text=True,
        timeout=400,
    )
    said = (
        "to_pandas() needs pandas, which is not installed: pip install pandas. as_rows() returns"
        " the same rows without it"
    )
    assert done.stdout.splitlines() == ["1", said, said]


# -- many ------------------------------------------------------------------------------------------


def test_results_of_many_ranks_stay_small(tmp_path: Path) -> None:
    """The run, the verdict and the comms of 256 ranks are a page that a notebook can bear; what is
    cut says so."""
    make(Job(256, steps=2, records=64, fault="missing", victim=77), tmp_path)
    run, verdict = torchwhere.read_run(tmp_path), torchwhere.doctor(tmp_path)
    for result in (run, verdict, run.comms(), run.groups()):
        assert len(repr(result)) < 300
        assert len(result._repr_html_()) < 200_000
    texts = [text for text, _ in Tags(run._repr_html_()).texts]
    assert "… and 56 more rows" in texts
    assert 77 in verdict.culprits
    cells = [text for text, tag in Tags(verdict._repr_html_()).texts if tag == "td"]
    assert cells[0] == str(verdict.culprits[0])
    assert len(verdict.as_rows()) == 256


def test_a_long_table_is_cut() -> None:
    """A table has at most so many rows, counts the others, and leaves out a column that nobody
    needs."""
    columns = [Column("name"), Column("size", right=True), Column("aside", optional=True)]
    found = page.table(columns, ([f"row {at}", str(at), ""] for at in range(1234)))
    assert found.count("<tr>") == 201
    assert "… and 1,034 more rows" in found
    assert "aside" not in found


# -- reading from code -----------------------------------------------------------------------------


def test_doctor(results: dict[str, Any]) -> None:
    """`torchwhere.doctor(folder)` gives the verdict of the command."""
    verdict = torchwhere.doctor(results["run"].folder)
    assert isinstance(verdict, torchwhere.Verdict)
    assert (verdict.kind, verdict.culprits) == ("healthy", ())
    with pytest.raises(
        torchwhere.TorchwhereError, match=r"^there is no folder nowhere\. Record one with: "
    ):
        torchwhere.doctor("nowhere")


def test_bad_input(results: dict[str, Any]) -> None:
    """A rank or a kind that there is not is said, by every answer."""
    run = results["run"]
    for answer in (run.comms, run.phases, run.layout, run.groups, run.diff, run.to_pandas):
        with pytest.raises(
            torchwhere.TorchwhereError, match=r" has no box of rank 7; it has rank 0$"
        ):
            answer(ranks=[7])
    with pytest.raises(ValueError, match=r"^unknown kind 'nope'; the kinds are start, end, "):
        run.to_pandas(kinds=["nope"])
    with pytest.raises(KeyError, match="nope"):
        run.groups()["nope"]
    assert run.groups()["0"]["ranks"] == [0]
