"""Files of frameworks: of installed packages other than torch and torchwhere.

The recorder uses this for the frames of a running program, and the doctor for stacks that another
tool has written. Both must choose the same frame.
"""

from __future__ import annotations

_PACKAGES = ("/site-packages/", "/dist-packages/")
_NOT_FRAMEWORKS = (
    "torch/",
    "torchwhere/",
    "functorch/",
    # These files only pass calls on: to torch.distributed, or to a callback. Their caller says
    # more.
    "deepspeed/comm/",
    "lightning/pytorch/trainer/call.py",
    "pytorch_lightning/trainer/call.py",
    "transformers/trainer_callback.py",
)


def framework_path(file: str) -> str | None:
    """The path of a framework's file below the folder of installed packages:
    `transformers/trainer.py`. None for any other file."""
    for folder in _PACKAGES:
        _, separator, path = file.rpartition(folder)
        if separator:
            return None if path.startswith(_NOT_FRAMEWORKS) else path
    return None
