"""Makes the processes that a job starts watch themselves, through environment variables.

They inherit `TORCHWHERE_OUT` and `TORCHWHERE_OPTIONS`. `torchwhere_startup` reads them when Python
starts. Without an installed `torchwhere_startup.pth`, for example in a source tree, a folder on the
PYTHONPATH does the same (`startup/python_path/`).
"""

from __future__ import annotations

import os
import site
from pathlib import Path

from torchwhere.commands.watch_options import OPTIONS, OUT, WatchOptions

_PACKAGE = Path(__file__).parent.parent
_PYTHON_PATH = _PACKAGE / "startup" / "python_path"
_PTH_FILE = "torchwhere_startup.pth"


def watch_children(out: str, options: WatchOptions) -> None:
    """Set the variables for all processes that this one starts, or becomes, from now on."""
    os.environ[OUT] = os.path.abspath(out)
    os.environ[OPTIONS] = options.to_text()
    if not _is_installed():
        folders = [str(_PYTHON_PATH), str(_PACKAGE.parent)]
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        others = [path for path in paths if path and path not in folders]
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *others])


def _is_installed() -> bool:
    """Whether Python runs the start-up hook by itself."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    return any(os.path.isfile(os.path.join(folder, _PTH_FILE)) for folder in folders)
