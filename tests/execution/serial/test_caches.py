"""mlx-lm's own caches in the place of an arena: cut back exactly or not at all, and counted in bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ChunkedKVCache, ConcatenateKVCache, make_prompt_cache
from mlx_lm.models.cache import KVCache as PlainCache

from cortexmlx.execution.serial_runner import SequenceCaches, find_own_groups, sees_later_tokens, untrimmable_caches
from cortexmlx.kv.sizing import bytes_per_token, row_state_bytes
from support.models.tiny import CONFIGS, tokens_of
from tests.architectures.parity import subject

WINDOW = CONFIGS["windowed llama"]["sliding_window"]


def caches_of(model: Any, blocks: int = 64) -> SequenceCaches:
    caches = SequenceCaches(model, find_own_groups(model), 8)
    caches.resize((blocks,))
    return caches


def fed(caches: SequenceCaches, tokens: list[int]) -> np.ndarray:
    return np.array(caches.run(mx.array([tokens])))


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("keep", [1, 6, WINDOW - 2])
@pytest.mark.parametrize("name", ["llama", "windowed llama", "gpt2"])
def test_what_is_cut_back_is_as_if_the_rest_had_never_been(name: str, keep: int, count: int, judged: Any) -> None:
    """Another text goes on from there, in a piece or token by token, as with mlx-lm's caches that never had more."""
    model, first, other = judged(name)[0], tokens_of(WINDOW - 1, seed=1), tokens_of(2 * WINDOW, seed=2)
    caches = caches_of(model)
    fed(caches, first)
    assert caches.rewind(keep) and caches.length == keep
    theirs = make_prompt_cache(model)
    mx.eval(model(mx.array([first[:keep]]), cache=theirs))
    for i in range(0, len(other), count):
        piece = other[i : i + count]
        wanted = np.array(model(mx.array([piece]), cache=theirs))
        np.testing.assert_allclose(fed(caches, piece), wanted, atol=1e-4)


def test_a_window_that_has_lost_tokens_is_not_cut(judged: Any) -> None:
    caches = caches_of(judged("windowed llama")[0])
    fed(caches, tokens_of(WINDOW, seed=1))
    assert not caches.rewind(WINDOW - 3) and caches.length == WINDOW
    assert caches.rewind(WINDOW), "nothing is to be cut"
    assert caches.rewind(0) and caches.length == 0 and caches.nbytes == 0


def test_more_than_there_is_cannot_be_gone_back_to(judged: Any) -> None:
    caches = caches_of(judged("llama")[0])
    fed(caches, [1, 2, 3])
    assert not caches.rewind(4) and caches.length == 3


@pytest.mark.parametrize("kind", [ConcatenateKVCache, lambda: ChunkedKVCache(8)])
def test_a_class_that_only_says_that_it_can_be_cut_is_not_believed(
    kind: Any, judged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm's own cut of these leaves other keys than those of a shorter text, which is shown first."""
    model = judged("llama")[0]
    monkeypatch.setattr(type(model), "make_cache", lambda self: [kind() for _ in self.layers])
    text = tokens_of(20, seed=3)
    cut, fresh = make_prompt_cache(model), make_prompt_cache(model)
    mx.eval(model(mx.array([text]), cache=cut), model(mx.array([text[:12]]), cache=fresh))
    for cache in cut:
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
        assert cache.is_trimmable()
        cache.trim(8)
    theirs, shorter = (np.array(model(mx.array([[7]]), cache=each)) for each in (cut, fresh))
    assert not np.allclose(theirs, shorter, atol=1e-3)

    caches = caches_of(model)
    fed(caches, text)
    assert not caches.rewind(12) and caches.length == 20
    assert untrimmable_caches(model) == [type(kind()).__name__]


def test_what_is_kept_is_told_apart_by_kind(judged: Any) -> None:
    layer = 2 * (8 + 8) * 4
    groups = find_own_groups(judged("windowed llama")[0])
    assert [(g.spec.window, g.layers, g.bytes_per_token) for g in groups] == [
        (WINDOW, (0, 2), 2 * layer),
        (None, (1,), layer),
    ]
    mamba = judged("mamba")[0]
    groups = find_own_groups(mamba)
    caches = caches_of(mamba)
    for _ in range(2):
        fed(caches, tokens_of(5))
        assert (bytes_per_token(groups), row_state_bytes(groups)) == (0, caches.nbytes)
    assert untrimmable_caches(judged("llama")[0]) == []
    assert untrimmable_caches(judged("windowed llama")[0]) == ["RotatingKVCache"]


class Foreign:
    """A cache of a model's own: a fixed state, and 3 numbers for every other token."""

    def __init__(self) -> None:
        self.inner = PlainCache()
        self.count = 0

    @property
    def offset(self) -> int:
        return self.inner.offset

    @property
    def state(self) -> Any:
        return [mx.zeros((100,)), (mx.zeros((self.count // 2, 3)), None), self.count]

    def make_mask(self, *args: Any, **options: Any) -> Any:
        return self.inner.make_mask(*args, **options)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.count += keys.shape[2]
        return self.inner.update_and_fetch(keys, values)


def test_a_cache_of_unknown_kind_is_measured_while_it_grows(judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = judged("llama")[0]
    monkeypatch.setattr(type(model), "make_cache", lambda self: [Foreign(), PlainCache()])
    unknown, known = find_own_groups(model)
    assert (unknown.spec.bytes_per_token, known.spec.bytes_per_token) == (6, 2 * (8 + 8) * 4)
    assert unknown.spec.row_bytes == 400 - 6, "it holds half of a pair with its first token"


def test_the_system_is_asked_for_what_is_not_there_yet(judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = caches_of(judged("llama")[0])
    asked: list[int] = []
    monkeypatch.setattr("cortexmlx.execution.serial_runner.can_allocate", lambda size: asked.append(size) or True)
    assert caches.can_resize((128,))
    fed(caches, tokens_of(300))
    assert caches.can_resize((128,))
    tokens = 128 * 8 * bytes_per_token(caches.groups)
    spare = asked[0] - tokens
    assert 0 < spare == asked[1] - tokens + caches.nbytes


def test_a_sequence_that_no_longer_fits_is_forgotten(judged: Any) -> None:
    caches = caches_of(judged("llama")[0])
    fed(caches, tokens_of(20))
    caches.resize((3,))
    assert (caches.blocks, caches.length) == ((3,), 20) and caches.nbytes > 0
    caches.resize((2,))
    assert (caches.blocks, caches.length, caches.nbytes) == ((2,), 0, 0)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mamba"])
def test_a_token_that_sees_what_is_behind_it_is_noticed_and_rounding_is_not(
    name: str, judged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = judged(name)[0]
    assert not sees_later_tokens(model)
    call = type(model).__call__

    def rounded(self: Any, tokens: mx.array, cache: Any) -> mx.array:
        logits = call(self, tokens, cache=cache)
        return logits + (tokens.shape[1] > 1) * 0.1 * mx.random.normal(logits.shape) * mx.std(logits)

    monkeypatch.setattr(type(model), "__call__", rounded)
    assert not sees_later_tokens(model)

    def backwards(self: Any, tokens: mx.array, cache: Any) -> mx.array:
        return call(self, tokens[:, ::-1], cache=cache)  # type: ignore[no-any-return]

    monkeypatch.setattr(type(model), "__call__", backwards)
    assert sees_later_tokens(model)


def test_what_mlx_lm_computes_with_a_mask_that_hides_nothing_is_noticed(tmp_path: Path) -> None:
    """phi3small adds a mask of truth values to its scores: what is to be hidden gets 0, and the rest 1."""
    assert sees_later_tokens(subject("phi3small", tmp_path / "phi3small").judge)
