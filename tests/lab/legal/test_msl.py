"""Metal text as such: every position stays, and a quotation mark is one only where Metal reads it so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.metal.lab.legal.msl import (
    FUNCTION_CONSTANT,
    INCLUDE,
    PARAMETER,
    UTILS,
    blank,
    blank_comments,
    closing,
    split,
)
from cortexmlx.metal.lab.sim.toolchain import mlx_headers


def test_the_headers_that_the_preamble_includes_are_all_found() -> None:
    """Of the installed MLX."""
    found = INCLUDE.findall((mlx_headers() / UTILS).read_text())
    assert len(found) > 2 and all((mlx_headers() / name).is_file() for name in found)
    assert INCLUDE.findall('  #  include "a.h" // why\n#include <metal_stdlib>\n//#include "b.h"\n') == ["a.h"]


def test_declarations_are_read_whole() -> None:
    found = FUNCTION_CONSTANT.search("constant metal::uint\n  blocks [[ function_constant( 26 ) ]] ;")
    assert found is not None and found.groups() == ("metal::uint", "blocks")
    found = PARAMETER.fullmatch("const device T*\n x [[buffer(5), function_constant(on)]]")
    assert found is not None and found.groups() == ("const device T*\n ", "x", "buffer(5), function_constant(on)")
    assert PARAMETER.fullmatch("device T* x") is None


@given(st.text(st.sampled_from("/*\n\" ab\\'1."), max_size=30))
def test_what_is_blanked_keeps_its_length_and_its_lines(text: str) -> None:
    for blanked in (blank_comments(text), blank(text)):
        assert len(blanked) == len(text) and [c == "\n" for c in blanked] == [c == "\n" for c in text]
    assert blank_comments(blank_comments(text)) == blank_comments(text)


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("a /* b */ c // d\ne", "a c e"),
        ('"// a" /* " */ b', '"// a" b'),
        ("'\"' /* a */ b // \"", "'\"' b"),
        ("'\\'' /* a */ '/*'", "'\\'' '/*'"),
        ("1'000 /* a's */ + 0x1'f; // b's", "1'000 + 0x1'f;"),
        ("1e-3 /* a */ .5f // b", "1e-3 .5f"),
        ("u8'\"' /* a */", "u8'\"'"),
        ("a // b \\\n c\nd", "a \\ d"),
        ("#define f(x) /* a \\\n b */ x \\ c", "#define f(x) \\ x \\ c"),
        ("/* a \\ b */ c", "c"),
        ("// it's\na /* it's */", "a"),
        ("#error don't\na // b", "#error don't a"),
        ("/* a", "/* a"),
    ],
)
def test_comments_go_and_literals_and_numbers_stay(text: str, rest: str) -> None:
    assert " ".join(blank_comments(text).split()) == rest


def test_the_inside_of_literals_can_go_too() -> None:
    assert blank('a = "double // x"; /* goto\nb */ c; // new\n').split() == ["a", "=", '"', '";', "c;"]
    assert blank("'\"' + 1'000'000 + '\\\\'") == "' ' + 1'000'000 + '  '"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a, b", ["a", " b"]),
        ("f(a, b), c[d, e], {g, h}", ["f(a, b)", " c[d, e]", " {g, h}"]),
        ("vec<T, 4> a, b", ["vec<T, 4> a", " b"]),
        ("array<vec<T, (a > b)>, 4> a, b", ["array<vec<T, (a > b)>, 4> a", " b"]),
        ("1 < 2, 3 > 4", ["1 < 2", " 3 > 4"]),
        ("T* x [[buffer(0), function_constant(on)]], uint i", ["T* x [[buffer(0), function_constant(on)]]", " uint i"]),
        ("a", ["a"]),
        (" ", []),
    ],
)
def test_commas_outside_of_brackets_split(text: str, parts: list[str]) -> None:
    assert split(text) == parts


def test_a_bracket_is_closed_by_its_own_kind() -> None:
    assert closing("f((a) < {b)", 1) == 10 and closing("f((a) < {b)", 2) == 4
    assert closing("x[a(b]", 1) == 5
    assert closing("f((a)", 1) is None
