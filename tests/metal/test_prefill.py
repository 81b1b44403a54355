"""The prefill kernel against attention in float64, on the simulator or a GPU (`conftest.py`).

The slice that always runs; `test_prefill_matrix.py` has the full matrix.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.metal.kernels import KernelFactory
from cortexmlx.metal.lab import sim
from cortexmlx.metal.prefill import (
    NARROW,
    PREFILL_VARIANTS,
    PrefillKernel,
    PrefillVariant,
    reason_for_our_kernel,
    refusal,
)
from cortexmlx.metal.rules import THREADGROUP_BYTES
from support.kernels.paged_problem import GPU_TOLERANCE, TOLERANCE, Options, error, rounded
from support.kernels.prefill_problem import Prompt, Stretch, answer, answers, attend, problem, random_prompts, variant

HALF = variant(group=3, dim=80, block_size=16, dtype="float16")  # one head and 64 tokens in a tile
EDGES = (
    *(Stretch(0, 0, n) for n in (1, 7, 8, 9, 31, 32, 33, 64, 65)),
    *(Stretch(0, n, n + 1) for n in (1, 31, 32, 63, 64, 99)),
    *(Stretch(0, 5, 100), Stretch(0, 30, 34), Stretch(0, 95, 97), Stretch(1, 200, 300), Stretch(1, 299, 300)),
)
"""Stretches that begin and end at and around the edges of blocks of 8, of slices and of tiles of 32 tokens."""


@pytest.fixture(scope="module")
def kernel(factory: KernelFactory) -> PrefillKernel:
    """The prefill kernel there."""
    return PrefillKernel(factory)


def test_stretches_at_every_edge_in_one_launch(kernel: PrefillKernel, tolerance: dict[str, float]) -> None:
    v = variant()
    assert (v.heads, v.tile, v.slice_tokens) == (2, 32, 32)
    prompts = random_prompts(v, [100, 300])
    for runs in (False, True):
        got = attend(kernel, v, prompts, EDGES, runs=runs)
        assert error(got, answers(v, prompts, EDGES)) < tolerance["float32"]


@pytest.mark.parametrize("window", [1, 7, 31, 32, 33, 100, 5000])
def test_sliding_windows(kernel: PrefillKernel, tolerance: dict[str, float], window: int) -> None:
    """What lies before the oldest token that a stretch sees is no block of the arena, or NaN."""
    v, options = variant(), Options(window=window)
    prompts = random_prompts(v, [100, 300])
    assert error(attend(kernel, v, prompts, EDGES, options), answers(v, prompts, EDGES, options)) < tolerance["float32"]


AMID = (Stretch(0, 13, 59), Stretch(1, 47, 81), Stretch(0, 59, 60), Stretch(1, 40, 47), Stretch(0, 70, 99))
"""Stretches that begin and end amid tiles of 32 tokens; some lie in one tile, and end before it does."""


def test_a_piece_lives_with_the_errors_that_metal_allows_fast_functions() -> None:
    v, kernel = variant(), PrefillKernel(sim.metal_kernel)
    prompts = random_prompts(v, [100, 90])
    with sim.options(fast_errors=True):
        got = attend(kernel, v, prompts, AMID)
    assert error(got, attend(kernel, v, prompts, AMID)) > 0, "there were none"
    assert error(got, answers(v, prompts, AMID)) < GPU_TOLERANCE["float32"]


@pytest.mark.parametrize("window", [None, 5, 20])
def test_queries_beside_a_stretch_are_neither_read_nor_written(
    factory: KernelFactory, tolerance: dict[str, float], window: int | None
) -> None:
    """A tile may begin before its stretch and end behind it. There lie queries that are NaN, wider than a tile."""
    v, options, untouched, beside = variant(), Options(window=window), 7777.0, 40
    assert beside > v.tile
    prompts, kernel = random_prompts(v, [100, 90]), PrefillKernel(factory)
    given = problem(v, prompts, AMID, options, apart=beside)
    if factory is sim.metal_kernel:
        with sim.recording(coalescing=False) as recorded:
            attended = kernel(*given, init_value=untouched)
        tokens = sum(s.end - s.first for s in AMID)
        assert recorded.last.buffers["queries"].distinct_read == tokens * given[2].queries.nbytes // len(attended)
    else:
        attended = kernel(*given, init_value=untouched)
    got, at = np.array(attended)[:, :, 0], 0
    for s in AMID:
        end = at + s.end - s.first
        assert error(got[at:end], answer(v, prompts[s.row], s.first, s.end, options)) < tolerance["float32"]
        assert np.all(got[end : end + beside] == untouched), f"results behind {s}"
        at = end + beside


@pytest.mark.parametrize("window", [None, 20])
def test_queries_of_other_rows_beside_a_stretch_change_nothing(
    kernel: PrefillKernel, tolerance: dict[str, float], window: int | None
) -> None:
    """Whatever the other rows ask, NaN among it, a stretch's results stay bitwise the same."""
    v, options = variant(), Options(window=window)
    plain = random_prompts(v, [100, 90])
    sizes = np.cumsum([s.end - s.first for s in AMID])[:-1]
    results = []
    for queries in (plain[1].queries, plain[1].queries * 100, np.full_like(plain[1].queries, np.nan)):
        got = attend(kernel, v, [plain[0], replace(plain[1], queries=queries)], AMID, options)
        parts = np.split(got, sizes)
        results.append(np.concatenate([part for part, s in zip(parts, AMID, strict=True) if s.row == 0]))
    assert all(np.array_equal(result, results[0]) for result in results[1:])
    own = [s for s in AMID if s.row == 0]
    assert error(results[0], answers(v, plain, own, options)) < tolerance["float32"]


@pytest.mark.parametrize("s", [Stretch(0, 13, 31), Stretch(0, 40, 64), Stretch(0, 33, 50), Stretch(0, 5, 70)])
def test_a_stretch_amid_tiles_may_be_all_that_the_step_prefills(
    kernel: PrefillKernel, tolerance: dict[str, float], s: Stretch
) -> None:
    """Before it and behind it, the buffers have nothing."""
    v = variant()
    prompts = random_prompts(v, [100])
    assert error(attend(kernel, v, prompts, [s]), answers(v, prompts, [s])) < tolerance["float32"]


@pytest.mark.parametrize("window", [None, 45])
def test_a_result_is_bitwise_the_same_however_the_prompt_is_cut_and_wherever_it_lies(
    kernel: PrefillKernel, window: int | None
) -> None:
    v, options = HALF, Options(window=window)
    prompts = random_prompts(v, [170, 90])
    whole = attend(kernel, v, prompts, [Stretch(0, 0, 170)], options, runs=True)
    for cuts in ((1,), (64,), (17, 18, 100), (8, 16, 63, 65, 128, 169)):
        edges = (0, *cuts, 170)
        pieces = [Stretch(0, a, b) for a, b in pairwise(edges)]
        together = [Stretch(1, 3, 90), *reversed(pieces), Stretch(1, 0, 3)]
        got = attend(kernel, v, prompts, together, options, seed=len(cuts))
        parts = np.split(got[87:-3], np.cumsum([s.end - s.first for s in reversed(pieces)])[:-1])
        assert np.array_equal(np.concatenate(parts[::-1]), whole), f"cut at {cuts}"


@pytest.mark.parametrize(
    "v",
    [
        HALF,
        PrefillVariant("bfloat16", "bfloat16", 72, 120, 32, 4),  # a lane's numbers come 8, 4, 2 and 1 at a time
        PrefillVariant("float32", "float16", 64, 256, 8, 5),  # values in four chunks, longer than keys
        pytest.param(PrefillVariant("float16", "float16", 256, 256, 16, 8), marks=pytest.mark.slow),
        pytest.param(PrefillVariant("float32", "float16", 192, 128, 8, 5), marks=pytest.mark.slow),
        pytest.param(PrefillVariant("float16", "float32", 64, 8, 8, 1), marks=pytest.mark.slow),
    ],
    ids=lambda v: v.label,
)
def test_dtypes_and_shapes(kernel: PrefillKernel, tolerance: dict[str, float], v: PrefillVariant) -> None:
    prompts = random_prompts(v, [150])
    stretches = [Stretch(0, 0, 70), Stretch(0, 70, 150)]
    with sim.options(poison=True):
        got = attend(kernel, v, prompts, stretches)
    assert error(got, answers(v, prompts, stretches)) < tolerance[v.dtype]


def test_a_softcap_and_sinks_of_every_height(kernel: PrefillKernel, tolerance: dict[str, float]) -> None:
    v = variant(group=4)
    prompts = random_prompts(v, [90], size=4.0)
    sinks = np.array([-1e4, -3.0, 0.0, 1.0, 4.0, 20.0, 200.0, 1e4], np.float32)
    options = Options(softcap=3.0, sinks=sinks, window=40)
    stretches = [Stretch(0, 0, 50), Stretch(0, 50, 90)]
    got = attend(kernel, v, prompts, stretches, options)
    assert error(got, answers(v, prompts, stretches, options)) < tolerance["float32"]


@pytest.mark.parametrize("level", [-1e4, 1e4, -1e30])
def test_logits_far_from_zero(kernel: PrefillKernel, tolerance: dict[str, float], level: float) -> None:
    """No maximum starts at 0, and what is not seen weighs nothing beside scores near the lowest float."""
    v, options = variant(), Options(scale=1.0, window=50)
    (prompt,) = random_prompts(v, [100])
    queries, keys = np.zeros_like(prompt.queries), np.zeros_like(prompt.keys)
    queries[:, :, 5] = 1.0
    keys[:, :, 5] = rounded(level + np.random.default_rng(1).integers(-2, 3, 100) / 4, "float32")
    prompts = [Prompt(queries, keys, prompt.values)]
    got = attend(kernel, v, prompts, [Stretch(0, 0, 100)], options)
    assert error(got, answer(v, prompts[0], 0, 100, options)) < tolerance["float32"]


def test_tokens_that_16_bits_do_not_count(kernel: PrefillKernel, tolerance: dict[str, float]) -> None:
    v, options = variant(), Options(window=33)
    prompts, stretches = random_prompts(v, [65_620]), [Stretch(0, 65_580, 65_620)]
    got = attend(kernel, v, prompts, stretches, options)
    assert error(got, answers(v, prompts, stretches, options)) < tolerance["float32"]


@pytest.mark.slow
def test_half_precision_products_and_sums_do_not_overflow(kernel: PrefillKernel, tolerance: dict[str, float]) -> None:
    v, options = HALF, Options(scale=1e-5)
    (prompt,) = random_prompts(v, [300], size=120.0)
    prompt = replace(prompt, values=rounded(prompt.values + 300, "float16"))
    assert np.abs(prompt.keys[0] @ prompt.queries[0].T).max() > 65504 < prompt.values.sum(axis=1).min()
    got = attend(kernel, v, [prompt], [Stretch(0, 0, 300)], options)
    assert error(got, answer(v, prompt, 0, 300, options)) < 300 * tolerance["float16"]


def test_offsets_beyond_32_bits() -> None:
    """Slabs of 4.8 thousand million numbers per head, all zero but for the row's blocks at their ends."""
    v = replace(HALF, key_dim=256, value_dim=64)
    (prompt,) = random_prompts(v, [40])
    kernel, stretch = PrefillKernel(sim.metal_kernel), Stretch(0, 0, 40)
    configured, items, inputs = problem(v, [prompt], [stretch])
    slots = 4_800_000_000 // v.key_dim // v.block_size * v.block_size
    table = slots // v.block_size - np.array([1, 3, 2, *range(4, 9)])
    slabs = []
    for numbers, dim in ((prompt.keys, v.key_dim), (prompt.values, v.value_dim)):
        slab = sim.SparseArray((2, slots, dim), mx.float16)
        for b, block in enumerate(table[:3]):
            for h in range(2):
                slab.put((h, int(block) * v.block_size, 0), mx.array(numbers[h, b * v.block_size :][: v.block_size]))
        slabs.append(slab)
    given = replace(inputs, keys=slabs[0], values=slabs[1], tables=mx.array(table.astype(np.int32)))
    got = np.array(kernel(configured, items, given).astype(mx.float32))[:, :, 0]
    assert error(got, answer(v, prompt, 0, 40)) < TOLERANCE["float16"]


def test_every_variant_fits_a_threadgroup_and_shares_it_out_to_whole_heads() -> None:
    for v in PREFILL_VARIANTS:
        assert refusal(v) is None and v.threads <= 256 and v.threadgroup_bytes <= THREADGROUP_BYTES
        assert v.group % v.heads == 0 and v.tile * v.heads == 8 * v.simdgroups and v.tile % 8 == 0


def test_a_refusal_says_why() -> None:
    assert "matrices of 8" in (refusal(variant(dim=36)) or "")
    assert "registers" in (refusal(variant(dim=264)) or "")
    assert "float16 and bfloat16" in (refusal(variant(dtype="int8")) or "")
    assert "bytes of threadgroup memory" in (refusal(variant(dim=256)) or "")
    for other in ({"alibi": True}, {"latent": True}, {"kv_bits": 8, "quant_group": 32}):
        assert "not in the prefill kernel" in (refusal(variant(**other)) or "")


@pytest.mark.parametrize(
    ("v", "window", "ours", "beside_matrix_units"),
    [
        (variant(dim=128, dtype="float16"), None, False, False),
        (variant(dim=256, dtype="float16"), None, True, False),
        (variant(dim=112, dtype="float16"), None, True, False),
        (replace(variant(dim=128, dtype="float16"), key_dim=192), None, True, False),
        (variant(dim=128, dtype="float16"), NARROW, True, True),
        (variant(dim=128, dtype="float16"), NARROW + 1, True, False),
        (variant(dim=128, dtype="float16", softcap=True), None, True, True),
        (replace(variant(dim=128, dtype="float16"), kv_dtype="float32"), None, True, True),
        (replace(variant(dim=576, dtype="float16"), value_dim=512, latent=True), None, False, False),
    ],
)
def test_the_kernel_serves_what_mlx_would_do_unfused_or_in_vain(
    v: PrefillVariant, window: int | None, ours: bool, beside_matrix_units: bool
) -> None:
    assert (reason_for_our_kernel(v, AttentionWindow(window), matrix_units=False) is not None) is ours
    assert (reason_for_our_kernel(v, AttentionWindow(window), matrix_units=True) is not None) is beside_matrix_units
