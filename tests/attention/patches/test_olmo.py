"""OLMo, whose prompts mlx-lm cannot compute at once, is judged by mlx-lm token by token. Its package is not needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from cortexmlx.errors import ModelUnsupported
from support.engine.core_driver import Driver
from support.engine.logits import answers_with_logits
from support.models.tiny import tokens_of, write_tiny

CONFIG = {
    "model_type": "olmo",
    "d_model": 32,
    "n_layers": 2,
    "mlp_hidden_size": 96,
    "n_heads": 4,
    "embedding_size": 320,
}


@pytest.fixture(autouse=True)
def its_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """mlx-lm's module only looks whether it is there."""
    monkeypatch.setitem(sys.modules, "hf_olmo", ModuleType("hf_olmo"))
    yield
    sys.modules.pop("mlx_lm.models.olmo", None)


def test_logits_are_mlx_lms_token_by_token(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", "llama", **CONFIG)
    model, _ = mlx_lm.utils.load_model(folder)
    with pytest.raises(ValueError, match=r"incompatible|Cannot|array"):
        model(mx.array([tokens_of(5)]), cache=make_prompt_cache(model))
    prompts = [tokens_of(n, seed=n) for n in (1, 9, 26)]
    for prompt, (answer, mine) in zip(prompts, answers_with_logits(Driver(folder), prompts, 12), strict=True):
        cache = make_prompt_cache(model)
        each = [model(mx.array([[token]]), cache=cache)[0, -1] for token in (*prompt, *answer[:-1])]
        theirs = np.array(mx.stack(each[len(prompt) - 1 :]))
        assert len(set(answer)) > 6 and np.abs(mine - theirs).max() < 1e-4, len(prompt)


def test_with_tied_weights_it_returns_no_logits_and_is_refused(tmp_path: Path) -> None:
    """mlx-lm's code for it then returns a pair."""
    changes: dict[str, Any] = CONFIG | {"weight_tying": True}
    with pytest.raises(ModelUnsupported, match="olmo: mlx-lm's code for it returns no logits"):
        Driver(write_tiny(tmp_path / "model", "llama", **changes))
