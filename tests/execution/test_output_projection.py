"""Only the tokens that need logits are projected, and they are the model's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from cortexmlx import Engine
from cortexmlx.attention.probe import build_lazy_logits, probe_kv_specs
from cortexmlx.execution.execution_modes import PagedMode, choose_execution_mode
from cortexmlx.execution.output_projection import LazyPass, OutputProjection, own_modules
from cortexmlx.mlx_lm.package import import_mlx_lm_utils
from support.embedding.models import write_json, write_modules
from support.models.tiny import CONFIGS, tokens_of
from tests.architectures.configurations import configuration
from tests.architectures.weights import write_model

VOCAB, WIDTH = 20, 8


class Counting(nn.Module):  # type: ignore[misc]
    """A module that counts the rows of each call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.rows: list[int] = []

    def __call__(self, x: mx.array) -> mx.array:
        self.rows = [*self.rows, x.shape[0]]
        out: mx.array = self.inner(x)
        return out


def rows_of(*rows: int) -> Any:
    return np.array(rows, np.int32)


ELSEWHERE: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": CONFIGS["gemma3_text"], "vocab_size": CONFIGS["llama"]["vocab_size"]},
    "gpt_neox": CONFIGS["llama"]
    | {"layer_norm_eps": 1e-5, "use_parallel_residual": True, "rotary_emb_base": 10_000, "rotary_pct": 0.5},
    "stablelm": CONFIGS["llama"]
    | {"layer_norm_eps": 1e-5, "use_qkv_bias": False, "partial_rotary_factor": 0.5, "qk_layernorm": True},
}
"""Models whose last norm has another name, or lies deeper, or that keep norms in norms and read only their weights."""


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma3_text",
        "gpt2",
        "cohere2",
        "deepseek_v2",
        "mixtral",
        "gpt_oss",
        "nanbeige",
        "llama4",
        "afm7",
        *ELSEWHERE,
    ],
)
def test_the_rows_are_those_of_the_whole_and_no_others_reach_the_norm(name: str, tiny: Any) -> None:
    import mlx_lm
    from mlx_lm.models.cache import make_prompt_cache

    if name in ELSEWHERE:
        arch = importlib.import_module(f"mlx_lm.models.{name}")
        model = arch.Model(arch.ModelArgs.from_dict(ELSEWHERE[name] | {"model_type": name}))
    else:
        model = mlx_lm.load(str(tiny(name)))[0]
    probe_kv_specs(model)
    tokens = mx.array(tokens_of(6, seed=3))[:, None]
    whole = np.array(model(tokens, cache=make_prompt_cache(model))[:, 0])
    projection = OutputProjection(model, build_lazy_logits)
    assert projection._pick is not None, "the final norm is found"
    counting = projection._pick.norm = Counting(projection._pick.norm)
    for rows in (rows_of(5), rows_of(0, 3), rows_of(1, 2, 4, 5), rows_of(*range(6))):
        logits = projection.run(tokens, make_prompt_cache(model), rows)
        np.testing.assert_allclose(np.array(logits), whole[rows], atol=2e-4)
    loops = CONFIGS.get(name, {}).get("num_loops", 1)
    assert counting.rows[loops - 1 :: loops] == [1, 2, 4, 6]
    projection.run(tokens, make_prompt_cache(model), rows_of())
    assert counting.rows[-1] == 6, "nobody looks at the logits, so the graph stays as it is"
    for rows in (rows_of(5), rows_of(0, 3), rows_of()):
        logits, kept = projection.run_keeping(tokens, make_prompt_cache(model), rows, rows_of(0, 1, 3, 4))
        np.testing.assert_allclose(np.array(logits)[: len(rows)], whole[rows], atol=2e-4)
        for part, wanted in ((slice(0, 1), [0]), (slice(1, 4), [1, 3, 4])):
            np.testing.assert_allclose(np.array(projection.project(kept[part])), whole[wanted], atol=2e-4)
            assert counting.rows[-1] == len(wanted)
    np.testing.assert_allclose(np.array(model(tokens, cache=make_prompt_cache(model))[:, 0]), whole, atol=2e-4)


@pytest.mark.parametrize(("name", "behind"), [("nanochat", "lm_head"), ("talkie", "lm_head_gain")])
def test_where_the_last_norm_is_no_module_the_rows_are_picked_behind_all_layers(name: str, behind: str) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    arch = importlib.import_module(f"mlx_lm.models.{name}")
    model = arch.Model(arch.ModelArgs.from_dict(CONFIGS["llama"] | {"model_type": name, "num_key_value_heads": 4}))
    model.update(
        tree_map(lambda a: mx.random.normal(a.shape, scale=0.3, key=mx.random.key(a.size)), model.parameters())
    )
    probe_kv_specs(model)
    tokens = mx.array(tokens_of(6, seed=3))[:, None]
    whole = np.array(model(tokens, cache=make_prompt_cache(model))[:, 0])
    for _ in range(2):  # the second finds what the first has wrapped
        projection = OutputProjection(model, build_lazy_logits)
        model[behind] = counting = Counting(model[behind])
        for rows in (rows_of(5), rows_of(1, 2, 4), rows_of(*range(6))):
            logits = projection.run(tokens, make_prompt_cache(model), rows)
            np.testing.assert_allclose(np.array(logits), whole[rows], atol=1e-5)
        assert counting.rows == [1, 3, 6]
        logits, kept = projection.run_keeping(tokens, make_prompt_cache(model), rows_of(5), rows_of(0, 2, 4))
        projected = projection.project(kept[1:])
        assert counting.rows[3:] == [1, 2]
        np.testing.assert_allclose(np.array(logits), whole[[5]], atol=1e-5)
        np.testing.assert_allclose(np.array(projected), whole[[2, 4]], atol=1e-5)
        model[behind] = counting.inner
    assert (
        len(model.layers) == 2 and type(model.children()[next(iter(model.children()))]).__name__ == "_OutputRowPicker"
    )


class Body(nn.Module):  # type: ignore[misc]
    """Embeddings, a layer and a norm, which may run before the layer, too, or before something is added to it."""

    def __init__(self, twice: bool, added: bool) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.closing = nn.RMSNorm(WIDTH)
        self._twice, self._added = twice, added

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed(tokens)
        if self._twice:
            x = self.closing(x)
        out: mx.array = self.closing(x + self.layer(x))
        return out + x if self._added else out


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self, twice: bool = False, added: bool = False) -> None:
        super().__init__()
        self.body, self.head = Body(twice, added), Counting(nn.Linear(WIDTH, VOCAB, bias=False))

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        out: mx.array = self.head(self.body(tokens))
        return out


TOKENS = mx.array([[3], [7], [11], [2]])


def no_attention(model: nn.Module, tokens: mx.array, _: Callable[[], None]) -> mx.array:
    logits: mx.array = model(tokens)
    return logits


def attention_last(model: nn.Module, tokens: mx.array, attended: Callable[[], None]) -> mx.array:
    logits = no_attention(model, tokens, attended)
    attended()
    return logits


@pytest.mark.parametrize(
    ("model", "lazy", "projected"),
    [
        (Model(), no_attention, 2),
        (Model(twice=True), no_attention, 2),
        (Model(added=True), no_attention, 4),
        (Model(), attention_last, 4),
    ],
    ids=["a norm at the end", "the same norm before", "a residual behind the norm", "attention behind the norm"],
)
def test_rows_are_picked_only_where_nothing_behind_needs_the_others(
    model: Model, lazy: LazyPass, projected: int
) -> None:
    whole = np.array(model(TOKENS)[:, 0])
    projection = OutputProjection(model, lazy)
    logits = projection.run(TOKENS, [], rows_of(3, 1))
    np.testing.assert_allclose(np.array(logits), whole[[3, 1]], atol=1e-6)
    assert model.head.rows[-1] == projected
    logits, kept = projection.run_keeping(TOKENS, [], rows_of(3), rows_of(0, 2, 1))
    np.testing.assert_allclose(np.array(logits), whole[[3]], atol=1e-6)
    np.testing.assert_allclose(np.array(projection.project(kept[1:])), whole[[2, 1]], atol=1e-6)
    assert model.head.rows[-1] == projected, "a part of what was kept, or what was projected with the others"
    np.testing.assert_allclose(np.array(model(TOKENS)[:, 0]), whole, atol=1e-6)


def test_a_model_is_wrapped_once_however_often_it_is_taken() -> None:
    model = Model()
    whole = np.array(model(TOKENS)[:, 0])
    OutputProjection(model, no_attention)
    again = OutputProjection(model, no_attention)
    assert isinstance(model.body.closing.norm, nn.RMSNorm)
    np.testing.assert_allclose(np.array(again.run(TOKENS, [], rows_of(2))), whole[[2]], atol=1e-6)


@pytest.mark.parametrize("name", ["nanochat", "llama"])
def test_modules_keep_their_names_whatever_is_wrapped(name: str) -> None:
    """The body of the one, and the norm of the other."""
    arch = importlib.import_module(f"mlx_lm.models.{name}")
    model = arch.Model(arch.ModelArgs.from_dict(CONFIGS["llama"] | {"model_type": name, "num_key_value_heads": 4}))
    before = dict(model.named_modules())
    probe_kv_specs(model)
    OutputProjection(model, build_lazy_logits)
    assert dict(model.named_modules()).keys() != before.keys()
    after = dict(own_modules(model))
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


def test_a_pass_that_fails_picks_nothing_in_the_next() -> None:
    model = Model()
    projection = OutputProjection(model, no_attention)
    with pytest.raises(ValueError, match="must be integral"):
        projection.run(TOKENS.astype(mx.float32), [], rows_of(1))
    assert model(TOKENS).shape[0] == 4


class Strict(Model):
    """A model that insists on a logit for each token, and says so in its own way."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        out = self.body(tokens)
        if out.shape[0] != tokens.shape[0]:
            raise self._error
        logits: mx.array = self.head(out)
        return logits


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("rows"), TypeError("rows")], ids=repr)
def test_a_model_that_refuses_fewer_rows_keeps_its_norm(error: Exception) -> None:
    model = Strict(error)
    logits = OutputProjection(model, no_attention).run(TOKENS, [], rows_of(2))
    np.testing.assert_allclose(np.array(logits), np.array(model(TOKENS)[:, 0])[[2]], atol=1e-6)
    assert isinstance(model.body.closing, nn.RMSNorm)


# The last hidden states of a model, from the norm whose input is kept: what mlx-lm's own body returns, for every type
# that this engine embeds with.


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
        name for name, model in models.items() if not OutputProjection(model, build_lazy_logits).has_hidden_states()
    } == OTHERS


def test_the_model_is_as_before(tiny: Any) -> None:
    model = built("cohere")
    assert model is not None
    rows = OutputProjection(model, build_lazy_logits)
    before = {path: id(module) for path, module in model.named_modules()}
    assert rows.has_hidden_states() and rows.has_hidden_states()
    assert {path: id(module) for path, module in model.named_modules()} == before
