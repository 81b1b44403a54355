"""Disk loads: blocks that waiting prompts get from disk before they begin. Without mlx."""

from __future__ import annotations

from collections.abc import Mapping

from cortexmlx.disk.tier import DiskLoad, DiskTier, PieceContent
from cortexmlx.kv.prefix import Key, PrefixMatch
from cortexmlx.scheduling.job import Job, JobId

_MAX_AT_ONCE = 2
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
        return any(other is load and other.pieces is None for other in self._loads.values())

    def load_for(self, job: Job, match: PrefixMatch | None, seconds_per_token: float | None) -> DiskLoad | None:
        """Return the disk load that a job has to wait for, or can begin with; another job may have started it. Return
        None if the job begins without a load.

        If the load's `pieces` are None, it is still being read, and the job should wait for it. A job whose prompt is
        scored computes all of it.
        """
        tier = self._tier
        if tier is None or match is None or job.has_unscored_tokens:
            return None
        blocks, max_tokens = len(match.entries), job.num_reusable_tokens
        loads = self._loads.values()
        completed_load = next((e for e in loads if e.can_continue(job.tokens, job.keys, blocks, max_tokens)), None)
        if completed_load is not None or (blocks + 1) * tier.block_size > max_tokens:
            return completed_load
        active_loads = [load for load in loads if load.pieces is None]
        for load in active_loads:
            if load.is_reading_block(job.keys, blocks):
                return load
        if job.id in self._loads:
            return None
        matched_tokens = match.matched_tokens(tier.block_size)
        new_load = tier.make_load(job.tokens, job.keys, blocks, matched_tokens, max_tokens, seconds_per_token)
        if new_load is None:
            return None
        if len(active_loads) >= _MAX_AT_ONCE:
            return active_loads[0]  # of another text: the job waits for its end, and asks again
        self._loads[job.id] = new_load
        tier.start(new_load)
        return new_load

    def complete(self, load: DiskLoad, pieces: Mapping[Key, PieceContent]) -> bool:
        """Give a load the pieces that were read. Return False if no job waits for it any more."""
        if load not in self:
            return False
        load.pieces = pieces
        return True

    def release(self, job: Job) -> DiskLoad | None:
        """Remove the load of a job that has begun or never will. Return it if others may wait: they ask again."""
        load = self._loads.pop(job.id, None)
        return load if load is not None and load.pieces is None else None

    def clear(self) -> None:
        """Remove all loads."""
        self._loads.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError if too many loads are being read, or two jobs have the same load."""
        active_loads = [load for load in self._loads.values() if load.pieces is None]
        assert len(active_loads) <= _MAX_AT_ONCE, "too many loads are being read"
        assert len({id(load) for load in self._loads.values()}) == len(self._loads), "two jobs have the same load"
