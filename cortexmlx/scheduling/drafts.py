"""Speculative decoding: drafted tokens of a row, verified in one step. Without mlx."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile, zip_longest

from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.spec import TAIL_COLUMNS
from cortexmlx.scheduling.job import Job, RowTokens
from cortexmlx.scheduling.running import RunningSet

MAX_DRAFTS = TAIL_COLUMNS - 1
"""How many drafted tokens of a row a step verifies. With the token before them they take as much room as a decode
window.
"""


def can_draft(job: Job, cache: KVCache) -> bool:
    """Return whether the next tokens of a job may be drafted: it decodes, no drafts of it are in flight, and its
    sequence can be cut back, which mlx-lm's own caches do not allow. Jobs with logits processors get no drafts,
    since these functions expect a text that grows by one token at a time. Jobs that are `spoiled` get none either: see
    `accept_drafts`.
    """
    return job.can_decode and not (
        job.drafts_in_flight or job.has_logits_processors or job.is_spoiled or not cache.can_take_back_drafts
    )


def set_drafts(job: Job, tokens: Sequence[int], cache: KVCache, vocab_size: int) -> None:
    """Set the first of `tokens` as drafts that the job's next step verifies: at most `MAX_DRAFTS`, and at
    most `job.max_drafts`. A token outside the vocabulary cuts them off: nothing could be computed for it.

    Does nothing unless it `can_draft`.
    """
    if can_draft(job, cache):
        job.drafts = cut_to_vocabulary(tokens[: min(MAX_DRAFTS, job.max_drafts)], vocab_size)


def cut_to_vocabulary(tokens: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return the tokens before the first one that is outside the vocabulary."""
    return tuple(takewhile(lambda token: 0 <= token < vocab_size, tokens))


def fit_drafts(job: Job, cache: KVCache) -> None:
    """Cut a job's drafts to those for which the cache has room without preemption, and reserve that room."""
    if not (job.drafts and job.can_decode):
        job.drafts = ()
        return
    available_tokens = min(job.num_plannable, cache.max_tokens_without_preemption(job.id) - job.num_computed_tokens)
    job.drafts = job.drafts[: max(available_tokens - 1, 0)]
    tokens = job.num_computed_tokens + 1 + len(job.drafts)
    try:
        cache.reserve(job.id, tokens)
    except KVCacheFull:  # the arena may not grow any more
        job.drafts = ()
    else:
        job.reserved_tokens = max(job.reserved_tokens, tokens)


def accept_drafts(job: Job, tokens: Sequence[int], first: int, running_set: RunningSet) -> RowTokens:
    """Append the tokens that a verifying step chose for a job: one, and one more for each accepted draft. `first` is
    the row of the first of them in the step's result. Cut off what was computed for rejected drafts.

    If no token can be chosen at one of the places, a wrong draft may have left NaN in the job's last block. Then the
    job is `spoiled`, and that block is not shared.
    """
    accepted_tokens: list[int] = []
    reason, num_accepted, job.is_spoiled = None, 0, min(tokens) < 0
    for token, draft_token in zip_longest(tokens, job.drafts_in_flight):
        if token < 0:
            break
        accepted_tokens.append(token)
        reason = job.append_token(token)
        num_accepted += draft_token == token
        if reason is not None or draft_token != token:
            break
    row = RowTokens(job, accepted_tokens, first, reason, len(job.drafts_in_flight), num_accepted)
    job.drop_rejected_drafts()
    num_computed = job.num_computed_tokens
    running_set.cache.truncate(job.id, num_computed)
    running_set.note_stored(
        job, num_computed - num_computed % running_set.cache.block_size if job.is_spoiled else num_computed
    )
    return row
