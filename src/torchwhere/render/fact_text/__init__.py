"""The sentences of facts. One module for each `facts.py`: comparisons, layouts, reports, dumps.

Entry point: `fact_text`. Importing the modules registers their sentences.
"""

from __future__ import annotations

from torchwhere.render.fact_text import diff, dumps, layout, report
from torchwhere.render.fact_text.dispatch import fact_text

__all__ = ["diff", "dumps", "fact_text", "layout", "report"]
