"""The optional part of the build: the BLAS shim, on Linux only. Everything else is in pyproject.toml."""

import sys

# pip looks for every package first, and says that there is no mlx-lm.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(
        f"cortexmlx needs Python 3.11 or newer, and this is Python {sys.version.split()[0]} ({sys.executable}).\n"
        "Install Python 3.12: brew install python@3.12, uv python install 3.12, or https://www.python.org/downloads/\n"
        "Then make the environment again, python3.12 -m venv --clear .venv, and activate it."
    )

from setuptools import Extension, setup

# Plain C that is loaded by ctypes, not a Python module. Optional: without a compiler the install still succeeds, and
# `cortexmlx doctor` says what is lost.
shim = Extension("cortexmlx.cpu._blas_shim", ["cortexmlx/cpu/_blas_shim.c", "cortexmlx/cpu/_rebind.c"], optional=True)

setup(ext_modules=[shim] if sys.platform == "linux" else [])
