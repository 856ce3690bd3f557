"""What importing costs and changes, and which part of torchwhere may know of which: imports flow
one way."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "torchwhere"
FILES = sorted(SOURCE.rglob("*.py"))

# What each part may import of torchwhere. A part is a file or a folder directly below the package.
MAY_IMPORT = {
    "version": set(),
    "errors": set(),
    "collector": set(),
    # a result shows itself when it is asked to; only then is that imported
    "results": {"errors", "show"},
    "place": {"results"},
    "events": {"place", "results"},
    "blackbox": {"errors", "events", "place", "results"},
    "inspect": {"blackbox", "collector", "events", "place", "results", "sharding", "show"},
    "native": {"errors"},
    "sense": {"blackbox", "errors", "events", "inspect", "place"},
    "identity": {"host", "sense", "version"},
    "recorder": {"blackbox", "errors", "events", "inspect", "place", "sense"},
    "heart": {"blackbox", "host", "sense"},
    "session": (
        {
            "blackbox",
            "errors",
            "events",
            "heart",
            "identity",
            "inspect",
            "monitor",
            "native",
            "place",
            "recorder",
        }
        | {"sense"}
    ),
    # a layout shows itself when it is printed; only then is that imported
    "sharding": {"results", "show"},
    "diagnose": {"blackbox", "errors", "events", "place", "results", "sharding"},
    "show": {"blackbox", "diagnose", "errors", "events", "place", "sharding", "version"},
    "process": {"blackbox", "errors", "sense", "session"},
    "autograd": {"errors", "inspect", "place", "process", "sense", "wrapping"},
    "compiled": {"inspect", "process", "sense"},
    "live": {"blackbox", "diagnose", "process", "sense", "session", "show"},
    "callbacks": {"process", "sense", "wrapping"},
    "marks": {"blackbox", "identity", "place", "process", "sense", "wrapping"},
    "host": {"blackbox", "diagnose"},
    "clerks": {"blackbox", "diagnose", "errors"},
    "recollection": {"blackbox", "diagnose"},
    "keeping": {"blackbox", "diagnose", "recollection"},
    "consultation": {
        "blackbox",
        "clerks",
        "collector",
        "diagnose",
        "flight_recorder",
        "host",
        "keeping",
        "recollection",
    },
    "reporting": {"clerks", "collector", "consultation", "diagnose", "show", "version"},
    "flight_recorder": {"blackbox", "collector", "diagnose", "errors", "events", "place"},
    "top": {"blackbox", "consultation", "diagnose", "errors", "host", "show"},
    "monitor": {
        "blackbox",
        "clerks",
        "consultation",
        "diagnose",
        "errors",
        "host",
        "keeping",
        "place",
        "recollection",
        "show",
    },
    "launch": {"errors", "host", "native", "process", "sense"},
    "trial": {"errors", "native"},
    "timing": {"blackbox", "diagnose", "errors", "sense"},
    "recordings": {"blackbox", "consultation", "diagnose", "errors", "events", "results"},
    "destination": {"errors"},
    "exporting": {"blackbox", "destination", "errors", "events", "parquet", "results"},
    "parquet": {"blackbox", "destination", "errors", "sharding", "version"},
    "wrapping": set(),
    "whole_lines": set(),
    "ranks": {"errors", "place", "sense", "session", "whole_lines"},
    "place_logging": {"place", "ranks", "whole_lines"},
    "drop_in": (
        {
            "blackbox",
            "errors",
            "events",
            "identity",
            "inspect",
            "live",
            "marks",
            "place",
            "process",
            "ranks",
        }
        | {"sense", "session"}
    ),
}
KNOWS_NO_TORCH = (
    "collector",
    "destination",
    "exporting",
    "parquet",
    "recordings",
    "results",
    "clerks",
    "host",
    "consultation",
    "keeping",
    "reporting",
    "flight_recorder",
    "monitor",
    "top",
    "version",
    "errors",
    "place",
    "events",
    "sharding",
    "blackbox",
    "diagnose",
    "show",
    "timing",
    "whole_lines",
)
# imports torch when monitors have to write to each other
HAS_A_STORE = SOURCE / "monitor" / "correspondence.py"
MAY_IMPORT_AT_TOP = {
    "__init__": {"errors", "place", "version"},
    "__main__": {"cli"},
    "cli": {"commands", "version"},
    "commands": {"commands", "destination", "errors", "events"},
}

PRIVATE = re.compile(r"torch\._(C|dynamo|functorch|inductor|guards|ops)\b")
HOME_OF_PRIVATE_NAMES = SOURCE / "sense" / "_torch.py"
# Names of classes and modules as plain text, compared and never resolved: nothing is imported or
# touched through them.
ONLY_COMPARED = {
    ("model/module_names.py", "torch._dynamo.eval_frame.OptimizedModule"),
    ("hooks/exceptions.py", "torch._dynamo.exc"),
    ("recorder/session.py", "torch._dynamo"),
    ("recorder/session.py", "torch._dynamo.callback"),
}


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


# -- import torchwhere -----------------------------------------------------------------------------


def test_import_is_light() -> None:
    """`import torchwhere` imports neither torch nor numpy nor rich."""
    loaded = python("import sys, torchwhere; print(*sys.modules)").split()
    assert "torchwhere" in loaded
    assert not {"torch", "numpy", "rich"} & {name.partition(".")[0] for name in loaded}


def test_import_changes_nothing() -> None:
    """`import torchwhere` starts no thread and touches no handler, hook, import path or variable of
    the process."""
    before, after = json.loads(
        python("""
import json, os, signal, sys, threading

def state():
    handlers = [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())]
    hooks = [repr(hook) for hook in (sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook)]
    tracing = [repr(sys.gettrace()), repr(sys.getprofile()), repr(sys.meta_path), repr(sys.path_hooks)]
    threads = [thread.name for thread in threading.enumerate()]
    return [handlers, hooks, tracing, threads, dict(os.environ), list(sys.path), os.listdir("/proc/self/fd")]

before = state()
import torchwhere
print(json.dumps([before, state()]))
""")
    )
    assert after == before


def test_command_help_needs_no_torch() -> None:
    """`torchwhere --help` answers without importing torch, numpy or rich."""
    code = (
        "import sys; from torchwhere.cli import main\ntry: main(['--help'])\nexcept SystemExit:"
        " print(*sys.modules)"
    )
    loaded = python(code).split()
    assert "comms" in loaded
    assert not {"torch", "numpy", "rich"} & set(loaded)


def test_reading_loads_no_torch() -> None:
    """What reads and shows a run loads neither torch nor anything of the watching side."""
    modules = "torchwhere.blackbox.run, torchwhere.diagnose.comms.tree, torchwhere.render.text"
    loaded = set(python(f"import sys, {modules}; print(*sys.modules)").split())
    assert not loaded & {
        "torch",
        "torchwhere.hooks",
        "torchwhere.recorder.session",
        "torchwhere.api.watch",
        "torchwhere.recorder.recorder",
        "torchwhere.model",
    }


# -- layers ----------------------------------------------------------------------------------------


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported(tree: ast.AST) -> set[str]:
    """Full names of everything that is imported anywhere below `tree`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def parts_imported(tree: ast.AST) -> set[str]:
    own = {name.split(".")[1] for name in imported(tree) if name.startswith("torchwhere.")}
    return {name for name in own if (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()}


def at_top(tree: ast.Module) -> ast.Module:
    """What runs when the file is imported: no function bodies, nothing that is only for the type
    checker."""
    kept = [
        node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.If))
    ]
    return ast.Module(body=kept, type_ignores=[])


def test_layers() -> None:
    """A lower layer never imports a higher one, not even inside a function; the command imports
    what it needs when asked."""
    wrong = []
    for path in FILES:
        tree, part = ast.parse(path.read_text()), part_of(path)
        if part in MAY_IMPORT_AT_TOP:
            found = parts_imported(at_top(tree)) - MAY_IMPORT_AT_TOP[part]
        else:
            found = parts_imported(tree) - MAY_IMPORT[part] - {part}
        wrong += [f"{path.relative_to(SOURCE)} imports torchwhere.{name}" for name in sorted(found)]
    assert wrong == []


def test_what_reads_knows_no_torch() -> None:
    """The format, the diagnosis and the views never import torch: a run can be read anywhere."""
    files = [path for path in FILES if part_of(path) in KNOWS_NO_TORCH]
    assert [
        path
        for path in files
        if path != HAS_A_STORE
        and "torch" in {name.partition(".")[0] for name in imported(ast.parse(path.read_text()))}
    ] == []


def test_private_names_of_torch_live_in_one_file() -> None:
    """Private names of torch stand in `hooks/_torch.py` alone: not in code elsewhere, and not in
    texts elsewhere."""
    found = set()
    for path in FILES:
        if path != HOME_OF_PRIVATE_NAMES:
            tree = ast.parse(path.read_text())
            texts = [
                node.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
            code = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
            names = {text for text in [*texts, *code, *imported(tree)] if PRIVATE.search(text)}
            found |= {(path.relative_to(SOURCE).as_posix(), name) for name in names}
    assert found <= ONLY_COMPARED
