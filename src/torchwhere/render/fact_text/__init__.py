"""The sentences of facts about comparisons, layouts, reports and dumps, one module for each.

Entry point: `fact_text`. Importing the modules registers their sentences.
"""

from __future__ import annotations

from torchwhere.render.fact_text import diff, dumps, layout, report
from torchwhere.render.fact_text.dispatch import fact_text

__all__ = ["diff", "dumps", "fact_text", "layout", "report"]
