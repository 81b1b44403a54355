"""The vector kernel, paged_decode.metal: which shapes it serves, how it fills a threadgroup, and how it is called."""

from __future__ import annotations

from functools import cached_property

from cortexmlx.metal.results import PARTIAL
from cortexmlx.metal.shape import Kernel, KernelGeometry, ShapeRule
from cortexmlx.metal.sources import PLAIN, QUANTIZED, WORK
from cortexmlx.metal.work import STRUCTS

REGISTERS = 64
"""The most floats that a thread may hold for a tile of query heads and the tokens loaded ahead. With addresses and
sums, that is at most 116 of a thread's 128 registers, and a core holds 448 threads (metal/lab/README.md).
"""


def lane_numbers(dim: int) -> int:
    """Return how many numbers of a head one lane holds: `LaneLayout<dim>::COUNT` of paged_attention.h."""
    pack = 2 if dim % 64 == 0 and dim % 128 != 0 else 4
    return -(-(dim // pack) // 32) * pack


def _make_entry(sources: str) -> str:
    """Return the Metal lines that call the vector kernel, with the lines of `sources` that find keys and values."""
    return f"""{STRUCTS}
  constexpr int SHARES = (GROUP + TILE - 1) / TILE;
  threadgroup float outputs[SLICES * VALUE_DIM];
  threadgroup float max_scores[SLICES * TILE];
  threadgroup float sum_exp_scores[SLICES * TILE];
{WORK}{sources}
  constexpr int TOKENS = 1;{PARTIAL}
  paged_decode<T, KEY_DIM, VALUE_DIM, BLOCK_SIZE, GROUP, TILE, AHEAD, SLICES, SOFTCAP, ALIBI>(
      queries + row_head * GROUP * KEY_DIM, keys, values, block_tables + row * block_tables_shape[1],
      work.first, work.last, work.arena_tokens, of_rows[row].end - 1, score_factors[0], score_factors[1],
      head_slopes + kv_head * GROUP, share * TILE,
      results,
      outputs, max_scores, sum_exp_scores, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""


class VectorGeometry(KernelGeometry):
    """The vector kernel's threadgroup: every lane holds its numbers of `tile` query heads, and loads its numbers of
    `tokens_ahead` tokens at a time.
    """

    kernel = Kernel.VECTOR
    name = "paged_decode"
    file = "paged_decode.metal"
    entry, quantized_entry = _make_entry(PLAIN), _make_entry(QUANTIZED)
    rules = (
        ShapeRule(lambda s: not s.latent, "values that lie in their keys are the wide kernel's"),
        ShapeRule(
            lambda s: s.key_dim % 4 == 0 and s.value_dim % 4 == 0,
            "the lanes load 2 or 4 numbers at a time, so a head_dim must be a multiple of 4",
        ),
        ShapeRule(
            lambda s: min(s.key_dim, s.value_dim) >= 8 and max(s.key_dim, s.value_dim) <= 256,
            "a head_dim must lie between 8 and 256: of a longer head a lane would hold more numbers than it has "
            "registers",
        ),
        ShapeRule(
            lambda s: s.query_tokens == 1,
            "several query tokens of a row are columns of the matrix kernel, which does not serve this shape",
        ),
    )

    @cached_property
    def tile(self) -> int:
        """Query heads that one simdgroup holds: a power of 2, the most up to 8 that fit its registers."""
        group = self.shape.group
        return next(tile for tile in (8, 4, 2, 1) if tile < 2 * group and self._register_floats(tile, 2) <= REGISTERS)

    @cached_property
    def tokens_ahead(self) -> int:
        """Tokens that are loaded before the first is used: the most up to 8 that fit the registers."""
        max_ahead = min(8, 32 // self.tile)
        return next(
            num_ahead
            for num_ahead in (8, 4, 2)
            if num_ahead <= max_ahead and self._register_floats(self.tile, num_ahead) <= REGISTERS
        )

    def _register_floats(self, tile: int, num_ahead: int) -> float:
        """Return the floats that a lane needs in registers for the queries, outputs and scores of a tile, and for the
        tokens loaded ahead. A query, key or value in float16 takes half a float, a dequantized one a whole float.
        """
        shape = self.shape
        of_query = 0.5 if shape.dtype == "float16" else 1.0
        of_token = 0.5 if shape.kv_dtype == "float16" and not shape.kv_bits else 1.0
        key, value = lane_numbers(shape.key_dim), lane_numbers(shape.value_dim)
        return tile * (key * of_query + value + 1) + num_ahead * max(key, value) * of_token

    @property
    def slices(self) -> int:
        """Simdgroups of a threadgroup that share the tokens of a partition. With 8, a lone row whose partitions do not
        fill the GPU is done in half the steps. Larger tiles leave a core no room for two such threadgroups, and
        several tiles are several threadgroups anyway.
        """
        return 8 if self.tile <= 2 and self.tiles == 1 else 4

    @property
    def cycles(self) -> float:
        """Estimated cycles per token, as in the base class. Each tile has one product for each query and number of a
        lane, and 4.2 cycles for each query's sums, weight and softmax. A bfloat16 takes a shift, a code takes a
        conversion. Slots and addresses take 31 cycles, and a step of tokens loaded ahead 60.
        """
        numbers = lane_numbers(self.shape.key_dim) + lane_numbers(self.shape.value_dim)
        shifts = numbers if self.shape.kv_dtype == "bfloat16" else 0
        codes = 16 + 4.2 * numbers if self.shape.kv_bits else 0
        return self.tiles * (self.tile * (numbers + 4.2) + shifts + codes + 31 + 60 / self.tokens_ahead)

    @property
    def threadgroup_bytes(self) -> int:
        """Threadgroup memory in bytes: every simdgroup's outputs, and the maximum and total of its heads."""
        return 4 * self.slices * (self.shape.value_dim + 2 * self.tile)

    @property
    def template(self) -> list[tuple[str, int | bool]]:
        """Template arguments TILE (query heads of a simdgroup), AHEAD (tokens loaded ahead), SLICES (simdgroups that
        share the tokens), SOFTCAP and ALIBI.
        """
        return [
            ("TILE", self.tile),
            ("AHEAD", self.tokens_ahead),
            ("SLICES", self.slices),
            ("SOFTCAP", self.shape.softcap),
            ("ALIBI", self.shape.alibi),
        ]
