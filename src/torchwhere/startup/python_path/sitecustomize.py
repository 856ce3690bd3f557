"""Does what `torchwhere_startup.pth` does, where that file is not installed: in a source tree.

`torchwhere run` puts the folder of this file first on the PYTHONPATH of the processes that the job
starts. Python then imports this file instead of another `sitecustomize`, which runs afterwards as
it does without torchwhere. Any Python may find this file, also one without torchwhere: it must run
in old versions, and an error must not reach the process.
"""

import os
import sys


def _start():
    # type: () -> None
    if not os.environ.get("TORCHWHERE_OUT") or sys.version_info < (3, 11):
        return
    try:  # noqa: SIM105 - contextlib takes time
        import torchwhere_startup  # noqa: F401
    except ImportError:  # a Python without torchwhere
        pass


def _run_other_sitecustomize():
    # type: () -> None
    folder = os.path.dirname(__file__)
    sys.path[:] = [path for path in sys.path if path != folder]
    own = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
        if own is not None:
            sys.modules["sitecustomize"] = own


_start()
_run_other_sitecustomize()
