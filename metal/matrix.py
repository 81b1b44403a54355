"""The matrix kernel, paged_matrix.metal: which shapes it serves, how it fills a threadgroup, and how it is called."""

from __future__ import annotations

from cortexmlx.metal.results import PARTIAL
from cortexmlx.metal.shape import AttentionShape, Kernel, KernelGeometry, ShapeRule, item_bytes
from cortexmlx.metal.sources import PLAIN, QUANTIZED, WORK
from cortexmlx.metal.work import STRUCTS

COLUMNS = 8
"""Columns of a matrix: the queries that a simdgroup holds."""
MATRIX_ROW = 72
"""Floats of threadgroup memory for 64 numbers of an output. The gaps let the lanes write to different banks."""


def _make_entry(sources: str) -> str:
    """Return the Metal lines that call the matrix kernel, with the lines of `sources` that find keys and values."""
    return f"""{STRUCTS}
  constexpr int SHARES = (GROUP * TOKENS + 7) / 8 * PARTS;
  alignas(16) threadgroup T shared_queries[(KEY_DIM + 31) / 32 * 256];
  threadgroup float outputs[SLICES * 8 * 72];
  threadgroup float max_scores[SLICES * 8];
  threadgroup float sum_exp_scores[SLICES * 8];
{WORK}{sources}{PARTIAL}
  paged_matrix<T, KEY_DIM, VALUE_DIM, BLOCK_SIZE, GROUP, TOKENS, SLICES, PARTS, SOFTCAP, ALIBI>(
      queries + row_head * (GROUP * TOKENS * KEY_DIM), keys, values, block_tables + row * block_tables_shape[1],
      work.first, work.last, work.arena_tokens, of_rows[row].start, of_rows[row].end,
      score_factors[0], score_factors[1], head_slopes + kv_head * GROUP, share / PARTS, share % PARTS,
      results,
      shared_queries, outputs, max_scores, sum_exp_scores, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""


class MatrixGeometry(KernelGeometry):
    """The matrix kernel's threadgroup: each simdgroup computes a part of the values, with queries as matrix columns."""

    kernel = Kernel.MATRIX
    name = "paged_matrix"
    file = "paged_matrix.metal"
    entry, quantized_entry = _make_entry(PLAIN), _make_entry(QUANTIZED)
    rules = (
        ShapeRule(lambda s: not s.latent, "values that lie in their keys are the wide kernel's"),
        ShapeRule(
            lambda s: s.group * s.query_tokens <= 16, "the matrix kernel computes at most two tiles of 8 queries"
        ),
        ShapeRule(
            lambda s: (
                s.key_dim % 8 == 0 and s.value_dim % (8 if s.value_dim <= 128 else 16) == 0 and s.block_size % 8 == 0
            ),
            "head_dim and blocks must be cut into matrices of 8 rows",
        ),
        ShapeRule(
            lambda s: (
                min(s.key_dim, s.value_dim) >= 64
                and max(s.key_dim, s.value_dim) <= 256
                and max(s.key_dim * item_bytes(s.dtype), s.value_dim * _value_bytes(s)) <= 768
            ),
            "a head_dim below 64 does not fill a load, and one above 256, or 192 in float32, does not fit the "
            "registers",
        ),
        ShapeRule(
            lambda s: s.quant_group is None or s.value_dim // _value_parts(s) % s.quant_group == 0,
            "a part of a value must have whole quantization groups, whose numbers share their scale",
        ),
    )

    @property
    def tile(self) -> int:
        """Queries that one simdgroup holds: the columns of a matrix."""
        return COLUMNS

    @property
    def slices(self) -> int:
        """Simdgroups of a threadgroup that share the tokens of a partition."""
        return 4

    @property
    def parts(self) -> int:
        """Into how many parts each value vector is split: 2 if output and loads do not fit a simdgroup's registers."""
        return _value_parts(self.shape)

    @property
    def cycles(self) -> float:
        """Estimated cycles per token, as in the base class. A simdgroup spends 13 cycles on a token's softmax and on
        reading its slot, whether its columns are used or not. A matrix product takes 20.9 cycles for 64 numbers, so
        each number of a key, and of the simdgroup's part of a value, takes a 64th of that, and its load. Codes are
        also converted.
        """
        shape = self.shape
        numbers = shape.key_dim + shape.value_dim / self.parts
        each = 0.46 if shape.kv_bits else 0.4 if shape.kv_dtype == "bfloat16" else 0.37
        return self.tiles * self.parts * (13 + numbers * each)

    @property
    def threadgroup_bytes(self) -> int:
        """Bytes of threadgroup memory: a tile's queries; per simdgroup, outputs and its queries' maxima and totals."""
        queries = COLUMNS * -(-self.shape.key_dim // 32) * 32 * item_bytes(self.shape.dtype)
        return queries + 4 * self.threads // 32 * COLUMNS * (MATRIX_ROW + 2)

    @property
    def template(self) -> list[tuple[str, int | bool]]:
        """Template arguments TOKENS (query tokens of a row), SLICES (simdgroups that share the tokens), PARTS (parts
        of a value), SOFTCAP and ALIBI.
        """
        shape = self.shape
        return [
            ("TOKENS", shape.query_tokens),
            ("SLICES", self.slices),
            ("PARTS", self.parts),
            ("SOFTCAP", shape.softcap),
            ("ALIBI", shape.alibi),
        ]


def _value_parts(shape: AttentionShape) -> int:
    """Return into how many parts a value is cut to fit the registers: 1 or 2."""
    max_dim = 128 if _value_bytes(shape) == 2 else 96
    return 2 if shape.value_dim > max_dim and shape.value_dim % 16 == 0 else 1


def _value_bytes(shape: AttentionShape) -> int:
    """Return the bytes of one number of a value in a register. Quantized numbers become float16 there."""
    return 2 if shape.kv_bits else item_bytes(shape.kv_dtype)
