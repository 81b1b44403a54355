"""The rates in a picture, beside those of docs/figures.md: both are of one row of the starter model."""

from __future__ import annotations

import html
import re

APART = 1.5
"""How many times as fast one may be: a chat's sampling, its context and 32 tokens instead of 128 cost a little."""

_TABLE = re.compile(r"^\| decode, 1 row \| ([\d.]+) \|", re.MULTILINE)
_RATES = (re.compile(r"([\d.]+) tok/s · TTFT"), re.compile(r"\btg\d+\b[^±]*?([\d.]+) ±"))
"""In the chat's line of figures, and in a row of the bench's table."""


def words(drawn: str) -> str:
    """The text of a picture."""
    return html.unescape(re.sub(r"<[^>]*>", " ", drawn)).replace("\N{NO-BREAK SPACE}", " ")


def disagreement(drawn: str, figures: str) -> str | None:
    """Which rate of one row is not the table's, and what to do; None if there is none."""
    found = _TABLE.search(figures)
    if found is None:
        return "docs/figures.md has no table with a row `decode, 1 row`: name the row that pictures agree with"
    table = float(found[1])
    for rate in (float(rate) for pattern in _RATES for rate in pattern.findall(words(drawn))):
        if not table / APART <= rate <= table * APART:
            return (
                f"it shows {rate:g} tokens per second where docs/figures.md has {table:g}: make that table anew on "
                "this machine first (cortexmlx bench --against mlx-lm -n 32)"
            )
    return None
