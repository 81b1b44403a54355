"""What the decode kernels ask of a GPU, counted: instructions, registers, bytes.

No GPU was available: nothing here is a time, and no time follows from it. `python -m cortexmlx.metal.lab.cost` prints
by which figures a kernel is chosen.
"""
