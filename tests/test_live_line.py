"""The line that `torchwhere top` shows beside the live module of a rank."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import torchwhere
from torchwhere.core.place import Place
from torchwhere.top.poller import RunPoller


class Looking(nn.Module):
    """Looks at the live view of its own process from inside its forward."""

    def __init__(self, folder: Path, *, reduces: bool) -> None:
        super().__init__()
        self.poller = RunPoller(folder)
        self.reduces = reduces
        self.place: Place | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reduces:
            dist.all_reduce(x)
        self.place = self.poller.poll().ranks[0].place
        return x


def test_a_live_module_has_no_line_of_an_old_event(one_rank: None, tmp_path: Path) -> None:
    """A rank that has entered a module since its last event shows no line; the event's line belongs
    to another place."""
    model = nn.Sequential(Looking(tmp_path, reduces=True), Looking(tmp_path, reduces=False))
    with torchwhere.watch(model, out=tmp_path):
        dist.all_reduce(torch.ones(1))
        model(torch.ones(2))
    first, second = model[0].place, model[1].place
    assert (first.module, first.line is not None) == ("0", True)
    assert "test_live_line.py" in first.line
    assert (second.module, second.line) == ("1", None)
