"""Small inputs for checking the decode, prefill and tail-write kernels, with every edge case, and the expected results
in float64 by NumPy.

The answers use nothing of MLX: a GPU's own products may be coarse (an M5 multiplies float32 matrices in TF32, good to
1e-3 only). The numbers are multiples of 1/32 below 4, which every dtype holds exactly, so that no conversion rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.kv.step import PrefillPiece
from cortexmlx.metal.kernels import DecodeInputs
from cortexmlx.metal.prefill import PrefillInputs, PrefillVariant
from cortexmlx.metal.rules import Variant
from cortexmlx.metal.shape import PARTITION
from cortexmlx.metal.tail_write import HeadNorm, NewTokens, TailWriteVariant, pack_positions
from cortexmlx.metal.work import SMALL, make_prefill_work_list, make_work_list, pad_tables

ROW_LENGTHS = (2 * PARTITION + 37, 31, 1, PARTITION - 3)
"""Tokens of each row in the arena: more than two partitions, and a tail across the end of a partition."""

ONE_PARTITION_LENGTHS = (PARTITION - 9, 31, 1)
"""The same for rows that have one partition each."""

FAR_TOKENS = 1 << 16
"""Tokens of a row that 16 bits do not count."""

TAIL_TOKENS = 5
WINDOW = PARTITION + 50
PIECES = ((0, 67), (45, 131), (300, 301))
"""The prefilled tokens of each row: a piece with its beginning, one that begins and ends within a tile, and a single
one.
"""
PREFILL_WINDOW = 50
_KV_HEADS = 2
_COLUMNS = 20
_SOFTCAP = 2.0

Floats = npt.NDArray[np.float32]
Inputs = TypeVar("Inputs", DecodeInputs, PrefillInputs)


@dataclass(frozen=True)
class DecodeProblem:
    """A test of the decode kernels: inputs, work item count, and `expected` `[rows, query_heads, 1, value_dim]`."""

    inputs: DecodeInputs
    items: int
    expected: npt.NDArray[np.float64]


def make_far_problem(variant: Variant) -> DecodeProblem:
    """Return a decode problem with rows of more than 65,536 tokens, the last of which are in the window."""
    return make_decode_problem(variant, WINDOW, (WINDOW + 33, WINDOW + 1), unseen_tokens=FAR_TOKENS)


def make_decode_problem(
    variant: Variant, window: int | None, lengths: Sequence[int] = ROW_LENGTHS, unseen_tokens: int = 0
) -> DecodeProblem:
    """Return a decode problem of rows of `lengths` in scattered blocks. Memory that no query sees is NaN, in arena and
    tail. Each row has `unseen_tokens` more tokens before those, outside the window, all in one and the same block.
    """
    random = np.random.default_rng(7)

    def draw_numbers(*shape: int) -> Floats:
        return _draw_numbers(random, *shape)

    rows, heads = len(lengths), _KV_HEADS * variant.group
    tables, slots = _scatter_blocks(lengths, variant.block_size, random.permutation)
    blocks = int(tables.max()) + 1
    if unseen_tokens:
        unseen_blocks = np.full((rows, unseen_tokens // variant.block_size), blocks, tables.dtype)
        tables, blocks = np.concatenate([unseen_blocks, tables], 1), blocks + 1
    queries, sinks, slopes = draw_numbers(rows, heads, variant.key_dim), draw_numbers(heads), alibi_slopes(heads)
    factors = np.array([variant.key_dim**-0.5, _SOFTCAP if variant.softcap else 0.0], np.float32)

    def lay_out(row_arrays: Sequence[Floats]) -> tuple[Floats, Floats]:
        """Put each row's `[kv_heads, tokens, numbers]` into a slab, and its newest tokens into tails. Return both."""
        dim = row_arrays[0].shape[2]
        slab = np.full((_KV_HEADS, blocks * variant.block_size, dim), np.nan, np.float32)
        tails = np.full((rows, _KV_HEADS, _COLUMNS, dim), np.nan, np.float32)
        for row, (row_array, length) in enumerate(zip(row_arrays, lengths, strict=True)):
            slab[:, slots[row]], tails[row, :, :TAIL_TOKENS] = row_array[:, :length], row_array[:, length:]
        return slab, tails

    def draw_stored(dim: int) -> tuple[list[Floats], list[tuple[Floats, Floats]]]:
        """Draw random keys or values. Return them by row, and a pair for each array that stores them: what is in its
        blocks (the slab), and the newest tokens of each row, which have no block yet (the tails).
        """
        tokens = [length + TAIL_TOKENS for length in lengths]
        if variant.kv_bits is None or variant.quant_group is None:
            unquantized = [_draw_numbers(random, _KV_HEADS, length, dim) for length in tokens]
            return unquantized, [lay_out(unquantized)]
        each = [_draw_quantized(random, length, dim, variant.kv_bits, variant.quant_group) for length in tokens]
        parts = zip(*(parts for _, parts in each), strict=True)
        return [dequantized for dequantized, _ in each], [lay_out(part) for part in parts]

    keys, stored_keys = draw_stored(variant.key_dim)
    values, stored_values = draw_stored(0 if variant.latent else variant.value_dim)
    if variant.latent:
        values = [k[..., : variant.value_dim] for k in keys]
    visible_slice = slice(None if window is None else -window, None)
    scale, softcap = map(float, factors)
    expected = [
        _reference_attention(
            query,
            k[:, visible_slice],
            v[:, visible_slice],
            scale,
            softcap,
            sinks if variant.sinks else None,
            slopes if variant.alibi else None,
        )
        for query, k, v in zip(queries, keys, values, strict=True)
    ]

    def pad_heads(numbers: Floats) -> mx.array:
        return mx.array(np.pad(numbers, (0, max(0, SMALL - heads))))

    def to_slab(numbers: Floats) -> mx.array:
        return _to_mlx(numbers, variant.kv_dtype) if variant.kv_bits is None else mx.array(numbers.view(np.uint32))

    key_arrays, value_arrays = stored_keys[0], None if variant.latent else stored_values[0]
    scales_and_biases = [
        tuple(_to_mlx(array, variant.kv_dtype) for array in (k[0], v[0], k[1], v[1]))
        for k, v in zip(stored_keys[1:], stored_values[1:], strict=True)
    ]
    row_lengths = np.array(lengths, np.int32) + unseen_tokens
    work = make_work_list(row_lengths, TAIL_TOKENS, AttentionWindow(window), variant.geometry.partition)
    inputs = DecodeInputs(
        queries=_to_mlx(queries[:, :, None], variant.dtype),
        keys=to_slab(key_arrays[0]),
        values=None if value_arrays is None else to_slab(value_arrays[0]),
        tail_keys=to_slab(key_arrays[1]),
        tail_values=None if value_arrays is None else to_slab(value_arrays[1]),
        tables=mx.array(pad_tables(tables)),
        plan=mx.array(work.plan),
        factors=mx.array(factors),
        sinks=pad_heads(sinks),
        slopes=pad_heads(slopes),
        scales=scales_and_biases[0] if scales_and_biases else (),
        biases=scales_and_biases[1] if scales_and_biases else (),
    )
    return DecodeProblem(inputs, work.items, np.stack(expected)[:, :, None])


@dataclass(frozen=True)
class PrefillProblem:
    """A test of the prefill kernel: inputs, work item count, and `expected` `[tokens, query_heads, 1, value_dim]`."""

    inputs: PrefillInputs
    items: int
    expected: npt.NDArray[np.float64]


def make_prefill_problem(variant: PrefillVariant, window: int | None) -> PrefillProblem:
    """Return a prefill problem of `PIECES` in scattered blocks. Memory that no row owns or no query sees is NaN."""
    random = np.random.default_rng(7)
    heads = _KV_HEADS * variant.group
    ends = [end for _, end in PIECES]
    tables, slots = _scatter_blocks(ends, variant.block_size, random.permutation)
    sinks = _draw_numbers(random, heads)
    factors = np.array([variant.key_dim**-0.5, _SOFTCAP if variant.softcap else 0.0], np.float32)
    scale, softcap = map(float, factors)
    slots_of_slab = (int(tables.max()) + 1) * variant.block_size
    slabs = [np.full((_KV_HEADS, slots_of_slab, d), np.nan, np.float32) for d in (variant.key_dim, variant.value_dim)]
    queries, pieces, expected, start = [], [], [], 0
    for (first, end), piece_slots in zip(PIECES, slots, strict=True):
        piece_arrays = [_draw_numbers(random, _KV_HEADS, end, slab.shape[2]) for slab in slabs]
        oldest_token = 0 if window is None else max(0, first + 1 - window)
        for slab, array in zip(slabs, piece_arrays, strict=True):
            slab[:, piece_slots[oldest_token:]] = array[:, oldest_token:]
        queries.append(_draw_numbers(random, end - first, heads, variant.key_dim))
        for token, query in enumerate(queries[-1], start=first):
            visible_slice = slice(0 if window is None else max(0, token + 1 - window), token + 1)
            keys, values = (mine[:, visible_slice] for mine in piece_arrays)
            extra = sinks if variant.sinks else None
            expected.append(_reference_attention(query, keys, values, scale, softcap, extra, slopes=None))
        pieces.append(PrefillPiece(start, start + end - first, first, None, piece_slots.astype(np.int32)))
        start += end - first
    work = make_prefill_work_list(pieces, variant.block_size, AttentionWindow(window), variant.tile)
    inputs = PrefillInputs(
        queries=_to_mlx(np.concatenate(queries)[:, :, None], variant.dtype),
        keys=_to_mlx(slabs[0], variant.kv_dtype),
        values=_to_mlx(slabs[1], variant.kv_dtype),
        tables=mx.array(work.tables),
        plan=mx.array(work.plan),
        factors=mx.array(factors),
        sinks=mx.array(np.pad(sinks, (0, max(0, SMALL - heads)))),
    )
    return PrefillProblem(inputs, work.items, np.stack(expected)[:, :, None])


def _draw_quantized(
    random: np.random.Generator, tokens: int, dim: int, bits: int, group: int
) -> tuple[Floats, tuple[Floats, Floats, Floats]]:
    """Return random keys or values of a row `[kv_heads, tokens, dim]` between -2 and 3, and the codes (32-bit words,
    bit-cast to floats), scales and biases that stand for them exactly, in every dtype.
    """
    codes = random.integers(0, 1 << bits, (_KV_HEADS, tokens, dim), np.uint32)
    groups = (_KV_HEADS, tokens, dim // group)
    scales = (random.integers(2, 5, groups) / (1 << bits)).astype(np.float32)
    biases = (random.integers(-16, -7, groups) / 8).astype(np.float32)
    in_words = codes.reshape(_KV_HEADS, tokens, -1, 32 // bits) << np.arange(0, 32, bits, dtype=np.uint32)
    words = np.bitwise_or.reduce(in_words, axis=-1).view(np.float32)
    dequantized = np.repeat(scales, group, axis=2) * codes.astype(np.float32) + np.repeat(biases, group, axis=2)
    return dequantized, (words, scales, biases)


def make_inputs_that_expose_copies(inputs: Inputs) -> Inputs:
    """Return inputs whose slabs give a wrong result if they are copied. Each is a strided view of a buffer that begins
    with the slab's numbers: a kernel that ignores strides reads these, and from a contiguous copy it reads others.
    """

    def make_strided_view(slab: mx.array) -> mx.array:
        heads, slots, dim = slab.shape
        numbers = slab.reshape(-1)
        return mx.concatenate([numbers, mx.zeros_like(numbers)]).reshape(heads, 2 * slots, dim)[:, ::2]

    def stride_arena_arrays(arrays: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        return (*map(make_strided_view, arrays[:2]), *arrays[2:])  # the others are the tail's

    keys = make_strided_view(inputs.keys)
    if isinstance(inputs, PrefillInputs):
        return replace(inputs, keys=keys, values=make_strided_view(inputs.values))
    values = None if inputs.values is None else make_strided_view(inputs.values)
    scales, biases = map(stride_arena_arrays, (inputs.scales, inputs.biases))
    return replace(inputs, keys=keys, values=values, scales=scales, biases=biases)


def _draw_numbers(random: np.random.Generator, *shape: int) -> Floats:
    """Return random numbers that every dtype holds exactly."""
    return (np.clip(np.rint(32 * random.standard_normal(shape)), -127, 127) / 32).astype(np.float32)


def _to_mlx(numbers: Floats, dtype: str) -> mx.array:
    return mx.array(numbers).astype(getattr(mx, dtype))


def _scatter_blocks(
    lengths: Sequence[int], block_size: int, permutation: Callable[[int], npt.NDArray[np.int64]]
) -> tuple[npt.NDArray[np.int32], list[npt.NDArray[np.int64]]]:
    """Return block tables `[rows, blocks]` in a random order, padded with an unused block, and each row's slots."""
    counts = [-(-length // block_size) for length in lengths]
    spare = sum(counts)
    blocks = iter(permutation(spare))
    tables = np.full((len(counts), max(counts)), spare, np.int32)
    slots = []
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        tables[row, :count] = [next(blocks) for _ in range(count)]
        position = np.arange(length)
        slots.append(tables[row, position // block_size].astype(np.int64) * block_size + position % block_size)
    return tables, slots


def _reference_attention(
    queries: Floats,
    keys: Floats,
    values: Floats,
    scale: float,
    softcap: float,
    sinks: Floats | None,
    slopes: Floats | None,
) -> npt.NDArray[np.float64]:
    """Return the softmax attention `[query_heads, value_dim]` in float64 of one query per head over all tokens, of
    which the last is the query's own: queries `[query_heads, key_dim]`, keys and values `[kv_heads, tokens, dim]`.
    """
    heads, group = len(queries), len(queries) // len(keys)
    grouped_queries = queries.astype(np.float64).reshape(len(keys), group, -1)
    scores = (scale * grouped_queries @ keys.astype(np.float64).swapaxes(1, 2)).reshape(heads, -1)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if slopes is not None:
        scores = scores + slopes.astype(np.float64)[:, None] * np.arange(1 - scores.shape[1], 1)
    extra = np.full((heads, 1), -np.inf) if sinks is None else sinks.astype(np.float64)[:, None]
    max_score = np.maximum(scores.max(axis=1, keepdims=True), extra)
    weights = np.exp(scores - max_score)
    total = weights.sum(axis=1, keepdims=True) + np.exp(extra - max_score)
    shares = (weights / total).reshape(len(keys), group, -1)
    output: npt.NDArray[np.float64] = (shares @ values.astype(np.float64)).reshape(heads, -1)
    return output


# A small problem for the kernel that writes the tail, and its answer in float64 by NumPy.


_POSITIONS = np.array([0, 5, 77, 100_003], np.int32)
NUM_NEAR_ROWS = 3
"""The rows after these are so far on in their texts that 16 bits do not hold their positions."""
_TAIL_COLUMNS, _COLUMN = 16, 6
_QUERY_HEADS, _TAIL_KV_HEADS = 3, 2
_EPS = 1e-5

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TailProblem:
    """A test input of the tail-write kernel, and its expected results `expected` in float64."""

    new: NewTokens
    tail: tuple[mx.array, ...]
    columns: int
    packed_positions: mx.array
    expected: tuple[Numbers, ...]


def make_tail_problem(variant: TailWriteVariant) -> TailProblem:
    """Return a tail-write problem of rows at several positions, whose tails have a token in every other column."""
    random = np.random.default_rng(11)
    rows, rotation = len(_POSITIONS), variant.rope
    half = rotation.dims // 2

    def draw_array_and_numbers(*shape: int) -> tuple[mx.array, Numbers]:
        numbers = random.integers(-16, 17, shape) / 32  # every dtype holds them
        return mx.array(numbers.astype(np.float32)).astype(getattr(mx, variant.dtype)), numbers

    (queries, q), (keys, k), (values, v) = (
        draw_array_and_numbers(rows, heads, dim)
        for heads, dim in (
            (_QUERY_HEADS, variant.key_dim),
            (_TAIL_KV_HEADS, variant.key_dim),
            (_TAIL_KV_HEADS, variant.value_dim),
        )
    )
    weight, w = draw_array_and_numbers(variant.key_dim)
    old_keys, new_keys = draw_array_and_numbers(rows, _TAIL_KV_HEADS, _TAIL_COLUMNS, variant.key_dim)
    old_values, new_values = draw_array_and_numbers(rows, _TAIL_KV_HEADS, _TAIL_COLUMNS, variant.value_dim)
    frequencies = (rotation.base or 10000.0) ** (np.arange(half) / half)
    angle = (_POSITIONS[:, None] * rotation.scale / frequencies)[:, None]

    def normalize_and_rotate(x: Numbers, norm: bool) -> Numbers:
        if norm:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + _EPS) * w
        pairs = np.arange(rotation.dims).reshape((half, 2) if rotation.traditional else (2, half))
        first, second = pairs.T if rotation.traditional else pairs
        out = x.copy()
        out[..., first] = x[..., first] * np.cos(angle) - x[..., second] * np.sin(angle)
        out[..., second] = x[..., first] * np.sin(angle) + x[..., second] * np.cos(angle)
        return out

    new_keys[:, :, _COLUMN], new_values[:, :, _COLUMN] = normalize_and_rotate(k, variant.key_norm), v
    norm = HeadNorm(weight, _EPS)
    new = NewTokens(
        queries,
        keys,
        values,
        norm if variant.query_norm else None,
        norm if variant.key_norm else None,
        rotation,
        None if rotation.base is not None else mx.array(frequencies.astype(np.float32)),
    )
    packed_positions = mx.array(pack_positions(_TAIL_COLUMNS, _COLUMN, _POSITIONS))
    expected = (normalize_and_rotate(q, variant.query_norm)[:, :, None], new_keys, new_values)
    return TailProblem(new, (old_keys, old_values), _TAIL_COLUMNS, packed_positions, expected)


# The slopes of ALiBi, attention with linear biases: Press, Smith and Lewis, "Train Short, Test Long" (2022).


def alibi_slopes(heads: int) -> npt.NDArray[np.float32]:
    """Return the ALiBi slope of each query head, `[heads]`: what the head subtracts from a logit per token of distance.
    For powers of 2, it is `2 ** (-8 * h / heads)` for head h from 1 (section 3 of the paper).

    Other numbers of heads get the slopes of the next smaller power of 2, and then the first, third, ... slopes of the
    next larger one, as in the authors' code and the BLOOM and MPT models.
    """
    power_of_two = 1 << heads.bit_length() - 1
    extra_exponents = -4 * np.arange(1, 2 * (heads - power_of_two), 2) / power_of_two
    exponents = np.concatenate([-8 * np.arange(1, power_of_two + 1) / power_of_two, extra_exponents])
    return np.array(np.exp2(exponents), np.float32)
