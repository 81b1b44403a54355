"""Dynamic NTK scaling (bloc97, 2023) raises the rotary base when a sequence is longer than the model's positions. The
engine's context ends there (`models/folder_config.py`), so the base is always the plain one, and each row has its own
offset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


def rotation(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Replaces `DynamicNTKScalingRoPE.__call__`."""

    def call(self: Any, x: mx.array, offset: mx.array | int = 0) -> mx.array:
        if isinstance(offset, int):
            return original(self, x, offset)
        rotated: mx.array = mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=self.base, scale=1.0, offset=offset
        )
        return rotated

    return call
