"""Greedy tokens with quantized keys and values equal mlx-lm's with quantized caches, on tiny models of every way of
attending: rows joining at any step, prompts cut anywhere.

The judge is mlx-lm's QuantizedKVCache from the first token on, where mlx-lm attends to one: not in windows, chunks,
with sinks, to latents, nor where a model attends by itself. There its plain caches hold what the codes stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.effort import examples
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.judge import NOISE
from support.models.quantized_models import KINDS, gap_of, greedy, loaded, quantized_caches, rounding_caches, wide
from support.models.tiny import tokens_of

Wide = Callable[[str], Path]
OWN_CACHE = (
    "llama",
    "one layer",
    "qwen3",
    "mixtral",
    "deepseek_v2",
    "gpt2",
    "gpt_bigcode",
    "dynamic rope",
    "nanbeige",
    "qwen3_next",
    "falcon_h1",
)
"""Kinds that mlx-lm runs on its own QuantizedKVCache, and those with recurrent layers."""
LENGTHS = (1, 7, 8, 9, 23, 61, 2, 16, 31, 40, 3, 33)
TOKENS = examples(36, few=24)
QUICK = (("gpt_oss", 8), ("qwen3_next", 4))


@pytest.fixture(scope="session")
def widened(tmp_path_factory: pytest.TempPathFactory) -> Wide:
    """A function from a name of KINDS to the folder of that model."""
    root = tmp_path_factory.mktemp("wide")
    return lambda name: wide(root, name)


def check(folder: Path, bits: int, own: bool, lengths: tuple[int, ...], **config: Any) -> None:
    """A crowd that joins step by step gets mlx-lm's tokens, with `own` those of its QuantizedKVCache."""
    driver = Driver(folder, tokens=1024, prefill_budget=12, kv_bits=bits, **config)
    group = driver.core.stats().kv_group_size
    assert group is not None
    prompts = [tokens_of(n, seed=n) for n in lengths]
    handles = []
    for i, prompt in enumerate(prompts):
        handles.append(driver.add(prompt, TOKENS, ignore_eos=False))
        driver.step(i)
    driver.finish()
    model, tokenizer = loaded(folder)
    caches = quantized_caches if own else rounding_caches
    for prompt, handle in zip(prompts, handles, strict=True):
        mine = driver.result(handle).token_ids
        theirs = greedy(model, prompt, TOKENS, caches(model, bits, group), tokenizer.eos_token_ids)
        gap = gap_of(model, prompt, mine, theirs, bits, group)
        assert gap is None or gap[1] < NOISE, f"prompt of {len(prompt)}: differs at {gap[0]} by {gap[1]}"
    assert_nothing_lost(driver.core.stats())


@pytest.mark.parametrize(("name", "bits"), QUICK)
def test_a_crowd_gets_mlx_lms_tokens(name: str, bits: int, widened: Wide) -> None:
    check(widened(name), bits, False, LENGTHS[:6])


@pytest.mark.parametrize(
    ("name", "bits"),
    [("llama", 4), *(pytest.param(n, 8 - 4 * (i % 2), marks=pytest.mark.slow) for i, n in enumerate(OWN_CACHE))],
)
def test_a_crowd_gets_the_tokens_of_mlx_lms_quantized_cache(name: str, bits: int, widened: Wide) -> None:
    check(widened(name), bits, True, LENGTHS if name != "llama" else LENGTHS[:6])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bits"), [(name, 4 + 4 * (i % 2)) for i, name in enumerate(KINDS)])
def test_twelve_prompts_of_every_kind(name: str, bits: int, widened: Wide) -> None:
    check(widened(name), bits, False, LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["llama", "windowed llama", "gpt_oss", "gemma2", "deepseek_v3"])
def test_on_the_kernels(name: str, bits: int, widened: Wide) -> None:
    """Rows of single tokens on the quantized decode kernels, run by the simulator; latents have none."""
    check(widened(name), bits, False, LENGTHS[:3], attention="sim", block_size=16)
