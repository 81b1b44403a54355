"""In-flight prefixes: prompt blocks that a running job computes, which other jobs may wait for. Without mlx."""

from __future__ import annotations

from bisect import bisect_left

from cortexmlx.kv.prefix import Key, Match
from cortexmlx.scheduling.job import Job

WORTH_WAITING = 32
"""Prompt tokens that cost about as much as an empty step: as many as a GPU can multiply while it reads a weight."""


class InFlightPrefixes:
    """The blocks that running jobs *claim*: those of their prompts, until they are stored. A job that would compute the
    same blocks may wait for them.

    Waiting saves the shared tokens and costs a step, since the row is empty meanwhile. A step has a price whatever it
    computes, because it reads all weights. So a job waits if that saves it at least `worth_waiting` tokens, which cost
    as much. The bar is low on purpose: all waiting jobs together pay for one step, and each of them saves the tokens.
    """

    def __init__(self, block_size: int, worth_waiting: int) -> None:
        self._block_size = block_size
        self._worth_waiting = max(1, worth_waiting)
        self._owners: dict[Key, Job] = {}
        self._open: dict[Job, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._owners

    @property
    def owners(self) -> set[Job]:
        """The jobs that claim blocks."""
        return {*self._owners.values(), *self._open}

    def claim(self, job: Job) -> None:
        """Claim the blocks of a beginning job's prompt that were not cached."""
        self._open[job] = job.num_computed_tokens // self._block_size
        for key in job.keys[self._open[job] :]:
            self._owners.setdefault(key, job)

    def release(self, job: Job, blocks: int | None = None) -> list[Key]:
        """End the claims to a job's first `blocks` blocks, which are stored (None: all its claims). Return the keys
        that no job claims any more.
        """
        begin = self._open.pop(job, len(job.keys))
        if blocks is not None and blocks < len(job.keys):
            self._open[job] = blocks
        freed = [key for key in job.keys[begin:blocks] if self._owners.get(key) is job]
        for key in freed:
            self._owners.pop(key, None)
        return freed

    def awaited(self, job: Job, match: Match) -> Key | None:
        """Return the last of the blocks after `match` that another job computes, and that this job shares. None if it
        should not wait for them.
        """
        begin = len(match.entries)
        owner = self._owners.get(job.keys[begin]) if begin < len(job.keys) else None
        if owner is None:
            return None
        both = range(min(len(job.keys), len(owner.keys)))
        end = bisect_left(both, True, lo=begin + 1, key=lambda i: job.keys[i] != owner.keys[i])
        shared = min(end * self._block_size, job.num_reusable_tokens)
        if shared - begin * self._block_size - match.partial_tokens < self._worth_waiting:
            return None
        last = job.keys[end - 1]
        return last if last in self._owners else job.keys[begin]

    def keep_state(self, gate: object) -> None:
        """If `gate` is a block, have the job that computes it keep its recurrent state after it."""
        if isinstance(gate, Key) and (owner := self._owners.get(gate)) is not None:
            owner.cuts.add((owner.keys.index(gate) + 1) * self._block_size)

    def clear(self) -> None:
        """Forget all claims."""
        self._owners.clear()
        self._open.clear()
