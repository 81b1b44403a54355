"""How many tokens a model attends to, by whatever its makers call it."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.models.folder_config import ignored_window, stated_context_length


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
    assert stated_context_length(config) == context


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": True}, None),
        ({"model_type": "mistral", "sliding_window": 0}, None),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, 4096),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, None),
        ({"model_type": "qwen2", "sliding_window": 4096}, None),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral", "sliding_window": 512}}, 512),
        ({"model_type": "llama", "sliding_window": 4096}, None),
        ({}, None),
    ],
)
def test_windows_that_only_transformers_has(config: dict[str, Any], window: int | None) -> None:
    assert ignored_window(config) == window
