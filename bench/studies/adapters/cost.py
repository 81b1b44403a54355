"""The cost of adapters per request: pairs of the same rows with and without them, in one run.

    python -m cortexmlx.bench.studies.adapters.cost [MODEL] [PAIRS]

One engine has no adapters, the other has eight of rank 16. A model with an adapter merged into its weights has the
shapes of one without any, so it takes the same time. The ratio is the CPU time of the engine without adapters over that
of the other one: at 1.0, adapters cost nothing. CPU time counts what the machine's other programs do not take.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from cortexmlx import Engine
from cortexmlx.bench.studies.adapters.random_adapters import ATTENTION, SEVEN, layer_sizes, write_adapter

ROWS, TOKENS, PROMPT, RANK, ADAPTERS = 16, 32, 512, 16, 8


def decode(engine: Engine, adapters: Sequence[str | None]) -> float:
    """Return the CPU seconds of 16 answers, of which row i has adapter `adapters[i % len(adapters)]`."""
    began = time.process_time()
    handles = [
        engine.submit(
            [row + 1, 2, 3],
            max_tokens=TOKENS,
            ignore_eos=True,
            temperature=0,
            cache=False,
            adapter=adapters[row % len(adapters)],
        )
        for row in range(ROWS)
    ]
    for handle in handles:
        assert handle.result().usage.completion_tokens == TOKENS
    return time.process_time() - began


def prefill(engine: Engine, adapters: Sequence[str | None]) -> float:
    """Return the CPU seconds of four prompts, one after the other."""
    began = time.process_time()
    prompt = [1 + place % 999 for place in range(PROMPT)]
    for number in range(4):
        engine.generate(prompt, max_tokens=1, cache=False, adapter=adapters[number % len(adapters)])
    return time.process_time() - began


def main(model: str = "smollm2", pairs: int = 7) -> None:
    """Print the median ratio of the pairs for each kind of work."""
    options = {"kv_memory": "256MB", "max_rows": ROWS, "token_target": None, "speculate": False}
    with tempfile.TemporaryDirectory() as root, Engine(model, **options) as plain:
        folders = {}
        for kind, targets in (("seven", SEVEN), ("two", ATTENTION)):
            sizes = layer_sizes(plain, targets)
            for number in range(ADAPTERS):
                name = f"{kind} {number}"
                folders[name] = write_adapter(Path(root) / kind / str(number), sizes, RANK, number)
        with Engine(model, adapters=folders, **options) as served:
            seven, two = ([f"{kind} {number}" for number in range(ADAPTERS)] for kind in ("seven", "two"))
            kinds = (
                ("16 rows, none of them with an adapter", decode, [None]),
                ("16 rows, seven targets, one adapter", decode, seven[:1]),
                ("16 rows, seven targets, 8 adapters", decode, seven),
                ("16 rows, seven targets, half of them with 4 adapters", decode, [None, *seven[:4], None, None, None]),
                ("16 rows, q and v, one adapter", decode, two[:1]),
                ("16 rows, q and v, 8 adapters", decode, two),
                ("16 rows, q and v or seven, 8 adapters", decode, [*seven[:4], *two[:4]]),
                ("a prompt of 512 tokens, seven targets", prefill, seven),
            )
            print(f"{plain.info.name}, {plain.info.dtype}, rank {RANK}")
            for name, work, adapters in kinds:
                work(plain, [None]), work(served, adapters)
                ratios = []
                for number in range(pairs):
                    if number % 2:
                        with_them = work(served, adapters)
                        ratios.append(work(plain, [None]) / with_them)
                    else:
                        ratios.append(work(plain, [None]) / work(served, adapters))
                print(f"{name}: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2", int(sys.argv[2]) if len(sys.argv) > 2 else 7)
