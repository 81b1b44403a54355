"""Pairs of Metal texts for the legality tests: what Metal takes beside what it refuses, the line marked with `//!`."""

from __future__ import annotations

from cortexmlx.metal.lab.legal import Language, complaints

SIGNATURE = (
    "[[kernel]] void k(device float* x [[buffer(0)]], const constant int& n [[buffer(1)]], "
    "device bfloat* b [[buffer(2)]], uint i [[thread_position_in_grid]]) {\n"
)


def kernel(body: str, header: str = "") -> str:
    """The text of a kernel with a float buffer x, a number n, a bfloat buffer b and its position i."""
    return f"{header}\n{SIGNATURE}{body}\n}}\n"


def said(text: str, language: Language = Language.METAL_3_1) -> list[str]:
    """Every complaint as `line: message`."""
    return [f"{c.line}: {c.message}" for c in complaints(text, language)]


def assert_refused(wrong: str, reason: str, language: Language = Language.METAL_3_1) -> None:
    """The text is refused on its marked line, for the reason."""
    line = wrong[: wrong.index("//!")].count("\n") + 1
    assert any(s.startswith(f"{line}: ") and reason in s for s in said(wrong, language)), said(wrong, language)


def assert_told_apart(right: str, wrong: str, reason: str, language: Language = Language.METAL_3_1) -> None:
    """`right` is taken; `wrong` is refused on its marked line, for the reason."""
    assert said(right, language) == []
    assert_refused(wrong, reason, language)
