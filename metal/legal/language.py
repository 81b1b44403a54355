"""The language levels that a kernel is judged by."""

from enum import Enum


class Language(Enum):
    """The language that MLX compiles a kernel as: by the version of macOS."""

    METAL_3_1 = "3.1"
    """macOS 14; C++14."""
    METAL_4_0 = "4.0"
    """macOS 26; C++17, with lambdas."""
