"""A model of what draft heads gain on Apple GPUs: `python -m cortexmlx.bench.studies.draft_gain`. None was timed.

A step reads its weights once, and multiplies by `ROW_PRICES`. A mixture of experts reads those that its tokens choose.
A verifying step waits for the host, computes rejected recurrences again, and comes after the head's guesses.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

GPUS = {"M4 Pro": 273.0, "M5 Pro": 307.0}
"""GB/s."""
ROW_PRICES = {
    "M4 Pro": (
        {1: 1.0, 2: 1.0, 3: 1.13, 4: 1.14, 8: 1.7, 16: 2.5, 32: 5.0},
        {1: 1.0, 2: 1.25, 3: 1.48, 4: 1.57, 8: 2.8, 16: 3.1, 32: 5.4},
    ),
    "M5 Pro": ({1: 1.0, 32: 2.1}, {1: 1.0, 32: 3.4}),
}
"""What rows cost, in the time of one, at best and at worst. M4 Pro: up to 8 as published (mlx#3839, mlx#3852), above as
modelled for an M4 Max (metal/lab/README.md). M5: a quarter of that for each more row, for its matrix units: a guess.
"""
HOST_SECONDS, HOST_SECONDS_PER_GUESS = 0.002, 0.0005
"""Of a step that cannot be built while another runs, and of a guess. A guess: a step takes 3 to 6 ms on our CPU."""
BYTES_PER_WEIGHT = 0.5625
"""4 bits, with scales and biases of groups of 64."""


@dataclass(frozen=True)
class Shape:
    """Billions of weights that a step reads, and bytes of a row's recurrent states."""

    name: str
    dense: float
    experts: float = 0.0
    chosen: float = 0.0
    """The share of the experts that a token chooses."""
    head: float = 0.0
    """Billions of weights that a guess reads: layer, `fc`, output head."""
    state_bytes: float = 0.0


SHAPES = (
    Shape("Qwen3.5-27B", 26.0, head=1.7, state_bytes=48 * 3e6),
    Shape("Qwen3.5-35B-A3B", 2.0, 32.2, 8 / 256, head=0.62, state_bytes=30 * 2e6),
    Shape("Gemma 4 26B-A4B", 2.4, 22.8, 8 / 128, head=0.4),
)


def price(prices: dict[int, float], rows: float) -> float:
    """Return what rows cost: between two known numbers, or beyond the last, by a straight line."""
    known = sorted(prices)
    after = min(max(bisect_left(known, rows), 1), len(known) - 1)
    low, high = known[after - 1], known[after]
    return prices[low] + (prices[high] - prices[low]) * (rows - low) / (high - low)


def step_seconds(shape: Shape, gpu: str, prices: dict[int, float], rows: int) -> float:
    """Return the time of a pass with one token of each of `rows` rows. An expert has its share of them."""
    read = 1 - (1 - shape.chosen) ** rows
    experts = shape.experts * read * price(prices, max(1.0, rows * shape.chosen / read)) if shape.experts else 0.0
    return (shape.dense * price(prices, rows) + experts) * BYTES_PER_WEIGHT / GPUS[gpu]


def gain(shape: Shape, gpu: str, prices: dict[int, float], rows: int, right: float) -> tuple[float, int]:
    """Return the best ratio of tokens per second, and the number of guesses; 0: the gate does not draft."""
    plain, best = step_seconds(shape, gpu, prices, rows), (1.0, 0)
    for guesses in range(1, 8):
        tokens = sum(right**place for place in range(guesses + 1))
        drafting = shape.head * price(prices, rows) * BYTES_PER_WEIGHT / GPUS[gpu] + HOST_SECONDS_PER_GUESS
        taken_back = 2 * rows * shape.state_bytes / GPUS[gpu] / 1e9 * (1 - right**guesses)
        verifying = step_seconds(shape, gpu, prices, rows * (guesses + 1)) + HOST_SECONDS + taken_back
        best = max(best, (tokens * plain / (verifying + guesses * drafting), guesses))
    return best


def main() -> None:
    """Print the table: each cell at both prices of rows, with the best number of guesses."""
    print("| model | GPU | rows | 0.6 right | 0.8 | 0.9 |\n|---|---|---|---|---|---|")
    for shape in SHAPES:
        for gpu, (low, high) in ROW_PRICES.items():
            for rows in (1, 8, 16):
                cells = []
                for right in (0.6, 0.8, 0.9):
                    least, most = sorted(gain(shape, gpu, prices, rows, right)[0] for prices in (high, low))
                    cells.append(f"{least:.2f} to {most:.2f}")
                print(f"| {shape.name} | {gpu} | {rows} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
