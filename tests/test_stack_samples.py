"""Samples of the stack: a late rank's verdict names the line and the module where it loses its time,
and a job that is not late has few samples."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

import torchwhere
from rank_pool import Pool
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import SideKind
from torchwhere.core.stall import BEAT_S
from torchwhere.diagnose.doctor.stack_samples import SampledPlace
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.recorder.heartbeat import SAMPLES, Heartbeat
from torchwhere.recorder.stack_samples import LEAST_RECORDS
from torchwhere.render.verdict_text.straggler import sampled_text

LATE = 2  # the rank that is late
SLEEP_S = 0.08
STEPS = 50
WIDTH = 4


def marked(name: str) -> int:
    """The number of the marked line of this file."""
    lines = Path(__file__).read_text().splitlines()
    return next(at for at, line in enumerate(lines, 1) if line.endswith(f"# here: {name}"))


def is_late() -> bool:
    return dist.get_rank() == LATE


def tokenize() -> torch.Tensor:
    if is_late():
        time.sleep(SLEEP_S)  # here: data
    return torch.ones(WIDTH)


class Texts(Dataset[torch.Tensor]):
    def __init__(self, *, is_slow: bool) -> None:
        self._is_slow = is_slow

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= STEPS:
            raise IndexError(index)
        return tokenize() if self._is_slow else torch.ones(WIDTH)


class Layer(nn.Module):
    def __init__(self, *, is_slow: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._is_slow = is_slow

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self._is_slow and is_late():
            time.sleep(SLEEP_S)  # here: forward
        out: torch.Tensor = self.linear(rows)
        return out


def clip(_gradient: torch.Tensor) -> None:
    if is_late():
        time.sleep(SLEEP_S)  # here: backward


def train(folder: str, slow: str) -> None:
    """Train with DDP, with a rank that is slow in one part."""
    net = nn.Sequential(*(Layer(is_slow=slow == "forward" and at == 1) for at in range(3)))
    if slow == "backward":
        net[1].linear.weight.register_hook(clip)
    model = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with torchwhere.watch(model, out=folder):
        for batch in DataLoader(Texts(is_slow=slow == "data")):
            model(batch).sum().backward()
            optimizer.step()
            time.sleep(0.005)
    dist.barrier()


@pytest.mark.parametrize(
    ("slow", "function", "module"),
    [("data", "tokenize", None), ("forward", "forward", "1"), ("backward", "clip", None)],
)
def test_the_verdict_names_the_line(
    four_ranks: Pool, tmp_path: Path, slow: str, function: str, module: str | None
) -> None:
    """The straggler's facts name the function, line and module in which it sleeps, wherever in the
    step that is; most of its samples are there."""
    four_ranks.run(train, str(tmp_path), slow)
    verdict = diagnose_folder(tmp_path)
    assert (verdict.kind, verdict.culprits) == ("straggler", (LATE,))
    place = SampledPlace(**verdict.facts["sampled"])
    assert (place.function, place.line.rpartition("/")[2], place.module) == (
        function,
        f"test_stack_samples.py:{marked(slow)}",
        module,
    )
    assert place.part == slow
    assert place.of >= place.count > place.of / 2
    assert verdict.explanation[-1].startswith(
        f"{place.count} of {place.of} samples of its stack are in {function} ("
    )


def train_in_a_thread(folder: str) -> None:
    trainer = threading.Thread(target=train, args=(folder, "data"), name="Trainer")
    trainer.start()
    trainer.join()


def test_a_straggler_that_trains_in_a_thread(four_ranks: Pool, tmp_path: Path) -> None:
    """Samples are those of the thread that trains, which need not be the main thread."""
    four_ranks.run(train_in_a_thread, str(tmp_path))
    verdict = diagnose_folder(tmp_path)
    assert (verdict.kind, verdict.culprits) == ("straggler", (LATE,))
    assert SampledPlace(**verdict.facts["sampled"]).function == "tokenize"


def train_evenly(folder: str) -> float:
    began = time.monotonic()
    with torchwhere.watch(out=folder):
        for _ in range(40):
            time.sleep(0.05)
            dist.all_reduce(torch.ones(1))
            torchwhere.step()
    return time.monotonic() - began


def samples_in(path: Path) -> int:
    return int((read_box(path).side_records["kind"] == SideKind.SAMPLE).sum())


def test_a_healthy_job_has_few_samples(two_ranks: Pool, tmp_path: Path) -> None:
    """A rank takes at most four samples a second, and a job that is not late is healthy."""
    for rank, took_s in enumerate(two_ranks.run(train_evenly, str(tmp_path))):
        assert 0 < samples_in(tmp_path / f"rank{rank}.box") <= took_s * SAMPLES / BEAT_S + 1
    assert diagnose_folder(tmp_path).kind == "healthy"


def stall(folder: str) -> None:
    with torchwhere.watch(out=folder):
        dist.all_reduce(torch.ones(1))
        time.sleep(6 * BEAT_S)
        dist.barrier()


def test_a_stalled_rank_takes_no_further_samples(two_ranks: Pool, tmp_path: Path) -> None:
    """A rank that records nothing stops after two heartbeats: samples never push events out of the
    ring of a job that hangs."""
    two_ranks.run(stall, str(tmp_path))
    for rank in (0, 1):
        assert samples_in(tmp_path / f"rank{rank}.box") <= 4 * SAMPLES


def test_a_small_ring_has_no_samples(two_ranks: Pool, tmp_path: Path) -> None:
    """A ring with little room keeps all of it for events."""
    two_ranks.run(train_with_small_ring, str(tmp_path))
    assert samples_in(tmp_path / "rank0.box") == 0


def train_with_small_ring(folder: str) -> None:
    with torchwhere.watch(out=folder, records=LEAST_RECORDS // 2):
        dist.all_reduce(torch.ones(1))
        time.sleep(1.5 * BEAT_S)
        dist.barrier()


def test_a_failing_sampler_ends_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sampler that raises is logged and removed; the heartbeat goes on."""

    def fails() -> None:
        raise RuntimeError("no stack")

    box = BoxWriter(tmp_path / "rank0.box", meta={"rank": 0})
    heartbeat = Heartbeat(box, on_stall=lambda: None, take_sample=fails)
    heartbeat.start()
    while heartbeat._take_sample is not None:
        time.sleep(0.05)
    first_ns = box.words[box.cursor_at(0) + 7]
    while box.words[box.cursor_at(0) + 7] == first_ns:
        time.sleep(0.05)
    heartbeat.stop()
    box.close()
    assert "no stack" in caplog.text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "71 of 90 samples of its stack are in tokenize (data.py:40)."),
        (
            {"module": "layers.3", "pass_": "forward"},
            "71 of 90 samples of its stack are in tokenize (data.py:40), module layers.3.",
        ),
        (
            {"part": "data", "inside": "encode (tokenizers/fast.py:7)"},
            (
                "71 of 90 samples of its stack are in tokenize (data.py:40), inside encode"
                " (tokenizers/fast.py:7), while it loads data."
            ),
        ),
    ],
)
def test_the_sentence(changes: dict[str, Any], text: str) -> None:
    """The sentence has the counts, the line, the module, the library and the part."""
    facts = {
        "count": 71,
        "of": 90,
        "function": "tokenize",
        "line": "data.py:40",
        "module": None,
        "pass_": "outside",
        "part": "other",
        "inside": None,
    }
    assert sampled_text(SampledPlace(**(facts | changes)), whose="its") == text
