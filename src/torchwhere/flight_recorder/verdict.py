"""Brings dumps before the doctor, and says what they add: who has completed what.

The verdict is the doctor's own, on the same evidence as from boxes as far as dumps have it. A dump
that is not whole testifies to what it still has (that ranks differ), and to nothing that it may
have lost (how far its rank came).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torchwhere.core.errors import TorchwhereError
from torchwhere.core.place import Certainty
from torchwhere.diagnose.calls.rank_calls import Group
from torchwhere.diagnose.doctor.rules import diagnose
from torchwhere.diagnose.doctor.verdict import Verdict, VerdictKind
from torchwhere.diagnose.doctor.wait_text import ranks_text
from torchwhere.flight_recorder.dumps import Dumps, read_dumps
from torchwhere.flight_recorder.load import Progress

_WHY_EMPTY = (
    "Is the recorder on (TORCH_FR_BUFFER_SIZE, of NCCL before torch 2.9"
    " TORCH_NCCL_TRACE_BUFFER_SIZE)? gloo records no sends and receives"
)


def consult_dumps(folder: str | Path, *, on_progress: Progress | None = None) -> Verdict:
    """The verdict on the dumps in a folder. `on_progress` is told how many have been read, of how
    many."""
    run = read_dumps(folder, on_progress=on_progress)
    if not any(len(box.records) for box in run.boxes.values()):
        raise TorchwhereError(f"the dumps in {folder} have no entries. {_WHY_EMPTY}")
    verdict = _examine(run)
    if run.cut and verdict.kind is not VerdictKind.MISMATCH:
        run = run.without(run.cut)
        if not run.boxes:
            raise TorchwhereError(f"no dump in {folder} is whole: {'; '.join(run.caveats()[:3])}")
        verdict = _examine(run)
    return _with_completion(_said_of_dumps(_without_the_waiting(verdict, run), run), run)


def with_dumps(
    verdict: Verdict, folder: str | Path, *, on_progress: Progress | None = None
) -> Verdict:
    """A verdict from boxes, with what the dumps of the same job add to it."""
    run = read_dumps(folder, on_progress=on_progress)
    said = tuple(f"flight recorder: {caveat}" for caveat in run.caveats())
    return _with_completion(replace(verdict, missing_data=(*verdict.missing_data, *said)), run)


def _examine(run: Dumps) -> Verdict:
    # A dump does not say when it was made. It was made because something had waited too long: every
    # wait in it counts.
    return diagnose(run, now_ns=run.moment_ns, stall_s=0.0)


def _without_the_waiting(verdict: Verdict, run: Dumps) -> Verdict:
    """Do not blame for being late who is still in an earlier collective that all have issued: it
    waits, nobody knows why."""
    if verdict.kind is not VerdictKind.MISSING:
        return verdict
    held = {
        rank: group
        for rank in verdict.culprits
        if rank in run.boxes and (group := _held_in(run, rank)) is not None
    }
    left = tuple(rank for rank in verdict.culprits if rank not in held)
    if not held:
        return verdict
    if left:
        late = (
            f"{ranks_text(list(held)).capitalize()} did not come either: still in an earlier"
            " collective that all have issued."
        )
        return replace(verdict, culprits=left, explanation=(*verdict.explanation, late))
    rank, name = next(iter(held.items()))
    number, title = run.dumps[rank].accounts[name].issued, _title(run, rank, name)
    past = [
        other
        for other in run.dumps[rank].members(name) or ()
        if other in run.boxes and other not in held
    ]
    who = (
        f"{ranks_text(list(held)).capitalize()} {'is' if len(held) == 1 else 'are'} still in"
        f" #{number}"
    )
    said = (
        (
            f'{who} of group "{title}", which all have issued; {ranks_text(past)} went on. No rank'
            " is missing from it."
        ),
        (
            "Likely: ranks gave it another root or reduce op, which dumps do not have; or the"
            " network, or a device."
        ),
    )
    common = verdict.last_common or {}
    collective = (
        {key: common.get(key) for key in verdict.collective or {}}
        if common.get("number") == number
        else None
    )
    return replace(
        verdict,
        kind=VerdictKind.TOGETHER,
        culprits=(),
        collective=collective or {"number": number, "group": title},
        last_common=None,
        explanation=said,
        certainty=Certainty.INFERRED,
    )


def _held_in(run: Dumps, rank: int) -> str | None:
    """A group in which the last collective of a rank is not done, although all members that have a
    dump have issued it."""
    for name, account in run.dumps[rank].accounts.items():
        others = [
            run.dumps[other] for other in run.dumps[rank].members(name) or () if other in run.boxes
        ]
        reached = [
            other.accounts[name].issued if name in other.accounts else -1 for other in others
        ]
        if account.is_pending and len(others) > 1 and min(reached) >= account.issued:
            return name
    return None


def _said_of_dumps(verdict: Verdict, run: Dumps) -> Verdict:
    verdict = replace(verdict, missing_data=tuple(run.caveats()), stalled_s=None)
    if verdict.kind is VerdictKind.TOGETHER:
        if run.pending:
            return replace(
                verdict,
                certainty=(
                    verdict.certainty if len(run.pending) == len(run.boxes) else Certainty.INFERRED
                ),
            )
        verdict = replace(verdict, kind=VerdictKind.HEALTHY, collective=None, last_common=None)
    if verdict.kind is VerdictKind.HEALTHY:
        count = len(run.boxes)
        said = (
            f"The dumps of {count} rank{'s' * (count > 1)} agree, and nothing in them is pending."
        )
        return replace(verdict, explanation=(said,), certainty=Certainty.INFERRED)
    return verdict


def _title(run: Dumps, rank: int, name: str) -> str:
    box = run.dumps[rank]
    return Group(name, box.members(name) or (), desc=box.descs.get(name, "")).title


# -- completion ------------------------------------------------------------------------------------


def _with_completion(verdict: Verdict, run: Dumps) -> Verdict:
    known = [
        group
        for group in completion(run)
        if all(each["completed"] is not None for each in group["ranks"])
    ]
    if not known:
        return verdict
    collective = verdict.collective or {}
    said = [_sentence(group) for group in known if group["group"] == collective.get("group")]
    return replace(
        verdict,
        explanation=(*verdict.explanation, *said[:1]),
        facts=verdict.facts | {"flight_recorder": known[:64]},
    )


def completion(run: Dumps) -> list[dict[str, Any]]:
    """For each group, the ranks that have come equally far: what they issued, started and completed
    last. -1: none; None: the recorder does not say, as gloo's."""
    found: dict[tuple[str, tuple[int, ...]], dict[tuple[int, int, int, bool], list[int]]] = {}
    for rank, box in run.dumps.items():
        for name, account in box.accounts.items() if not box.is_own else ():
            key = name, box.members(name) or ()
            reached = account.issued, account.started, account.completed, box.has_states
            found.setdefault(key, {}).setdefault(reached, []).append(rank)
    return [
        {
            "group": _title(run, next(iter(reached.values()))[0], name),
            "ranks": [
                {
                    "ranks": members,
                    "issued": issued,
                    "started": started if has_states else None,
                    "completed": completed if has_states else None,
                }
                for (issued, started, completed, has_states), members in sorted(
                    reached.items(), reverse=True
                )
            ],
        }
        for (name, _), reached in sorted(found.items())
    ]


def _sentence(group: dict[str, Any]) -> str:
    by_completed: dict[int, list[int]] = {}
    for each in group["ranks"]:
        by_completed.setdefault(each["completed"], []).extend(each["ranks"])
    parts = [
        f"{f'up to #{number}' if number >= 0 else 'nothing'} on {ranks_text(sorted(ranks))}"
        for number, ranks in sorted(by_completed.items(), reverse=True)
    ]
    return f'Completed in group "{group["group"]}", by the flight recorder: {"; ".join(parts[:4])}.'
