"""Prompts of chosen lengths in tokens, made of ordinary text, for tests and benchmarks on the real model."""

from __future__ import annotations

from typing import Any

TEXT = """The history of the lighthouse begins long before electricity. Fires were lit on hilltops to warn sailors of rocks and
shallow water, and in harbours towers of stone were raised so that the flame could be seen from far away. A keeper lived beside
the lamp, trimmed the wick, wound the clockwork that turned the lens and wrote down the weather of every hour. Why does a bread
dough rise? Yeast eats the sugar that enzymes make of starch and gives off carbon dioxide, which the elastic net of gluten holds.
def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
In 1869 the last spike joined two railways; 1,776 miles of track had been laid across mountains and deserts in six years. Water
boils at 100 degrees Celsius at sea level, but on a mountain of 3,000 metres it boils at 90, so beans take longer to cook there.
The committee asked three questions. First, who owns the river? Second, who may drink from it in a dry year? Third, who repairs
the dam? Nobody could answer all of them, and the oldest member proposed to ask the fish. A good proof is short and surprising,
but a useful proof shows the way to the next one. My neighbour's cat has learned to open the refrigerator; we now tie the door
with a rope, and she has begun to study knots. SELECT name, COUNT(*) FROM visits GROUP BY name ORDER BY 2 DESC LIMIT 10;
"""


def prompt_of(tokenizer: Any, tokens: int, start: int = 0) -> list[int]:
    """Exactly `tokens` token ids of ordinary text, beginning at another place for each `start`."""
    ids = list(tokenizer.encode(TEXT))
    first = start * 37 % len(ids)
    while len(ids) < first + tokens:
        ids += ids
    return ids[first : first + tokens]


LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200, 256, 333, 512, 700)
"""Twenty-four prompt lengths, around every block boundary."""
