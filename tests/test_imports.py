"""What importing costs and changes, and the order of the packages: imports flow one way."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "torchwhere"
FILES = sorted(SOURCE.rglob("*.py"))

# The packages from the bottom to the top: each imports only packages that stand before it.
PACKAGES = (
    "core",
    "native",
    "blackbox",
    "processes",
    "gpus",
    "diagnose.calls",
    "diagnose.clocks",
    "diagnose.doctor",
    "diagnose.stack_position",
    "diagnose.stack_hang",
    "diagnose.dump_facts",
    "diagnose.dump_progress",
    "diagnose.call_graph",
    "diagnose.dump_causes",
    "diagnose.dump_order",
    "diagnose.dump_hang",
    "diagnose.dump_mismatch",
    "diagnose.dump_age",
    "diagnose.dump_pace",
    "diagnose.groups",
    "diagnose.device_time",
    "diagnose.step_parts",
    "diagnose.phases",
    "diagnose.comms",
    "diagnose.diff",
    "diagnose.layout",
    "diagnose.live",
    "diagnose.timeline",
    "diagnose.report",
    "snapshots",
    "render",
    "flight_recorder",
    "pipeline",
    "monitor",
    "top",
    "model",
    "hooks",
    "recorder",
    "api",
    "drop_in",
    "integrations",
    "commands",
    "startup",
)
# These packages run in the training process and may import torch; all others read runs without it.
KNOWS_TORCH = {"native", "model", "hooks", "recorder", "api", "drop_in", "integrations", "startup"}
# Files of those packages that read recorded runs, so they must work without torch too.
READS_RUNS = {"api/export.py", "api/parquet.py", "api/phases.py", "api/run.py"}
# Monitors of several hosts talk through a c10d store: this file imports torch when they do.
HAS_A_STORE = "monitor/transport.py"
# Importing these must be cheap: everything else is imported when a command runs.
LIGHT = {
    "__init__": {"core"},
    "__main__": {"cli"},
    "cli": {"commands", "core"},
    "commands": {"commands", "core"},
}
# Packages inside packages: they need no place of their own in the order.
INNER = {"diagnose.doctor.rules", "render.page", "render.verdict_text"}
RUNS_THE_SCRIPT = "commands.launch"  # `torchwhere run` imports it when it starts the script
ENTRY_POINT = re.compile(r"Entry points?: `")

PRIVATE = re.compile(r"torch\._(C|dynamo|functorch|inductor|guards|ops)\b")
HOME_OF_PRIVATE_NAMES = SOURCE / "hooks" / "_torch.py"
# Names of classes and modules as plain text, compared and never resolved: nothing is imported or
# touched through them.
ONLY_COMPARED = {
    ("hooks/exceptions.py", "torch._dynamo.exc"),
    ("recorder/session.py", "torch._dynamo"),
    ("recorder/session.py", "torch._dynamo.callback"),
}


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True
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


def package_of(name: str) -> str:
    """The package of a module, given by its dotted name below `torchwhere`."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "diagnose" else parts[0]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


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


def packages_imported(tree: ast.AST) -> set[str]:
    own = {name.partition(".")[2] for name in imported(tree) if name.startswith("torchwhere.")}
    return {package_of(name) for name in own if (SOURCE / name.split(".")[0]).is_dir()}


def at_top(tree: ast.Module) -> ast.Module:
    """What runs when the file is imported: no function bodies, nothing that is only for the type
    checker."""
    kept = [
        node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.If))
    ]
    return ast.Module(body=kept, type_ignores=[])


def test_packages_import_downwards_only() -> None:
    """A package imports only packages below it, also inside functions: so there is no cycle."""
    wrong = []
    for path in FILES:
        package = package_of(name_of(path))
        if package in PACKAGES:
            below = set(PACKAGES[: PACKAGES.index(package) + 1])
            found = packages_imported(ast.parse(path.read_text())) - below
            wrong += [f"{name_of(path)} imports torchwhere.{name}" for name in sorted(found)]
    assert wrong == []


def test_entry_points_import_little() -> None:
    """`import torchwhere` and `torchwhere --help` import only what stands at the top of a file."""
    wrong = []
    for path in FILES:
        allowed = LIGHT.get(name_of(path).partition(".")[0])
        if allowed is not None and name_of(path) != RUNS_THE_SCRIPT:
            found = imported(at_top(ast.parse(path.read_text())))
            own = {name.split(".")[1] for name in found if name.startswith("torchwhere.")}
            wrong += [f"{name_of(path)} imports torchwhere.{name}" for name in own - allowed]
    assert wrong == []


def test_every_package_says_its_job() -> None:
    """Every package is in the list, and its docstring says its job and its entry point."""
    folders = {path.parent for path in SOURCE.rglob("__init__.py")} - {SOURCE}
    names = {".".join(path.relative_to(SOURCE).parts) for path in folders}
    listed = {name for name in PACKAGES if (SOURCE / name.replace(".", "/")).is_dir()}
    assert names - {"diagnose", *INNER} == listed
    silent = [
        folder.relative_to(SOURCE).as_posix()
        for folder in folders
        if not ENTRY_POINT.search(ast.get_docstring(_parsed(folder / "__init__.py")) or "")
    ]
    assert sorted(silent) == []


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_few_modules_lie_beside_the_packages() -> None:
    """At most 5 modules lie at the top of the package: what is there is an entry point."""
    assert {path.stem for path in SOURCE.glob("*.py")} == {"__init__", "__main__", "cli"}


def test_reading_needs_no_torch() -> None:
    """The format, the diagnosis and the views never import torch: a run can be read anywhere."""
    files = {path.relative_to(SOURCE).as_posix(): path for path in FILES}
    reading = {name for name in files if name.partition("/")[0] not in KNOWS_TORCH} | READS_RUNS
    assert [
        name
        for name in sorted(reading - {HAS_A_STORE})
        if "torch" in {found.partition(".")[0] for found in imported(_parsed(files[name]))}
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
