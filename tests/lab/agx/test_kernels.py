"""The kernels that the table compares."""

from __future__ import annotations

from cortexmlx.metal.lab.agx.kernels import our_kernels
from cortexmlx.metal.rules import Variant
from cortexmlx.metal.shape import Kernel


def test_a_variant_has_a_decode_and_a_reduce_kernel_with_the_text_that_runs() -> None:
    v = Variant("float16", "bfloat16", 192, 128, 16, 6, sinks=True, forced_kernel=Kernel.VECTOR)
    decode, reduce = our_kernels(v)
    assert (decode.kernel, decode.name, decode.threads) == ("paged_decode", v.label, v.geometry.threads)
    assert (decode.heads, decode.slice_tokens) == (v.geometry.tile, 32)
    # 192 numbers are three pairs a lane, 128 are one pack of four, 2 bytes each.
    assert (decode.key_bytes, decode.value_bytes) == (12, 8)
    assert "typedef float16_t T;\ntypedef bfloat16_t KV;" in decode.source
    assert "constexpr int BLOCK_SIZE = 16;" in decode.source and "constexpr int GROUP = 6;" in decode.source
    assert (reduce.kernel, reduce.heads) == ("paged_reduce", None)
    assert "constexpr bool SINKS = 1;" in reduce.source


def test_of_a_matrix_kernel_the_lanes_load_a_32nd_of_what_a_simdgroup_does() -> None:
    v = Variant("float16", "float16", 192, 128, 16, 6)
    matrix, _ = our_kernels(v)
    threads = v.geometry.threads
    assert (matrix.kernel, matrix.name, matrix.threads, matrix.heads) == ("paged_matrix", v.label, threads, 6)
    assert (matrix.key_bytes, matrix.value_bytes) == (12, 8)
    assert "constexpr int TOKENS = 1;" in matrix.source and "constexpr int PARTS = 1;" in matrix.source


def test_block_sizes_share_a_reduce_kernel() -> None:
    texts = {list(our_kernels(Variant("float16", "float16", 64, 64, size, 4)))[1].source for size in (8, 128)}
    assert len(texts) == 1
