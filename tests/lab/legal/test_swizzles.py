"""Every swizzle of every width, once."""

import re

from cortexmlx.metal.lab.legal.frontend import swizzle_header


def members(width: int) -> list[str]:
    line = next(line for line in swizzle_header().splitlines() if line.startswith(f"#define LEGAL_SWIZZLES_{width} "))
    found = re.findall(r"\)\) (?:T|vec<T, \d>) ([a-z, ]+);", line)
    return [name for names in found for name in names.split(", ")]


def test_all_of_them_are_there_once() -> None:
    """n elements have n^2 + n^3 + n^4 swizzles, by two sets of names; the elements themselves are members."""
    for width in (2, 3, 4):
        assert len(members(width)) == len(set(members(width))) == 2 * (width**2 + width**3 + width**4) + width


def test_one_that_repeats_an_element_cannot_be_written() -> None:
    for names in re.findall(r"put = \w+\)\) (?:T|vec<T, \d>) ([a-z, ]+);", swizzle_header()):
        assert all(len(set(name)) == len(name) for name in names.split(", "))
