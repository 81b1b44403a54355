"""The optional part of the build: the BLAS shim, on Linux only. Everything else is in pyproject.toml."""

import sys

from setuptools import Extension, setup

# Plain C that is loaded by ctypes, not a Python module. Optional: without a compiler the install still succeeds, and
# `cortexmlx doctor` says what is lost.
shim = Extension("cortexmlx.cpu._blas_shim", ["cortexmlx/cpu/_blas_shim.c", "cortexmlx/cpu/_rebind.c"], optional=True)

setup(ext_modules=[shim] if sys.platform == "linux" else [])
