"""Products with codes, against float64 products with what they stand for."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.attention import quantized
from cortexmlx.attention.quantized import QuantizedTokens, key_products, split_quantized, weighted_sum
from cortexmlx.kv.arena import Quantization
from support.kernels.quantized_problem import dequantize

FORMS = [Quantization(bits, group) for bits in (8, 4) for group in (64, 32)]


@given(
    form=st.sampled_from(FORMS),
    dim=st.sampled_from([64, 128, 192]),
    rows=st.integers(1, 3),
    heads=st.integers(1, 2),
    queries=st.integers(1, 5),
    tokens=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_scores_and_weighted_sums(
    form: Quantization, dim: int, rows: int, heads: int, queries: int, tokens: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    held = (3 * random.standard_normal((rows, heads, tokens, dim)) + random.standard_normal()).astype(np.float32)
    parts = form.quantize(mx.array(held))
    numbers = dequantize(form.bits, form.group, parts)
    q = random.standard_normal((rows, heads, queries, dim)).astype(np.float32)
    weights = random.dirichlet(np.ones(tokens), (rows, heads, queries)).astype(np.float32)
    codes = QuantizedTokens(parts, form)
    scores, wanted = np.array(codes.key_products(mx.array(q))), q.astype(np.float64) @ numbers.swapaxes(-1, -2)
    assert scores.shape == wanted.shape and np.abs(scores - wanted).max() < 2e-3, "of numbers up to 200"
    sums, wanted = np.array(codes.weighted_sum(mx.array(weights))), weights.astype(np.float64) @ numbers
    assert sums.shape == wanted.shape and np.abs(sums - wanted).max() < 1e-4, "of numbers up to 15"


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("tail_tokens", [0, 5])
@pytest.mark.parametrize("stretch", [1, 3000, 1 << 19])
def test_stretches_are_a_rows_blocks_in_order_and_then_its_tail(
    form: Quantization, tail_tokens: int, stretch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "CHUNK_NUMBERS", stretch)
    random, rows, heads, blocks, size = np.random.default_rng(1), 2, 2, 5, 4

    def drawn(*shape: int) -> tuple[mx.array, ...]:
        keys, values = (mx.array(random.standard_normal((*shape, 64)).astype(np.float32)) for _ in range(2))
        return form.quantize(keys, values)

    slab, tail = drawn(heads * 9, size), drawn(rows, heads, tail_tokens) if tail_tokens else None
    block = np.stack([[random.permutation(9)[:blocks] + 9 * head for head in range(heads)] for _ in range(rows)])
    q = mx.array(random.standard_normal((rows, heads, 3, 64)).astype(np.float32))
    for values in (False, True):
        each = slice(3, 6) if values else slice(3)
        held = dequantize(form.bits, form.group, slab[each])[block].reshape(rows, heads, -1, 64)
        if tail is not None:
            held = np.concatenate([held, dequantize(form.bits, form.group, tail[each])], axis=2)
        found = split_quantized(slab, tail, mx.array(block.astype(np.uint32)), form, values=values)
        assert len(found) == {1: 5, 3000: 3, 1 << 19: 1}[stretch]
        wanted = np.array(q).astype(np.float64) @ held.swapaxes(-1, -2)
        assert np.abs(np.array(key_products(q, found)) - wanted).max() < 2e-4
        weights = random.dirichlet(np.ones(held.shape[2]), (rows, heads, 3))
        got = np.array(weighted_sum(mx.array(weights.astype(np.float32)), found))
        assert np.abs(got - weights @ held).max() < 2e-5
