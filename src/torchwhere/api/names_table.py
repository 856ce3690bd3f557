"""Writes the names of a model as a text table: one line for each module, parameter and buffer."""

from __future__ import annotations

from collections.abc import Iterable

from torchwhere.core.place import shown
from torchwhere.model.parameters import ParameterFacts

HEADINGS = (
    "name",
    "what",
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
    sharded = (
        [f"on {facts.mesh}: {', '.join(facts.placements or ())}"] if facts.mesh is not None else []
    )
    sharded += [f"unit {shown(facts.unit)}"] if facts.unit is not None else []
    return {
        "name": facts.name,
        "what": facts.kind,
        "shape": _shape(facts.shape),
        "here": _shape(facts.local_shape) if facts.local_shape != facts.shape else "",
        "numel": f"{facts.numel:,}",
        "dtype": facts.dtype,
        "device": facts.device,
        "id": "" if facts.id is None else str(facts.id),
        "status": facts.zero_status or "",
        "sharded": ", ".join(sharded),
        "holds": ", ".join(facts.holds),
        "also": ", ".join(facts.aliases),
    }


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def table(rows: Iterable[dict[str, str]]) -> str:
    """Aligned columns under their headings; a column with nothing in it is left out."""
    listed = list(rows)
    widths = {
        heading: max((len(row.get(heading, "")) for row in listed), default=0)
        for heading in HEADINGS
    }
    columns = {heading: max(width, len(heading)) for heading, width in widths.items() if width}
    lines = [dict(zip(HEADINGS, HEADINGS, strict=True)), *listed]
    cells = (((row.get(h, ""), h, width) for h, width in columns.items()) for row in lines)
    return "\n".join(
        "  ".join(
            text.rjust(width) if h in ("numel", "id") else text.ljust(width)
            for text, h, width in row
        ).rstrip()
        for row in cells
    )
