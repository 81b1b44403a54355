"""A CPU simulator of MLX's custom Metal kernels. It runs the text that MLX compiles, checks it and counts memory
traffic.
"""

from cortexmlx.metal.lab.sim.buffers import SparseArray
from cortexmlx.metal.lab.sim.kernel import MetalKernel, metal_kernel
from cortexmlx.metal.lab.sim.report import BufferReport, Fault, Finding, LaunchReport
from cortexmlx.metal.lab.sim.settings import Recording, SimSettings, options, recording

__all__ = [
    "BufferReport",
    "Fault",
    "Finding",
    "LaunchReport",
    "MetalKernel",
    "Recording",
    "SimSettings",
    "SparseArray",
    "metal_kernel",
    "options",
    "recording",
]
