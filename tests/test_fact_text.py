"""Facts as sentences: each class of facts has one, and a template names only fields of its class."""

from __future__ import annotations

import inspect
from string import Formatter
from types import ModuleType

import pytest

from torchwhere.core.results import Fact
from torchwhere.diagnose import dump_facts
from torchwhere.diagnose.diff import facts as diff_facts
from torchwhere.diagnose.diff.facts import MoreDivergences, NotEnded
from torchwhere.diagnose.layout import facts as layout_facts
from torchwhere.diagnose.layout.facts import NotAMember
from torchwhere.diagnose.report import facts as report_facts
from torchwhere.render.fact_text import SENTENCES

MODULES = (diff_facts, dump_facts, layout_facts, report_facts)


def fact_classes(module: ModuleType) -> set[type[Fact]]:
    classes = {value for value in vars(module).values() if inspect.isclass(value)}
    return {cls for cls in classes if issubclass(cls, Fact)} - {Fact, dump_facts.DumpFact}


def test_each_class_has_a_sentence() -> None:
    """Each class of facts has an entry in the table, and the table has no other entry."""
    assert set(SENTENCES) == set().union(*map(fact_classes, MODULES))


@pytest.mark.parametrize("cls", SENTENCES, ids=lambda cls: cls.__name__)
def test_a_template_names_fields_of_its_class(cls: type[Fact]) -> None:
    """A template names a field of its class in each pair of braces."""
    sentence = SENTENCES[cls]
    template = sentence if isinstance(sentence, str) else ""
    named = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
    fields = inspect.signature(cls).parameters
    assert named <= {f"fact.{field}" for field in fields}


def test_formats_of_templates() -> None:
    """A template spells lists of ranks, numbers, verbs and stored groups as all views do."""
    assert str(NotEnded((2,))) == "rank 2 has not ended: compared up to its last event"
    assert str(NotEnded((0, 1, 5))).startswith("ranks 0-1, 5 have not ended: compared up to their")
    assert str(MoreDivergences(1)) == "1 further divergence not shown"
    assert str(MoreDivergences(2000)) == "2,000 further divergences not shown"
    assert "ranks 0, 4, 8 as its group" in str(NotAMember(1, "dp", "0-8:4"))
