"""The terminal's view: tables and trees as plain text, coloured by rich when there is a terminal to colour.

Names come from a user's program and may hold anything: they are shown with control characters replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from torchwhere.diagnose.comms import Comms, CommsKey, CommsNode, Tally
from torchwhere.events import Event
from torchwhere.place import shown

_PASS_STYLE = {"forward": "green", "backward": "magenta", "recompute": "yellow", "optimizer": "cyan", "outside": "dim"}
_DETAIL_KEYS = ("text", "reason", "phase", "what")


def plain(text: object) -> str:
    """A text from outside, made harmless for a terminal: no escape sequences, no line breaks, no direction marks."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def amount(nbytes: int) -> str:
    """Bytes as people read them."""
    size = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


# -- events ----------------------------------------------------------------------------------------------------------------


def events_table(events: Iterable[Event]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("rank", "step"):
        table.add_column(heading, justify="right")
    for heading in ("pass", "module", "kind", "what", "line"):
        table.add_column(heading, overflow="fold")
    for event in events:
        place = event.place
        module = place.param if place.param is not None else shown(place.module)
        call = f" ({place.call})" if place.call else ""
        table.add_row(
            str(place.rank),
            "" if place.step is None else str(place.step),
            Text(place.pass_, _PASS_STYLE.get(place.pass_, "")),
            Text(plain(module) + call),
            event.kind,
            Text(plain(_detail(event))),
            Text(plain(place.line or ""), "dim"),
        )
    return table


def _detail(event: Event) -> str:
    if event.kind == "collective":
        return _collective(event.fields)
    return next((str(event.fields[key]) for key in _DETAIL_KEYS if event.fields.get(key)), "")


def _collective(fields: dict[str, Any]) -> str:
    parts = [f"{fields['op']} #{fields['number']} on {fields.get('mesh_dim') or fields.get('group_desc') or fields['group']}"]
    if fields.get("bytes"):
        parts.append(f"{amount(fields['bytes'])} {fields['dtype']}")
    if fields.get("peer") is not None:
        parts.append(f"peer {fields['peer']}")
    aim = fields.get("for")
    if aim is not None:
        parts.append(f"for {shown(aim) if isinstance(aim, str) else f'{len(aim)} parameters from {aim[0]}'}")
    return ", ".join(parts)


# -- comms -----------------------------------------------------------------------------------------------------------------


def comms_tree(comms: Comms) -> Tree:
    steps = f", steps {comms.steps[0]}-{comms.steps[1]}" if comms.steps else ""
    tree = Tree(Text(f"collectives of {comms.ranks} ranks{steps}", "bold"), guide_style="dim")
    if comms.root.total().count:
        _grow(tree, comms.root)
    if comms.outside.own:
        _grow(tree, comms.outside)
    return tree


def _grow(tree: Tree, node: CommsNode) -> None:
    total = node.total()
    name = "outside any module" if node.name is None else shown(node.name)
    label = Text(plain(name), "bold")
    label.append(f"  {total.count} x, {amount(total.bytes)}", "dim")
    branch = tree.add(label)
    for key, tally in sorted(node.own.items()):
        branch.add(_line(key, tally))
    for child in node.children.values():
        _grow(branch, child)


def _line(key: CommsKey, tally: Tally) -> Text:
    line = Text(f"{key.pass_:<9} ", _PASS_STYLE.get(key.pass_, ""))
    line.append(f"{plain(key.op)} ", "")
    line.append(f"x {tally.count}  {amount(tally.bytes)}  on {plain(key.group)}", "")
    if key.aim:
        line.append(f"  for {plain(key.aim)}", "dim")
    return line


def console(*, width: int | None = None) -> Console:
    """Where to print: as wide as the terminal, or as wide as it takes when there is none."""
    found = Console(highlight=False, width=width)
    if not found.is_terminal and width is None:
        found = Console(highlight=False, width=200, soft_wrap=True)
    return found


# -- groups ----------------------------------------------------------------------------------------------------------------


def groups_table(groups: Iterable[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("group", "description", "mesh dimension", "backend", "ranks"):
        table.add_column(heading, overflow="fold")
    for group in groups:
        cells = (group.get("name"), group.get("desc"), group.get("mesh_dim") or "-", group.get("backend"))
        table.add_row(*(Text(plain(cell)) for cell in cells), ranks_text(group.get("ranks") or []))
    return table


def ranks_text(ranks: list[int]) -> str:
    """A list of ranks, runs folded: 0-3, 8."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
