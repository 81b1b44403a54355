"""A CPU simulator of MLX's custom Metal kernels. It runs the text that MLX compiles, checks it and counts memory
traffic.
"""

from .dispatch.sparse import SparseArray
from .kernel import MetalKernel, metal_kernel
from .report import BufferReport, Fault, Finding, LaunchReport
from .settings import Recording, Settings, options, recording

__all__ = [
    "BufferReport",
    "Fault",
    "Finding",
    "LaunchReport",
    "MetalKernel",
    "Recording",
    "Settings",
    "SparseArray",
    "metal_kernel",
    "options",
    "recording",
]
