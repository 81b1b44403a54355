"""Text that attacks a terminal, and what a terminal may get."""

from __future__ import annotations

import re

BIDI = "".join(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)))
HOSTILE = (
    "\x1b[2J\x1b[1;1H",
    "\x1b]0;FORGED title\x07",
    "\x1b]52;c;Rk9SR0VE\x07",
    "\x1b]8;;http://forged.example\x1b\\link\x1b]8;;\x1b\\",
    "\x1b[35;45mcolours",
    "\x1bc\x1b(0\x1b7\x1b8",
    "\x1b[6n\x1b[c\x1b[?1049h",
    "\x1bP$q\x1b\\\x1b_x\x1b\\\x1b^y\x1b\\",
    "\x9b2J\x9d0;FORGED\x9c\x90q\x9c\x85",
    "over\rFORGED",
    "back\x08\x08\x08FORGED\x7f\x7f",
    "\x07\x0b\x0c\x0e\x0f\x05",
    f"safe\u202egpj.exe {BIDI}",
    "hidden\U000e0041\U000e0042\u200b",
    "[red]markup[/red] [link=http://forged.example]x[/link] [/no] :smile:",
)
OURS = re.compile(
    rb"\x1b\[(?:[0-9;]*m|\d*[ABCD]|[JK]|2K|\?(?:1|7|12|25|2004|2026)[hl])|\x1b[=>]"  # rich, prompt_toolkit and Region
)
"""The sequences that the program writes itself."""


def is_obeyed(sign: str) -> bool:
    """Return whether a terminal obeys the character, or turns the text behind it. Tabs and line feeds are none."""
    code = ord(sign)
    return (code < 32 and sign not in "\t\n") or 0x7F <= code < 0xA0 or sign in BIDI


def offences(raw: bytes) -> list[str]:
    """What stands in the bytes that a terminal got beside text and sequences of the program's own."""
    found = [str(each) for each in (b"\rFORGED", b"\x1b[35;45m", b"\x1b]", b"\x08") if each in raw]
    text = OURS.sub(b"", raw).decode("utf-8", "replace").replace("\r", "")
    return found + sorted({repr(sign) for sign in text if is_obeyed(sign)})
