"""Events, collectives and groups as lines for a terminal: what `events`, `comms` and `groups`
print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.cells import cell_len

from torchwhere.blackbox.string_table import shown_description, title_in
from torchwhere.core.events import DETAIL_FIELDS, Event
from torchwhere.core.place import ROOT, Certainty, Place, shown
from torchwhere.core.rank_text import ranks_text
from torchwhere.core.sanitize import plural, steps_span
from torchwhere.core.units import amount, duration
from torchwhere.diagnose.comms.outline import OutlineLine, outline, params_text
from torchwhere.diagnose.comms.tree import Comms, CommsKey, CommsSum
from torchwhere.render.lines import GAP, Cell, Column, Line, Table, plain, table, twigs

CommsEntry = tuple[CommsKey, CommsSum]
_PASS_STYLE = {
    "forward": "green",
    "backward": "magenta",
    "recompute": "yellow",
    "optimizer": "cyan",
    "outside": "dim",
}
_CERTAINTY = {Certainty.EXACT: "", Certainty.INFERRED: "~", Certainty.UNKNOWN: "?"}
_DEVICE_TIMES = {"reached": "reached_ns", "done": "done_ns"}  # columns, and their fields
_PEER = {"send": "to", "recv": "from"}


# -- events ----------------------------------------------------------------------------------------


def events_lines(
    events: Iterable[Event], *, started_ns: int, width: int | None, has_device: bool = False
) -> Iterator[Line]:
    """One line an event; times are in seconds since `started_ns`. With `has_device`, also when the
    device reached a collective, and when it was done."""
    columns, rows = events_table(events, started_ns=started_ns, has_device=has_device)
    narrowing = (
        ("event", 56),
        *((("done", 0), ("reached", 0)) if has_device else ()),
        ("line", 20),
        ("event", 46),
        ("time", 0),
        ("line", 14),
        ("module", 12),
        ("event", 10),
    )
    return table(columns, rows, width=width, narrowing=narrowing)


def events_table(events: Iterable[Event], *, started_ns: int, has_device: bool = False) -> Table:
    columns = [
        Column("rank", right=True),
        Column("step", right=True),
        Column("time", right=True),
        *(Column(heading, right=True) for heading in (_DEVICE_TIMES if has_device else ())),
        Column("pass"),
        Column("line", keep_end=True),
        Column("module", keep_end=True),
        Column("event"),
    ]
    keys = _DEVICE_TIMES.values() if has_device else ()
    return columns, (_event_row(event, started_ns, keys) for event in events)


def _event_row(event: Event, started_ns: int, device_times: Iterable[str]) -> list[Cell]:
    place = event.place
    fields = event.fields if event.kind == "collective" else {}
    times = [event.t_ns, *(fields.get(key) for key in device_times)]
    return [
        str(place.rank),
        step_cell(place),
        *([(_seconds(t_ns, started_ns), "dim")] for t_ns in times),
        [(place.pass_, _PASS_STYLE.get(place.pass_, ""))],
        [(plain(place.full_line), "dim")],
        plain(module_cell(event)),
        plain(event_text(event)),
    ]


def step_cell(place: Place) -> str:
    return "" if place.step is None else str(place.step)


def _seconds(t_ns: Any, started_ns: int) -> str:
    """A time since the start; empty if there is none."""
    return f"{(t_ns - started_ns) / 1e9:.3f}" if isinstance(t_ns, int) else ""


def module_cell(event: Event) -> str:
    """The module or parameter, and which call of it.

    `~` marks an inferred place, `?` an unknown one.
    """
    place = event.place
    name = place.param if place.param is not None else shown(place.module)
    name = "" if name == "-" and place.certainty is Certainty.UNKNOWN else name
    return _CERTAINTY[place.certainty] + name + (f" call {place.call}" if place.call else "")


def event_text(event: Event) -> str:
    fields, place = event.fields, event.place
    if event.kind == "collective":
        parts = [_collective(fields, place.module)]
    else:
        parts = [event.kind, _detail(event)]
    if place.graph is not None and place.graph not in parts:
        parts.append(f"graph {place.graph}")
    if place.thread not in (None, "MainThread"):
        parts.append(f"thread {place.thread}")
    return GAP.join(part for part in parts if part)


def _detail(event: Event) -> str:
    fields, parts = event.fields, [event.detail]
    if isinstance(fields.get("duration_ns"), int):
        parts.append(duration(fields["duration_ns"]))
    listed = (
        *DETAIL_FIELDS,
        "type",
        "duration_ns",
    )  # the text of an exception begins with its type
    parts += [
        f"{key}={value}"
        for key, value in fields.items()
        if key not in listed and value not in (None, [])
    ]
    return GAP.join(parts).strip()


def _collective(fields: dict[str, Any], module: str | None) -> str:
    parts = [f"{fields.get('op') or 'a collective'} #{fields.get('number')}"]
    if fields.get("peer") is not None:
        parts.append(f"{_PEER.get(str(fields.get('op')), 'root')} {fields['peer']}")
    if fields.get("bytes"):
        parts.append(f"{amount(fields['bytes'])} {fields.get('dtype')}")
    if fields.get("for") not in (None, module):
        parts.append(f"for {_beneficiary(fields['for'])}")
    parts.append(f"on {title_in(fields)}")
    if fields.get("replayed"):
        parts.append("in a CUDA graph")
    return GAP.join(parts)


def _beneficiary(beneficiary: Any) -> str:
    if isinstance(beneficiary, (list, tuple)):
        return params_text(map(str, beneficiary))
    return shown(beneficiary)


def steps_text(steps: tuple[int, int] | None) -> str:
    """`, step 3` or `, steps 0-5`; empty without steps."""
    return "" if steps is None else f", {steps_span(steps)}"


# -- comms -----------------------------------------------------------------------------------------


def comms_lines(comms: Comms, *, width: int | None) -> Iterator[Line]:
    """The tree of modules with the collectives that each causes.

    `per step` and `steps` are those of one rank, `calls` and `total` those of all ranks together.
    """
    if not comms.ranks:
        yield [("no collectives were recorded", "bold")]
        return
    columns, rows = comms_table(comms)
    title = columns[0].heading
    narrowing = (
        ("calls", 0),
        ("steps", 0),
        ("for", 20),
        ("each", 0),
        ("group", 6),
        ("for", 10),
        ("group", 0),
        (title, 30),
    )
    yield from table(columns, rows, width=width, narrowing=narrowing)
    if comms.overwritten:
        listed = ", ".join(
            f"{count:,} older events of rank {rank}" for rank, count in comms.overwritten.items()
        )
        yield [(f"not counted, overwritten in the ring (see --records): {listed}", "yellow")]


def comms_table(comms: Comms) -> Table:
    headings = ("per step", "steps", "each", "calls", "total")
    columns = [
        Column(_title(comms)),
        *(Column(heading, right=True) for heading in headings),
        Column("group", optional=True),
        Column("for", optional=True),
    ]
    return columns, _comms_rows(comms)


def _title(comms: Comms) -> str:
    group = f", all on {plain(next(iter(comms.groups)))}" if len(comms.groups) == 1 else ""
    return f"{plural(len(comms.ranks), 'rank')}{steps_text(comms.steps)}{group}"


def _comms_rows(comms: Comms) -> Iterator[list[Cell]]:
    for node, label in ((comms.root, ROOT), (comms.outside, "outside any module")):
        if node.total().count:
            yield from _branch_rows(outline(node), [(label, "bold")], "", comms)


def _branch_rows(
    branch: OutlineLine, label: Line, guide: str, comms: Comms
) -> Iterator[list[Cell]]:
    total = branch.total()
    yield [label, "", "", "", [(str(total.count), "bold")], [(amount(total.bytes), "bold")], "", ""]
    below = branch.branches
    widest = max((cell_len(plain(inner.label)) for inner in below if inner.is_single), default=0)
    items: list[OutlineLine | CommsEntry] = [*branch.entries(), *below]
    for inner, twig, inset in twigs(items, guide):
        if isinstance(inner, tuple):
            yield _entry_row(inner, twig, branch, comms)
            continue
        name = [*twig, (plain(inner.label), "bold")]
        if not inner.is_single:
            yield from _branch_rows(inner, name, inset, comms)
            continue
        name.append((" " * (widest - cell_len(plain(inner.label)) + len(GAP)), ""))
        for entry in inner.entries():
            yield _entry_row(entry, name, inner, comms)


def _entry_row(entry: CommsEntry, label: Line, branch: OutlineLine, comms: Comms) -> list[Cell]:
    key, counter = entry
    label = [*label, (f"{key.pass_:<9} ", _PASS_STYLE.get(key.pass_, "")), (plain(key.op), "")]
    has_own = key.beneficiary is None or key.beneficiary == branch.name
    beneficiary = "" if has_own else plain(_beneficiary(key.beneficiary))
    only = "" if counter.ranks == comms.ranks else f"(rank {ranks_text(counter.ranks)} only)"
    mean_size = amount(counter.bytes / counter.count) if counter.bytes else ""
    return [
        label,
        f"{round(counter.count / counter.steps, 1):g}",
        f"{round(counter.steps / len(counter.ranks), 1):g}",
        f"~{mean_size}" if len(counter.sizes) > 1 else mean_size,
        str(counter.count),
        amount(counter.bytes) if counter.bytes else "",
        plain(key.group) if len(comms.groups) > 1 else "",
        f"{beneficiary} {only}".strip(),
    ]


# -- groups ----------------------------------------------------------------------------------------


def groups_lines(groups: Iterable[dict[str, Any]], *, width: int | None) -> Iterator[Line]:
    columns, rows = groups_table(groups)
    narrowing = (("ranks", 20), ("description", 20), ("backend", 8), ("group", 8))
    return table(columns, rows, width=width, narrowing=narrowing)


def groups_table(groups: Iterable[dict[str, Any]]) -> Table:
    headings = ("group", "description", "mesh dimension", "backend", "ranks")
    return [Column(heading) for heading in headings], map(_group_row, groups)


def _group_row(group: dict[str, Any]) -> list[Cell]:
    desc = shown_description(str(group.get("desc") or ""))
    values = [group.get("name"), desc, group.get("mesh_dim"), group.get("backend")]
    ranks = [rank for rank in group.get("ranks") or () if isinstance(rank, int)]
    return [*("-" if value in (None, "") else plain(value) for value in values), ranks_text(ranks)]
