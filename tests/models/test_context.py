"""How many tokens a model attends to, by whatever its makers call it."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.models.context import stated_context


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 4096, "n_ctx": 512}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"n_ctx": 512, "text_config": {"max_position_embeddings": 8192}}, 512),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"max_position_embeddings": 0, "seq_length": 900}, 900),
        ({"max_position_embeddings": True, "model_max_length": 700}, 700),
        ({"max_position_embeddings": 1e30, "max_seq_len": 400}, 400),
        ({"max_position_embeddings": "4096"}, None),
        ({"text_config": ["max_position_embeddings"]}, None),
        ({}, None),
    ],
)
def test_the_first_sensible_number_is_believed(config: dict[str, Any], context: int | None) -> None:
    assert stated_context(config) == context
