"""Names of array types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

TokenList = Sequence[int] | npt.NDArray[np.integer[Any]]


def dtype_name(dtype: object) -> str:
    """Return the name of an MLX dtype without the module, such as "float16". It needs no mlx."""
    return str(dtype).removeprefix("mlx.core.")
