"""Which way a model is run, and how many blocks a KV memory is then."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache as PlainCache

from cortexmlx.attention.probe import NotPaged
from cortexmlx.errors import InvalidRequest, ModelUnsupported
from cortexmlx.execution.execution_modes import PagedMode, SerialMode, choose_execution_mode
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.sizing import ArenaDemand

LOAD = ArenaDemand(rows=1, prefill_budget=512, block_size=8)
WHY = NotPaged("tiny: a test wants it so")
LAYER = 2 * (8 + 8) * 4
"""Bytes of a token in one layer of a tiny llama."""


class Foreign(PlainCache):
    """A cache class of a model's own."""


def test_a_model_that_can_be_paged_is(judged: Any) -> None:
    way = choose_execution_mode(judged("llama")[0])
    assert isinstance(way, PagedMode) and way.max_rows is None and way.notes == ()
    assert way.can_pipeline and SerialMode(judged("llama")[0], WHY).can_pipeline
    assert way.count_blocks(64 * 2 * LAYER, LOAD, 512) == (8,)
    assert way.choose_backend("reference").name == "reference"


def test_a_model_with_a_cache_of_its_own_runs_one_request_at_a_time_and_says_why(
    judged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = judged("llama")[0]
    monkeypatch.setattr(type(model), "make_cache", lambda self: [Foreign() for _ in self.layers])
    way = choose_execution_mode(model)
    assert isinstance(way, SerialMode) and way.max_rows == 1
    first, second = way.notes
    assert first.startswith("one request runs at a time, on mlx-lm's own caches. llama keeps a Foreign")
    assert second.endswith("Foreign cannot always be cut back") and not way.can_pipeline
    assert way.choose_backend("reference").describe() == "mlx-lm's own"
    with pytest.raises(InvalidRequest, match="must be auto"):
        way.choose_backend("nonsense")


def test_a_model_that_fails_in_mlx_lm_too_is_refused(judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = judged("llama")[0]

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("it broke")

    monkeypatch.setattr(type(model), "__call__", broken)
    with pytest.raises(
        ModelUnsupported, match="cannot be paged, and mlx-lm's own code for it fails here, too"
    ) as refused:
        choose_execution_mode(model)
    assert not isinstance(refused.value, NotPaged)


def test_a_model_that_fails_only_when_it_is_computed_is_refused_before_it_answers(
    judged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = judged("llama")[0]
    way = SerialMode(model, WHY)
    monkeypatch.setattr(type(model), "__call__", lambda *_, **__: mx.zeros((1, 8, 0))[:, :, 5:].reshape(1, 8, 1))
    with pytest.raises(ModelUnsupported, match="fails here, too"):
        way.make_runner(8, 320, way.choose_backend("reference"))


def test_a_model_whose_prompts_see_what_is_behind_them_is_refused(judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a mask of truth values that a model adds to its scores."""
    model = judged("llama")[0]
    way = SerialMode(model, WHY)
    monkeypatch.setattr("mlx_lm.models.llama.create_attention_mask", lambda *_, **__: None)
    with pytest.raises(ModelUnsupported, match="sees those after it: answers would depend on how their prompts"):
        way.make_runner(8, 320, way.choose_backend("reference"))


@pytest.mark.parametrize(
    ("name", "memory", "blocks"),
    [
        ("llama", 64 * 2 * LAYER, 8),
        ("llama", 1 << 30, 512 // 8),
        ("windowed llama", 64 * LAYER + 2 * 11 * LAYER, 8),
        ("mamba", 1 << 20, 512 // 8),
    ],
)
def test_blocks_are_what_one_sequence_needs(name: str, memory: int, blocks: int, judged: Any) -> None:
    """No more than the context has, and a windowed layer's memory ends with its window."""
    assert SerialMode(judged(name)[0], WHY).count_blocks(memory, LOAD, 512) == (blocks,)


@pytest.mark.parametrize(("name", "least"), [("llama", "2 KiB"), ("mamba", "5.5 KiB")])
def test_a_memory_that_is_too_small_is_refused_with_the_numbers(name: str, least: str, judged: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"of 1000 B holds no 8 tokens: give it at least {least}"):
        SerialMode(judged(name)[0], WHY).count_blocks(1000, LOAD, 512)


def test_keys_and_values_of_caches_of_mlx_lms_are_not_quantized(judged: Any, unpaged: None) -> None:
    with pytest.raises(
        ModelUnsupported, match=r"kv_bits is 4, which paged attention alone has: leave it out\. tiny: a test"
    ):
        choose_execution_mode(judged("llama")[0], 4)
    assert choose_execution_mode(judged("llama")[0]).max_rows == 1


def test_heads_that_groups_do_not_divide_are_refused(judged: Any) -> None:
    with pytest.raises(ModelUnsupported, match="of 8 numbers cannot be quantized in groups of 32"):
        choose_execution_mode(judged("llama")[0], 8)


@pytest.mark.parametrize("kind", [PagedMode, SerialMode])
def test_the_runner_works_on_the_arena_that_was_begun_last(kind: Any, judged: Any) -> None:
    model = judged("llama")[0]
    way = choose_execution_mode(model) if kind is PagedMode else SerialMode(model, WHY)
    runner: Any = way.make_runner(8, 320, way.choose_backend("reference"))
    assert runner.blocks == (0,)
    cache = way.begin_arena((8,), PrefixCache(8))
    first = runner.arena
    assert (cache.pools.max_blocks, cache.pools.blocks) == ((8,), runner.blocks)
    cache = way.begin_arena((8,), PrefixCache(8))
    assert runner.arena is not first and cache.pools.blocks == runner.blocks
    mx.eval(runner.arena.arrays())
