"""Writes the names of a model as a text table: one line for each module, parameter and buffer."""

from __future__ import annotations

from collections.abc import Iterable

from torchwhere.core.place import shown
from torchwhere.model.parameters import ParameterFacts

HEADINGS = (
    "name",
    "type",
    "shape",
    "here",
    "numel",
    "dtype",
    "device",
    "id",
    "status",
    "sharded",
    "holds",
    "also",
)


def row(facts: ParameterFacts) -> dict[str, str]:
    """The cells of a parameter or buffer, by heading."""
    sharding = []
    if facts.mesh is not None:
        sharding.append(f"on {facts.mesh}: {', '.join(facts.placements or ())}")
    if facts.unit is not None:
        sharding.append(f"unit {shown(facts.unit)}")
    return {
        "name": facts.name,
        "type": facts.kind,
        "shape": _shape(facts.shape),
        "here": _shape(facts.local_shape) if facts.local_shape != facts.shape else "",
        "numel": f"{facts.numel:,}",
        "dtype": facts.dtype,
        "device": facts.device,
        "id": "" if facts.id is None else str(facts.id),
        "status": facts.zero_status or "",
        "sharded": ", ".join(sharding),
        "holds": ", ".join(facts.holds),
        "also": ", ".join(facts.aliases),
    }


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def table(rows: Iterable[dict[str, str]]) -> str:
    """Return aligned columns under their headings, without empty columns."""
    listed = list(rows)
    widths = {
        heading: max((len(row.get(heading, "")) for row in listed), default=0)
        for heading in HEADINGS
    }
    columns = {heading: max(width, len(heading)) for heading, width in widths.items() if width}
    headings = dict(zip(HEADINGS, HEADINGS, strict=True))
    return "\n".join(_line(row, columns) for row in [headings, *listed])


def _line(row: dict[str, str], columns: dict[str, int]) -> str:
    cells = []
    for heading, width in columns.items():
        text = row.get(heading, "")
        cells.append(text.rjust(width) if heading in ("numel", "id") else text.ljust(width))
    return "  ".join(cells).rstrip()
