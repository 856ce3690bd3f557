"""`torchwhere.comms()`: what a block counts while it runs and afterwards, its expectations, and its
golden snapshots."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchwhere
from models import Model, batch
from rank_pool import Pool
from torchwhere.api import watch
from torchwhere.blackbox.run import read_run
from torchwhere.diagnose.comms.expect import OPS
from torchwhere.diagnose.comms.tree import Comms
from torchwhere.diagnose.comms.tree import comms as offline
from torchwhere.render import text


class Chatty(nn.Module):
    """Sums its activations over all ranks, once in the root and twice in `head`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = Talker()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        dist.all_reduce(x.detach())
        return self.head(x)


class Talker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            dist.all_reduce(x.detach())
        return self.inner(x)


@pytest.fixture
def chatty(one_rank: None) -> Iterator[Chatty]:
    return Chatty()


# -- counting --------------------------------------------------------------------------------------


def test_counts_while_it_runs_and_after(chatty: Chatty) -> None:
    """Counts, modules, passes, groups, lines and bytes are available inside the block and after
    it."""
    with torchwhere.comms() as c:
        assert not c.counts
        chatty(batch())
        assert c.counts == {"all_reduce": 3}
        dist.barrier()
        assert c.counts["barrier"] == 1
    for _ in range(2):  # the second time from the cached result
        assert c.counts == {"all_reduce": 3, "barrier": 1}
        assert c.by_module == {
            "": {"all_reduce": 1},
            "head": {"all_reduce": 2},
            None: {"barrier": 1},
        }
        assert c.by_pass == {"forward": {"all_reduce": 3}, "outside": {"barrier": 1}}
        assert c.by_group == {"default": {"all_reduce": 3, "barrier": 1}}
        assert c.bytes == 3 * 4 * 8 * 4
    assert c.counts["send"] == 0
    assert c.by_module["nobody"]["all_reduce"] == 0
    lines = {
        line.rpartition("/")[2]: dict(ops) for line, ops in c.by_line.items() if line is not None
    }
    assert sorted(map(len, lines.values())) == [1, 1, 1]
    assert all(line.startswith("test_live_comms.py:") for line in lines)
    assert repr(c) == "<comms: all_reduce=3, barrier=1>"


def test_table_and_json(chatty: Chatty) -> None:
    """The table is the tree of `torchwhere comms`, and the JSON contains all of it."""
    with torchwhere.comms() as c:
        chatty(batch())
    assert str(c).splitlines() == [
        "1 rank, step 0, all on default  per step  steps   each  calls  total",
        "<root>                                                      3  384 B",
        "├ forward   all_reduce                 1      1  128 B      1  128 B",
        "└ head  forward   all_reduce           2      1  128 B      2  256 B",
    ]
    assert max(map(len, c.table(width=40).splitlines())) <= 40
    found = json.loads(c.json())
    assert found == c.to_dict()
    (head,) = found["root"]["children"]
    assert (head["module"], head["count"], list(head["collectives"][0]["lines"].values())) == (
        "head",
        2,
        [2],
    )


def test_no_collectives() -> None:
    """A block without collectives says so."""
    with torchwhere.comms() as c:
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert (c.table(), repr(c), c.bytes) == (
        "no collectives were recorded",
        "<comms: no collectives>",
        0,
    )
    c.expect(calls=0, bytes=0)


def test_a_model_gives_names(one_rank: None) -> None:
    """The given model names modules that are called alone; without it the root is still found."""
    model = nn.Sequential(Talker(), Talker())
    with torchwhere.comms(model) as c:
        model[1](batch())
    assert c.by_module == {"1": {"all_reduce": 2}}
    with pytest.raises(
        TypeError, match=r"^comms\(model\): expected a torch.nn.Module or None, got int$"
    ):
        torchwhere.comms(3)  # type: ignore[arg-type]


def test_each_time_is_counted_anew_and_nesting_is_not(chatty: Chatty) -> None:
    """Entering it again starts from zero; entering it inside itself continues; other blocks inside
    count their own part."""
    with torchwhere.comms() as outer:
        chatty(batch())
        with torchwhere.comms() as inner, outer:
            chatty(batch())
        dist.barrier()
    assert (outer.counts, inner.counts) == ({"all_reduce": 6, "barrier": 1}, {"all_reduce": 3})
    with outer:
        dist.barrier()
    assert outer.counts == {"barrier": 1}


def test_decorator(chatty: Chatty) -> None:
    """As a decorator it counts each call of the function."""
    c = torchwhere.comms()

    @c
    def step(times: int) -> int:
        """A step."""
        for _ in range(times):
            chatty(batch())
        return times

    assert (step(2), c.counts) == (2, {"all_reduce": 6})
    assert (step(1), c.counts) == (1, {"all_reduce": 3})
    assert step.__doc__ == "A step."


def test_other_threads_are_counted_too(one_rank: None) -> None:
    """Collectives from several threads at once are all counted, none in the main thread's
    module."""

    def work() -> None:
        for _ in range(50):
            dist.all_reduce(torch.ones(2))

    with torchwhere.comms() as c:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            c.table()  # read while the threads write
        for thread in threads:
            thread.join()
    assert c.by_module == {None: {"all_reduce": 200}}


def test_blocks_on_several_threads(one_rank: None) -> None:
    """Blocks that begin and end on several threads at once leave no watch behind."""
    barrier = threading.Barrier(4)
    found = []

    def work() -> None:
        barrier.wait()
        with torchwhere.comms() as c:
            barrier.wait()
            dist.all_reduce(torch.ones(2))
            barrier.wait()
        found.append(c.counts["all_reduce"])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [4] * 4
    assert watch.current() is None


def test_joins_a_watch(chatty: Chatty, tmp_path: Path) -> None:
    """Inside a watch it counts what that watch records, and does not end it; a watch may end inside
    the block."""
    with torchwhere.watch(chatty, out=tmp_path, records=16):
        for _ in range(20):
            chatty(batch())
        with torchwhere.comms() as c:
            for _ in range(20):  # more than the ring holds
                chatty(batch())
        assert watch.current() is not None
    assert c.counts == {"all_reduce": 60}
    assert offline(read_run(tmp_path)).root.total().count < 60
    with torchwhere.comms() as c:
        dist.barrier()
        torchwhere.stop()
        torchwhere.start()
    assert watch.current() is not None
    torchwhere.stop()
    assert c.counts == {"barrier": 1}


def test_an_exception_ends_the_block(chatty: Chatty) -> None:
    """An exception leaves the block unchanged, and the counts until then are available."""
    c = torchwhere.comms()
    with pytest.raises(RuntimeError, match="mat1 and mat2"), c:
        chatty(chatty(batch())[:, :3])
    assert c.counts == {"all_reduce": 3}


# -- live and offline ------------------------------------------------------------------------------


def _train_both_ways(folder: str) -> tuple[dict[str, Any], str]:
    """FSDP2 over a named mesh, p2p, and an exchange in the optimizer step: counted live and
    recorded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = Model(depth=3)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchwhere.watch(model, out=folder), torchwhere.comms() as c:
        for _ in range(3):
            model(batch()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.ones(3), 0)
        dist.barrier()
    return c.to_dict(), c.table()


def test_live_equals_offline(two_ranks: Pool, tmp_path: Path) -> None:
    """Each rank's live tree and table equal those from the boxes of the same run."""
    live = two_ranks.run(_train_both_ways, str(tmp_path))
    run = read_run(tmp_path)
    for rank, (tree, table) in enumerate(live):
        found = offline(run, ranks={rank})
        assert tree == json.loads(json.dumps(found.to_dict()))
        assert table.splitlines() == [
            "".join(part for part, _ in line) for line in text.comms_lines(found, width=None)
        ]
    assert live[0][0]["groups"] == {"dp": 2}
    assert live[0][0]["root"]["count"] + live[0][0]["outside"]["count"] == 3 * (4 + 3 + 4) + 2


# -- expectations ----------------------------------------------------------------------------------


@pytest.fixture
def counted(chatty: Chatty) -> torchwhere.comms:
    with torchwhere.comms() as c:
        chatty(batch()).sum().backward()
    return c


HOLDING: list[dict[str, Any]] = [
    {"all_reduce": 3},
    {"all_reduce__eq": 3, "barrier__eq": 0},
    {"all_reduce__le": 3, "all_reduce__ge": 3},
    {"all_reduce__lt": 4, "all_reduce__gt": 2, "all_reduce__ne": 5},
    {"calls": 3, "bytes": 384, "others__lt": 4},
    {"all_reduce": 3, "others": 0},
    {"all_gather_single": 0, "reduce_scatter_single__le": 0},
    {"all_reduce": 2, "module": "head"},
    {"all_reduce": 0, "module": "head.inner"},
    {"all_reduce": 3, "module": "", "pass_": "forward"},
    {"all_reduce": 3, "module": "<root>"},
    {"calls": 0, "pass_": "backward"},
    {"all_reduce": 3, "group": "default"},
    {"all_reduce": 2, "for_": "head", "bytes__le": 256},
]


def test_expectations_that_hold(counted: torchwhere.comms) -> None:
    """Each operator, quantity and filter holds where it should; a module includes its children."""
    for wanted in HOLDING:
        counted.expect(**wanted)


FAILING: list[tuple[dict[str, Any], str]] = [
    ({"all_reduce": 2}, "all_reduce  == 2  found 3  WRONG"),
    ({"all_reduce__ne": 3}, "all_reduce  != 3  found 3  WRONG"),
    ({"all_reduce__lt": 3}, "all_reduce  < 3  found 3  WRONG"),
    ({"all_reduce__gt": 3}, "all_reduce  > 3  found 3  WRONG"),
    ({"all_reduce__le": 2}, "all_reduce  <= 2  found 3  WRONG"),
    ({"all_reduce__ge": 4}, "all_reduce  >= 4  found 3  WRONG"),
    ({"others": 0, "barrier": 0}, "others   == 0  found 3  WRONG"),
    ({"bytes__le": 383, "calls": 3}, "bytes  <= 383  found 384  WRONG"),
    ({"calls": 3, "module": "head"}, "calls  == 3  found 2  WRONG"),
]


def test_expectations_that_fail(counted: torchwhere.comms) -> None:
    """Each operator and quantity fails where it should, with the expected and the actual value."""
    for wanted, said in FAILING:
        with pytest.raises(AssertionError) as failure:
            counted.expect(**wanted)
        assert said in str(failure.value)


def test_what_a_failure_says(counted: torchwhere.comms) -> None:
    """A failure shows what was wrong, what was right, and every matching collective with its
    place."""
    with pytest.raises(AssertionError) as failure:
        counted.expect(all_reduce=1, barrier=0, bytes__le=100, module="head", pass_="forward")
    lines = str(failure.value).splitlines()
    assert lines[:-1] == [
        "the collectives in head in forward are not as expected:",
        "  all_reduce  == 1    found 2    WRONG",
        "  bytes       <= 100  found 256  WRONG",
        "  barrier     == 0    found 0    as expected",
        "found in head in forward:",
    ]
    assert lines[-1].startswith("  2 x  all_reduce  forward of head  256 B  on default")
    assert "test_live_comms.py:" in lines[-1]


def test_nothing_found_shows_what_is_elsewhere(counted: torchwhere.comms) -> None:
    """If no collective passes the filters, the failure shows the others."""
    with pytest.raises(AssertionError) as failure:
        counted.expect(all_reduce=1, pass_="backward")
    lines = str(failure.value).splitlines()
    assert lines[2:5] == ["found in backward:", "  no collectives", "found elsewhere:"]
    assert len(lines) == 7


MEANINGLESS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {},
        ValueError,
        (
            "expect(): nothing is expected; say for example expect(all_reduce=2) or"
            " expect(calls__le=10)"
        ),
    ),
    (
        {"all_reduced": 1},
        ValueError,
        "expect(all_reduced=...): no collective 'all_reduced'; did you mean all_reduce or ",
    ),
    (
        {"zzz": 1},
        ValueError,
        "expect(zzz=...): no collective 'zzz'; there are all_gather, all_gather_coalesced, ",
    ),
    (
        {"all_reduce__about": 1},
        ValueError,
        (
            "expect(all_reduce__about=...): no operator __about; there are __eq, __ge, __gt, __le,"
            " __lt, __ne"
        ),
    ),
    ({"all_reduce": 1.5}, TypeError, "expect(all_reduce=1.5): expected a whole number"),
    ({"all_reduce": True}, TypeError, "expect(all_reduce=True): expected a whole number"),
    ({"all_reduce": -1}, ValueError, "expect(all_reduce=-1): expected a number of 0 or more"),
    (
        {"calls": 1, "module": "haed"},
        ValueError,
        "expect(module='haed'): no such module; did you mean head?",
    ),
    ({"calls": 1, "for_": "qqqq"}, ValueError, "expect(for_='qqqq'): no such module"),
    ({"calls": 1, "module": 3}, TypeError, "expect(module=3): expected a name"),
    (
        {"calls": 1, "pass_": "fwd"},
        ValueError,
        (
            "expect(pass_='fwd'): no such pass; there are backward, forward, optimizer, outside,"
            " recompute"
        ),
    ),
    (
        {"calls": 1, "group": "tp"},
        ValueError,
        "expect(group='tp'): no such group; there are default",
    ),
]


def test_misspelt_names(counted: torchwhere.comms) -> None:
    """A misspelt op, operator, module, pass or group is an error that suggests close names, never
    an expectation of 0."""
    for wanted, kind, said in MEANINGLESS:
        with pytest.raises(kind) as wrong:
            counted.expect(**wanted)
        assert str(wrong.value).startswith(said)


def test_all_collectives_of_torch_are_known() -> None:
    """The op names that may be expected are those of the installed torch."""
    from torchwhere.hooks.schemas import all_ops

    names = {op.name for op in all_ops()} | {
        op.of_one.name for op in all_ops() if op.of_one is not None
    }
    assert names == set(OPS)


def test_expectations_inside_the_block(chatty: Chatty) -> None:
    """An expectation inside the block uses the counts and modules so far."""
    with torchwhere.comms(chatty) as c:
        c.expect(all_reduce=0, module="head")
        chatty(batch())
        c.expect(all_reduce=2, module="head")
        with pytest.raises(ValueError, match="no such module"):
            c.expect(all_reduce=0, module="tail")


# -- snapshots -------------------------------------------------------------------------------------


def test_snapshot_round_trip(counted: torchwhere.comms, tmp_path: Path) -> None:
    """A snapshot is one line of JSON for each module, pass and op, and equals its source."""
    path = tmp_path / "new" / "golden.json"
    counted.snapshot(path)
    assert [entry["module"] for entry in json.loads(path.read_text())["collectives"]] == [
        "",
        "head",
    ]
    assert (
        path.read_text()
        .splitlines()[2]
        .startswith(' {"module": "head", "pass": "forward", "op": "all_reduce", "group": ')
    )
    assert list(path.parent.iterdir()) == [path]
    counted.expect_same_as(path)


def test_snapshot_difference(counted: torchwhere.comms, chatty: Chatty, tmp_path: Path) -> None:
    """A difference is shown by module and pass, before and after; equal modules are not shown."""
    counted.snapshot(tmp_path / "golden.json")
    with counted:
        chatty(batch())
        chatty.head(batch(rows=2))
        dist.barrier()
    with pytest.raises(AssertionError) as failure:
        counted.expect_same_as(tmp_path / "golden.json")
    assert str(failure.value).splitlines() == [
        f"the collectives differ from those of {tmp_path}/golden.json (- expected, + found)",
        "  forward of head",
        "    -  2 x  all_reduce  256 B  on default",
        "    +  4 x  all_reduce  384 B  on default",
        "  outside any module",
        "    +  1 x  barrier    on default",
        (
            "If the new collectives are right: run once with TORCHWHERE_REGENERATE=1, or call"
            " expect_same_as(path, regenerate=True)."
        ),
    ]


def test_snapshot_regenerates(
    counted: torchwhere.comms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The argument or the variable rewrites the snapshot; the argument takes precedence."""
    path = tmp_path / "golden.json"
    monkeypatch.setenv("TORCHWHERE_REGENERATE", "1")
    counted.expect_same_as(path)
    path.unlink()
    with pytest.raises(AssertionError) as failure:
        counted.expect_same_as(path, regenerate=False)
    assert (
        str(failure.value)
        == f"there is no snapshot {path} yet: run once with TORCHWHERE_REGENERATE=1, or call"
        " expect_same_as(path, regenerate=True)"
    )
    monkeypatch.delenv("TORCHWHERE_REGENERATE")
    counted.expect_same_as(path, regenerate=True)
    counted.expect_same_as(path)


NO_SNAPSHOTS = [
    ("nonsense", "not a snapshot of collectives: "),
    ("[]", "not a snapshot of collectives: "),
    (
        '{"comms snapshot": 1, "collectives": [{"module": "a"}]}',
        "not a snapshot of collectives: 'for'",
    ),
    (
        '{"comms snapshot": 9, "collectives": []}',
        "snapshot of version 9; this torchwhere reads version 1: regenerate it",
    ),
]


def test_a_file_that_is_no_snapshot(counted: torchwhere.comms, tmp_path: Path) -> None:
    """Another file is a ValueError that names it."""
    for content, said in NO_SNAPSHOTS:
        (tmp_path / "other").write_text(content)
        with pytest.raises(ValueError, match=r"^") as wrong:
            counted.expect_same_as(tmp_path / "other")
        assert str(wrong.value).startswith(f"{tmp_path}/other: {said}")


def test_a_snapshot_that_cannot_be_written(counted: torchwhere.comms, tmp_path: Path) -> None:
    """The error names the snapshot, and the file where its folder should be."""
    (tmp_path / "file").touch()
    with pytest.raises(torchwhere.TorchwhereError) as raised:
        counted.snapshot(tmp_path / "file" / "golden.json")
    assert (
        str(raised.value)
        == f"cannot write {tmp_path}/file/golden.json: {tmp_path}/file is not a folder"
    )


def test_snapshot_keeps_what_a_collective_is_for(two_ranks: Pool, tmp_path: Path) -> None:
    """The units and buckets that collectives serve are part of a snapshot, and survive the file."""
    two_ranks.run(_ddp_snapshot, str(tmp_path))


def _ddp_snapshot(folder: str) -> None:
    model = nn.parallel.DistributedDataParallel(Model(depth=1))
    for _ in range(2):  # until DDP has built its final buckets
        model(batch()).sum().backward()
    with torchwhere.comms(model) as c:
        model(batch()).sum().backward()
    path = Path(folder) / f"rank{dist.get_rank()}.json"
    c.snapshot(path)
    assert isinstance(json.loads(path.read_text())["collectives"][0]["for"], list)
    c.expect_same_as(path)
    c.expect(all_reduce=1, pass_="backward", for_="head")


def test_long_lists_are_cut() -> None:
    """A failure in a program with hundreds of places shows the first ones and the number of the
    others."""
    from torchwhere.diagnose.comms.expect import KnownNames, check
    from torchwhere.diagnose.comms.tree import CommsKey, CommsNode, CommsSum
    from torchwhere.render.expectation import failure

    found = Comms(ranks={0})
    for number in range(100):
        key = CommsKey("forward", "all_reduce", "default", None)
        found.root.children[f"m{number}"] = CommsNode(
            f"m{number}", own={key: CommsSum(1, 4, {0}, 1, {4})}
        )
    said = failure(check(found, filters={}, wanted={"calls": 1}, names=KnownNames())).splitlines()
    assert (len(said), said[-1]) == (44, "  … and 60 more rows")
