"""Records the creation of process groups: `init_process_group` and `new_group`, in which all ranks
wait for each other.

They issue no collective, so without this hook a job that hangs there would look healthy. Records
the start and the end, with the number of groups created before: ranks are compared by that number.
A group that only its members wait for (`use_local_synchronization`) says nothing about the other
ranks, and is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch.distributed as dist

from torchwhere.hooks import _torch
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.patches import Patches
from torchwhere.hooks.shown_frames import shown_as

_MOST_RANKS = 64  # recorded for a group

# function, number of groups created before, ranks
OnBegin = Callable[[str, int, list[int] | None], None]
# rank and world size, as far as `init_process_group` gets them as arguments
OnInit = Callable[[int | None, int | None], None]


class GroupCreationHook:
    """Calls back when this rank begins and ends to create a group that all ranks must create."""

    def __init__(self, *, on_init: OnInit, on_begin: OnBegin, on_end: Callable[[], None]) -> None:
        self._on_init = on_init
        self._on_begin = on_begin
        self._on_end = on_end
        self._created = 0
        self._depth = 0
        self._active = False
        self._patches = Patches()
        self.errors = ErrorLimiter("process groups", self.switch_off)

    def install(self) -> list[str]:
        if not dist.is_available():
            return []
        self._active = True
        world = _torch.private("process_groups")
        if world is not None and dist.is_initialized():
            self._created = int(getattr(world, "group_count", 0))
        wrap = partial(self._wrapped, "init_process_group")
        for module in (dist, dist.distributed_c10d):
            self._patches.replace(module, "init_process_group", wrap)
        if _torch.private("new_group") is not None:
            wrap = partial(self._wrapped, "new_group")
            self._patches.replace(dist.distributed_c10d, "_new_group_with_tag", wrap)
        return _torch.missing("process groups")

    def switch_off(self) -> None:
        self._active = False

    def remove(self) -> None:
        """Restore the originals. Code that imported a wrapper by name during the watch keeps it: it
        only calls the original."""
        self._active = False
        self._patches.restore()

    def _wrapped(self, op: str, original: Any) -> Any:
        @wraps(original)
        @shown_as(original, calling="func")
        def group_creation(*args: Any, **kwargs: Any) -> Any:
            is_recorded = self._begin(op, args, kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                if is_recorded:
                    self._end()

        return group_creation

    @_torch.unseen
    def _begin(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not self._active or self._depth or kwargs.get("use_local_synchronization"):
            return False
        with self.errors:
            ranks = None
            if op == "new_group":
                ranks = kwargs.get("ranks", next(iter(args), None))
            self._depth += 1
            self._created += 1
            if op == "init_process_group":
                self._on_init(*_own_rank(args, kwargs))
            few = list(map(int, ranks))[:_MOST_RANKS] if ranks is not None else None
            self._on_begin(op, self._created - 1, few)
        return True

    @_torch.unseen
    def _end(self) -> None:
        self._depth -= 1
        with self.errors:
            if self._active:
                self._on_end()


def _own_rank(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | None, int | None]:
    """Rank and world size from the arguments of `init_process_group`; None for those not given."""
    arguments = signature(dist.init_process_group).bind_partial(*args, **kwargs).arguments
    rank, world_size = arguments.get("rank"), arguments.get("world_size")
    return (
        rank if isinstance(rank, int) and rank >= 0 else None,
        world_size if isinstance(world_size, int) and world_size > 0 else None,
    )
