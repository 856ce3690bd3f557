"""`drop_in.fsdp_debug`: the tree of sharded modules, compared with the original. The first two
tests check what PyTorch's own tests checked for the older `fully_shard` that the original knows."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rank_pool import Pool
from torchwhere.drop_in.fsdp_debug import (
    _get_sharded_module_tree_with_module_name_to_fqns as tree_of,
)

Answer = tuple[str, dict[str, list[str]]]

TREE = """\
[CompositeModel] FULLY SHARDED
    l1[Linear]
    u1[UnitModule] FULLY SHARDED
        u1.l1[Linear]
        u1.seq[Sequential]
            u1.seq.0[ReLU]
            u1.seq.1[Linear]
            u1.seq.2[ReLU]
        u1.l2[Linear]
    u2[UnitModule] FULLY SHARDED
        u2.l1[Linear]
        u2.seq[Sequential]
            u2.seq.0[ReLU]
            u2.seq.1[Linear]
            u2.seq.2[ReLU]
        u2.l2[Linear]
    l2[Linear]
"""
ROOT = ["l1.weight", "l1.bias", "l2.weight", "l2.bias"]


class UnitModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1 = nn.Linear(6, 6)
        self.seq = nn.Sequential(nn.ReLU(), nn.Linear(6, 6), nn.ReLU())
        self.l2 = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l2(self.seq(self.l1(x)))


class CompositeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1 = nn.Linear(6, 6)
        self.u1 = UnitModule()
        self.u2 = UnitModule()
        self.l2 = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l2(self.u2(self.u1(self.l1(x))))


def of_unit(name: str) -> list[str]:
    return [
        f"{name}.{layer}.{kind}" for layer in ("l1", "seq.1", "l2") for kind in ("weight", "bias")
    ]


def original(model: nn.Module) -> Answer:
    from torch.distributed.fsdp._debug_utils import (
        _get_sharded_module_tree_with_module_name_to_fqns,
    )

    answer: Answer = _get_sharded_module_tree_with_module_name_to_fqns(model)
    return answer


def fsdp1(module: nn.Module, **options: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


# -- what PyTorch's own test checked ---------------------------------------------------------------


def _fsdp2() -> tuple[Answer, Answer, Answer]:
    from torch.distributed.fsdp import fully_shard

    model = CompositeModel()
    fully_shard(model.u1)
    fully_shard(model.u2)
    fully_shard(model)
    nested = CompositeModel()
    fully_shard(nested.u1)
    fully_shard(nested)
    return tree_of(model), tree_of(nested), original(model)


def test_fsdp2(two_ranks: Pool) -> None:
    """Units of `fully_shard` are marked, with the names of their own classes, and have the
    parameters that no inner unit has."""
    for answer in two_ranks.run(_fsdp2):
        (tree, managed), (_, nested), (_, of_original) = answer
        assert tree == TREE
        assert list(managed) == ["[CompositeModel]", "u1[UnitModule]", "u2[UnitModule]"]
        assert list(managed.values()) == [ROOT, of_unit("u1"), of_unit("u2")]
        assert list(nested) == ["[CompositeModel]", "u1[UnitModule]"]
        assert list(nested.values()) == [[*ROOT[:2], *of_unit("u2"), *ROOT[2:]], of_unit("u1")]
        assert of_original == {}, "the original has learned FSDP2: compare with it"


def _fsdp1() -> list[tuple[Answer, Answer]]:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({UnitModule})
    models = [
        fsdp1(CompositeModel(), auto_wrap_policy=policy, use_orig_params=keep)
        for keep in (True, False)
    ]
    return [(tree_of(model), original(model)) for model in models]


def test_fsdp1(two_ranks: Pool) -> None:
    """FSDP1 gives the same units and names: the wrapper has a line, and the module inside it is
    marked."""
    for answers in two_ranks.run(_fsdp1):
        for (tree, managed), (tree_of_original, of_original) in answers:
            assert managed == {
                "[CompositeModel]": ROOT,
                "u1[UnitModule]": of_unit("u1"),
                "u2[UnitModule]": of_unit("u2"),
            }
            lines = tree.splitlines()
            assert lines[:2] == ["[FullyShardedDataParallel]", "    [CompositeModel] FULLY SHARDED"]
            assert [line.strip() for line in lines if "[FullyShardedDataParallel]" not in line] == [
                line.strip() for line in TREE.splitlines()
            ]
            assert tree.replace(" FULLY SHARDED", "") == tree_of_original.replace(
                "_fsdp_wrapped_module.", ""
            ).replace("_fsdp_wrapped_module[", "[").replace(".[", "[")
            assert of_original == {}, "the original has learned FSDP1 again: compare with it"


# -- the same text as the original -----------------------------------------------------------------


def test_nothing_sharded_is_the_original_text() -> None:
    """For a model without FSDP, the text is that of the original, and the dict is empty."""
    model = nn.Sequential(CompositeModel(), nn.ModuleDict({"a": nn.ReLU(), "b": nn.Linear(2, 2)}))
    assert tree_of(model) == original(model)
    assert tree_of(model)[1] == {}


def test_ddp_is_the_original_text(one_rank: None) -> None:
    """DDP does not shard: the text is that of the original, with the names of
    `named_parameters`."""
    model = nn.parallel.DistributedDataParallel(CompositeModel())
    assert tree_of(model) == original(model)
    assert "    module[CompositeModel]\n" in tree_of(model)[0]


def test_types_are_those_of_the_original() -> None:
    """The result is a tuple of a string and a plain dict of lists of strings."""
    tree, managed = tree_of(nn.Linear(1, 1))
    assert (type(tree), type(managed), tree) == (str, dict, "[Linear]\n")


def test_the_page_shows_both() -> None:
    """The program in docs/migrating.md prints what the page shows, with the drop-in and with the
    original."""
    page = (Path(__file__).parent.parent / "docs" / "migrating.md").read_text()
    section = page.partition("the tree of sharded modules\n")[2].partition("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    ours, theirs = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    assert _printed(program) == ours
    assert (
        _printed(
            program.replace("torchwhere.drop_in.fsdp_debug", "torch.distributed.fsdp._debug_utils")
        )
        == theirs
    )


def _printed(program: str) -> str:
    hook = sys.excepthook
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(program, {})
    sys.excepthook = hook  # torch installs one of its own with a process group
    return out.getvalue()


# -- the rest of FSDP ------------------------------------------------------------------------------


def test_groups_ties_and_units_without_parameters(one_rank: None) -> None:
    """A unit of two modules is marked at both; a tied parameter is named once; a unit without
    parameters is not marked."""
    from torch.distributed.fsdp import fully_shard

    model = CompositeModel()
    model.l2.weight = model.l1.weight
    fully_shard([model.u1, model.u2])
    fully_shard([model.l1, model.l2])
    fully_shard(model)
    tree, managed = tree_of(model)
    assert managed == {
        "l1[Linear]": ["l1.weight", "l1.bias"],
        "u1[UnitModule]": of_unit("u1"),
        "u2[UnitModule]": of_unit("u2"),
        "l2[Linear]": ["l2.bias"],
    }
    assert tree.splitlines()[0] == "[CompositeModel]"
    assert tree.count(" FULLY SHARDED\n") == 4


def test_gathered_units_and_checkpointing(one_rank: None) -> None:
    """The answer is the same during a forward, when parameters are gathered; checkpointing adds no
    name."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    model = CompositeModel()
    model.u1 = fully_shard(checkpoint_wrapper(model.u1))
    fully_shard(model)
    before, inside = tree_of(model), []
    model.l2.register_forward_pre_hook(lambda *_: inside.append(tree_of(model)))
    model(torch.ones(1, 6))
    assert inside == [before]
    assert before[1]["u1[CheckpointWrapper]"] == of_unit("u1")
    assert "        u1[UnitModule]\n            u1.l1[Linear]\n" in before[0]
    wrapped = nn.Sequential(fsdp1(checkpoint_wrapper(UnitModule())))
    assert list(tree_of(wrapped)[1]) == ["0[CheckpointWrapper]"]


def test_replicated_is_not_sharded(one_rank: None) -> None:
    """`replicate`, which uses parts of FSDP2, does not shard and is not marked."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model = CompositeModel()
    replicate(model)
    tree, managed = tree_of(model)
    assert managed == {}
    assert tree == TREE.replace(" FULLY SHARDED", "")


def test_a_world_that_is_gone() -> None:
    """The tree is the same after the process group was destroyed."""
    from torch.distributed.fsdp import fully_shard

    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = CompositeModel()
    for module in (model.u1, model.u2, model):
        fully_shard(module)
    dist.destroy_process_group()
    sys.excepthook = hook  # torch installs one of its own and leaves it
    assert tree_of(model)[0] == TREE


def test_not_a_module() -> None:
    """An argument that is not a module is a TypeError, not an AttributeError from inside."""
    expected = (
        r"^_get_sharded_module_tree_with_module_name_to_fqns\(model\): expected a"
        r" torch\.nn\.Module, got dict$"
    )
    with pytest.raises(TypeError, match=expected):
        tree_of({})  # type: ignore[arg-type]
