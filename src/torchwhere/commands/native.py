"""`torchwhere native`: build the native extension for this Python and this torch."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from torchwhere.commands.arguments import add_command, add_json, print_json
from torchwhere.core.errors import TorchwhereError


def add(commands: Any) -> None:
    sub = add_command(
        commands,
        "native",
        "build the native extension, which makes watching cheaper",
        _native,
        more="Every watch uses it from then on.",
    )
    sub.add_argument("--anew", action="store_true", help="build it again even if it exists")
    sub.add_argument(
        "--check",
        action="store_true",
        help="build nothing; train a small model with the built extension and compare",
    )
    add_json(sub)


def _native(arguments: argparse.Namespace) -> int:
    try:
        from torchwhere.native.build import build
        from torchwhere.native.load import library
        from torchwhere.native.self_test import try_out
    except ImportError as error:
        raise TorchwhereError(
            f"the native extension is built against torch, but torch cannot be imported: {error}"
        ) from None
    if arguments.check:
        try_out()
        path, is_new, result = library(), False, "works like the Python code"
    else:
        path, is_new = build(anew=arguments.anew)
        result = "built" if is_new else "already built"
    if arguments.json:
        print_json({"path": str(path), "is_new": is_new})
    else:  # without `render`: this machine may have torch and not rich
        sys.stdout.write(f"{result}: {path}\n")
    return 0
