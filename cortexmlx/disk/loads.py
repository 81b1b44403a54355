"""Disk loads: blocks that waiting prompts get from disk before they begin. Without mlx."""

from __future__ import annotations

from collections.abc import Mapping

from cortexmlx.disk.tier import DiskLoad, DiskTier, PieceContent
from cortexmlx.kv.prefix import Key, PrefixMatch
from cortexmlx.scheduling.job import Job, JobId

_MOST_AT_ONCE = 2
"""How many loads may be read at once. What is read waits in memory until its prompt begins."""


class DiskLoads:
    """Keeps the disk loads of waiting jobs, and starts new ones.

    A job requests one load, when its turn comes. While it is read, others may begin. Then the job begins with what was
    read, or computes it. A job whose next block is in another job's load waits for that load.
    """

    def __init__(self, tier: DiskTier | None) -> None:
        self._tier = tier
        self._loads: dict[JobId, DiskLoad] = {}

    def __contains__(self, load: object) -> bool:
        """Return whether a load is being read for a waiting job."""
        return any(own is load and own.pieces is None for own in self._loads.values())

    def load_for(self, job: Job, match: PrefixMatch | None, seconds_per_token: float | None) -> DiskLoad | None:
        """Return the disk load that a job waits for or begins with, its own or another job's; None if it begins
        without one.

        If the load's `pieces` are None, it is still being read, and the job should wait for it. A job whose prompt is
        scored computes all of it.
        """
        tier = self._tier
        if tier is None or match is None or job.has_unscored_tokens:
            return None
        blocks = len(match.entries)
        read = self._find_completed(job, blocks)
        if read is not None or (blocks + 1) * tier.block_size > job.num_reusable_tokens:
            return read
        reading = [load for load in self._loads.values() if load.pieces is None]
        for load in reading:
            if load.is_reading_block(job.keys, blocks):
                return load
        if job.id in self._loads:
            return None
        matched = match.matched_tokens(tier.block_size)
        own = tier.make_load(job.tokens, job.keys, blocks, matched, job.num_reusable_tokens, seconds_per_token)
        if own is None:
            return None
        if len(reading) >= _MOST_AT_ONCE:
            return reading[0]  # of another text: the job waits for its end, and asks again
        self._loads[job.id] = own
        tier.start(own)
        return own

    def complete(self, load: DiskLoad, pieces: Mapping[Key, PieceContent]) -> bool:
        """Give a load the pieces that were read. Return False if no job waits for it any more."""
        if load not in self:
            return False
        load.pieces = pieces
        return True

    def _find_completed(self, job: Job, blocks: int) -> DiskLoad | None:
        """Return a completed load that continues the first `blocks` blocks of a job, within the tokens that the job
        may reuse.
        """
        most = job.num_reusable_tokens
        loads = self._loads.values()
        return next((load for load in loads if load.can_continue(job.tokens, job.keys, blocks, most)), None)

    def release(self, job: Job) -> DiskLoad | None:
        """Remove the load of a job that has begun, or never will. Return the load if other jobs may still wait for
        it.
        """
        load = self._loads.pop(job.id, None)
        return load if load is not None and load.pieces is None else None

    def clear(self) -> None:
        """Remove all loads."""
        self._loads.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError if too many loads are being read, or two jobs have the same load."""
        reading = [load for load in self._loads.values() if load.pieces is None]
        assert len(reading) <= _MOST_AT_ONCE, "too many loads are being read"
        assert len({id(load) for load in self._loads.values()}) == len(self._loads), "two jobs have the same load"
