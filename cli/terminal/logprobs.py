"""Log-probabilities of an answer's tokens with their texts: as a table for people, and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from cortexmlx.types.logprobs import TokenLogprob

Text = Callable[[int], str]
"""A function that returns the text of a token id."""

_WIDEST = 24


def table(tokens: Sequence[TokenLogprob], text: Text) -> Iterator[str]:
    """Yield a line for each token: its text, log-probability and probability, and the likeliest tokens at its place."""
    from rich.cells import cell_len, set_cell_size

    shown = cache(lambda token: json.dumps(text(token), ensure_ascii=False))
    width = min(max((cell_len(shown(each.token_id)) for each in tokens), default=0), _WIDEST)
    width = max(width, len("token"))
    yield f"{'token':<{width}}  {'logprob':>8}  {'prob':>6}  likeliest"
    for each in tokens:
        name = shown(each.token_id)
        name = name if cell_len(name) > width else set_cell_size(name, width)
        others = "  ".join(f"{shown(token)} {_percent(logprob)}" for token, logprob in each.top)
        yield f"{name}  {each.logprob:8.3f}  {_percent(each.logprob):>6}  {others}".rstrip()


def listed(tokens: Sequence[TokenLogprob], text: Text) -> list[dict[str, object]]:
    """Return the content of the table for `--json`. A token that is half a character has U+FFFD in its text."""
    shown = cache(text)
    return [
        {
            "token": shown(each.token_id),
            "token_id": each.token_id,
            "logprob": each.logprob,
            "top": [{"token": shown(token), "token_id": token, "logprob": logprob} for token, logprob in each.top],
        }
        for each in tokens
    ]


def _percent(logprob: float) -> str:
    return f"{math.exp(min(logprob, 0.0)):.1%}"
