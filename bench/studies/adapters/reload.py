"""32 requests over 4 adapters: one engine that has all of them, beside mlx-lm, which loads the model for each adapter.

    python -m cortexmlx.bench.studies.adapters.reload [MODEL]

mlx-lm gets what suits it best: the requests are sorted by adapter, and those of an adapter are one batch. In the order
in which requests come, mlx-lm's server would load the model again for nearly every one of them. The files are read by
this package for both, since mlx-lm does not read every format; layers, adapters and generation are mlx-lm's.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cortexmlx import Engine
from cortexmlx.bench.studies.adapters.random_adapters import SEVEN, layer_sizes, write_mlx_lm_adapter
from cortexmlx.models import load_model

REQUESTS, ADAPTERS, TOKENS, PROMPT, RANK = 32, 4, 32, 24, 16


@dataclass(frozen=True)
class Seconds:
    """Wall and CPU seconds."""

    wall: float
    cpu: float

    @classmethod
    def since(cls, wall: float, cpu: float) -> Seconds:
        """Return what has passed since a moment of both clocks."""
        return cls(time.perf_counter() - wall, time.process_time() - cpu)


def prompts(vocab_size: int) -> list[list[int]]:
    """Return the prompts, none of which begins like another."""
    return [[1 + (7 * place + 31 * number) % (vocab_size - 1) for place in range(PROMPT)] for number in range(REQUESTS)]


def together(engine: Engine, folders: Sequence[Path]) -> Seconds:
    """Load the adapters into a running engine, and answer all requests in the order in which they come."""
    wall, cpu = time.perf_counter(), time.process_time()
    for number, folder in enumerate(folders):
        engine.load_adapter(str(number), folder)
    handles = [
        engine.submit(prompt, max_tokens=TOKENS, ignore_eos=True, temperature=0, adapter=str(number % ADAPTERS))
        for number, prompt in enumerate(prompts(engine.info.vocab_size))
    ]
    for handle in handles:
        assert handle.result().usage.completion_tokens == TOKENS
    return Seconds.since(wall, cpu)


def one_by_one(model: str, folders: Sequence[Path], vocab_size: int) -> Seconds:
    """Load the model with each adapter in turn, and let mlx-lm answer its requests in one batch."""
    from mlx_lm.generate import BatchGenerator

    wall, cpu = time.perf_counter(), time.process_time()
    for number, folder in enumerate(folders):
        generator = BatchGenerator(load_model(model, adapter=folder).model, max_tokens=TOKENS, stop_tokens=set())
        generator.insert(prompts(vocab_size)[number::ADAPTERS], [TOKENS] * (REQUESTS // ADAPTERS))
        count = 0
        while count < TOKENS * REQUESTS // ADAPTERS:
            count += len(generator.next()[1])
        generator.close()
    return Seconds.since(wall, cpu)


def main(model: str = "smollm2") -> None:
    """Print the seconds of both."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = stack.enter_context(Engine(model, kv_memory="256MB", max_rows=REQUESTS, speculate=False))
        sizes = layer_sizes(engine, SEVEN)
        folders = [write_mlx_lm_adapter(root / str(number), sizes, RANK, number) for number in range(ADAPTERS)]
        mine = together(engine, folders)
        vocab_size = engine.info.vocab_size
        engine.close()
        theirs = one_by_one(model, folders, vocab_size)
    print(f"{REQUESTS} requests of {PROMPT} tokens over {ADAPTERS} adapters, {TOKENS} tokens each")
    print(f"one engine with all adapters: {mine.wall:.1f} s, {mine.cpu:.1f} s of CPU time")
    print(f"mlx-lm, the model loaded for each adapter: {theirs.wall:.1f} s, {theirs.cpu:.1f} s of CPU time")


if __name__ == "__main__":
    main(*sys.argv[1:2])
