"""Rules on exits that leave no rank waiting: a first exit, and failures without a known cause."""

from __future__ import annotations

from dataclasses import dataclass

from torchwhere.core.place import Certainty
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import Cause, Finding
from torchwhere.diagnose.doctor.rules.exited import UnknownFirstExit
from torchwhere.diagnose.doctor.verdict import VerdictKind


@dataclass(frozen=True, slots=True)
class ExitedBeforeOthers(Cause):
    """Ranks that exited before the others and left no exit record."""

    ranks: tuple[int, ...]


def find_first_exit(context: Context) -> Finding | None:
    """Ranks exited before the others without an exit record, and nothing else is wrong."""
    ranks = context.exits.exited_first()
    if not ranks:
        return None
    codes = {rank: code for rank in ranks if (code := context.status(rank).exit_code) is not None}
    is_seen = all(map(context.exits.was_seen_to_exit, ranks)) and not context.incomplete
    return Finding(
        VerdictKind.DEAD,
        ExitedBeforeOthers(tuple(ranks)),
        culprits=tuple(ranks),
        certainty=Certainty.EXACT if is_seen else Certainty.INFERRED,
        facts={"exit_codes": codes} if codes else {},
    )


def find_unexplained_failure(context: Context) -> Finding | None:
    """Ranks failed because another one exited, and no rank waits: it is unknown which was first."""
    failed = context.exits.failed()
    if not context.timing.is_over or not failed or context.exits.were_killed_together:
        return None
    return Finding(VerdictKind.DEAD, UnknownFirstExit(tuple(failed)), certainty=Certainty.UNKNOWN)
