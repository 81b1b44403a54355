"""Measures the cost of adapters per request: pairs of runs of the same rows with and without adapters.

python -m cortexmlx.bench.studies.adapters.cost [MODEL] [PAIRS]

One engine has no adapters, the other has 16 of rank 16: eight for seven targets, and eight for two. A model with an
adapter merged into its weights has the shapes of one without any, so it takes the same time. A ratio is the CPU time of
the engine without adapters over that of the other one: at 1.0, adapters cost nothing. CPU time counts what this process
computes, and not what the machine's other programs take.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from cortexmlx import Engine
from cortexmlx.bench.studies.adapters.random_adapters import ATTENTION, SEVEN, layer_sizes, write_adapter

ROWS, TOKENS, PROMPTS, PROMPT, RANK, ADAPTERS = 16, 32, 4, 512, 16, 8

AdapterNames = Sequence[str | None]
TimedWork = Callable[[Engine, AdapterNames], float]
SEVENS: AdapterNames = [f"seven {number}" for number in range(ADAPTERS)]
TWOS: AdapterNames = [f"two {number}" for number in range(ADAPTERS)]


def time_decode(engine: Engine, adapters: AdapterNames) -> float:
    """Return the CPU seconds of 16 answers. Row i has adapter `adapters[i % len(adapters)]`."""
    start_time = time.process_time()
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
    return time.process_time() - start_time


def time_prefill(engine: Engine, adapters: AdapterNames) -> float:
    """Return the CPU seconds of some prompts, one after the other."""
    start_time = time.process_time()
    prompt = [1 + position % (engine.info.vocab_size - 1) for position in range(PROMPT)]
    for number in range(PROMPTS):
        engine.generate(prompt, max_tokens=1, cache=False, adapter=adapters[number % len(adapters)])
    return time.process_time() - start_time


KINDS: tuple[tuple[str, TimedWork, AdapterNames], ...] = (
    ("16 rows, none of them with an adapter", time_decode, [None]),
    ("16 rows, seven targets, one adapter", time_decode, SEVENS[:1]),
    ("16 rows, seven targets, 8 adapters", time_decode, SEVENS),
    ("16 rows, half of them with 4 adapters of seven targets", time_decode, [None, *SEVENS[:4], None, None, None]),
    ("16 rows, q and v, one adapter", time_decode, TWOS[:1]),
    ("16 rows, q and v, 8 adapters", time_decode, TWOS),
    ("16 rows, 4 adapters of seven targets and 4 of two", time_decode, [*SEVENS[:4], *TWOS[:4]]),
    ("a prompt of 512 tokens, seven targets", time_prefill, SEVENS),
)
"""The kinds of work, and the adapters of its rows."""


@dataclass(frozen=True)
class PairRatios:
    """The cost ratios of the pairs of one kind of work, without adapters over with them."""

    label: str
    ratios: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.label}: {median(self.ratios):.3f} ({min(self.ratios):.3f} to {max(self.ratios):.3f})"


def open_engine(model: str, adapters: Mapping[str, str | Path] | None) -> Engine:
    """Open an engine that drafts nothing, so that both engines of a pair take the same steps."""
    return Engine(model, adapters=adapters, kv_memory="256MB", max_rows=ROWS, token_target=None, speculate=False)


def measure_ratios(
    plain_engine: Engine, adapter_engine: Engine, kind: tuple[str, TimedWork, AdapterNames], pairs: int
) -> PairRatios:
    """Measure the ratios of one kind of work, after a run of each engine that is not counted."""
    label, work, adapters = kind
    work(plain_engine, [None])
    work(adapter_engine, adapters)
    ratios = []
    for number in range(pairs):
        if number % 2:
            adapter_seconds = work(adapter_engine, adapters)
            ratios.append(work(plain_engine, [None]) / adapter_seconds)
        else:
            ratios.append(work(plain_engine, [None]) / work(adapter_engine, adapters))
    return PairRatios(label, tuple(ratios))


def write_adapters(engine: Engine, root: Path) -> dict[str, str | Path]:
    """Write the adapters of all names for an engine's model, and return their folders."""
    folders: dict[str, str | Path] = {}
    for names, targets in ((SEVENS, SEVEN), (TWOS, ATTENTION)):
        sizes = layer_sizes(engine, targets)
        for number, name in enumerate(names):
            folders[str(name)] = write_adapter(root / str(name), sizes, RANK, number)
    return folders


def main(model: str = "smollm2", pairs: int = 7) -> None:
    """Measure and print the median ratio of the pairs for each kind of work."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plain_engine = stack.enter_context(open_engine(model, None))
        adapter_engine = stack.enter_context(open_engine(model, write_adapters(plain_engine, root)))
        print(f"{plain_engine.info.name}, {plain_engine.info.dtype}, rank {RANK}")
        for kind in KINDS:
            print(measure_ratios(plain_engine, adapter_engine, kind, pairs), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2", int(sys.argv[2]) if len(sys.argv) > 2 else 7)
