"""Which backend carries out paged attention."""

from __future__ import annotations

import mlx.core as mx
import pytest

from cortexmlx.attention.backends import choose_backend
from cortexmlx.errors import InvalidRequest


def test_backends_are_chosen_by_name() -> None:
    assert choose_backend("reference").describe() == "reference"
    assert choose_backend("sim").name == "sim"
    assert choose_backend("auto").name == ("metal" if mx.metal.is_available() else "reference")
    with pytest.raises(InvalidRequest, match="auto, metal, reference or sim"):
        choose_backend("cuda")
    if not mx.metal.is_available():
        with pytest.raises(InvalidRequest, match="no Metal device"):
            choose_backend("metal")
