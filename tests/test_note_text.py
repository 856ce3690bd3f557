"""The text of a note on a machine without an accelerator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torchwhere
from torchwhere.recorder.note_text import MOST_NUMBERS, NOT_COMPUTED, NoteText, json_text

META = "tensor of shape [], torch.float32, on meta"


def text_of(*, reads_device: bool = True, **fields: Any) -> Any:
    return json.loads(NoteText(fields, reads_device=reads_device).text)


def test_tensors_of_the_cpu_are_numbers() -> None:
    loss = torch.tensor(0.5, requires_grad=True)
    rows = torch.arange(4).reshape(2, 2)
    assert text_of(loss=loss, rows=rows) == {"loss": 0.5, "rows": [[0, 1], [2, 3]]}


def test_a_large_tensor_is_a_short_text() -> None:
    text = text_of(rows=torch.zeros(MOST_NUMBERS + 1))["rows"]
    assert text.startswith("tensor([0., 0.,")
    assert len(text_of(rows=torch.zeros(10**6))["rows"]) < 200


def test_a_tensor_without_numbers_is_described() -> None:
    """Neither `vmap` nor the meta device lets a tensor be read."""
    inside = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        inside.append(text_of(x=x))
        return x

    torch.func.vmap(noted)(torch.ones(3))
    assert inside == [{"x": "tensor of shape [], torch.float32, on cpu"}]
    loss = torch.tensor(0.5, device="meta")
    assert text_of(loss=loss, reads_device=False) == {"loss": META}


def test_a_tensor_of_a_device_without_plain_numbers() -> None:
    """The numbers of a sparse, nested or symbolic tensor are not in one piece: it is described."""
    on_meta = torch.device("meta")
    rows = torch.sparse_csr_tensor([0, 1], [0], [1.0], size=(1, 1), device=on_meta)
    pairs = torch.sparse_coo_tensor([[0]], [1.0], size=(1,), device=on_meta)
    ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    symbolic = ShapeEnv().create_unbacked_symint()
    with FakeTensorMode(shape_env=symbolic.node.shape_env):
        sized = torch.empty(symbolic, device="cuda")
    for tensor in (rows, pairs, ragged.to(on_meta), sized):
        text = text_of(x=tensor)["x"]
        assert text == f"tensor of shape {list(tensor.shape)}, torch.float32, on {tensor.device}"


def test_numbers_of_a_device_have_placeholders() -> None:
    """The placeholders are valid JSON, and large enough for any number."""
    fields = {
        "a": torch.zeros((), device="meta"),
        "b": torch.zeros(2, device="meta"),
        "c": "größer",
    }
    note = NoteText(fields, reads_device=True)
    assert json.loads(note.text) == {"a": NOT_COMPUTED, "b": [NOT_COMPUTED] * 2, "c": "größer"}
    text = note.text
    for offset, number in zip(note._offsets, (-1.7976931348623157e308, 1, 2), strict=True):
        text = text[:offset] + str(number).ljust(24) + text[offset + 24 :]
    assert json.loads(text) == {"a": -1.7976931348623157e308, "b": [1, 2], "c": "größer"}
    assert len(text) == len(note.text) == len(text.encode())


def test_a_long_text_is_cut() -> None:
    fields = {"loss": torch.zeros((), device="meta"), "text": "long" * 50_000, "x": [1]}
    for text in (NoteText(fields, reads_device=True).text, json_text(fields)):
        cut = json.loads(text)
        assert cut["cut"] is True
        assert cut["loss"] == f'"{META}"'
        assert cut["text"].startswith("longlong")
        assert len(text) < 10_000


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("no text")


def test_a_value_that_raises_does_not_reach_the_job(tmp_path: Path) -> None:
    with torchwhere.watch(out=tmp_path):
        torchwhere.note("bad", value=Unprintable())
        torchwhere.note("good", loss=torch.tensor(0.5))
    events = list(torchwhere.read_run(tmp_path).events(kinds={"note"}))
    assert events[-1].fields == {"text": "good", "loss": 0.5}
