"""The wide kernel, paged_wide.metal: which shapes it serves, how it fills a threadgroup, and how it is called."""

from __future__ import annotations

from functools import cached_property

from cortexmlx.metal.matrix import COLUMNS
from cortexmlx.metal.results import PARTIAL
from cortexmlx.metal.shape import SIMDGROUP, AttentionShape, Kernel, KernelGeometry, ShapeRule, item_bytes
from cortexmlx.metal.sources import WORK
from cortexmlx.metal.work import STRUCTS

SLICE = 16
"""Tokens of a slice. A part's share of 16 latent keys fits the registers beside its part of the output."""
_GAP = 4
"""Floats between the scores of two queries in threadgroup memory, so that lanes write to different banks."""


class WideGeometry(KernelGeometry):
    """The wide kernel's threadgroup: one tile of queries; each simdgroup has a share of the keys and of the values."""

    kernel = Kernel.WIDE
    name = "paged_wide"
    file = "paged_wide.metal"
    slice_tokens = SLICE
    entry = f"""{STRUCTS}
  constexpr int SHARES = (GROUP * TOKENS + 7) / 8, QUERIES = WidePart<KEY_DIM, VALUE_DIM, PARTS, LATENT>::QUERIES;
  alignas(16) threadgroup T shared_queries[PARTS * QUERIES];
  alignas(16) threadgroup float shared_scores[2 * PARTS * 8 * (SLICE + 4)];
{WORK}
  const int64_t first_slot = kv_head * int64_t(arena_keys_shape[1]), first_column = row_head * tail_keys_shape[2];
  const device int* block_table = block_tables + row * block_tables_shape[1];{PARTIAL}
  paged_wide<T, KV, KEY_DIM, VALUE_DIM, BLOCK_SIZE, GROUP, TOKENS, SLICE, PARTS, LATENT, SOFTCAP>(
      queries + row_head * (GROUP * TOKENS * KEY_DIM),
      PagedHeads<KV, KEY_DIM>{{
          arena_keys + first_slot * KEY_DIM, tail_keys + first_column * KEY_DIM, block_table, work.arena_tokens}},
      PagedHeads<KV, VALUE_DIM>{{
          arena_values + first_slot * VALUE_DIM, tail_values + first_column * VALUE_DIM, block_table,
          work.arena_tokens}},
      work.first, work.last, of_rows[row].start, of_rows[row].end, score_factors[0], score_factors[1], share * 8,
      results,
      shared_queries, shared_scores, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""
    rules = (
        ShapeRule(
            lambda s: s.latent or max(s.key_dim, s.value_dim) > 256,
            "what is no wider than 256 fits the registers of one simdgroup, which needs no barriers",
        ),
        ShapeRule(
            lambda s: s.key_dim <= 576 and s.value_dim <= 512,
            "a key of more than 576 numbers, or a value of more than 512, does not fit the registers of a threadgroup",
        ),
        ShapeRule(lambda s: s.kv_bits is None, "the wide kernel reads no quantized keys and values"),
        ShapeRule(
            lambda s: not s.alibi, "no model adds ALiBi's slopes to the scores of wide heads, and the kernel does not"
        ),
        ShapeRule(
            lambda s: 0 <= s.key_dim - s.value_dim <= 64 if s.latent else True,
            "a latent key has its value's numbers and up to 64 more",
        ),
        ShapeRule(
            lambda s: s.key_dim % (8 * _head_parts(s)) == 0 and s.value_dim % (8 * _head_parts(s)) == 0,
            "the shares of 4 simdgroups (8 for latent keys of more than 256 numbers that are not float16) must be cut "
            "into matrices of 8 rows: keys and values must be multiples of 32 (or 64)",
        ),
    )

    @property
    def tile(self) -> int:
        """Queries that one threadgroup holds: the rows of a matrix of weights."""
        return COLUMNS

    @property
    def slices(self) -> int:
        """Always 1: all simdgroups of a threadgroup work on the same tokens."""
        return 1

    @property
    def parts(self) -> int:
        """Parts into which a head is cut: as few as leave room in the registers, as each part adds up all scores."""
        return _head_parts(self.shape)

    @property
    def cycles(self) -> float:
        """Estimated cycles per token, as in the base class. In each tile, each number of a key and of a value takes a
        64th of a product (20.9 cycles) and its share of the loads. Each part adds up all scores, and spends 12
        cycles on slots and the softmax.
        """
        numbers = self.shape.key_dim + self.shape.value_dim
        return self.tiles * (numbers * (0.4 if self.shape.kv_dtype == "bfloat16" else 0.37) + 12 * self.parts)

    @property
    def threadgroups(self) -> int:
        """Threadgroups for one work item and KV head: one for each tile, because the parts add up their scores."""
        return self.tiles

    @cached_property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return SIMDGROUP * self.parts

    @property
    def threadgroup_bytes(self) -> int:
        """Threadgroup memory in bytes: the tile's queries, and two slices of every part's scores. A lane has its
        queries in chunks of 8 numbers, and 4 for the rest of a latent key.
        """
        shape, parts = self.shape, self.parts
        rest = 4 if shape.latent and shape.key_dim > shape.value_dim else 0
        chunks = -(-(shape.value_dim if shape.latent else shape.key_dim) // parts // 32)
        queries = parts * SIMDGROUP * (chunks * 8 + rest) * item_bytes(shape.dtype)
        return queries + 4 * 2 * parts * COLUMNS * (SLICE + _GAP)

    @property
    def template(self) -> list[tuple[str, int | bool]]:
        """Template arguments TOKENS (query tokens of a row), SLICE (tokens of a slice), PARTS (parts of a head),
        LATENT (whether values lie in their keys) and SOFTCAP.
        """
        shape = self.shape
        return [
            ("TOKENS", shape.query_tokens),
            ("SLICE", SLICE),
            ("PARTS", self.parts),
            ("LATENT", shape.latent),
            ("SOFTCAP", shape.softcap),
        ]


def _head_parts(shape: AttentionShape) -> int:
    """Return into how many parts a head is cut. Latent keys stay in registers, where every dtype but float16 becomes
    float32 for the products. So longer ones need 8 parts.
    """
    return 8 if shape.latent and shape.value_dim > 256 and shape.kv_dtype != "float16" else 4
