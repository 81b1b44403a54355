"""Published measurements of MLX's decode attention on Apple GPUs, to check the model. Nothing is fitted to them.

All are of long contexts with the caches defeated (buffers in turn), so they show a kernel's steady state.
"""

from __future__ import annotations

from dataclasses import dataclass

TWO_PASS = "sdpa_vector_2pass_1"
SHARED = "sdpa_vector_2pass_1_gqa"


@dataclass(frozen=True)
class Measured:
    """One published measurement of `kernel`."""

    chip: str
    kernel: str
    group: int
    """Query heads per KV head."""
    dim: int
    bandwidth: float
    """GB/s of keys and values, each byte counted once."""
    stream: float
    """GB/s that the same machine reads in a dense product or a plain reduction."""
    source: str


def _rate(kv_heads: int, dim: int, tokens: int, microseconds: float) -> float:
    """Return GB/s of half-width keys and values that are read once in `microseconds`."""
    return 2 * kv_heads * dim * 2 * tokens / microseconds / 1000


_M5_MAX = "mlx#4077, comment"
_M5_PRO = "mlx#4076"
_LARGE = "mlx#4380"

MEASURED: tuple[Measured, ...] = (
    Measured("M5 Max", SHARED, 8, 128, _rate(4, 128, 32768, 139.3), 530.0, _M5_MAX),
    Measured("M5 Max", TWO_PASS, 8, 128, _rate(4, 128, 32768, 156.2), 530.0, _M5_MAX),
    Measured("M5 Max", SHARED, 8, 64, _rate(8, 64, 32768, 186.6), 530.0, _M5_MAX),
    Measured("M5 Max", TWO_PASS, 8, 64, _rate(8, 64, 32768, 244.0), 530.0, _M5_MAX),
    Measured("M5 Pro", TWO_PASS, 1, 128, 281.0, 266.0, _M5_PRO),
    Measured("M5 Pro", TWO_PASS, 4, 128, 264.0, 266.0, _M5_PRO),
    Measured("M5 Pro", TWO_PASS, 8, 128, 190.0, 266.0, _M5_PRO),
    Measured("M5 Pro", TWO_PASS, 12, 128, 124.0, 266.0, _LARGE),
    Measured("M5 Pro", TWO_PASS, 8, 64, 119.0, 266.0, _M5_PRO),
    Measured("M5 Pro", TWO_PASS, 16, 128, 99.0, 266.0, _LARGE),
    Measured("M1 Ultra", TWO_PASS, 8, 256, 180.0, 680.0, "mlx#3837"),
)
"""The measurements, those of a chip from fast to slow.

- M5 Max: 40 cores, bfloat16, 32,768 tokens, times of the comment of 2026-08-17. Its author measured the stream in
  mlx#3837.
- M5 Pro: 32,768 tokens. The report names no number of cores (20 assumed, some have 16). It names no head_dim for 32 or
  8
  KV heads (128 assumed).
- M1 Ultra: 100,000 tokens, mlx 0.32.0, the middle of 170 to 190 GB/s.
"""
