"""Process groups in the making: `init_process_group` and `new_group`, in which all ranks wait for
each other.

No collective happens there, so without this a job that never gets out of its start would look as if
nothing were the matter. Recorded when it begins and when it ends, with how many groups were made
before: ranks are compared by that number. A group that its members alone wait for
(`use_local_synchronization`) says nothing about the others, and is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist

from torchwhere.hooks import _torch
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.shown_frames import shown_as

_MOST_RANKS = 64  # of a group, that are written down

# what is called, how many were made before, for which ranks
OnBegin = Callable[[str, int, list[int] | None], None]


class GroupCreationHook:
    """Tells when this rank begins to make a group that all ranks must make, and when it is made."""

    def __init__(self, *, on_begin: OnBegin, on_end: Callable[[], None]) -> None:
        self._on_begin = on_begin
        self._on_end = on_end
        self._made = 0
        self._depth = 0
        self._active = False
        self._patched: list[tuple[Any, str, Any, Any]] = []  # where, name, the original, ours
        self.errors = ErrorLimiter("gathering", self.switch_off)

    def install(self) -> list[str]:
        if not dist.is_available():
            return []
        self._active = True
        world = _torch.private("process_groups")
        self._made = (
            int(getattr(world, "group_count", 0))
            if world is not None and dist.is_initialized()
            else 0
        )
        init = self._wrapped("init_process_group", dist.init_process_group)
        for module in (dist, dist.distributed_c10d):
            self._patch(module, "init_process_group", init)
        if (make := _torch.private("new_group")) is not None:
            self._patch(
                dist.distributed_c10d, "_new_group_with_tag", self._wrapped("new_group", make)
            )
        return _torch.missing("gathering")

    def switch_off(self) -> None:
        self._active = False

    def remove(self) -> None:
        """Take the patches back. Who imported a function by name while we watched keeps ours: it
        passes everything on."""
        self._active = False
        while self._patched:
            module, name, original, ours = self._patched.pop()
            if getattr(module, name, None) is ours:
                setattr(module, name, original)

    def _patch(self, module: Any, name: str, ours: Any) -> None:
        self._patched.append((module, name, getattr(module, name), ours))
        setattr(module, name, ours)

    def _wrapped(self, op: str, original: Any) -> Any:
        @wraps(original)
        @shown_as(original, calling="func")
        def group_creation(*args: Any, **kwargs: Any) -> Any:
            begun = self._begin(op, args, kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                if begun:
                    self._end()

        return group_creation

    @_torch.unseen
    def _begin(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not self._active or self._depth or kwargs.get("use_local_synchronization"):
            return False
        try:
            ranks = kwargs.get("ranks", args[0] if args else None) if op == "new_group" else None
            self._depth += 1
            self._made += 1
            few = list(map(int, ranks))[:_MOST_RANKS] if ranks is not None else None
            self._on_begin(op, self._made - 1, few)
        except Exception as error:
            self.errors(error)
        return True

    @_torch.unseen
    def _end(self) -> None:
        self._depth -= 1
        try:
            if self._active:
                self._on_end()
        except Exception as error:
            self.errors(error)
