"""The time that forced tokens save: pairs of documents of compact JSON with and without them.

    python -m cortexmlx.bench.studies.structured.forced [MODEL] [DOCUMENTS] [ROWS]

Both engines write documents of the same schema to the same prompts, and draft nothing else. The schema forces the
keys. The tokens of both may differ, because a forced text is tokenized as the tokenizer would do it. So the ratio is
that of the seconds per document.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from cortexmlx import Engine, SamplingParams, StructuredOutput
from cortexmlx.bench.replay.schema import RECORD

FORM = StructuredOutput.json(RECORD, compact=True)
"""A record of a shop: its keys are half of its text."""


def seconds(engine: Engine, documents: int, first: int) -> tuple[float, int]:
    """Return the seconds that `documents` documents take, and how many tokens they have."""
    params = SamplingParams(max_tokens=600, structured=FORM, temperature=0.7, seed=first)
    prompts = [f"Customer number {first + i} of the shop as JSON:" for i in range(documents)]
    started = time.perf_counter()
    answers = engine.generate_batch(prompts, params)
    took = time.perf_counter() - started
    assert all(isinstance(answer.parsed, dict) for answer in answers)
    return took, sum(answer.usage.completion_tokens for answer in answers)


def main(model: str = "smollm2", documents: int = 100, rows: int = 16) -> None:
    """Print the ratio for `documents` documents, in pairs of `rows`."""
    times: dict[bool, float] = {False: 0.0, True: 0.0}
    tokens: dict[bool, int] = {False: 0, True: 0}
    config: dict[str, Any] = {"kv_memory": "128MB", "max_rows": rows, "token_target": None, "speculate": False}
    with Engine(model, **config, forced_tokens=False) as plain, Engine(model, **config) as forcing:
        for engine in (plain, forcing):
            seconds(engine, min(rows, 2), 0)
        for number, first in enumerate(range(0, documents, rows)):
            for forced in (False, True) if number % 2 else (True, False):
                took, written = seconds(forcing if forced else plain, rows, first)
                times[forced] += took
                tokens[forced] += written
        steps = sum(forcing.stats().steps_by_reason.values()) / sum(plain.stats().steps_by_reason.values())
    ratio = times[True] / times[False]
    print(f"{rows} rows: {ratio:.3f} of the time per document, {steps:.3f} of the steps; tokens {tokens}")


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "smollm2",
        int(sys.argv[2]) if len(sys.argv) > 2 else 100,
        int(sys.argv[3]) if len(sys.argv) > 3 else 16,
    )
