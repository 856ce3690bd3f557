"""`torchwhere native`: build the native part for the torch and the Python that run this."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from torchwhere.commands.arguments import print_json, reading
from torchwhere.core.errors import TorchwhereError


def add(commands: Any) -> None:
    text = "build the native part, with which watching costs less; every watch then uses it"
    sub = commands.add_parser("native", help=text, description=text)
    sub.add_argument("--anew", action="store_true", help="build it again, although it is there")
    sub.add_argument(
        "--check",
        action="store_true",
        help="build nothing: train a small model with the one that is there",
    )
    sub.add_argument("--json", action="store_true", help="as JSON, for programs")
    sub.set_defaults(command=reading(_native))


def _native(arguments: argparse.Namespace) -> int:
    try:
        from torchwhere.native.build import build
        from torchwhere.native.load import library
        from torchwhere.native.self_test import try_out
    except ImportError as error:
        raise TorchwhereError(
            f"the native part is built against torch, which cannot be imported here: {error}"
        ) from None
    if arguments.check:
        try_out()
        path, is_new = library(), False
    else:
        path, is_new = build(anew=arguments.anew)
    if arguments.json:
        print_json([{"path": str(path), "is_new": is_new}])
    else:  # written as it is: there may be torch here, and nothing else
        found = (
            "built"
            if is_new
            else "does what Python's code does"
            if arguments.check
            else "there already"
        )
        sys.stdout.write(f"{found}: {path}\n")
    return 0
