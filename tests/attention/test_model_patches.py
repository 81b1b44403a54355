"""The original method still runs for everybody else, and what the judge of replaced methods, mlx-lm's tokens in
tests/engine/test_parity.py, does not see: OLMo, chunks far beyond one, layers without keys.
"""

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

from cortexmlx.attention import model_patches
from cortexmlx.attention.probe import probe_kv_specs
from cortexmlx.errors import ModelUnsupported
from cortexmlx.kv.spec import AttentionWindow, group_layers
from cortexmlx.models import load_model
from support.engine.core_driver import Driver
from support.engine.logits import answers_with_logits, mlx_lms_logits
from support.models.tiny import CONFIGS, tokens_of, write_tiny

CHUNK = CONFIGS["llama4"]["text_config"]["attention_chunk_size"]
OLMO = {
    "model_type": "olmo",
    "d_model": 32,
    "n_layers": 2,
    "mlp_hidden_size": 96,
    "n_heads": 4,
    "embedding_size": 320,
}


@pytest.mark.parametrize(
    "name", ["gemma2", "plamo", "gpt_bigcode", "dynamic rope", "llama4", "afm7", "plamo2", "baichuan_m1"]
)
def test_with_mlx_lms_own_caches_a_model_computes_what_it_did(name: str, judged: Any) -> None:
    model = judged(name)[0]
    owners = {type(m) for m in model.modules() if hasattr(type(m).__call__, "replaced")}
    for owner in owners:  # by an earlier test of this process
        owner.__call__ = owner.__call__.replaced
    tokens = mx.array([tokens_of(20, seed=2)])

    def logits() -> list[np.ndarray]:
        cache = make_prompt_cache(model)
        return [np.array(model(tokens[:, :12], cache=cache)), np.array(model(tokens[:, 12:], cache=cache))]

    before = logits()
    model_patches.install_model_patches(model)
    model_patches.install_model_patches(model)
    replaced = [type(m).__call__ for m in model.modules() if hasattr(type(m).__call__, "replaced")]
    assert replaced and not any(hasattr(method.replaced, "replaced") for method in replaced), "once"
    for ours, theirs in zip(logits(), before, strict=True):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(np.array(model(tokens)), np.array(model(tokens, cache=make_prompt_cache(model))))


@pytest.mark.parametrize(("name", "least"), [("afm7", None), ("gemma3n", 9)])
def test_layers_that_attend_to_anothers_keys_take_no_memory_and_compute_what_mlx_lm_does(
    name: str, least: int | None, tiny: Any, judged: Any
) -> None:
    specs = probe_kv_specs(load_model(tiny(name)).model)
    assert [s.attention_window for s in specs] == [AttentionWindow(least), AttentionWindow()], "of four layers"
    prompts = [tokens_of(n, seed=n) for n in (1, 28)]
    driver = Driver(tiny(name), max_rows=2, prefill_budget=12)
    for prompt, (answer, mine) in zip(prompts, answers_with_logits(driver, prompts, 12), strict=True):
        theirs = mlx_lms_logits(judged(name)[0], prompt, answer)
        assert len(set(answer)) > 6 and np.abs(mine - theirs).max() < 1e-4, len(prompt)


def test_three_of_four_layers_of_llama_4_see_their_chunk(tiny: Any) -> None:
    groups = group_layers(probe_kv_specs(load_model(tiny("llama4")).model))
    assert [(g.spec.attention_window, g.layers) for g in groups] == [
        (AttentionWindow(CHUNK, chunked=True), (0, 1, 2)),
        (AttentionWindow(), (3,)),
    ]


def test_llama_4s_logits_are_those_of_all_tokens_at_once(tiny: Any, judged: Any) -> None:
    """Prompts that end before, at and behind a chunk's last token, in pieces that go on into the next chunk; answers
    that do so within a decode window. Blocks of 32 hold two chunks.
    """
    prompts = [tokens_of(n, seed=n) for n in (15, 16, 17, 50)]
    driver = Driver(tiny("llama4"), tokens=1024, max_rows=4, prefill_budget=12, block_size=32)
    model = judged("llama4")[0]
    for prompt, (answer, mine) in zip(prompts, answers_with_logits(driver, prompts, 24), strict=True):
        theirs = np.array(model(mx.array([[*prompt, *answer]]))[0, len(prompt) - 1 : -1])
        assert len(set(answer)) > 6 and np.abs(mine - theirs).max() < 1e-4, len(prompt)


def test_mlx_lms_own_cache_agrees_with_its_dense_mask_in_pieces_and_token_by_token(judged: Any) -> None:
    """Before each piece it keeps the newest tokens, as many as a chunk has: what the piece may see is among them. So
    either judges.
    """
    model, tokens, cache = judged("llama4")[0], tokens_of(70, seed=1), None
    dense = np.array(model(mx.array([tokens]))[0])
    cache, begin = make_prompt_cache(model), 0
    for count in (7, 20, 1, 32):
        piece = np.array(model(mx.array([tokens[begin : begin + count]]), cache=cache)[0])
        assert np.abs(piece - dense[begin : begin + count]).max() < 1e-4
        begin += count
    steps = mlx_lms_logits(model, tokens[:40], tokens[40:])
    assert np.abs(steps - dense[39:-1]).max() < 1e-4


@pytest.fixture
def hf_olmo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """mlx-lm's module only looks whether it is there."""
    monkeypatch.setitem(sys.modules, "hf_olmo", ModuleType("hf_olmo"))
    yield
    sys.modules.pop("mlx_lm.models.olmo", None)


@pytest.mark.usefixtures("hf_olmo")
def test_olmo_whose_prompts_mlx_lm_cannot_compute_is_judged_token_by_token(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", "llama", **OLMO)
    model, _ = mlx_lm.utils.load_model(folder)
    with pytest.raises(ValueError, match=r"incompatible|Cannot|array"):
        model(mx.array([tokens_of(5)]), cache=make_prompt_cache(model))
    prompts = [tokens_of(n, seed=n) for n in (1, 26)]
    for prompt, (answer, mine) in zip(prompts, answers_with_logits(Driver(folder), prompts, 12), strict=True):
        cache = make_prompt_cache(model)
        each = [model(mx.array([[token]]), cache=cache)[0, -1] for token in (*prompt, *answer[:-1])]
        theirs = np.array(mx.stack(each[len(prompt) - 1 :]))
        assert len(set(answer)) > 6 and np.abs(mine - theirs).max() < 1e-4, len(prompt)


@pytest.mark.usefixtures("hf_olmo")
def test_olmo_with_tied_weights_returns_no_logits_and_is_refused(tmp_path: Path) -> None:
    """mlx-lm's code for it then returns a pair."""
    changes: dict[str, Any] = OLMO | {"weight_tying": True}
    with pytest.raises(ModelUnsupported, match="olmo: mlx-lm's code for it returns no logits"):
        Driver(write_tiny(tmp_path / "model", "llama", **changes))
