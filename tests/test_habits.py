"""Rules of style that ruff does not check: sizes of files and functions, unique class names, and
two constructs that are hard to read."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "torchwhere"
FOLDERS = ("src", "tests", "bench", "upstream", "examples")

MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60  # without its docstring
# The code of a hot path stays in one function: a call costs about 50 ns in each module call.
HOT_PATHS = {"hooks/module_calls.py: make_python_wrapper"}


@cache
def syntax_trees() -> dict[Path, ast.Module]:
    """The syntax tree of each Python file in the repository."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return {file: ast.parse(file.read_text()) for file in files}


def source_trees() -> dict[Path, ast.Module]:
    """The syntax trees of the package alone."""
    return {file: tree for file, tree in syntax_trees().items() if file.is_relative_to(SOURCE)}


def places(kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[tuple[str, ast.AST]]:
    """Every node of a kind in the repository, with its file and line."""
    for file, tree in syntax_trees().items():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield f"{file.relative_to(ROOT)}:{node.lineno}", node


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The length of a function in lines, without its docstring."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return total
    docstring = function.body[0]
    return total - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def is_nested(expression: ast.IfExp) -> bool:
    """Whether a conditional expression contains another one."""
    inner = (node for node in ast.walk(expression) if node is not expression)
    return any(isinstance(node, ast.IfExp) for node in inner)


def has_starred_literal(call: ast.Call) -> bool:
    """Whether an argument is a tuple or a list that is written out and unpacked on the spot."""
    starred = (argument.value for argument in call.args if isinstance(argument, ast.Starred))
    return any(isinstance(value, ast.Tuple | ast.List) for value in starred)


def test_no_nested_conditional_expressions() -> None:
    """A conditional expression contains no other conditional expression."""
    assert [place for place, node in places(ast.IfExp) if is_nested(node)] == []


def test_no_starred_literals_as_arguments() -> None:
    """A call gets its arguments one by one: none is a literal tuple or list with a star."""
    assert [place for place, node in places(ast.Call) if has_starred_literal(node)] == []


def test_length_of_files() -> None:
    """A file of the package has at most 400 lines."""
    lengths = {file: len(file.read_text().splitlines()) for file in source_trees()}
    assert {
        str(file.relative_to(SOURCE)): length
        for file, length in lengths.items()
        if length > MOST_LINES_OF_A_FILE
    } == {}


def test_length_of_functions() -> None:
    """A function of the package has at most 60 lines, unless it is a hot path."""
    lengths = {
        f"{file.relative_to(SOURCE)}: {node.name}": lines_of(node)
        for file, tree in source_trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    too_long = {name for name, length in lengths.items() if length > MOST_LINES_OF_A_FUNCTION}
    assert too_long == HOT_PATHS


def test_class_names_are_unique() -> None:
    """No two classes of the package have the same name."""
    files = defaultdict(list)
    for file, tree in source_trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(file.relative_to(SOURCE)))
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


def test_files_of_make_test_gpu() -> None:
    """`make test-gpu` runs the files whose tests all need a GPU, and no others."""
    need_a_gpu = {
        str(file.relative_to(ROOT))
        for file, tree in syntax_trees().items()
        for node in tree.body
        if isinstance(node, ast.Assign)
        and "pytestmark = [pytest.mark.skipif(not torch.cuda.is_available()" in ast.unparse(node)
    }
    commands = subprocess.run(
        ["make", "-n", "test-gpu"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(re.findall(r"tests/\S+\.py", commands.stdout)) == need_a_gpu


@pytest.mark.parametrize(
    ("code", "is_bad"),
    [
        ("a if b else c if d else e", True),
        ("a if b else f(c if d else e)", True),
        ("[a if b else c, d if e else f]", False),
    ],
)
def test_the_check_sees_nested_conditionals(code: str, is_bad: bool) -> None:
    """The check finds a conditional expression at any depth inside another one, and no others."""
    expressions = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.IfExp)]
    assert any(map(is_nested, expressions)) == is_bad


@pytest.mark.parametrize(
    ("code", "is_bad"), [("f(*(1, 2))", True), ("f(*[1, 2], c=3)", True), ("f(*args, 2)", False)]
)
def test_the_check_sees_starred_literals(code: str, is_bad: bool) -> None:
    """The check finds an unpacked literal among the arguments, and leaves other stars alone."""
    expression = ast.parse(code, mode="eval").body
    assert isinstance(expression, ast.Call)
    assert has_starred_literal(expression) == is_bad
