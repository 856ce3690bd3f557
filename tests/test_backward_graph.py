"""What is behind a tensor: every node once, at any size and depth, with places, names, shapes and
lines; text, DOT and JSON."""

from __future__ import annotations

import gc
import json
import random
import re
import threading
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchwhere
from models import Model, batch
from rank_pool import Pool
from torchwhere.core.place import Certainty
from torchwhere.model.graph_walk import is_freed, nodes_of, roots_of, walk
from warm_python import WarmPython


class Residual(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.up(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Residual() for _ in range(depth))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(4)).mean()


# -- the walk --------------------------------------------------------------------------------------


def naive(roots: list[Any]) -> tuple[set[Any], Counter[tuple[Any, Any]]]:
    """Recursive and slow: what the walk must give for small graphs."""
    nodes: set[Any] = set()
    edges: Counter[tuple[Any, Any]] = Counter()

    def visit(node: Any) -> None:
        if node not in nodes:
            nodes.add(node)
            for following, _ in node.next_functions:
                if following is not None:
                    edges[node, following] += 1
                    visit(following)

    for root in roots:
        visit(root)
    return nodes, edges


def random_tensors(seed: int) -> list[torch.Tensor]:
    """Tensors computed from each other at random; some need no gradient, some share everything."""
    dice = random.Random(seed)
    found = [torch.ones(2, requires_grad=dice.random() < 0.7) for _ in range(dice.randint(1, 4))]
    for _ in range(dice.randint(1, 25)):
        a, b = dice.choice(found), dice.choice(found)
        found.append(
            dice.choice(
                [
                    torch.add,
                    torch.mul,
                    lambda x, y: x.sin(),
                    lambda x, y: torch.stack([x, y, x]).sum(0),
                ]
            )(a, b)
        )
    return [
        tensor
        for tensor in dice.sample(found, dice.randint(1, len(found)))
        if tensor.grad_fn is not None
    ]


def test_walk_is_what_a_naive_walk_gives() -> None:
    """The walk gives the nodes and edges of a naive recursive walk, each node once and before those
    it leads to."""
    for seed in range(300):
        roots = roots_of(random_tensors(seed))
        nodes, edges = naive(roots)
        trail = walk(roots)
        assert len(trail.nodes) == len(set(trail.nodes)) == len(nodes), seed
        assert set(trail.nodes) == nodes, seed
        starts, targets = trail.starts.tolist(), trail.targets.tolist()
        pairs = [
            (number, target)
            for number in range(len(nodes))
            for target in targets[starts[number] : starts[number + 1]]
        ]
        assert Counter((trail.nodes[a], trail.nodes[b]) for a, b in pairs) == edges, seed
        assert all(a < b for a, b in pairs), seed


def test_walk_keeps_the_order_of_edges() -> None:
    """The nodes that one leads to are in torch's own order."""
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    trail = walk([(a.sin() * b.cos()).grad_fn])
    following = [trail.nodes[target] for target in trail.targets[trail.starts[0] : trail.starts[1]]]
    assert following == [node for node, _ in trail.nodes[0].next_functions]


def test_a_stack_of_residual_layers_is_linear() -> None:
    """40 residual layers, with a million million paths, have one node for each operation."""
    x = torch.ones(2, requires_grad=True)
    y = x
    for _ in range(40):
        y = y + y.sin()
    assert len(torchwhere.backward_graph(y)) == 81
    assert Counter(node.name() for node in nodes_of([y.grad_fn]))["SinBackward0"] == 40


DEEP = """
import sys, torch, torchwhere
x = torch.ones(2, requires_grad=True)
y = x
for _ in range(100_000):
    y = y + 1
graph = torchwhere.backward_graph(y)
again = torchwhere.backward_graph(y * 2)
print(len(graph), len(again), len(set(graph[99_999].following)))
print(str(graph))
y.sum().backward()
del y, again
print(x.grad.tolist())
text = str(graph)
del graph, text
ends = []
for _ in range(int(sys.argv[1])):  # side by side, each too long for a recursion
    y = x
    for _ in range(9_999):
        y = y + 1
    ends.append(y)
y = torch.stack(ends)
before = int(open("/proc/self/statm").read().split()[1])
graph = torchwhere.backward_graph(y)
after = int(open("/proc/self/statm").read().split()[1])
print(len(graph), len(graph.leaves), graph.edges.shape[0])
del y, ends
print((after - before) * 4096 // len(graph) < 400, "done")
"""


@pytest.mark.parametrize("chains", [10, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_a_chain_of_100_000_and_a_million_nodes(warm: WarmPython, chains: int) -> None:
    """A chain of 100,000 is walked and freed without a stack overflow; 100,000 nodes and a million
    take less than 400 bytes each."""
    done = warm.run("-c", DEEP, chains)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "100001 100002 1",
        "behind 1 tensor: 100,001 nodes, 100,000 edges, 1 leaf without a name",
        "    0  99,999 x AddBackward0  [2]",
        "99999  AddBackward0           [2]  leaf #100000",
        "[1.0, 1.0]",
        f"{chains * 9_999 + 2} 1 {chains * 10_000}",
        "True done",
    ]


def test_a_walk_changes_no_gradient() -> None:
    """The gradients after a walk over a deep graph are bit by bit those without."""

    def gradient(*, walked: bool) -> torch.Tensor:
        x = torch.linspace(0, 1, 5, requires_grad=True)
        y = x
        for _ in range(1500):
            y = y + y.sin() * 1e-3
        if walked:
            torchwhere.backward_graph(y)
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(walked=True), gradient(walked=False))


def test_holds_are_put_once() -> None:
    """Walking a deep graph again leaves no more behind than the first time, and only where it is
    deep."""
    x = torch.ones(2, requires_grad=True)
    y = x
    for _ in range(1200):
        y = y + 1
    counts = []
    for _ in range(3):
        nodes = walk([y.grad_fn]).nodes
        counts.append(
            [
                len(node.metadata.get("torchwhere", ()))
                for node in nodes
                if node.metadata.get("torchwhere")
            ]
        )
    assert counts[0] == counts[1] == counts[2] == [1, 1]


# -- what is known of a node -----------------------------------------------------------------------


def test_modules_calls_and_parameters_under_a_watch() -> None:
    """Nodes know the module call that made them, leaves the parameter; what is outside any module
    says so."""
    model = Model(depth=1)
    with torchwhere.watch(model):
        loss = model(model(batch())).sum()
        graph = torchwhere.backward_graph(loss)
    addmm = [(node.module, node.call) for node in graph if node.op == "AddmmBackward0"]
    assert addmm == [
        ("head", 1),
        ("layers.0.down", 1),
        ("layers.0.up", 1),
        ("head", 0),
        ("layers.0.down", 0),
        ("layers.0.up", 0),
    ]
    assert [(node.module, node.call) for node in graph if node.op == "ReluBackward0"] == [
        ("layers.0", 1),
        ("layers.0", 0),
    ]
    first = graph[0]
    assert (first.op, first.module, first.certainty, first.shapes, first.dtype) == (
        "SumBackward0",
        None,
        Certainty.EXACT,
        ((),),
        "float32",
    )
    assert sorted(graph.parameters) == sorted(name for name, _ in model.named_parameters())
    assert {leaf.module for leaf in graph.leaves} == {"layers.0.up", "layers.0.down", "head"}
    assert all(leaf.sequence_nr is None and leaf.op == "AccumulateGrad" for leaf in graph.leaves)


def test_names_from_a_model_without_a_watch() -> None:
    """Without a watch the model names its parameters, and the modules of the nodes that use them,
    as inferred."""
    model = Model(depth=1)
    graph = torchwhere.backward_graph(model(batch()).sum(), model=model)
    found = {node.op: (node.module, node.certainty) for node in graph}
    assert found["AddmmBackward0"] == ("layers.0.up", Certainty.INFERRED)
    assert found["ReluBackward0"] == (None, Certainty.UNKNOWN)
    assert "head.weight" in graph.parameters
    assert torchwhere.backward_graph(model(batch()).sum()).parameters == []


def test_names_that_were_asked_for_are_known() -> None:
    """A model whose names were asked for needs not be given again."""
    model = Model(depth=1)
    kept = torchwhere.names(model)
    assert "head.bias" in torchwhere.backward_graph(model(batch()).sum()).parameters
    assert kept["head.bias"] is model.head.bias


def test_a_tied_parameter_has_all_its_names() -> None:
    """A parameter that two modules share is one leaf with both names."""
    model = Model(depth=1)
    model.head.weight = model.layers[0].up.weight
    leaves = torchwhere.backward_graph(model(batch()).sum(), model=model).leaves
    assert [leaf.names for leaf in leaves if len(leaf.names) > 1] == [
        ("layers.0.up.weight", "head.weight")
    ]


def _fsdp_names(kind: str) -> list[str]:
    """On a rank: the parameters behind the loss of a sharded model."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model: Any = Model(depth=2)
    if kind == "fsdp2":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        device = torch.device("cpu")
        model.layers[0] = FullyShardedDataParallel(
            model.layers[0], device_id=device, use_orig_params=True
        )
        model = FullyShardedDataParallel(model, device_id=device, use_orig_params=True)
    with torchwhere.watch(model):
        graph = torchwhere.backward_graph(model(batch()).sum())
    return sorted(graph.parameters)


def test_sharded_parameters_have_names(two_ranks: Pool) -> None:
    """FSDP2 computes with whole parameters that are in no module, FSDP1 with flat ones: their
    leaves have names."""
    whole = sorted(name for name, _ in Model(depth=2).named_parameters())
    assert two_ranks.run(_fsdp_names, "fsdp2") == [whole, whole]
    flat = ["_flat_param", "layers.0._flat_param"]
    assert two_ranks.run(_fsdp_names, "fsdp1") == [flat, flat]


def test_several_tensors_nodes_and_edges() -> None:
    """A list of tensors has one graph, the first tensor first; a node and a gradient edge are as
    good as a tensor."""
    x = torch.ones(2, requires_grad=True)
    a, b = x.sin(), x.cos()
    graph = torchwhere.backward_graph([a, b, torch.ones(1)])
    assert [graph[root].op for root in graph.roots] == ["SinBackward0", "CosBackward0"]
    assert graph[0].op == "SinBackward0"
    assert len(graph) == 3
    assert len(torchwhere.backward_graph(a.grad_fn)) == 2
    assert len(torchwhere.backward_graph(torch.autograd.graph.get_gradient_edge(a))) == 2


def test_custom_functions_checkpoints_and_outputs_that_are_many() -> None:
    """A custom function has its name, a checkpointed block is one node until it runs, a split has
    all its shapes."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
    parts = Twice.apply(checkpoint(torch.sin, x, use_reentrant=True)).split(2, dim=1)
    graph = torchwhere.backward_graph(list(parts))
    assert [node.op for node in graph] == [
        "SplitBackward0",
        "TwiceBackward",
        "CheckpointFunctionBackward",
        "AccumulateGrad",
    ]
    assert graph[0].shapes == ((4, 2), (4, 2), (4, 2))
    assert graph[0].dtype == "float64"


def test_a_graph_made_on_another_thread() -> None:
    """Nodes that two threads could have made are the asking thread's, as inferred."""
    model = Model(depth=1)
    with torchwhere.watch(model):
        model(batch())
        kept: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: kept.append(model(batch()).sum()), name="maker")
        thread.start()
        thread.join()
        ours = torchwhere.backward_graph(model(batch()).sum())
        assert {node.certainty for node in ours} <= {Certainty.EXACT, Certainty.INFERRED}
        assert ("head", Certainty.EXACT) in {(node.module, node.certainty) for node in ours}


def test_it_keeps_nothing_of_torch_alive() -> None:
    """A graph holds numbers and texts: the model and the tensors go when the program lets them
    go."""
    model = Model(depth=1)
    loss = model(batch()).sum()
    graph = torchwhere.backward_graph(loss, model=model)
    gone = weakref.ref(model), weakref.ref(model.head.weight), weakref.ref(loss)
    del model, loss
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    assert "head.weight" in graph.parameters


def test_nodes_are_a_sequence() -> None:
    """Nodes are counted, sliced, indexed from both ends and iterated; beyond the end there is
    none."""
    graph = torchwhere.backward_graph(loss_of(Stack(1)))
    assert len(graph.nodes) == len(graph) == len(list(graph))
    assert graph.nodes[-1].number == len(graph) - 1
    assert [node.number for node in graph.nodes[1:3]] == [1, 2]
    assert graph[0].following == graph.nodes[0].following
    with pytest.raises(IndexError):
        graph[len(graph)]


# -- freed -----------------------------------------------------------------------------------------


def test_a_freed_graph() -> None:
    """After backward a graph is refused, with what to do; asked for all the same it is given, and
    says that it is freed."""
    loss = loss_of(Stack(1))
    loss.backward()
    with pytest.raises(
        ValueError,
        match=r"backward has run over this graph and freed the saved tensors of \d+ of its \d+ nodes",
    ):
        torchwhere.backward_graph(loss)
    graph = torchwhere.backward_graph(loss, freed=True)
    assert graph.freed > 3
    assert f"backward has run and freed the saved tensors of {graph.freed} nodes" in str(graph)


def test_a_kept_graph_is_not_freed() -> None:
    """After backward(retain_graph=True) nothing is freed."""
    loss = loss_of(Stack(1))
    loss.backward(retain_graph=True)
    assert torchwhere.backward_graph(loss).freed == 0


def test_what_was_never_saved_is_not_freed() -> None:
    """A node that needed to save nothing is not taken for a freed one, although the tensors it
    could have saved are absent."""
    x = torch.ones(2, requires_grad=True)
    node = torch.addcmul(x, torch.ones(2), torch.ones(2)).grad_fn
    assert node is not None
    assert not is_freed(node)


def test_looking_for_saved_tensors_unpacks_none() -> None:
    """Saved tensors with hooks (offloading, checkpointing) are not unpacked to find out whether
    they are there."""
    unpacked = []

    def unpack(kept: Any) -> Any:
        unpacked.append(1)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = torch.ones(3, requires_grad=True).exp().sum()
    assert torchwhere.backward_graph(loss).freed == 0
    assert unpacked == []


# -- as text, DOT, JSON ----------------------------------------------------------------------------


def test_text_folds_layers() -> None:
    """Layers that are alike are one block, with the span of their numbers; what an edge skips is
    drawn beside it."""
    model = Stack()
    with torchwhere.watch(model):
        text = str(torchwhere.backward_graph(loss_of(model)))
    assert text.splitlines() == [
        "behind 1 tensor: 43 nodes, 46 edges, 19 parameters",
        " 0  MeanBackward0                                      []",
        " 1  AddmmBackward0                    head             [4, 8]  bias, weight (T)",
        " 3  4 x ┌ AddBackward0                layers.0-3       [4, 8]  → 4, 8",
        " 4      │ │ ReluBackward0             layers.0-3       [4, 8]",
        " 5      │ │ AddmmBackward0            layers.0-3.up    [4, 8]  bias, weight (T)",
        " 7      └ │ NativeLayerNormBackward0  layers.0-3.norm  [4, 8]  weight, bias",
        "23  EmbeddingBackward0                emb              [4, 8]  weight",
    ]


def test_text_of_a_small_graph() -> None:
    """A graph without repeats has a line for each operation; leaves without a name are told by
    number."""
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert str(torchwhere.backward_graph(a.sin() * b.cos() + a)).splitlines() == [
        "behind 1 tensor: 6 nodes, 6 edges, 2 leaves without a name",
        "0  AddBackward0    [2]  leaf #5",
        "1  MulBackward0    [2]  → 2, 3",
        "2  │ SinBackward0  [2]  leaf #5",
        "3  └ CosBackward0  [2]  leaf #4",
    ]


def test_layers_that_differ_are_not_folded() -> None:
    """A layer that differs from its neighbours stays apart, and layers out of order are not given
    as a span of all between."""
    model = Stack(5)
    model.layers[2].up = nn.Linear(8, 8, bias=False)
    with torchwhere.watch(model):
        text = str(torchwhere.backward_graph(loss_of(model)))
    assert re.findall(r"\d+ x ┌ \w+ layers\.[\d-]+", re.sub(" +", " ", text)) == [
        "2 x ┌ AddBackward0 layers.3-4",
        "2 x ┌ AddBackward0 layers.0-1",
    ]
    assert "layers.3-4.up" in text
    assert "layers.0-1.up" in text
    assert re.search(r"layers\.2\.up .*weight \(T\)", text)
    shuffled = Stack(4)
    with torchwhere.watch(shuffled):
        x = shuffled.emb(torch.arange(4))
        for number in (2, 0, 3, 1):
            x = shuffled.layers[number](x)
        text = str(torchwhere.backward_graph(x))
    assert "layers.1,3.up" in text
    assert "layers.0,2.up" in text


def test_every_other_layer() -> None:
    """Two kinds of layers in turns are one block, and each line says which of the layers it stands
    for."""
    model = Stack(6)
    for layer in model.layers[1::2]:
        layer.up = nn.Linear(8, 8, bias=False)
    with torchwhere.watch(model):
        text = str(torchwhere.backward_graph(loss_of(model)))
    assert "3 x ┌ AddBackward0" in text
    assert "layers.1,3..5.up" in text
    assert "layers.0,2..4.up" in text


def test_text_is_cut_where_asked() -> None:
    """A long text is cut after so many lines and says so; None gives all."""
    x = torch.ones(2, requires_grad=True)
    y = x
    for number in range(30):
        y = [y.sin, y.cos, y.exp, y.tanh][number * number % 31 % 4]()
    graph = torchwhere.backward_graph(y)
    whole = graph.text(lines=None)
    cut = graph.text(lines=3)
    assert len(cut.splitlines()) == 5
    assert cut.splitlines()[-1] == "… cut after 3 lines; text(lines=None) prints all"
    assert len(whole.splitlines()) > 10
    assert "cut" not in whole


def test_names_are_harmless_in_texts() -> None:
    """Control characters and quotes in a module's name break neither the text nor the DOT."""
    model = nn.Sequential()
    model.add_module('e\x1b["v\\il', nn.Linear(2, 2))
    graph = torchwhere.backward_graph(model(torch.ones(1, 2)), model=model)
    assert "\x1b" not in str(graph)
    assert "\x1b" not in graph.dot()
    assert re.findall(r'label="((?:[^"\\]|\\.)*)"', graph.dot())[0].startswith("AddmmBackward0")
    assert "&quot;" in graph._repr_html_()


def test_dot_has_every_node_and_edge() -> None:
    """DOT has a line for each node and edge; leaves are boxes with their names."""
    model = Stack(1)
    graph = torchwhere.backward_graph(loss_of(model), model=model)
    dot = graph.dot()
    assert dot.startswith("digraph backward {")
    assert dot.endswith("}")
    assert len(re.findall(r"^  n\d+ \[", dot, re.MULTILINE)) == len(graph)
    found = [(int(a), int(b)) for a, b in re.findall(r"^  n(\d+) -> n(\d+);", dot, re.MULTILINE)]
    assert found == [tuple(edge) for edge in graph.edges.tolist()]
    assert dot.count("shape=box") == len(graph.leaves)


def test_to_dict_is_json() -> None:
    """The dictionary survives JSON and says the same as the graph."""
    model = Stack(1)
    with torchwhere.watch(model):
        graph = torchwhere.backward_graph(loss_of(model))
    read = json.loads(json.dumps(graph.to_dict()))
    assert [node["op"] for node in read["nodes"]] == [node.op for node in graph]
    assert read["edges"] == graph.edges.tolist()
    assert read["nodes"][1] == json.loads(json.dumps(graph[1].to_dict()))
    assert (read["nodes"][1]["module"], read["nodes"][1]["shapes"], read["roots"]) == (
        "head",
        [[4, 8]],
        [0],
    )


def test_one_node_in_one_line() -> None:
    """A node and a graph say in one line what they are."""
    model = Stack(1)
    with torchwhere.watch(model):
        graph = torchwhere.backward_graph(loss_of(model))
    assert str(graph[1]) == "#1 AddmmBackward0 [4, 8] in head → 2, 3, 14"
    assert str(graph[2]) == "#2 AccumulateGrad [8] head.bias"
    assert repr(graph) == "<BackwardGraph: 16 nodes, 16 edges, 7 parameters>"


def test_folding_of_a_million_rows_is_exact() -> None:
    """Folds cover each row exactly once, whatever repeats in them: unfolded they are the rows
    again."""
    from torchwhere.render.folds import Fold, fold

    def unfolded(items: list[int | Fold]) -> list[int]:
        found = []
        for item in items:
            if isinstance(item, int):
                found.append(item)
            else:
                block = unfolded(item.items)
                found += [row + item.period * time for time in range(item.times) for row in block]
        return found

    for seed in range(30):
        dice = np.random.default_rng(seed)
        keys = np.concatenate(
            [
                np.tile(dice.integers(0, 3, dice.integers(1, 6)), dice.integers(1, 9))
                for _ in range(12)
            ]
        )
        items = fold(keys.tolist(), [()] * len(keys))
        assert unfolded(items) == list(range(len(keys)))
        for item in items:
            if isinstance(item, Fold):
                blocks = keys[item.start : item.end].reshape(item.times, item.period)
                assert (blocks == blocks[0]).all()
    assert len(fold([0, 1, 2] * 1000, [()] * 3000)) == 1


# -- bad input -------------------------------------------------------------------------------------

NO_GRAPH = (
    r"^backward_graph\(tensor\): this tensor has no graph: requires_grad is False\. It was"
    r" detached, made under no_grad\(\) or "
)


BAD = [
    (torch.ones(1), ValueError, NO_GRAPH),
    (torch.ones(1, requires_grad=True).detach(), ValueError, NO_GRAPH),
    (
        torch.ones(1, requires_grad=True),
        ValueError,
        r"^backward_graph\(tensor\): this tensor is a leaf: no operation made it",
    ),
    ([], ValueError, r"^backward_graph\(tensor\): an empty list has no graph$"),
    (
        [torch.ones(1)] * 2,
        ValueError,
        r"^backward_graph\(tensor\): none of these 2 tensors has a graph$",
    ),
    (
        3,
        TypeError,
        (
            r"^backward_graph\(tensor\): expected a tensor, an autograd node or a list of them, got"
            r" int$"
        ),
    ),
    (None, TypeError, r"got NoneType$"),
    ([None], TypeError, r"got NoneType$"),
    (nn.Linear(1, 1), TypeError, r"got Linear$"),
]


def test_bad_input() -> None:
    """What has no graph is a clear error of the right type."""
    for what, error, message in BAD:
        with pytest.raises(error, match=message):
            torchwhere.backward_graph(what)  # type: ignore[arg-type]


def test_a_model_that_is_none() -> None:
    """A model that is not a module is a TypeError."""
    with pytest.raises(
        TypeError, match=r"^backward_graph\(model=\): expected a torch.nn.Module or None, got str$"
    ):
        torchwhere.backward_graph(torch.ones(1, requires_grad=True) * 2, model="model")  # type: ignore[arg-type]
