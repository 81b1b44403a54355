"""The prefill kernel, paged_prefill.metal: which shapes it serves, how it fills a threadgroup, and how it is called."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import mlx.core as mx

from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.metal.kernels import KernelFactory, kernel_text, make_kernel
from cortexmlx.metal.rules import EVERY_KERNEL, THREADGROUP_BYTES
from cortexmlx.metal.shape import SIMDGROUP, AttentionShape, ShapeRule, item_bytes
from cortexmlx.metal.work import PREFILL_STRUCT

COLUMNS = 8
"""Columns of a matrix: queries of a simdgroup, tokens of one head."""
DIMS = 256
"""Most dimensions of a value. A lane holds a quarter of them as floats of the output. Above 64 floats it has no
registers left for the rest.
"""

ENTRY = f"""{PREFILL_STRUCT}
  constexpr int QUERY_NUMBERS = Share<KEY_DIM, 4>::CHUNKS * 256, LONGER = KEY_DIM > VALUE_DIM ? KEY_DIM : VALUE_DIM;
  constexpr int ROW = Padded<KV, LONGER>::ROW;
  alignas(16) threadgroup T shared_queries[SIMDGROUPS * QUERY_NUMBERS];
  alignas(16) threadgroup KV staged[SLICE * ROW];
  const int query_heads = queries_shape[1], kv_heads = keys_shape[0];
  const int first_head = int(threadgroup_position_in_grid.y) * HEADS;
  const int64_t first_slot = first_head / (query_heads / kv_heads) * int64_t(keys_shape[1]);
  const device PrefillItem& work = ((const device PrefillItem*)prefill_plan)[threadgroup_position_in_grid.z];
  paged_prefill<T, KV, KEY_DIM, VALUE_DIM, BLOCK_SIZE, HEADS, SLICE, SIMDGROUPS, SOFTCAP, SINKS>(
      queries, keys + first_slot * KEY_DIM, values + first_slot * VALUE_DIM, block_tables + work.blocks,
      work.begin, work.end, work.origin, work.reach, query_heads, first_head, score_factors[0], score_factors[1],
      head_sinks, attended, shared_queries, staged, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""


@dataclass(frozen=True)
class PrefillVariant(AttentionShape):
    """A prefill kernel: a threadgroup computes `tile` query tokens of a row, for `heads` query heads of a KV head."""

    @cached_property
    def _layout(self) -> tuple[int, int]:
        """Simdgroups and slice tokens of the first layout that fits in threadgroup memory; of the last if none does."""
        return next((layout for layout in _LAYOUTS if self._layout_bytes(*layout) <= THREADGROUP_BYTES), _LAYOUTS[-1])

    @property
    def simdgroups(self) -> int:
        """Simdgroups of a threadgroup. They share the keys and values that they load into threadgroup memory."""
        return self._layout[0]

    @property
    def slice_tokens(self) -> int:
        """Tokens whose keys, and then whose values, are in threadgroup memory together."""
        return self._layout[1]

    @property
    def heads(self) -> int:
        """Query heads that a threadgroup computes: the most that divide the group and leave each head a simdgroup."""
        return next(h for h in (8, 4, 2, 1) if self.group % h == 0 and h <= self.simdgroups)

    @property
    def tile(self) -> int:
        """Query tokens that one work item computes."""
        return self.simdgroups * COLUMNS // self.heads

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return SIMDGROUP * self.simdgroups

    @property
    def threadgroup_bytes(self) -> int:
        """Threadgroup memory in bytes: the queries, and a slice of keys or values."""
        return self._layout_bytes(*self._layout)

    @property
    def label(self) -> str:
        """A short description of the variant for tables and logs."""
        return f"{super().label}, prefill kernel"

    def _layout_bytes(self, simdgroups: int, tokens: int) -> int:
        """Return the threadgroup memory that a layout needs, in bytes."""
        queries = simdgroups * COLUMNS * -(-self.key_dim // 32) * 32 * item_bytes(self.dtype)
        row = -(-max(self.key_dim, self.value_dim) * item_bytes(self.kv_dtype) // 32) | 1
        return queries + tokens * row * 32


_LAYOUTS = ((8, 32), (8, 16), (4, 32), (4, 16))
"""Simdgroups and tokens of a slice, the best first."""

RULES: tuple[ShapeRule, ...] = (
    *EVERY_KERNEL,
    ShapeRule(
        lambda s: not (s.alibi or s.latent or s.kv_bits),
        "slopes, values that lie in their keys and quantized ones are not in the prefill kernel",
    ),
    ShapeRule(lambda s: s.key_dim % 8 == 0 and s.value_dim % 8 == 0, "head_dim must be cut into matrices of 8 rows"),
    ShapeRule(lambda s: s.value_dim <= DIMS, f"the output of more than {DIMS} dimensions does not fit the registers"),
)


def refusal(variant: PrefillVariant) -> str | None:
    """Return the reason why the kernel does not serve a variant, or None if it does."""
    if reason := next((rule.reason for rule in RULES if not rule.holds(variant)), None):
        return reason
    if variant.threadgroup_bytes > THREADGROUP_BYTES:
        return (
            f"a threadgroup would need {variant.threadgroup_bytes} bytes of threadgroup memory, more than "
            f"{THREADGROUP_BYTES}"
        )
    return None


@dataclass(frozen=True)
class PrefillInputs:
    """What one layer's prefill attention reads. All arrays must be row-contiguous, for the reason in `DecodeInputs`."""

    queries: mx.array
    """The queries of the pieces, `[tokens, query_heads, 1, key_dim]`."""
    keys: mx.array
    """The arena's slab of keys, `[kv_heads, slots, key_dim]`."""
    values: mx.array
    """The arena's slab of values, `[kv_heads, slots, value_dim]`."""
    tables: mx.array
    """`PrefillWorkList.tables`."""
    plan: mx.array
    """`PrefillWorkList.plan`."""
    factors: mx.array
    """(scale, softcap), float32."""
    sinks: mx.array
    """`[query_heads]` float32; ignored if the variant has no sinks."""


class PrefillKernel:
    """The prefill attention kernel, made once by `factory`."""

    def __init__(self, factory: KernelFactory) -> None:
        self._kernel = make_kernel(
            factory,
            "cortex_paged_prefill",
            inputs=["queries", "keys", "values", "block_tables", "prefill_plan", "score_factors", "head_sinks"],
            outputs=["attended"],
            entry=ENTRY,
            text=kernel_text("paged_prefill.metal"),
        )

    def __call__(
        self, variant: PrefillVariant, items: int, inputs: PrefillInputs, *, init_value: float | None = None
    ) -> mx.array:
        """Return the attention, `[tokens, query_heads, 1, value_dim]` in the dtype of the queries.

        `init_value` fills the output before the launch, which costs a launch of its own.
        """
        tokens, query_heads = inputs.queries.shape[:2]
        output: mx.array
        (output,) = self._kernel(
            inputs=[
                inputs.queries,
                inputs.keys,
                inputs.values,
                inputs.tables,
                inputs.plan,
                inputs.factors,
                inputs.sinks,
            ],
            template=_template_arguments(variant),
            grid=(variant.threads, query_heads // variant.heads, items),
            threadgroup=(variant.threads, 1, 1),
            output_shapes=[(tokens, query_heads, 1, variant.value_dim)],
            output_dtypes=[inputs.queries.dtype],
            init_value=init_value,
        )
        return output


@cache
def _template_arguments(variant: PrefillVariant) -> list[tuple[str, Any]]:
    return [
        ("T", getattr(mx, variant.dtype)),
        ("KV", getattr(mx, variant.kv_dtype)),
        ("KEY_DIM", variant.key_dim),
        ("VALUE_DIM", variant.value_dim),
        ("BLOCK_SIZE", variant.block_size),
        ("HEADS", variant.heads),
        ("SLICE", variant.slice_tokens),
        ("SIMDGROUPS", variant.simdgroups),
        ("SOFTCAP", variant.softcap),
        ("SINKS", variant.sinks),
    ]


FUSED = (64, 72, 80, 96, 128)
"""Dimensions of keys and values, both the same, at which MLX attends to more than 8 queries with one kernel. MLX also
has kernels for 192 and 256, but uses only that for 256, on an M5 for 1,024 causal queries and more without a mask
(`ScaledDotProductAttention::use_fallback`).
"""

NARROW = 128
"""The longest window, in tokens, for which our kernel is used on GPUs with matrix units.

Matrix units compute products about 4 times as fast. In a piece of n tokens, MLX computes n + window scores for each
query. For a piece of 512 tokens and a window of 128, that is 5 times as many as the window shows.
"""


def reason_for_our_kernel(
    variant: PrefillVariant, attention_window: AttentionWindow, *, matrix_units: bool
) -> str | None:
    """Return why our prefill kernel serves a layer, or None if MLX's attention does. The reason says what MLX's
    attention would do.

    The answer is the same for all pieces of a layer. If it depended on their length or on where their blocks lie, a
    request's tokens would depend on the other requests in the batch.

    `matrix_units` says whether the GPU has separate units for MLX's products (M5 and later), which `simdgroup_matrix`
    kernels do not use. Our kernel does not serve ALiBi slopes or latent attention. Those layers take the reference
    path, which makes keys and values of latents for MLX's attention. Chunks do not count as a window: they hide tokens
    only from a piece that crosses into the next chunk.
    """
    if variant.alibi or variant.latent:
        return None
    if variant.softcap:
        return "its attention has no soft cap, and would write every score"
    if variant.dtype != variant.kv_dtype:
        return "it would convert all keys and values"
    if (
        attention_window.tokens is not None
        and not attention_window.chunked
        and (attention_window.tokens <= NARROW or not matrix_units)
    ):
        return "it would compute what the window hides, and mask it"
    is_fused = variant.key_dim == variant.value_dim and variant.key_dim in FUSED
    if not is_fused and not matrix_units:
        return "it has no fused attention for this head_dim, and would write every score"
    return None


PREFILL_VARIANTS: tuple[PrefillVariant, ...] = (
    *(PrefillVariant(t, t, d, d, 32, 4) for t in ("float16", "bfloat16") for d in (64, 80, 96, 112, 128, 192, 256)),
    *(PrefillVariant("float16", "float16", 128, 128, 32, g) for g in (1, 2, 3, 8)),
    *(PrefillVariant("float32", "float32", d, d, 32, 4) for d in (64, 128)),
    PrefillVariant("float16", "float16", 192, 128, 32, 1),
    PrefillVariant("bfloat16", "bfloat16", 64, 64, 32, 8, sinks=True),
    PrefillVariant("float16", "float16", 256, 256, 32, 2, softcap=True),
)
"""The variants in `CHECKED`, the list of checked.py."""
