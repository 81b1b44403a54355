"""Row-wise functions on logits: the likeliest tokens, the nucleus, a draw, and the mask of allowed tokens.

Every function is lazy (it builds operations and never waits for one) and treats its rows independently: a row gets the
same result alone, permuted, or beside any others. Widths: `R` rows, `V` tokens of the vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.cpu.powers_of_two import LOG2_E, exp2
from cortexmlx.execution.boundary import TokenMask

NO_TOKEN = -1
"""Stands for the token of a row of which no token can be chosen."""

_SUM_GROUP = 64  # elements per group of the two-level sum and draw
_TOP_GROUP = 16  # elements per group when looking for the likeliest tokens
_NUCLEUS_GUESS = 128  # a nucleus of at most this many tokens makes the sort behind it cheap
_LOW_32_BITS = (1 << 32) - 1


def log2_ratio_to_max(logits: mx.array) -> mx.array:
    """Return log2(p / p_max) of each token, `[R, V] float32`. p_max is the highest probability of its row."""
    return (logits - mx.max(logits, axis=-1, keepdims=True)) * LOG2_E


def log_sum_exp(logits: mx.array) -> mx.array:
    """Return log(sum(exp(logits))) of each row, `[R, 1] float32`."""
    return mx.max(logits, axis=-1, keepdims=True) + mx.log(row_sum(exp2(log2_ratio_to_max(logits))))


def row_sum(values: mx.array) -> mx.array:
    """Return row sums `[R, 1]`, added up in groups: adding 50,000 float32 terms one by one errs in the fifth digit."""
    return mx.sum(mx.sum(_split_into_groups(values, _SUM_GROUP, 0.0), axis=-1), axis=-1, keepdims=True)


def top_tokens(values: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Return the `count` largest values of each row and their ids, best first. Ties go to the lower id.

    Returns `(values [R, count], ids [R, count] int32)` of `values [R, V] float32`.

    No sort of the vocabulary: only the `count` groups of neighbouring ids with the largest maxima can hold a winner.
    An element of any other group is beaten by one element of each of those, and among equal values the lower group
    also has the lower ids.
    """
    rows, width = values.shape
    groups = -(-width // _TOP_GROUP)
    if groups <= count:
        ids = mx.broadcast_to(mx.arange(width, dtype=mx.int32), (rows, width))
        candidates = values
    else:
        grouped_values = _split_into_groups(values, _TOP_GROUP, -math.inf)
        best_groups = _largest_ids(mx.max(grouped_values, axis=-1), mx.arange(groups), count)
        candidates = mx.take_along_axis(grouped_values, best_groups[:, :, None], axis=1).reshape(rows, -1)
        ids = (best_groups[:, :, None] * _TOP_GROUP + mx.arange(_TOP_GROUP)).reshape(rows, -1)
    winners = _largest_ids(candidates, ids, count, best_first=True)
    return mx.take_along_axis(values, winners, axis=1), winners


def nucleus_threshold(weights: mx.array, top_p: mx.array) -> mx.array:
    """Return the smallest weight in each row's nucleus, `[R, 1]`. Keep the tokens whose weight is not below it.

    `weights [R, V] float32 >= 0` are probabilities up to a factor per row, `top_p [R, 1]` is in (0, 1]. A token belongs
    to the nucleus while the tokens above it hold less than `top_p` of the mass. Tokens that tie with the last one stay
    (Holtzman et al., arXiv:1904.09751; the rule is that of mlx-lm's `apply_top_p`).

    The threshold comes from a full sort, exact for any distribution. Comparisons with unpredictable outcomes are what
    costs time. So everything that is provably below the nucleus is set to zero first: either what is below a guess that
    already holds the mass, or tokens so small that all of them together could not hold the rest. Non-negative floats
    sort like their bit patterns.
    """
    width = weights.shape[-1]
    mass = top_p * row_sum(weights)
    guess, _ = top_tokens(weights, min(_NUCLEUS_GUESS, width))
    negligible = mass * ((1.0 - top_p) / (top_p * width))
    floor = mx.where(mx.sum(guess, axis=-1, keepdims=True) >= mass, guess[:, -1:], negligible)

    sorted_weights = mx.sort(mx.where(weights >= floor, weights, 0.0).view(mx.int32), axis=-1).view(mx.float32)
    mass_above = mx.cumsum(sorted_weights, axis=-1, reverse=True, inclusive=False)
    outside_count = mx.sum(mass_above >= mass, axis=-1, keepdims=True)
    # Rounding can leave the kept mass a hair short of `mass`; the floor is then the threshold.
    return mx.maximum(mx.take_along_axis(sorted_weights, outside_count, axis=-1), floor)


def draw(weights: mx.array, uniforms: mx.array) -> mx.array:
    """Draw one index per row with probability proportional to its weight, `[R] int32`. `NO_TOKEN` for a row in which
    no weight is positive, or one is NaN.

    `weights [R, N] float32 >= 0`; `uniforms [R, 2] float32` in [0, 1). It inverts the cumulative distribution in two
    levels, a group and then an element of it, each with its own uniform. So the tail of a large vocabulary is not lost
    in the rounding of one long sum. An index of weight 0 is never drawn.
    """
    grouped_weights = _split_into_groups(weights, _SUM_GROUP, 0.0)
    group, any_group = _invert_cdf(mx.sum(grouped_weights, axis=-1), uniforms[:, :1])
    group_weights = mx.take_along_axis(grouped_weights, group[:, :, None], axis=1)[:, 0]
    element, _ = _invert_cdf(group_weights, uniforms[:, 1:])
    return mx.where(any_group, group * _SUM_GROUP + element, NO_TOKEN)[:, 0]


def token_uniforms(seeds: npt.NDArray[np.uint64], token_index: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float32]:
    """Return two uniform random numbers in [0, 1) per row, `[R, 2]`: a pure function of the row's seed and the index
    of its token.

    Counter-based, with the 64-bit finalizer of SplitMix64 (Steele, Lea, Flood 2014). The numbers are multiples of
    2**-23, so that a product with a float32 sum is always below the sum.
    """
    with np.errstate(over="ignore"):
        state = _mix(_mix(seeds + np.uint64(0x9E3779B97F4A7C15)) + token_index.astype(np.uint64))
    halves = np.stack([state >> np.uint64(41), (state >> np.uint64(18)) & np.uint64((1 << 23) - 1)], axis=1)
    return halves.astype(np.float32) * np.float32(2.0**-23)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits of 64-bit integers: the finalizer of SplitMix64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _split_into_groups(values: mx.array, size: int, fill: float) -> mx.array:
    """Reshape `[R, N]` to `[R, groups, size]`, padded with `fill` to whole groups."""
    rows, width = values.shape
    padding = -width % size
    if padding:
        values = mx.pad(values, [(0, 0), (0, padding)], constant_values=fill)
    return values.reshape(rows, -1, size)


def _largest_ids(values: mx.array, ids: mx.array, count: int, best_first: bool = False) -> mx.array:
    """Return the ids `[R, count] int32` of the `count` largest values `[R, N]`. Ties go to the lower id. With
    `best_first`, the best comes first.

    The value's bits, made monotonic, and the id share one integer. So all keys are distinct, and no ranking depends on
    how a sort treats ties.
    """
    bits = (values + 0.0).view(mx.int32)  # the sum makes -0.0 equal to 0.0
    monotonic = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(mx.int64)
    sort_keys = (~monotonic << 32) | ids.astype(mx.int64)
    if count < values.shape[-1]:
        sort_keys = mx.partition(sort_keys, count - 1, axis=-1)[:, :count]
    if best_first:
        sort_keys = mx.sort(sort_keys, axis=-1)
    return (sort_keys & _LOW_32_BITS).astype(mx.int32)


def _invert_cdf(weights: mx.array, uniform: mx.array) -> tuple[mx.array, mx.array]:
    """Return the first index whose cumulative weight exceeds `uniform` of the total, `[R, 1] int32`, and whether it
    exists, `[R, 1] bool`. It does not exist if the total is 0 or NaN.
    """
    cumulative = mx.cumsum(weights, axis=-1)
    # A parallel scan may round to sums that are not quite ascending, hence the second condition.
    is_reached = (cumulative > uniform * cumulative[:, -1:]) & (weights > 0)
    index = mx.argmax(is_reached, axis=-1, keepdims=True).astype(mx.int32)
    return index, mx.take_along_axis(is_reached, index, axis=-1)


def mask_logits(logits: mx.array, mask: TokenMask) -> mx.array:
    """Return `logits [R, V]` with -inf for the tokens that the mask forbids in a row. Other rows are unchanged."""
    rows, vocab = logits.shape
    # By bytes: as words, each token would take four bytes twice.
    bits = mx.array(mask.allowed.astype("<u4").view(np.uint8))[:, :, None] >> mx.arange(8, dtype=mx.uint8)
    is_allowed = (bits & 1).reshape(len(mask.rows), -1)[:, :vocab].astype(mx.bool_)
    if len(mask.rows) == rows and (mask.rows == np.arange(rows)).all():
        return mx.where(is_allowed, logits, -mx.inf)
    masked_logits, row_indices = logits[:], mx.array(mask.rows)
    masked_logits[row_indices] = mx.where(is_allowed, logits[row_indices], -mx.inf)
    return masked_logits
