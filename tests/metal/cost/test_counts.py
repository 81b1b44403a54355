"""Counts of a launch per token, against launches whose instructions can be counted by eye."""

from __future__ import annotations

import mlx.core as mx
import pytest

from cortexmlx.metal import sim
from cortexmlx.metal.cost.counts import Counted, count
from cortexmlx.metal.cost.cycles import Kind

TOKENS = 8

SOURCE = """
  threadgroup float kept[32];
  const uint lane = thread_index_in_simdgroup;
  float sum = 0.0f;
  for (int t = 0; t < 8; t++) {
    const half4 key = ((const device half4*)keys)[t * 32 + lane];
    sum += simd_sum(float(key.x)) + simd_shuffle(sum, ushort(t)) + simd_broadcast(sum, ushort(t));
    sum += simd_shuffle_xor(sum, 1) + simd_shuffle(sum, ushort(31 - lane)) + simd_prefix_exclusive_sum(sum);
  }
  kept[lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[lane] = kept[31 - lane] * factor[0] + (simd_any(sum > 0.0f) ? 1.0f : 0.0f);
"""


@pytest.fixture(scope="module")
def counted() -> Counted:
    kernel = sim.metal_kernel(name="counted", input_names=["keys", "factor"], output_names=["out"], source=SOURCE)
    keys = mx.ones((TOKENS, 128), dtype=mx.float16)
    with sim.recording() as recorded:
        kernel(
            inputs=[keys, mx.array([2.0])],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(32,)],
            output_dtypes=[mx.float32],
        )
    return count(recorded.last, ["keys"], TOKENS, 256)


def test_bytes_are_those_of_the_tokens(counted: Counted) -> None:
    assert counted.live_bytes == 512
    assert counted.loaded == 256 and counted.amplification == 0.5
    assert counted.threadgroup_bytes == 2 * 32 * 4 / TOKENS


def test_instructions_are_a_tokens_and_the_share_of_what_is_done_once(counted: Counted) -> None:
    once = 1 / TOKENS
    assert counted.work == {
        Kind.REDUCTION: 2.0,
        Kind.SHUFFLE_SAME: 1.0,
        Kind.SHUFFLE_ANY: 1.0,
        Kind.SHUFFLE_FIXED: 2.0,
        Kind.VOTE: once,
        Kind.LOAD: 1.0 + once,  # a key, and the store of the result; the factor is a single number
        Kind.THREADGROUP: 2 * once,
        Kind.BARRIER: once,
    }
