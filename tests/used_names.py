"""Finds what the installed packages take from a module: names they import from it, and private
members of its classes.

Reads their source with `ast`, so that the answer is that of the torch that is installed, whatever
its version.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Source:
    """One file of a package: the module's full name, and its text."""

    module: str
    is_package: bool
    text: bytes

    @property
    def package(self) -> str:
        """The package that relative imports in this file start from."""
        return self.module if self.is_package else self.module.rpartition(".")[0]


@functools.cache
def sources(package: str) -> tuple[Source, ...]:
    """Return every Python file of an installed package; none if it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return ()
    root = Path(spec.origin).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = (package, *path.relative_to(root).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found.append(Source(module, is_package, path.read_bytes()))
    return tuple(found)


@functools.cache
def trees(package: str, original: str) -> tuple[tuple[Source, ast.Module], ...]:
    """Return the files of a package that may import a module, parsed. Parsing all of torch takes
    half a minute."""
    last = original.rpartition(".")[2].encode()
    mentions = re.compile(
        rb"(?m)^\s*(?:from|import)\b.*\b"
        + last
        + rb"\b|import\s*\([^)]*\b"
        + last
        + rb"\b|"
        + re.escape(original).encode()
    )
    likely = (
        source for source in sources(package) if last in source.text and source.module != original
    )
    found = (source for source in likely if mentions.search(source.text))
    return tuple((source, ast.parse(source.text)) for source in found)


def imported_from(source: Source, node: ast.ImportFrom) -> str:
    """Return the full name of the module that a `from ... import` names."""
    if node.level == 0:
        return node.module or ""
    base = source.package.split(".")
    base = base[: len(base) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def aliases(source: Source, tree: ast.Module, original: str) -> set[str]:
    """Return the expressions by which a file may mean the module itself."""
    parent, _, last = original.rpartition(".")
    found = {original}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                alias.asname for alias in node.names if alias.name == original and alias.asname
            }
        elif isinstance(node, ast.ImportFrom) and imported_from(source, node) == parent:
            found |= {alias.asname or alias.name for alias in node.names if alias.name == last}
    return found


def used(package: str, original: str) -> set[str]:
    """Return every name that a package imports from a module, or reads as an attribute of it."""
    names: set[str] = set()
    for source, tree in trees(package, original):
        modules = aliases(source, tree, original)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and imported_from(source, node) == original:
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
                names.add(node.attr)
    return names - {"*"}


def members_used(package: str, original: str) -> set[str]:
    """Return the attributes of other objects that the importers of a module read: some are members
    of its classes.

    What a class reads of `self` is left out: there it is the class's own. `super().name` counts.
    """
    names: set[str] = set()
    for source, tree in trees(package, original):
        froms = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
        if any(imported_from(source, node) == original for node in froms):
            attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
            names |= {
                node.attr for node in attributes if ast.unparse(node.value) not in ("self", "cls")
            }
    return names


def parsed(module: str) -> ast.Module:
    """Return the parsed file of a module, without importing it."""
    (source,) = (source for source in sources(module.partition(".")[0]) if source.module == module)
    return ast.parse(source.text)


def members(original: str, cls: str) -> set[str]:
    """Return what a class of a module defines: methods, class attributes, and what its methods set
    on `self`."""
    (found,) = (
        node
        for node in parsed(original).body
        if isinstance(node, ast.ClassDef) and node.name == cls
    )
    names: set[str] = set()
    for node in found.body:
        names |= {node.name} if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else set()
    for node in ast.walk(found):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        ):
            names.add(node.attr)
    targets = (target for node in found.body for target in assigned(node))
    return names | set(targets)


def assigned(node: ast.stmt) -> set[str]:
    """Return the names that an assignment binds."""
    if isinstance(node, ast.AnnAssign):
        return {ast.unparse(node.target)}
    targets = node.targets if isinstance(node, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def defined(original: str) -> set[str]:
    """Return the public names of a module: `__all__`, or what its file defines at the top without
    an underscore."""
    names: set[str] = set()
    for node in parsed(original).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign) and assigned(node) == {"__all__"}:
            return set(ast.literal_eval(node.value))
        names |= assigned(node)
    return {name for name in names if not name.startswith("_")}
