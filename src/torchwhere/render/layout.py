"""A layout as people read it: a tree of units and parameters, as lines for a terminal and as HTML
for a notebook.

Modules that only hold others have no line of their own: what is in them stands below the unit they
belong to, with its longer name. A line for several modules that are laid out alike (`layers.0-31
x32`) has the bytes of all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torchwhere.core.model_layout import Branch, Layout, Mesh, Node, Param, Unit
from torchwhere.core.place import ROOT
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.layout.layouts import LayoutCohort, Layouts
from torchwhere.render.layout_remarks import group_text
from torchwhere.render.text import Cell, Column, Line, amount, plain, plural, table

_MOST_COHORTS = 20  # that differ
_MOST_DIFFERENCES = 3  # of a cohort that are shown after the first
HEADINGS = ("how", "shape", "here", "dtype", "bytes here", "bytes")


@dataclass(slots=True)
class LayoutRow:
    """A line: its name, what stands in the columns, and what is below it."""

    label: str
    cls: str = ""
    how: str = ""
    shape: str = ""
    here: str = ""
    dtype: str = ""
    local_bytes: int | None = None
    bytes: int | None = None
    is_param: bool = False
    # sentences below its name: the units that begin there
    asides: list[str] = field(default_factory=list)
    rows: list[LayoutRow] = field(default_factory=list)

    def cells(self) -> list[str]:
        sizes = ["" if size is None else amount(size) for size in (self.local_bytes, self.bytes)]
        return [plain(self.how), self.shape, self.here, self.dtype, *sizes]


# -- the outline -----------------------------------------------------------------------------------


def outline(layout: Layout) -> list[LayoutRow]:
    """The tree as it is shown."""
    return [_row(root, "", 1, layout.meshes, is_inside=False) for root in layout.roots]


def _row(
    branch: Branch, above: str, times: int, meshes: Sequence[Mesh], *, is_inside: bool
) -> LayoutRow:
    """A line for a module, or for several that are alike."""
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
    """The lines below a module: its parameters, and what is in the modules it holds."""
    for param in node.params:
        yield _param_row(param, above, times, meshes, node.plan, is_inside)
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
    """A run of modules with one parameter each is one line."""
    if len(row.rows) != 1 or row.rows[0].rows or not row.rows[0].is_param:
        return row
    (only,) = row.rows
    label, _, count = row.label.partition(" ")
    only.label = f"{label}.{only.label} {count}".rstrip()
    return only


def _param_row(
    param: Param, above: str, times: int, meshes: Sequence[Mesh], plan: str, is_inside: bool
) -> LayoutRow:
    count = f"{times} x " if times > 1 else ""
    said = [_placed(param, meshes)]
    if param.tied is not None:
        said = [f"tied to {param.tied}"]
    elif is_inside and param.unit is None:
        said.append("in no unit")
    said += (
        ["frozen"] * (not param.requires_grad)
        + [param.note]
        + ([f"({plan.partition(':')[0]})"] if plan else [])
    )
    return LayoutRow(
        label=above + param.name,
        how=", ".join(filter(None, said)).replace(", (", " ("),
        shape=count + _shape(param.shape),
        here=count + _shape(param.local_shape) if param.local_shape != param.shape else "",
        dtype=plain(param.dtype),
        local_bytes=times * param.local_bytes if param.tied is None else None,
        bytes=times * param.bytes if param.tied is None else None,
        is_param=True,
    )


def _shape(shape: Iterable[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _placed(param: Param, meshes: Sequence[Mesh]) -> str:
    dims = meshes[param.mesh].dims if param.mesh is not None and param.mesh < len(meshes) else ()
    if len(dims) != len(param.placements):
        dims = ("",) * len(param.placements)
    return ", ".join(
        f"{dim}: {placement}" if dim else placement
        for dim, placement in zip(dims, param.placements, strict=True)
    )


def _asides(node: Node, meshes: Sequence[Mesh]) -> list[str]:
    said = [_unit_text(unit, meshes) for unit in node.units]
    said += [node.plan] if node.plan and not node.params else []
    said += [f"the same module as {node.same_as}"] if node.same_as else []
    return [*said, node.note] if node.note else said


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
    """`bfloat16`, or where uses differ `param=bfloat16 reduce=float32`."""
    same = len(set(dtypes.values())) == 1 and len(dtypes) > 1
    return (
        dtypes["param"]
        if same and "param" in dtypes
        else " ".join(f"{use}={dtype}" for use, dtype in dtypes.items())
    )


def _kind_details(unit: Unit, settings: dict[str, object]) -> list[str]:
    if unit.kind == "pipeline stage":
        stages = settings.get("stages")
        return [
            f"{settings.get('stage')}"
            + (f" (of 0-{stages - 1})" if isinstance(stages, int) else "")
        ]
    if "strategy" in settings:
        return [str(settings["strategy"])]
    return ["(HSDP)"] if len(set(unit.placements)) > 1 else []


def _over(unit: Unit, meshes: Sequence[Mesh]) -> list[str]:
    return (
        [] if unit.mesh is None or unit.mesh >= len(meshes) else [f"over {meshes[unit.mesh].label}"]
    )


def mesh_texts(layout: Layout) -> list[str]:
    """A sentence for each mesh."""
    return [_mesh_text(mesh) for mesh in layout.meshes]


def _mesh_text(mesh: Mesh) -> str:
    what = f"mesh {mesh.label}" if any(mesh.dims) else f"group of {mesh.label}"
    where = f" on {mesh.device}" if mesh.device else ""
    ranks = f": ranks {group_text(mesh.ranks)}" if mesh.ranks else ""
    if len(mesh.groups) > 1:
        groups = [
            f"{group_text(group)} along {dim or at}"
            for at, (dim, group) in enumerate(zip(mesh.dims, mesh.groups, strict=False))
        ]
        ranks += f"{';' if ranks else ':'} this rank is with {' and with '.join(groups)}"
    return f"{what}{where}{ranks}{', destroyed' * mesh.is_gone}"


# -- lines -----------------------------------------------------------------------------------------


def layout_lines(layout: Layout, *, width: int | None) -> Iterator[Line]:
    """The tree, with the meshes above it. `bytes here` is what this rank holds, `bytes` the
    whole."""
    for text in mesh_texts(layout):
        yield _fitted([(plain(text), "dim")], width)
    title = f"rank {layout.rank} of {layout.world_size}"
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
    rows = [found for row in outline(layout) for found in _table_rows(row, [], "")]
    lines = table(columns, (cells for cells, _ in rows), width=width, narrowing=narrowing)
    yield from itertools.islice(lines, 1)
    for line, (_, asides) in zip(lines, rows, strict=True):
        yield line
        yield from (_fitted(aside, width) for aside in asides)
    for note in layout.notes:
        yield [(plain(note), "yellow")]


def _table_rows(row: LayoutRow, twig: Line, guide: str) -> Iterator[tuple[list[Cell], list[Line]]]:
    """The cells of a line, and the lines that stand below it on their own, of a row and of all
    below it."""
    style = "" if row.is_param else "bold"
    label: Line = [*twig, (plain(row.label), style)]
    if row.cls:
        label.append((f"  {plain(row.cls)}", "dim"))
    *columns, local_bytes, total = row.cells()
    inset = guide + ("│ " if row.rows else "  ")
    asides: list[Line] = [[(inset, "dim"), (plain(text), "cyan")] for text in row.asides]
    yield [label, *columns, [(local_bytes, style)], [(total, style)]], asides
    for left, below in zip(range(len(row.rows), 0, -1), row.rows, strict=True):
        branch = [(guide + ("├ " if left > 1 else "└ "), "dim")]
        yield from _table_rows(below, branch, guide + ("│ " if left > 1 else "  "))


def _fitted(line: Line, width: int | None) -> Line:
    """A line of one text, cut at the width."""
    *before, (text, style) = line
    room = (width or 1 << 30) - sum(len(part) for part, _ in before)
    return line if len(text) <= room else [*before, (text[: max(0, room - 1)] + "…", style)]


def layout_text(layout: Layout) -> str:
    return "\n".join("".join(text for text, _ in line) for line in layout_lines(layout, width=None))


# -- many ranks ------------------------------------------------------------------------------------


def layouts_lines(found: Layouts, *, width: int | None) -> Iterator[Line]:
    """The layout of the first rank of each pipeline stage, then how the ranks compare."""
    for cohort in found.cohorts:
        if not cohort.differences:
            yield from layout_lines(cohort.layout, width=width)
            yield []
    count = sum(len(cohort.ranks) for cohort in found.cohorts)
    verdict = "laid out alike" if found.is_alike else "not laid out alike"
    yield [
        (plural(count, "rank") + (", " if count > 1 else ""), "bold"),
        (verdict if count > 1 else "", "bold" if found.is_alike else "bold red"),
    ]
    differing = [cohort for cohort in found.cohorts if cohort.differences]
    for cohort in differing[:_MOST_COHORTS]:
        yield from _cohort_lines(cohort)
    if len(differing) > _MOST_COHORTS:
        yield [
            (
                (
                    f"  and {plural(len(differing) - _MOST_COHORTS, 'more group')} of ranks that"
                    " differ; see --json"
                ),
                "red",
            )
        ]
    yield from ([("  ! ", "red"), (plain(text), "")] for text in found.disagreements)
    yield from ([("  unusual: ", "yellow"), (plain(text), "")] for text in found.remarks)
    yield from ([("  differs by design: ", "dim"), (plain(text), "dim")] for text in found.expected)
    if found.changed:
        yield [
            (
                (
                    f"  the layout of {ranks_phrase(found.changed)} changed after the first step;"
                    " this is the last layout"
                ),
                "yellow",
            )
        ]
    if found.missing:
        yield [(f"  no layout of {ranks_phrase(found.missing)}", "yellow")]


def _cohort_lines(cohort: LayoutCohort) -> Iterator[Line]:
    first, *others = cohort.differences
    yield [
        ("  " + ranks_phrase(cohort.ranks), "bold red"),
        (" first in ", ""),
        (plain(first), ""),
    ]
    yield from (
        [("    also ", "dim"), (plain(difference), "")] for difference in others[:_MOST_DIFFERENCES]
    )
    left = len(others) - _MOST_DIFFERENCES
    if left > 0 or cohort.has_more:
        yield [
            (
                (
                    f"    and {max(left, 1)}{' or more' * cohort.has_more} differences; see --rank"
                    f" {cohort.ranks[0]}"
                ),
                "dim",
            )
        ]
