"""What the doctor says about a running job that makes no progress, before it calls it a hang."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchwhere
from rank_pool import Pool
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.render.verdict import verdict_text
from torchwhere.top.poller import RunPoller

PAUSE_S = 4.5


def pause_on_one_rank(folder: str) -> Any:
    """Ten steps; then rank 1 pauses and examines the job while rank 0 waits."""
    text = None
    with torchwhere.watch(out=folder):
        for _ in range(10):
            torchwhere.step()
            dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 1:
            time.sleep(PAUSE_S)
            verdict = diagnose_folder(folder)
            last = verdict.ranks[0].last
            text = verdict_text(verdict), str(verdict.kind), verdict.stalled_s, last
        dist.all_reduce(torch.ones(4))
    return text


def test_a_short_standstill_is_not_called_progress(two_ranks: Pool, tmp_path: Path) -> None:
    """While a rank has waited for less than `--stall` seconds, the doctor says how long the job
    makes no progress and that it is not yet called a hang."""
    text, kind, stalled_s, last = two_ranks.run(pause_on_one_rank, str(tmp_path))[1]
    assert (kind, last["group"]) == ("healthy", "default")  # as the sentences name the group
    assert stalled_s > PAUSE_S - 1
    title, still, wait = text.splitlines()[:3]
    assert title.startswith("NOT YET A HANG  2 ranks, step 9, no progress for ")
    assert still.startswith(f"No progress for {stalled_s:.1f} s, not yet called a hang: the limit")
    assert " is 30 s (--stall). Last step 9, " in still
    assert wait.startswith("Rank 0 has waited for rank 1 for ")
    assert wait.endswith(" s, in all_reduce of float32 [4]. A normal pause looks the same.")


def test_one_rank_without_progress(one_rank: None, tmp_path: Path) -> None:
    """A job of one rank that has made no step for many times its usual step gets the same
    sentence, and one that enters modules meanwhile does not."""
    model = nn.Linear(4, 4)
    with torchwhere.watch(model, out=tmp_path):
        for _ in range(10):
            torchwhere.step()
            model(torch.ones(2, 4))
            time.sleep(0.02)
        time.sleep(3)
        still = diagnose_folder(tmp_path)
        model(torch.ones(2, 4))
        moving = diagnose_folder(tmp_path)
    assert still.explanation[0].startswith("No progress for ")
    assert moving.explanation[0].startswith("Progressing. Last step 9")


def test_set_up_does_not_count_as_a_step(one_rank: None, tmp_path: Path) -> None:
    """The speed is that of the recent steps in the doctor and on the screen: a slow set-up before
    the first step, and a slow first step, do not lower it."""
    with torchwhere.watch(out=tmp_path):
        time.sleep(1.0)  # imports and set-up
        for number in range(12):
            torchwhere.step()
            time.sleep(1.0 if number == 0 else 0.02)  # the first one compiles
        rate = diagnose_folder(tmp_path).facts["steps_per_s"]
        shown = RunPoller(tmp_path).poll().steps_per_s
    assert rate > 2 * 12 / 2.2  # over all of the time it is 12 / 2.2
    assert shown is not None
    assert shown > 2 * 12 / 2.2


def test_the_first_step_has_no_speed(one_rank: None, tmp_path: Path) -> None:
    """While only the step that contains the set-up has ended, the speed is not known."""
    with torchwhere.watch(out=tmp_path):
        torchwhere.step()
        rate = diagnose_folder(tmp_path).facts["steps_per_s"]
        shown = RunPoller(tmp_path).poll().steps_per_s
    assert (rate, shown) == (None, None)


def test_a_single_rank_is_not_plural(one_rank: None, tmp_path: Path) -> None:
    """The verdict on a job of one rank does not speak of `All 1 ranks`."""
    with torchwhere.watch(out=tmp_path):
        torchwhere.step()
    assert diagnose_folder(tmp_path).explanation[0].startswith("The only rank has finished.")
