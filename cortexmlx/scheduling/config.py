"""SchedulerConfig: the bounds and rules of a scheduler. Without mlx."""

from __future__ import annotations

from dataclasses import dataclass

from cortexmlx.scheduling.admission import WORTH_WAITING
from cortexmlx.scheduling.keep_policy import KeepPolicy


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The bounds and rules of a scheduler."""

    max_rows: int
    """Jobs that run at once."""

    prefill_budget: int
    """Prompt tokens that a step computes at most."""

    context_length: int
    """Tokens that the model can attend to."""

    vocab_size: int = 2**31
    """Tokens of the model's vocabulary. No others are drafted."""

    max_request_tokens: int | None = None
    """Bound of the prompt and answer of one request. None: the context is the only bound."""

    client_tokens: int | None = None
    """Bound of the tokens of all running jobs of one named client. None: no bound."""

    token_target: float | None = None
    """Seconds that a step should take at most while rows decode: it computes fewer prompt tokens, but 16 at least.
    None: no target.
    """

    keep: KeepPolicy | None = None
    """Which tokens a row keeps when its text gets longer than the context. None: all, so the context is a bound."""

    pipeline: bool = True
    """Plan a decode step before the result of the last one is known. False: only when nothing is in flight."""

    long_tail_rows: int = 0
    """Up to this many rows, a decode window has `LONG_TAIL_COLUMNS` columns: see `long_tail_rows` of kv/sizing.py."""

    headroom: int = 128
    """Tokens allocated beyond a prompt, so that its answer stays in one run of blocks."""

    share_prefixes: bool = True
    """A prompt uses the cached blocks of its beginning. False computes every prompt anew."""

    share_between_clients: bool = False
    """All clients share cached blocks. False: a named client shares only with itself."""

    worth_waiting: int = WORTH_WAITING
    """Tokens of a prefix in flight for which a job waits instead of computing them itself."""
