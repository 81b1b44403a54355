"""The swizzles of Metal's vectors (MSL 2.2) as member declarations: `v.xy`, `v.bgr`, `v.wwww`.

A swizzle is a property of the vector's class. A swizzle that repeats an element can only be read.
"""

from collections.abc import Iterator
from itertools import product

ELEMENTS = ("xyzw", "rgba")


def _of_width(names: str, width: int) -> Iterator[str]:
    for length in range(1, 5):
        if length == 1 and names[0] == "x":
            continue  # x, y, z and w are the elements themselves
        read: list[str] = []
        written: list[str] = []
        for letters in product(names[:width], repeat=length):
            (written if len(set(letters)) == length else read).append("".join(letters))
        element = "T" if length == 1 else f"vec<T, {length}>"
        for found, access in ((read, f"get = __get{length}"), (written, f"get = __get{length}, put = __put{length}")):
            if found:
                yield f"__declspec(property({access})) {element} {', '.join(found)};"


def header() -> str:
    """Return one macro of declarations for each width: LEGAL_SWIZZLES_2, _3 and _4."""
    lines = ["#pragma once"]
    for width in (2, 3, 4):
        members = " ".join(declaration for names in ELEMENTS for declaration in _of_width(names, width))
        lines.append(f"#define LEGAL_SWIZZLES_{width} {members}")
    return "\n".join(lines) + "\n"
