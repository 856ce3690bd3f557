"""Where PyTorch's flight recorder of a process writes its dumps, from its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping


def dump_paths(variables: Mapping[str, str], folder: str) -> dict[str, str]:
    """The path of a dump without the rank at its end, and that of the pipe that triggers one.

    Args:
        variables: The environment of the process.
        folder: Its current folder.

    Example:
        dump_paths(os.environ, os.getcwd())["dump"]  # "/home/me/.cache/torch/comm_lib_trace_rank_"
    """
    cache = variables.get("XDG_CACHE_HOME") or os.path.join(
        variables.get("HOME") or "/tmp", ".cache"
    )
    dump = (
        variables.get("TORCH_FR_DUMP_TEMP_FILE")
        or variables.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        or os.path.join(cache, "torch", "comm_lib_trace_rank_")
    )
    pipe = variables.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    paths = {"dump": os.path.join(folder, dump)}
    if pipe:
        paths["pipe"] = os.path.join(folder, pipe)
    return paths
