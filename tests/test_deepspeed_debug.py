"""The drop-in for `deepspeed.utils.debug` returns what the original returns, and has answers where
the original has none."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import re
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchwhere
from models import Block, Model, batch
from rank_pool import Pool
from torchwhere.api import printing
from torchwhere.drop_in import deepspeed_debug as debug

pytestmark = pytest.mark.checks_itself  # importing DeepSpeed leaves hooks and threads

OF_PARAMS = (
    "debug_param2name",
    "debug_param2name_id",
    "debug_param2name_id_shape",
    "debug_param2name_id_shape_device",
    "debug_param2name_id_numel",
    "debug_param2name_id_shape_status",
)
OF_MODULES = ("debug_module2name", "debug_module2name_id", "debug_module2name_class")


@pytest.fixture
def original() -> Any:
    return importlib.import_module("deepspeed.utils.debug")


@pytest.fixture(autouse=True)
def names_are_cleared() -> Iterator[None]:
    """Each test ends with empty maps and closed log files."""
    yield
    debug.debug_clear_module_and_param_names()
    printing.close_logs()


# -- as the original -------------------------------------------------------------------------------


def test_every_name_of_the_original_is_there(original: Any) -> None:
    """Every name of the original can be imported from the drop-in."""
    theirs = {name for name in vars(original) if not name.startswith("__")} - {"weakref"}
    assert theirs <= set(vars(debug))


def test_the_same_answers(original: Any) -> None:
    """On a plain model every function answers like the original, for known and unknown objects."""
    model = Model()
    model.again = model.head
    for toolbox in (original, debug):
        toolbox.debug_extract_module_and_param_names(model)
    stranger = nn.Linear(2, 2)
    stranger.weight.ds_id, stranger.weight.ds_shape, stranger.weight.ds_status = (
        7,
        (4, 4),
        "PARTITIONED",
    )
    for name in OF_PARAMS[:-1]:
        for param in (*model.parameters(), *stranger.parameters()):
            assert getattr(debug, name)(param) == getattr(original, name)(param)
    for name in OF_MODULES:
        for module in (*model.modules(), stranger):
            assert getattr(debug, name)(module) == getattr(original, name)(module)
    assert debug.debug_param2name_id_shape_status(
        stranger.weight
    ) == original.debug_param2name_id_shape_status(stranger.weight)
    assert (len(debug.module_names), len(debug.param_names)) == (
        len(original.module_names),
        len(original.param_names),
    )
    original.debug_clear_module_and_param_names()


def test_the_texts() -> None:
    """The texts have names, ids, shapes, devices and numels, and `none` without ZeRO."""
    model = Model()
    debug.debug_extract_module_and_param_names(model)
    weight = model.layers[0].up.weight
    assert debug.debug_module2name(model) == ""
    assert debug.debug_module2name_class(model.layers[0]) == "name=layers.0 Block"
    assert debug.debug_module2name_id(model.layers[0]) == "name=layers.0"
    model.layers[0].id = 4  # older versions of DeepSpeed number modules
    assert debug.debug_module2name_id(model.layers[0]) == "name=layers.0 id=4"
    assert debug.debug_param2name_id(weight) == "name=layers.0.up.weight id=none"
    assert (
        debug.debug_param2name_id_shape(weight)
        == "name=layers.0.up.weight id=none shape=torch.Size([8, 8])"
    )
    assert debug.debug_param2name_id_shape_device(weight).endswith(
        " shape=torch.Size([8, 8]) device=cpu"
    )
    assert debug.debug_param2name_id_numel(weight) == "name=layers.0.up.weight id=none numel=64"
    assert debug.debug_param2name_id_shape_status(weight).endswith(
        " shape=torch.Size([8, 8]) status=none"
    )
    assert debug.debug_module2name(nn.ReLU()) == debug.debug_param2name(torch.ones(1)) == "unknown"


def test_names_follow_the_model() -> None:
    """Names have no prefixes of wrappers, stay valid after wrapping, and replaced objects are not
    kept alive."""
    model = Model()
    debug.debug_extract_module_and_param_names(torch.compile(model))
    assert debug.debug_param2name(model.head.weight) == "head.weight"
    assert debug.debug_module2name(torch.compile(model)) == ""
    replaced, count = weakref.ref(model.layers[0]), len(debug.param_names)
    model.layers[0] = nn.Identity()
    gc.collect()
    assert replaced() is None
    assert len(debug.param_names) == count - 4
    model.head = nn.Linear(8, 2)
    assert debug.debug_param2name(model.head.weight) == "head.weight"
    debug.debug_extract_module_and_param_names(other := Block())
    assert debug.debug_param2name(model.head.weight) == "unknown"
    assert debug.debug_param2name(other.up.weight) == "up.weight"
    debug.debug_clear_module_and_param_names()
    assert (len(debug.module_names), len(debug.param_names)) == (0, 0)
    assert debug.debug_param2name(other.up.weight) == "unknown"


def test_the_maps_by_hand() -> None:
    """`param_names` and `module_names` store and return names, and never confuse a new object with
    a deleted one."""
    doomed = nn.Linear(4, 4, bias=False)
    debug.param_names[doomed.weight] = "ghost"
    debug.param_names[doomed.weight] = "spirit"
    assert debug.param_names[doomed.weight] == debug.debug_param2name(doomed.weight) == "spirit"
    del doomed
    gc.collect()
    assert debug.debug_param2name(nn.Linear(4, 4, bias=False).weight) == "unknown"
    own = debug.WeakIdNameMap()
    own[module := nn.ReLU()] = "relu"
    assert module in own
    assert len(own) == 1
    own.clear()
    assert module not in own
    debug.debug_extract_module_and_param_names(model := Model())
    debug.param_names.clear()
    assert debug.debug_param2name(model.head.weight) == "unknown"
    assert debug.debug_module2name(model.head) == "head"


def test_ddp_leaves_no_prefix(one_rank: None) -> None:
    """With DDP around the model, before or after, the names are the same."""
    model = Model()
    debug.debug_extract_module_and_param_names(model)
    wrapped = DistributedDataParallel(model)
    assert debug.debug_module2name_class(wrapped) == "name= DistributedDataParallel"
    debug.debug_extract_module_and_param_names(wrapped)
    assert {debug.debug_param2name(param) for param in model.parameters()} == {
        name for name, _ in model.named_parameters()
    }


def test_a_freed_parameter_is_not_printed(
    one_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a whole parameter that FSDP2 has freed, the text says so, and the process does not
    crash."""
    model, mesh = (
        nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU()),
        init_device_mesh("cpu", (1,)),
    )
    fully_shard(model[0], mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    debug.print_backward_tensors(model(torch.ones(2, 4)).sum())
    assert "shape: torch.Size([4, 4]), data: freed, grad: None" in capsys.readouterr().out


def test_bad_input() -> None:
    """A wrong model or parameter is an error that says what was expected, never an
    AttributeError."""
    with pytest.raises(
        TypeError,
        match=(
            r"^debug_extract_module_and_param_names\(model\): expected a torch.nn.Module, got int\."
        ),
    ):
        debug.debug_extract_module_and_param_names(3)  # type: ignore[arg-type]
    assert debug.debug_module2name(3) == debug.debug_param2name(3) == "unknown"  # type: ignore[arg-type]
    for name, missing in (
        ("_shape", "shape"),
        ("_shape_device", "shape"),
        ("_numel", "numel"),
        ("_shape_status", "shape"),
    ):
        with pytest.raises(
            TypeError, match=rf"^expected a parameter, got int, which has no {missing}$"
        ):
            getattr(debug, f"debug_param2name_id{name}")(3)
    with pytest.raises(
        ValueError,
        match=(
            r"^print_backward_tensors\(tensor\): this tensor has no graph \(its grad_fn is"
            r" None"
        ),
    ):
        debug.print_backward_tensors(torch.ones(1))


# -- sharded ---------------------------------------------------------------------------------------


def _zero(stage: int) -> dict[str, Any]:
    import deepspeed
    from deepspeed.utils import debug as theirs

    torch.manual_seed(0)
    model = Model()
    names, stale = torchwhere.names(model), model.layers[0].up.weight
    debug.debug_extract_module_and_param_names(model)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 100,
        },
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters()
    )
    weight = model.layers[0].up.weight
    theirs.debug_extract_module_and_param_names(model)

    def now() -> dict[str, Any]:
        # the original fails without a status
        functions = OF_PARAMS if stage == 3 else OF_PARAMS[:-1]
        same = all(
            getattr(debug, name)(p) == getattr(theirs, name)(p)
            for name in functions
            for p in model.parameters()
        )
        return {
            "same": same,
            "facts": names.facts("layers.0.up.weight").to_dict(),
            "status": debug.debug_param2name_id_shape_status(weight),
            "numel": debug.debug_param2name_id_numel(weight),
            "described": torchwhere.describe(weight),
        }

    moments = {"before": now()}
    model.layers[0].up.register_forward_pre_hook(lambda *_: moments.update({"in forward": now()}))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        moments["gathered"] = now()
    moments["after"] = now()
    engine.backward(engine(batch()).pow(2).mean())
    engine.step()
    moments["trained"] = now()
    ids = [names.facts(name).id for name, _ in model.named_parameters()]
    wrapped = [
        names[engine],
        debug.debug_module2name(engine),
        debug.debug_param2name(stale),
        names["module.head"] is model.head,
    ]
    answer = {"seen": moments, "ids": ids, "wrapped": wrapped, "table": str(names)}
    theirs.debug_clear_module_and_param_names()
    debug.debug_clear_module_and_param_names()
    engine.destroy()
    return answer


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero(two_ranks: Pool, stage: int) -> None:
    """With real ZeRO, names, ids, shapes and status are those of the original before, during and
    after gathering; torchwhere's own facts distinguish this rank's shard from the whole."""
    for answer in two_ranks.run(_zero, stage, checks_itself=True):
        moments, partitioned = answer["seen"], stage == 3
        assert set(moments) == {"before", "gathered", "in forward", "after", "trained"}
        for moment, now in moments.items():
            assert now["same"], moment
            is_whole = not partitioned or moment in ("gathered", "in forward")
            availability = "AVAILABLE" if is_whole else "NOT_AVAILABLE"
            status = availability if partitioned else None
            facts = now["facts"]
            assert (facts["name"], facts["shape"], facts["numel"], facts["zero_status"]) == (
                "layers.0.up.weight",
                (8, 8),
                64,
                status,
            ), moment
            assert facts["local_numel"] == (32 if partitioned else 64)
            number = facts["id"] if partitioned else "none"
            text = f"ZeroParamStatus.{status}" if partitioned else "none"
            assert (
                now["status"]
                == f"name=layers.0.up.weight id={number} shape=torch.Size([8, 8]) status={text}"
            )
            assert (
                now["numel"] == f"name=layers.0.up.weight id={number} numel={64 if is_whole else 0}"
            )
            assert now["described"].startswith("parameter layers.0.up.weight: [8, 8] float32 cpu")
            assert (f"ZeRO id {number}, {status}" in now["described"]) is partitioned
        assert len(set(answer["ids"])) == 10 if partitioned else answer["ids"] == [None] * 10
        assert answer["wrapped"] == [[""], "", "layers.0.up.weight", True]
        assert ("NOT_AVAILABLE" in answer["table"]) is partitioned


def _sharded() -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = Model()
    debug.debug_extract_module_and_param_names(model)
    fully_shard(model)
    answer = {"fsdp2": debug.debug_param2name_id_shape_status(model.head.weight)}
    for use_orig_params in (True, False):
        model = Model()
        debug.debug_extract_module_and_param_names(model)
        wrapped = FullyShardedDataParallel(
            model, use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        param = model.head.weight if use_orig_params else wrapped._handle.flat_param
        answer[f"fsdp1, {use_orig_params}"] = debug.debug_param2name_id_shape_status(param)
    debug.debug_clear_module_and_param_names()
    return answer


@pytest.mark.filterwarnings("ignore")
def test_fsdp(two_ranks: Pool) -> None:
    """Parameters of FSDP2 and FSDP1, flat ones too, have their names and whole shapes, and DTensors
    their placements."""
    for answer in two_ranks.run(_sharded, checks_itself=True):
        assert (
            answer["fsdp2"]
            == "name=head.weight id=none shape=torch.Size([8, 8]) status=none placements=(Shard(0))"
        )
        assert (
            answer["fsdp1, True"] == "name=head.weight id=none shape=torch.Size([8, 8]) status=none"
        )
        assert (
            answer["fsdp1, False"] == "name=_flat_param id=none shape=torch.Size([360]) status=none"
        )


# -- printing --------------------------------------------------------------------------------------


def test_printflock(original: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`printflock` prints like `print`, also without fcntl."""
    original.printflock("a", 1, None)
    debug.printflock("a", 1, None)
    assert capsys.readouterr().out == "a 1 None\n" * 2
    with mock.patch.object(debug, "fcntl", None), mock.patch.dict(sys.modules, {"fcntl": None}):
        debug.printflock("printed without fcntl")
    assert capsys.readouterr().out == "printed without fcntl\n"


def test_print_rank(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`print_rank` prints only with `force`, after the rank, with or without a process group."""
    monkeypatch.setenv("RANK", "2")
    debug.print_rank("no")
    debug.print_rank0("no")
    debug.print_rank0("no", force=True)
    debug.print_rank("a", 1, force=True)
    monkeypatch.setattr(debug.dist, "get_rank", lambda: 0)
    debug.print_rank0("zero", force=True)
    assert capsys.readouterr().out == "[2] a 1\n[0] zero\n"


def test_log_rank_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`log_rank_file` appends a line for each message at once, to the file of its rank in the
    working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log_rank_1.txt").write_text("older\n")
    debug.log_rank_file(0, "a", 2)
    debug.log_rank_file(1, "b")
    debug.log_rank_file(0, None)
    assert (tmp_path / "log_rank_0.txt").read_text() == "a\n2\nNone\n"
    assert (tmp_path / "log_rank_1.txt").read_text() == "older\nb\n"
    assert debug.fh is not None
    debug.fh.close()
    debug.log_rank_file(0, "c")
    assert (tmp_path / "log_rank_0.txt").read_text().endswith("None\nc\n")


# -- the graph -------------------------------------------------------------------------------------


def test_backward_tensors_as_the_original(
    original: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """If no node is reached twice, the text equals that of the original."""
    model = Model()
    loss = model(batch()).sum()
    original.print_backward_tensors(loss)
    theirs = capsys.readouterr().out
    debug.print_backward_tensors(loss)
    assert capsys.readouterr().out == theirs
    debug.print_backward_tensors(3)  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""


def test_backward_tensors_once_each_with_names(capsys: pytest.CaptureFixture[str]) -> None:
    """For twenty residual layers every node is printed once, with names, where the original visits
    millions."""
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(20))
    debug.debug_extract_module_and_param_names(layers)
    with torchwhere.watch(layers):
        x = torch.ones(1, 2)
        for layer in layers:
            x = x + layer(x)
        debug.print_backward_tensors(x)
    text = capsys.readouterr().out
    headers = re.findall(r"^Backward tensors in (<\w+ object at \w+>)(.*)$", text, re.MULTILINE)
    assert len(headers) == len({node for node, _ in headers}) == 60
    assert ("AddmmBackward0", " of 3") in {(node[1:].split(" ")[0], rest) for node, rest in headers}
    assert sorted(re.findall(r"grad: None, name: (\S+)$", text, re.MULTILINE)) == sorted(
        dict(layers.named_parameters())
    )


def test_backward_tensors_of_a_long_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain deeper than the recursion limit of Python is printed completely."""
    x = leaf = torch.ones(1, requires_grad=True)
    for _ in range(20_000):
        x = x * 1
    printed: list[str] = []
    monkeypatch.setattr(debug.dist, "print_whole", printed.append)
    debug.print_backward_tensors(x)
    assert len(printed) == 20_001
    assert (
        f"Tensor - id: {id(leaf)}, shape: torch.Size([1]), data: tensor([1.], requires_grad=True),"
        " grad: None" in printed[-1]
    )


def test_deepspeed_is_not_needed() -> None:
    """The drop-in does not import DeepSpeed, and works without it."""
    import subprocess

    code = (
        "import sys; sys.modules['deepspeed'] = None; from torchwhere.drop_in import"
        " deepspeed_debug as d; d.printflock('ok')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=400
    )
    assert (done.stdout, done.stderr) == ("ok\n", "")


# -- side by side ----------------------------------------------------------------------------------


def _printed(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir()
    monkeypatch.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(program, "train.py", "exec"), {"__name__": "__main__"})
    return out.getvalue()


def test_side_by_side(original: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program in docs/migrating.md prints what the page shows, with the drop-in and with the
    original."""
    page = Path(__file__).parent.parent / "docs" / "migrating.md"
    before, start, section = page.read_text().partition("## DeepSpeed's")
    section, end, after = section.partition("\n## ")
    program, *shown = re.findall(r"```(?:python|text)\n(.*?)```", section, re.DOTALL)
    changed = program.replace("torchwhere.drop_in.deepspeed_debug", "deepspeed.utils.debug")
    assert changed != program
    monkeypatch.setattr(original, "fh", None)
    printed = [
        _printed(program, tmp_path / "ours", monkeypatch),
        _printed(changed, tmp_path / "theirs", monkeypatch),
    ]
    original.fh.close()
    original.debug_clear_module_and_param_names()
    if os.environ.get("TORCHWHERE_REGENERATE"):
        for was, now in zip(shown, printed, strict=True):
            section = section.replace(f"```text\n{was}```", f"```text\n{now}```", 1)
        page.write_text(before + start + section + end + after)
    else:
        assert shown == printed
