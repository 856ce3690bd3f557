"""Short names for the types of numpy arrays, used in annotations."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Times = Ints  # in ns
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
AnyArray = npt.NDArray[Any]  # records of a box, or a column of them
