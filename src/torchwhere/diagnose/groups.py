"""The process groups of a run, each once, with members and names.

Entry point: `groups`. Takes a run, gives `Groups`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchwhere.blackbox.run import BoxRun
from torchwhere.core.results import Shown, Tabular


@dataclass(frozen=True, slots=True, repr=False)
class Groups(Shown, Tabular):
    """The process groups of a run, in the order of their names.

    Attributes:
        groups: One dictionary for each group: `name`, `desc`, `ranks`, `backend`, `mesh_dim`.

    Example:
        for group in torchwhere.read_run("run/").groups():
            print(group["name"], group["ranks"])
    """

    groups: tuple[dict[str, Any], ...]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, name: str) -> dict[str, Any]:
        """Return the group of that name."""
        for group in self.groups:
            if group.get("name") == name:
                return group
        raise KeyError(name)

    def as_rows(self) -> list[dict[str, Any]]:
        """Return one row for each group."""
        return list(self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Return the groups as values for JSON."""
        return {"groups": list(self.groups)}


def groups(run: BoxRun, *, ranks: set[int] | None = None) -> Groups:
    """The groups that all ranks of a run recorded, or only `ranks`."""
    by_name: dict[str, dict[str, Any]] = {}
    for _, box in run.in_order(ranks):
        by_name |= box.groups()
    names = sorted(by_name, key=lambda name: (len(name), name))
    return Groups(tuple(by_name[name] for name in names))
