"""How often a draft model is right, and what that would be worth on a GPU.

    python -m cortexmlx.bench.studies.speculation.draft_model [MODEL] [TOKENS]

The draft models are MODEL itself (smollm2), quantized by mlx-lm to 4 and to 3 bits in groups of 64. MODEL alone answers
the prompts first. Then its answers are replayed: the draft model guesses at each place, and what is right is taken, as
an engine does. Which guesses are right depends on neither speed nor rounding of the replay, so the acceptance is
measured. The gain is **not**: no GPU was there. It is a model of the time of a round, in decode steps of MODEL alone:

    gain = tokens of a round / (width(guesses + 1) + guesses * bytes of the draft model / bytes of MODEL)

It assumes that a decode step takes the time in which the weights are read, and that a verifying step takes `WIDTHS`
times as long: what MLX's quantized products were measured to cost on an M4 Pro (mlx#3839, mlx#3852; 5 rows are between
4 and 8). It leaves out attention, the drained pipeline and the host, so it is an upper bound. The starter model's own
weights have 4 bits already, in groups of 32, which flatters a draft model of 4 bits.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from cortexmlx import Engine, SamplingParams
from cortexmlx.bench.studies.serving.exported import export
from cortexmlx.kv.prefix import common_length
from cortexmlx.request import QueuedRequest
from cortexmlx.scheduling.job import Job, JobId
from cortexmlx.serving.config import EngineConfig
from cortexmlx.serving.drafting.draft_model import DraftModel, open_draft

PROMPTS = {
    "prose": "Write a short story about a lighthouse keeper who finds a letter.",
    "list": "List ten capitals of Europe with one fact about each.",
    "code": "Write a Python class for a stack with push, pop and peek, with docstrings and an example.",
    "rewrite": "Rewrite this with 'river' instead of 'road', and change nothing else: The road was long. Nobody on the "
    "road knew where the road began, but everybody who used the road knew where the road would end.",
    "json": "Write a JSON array of five people, each with name, age, city and email.",
    "explain": "Explain step by step how a bill becomes a law.",
}

WIDTHS = {2: (0.99, 1.25), 3: (1.13, 1.48), 4: (1.14, 1.57), 5: (1.28, 1.88)}
"""What a product of so many rows takes, in products of one row: the best and the worst shape measured."""

GUESSES = (1, 2, 3, 4)
BITS = (4, 3)
TARGET_BITS = 16


@dataclass(frozen=True)
class Acceptance:
    """What was right in rounds of `guesses` tokens."""

    guesses: int
    rounds: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """The share of guessed tokens that were right. After a wrong one, none is."""
        return self.accepted / max(1, self.drafted)

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a round brings: the right ones and one more."""
        return 1 + self.accepted / max(1, self.rounds)

    def gain(self, share: float) -> tuple[float, float]:
        """Return the least and most that the model promises for a draft model with this share of the bytes."""
        best, worst = WIDTHS[self.guesses + 1]
        low, high = (self.tokens_per_round / (width + self.guesses * share) for width in (worst, best))
        return low, high


def quantized_draft(target: Path, folder: Path, bits: int) -> Path:
    """Write the model in the folder `target` with weights of `bits` bits into `folder`, and return it."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model, config = load_model(target)
    model, config = quantize_model(model, config, 64, bits)
    folder.mkdir()
    save_model(folder, model)
    save_config(config, folder / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, folder / name)
    return folder


def replay(draft: DraftModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]], guesses: int) -> list[Acceptance]:
    """Return what a draft model guesses right of each (prompt, answer)."""
    counts = [[0, 0, 0] for _ in texts]
    jobs = []
    for number, (prompt, answer) in enumerate(texts):
        asked = QueuedRequest(tuple(prompt), SamplingParams())
        jobs.append(Job(JobId(number), asked, frozenset(), len(answer) + guesses + 2, 0.0, number, []))
        jobs[-1].tokens.append(answer[0])
    while left := [job for job in jobs if job.generated + guesses < len(texts[job.id][1])]:
        for job, guess in zip(left, draft.propose(left, guesses), strict=True):
            if guess is None:
                continue  # its prompt takes several rounds
            place, answer = job.generated, texts[job.id][1]
            right = common_length(guess.tokens, answer[place : place + len(guess.tokens)])
            for index, more in enumerate((1, len(guess.tokens), right)):
                counts[job.id][index] += more
            job.tokens += answer[place : place + right + 1]
    for job in jobs:
        draft.end(job)
    return [Acceptance(guesses, *each) for each in counts]


def total(parts: Sequence[Acceptance]) -> Acceptance:
    """Return the sum over several texts."""
    sums = (sum(getattr(part, name) for part in parts) for name in ("rounds", "drafted", "accepted"))
    return Acceptance(parts[0].guesses, *sums)


def lines(model: str, tokens: int, temperature: float) -> Iterator[str]:
    """Yield the study's table for answers of up to `tokens` tokens."""
    with TemporaryDirectory() as place:
        target = export(model, Path(place) / "target")
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=1)
        with Engine(target, speculate=False) as engine:
            prompts = [engine.encode([{"role": "user", "content": text}]) for text in PROMPTS.values()]
            answers = engine.generate_batch(prompts, params)
        texts = [(prompt, each.token_ids) for prompt, each in zip(prompts, answers, strict=True)]
        yield f"temperature {temperature:g}, answers of {', '.join(str(len(answer)) for _, answer in texts)} tokens"
        for bits in BITS:
            folder = quantized_draft(target, Path(place) / f"draft-{bits}", bits)
            share = (bits + 0.5) / TARGET_BITS  # a scale and a bias of 16 bits for 64 numbers
            draft = DraftModel(
                opened := open_draft(EngineConfig(target, draft=folder)), 16, 512, opened.info.vocab_size
            )
            for guesses in GUESSES:
                parts = replay(draft, texts, guesses)
                each = "  ".join(f"{name} {part.rate:.2f}" for name, part in zip(PROMPTS, parts, strict=True))
                low, high = total(parts).gain(share)
                yield (
                    f"{bits} bits, {guesses} at once: accepted {total(parts).rate:.3f}, "
                    f"{total(parts).tokens_per_round:.2f} tokens a round, "
                    f"modelled gain over {TARGET_BITS} bits {low:.2f} to {high:.2f}  ({each})"
                )
            draft.release()


if __name__ == "__main__":
    given = sys.argv[1:]
    for warmth in (0.0, 0.8):
        for line in lines(given[0] if given else "smollm2", int(given[1]) if len(given) > 1 else 120, warmth):
            print(line, flush=True)
