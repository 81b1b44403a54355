"""The last hidden states of a model, from the norm whose input is kept: what mlx-lm's own body returns, for every type
that this engine embeds with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from cortexmlx import Engine
from cortexmlx.attention.probe import build_lazy_logits
from cortexmlx.execution.execution_modes import PagedMode, choose_execution_mode
from cortexmlx.execution.logit_rows import LogitRows
from cortexmlx.mlx_lm.package import import_mlx_lm_utils
from support.embedding.models import write_json, write_modules
from support.models.tiny import tokens_of
from tests.architectures.configurations import configuration
from tests.architectures.weights import write_model

OTHERS = {"gemma3n", "gpt_neox", "lille-130m", "nanochat", "phixtral", "talkie"}
"""Types whose body does something after its last norm, or has none that is a module."""

FEW = ("cohere", "gpt2", "minicpm", "nanbeige", "qwen3_moe")

PROMPTS = [tokens_of(n, seed=n) for n in (1, 8, 19)]


def built(name: str) -> nn.Module | None:
    """A tiny model of a type; None if it cannot be paged, or if mlx-lm cannot build it here."""
    config = configuration(name)
    try:
        model_class, args_class = import_mlx_lm_utils()._get_classes(config)
        model = model_class(args_class.from_dict(config))
        return model if isinstance(choose_execution_mode(model), PagedMode) else None
    except (Exception, SystemExit):
        return None


def body_of(model: Any) -> Any:
    """The part of mlx-lm's model that returns its last states, by the names that they have in its classes."""
    model = getattr(model, "language_model", model)
    return next(
        part for name in ("model", "transformer", "backbone") if (part := getattr(model, name, None)) is not None
    )


def check(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path, name)
    judge, _ = import_mlx_lm_utils().load_model(model)
    body = body_of(judge)
    whole = [body(mx.array([prompt]), cache=make_prompt_cache(judge)) for prompt in PROMPTS]
    right = [np.array(states[0].astype(mx.float32)) for states in whole]
    write_modules(model, [("", "Transformer"), ("1_Pooling", "Pooling")])
    for mode in ("lasttoken", "mean"):
        said = {"embedding_dimension": right[0].shape[-1], "pooling_mode": mode}
        write_json(model / "1_Pooling" / "config.json", said)
        with Engine(model, kv_memory="4MB", block_size=8, prefill_budget=12) as engine:
            if engine.info.embedding is None:
                why = engine.inspect(lambda core: core.model.embedding.not_embedding)
                assert "window" in why or "recurrent" in why or "later ones" in why, why
                return
            vectors = engine.embed(PROMPTS).vectors
        wanted = [states[-1] if mode == "lasttoken" else states.mean(0) for states in right]
        scale = np.abs(np.stack(wanted)).max()
        np.testing.assert_allclose(vectors, wanted, atol=1e-4 * scale, rtol=1e-3)


@pytest.mark.parametrize("name", FEW)
def test_states_are_those_of_mlx_lms_body(tmp_path: Path, name: str) -> None:
    check(tmp_path, name)


def test_which_types_have_no_such_states() -> None:
    models = {name: model for name in (*sorted(OTHERS), *FEW) if (model := built(name)) is not None}
    assert {
        name for name, model in models.items() if not LogitRows(model, build_lazy_logits).has_hidden_states()
    } == OTHERS


def test_the_model_is_as_before(tiny: Any) -> None:
    model = built("cohere")
    assert model is not None
    rows = LogitRows(model, build_lazy_logits)
    before = {path: id(module) for path, module in model.named_modules()}
    assert rows.has_hidden_states() and rows.has_hidden_states()
    assert {path: id(module) for path, module in model.named_modules()} == before
