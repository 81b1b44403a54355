"""The cost of structured output for a batch: pairs of the same 16 rows with and without a schema, in one run.

    python -m cortexmlx.bench.studies.structured.cost [MODEL] [PAIRS]

Every answer has as many tokens in both runs of a pair, because the schema is a list that does not end earlier. Forced
tokens are switched off. The ratio is the seconds without a schema over the seconds with it. At 1.0, the schema costs
nothing.
"""

from __future__ import annotations

import sys
import time
from statistics import median

from cortexmlx import Engine, SamplingParams, StructuredOutput

ROWS = 16
TOKENS = 64

MEDIUM = {
    "type": "array",
    "minItems": 64,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 1},
            "name": {"type": "string", "maxLength": 40},
            "email": {"type": "string", "format": "email"},
            "status": {"enum": ["active", "invited", "suspended", "deleted"]},
            "score": {"type": "number", "minimum": 0, "maximum": 100},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 5},
            "address": {
                "type": "object",
                "properties": {
                    "street": {"type": "string"},
                    "city": {"type": "string"},
                    "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                },
                "required": ["street", "city", "zip"],
                "additionalProperties": False,
            },
            "created": {"type": "string", "format": "date-time"},
        },
        "required": ["id", "name", "email", "status", "score", "tags", "address", "created"],
        "additionalProperties": False,
    },
}
"""A schema of the size that apps use: 12 properties, two formats, two patterns, an enum."""


def seconds(engine: Engine, constrained: int) -> float:
    """Return the seconds that 16 answers take when the first `constrained` of them have the schema."""
    free = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    held = SamplingParams(max_tokens=TOKENS, ignore_eos=True, structured=StructuredOutput.json(MEDIUM))
    started = time.perf_counter()
    handles = [
        engine.submit(f"User {row} as JSON:", held if row < constrained else free, cache=False) for row in range(ROWS)
    ]
    for handle in handles:
        assert handle.result().usage.completion_tokens == TOKENS
    return time.perf_counter() - started


def main(model: str = "smollm2", pairs: int = 10) -> None:
    """Print the median ratio of the pairs, for half of the rows and for all of them."""
    with Engine(model, kv_memory="256MB", max_rows=ROWS, token_target=None, forced_tokens=False) as engine:
        for constrained in (ROWS // 2, ROWS):
            seconds(engine, constrained)
            seconds(engine, 0)
            ratios = []
            before = engine.stats()
            for number in range(pairs):
                order = (0, constrained) if number % 2 else (constrained, 0)
                took = {rows: seconds(engine, rows) for rows in order}
                ratios.append(took[0] / took[constrained])
            after = engine.stats()
            steps = pairs * TOKENS
            masks = (after.mask_seconds - before.mask_seconds) / steps * 1e3
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            print(f"{constrained} of {ROWS} rows: {median(ratios):.3f} ({spread}), masks {masks:.2f} ms a step")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2", int(sys.argv[2]) if len(sys.argv) > 2 else 10)
