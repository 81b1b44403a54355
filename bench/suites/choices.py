"""Times the candidates for decode attention against each other, as an engine does when it opens: see `autotune/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from cortexmlx.attention.autotuning import attention_jobs
from cortexmlx.attention.backends import choose_backend
from cortexmlx.attention.decode_methods import LayerAttention
from cortexmlx.autotune.chooser import Autotuner
from cortexmlx.bench.suites.kernels import KernelShape
from cortexmlx.kv.spec import KVSpec
from cortexmlx.stats import TimedChoice
from cortexmlx.types.arrays import dtype_name

SECONDS = 10.0
"""How long the ways of a shape are timed at most."""


def time_attention(
    shapes: Sequence[KernelShape], block_size: int, attention: str, on_run: Callable[[str], None]
) -> tuple[TimedChoice, ...]:
    """Time the candidates for decode attention with the heads of `shapes`, up to the largest shape. Nothing is kept on
    disk.

    Not in the simulator, whose times are its own.
    """
    backend = choose_backend(attention)
    if backend.selectable is None or backend.name == "sim":
        return ()
    dtype = dtype_name(mx.float16 if mx.default_device() == mx.gpu else mx.float32)
    chooser = Autotuner(None)
    for kv_heads, group, dim in dict.fromkeys((s.kv_heads, s.group, s.dim) for s in shapes):
        on_run(f"ways of decode attention, head_dim {dim}, {group} query heads per KV head")
        spec = KVSpec(kv_heads, dim, dim, dtype)
        layer = LayerAttention(dtype, kv_heads * group, spec, block_size, dim**-0.5, None, None, False, None)
        max_sizes = max(shape.rows for shape in shapes), max(shape.tokens for shape in shapes)
        chooser.choose(attention_jobs({(dim, group): layer}, backend.selectable, *max_sizes).values(), seconds=SECONDS)
    return chooser.choices()
