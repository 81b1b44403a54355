"""The kernels on an NVIDIA GPU."""
