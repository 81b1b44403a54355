"""What computes on this machine, in words."""

from __future__ import annotations


def device_line() -> str:
    """Such as `Apple M3 Max (Metal)` or `CPU, OpenBLAS from scipy-openblas32, 2 threads`."""
    import mlx.core as mx

    from cortexmlx.cpu import blas

    if mx.metal.is_available():
        return f"{mx.device_info().get('device_name', 'Apple GPU')} (Metal)"
    return f"CPU, {blas.status()}"
