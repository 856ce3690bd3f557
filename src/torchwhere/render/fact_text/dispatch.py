"""Finds the sentence of a fact by its class."""

from __future__ import annotations

from functools import singledispatch

from torchwhere.core.results import Fact


@singledispatch
def fact_text(fact: Fact) -> str:
    """Returns the sentence of one fact. The other modules register a function for each class."""
    raise TypeError(f"no sentence for {type(fact).__name__}")
