"""Whole engines on models that keep latents: mlx-lm's logits and tokens, whatever happens to the rows, from one array
for each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from cortexmlx.attention.probe import probe_kv_specs
from cortexmlx.errors import ModelUnsupported
from cortexmlx.metal.lab import sim
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.judge import assert_same, greedy
from support.engine.logits import answers_with_logits, mlx_lms_logits
from support.models.tiny import CONFIGS, quantize_in_place, tokens_of, write_tiny

_TEXT = CONFIGS["deepseek_v3"]
_EXPERTS = {"norm_topk_prob": True, "routed_scaling_factor": 1.5}
_LONGCAT: dict[str, Any] = {
    "attention_method": "MLA",
    "q_lora_rank": 32,
    "zero_expert_type": "identity",
    "ffn_hidden_size": 48,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 16,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "num_layers": 1,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
    "rope_scaling": None,
    "routed_scaling_factor": 1.5,
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "longcat_flash": _LONGCAT,
    "glm4_moe_lite": {"rope_scaling": None},
    "mistral4": _EXPERTS
    | {
        "rope_scaling": None,
        "rope_parameters": {
            "rope_theta": 1e4,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.1,
            "mscale_all_dim": 1.0,
        },
    },
    "kimi_vl": {"text_config": _TEXT, "vision_config": {}, "rope_scaling": None},
    "kimi_k25": {"text_config": _TEXT, "vision_config": {}, "rope_scaling": None},
}
"""What makes of the tiny deepseek_v3 a model of each type."""

PROMPTS = [tokens_of(n, seed=n) for n in (3, 41, 17, 8, 24)]
TOKENS = 12


def write(folder: Path, kind: str, **changes: Any) -> Path:
    return write_tiny(folder / kind, "deepseek_v3", **{"model_type": kind} | MODELS[kind] | changes)


@pytest.mark.parametrize(
    "kind", [k if k in ("deepseek_v3", "longcat_flash") else pytest.param(k, marks=pytest.mark.slow) for k in MODELS]
)
def test_logits_of_a_ragged_crowd_are_mlx_lms(kind: str, tmp_path: Path) -> None:
    """Rows that decode beside pieces of prompts; each layer keeps one array, of its latents and rotary keys."""
    folder = write(tmp_path, kind)
    driver = Driver(folder, tokens=4096, max_rows=5, prefill_budget=12)
    arena = driver.core.runner.arena
    assert {tuple(a.shape for a in arena.slab(layer)) for layer in arena.group_of} == {
        ((1, arena.slots_per_slab(0), 16 + 4),)
    }
    assert len(arena.group_of) == 2, "layers, or one with two leaves"
    assert arena.nbytes == 2 * arena.slots_per_slab(0) * (16 + 4) * 4
    judge = load_model(folder)[0]
    for prompt, (answer, mine) in zip(PROMPTS, answers_with_logits(driver, PROMPTS, TOKENS), strict=True):
        np.testing.assert_allclose(mine, mlx_lms_logits(judge, prompt, answer), atol=1e-4)
    assert_nothing_lost(driver.core.stats())


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_what_an_indexer_picks_is_not_paged(kind: str, tmp_path: Path) -> None:
    config = {
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 8,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "attention_bias": False,
        **_EXPERTS,
    }
    folder = write_tiny(tmp_path, "deepseek_v3", model_type=kind, **config)
    with pytest.raises(ModelUnsupported, match=f"{kind}: an indexer picks the 8 tokens that a query attends to"):
        probe_kv_specs(load_model(folder)[0])


def test_a_token_of_deepseek_v3_takes_576_numbers_in_each_layer(tmp_path: Path) -> None:
    """By the arena's own bytes, and the tail's."""
    folder = write(tmp_path, "deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64)
    driver = Driver(folder, tokens=256, max_rows=4, prefix_cache=False)
    arena = driver.core.runner.arena
    assert arena.nbytes == 576 * 4 * 2 * arena.slots_per_slab(0)
    driver.add(PROMPTS[0], 8)
    driver.step(4)
    assert driver.core.runner.bytes.tail == 576 * 4 * 2 * 16


@pytest.mark.parametrize(
    "settings",
    [
        {"tokens": 80, "max_rows": 8},
        pytest.param(
            {"tokens": 4096, "max_rows": 4, "prefix_cache": False, "prefill_budget": 16}, marks=pytest.mark.slow
        ),
        pytest.param({"tokens": 80, "max_rows": 8, "pipeline": False}, marks=pytest.mark.slow),
        pytest.param({"tokens": 4096, "max_rows": 4, "block_size": 64, "prefill_budget": 512}, marks=pytest.mark.slow),
        pytest.param({"tokens": 80, "max_rows": 8, "prefix_cache": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_same_tokens_whatever_the_engine_does_on_the_way(
    settings: dict[str, Any], tiny: Callable[[str], Path], judged: Any, theirs: Any
) -> None:
    """Prefixes that are shared, answers that fork, rows that lose their blocks."""
    model = judged("deepseek_v3")[0]
    common = tokens_of(24, seed=77)
    prompts = [[*common[: n // 2], *tokens_of(n - n // 2, seed=n)] for n in (17, 32, 9, 40, 21)]
    driver = Driver(tiny("deepseek_v3"), **settings)
    handles = [driver.add(prompt, 30, n=1 + i % 2) for i, prompt in enumerate(prompts)]
    driver.finish()
    for prompt, handle in zip(prompts, handles, strict=True):
        wanted, done = theirs("deepseek_v3", prompt, 30), driver.result(handle)
        for answer in (done, *done.others):
            assert_same(model, prompt, answer.token_ids, wanted)
    assert settings["tokens"] > 1000 or driver.core.stats().preemptions >= 4, "the arena must be too small"
    assert_nothing_lost(driver.core.stats())


def test_a_second_turn_computes_its_own_tokens_only(tiny: Callable[[str], Path], theirs: Any) -> None:
    """A short piece over a long context."""
    driver = Driver(tiny("deepseek_v3"), tokens=1024, prefill_budget=64)
    text = tokens_of(120, seed=5)
    for turn, cached in enumerate((0, 129)):
        done = driver.result_of(text, 10)
        assert done.usage.cached_tokens == cached
        assert list(done.token_ids) == theirs("deepseek_v3", text, 10)
        text = [*text, *done.token_ids, *tokens_of(6, seed=turn)]


@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.slow)])
def test_a_quantized_model(bits: int, tmp_path: Path) -> None:
    """Its matrices from latents and to latents are quantized, too."""
    sizes = dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"), 32)
    folder = write(tmp_path, "deepseek_v3", moe_intermediate_size=32, intermediate_size=64, **sizes)
    quantize_in_place(folder, bits=bits)
    judge, tokenizer = mlx_lm.load(str(folder))[:2]
    assert any("embed_q.scales" in name for name, _ in tree_flatten(judge.parameters()))
    driver = Driver(folder, max_rows=5, prefill_budget=12, tokens=1024)
    for prompt, mine in zip(PROMPTS, driver.answers(PROMPTS, TOKENS), strict=True):
        assert_same(judge, prompt, mine, greedy(judge, tokenizer, prompt, TOKENS))
    assert len(driver.core.runner.arena.slab(0)) == 1


@pytest.mark.lab
def test_the_wide_kernel_gives_the_references_tokens(tmp_path: Path) -> None:
    wide(tmp_path, PROMPTS[2:4], 6, kv_lora_rank=32, qk_rope_head_dim=32)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "heads"), [(512, 4), (256, 9)])
def test_the_wide_kernel_at_the_sizes_of_real_models(rank: int, heads: int, tmp_path: Path) -> None:
    wide(tmp_path, PROMPTS, 24, kv_lora_rank=rank, qk_rope_head_dim=64, num_attention_heads=heads)


def wide(folder: Path, prompts: Sequence[Sequence[int]], tokens: int, **sizes: int) -> None:
    """The simulator and the reference side by side."""
    model = write(folder, "deepseek_v3", **sizes)
    with sim.options(checked=False):
        kernels = Driver(model, attention="sim", tokens=1024, max_rows=5)
        mine = kernels.answers(prompts, tokens)
    judge = load_model(model)[0]
    for prompt, a, b in zip(prompts, mine, Driver(model, tokens=1024).answers(prompts, tokens), strict=True):
        assert_same(judge, prompt, a, b)
    assert kernels.core.backend.notes() == ()
    assert kernels.core.stats().attention_backend == "sim, wide kernel"
