"""A model of what the decode kernels cost on an Apple GPU: instructions counted here, cycles and chips as published.

No GPU was available: nothing in this package is measured by it. `python -m cortexmlx.metal.cost` prints the sheet.
"""
