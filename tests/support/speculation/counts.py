"""What trials have shown, in numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counts:
    """Numbers over all trials."""

    trials: int = 0
    answers: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    verifying_steps: int = 0
    preemptions: int = 0
    refusals: int = 0
    """Steps that were refused memory."""
    cancelled: int = 0
    cut: int = 0
    """Answers that a refusal of memory made shorter."""
    failed: int = 0
    """Requests that a refusal of memory let fail."""
    logprobs: int = 0
    """Log-probabilities that were compared."""
    farthest_logprob: float = 0.0
    """The largest difference of two log-probabilities, in float32."""
    ties: Counter[str] = field(default_factory=Counter)
    """Answers that differ on a proven tie, by the change of logits that explains it."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Answers of each kind of model."""
    asked: Counter[str] = field(default_factory=Counter)
    """Answers by what was asked of them."""

    def __str__(self) -> str:
        return "\n".join(f"{name:<18}{dict(v) if isinstance(v, Counter) else v}" for name, v in vars(self).items())
