"""The time that a forced text without end takes, under several limits of parser items.

    python -m cortexmlx.bench.studies.structured.endless [MODEL]

After its first number, the schema forces an object in an object, and so on. llguidance computes such a text at once, up
to the limit, on the engine's thread. The time is the shortest of five.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from cortexmlx.grammar import matcher
from cortexmlx.grammar.compiler import GrammarCompiler
from cortexmlx.models import load_model
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.structured.output import StructuredOutput

LIMITS = (50_000, matcher.MOST_ITEMS, 5_000)
"""The first is llguidance's own."""

SCHEMA: dict[str, Any] = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "array",
    "prefixItems": [{"enum": [1, 2]}, {"$ref": "#/$defs/a"}],
    "minItems": 2,
    "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
}


def longest_run(tokenizer: SharedTokenizer, vocab_size: int) -> tuple[int, float]:
    """Return how many tokens are forced after the first number, and the seconds that it takes to compute them."""
    grammar = GrammarCompiler(tokenizer, vocab_size).compile(StructuredOutput.json(SCHEMA))
    took = []
    for _ in range(5):
        answer = grammar.matcher(forced_tokens=True)
        for token in tokenizer.encode("[1", add_special_tokens=False):
            assert not answer.take(token), answer.error
        started = time.perf_counter()
        run = answer.forced
        took.append(time.perf_counter() - started)
    return len(run), min(took)


def main(model: str = "smollm2") -> None:
    """Print a line for each limit."""
    loaded = load_model(model)
    tokenizer = SharedTokenizer(loaded.tokenizer)
    for limit in LIMITS:
        matcher.MOST_ITEMS = limit
        tokens, seconds = longest_run(tokenizer, len(loaded.tokenizer.get_vocab()))
        print(f"{limit:,} items: {tokens:,} forced tokens in {seconds * 1e3:.1f} ms")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
