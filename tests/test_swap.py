"""A watched tensor can be swapped: torchwhere leaves no reference, attribute or hook on a tensor of
the job.

`torch.utils.swap_tensors` refuses a tensor that has a weak reference or is held elsewhere, and
`nn.Module._apply` (`.to()`, `.half()`, `.to_empty()`) swaps every DTensor and other wrapper
subclass.
"""

from __future__ import annotations

import contextlib
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

import torchwhere
from models import Model, batch
from rank_pool import Pool
from torchwhere.drop_in import aot_logging, deepspeed_debug, fsdp_debug
from torchwhere.drop_in.comm_mode import CommDebugMode
from torchwhere.drop_in.mod_tracker import ModTracker, ModuleTracker
from torchwhere.model.module_names import NameTable

# -- models whose parameters `.to()` swaps ---------------------------------------------------------


class Quantized(torch.Tensor):
    """A wrapper subclass with two inner tensors, as in quantization libraries."""

    values: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Quantized:
        made: Quantized = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, dtype=scale.dtype, device=values.device
        )
        return made

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], _meta: Any, _size: Any, _stride: Any
    ) -> Quantized:
        return Quantized(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (
            torch.ops.aten.detach.default,
            torch.ops.aten._to_copy.default,
            torch.ops.aten.clone.default,
        ):
            given = args[0]
            scale = func(given.scale, *args[1:], **kwargs)
            return return_and_correct_aliasing(
                func, args, kwargs, Quantized(given.values.clone(), scale)
            )
        if func is torch.ops.aten.empty_like.default:
            return Quantized(
                func(args[0].values, device=kwargs.get("device")), func(args[0].scale, **kwargs)
            )
        whole = _pytree.tree_map_only(Quantized, lambda one: one.values * one.scale, (args, kwargs))
        return func(*whole[0], **whole[1])


def plain() -> nn.Module:
    return Model()


def sharded() -> nn.Module:
    model, mesh = Model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel() -> nn.Module:
    model, mesh = Model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def quantized() -> nn.Module:
    model = Model()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(
                Quantized(module.weight.detach(), torch.ones(1)), requires_grad=False
            )
    return model


MODELS = [sharded, tensor_parallel, quantized, plain]


@pytest.fixture
def swapping(request: pytest.FixtureRequest, one_rank: None) -> Iterator[Callable[[], nn.Module]]:
    """Makes a model whose parameters `.to()` swaps: a plain model only if torch is set to do so."""
    make = request.param
    torch.__future__.set_swap_module_params_on_conversion(make is plain)
    yield make
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Without garbage collections: a cycle that holds a tensor stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


every_model = pytest.mark.parametrize(
    "swapping", MODELS, indirect=True, ids=lambda make: make.__name__
)


def train(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(batch()).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def convert(model: nn.Module) -> None:
    """Convert there and back: FSDP2 cannot continue to train in another dtype."""
    ids = {name: id(param) for name, param in model.named_parameters()}
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        assert {param.dtype for param in model.parameters()} == {dtype}
    # swapped, not replaced
    assert {name: id(param) for name, param in model.named_parameters()} == ids


# -- during a watch, and after it ------------------------------------------------------------------


@every_model
def test_in_a_watch_and_after_it(swapping: Callable[[], nn.Module]) -> None:
    """Parameters can be swapped while they are watched, between steps, and right after the
    watch."""
    model = swapping()
    with torchwhere.watch():
        for _ in range(2):
            train(model)
            model.zero_grad()
            convert(model)
    convert(model)


@every_model
def test_the_names_hold(swapping: Callable[[], nn.Module]) -> None:
    """After a swap each parameter keeps its own name, in the watch, in `names()` and in
    backward."""
    model = swapping()
    expected = {name: [name] for name, _ in model.named_parameters()}
    with torchwhere.watch(model):
        names = torchwhere.names(model)
        train(model)
        model.zero_grad()
        convert(model)
        graph = torchwhere.backward_graph(model(batch()).sum())
        assert {name: names[param] for name, param in model.named_parameters()} == expected
        assert {node.param for node in graph if node.param} == {
            n for n, p in model.named_parameters() if p.requires_grad
        }
        assert all(
            f" {name}:" in torchwhere.describe(param) for name, param in model.named_parameters()
        )


@every_model
def test_to_empty(swapping: Callable[[], nn.Module]) -> None:
    """A model on the meta device can be materialized after `names()`, in a watch of that model."""
    with torch.device("meta"):
        model = swapping()
    with torchwhere.watch(model):
        names = torchwhere.names(model)
        model.to_empty(device="cpu")
        found = {name: names[param] for name, param in model.named_parameters()}
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    assert found == {name: [name] for name in found}


def test_swapped_by_hand() -> None:
    """`swap_tensors` on two parameters of a watched model swaps their content, and no name."""
    model = Model()
    with torchwhere.watch(model):
        names = torchwhere.names(model)
        train(model)
        up, down = model.layers[0].up.weight, model.layers[0].down.weight
        model.zero_grad()
        torch.utils.swap_tensors(up, down)
        assert names[up] == ["layers.0.up.weight"]
        assert names[down] == ["layers.0.down.weight"]
        assert names["layers.0.up.weight"] is up


# -- after each function that is given a model or a tensor -----------------------------------------


def _forward_lines(model: nn.Module) -> None:
    with torchwhere.forward_lines():
        loss = model(batch()).sum()
        torchwhere.forward_line(loss)
    loss.backward()


def _backward_graph(model: nn.Module) -> None:
    loss = model(batch()).sum()
    str(torchwhere.backward_graph(loss, model=model))
    loss.backward()


def _on_module(model: nn.Module) -> None:
    calls: list[Any] = []
    told = dict.fromkeys(
        ("enter", "exit", "backward_enter", "backward_exit"), lambda *_: calls.append(1)
    )
    with torchwhere.on_module(**told):  # type: ignore[arg-type]
        train(model)


def _phases(model: nn.Module) -> None:
    with torchwhere.phase("one"):
        train(model)
    str(torchwhere.phases())


def _error(model: nn.Module) -> None:
    """Raises in a hook, in backward: FSDP2 cannot be converted after an error in its forward."""
    loss = model(batch()).sum()
    loss.register_hook(lambda _gradient: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        loss.backward()
    train(model)


def _mod_tracker(model: nn.Module) -> None:
    tracker = ModTracker()
    tracker.register_user_hooks(*[lambda *_: None] * 4)
    with tracker:
        train(model)
        tracker.get_known_fqn(model.head)  # type: ignore[arg-type]


def _module_tracker(model: nn.Module) -> None:
    with ModuleTracker() as tracker:
        train(model)
        assert tracker.parents == {"Global"}


def _comm_mode(model: nn.Module) -> None:
    with CommDebugMode() as mode:
        train(model)
    mode.generate_comm_debug_tracing_table(noise_level=3)
    mode.get_parameter_info()


def _deepspeed(model: nn.Module) -> None:
    deepspeed_debug.debug_extract_module_and_param_names(model)
    for param in model.parameters():
        deepspeed_debug.debug_param2name_id_shape_device(param)
    loss = model(batch()).sum()
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed_debug.print_backward_tensors(loss)
    loss.backward()


def _aot_logging(model: nn.Module) -> None:
    loss = model(batch()).sum()
    aot_logging.setup_stacktrace_preservation_hooks_from_tensors(loss)
    loss.backward()


def _fsdp_debug(model: nn.Module) -> None:
    fsdp_debug._get_sharded_module_tree_with_module_name_to_fqns(model)


def _compiled(model: nn.Module) -> None:
    torch.compile(model, backend="eager")(batch()).sum().backward()
    str(torchwhere.graphs())
    torch._dynamo.reset()


USES: dict[str, Callable[[nn.Module], object]] = {
    "names": lambda model: str(torchwhere.names(model)),
    "facts": lambda model: [
        torchwhere.names(model).facts(name) for name, _ in model.named_parameters()
    ],
    "describe": lambda model: [torchwhere.describe(one) for one in (model, *model.parameters())],
    "layout": lambda model: str(torchwhere.layout(model)),
    "backward_graph": _backward_graph,
    "forward_lines": _forward_lines,
    "on_module": _on_module,
    "comms": lambda model: (train(model), str(torchwhere.comms())),
    "graphs": _compiled,
    "where": lambda model: (train(model), str(torchwhere.where())),
    "phases": _phases,
    "an error": _error,
    "ModTracker": _mod_tracker,
    "ModuleTracker": _module_tracker,
    "CommDebugMode": _comm_mode,
    "deepspeed_debug": _deepspeed,
    "aot_logging": _aot_logging,
    "fsdp_debug": _fsdp_debug,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "swapping", [sharded, tensor_parallel], indirect=True, ids=lambda make: make.__name__
)
def test_after_each_function(
    swapping: Callable[[], nn.Module], use: str, no_collection: None
) -> None:
    """Parameters can be swapped after each function of torchwhere that takes a model or a
    tensor, and before the next garbage collection."""
    model = swapping()
    with torchwhere.watch(model):
        USES[use](model)
        model.zero_grad()
        convert(model)
    convert(model)
    deepspeed_debug.debug_clear_module_and_param_names()


# -- nothing is left on a tensor -------------------------------------------------------------------


def what_sits_on(tensor: torch.Tensor) -> tuple[Any, ...]:
    attributes = sorted(set(vars(tensor)) - {"_local_tensor", "_spec"})
    return (
        weakref.getweakrefcount(tensor),
        tensor._use_count(),
        len(tensor._backward_hooks or ()),
        attributes,
    )


def after_a_step(make: Callable[[], nn.Module]) -> list[tuple[Any, ...]]:
    """The references, hooks and attributes of a job's tensors after a step: parameters, gradients,
    buffers, input, output."""
    model, data = make(), batch().requires_grad_()
    model.register_buffer("mean", torch.zeros(2))
    out = model(data)
    out.sum().backward()
    tensors = [*model.parameters(), *model.buffers(), data, out]
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    return [what_sits_on(tensor) for tensor in (*tensors, *gradients)]


@every_model
def test_nothing_sits_on_a_tensor(swapping: Callable[[], nn.Module]) -> None:
    """Every tensor of a watched job has as many references, hooks and attributes as in an unwatched
    one."""
    alone = after_a_step(swapping)
    with torchwhere.watch():
        assert after_a_step(swapping) == alone


def test_a_model_that_was_in_ddp(one_rank: None) -> None:
    """After DDP is deleted, the parameters of its recorded buckets can be swapped."""
    model = Model()
    with torchwhere.watch():
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-4)
        for _ in range(5):
            wrapped(batch()).sum().backward()
        assert {weakref.getweakrefcount(param) for param in model.parameters()} == {0}
        del wrapped
        model.zero_grad()
        torch.utils.swap_tensors(model.head.weight, nn.Parameter(torch.zeros(8, 8)))


# -- an id that is used again ----------------------------------------------------------------------


def test_a_new_tensor_with_an_old_id_has_no_name() -> None:
    """A tensor that reuses the id of a deleted parameter does not get its name."""
    model, table = Model(), NameTable()
    table.add_root(model)
    kept, old, data = [], id(model.head.weight), torch.zeros(2)
    model.head.weight = nn.Parameter(data)
    for _ in range(10_000):
        kept.append(nn.Parameter(data))
        if id(kept[-1]) == old:
            break
    assert id(kept[-1]) == old
    assert table.params.of(kept[-1]) == table.param_names(kept[-1]) == []
    assert table.param_names(model.head.weight) == ["head.weight"]
    model.layers[0].up.weight = kept[-1]
    table.refresh()
    assert table.param_names(kept[-1]) == ["layers.0.up.weight"]


def test_a_tied_parameter_that_is_replaced_in_one_place() -> None:
    """A tied parameter that is replaced in one place keeps the name of the other."""
    model, table = Model(), NameTable()
    model.tied = nn.Linear(8, 8)
    tied = model.tied.weight = model.head.weight
    table.add_root(model)
    assert table.param_names(tied) == ["head.weight", "tied.weight"]
    model.head.weight = nn.Parameter(torch.zeros(8, 8))
    assert table.param_names(tied) == ["tied.weight"]


def test_a_foreign_tensor_is_not_searched_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated lookups of a tensor of no model cause few walks; once it is in the model, it is
    found."""
    model, table, walks = Model(), NameTable(), []
    table.add_root(model)
    refresh = NameTable.refresh
    monkeypatch.setattr(NameTable, "refresh", lambda self: (walks.append(1), refresh(self)))
    stranger = nn.Parameter(torch.zeros(8, 8))
    for _ in range(100):
        assert table.param_names(stranger) == []
    assert len(walks) == 3
    model.head.weight = stranger
    table.refresh()
    assert table.param_names(stranger) == ["head.weight"]


# -- several ranks ---------------------------------------------------------------------------------


def _swapped_after_each_step(folder: Path) -> list[list[tuple[Any, ...]]]:
    """The collectives of each step, with their place and beneficiary."""
    model, steps = sharded(), 3
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torchwhere.watch(out=folder):
        for _ in range(steps):
            train(model)
            optimizer.step()
            optimizer.zero_grad()
            convert(model)
    dist.barrier()
    events = [
        event.to_dict()
        for event in torchwhere.read_run(folder).boxes[dist.get_rank()].events(kinds={"collective"})
    ]
    keys = ("op", "pass", "module", "param", "for")
    return [
        [tuple(e[key] for key in keys) for e in events if e["step"] == step]
        for step in range(steps)
    ]


def test_collectives_after_a_swap(two_ranks: Pool, tmp_path: Path) -> None:
    """FSDP2 on two ranks trains on after its parameters were swapped, and its collectives keep
    their places and units."""
    for steps in two_ranks.run(_swapped_after_each_step, tmp_path):
        assert steps[0]
        assert {each[4] for each in steps[0]} == {"", "layers.0", "layers.1"}
        assert steps[1] == steps[0]
        assert steps[2] == steps[0]
