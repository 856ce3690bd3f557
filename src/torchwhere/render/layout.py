"""A layout as a tree of units and parameters: as lines for a terminal and as rows for HTML.

Modules that only hold others have no line: their content is below the unit they belong to, with its
longer name. A line for several modules that are laid out alike (`layers.0-31 x32`) shows the bytes
of all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torchwhere.core.model_layout import Branch, Layout, Mesh, Node, Param, Unit
from torchwhere.core.place import ROOT
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.core.sanitize import plural
from torchwhere.core.units import amount
from torchwhere.diagnose.layout.layouts import LayoutCohort, Layouts
from torchwhere.render.fact_text import group_text
from torchwhere.render.lines import (
    Cell,
    Column,
    Line,
    fitted,
    plain,
    table,
    twigs,
)

_MOST_COHORTS = 20  # that differ, shown
_MOST_DIFFERENCES = 3  # of a cohort, shown after the first
HEADINGS = ("how", "shape", "here", "dtype", "bytes here", "bytes")


@dataclass(slots=True)
class LayoutRow:
    """A line: its name, its cells, and the rows below it."""

    label: str
    cls: str = ""
    how: str = ""
    shape: str = ""
    here: str = ""
    dtype: str = ""
    local_bytes: int | None = None
    bytes: int | None = None
    is_param: bool = False
    # sentences below the name, about the units that begin here
    asides: list[str] = field(default_factory=list)
    rows: list[LayoutRow] = field(default_factory=list)

    def cells(self) -> list[str]:
        sizes = ["" if size is None else amount(size) for size in (self.local_bytes, self.bytes)]
        return [plain(self.how), self.shape, self.here, self.dtype, *sizes]


# -- the outline -----------------------------------------------------------------------------------


def outline(layout: Layout) -> list[LayoutRow]:
    """The tree as rows."""
    return [_row(root, "", 1, layout.meshes, is_inside=False) for root in layout.roots]


def _row(
    branch: Branch, above: str, times: int, meshes: Sequence[Mesh], *, is_inside: bool
) -> LayoutRow:
    """A row for a module, or for several that are laid out alike."""
    node, times = branch.node, times * branch.count
    label = above + branch.label or ROOT
    row = LayoutRow(
        label=f"{label} x{branch.count}" if branch.count > 1 else label,
        cls=node.cls,
        asides=_asides(node, meshes),
        local_bytes=times * node.local_bytes if node.count else None,
        bytes=times * node.bytes if node.count else None,
    )
    is_inside = is_inside or any(unit.kind != "pipeline stage" for unit in node.units)
    row.rows = list(_below(node, "", times, meshes, is_inside))
    return row


def _below(
    node: Node, above: str, times: int, meshes: Sequence[Mesh], is_inside: bool
) -> Iterator[LayoutRow]:
    """The rows below a module: its parameters, and the content of its submodules."""
    for param in node.params:
        row = _param_row(param, node, times, meshes, is_inside=is_inside)
        yield replace(row, label=above + row.label)
    for branch in node.children:
        if _has_line(branch):
            row = _row(branch, above, times, meshes, is_inside=is_inside)
            yield _joined(row) if _is_plain_run(branch) else row
        else:
            yield from _below(branch.node, f"{above}{branch.label}.", times, meshes, is_inside)


def _has_line(branch: Branch) -> bool:
    node = branch.node
    says_more = node.note or node.same_as or (node.plan and not node.params)
    return bool((branch.count > 1 and node.count) or node.units or says_more)


def _is_plain_run(branch: Branch) -> bool:
    return not branch.node.units and not branch.node.note


def _joined(row: LayoutRow) -> LayoutRow:
    """Join a run of modules with one parameter each to one row."""
    if len(row.rows) != 1 or row.rows[0].rows or not row.rows[0].is_param:
        return row
    (only,) = row.rows
    label, _, count = row.label.partition(" ")
    only.label = f"{label}.{only.label} {count}".rstrip()
    return only


def _param_row(
    param: Param, node: Node, times: int, meshes: Sequence[Mesh], *, is_inside: bool
) -> LayoutRow:
    """The row of a parameter of `node`."""
    plan = node.plan
    count = f"{times} x " if times > 1 else ""
    parts = [_placed(param, meshes)]
    if param.tied is not None:
        parts = [f"tied to {param.tied}"]
    elif is_inside and param.unit is None:
        parts.append("in no unit")
    if not param.requires_grad:
        parts.append("frozen")
    parts.append(param.note)
    if plan:
        parts.append(f"({plan.partition(':')[0]})")
    return LayoutRow(
        label=param.name,
        how=", ".join(filter(None, parts)).replace(", (", " ("),
        shape=f"{count}{list(param.shape)}",
        here=f"{count}{list(param.local_shape)}" if param.local_shape != param.shape else "",
        dtype=plain(param.dtype),
        local_bytes=times * param.local_bytes if param.tied is None else None,
        bytes=times * param.bytes if param.tied is None else None,
        is_param=True,
    )


def _placed(param: Param, meshes: Sequence[Mesh]) -> str:
    dims = meshes[param.mesh].dims if param.mesh is not None and param.mesh < len(meshes) else ()
    if len(dims) != len(param.placements):
        dims = ("",) * len(param.placements)
    return ", ".join(
        f"{dim}: {placement}" if dim else placement
        for dim, placement in zip(dims, param.placements, strict=True)
    )


def _asides(node: Node, meshes: Sequence[Mesh]) -> list[str]:
    sentences = [_unit_text(unit, meshes) for unit in node.units]
    if node.plan and not node.params:
        sentences.append(node.plan)
    if node.same_as:
        sentences.append(f"the same module as {node.same_as}")
    if node.note:
        sentences.append(node.note)
    return sentences


def _unit_text(unit: Unit, meshes: Sequence[Mesh]) -> str:
    settings = dict(unit.settings)
    parts = [" ".join([unit.kind, *_kind_details(unit, settings), *_over(unit, meshes)])]
    if unit.dtypes:
        parts.append(_dtypes_text(dict(unit.dtypes)))
    if unit.reshard:
        parts.append(f"reshard {unit.reshard}")
    if unit.offload:
        parts.append(f"offload {unit.offload}")
    if unit.state_bytes is not None:
        parts.append(
            f"{settings.get('optimizer', 'optimizer')} has {amount(unit.state_bytes)} here"
        )
    if not unit.params and unit.kind != "pipeline stage":
        parts.append("no parameters of its own")
    if unit.also:
        parts.append(f"with {', '.join(unit.also)}")
    return ", ".join(parts)


def _dtypes_text(dtypes: dict[str, str]) -> str:
    """`bfloat16`, or if they differ `param=bfloat16 reduce=float32`."""
    are_equal = len(set(dtypes.values())) == 1 and len(dtypes) > 1
    if are_equal and "param" in dtypes:
        return dtypes["param"]
    return " ".join(f"{use}={dtype}" for use, dtype in dtypes.items())


def _kind_details(unit: Unit, settings: dict[str, object]) -> list[str]:
    if unit.kind == "pipeline stage":
        stages = settings.get("stages")
        of = f" (of 0-{stages - 1})" if isinstance(stages, int) else ""
        return [f"{settings.get('stage')}{of}"]
    if "strategy" in settings:
        return [str(settings["strategy"])]
    return ["(HSDP)"] if len(set(unit.placements)) > 1 else []


def _over(unit: Unit, meshes: Sequence[Mesh]) -> list[str]:
    if unit.mesh is None or unit.mesh >= len(meshes):
        return []
    return [f"over {meshes[unit.mesh].label}"]


def layout_title(layout: Layout) -> str:
    return f"rank {layout.rank} of {layout.world_size}"


def mesh_texts(layout: Layout) -> list[str]:
    """A sentence for each mesh."""
    return [_mesh_text(mesh) for mesh in layout.meshes]


def _mesh_text(mesh: Mesh) -> str:
    name = f"mesh {mesh.label}" if any(mesh.dims) else f"group of {mesh.label}"
    device = f" on {mesh.device}" if mesh.device else ""
    ranks = f": ranks {group_text(mesh.ranks)}" if mesh.ranks else ""
    if len(mesh.groups) > 1:
        groups = [
            f"{group_text(group)} along {dim or at}"
            for at, (dim, group) in enumerate(zip(mesh.dims, mesh.groups, strict=False))
        ]
        ranks += f"{';' if ranks else ':'} this rank is with {' and with '.join(groups)}"
    destroyed = ", destroyed" if mesh.is_gone else ""
    return f"{name}{device}{ranks}{destroyed}"


# -- lines -----------------------------------------------------------------------------------------


def layout_lines(layout: Layout, *, width: int | None) -> Iterator[Line]:
    """The tree, with the meshes above it.

    `bytes here` counts what this rank holds, `bytes` the whole parameter.
    """
    for text in mesh_texts(layout):
        yield fitted([(plain(text), "dim")], width)
    title = layout_title(layout)
    columns = [Column(title), *(Column(heading, optional=True) for heading in HEADINGS[:4])]
    columns += [Column(heading, right=True) for heading in HEADINGS[4:]]
    narrowing = (
        ("dtype", 0),
        ("how", 30),
        ("here", 0),
        ("how", 16),
        ("shape", 0),
        (title, 24),
        ("how", 0),
        (title, 12),
    )
    rows = [shown for row in outline(layout) for shown in _table_rows(row, [], "")]
    lines = table(columns, (cells for cells, _ in rows), width=width, narrowing=narrowing)
    yield from itertools.islice(lines, 1)
    for line, (_, asides) in zip(lines, rows, strict=True):
        yield line
        yield from (fitted(aside, width) for aside in asides)
    for note in layout.notes:
        yield [(plain(note), "yellow")]


def _table_rows(row: LayoutRow, start: Line, guide: str) -> Iterator[tuple[list[Cell], list[Line]]]:
    """The cells of a row, the sentences below it, and the same for all rows below it."""
    style = "" if row.is_param else "bold"
    label: Line = [*start, (plain(row.label), style)]
    if row.cls:
        label.append((f"  {plain(row.cls)}", "dim"))
    *columns, local_bytes, total = row.cells()
    inset = guide + ("│ " if row.rows else "  ")
    asides: list[Line] = [[(inset, "dim"), (plain(text), "cyan")] for text in row.asides]
    yield [label, *columns, [(local_bytes, style)], [(total, style)]], asides
    for below, twig, inner_guide in twigs(row.rows, guide):
        yield from _table_rows(below, twig, inner_guide)


# -- many ranks ------------------------------------------------------------------------------------


def layouts_lines(layouts: Layouts, *, width: int | None) -> Iterator[Line]:
    """The layout of the first rank of each pipeline stage, then how the ranks compare."""
    for cohort in layouts.cohorts:
        if not cohort.differences:
            yield from layout_lines(cohort.layout, width=width)
            yield []
    count = sum(len(cohort.ranks) for cohort in layouts.cohorts)
    yield _comparison(count, is_alike=layouts.is_alike)
    differing = [cohort for cohort in layouts.cohorts if cohort.differences]
    for cohort in differing[:_MOST_COHORTS]:
        yield from _cohort_lines(cohort)
    if len(differing) > _MOST_COHORTS:
        groups = plural(len(differing) - _MOST_COHORTS, "more group")
        yield [(f"  and {groups} of ranks that differ; see --json", "red")]
    yield from ([("  ! ", "red"), (plain(text), "")] for text in layouts.disagreements)
    yield from ([("  unusual: ", "yellow"), (plain(text), "")] for text in layouts.remarks)
    for text in layouts.expected:
        yield [("  differs by design: ", "dim"), (plain(text), "dim")]
    yield from ([(f"  {fact}", "yellow")] for fact in layouts.data_facts)


def _comparison(count: int, *, is_alike: bool) -> Line:
    if count < 2:
        return [(plural(count, "rank"), "bold")]
    ranks = (f"{plural(count, 'rank')}, ", "bold")
    if is_alike:
        return [ranks, ("laid out alike", "bold")]
    return [ranks, ("not laid out alike", "bold red")]


def _cohort_lines(cohort: LayoutCohort) -> Iterator[Line]:
    first, *others = cohort.differences
    yield [("  " + ranks_phrase(cohort.ranks), "bold red"), (" first in ", ""), (plain(first), "")]
    for difference in others[:_MOST_DIFFERENCES]:
        yield [("    also ", "dim"), (plain(difference), "")]
    left = len(others) - _MOST_DIFFERENCES
    if left > 0 or cohort.has_more:
        or_more = " or more" if cohort.has_more else ""
        yield [
            (f"    and {max(left, 1)}{or_more} differences; see --rank {cohort.ranks[0]}", "dim")
        ]
