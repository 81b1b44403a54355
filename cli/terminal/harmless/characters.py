"""Characters that a terminal obeys, or that make it show something else than is written, and what stands for them.

Each character is replaced by itself, so a control sequence that arrives in two pieces is harmless, too. Letters of
scripts that are written from right to left, and the joiners inside emoji and words, stay.
"""

from __future__ import annotations

REPLACEMENT = 0xFFFD

_OBEYED: dict[int, int | None] = {
    **{code: 0x2400 + code for code in range(0x20)},  # C0, as the pictures that Unicode has of them
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), REPLACEMENT),  # C1
}
_TURNED: dict[int, int | None] = {
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x2070)), REPLACEMENT),  # the order of what follows
    **dict.fromkeys((0x200E, 0x200F, 0x061C)),  # marks of a direction, which usual text has, too
}
_HIDDEN: dict[int, int | None] = dict.fromkeys(
    (0x180E, 0x200B, 0xFEFF, *range(0x2060, 0x2065), *range(0xFFF9, 0xFFFC), *range(0xE0000, 0xE0080))
)
"""Characters without a width, which hide text in text. Tags are among them."""

TABLE: dict[int, int | None] = _OBEYED | _TURNED | _HIDDEN | {0x09: 0x09, 0x0A: 0x0A, 0x0D: None}
"""For `str.translate`. Tabs and line feeds stay; a carriage return would write over the line."""

_LINE = TABLE | {0x09: 0x2409, 0x0A: 0x240A, 0x0D: 0x240D}


def harmless(text: str) -> str:
    """Return `text` as a terminal may have it."""
    return text.translate(TABLE)


def in_a_line(name: str) -> str:
    """Return a name, path or id for the middle of a line: line breaks and tabs are shown as pictures, too."""
    return name.translate(_LINE)
