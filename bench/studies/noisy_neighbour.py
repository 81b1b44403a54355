"""How long a request's tokens stop while another client's request, as large as its limits allow, is served.

`python -m cortexmlx.bench.studies.noisy_neighbour` prints the longest gap between two tokens of the victim, for each
attack and for a plain request. A tiny model has fast steps, so the work of the engine's thread shows.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from cortexmlx.cpu import blas

blas.preload()

from cortexmlx import Engine, SamplingParams  # noqa: E402
from cortexmlx.request import TokenEvent  # noqa: E402
from cortexmlx.sampling_params import MOST_STOP_CHARACTERS, MOST_STOP_TOKENS, MOST_STOPS  # noqa: E402

CONTEXT = 8192
ANSWERS = 16
PATIENCE = 60.0

Params = Callable[[int], SamplingParams]
"""Returns an attack's parameters for a vocabulary size. It is called on the attacker's thread."""

ATTACKS: dict[str, Params] = {
    "plain": lambda vocab: SamplingParams(max_tokens=20, n=ANSWERS),
    "one long stop string": lambda vocab: SamplingParams(max_tokens=20, n=ANSWERS, stop=["q" * MOST_STOP_CHARACTERS]),
    "many stop strings": lambda vocab: SamplingParams(
        max_tokens=20, n=ANSWERS, stop=[f"{number:04d}zq" for number in range(MOST_STOPS)]
    ),
    "many stop tokens": lambda vocab: SamplingParams(max_tokens=20, n=ANSWERS, stop_token_ids=range(MOST_STOP_TOKENS)),
    "a bias for every token": lambda vocab: SamplingParams(
        max_tokens=20, best_of=ANSWERS, logit_bias=dict.fromkeys(range(vocab), 0.5)
    ),
    "all alternatives": lambda vocab: SamplingParams(max_tokens=20, n=ANSWERS, logprobs=100),
    "all penalties": lambda vocab: SamplingParams(
        max_tokens=20, n=ANSWERS, repetition_penalty=1.1, repetition_context=CONTEXT, presence_penalty=0.1
    ),
}


@dataclass(frozen=True)
class Outcome:
    """The result of an attack."""

    attack: str
    submitting: float
    """Seconds that its submission took on its own thread."""
    gap: float
    """The victim's longest gap between tokens, in seconds."""


def measure(engine: Engine, attack: str) -> Outcome:
    """Run one attack beside a victim that generates tokens without a pause."""
    came: list[float] = []
    flows = threading.Event()

    def listen(event: TokenEvent) -> None:
        came.append(time.perf_counter())
        if len(came) > 20:
            flows.set()

    params = SamplingParams(max_tokens=CONTEXT // 2, ignore_eos=True)
    victim = engine.submit([1, 2, 3], params, client="victim", listener=listen)
    try:
        flows.wait(PATIENCE)
        began = time.perf_counter()
        handle = engine.submit([4, 5, 6], ATTACKS[attack](engine.info.vocab_size), client="attacker")
        submitted = time.perf_counter()
        handle.result(PATIENCE)
        ended = time.perf_counter()
    finally:
        victim.cancel()
    during = [moment for moment in [*came] if began <= moment <= ended]
    gap = max((later - before for before, later in pairwise([began, *during, ended])), default=0.0)
    return Outcome(attack, submitted - began, gap)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the figures as Markdown."""
    lines = ["| attack | its submission | the victim's longest gap |", "|---|---|---|"]
    lines += [f"| {o.attack} | {o.submitting * 1e3:.1f} ms | {o.gap * 1e3:.1f} ms |" for o in outcomes]
    return "\n".join(lines)


def main() -> None:
    """Measure all attacks with one model."""
    from cortexmlx.bench.measure.random_model import write_random_model

    with tempfile.TemporaryDirectory(prefix="cortexmlx-victim-") as folder:
        model = write_random_model(Path(folder), {"num_hidden_layers": 1, "vocab_size": 32_000})
        with Engine(model, kv_memory="256MB", max_rows=ANSWERS + 1) as engine:
            print(table([measure(engine, attack) for attack in ATTACKS]))


if __name__ == "__main__":
    main()
