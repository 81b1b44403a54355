"""The name of the device that computes on this machine."""

from __future__ import annotations


def device_line() -> str:
    """Such as `Apple M3 Max (Metal)` or `CPU, OpenBLAS from scipy-openblas32, 2 threads`."""
    from cortexmlx.cpu import blas
    from cortexmlx.machine import metal_device

    gpu = metal_device()
    if gpu is not None:
        return f"{gpu} (Metal)"
    return f"CPU, {blas.status()}"
