"""Names of array types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

TokenList = Sequence[int] | npt.NDArray[np.integer[Any]]


def dtype_name(dtype: object) -> str:
    """What an MLX dtype is called, "float16": without the module's name, which its text begins with. No mlx is needed
    here.
    """
    return str(dtype).removeprefix("mlx.core.")
